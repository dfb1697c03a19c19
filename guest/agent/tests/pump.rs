//! `agent_api::pump` between a local terminal (or pipes) and commands of a real server. Signals belong to the process, so
//! these tests run one at a time.

mod common;

use std::fs::File;
use std::io::{PipeReader, Read, Write, pipe};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use agent_api::{ExecRequest, ExitStatus, LocalIo, Signals, Tty, WinSize, pump};
use common::{connect, sh};
use rustix::process::{Signal, getpid, kill_process};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A local terminal: what the user holds, and what the program has.
fn terminal() -> (File, OwnedFd) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let user = openpt(flags).unwrap();
    unlockpt(&user).unwrap();
    let program = ioctl_tiocgptpeer(&user, flags).unwrap();
    (user.into(), program)
}

fn is_cooked(terminal: &OwnedFd) -> bool {
    tcgetattr(terminal)
        .unwrap()
        .local_modes
        .contains(LocalModes::ICANON | LocalModes::ECHO)
}

/// Reads until the text has come.
fn wait_for(reader: &mut impl Read, seen: &mut String, wanted: &str) {
    while !seen.contains(wanted) {
        let mut buffer = [0; 4096];
        let got = reader.read(&mut buffer).unwrap();
        assert!(got > 0, "ended after {seen:?}");
        seen.push_str(std::str::from_utf8(&buffer[..got]).unwrap());
    }
}

fn read_all(mut reader: PipeReader) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

#[test]
fn pipes_are_joined_in_three_directions() {
    let _alone = alone();
    let signals = Signals::install().unwrap();
    let (stdin, mut feed) = pipe().unwrap();
    let (out, stdout) = pipe().unwrap();
    let (err, stderr) = pipe().unwrap();
    let data: Vec<u8> = (0..=255_u8).cycle().take(2_000_000).collect();
    let sent = data.clone();
    let feeder = thread::spawn(move || feed.write_all(&sent).unwrap());
    let (out, err) = (read_all(out), read_all(err));
    let mut connection = connect();
    let request = ExecRequest {
        stdin: true,
        ..sh("cat; echo over >&2; exit 4")
    };
    let io = LocalIo {
        stdin: Some(stdin.as_fd()),
        stdout: stdout.as_fd(),
        stderr: stderr.as_fd(),
        tty: false,
    };
    let status = pump(connection.exec(&request).unwrap(), &io, &signals).unwrap();
    drop((stdout, stderr));
    feeder.join().unwrap();
    assert_eq!(status, ExitStatus::Code(4));
    assert!(out.join().unwrap() == data);
    assert_eq!(err.join().unwrap(), b"over\n");
}

#[test]
fn input_that_nobody_sends_does_not_keep_the_pump() {
    let _alone = alone();
    let signals = Signals::install().unwrap();
    let (stdin, _kept_open) = pipe().unwrap();
    let (out, stdout) = pipe().unwrap();
    let request = ExecRequest {
        stdin: true,
        ..sh("echo x")
    };
    let io = LocalIo {
        stdin: Some(stdin.as_fd()),
        stdout: stdout.as_fd(),
        stderr: stdout.as_fd(),
        tty: false,
    };
    let mut connection = connect();
    assert_eq!(
        pump(connection.exec(&request).unwrap(), &io, &signals).unwrap(),
        ExitStatus::Code(0)
    );
    // The connection can be used again.
    connection.ping().unwrap();
    drop(stdout);
    assert_eq!(read_all(out).join().unwrap(), b"x\n");
}

#[test]
fn a_local_reader_that_goes_is_a_broken_pipe_there() {
    let _alone = alone();
    let signals = Signals::install().unwrap();
    let (mut out, stdout) = pipe().unwrap();
    let (err, stderr) = pipe().unwrap();
    let err = read_all(err);
    let reader = thread::spawn(move || out.read_exact(&mut [0; 10]).unwrap());
    let io = LocalIo {
        stdin: None,
        stdout: stdout.as_fd(),
        stderr: stderr.as_fd(),
        tty: false,
    };
    let begin = Instant::now();
    let status = pump(
        connect().exec(&sh("yes 2>/dev/null; echo over >&2")).unwrap(),
        &io,
        &signals,
    )
    .unwrap();
    assert!(begin.elapsed() < Duration::from_secs(90));
    reader.join().unwrap();
    drop(stderr);
    assert_eq!((status, err.join().unwrap()), (ExitStatus::Code(0), b"over\n".to_vec()));
}

#[test]
fn a_signal_to_this_process_reaches_the_command() {
    let _alone = alone();
    for (signal, expected) in [
        (Signal::TERM, 143),
        (Signal::INT, 130),
        (Signal::HUP, 129),
        (Signal::QUIT, 131),
    ] {
        let signals = Signals::install().unwrap();
        let stdout = File::open("/dev/null").unwrap();
        let io = LocalIo {
            stdin: None,
            stdout: stdout.as_fd(),
            stderr: stdout.as_fd(),
            tty: false,
        };
        let mut connection = connect();
        // A shell may catch a signal and forget it when it executes something; this command is itself when it starts.
        let sleep = ExecRequest {
            argv: vec!["sleep".into(), "60".into()],
            ..ExecRequest::default()
        };
        let running = connection.exec(&sleep).unwrap();
        kill_process(getpid(), signal).unwrap();
        let status = pump(running, &io, &signals).unwrap();
        assert_eq!(status.exit_code(), expected);
    }
}

#[test]
fn a_terminal_is_raw_meanwhile_follows_its_size_and_is_restored() {
    let _alone = alone();
    let signals = Signals::install().unwrap();
    assert!(matches!(Signals::install(), Err(agent_api::Error::SignalsTaken)));
    let (mut user, program) = terminal();
    assert!(is_cooked(&program));
    let check = program.try_clone().unwrap();
    let actor = thread::spawn(move || {
        let mut seen = String::new();
        wait_for(&mut user, &mut seen, "20 40\r\n");
        assert!(!is_cooked(&check), "the local terminal must be raw");
        let size = Winsize {
            ws_row: 33,
            ws_col: 44,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&user, size).unwrap();
        // The kernel sends this to the foreground group of a controlling terminal, which this one is not.
        kill_process(getpid(), Signal::WINCH).unwrap();
        wait_for(&mut user, &mut seen, "33 44\r\n");
        user.write_all(b"\x03").unwrap();
        user
    });
    let tty = Tty {
        size: WinSize { rows: 20, cols: 40 },
        term: None,
    };
    let script = "trap 'stty size' WINCH; stty size; while :; do sleep 0.05; done";
    let request = ExecRequest {
        tty: Some(tty),
        stdin: true,
        ..sh(script)
    };
    let io = LocalIo {
        stdin: Some(program.as_fd()),
        stdout: program.as_fd(),
        stderr: program.as_fd(),
        tty: true,
    };
    let mut connection = connect();
    let status = pump(connection.exec(&request).unwrap(), &io, &signals).unwrap();
    assert_eq!(status, ExitStatus::Signal(2));
    assert!(is_cooked(&program), "the local terminal must be as before");
    drop(actor.join().unwrap());
}

#[test]
fn a_terminal_is_restored_when_the_agent_disappears() {
    let _alone = alone();
    let signals = Signals::install().unwrap();
    let (mut user, program) = terminal();
    let mut connection = connect();
    let stream = connection.stream().try_clone().unwrap();
    let actor = thread::spawn(move || {
        wait_for(&mut user, &mut String::new(), "ready");
        stream.shutdown(std::net::Shutdown::Both).unwrap();
        user
    });
    let tty = Tty {
        size: WinSize { rows: 20, cols: 40 },
        term: None,
    };
    let request = ExecRequest {
        tty: Some(tty),
        stdin: true,
        ..sh("echo ready; sleep 60")
    };
    let io = LocalIo {
        stdin: Some(program.as_fd()),
        stdout: program.as_fd(),
        stderr: program.as_fd(),
        tty: true,
    };
    assert!(pump(connection.exec(&request).unwrap(), &io, &signals).is_err());
    assert!(is_cooked(&program));
    drop(actor.join().unwrap());
}

#[test]
fn signal_handlers_are_as_before_afterwards() {
    let _alone = alone();
    // A command inherits "ignored", so a child tells what this process has.
    let caught = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("SigCgt:\t")).unwrap();
        u64::from_str_radix(line, 16).unwrap()
    };
    let before = caught();
    let signals = Signals::install().unwrap();
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGWINCH] {
        assert!(caught() & (1 << (signal - 1)) != 0);
    }
    drop(signals);
    assert_eq!(caught(), before);
}
