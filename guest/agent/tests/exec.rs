//! The exec server and the client against each other, natively: root `/`, over a socket pair. Needs to be root for the
//! user switch. Does not test PID 1's own work (mounts, `Prepare`, power): the lab does.
mod common;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use agent_api::{Connection, Event, ExecRequest, ExitStatus, FailureKind, Tty, WinSize};
use common::{cgroups, connect, connect_to, gone, server_with, sh, text, write_program};

/// More than anything here takes on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(90);

#[test]
fn output_streams_are_separate_and_the_code_is_the_commands() {
    let mut connection = connect();
    let result = connection
        .exec(&sh("echo out; echo err >&2; exit 3"))
        .unwrap()
        .collect()
        .unwrap();
    assert_eq!(result.status, ExitStatus::Code(3));
    assert_eq!((text(&result.stdout), text(&result.stderr)), ("out\n", "err\n"));
    // The connection is idle again, and takes the next one.
    connection.ping().unwrap();
    let result = connection.exec(&sh("exit 0")).unwrap().collect().unwrap();
    assert_eq!(result.status, ExitStatus::Code(0));
}

#[test]
fn several_mebibytes_of_all_byte_values_go_there_and_back() {
    let mut connection = connect();
    let data: Vec<u8> = (0..=255_u8).cycle().take(5 << 20).collect();
    let request = ExecRequest {
        argv: vec!["cat".into()],
        stdin: true,
        ..ExecRequest::default()
    };
    let running = connection.exec(&request).unwrap();
    let input = running.input.clone();
    let sent = data.clone();
    let feeder = thread::spawn(move || {
        input.write(&sent).unwrap();
        input.close().unwrap();
    });
    let result = running.collect().unwrap();
    feeder.join().unwrap();
    assert_eq!(result.status, ExitStatus::Code(0));
    assert!(
        result.stdout == data,
        "{} of {} bytes, or other ones",
        result.stdout.len(),
        data.len()
    );
}

#[test]
fn without_stdin_there_is_an_end_of_file_at_once() {
    let request = ExecRequest {
        argv: vec!["cat".into()],
        ..ExecRequest::default()
    };
    let result = connect().exec(&request).unwrap().collect().unwrap();
    assert_eq!((result.status, result.stdout.len()), (ExitStatus::Code(0), 0));
}

#[test]
fn output_left_in_the_pipe_is_sent_before_the_end_even_if_something_holds_it_open() {
    let begin = Instant::now();
    let script = "sleep 1000 & head -c 50000 /dev/zero; echo $! >&2";
    let result = connect().exec(&sh(script)).unwrap().collect().unwrap();
    assert_eq!(result.stdout.len(), 50_000);
    let background: u32 = text(&result.stderr).trim().parse().unwrap();
    assert!(begin.elapsed() < PATIENCE, "waited for the background process");
    let killed = connect().exec(&sh(&format!("kill {background}"))).unwrap().collect();
    assert_eq!(killed.unwrap().status, ExitStatus::Code(0), "it was not left running");
}

#[test]
fn a_signal_ends_a_command_and_is_its_status() {
    for (number, expected) in [
        (libc::SIGTERM, 143),
        (libc::SIGINT, 130),
        (libc::SIGKILL, 137),
        (libc::SIGHUP, 129),
    ] {
        let mut connection = connect();
        // Not a shell: it may catch a signal and forget it when it executes something.
        let request = ExecRequest {
            argv: vec!["sleep".into(), "60".into()],
            ..ExecRequest::default()
        };
        let running = connection.exec(&request).unwrap();
        running.input.signal(number).unwrap();
        let result = running.collect().unwrap();
        assert_eq!(result.status, ExitStatus::Signal(u8::try_from(number).unwrap()));
        assert_eq!(result.status.exit_code(), expected);
    }
}

#[test]
fn a_handler_sees_the_signal() {
    let mut connection = connect();
    let mut running = connection
        .exec(&sh("trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"))
        .unwrap();
    assert_eq!(running.output.next().unwrap(), Event::Stdout(b"ready\n"));
    running.input.signal(libc::SIGTERM).unwrap();
    assert_eq!(running.collect().unwrap().status, ExitStatus::Code(9));
}

/// As podman does it: a command that is to end passes that on itself; a hang-up is the whole terminal's.
#[test]
fn sigterm_is_for_the_command_and_a_hangup_for_its_children_too() {
    let mut connection = connect();
    let child =
        "trap 'echo child TERM' TERM; trap 'echo child HUP; exit' HUP; echo ready; while :; do sleep 0.05; done";
    let script = format!("trap 'echo parent TERM' TERM; trap 'echo parent HUP' HUP; sh -c \"{child}\"; exit 3");
    let mut running = connection.exec(&sh(&script)).unwrap();
    assert_eq!(running.output.next().unwrap(), Event::Stdout(b"ready\n"));
    running.input.signal(libc::SIGTERM).unwrap();
    thread::sleep(Duration::from_millis(300));
    running.input.signal(libc::SIGHUP).unwrap();
    let result = running.collect().unwrap();
    assert_eq!(result.status, ExitStatus::Code(3));
    let mut lines: Vec<&str> = text(&result.stdout).lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["child HUP", "parent HUP", "parent TERM"]);
}

#[test]
fn signals_pass_a_command_that_does_not_read_its_input() {
    let mut connection = connect();
    let request = ExecRequest {
        argv: vec!["sleep".into(), "60".into()],
        stdin: true,
        ..ExecRequest::default()
    };
    let running = connection.exec(&request).unwrap();
    let (blocked, input) = (running.input.clone(), running.input.clone());
    let feeder = thread::spawn(move || blocked.write(&vec![0; 4 << 20]));
    thread::sleep(Duration::from_millis(200));
    assert!(!feeder.is_finished(), "the window must bound what is under way");
    input.signal(libc::SIGTERM).unwrap();
    assert_eq!(running.collect().unwrap().status, ExitStatus::Signal(15));
    assert!(matches!(feeder.join().unwrap(), Err(agent_api::Error::Ended)));
}

#[test]
fn a_command_that_closes_its_input_ends_the_writer() {
    let mut connection = connect();
    let request = ExecRequest {
        stdin: true,
        ..sh("exec <&-; sleep 1; echo end")
    };
    let running = connection.exec(&request).unwrap();
    let input = running.input.clone();
    let feeder = thread::spawn(move || input.write(&vec![0; 4 << 20]));
    assert_eq!(text(&running.collect().unwrap().stdout), "end\n");
    assert!(matches!(feeder.join().unwrap(), Err(agent_api::Error::Ended)));
}

#[test]
fn a_slow_reader_stops_the_command_and_loses_nothing() {
    let mut connection = connect();
    let count = std::env::temp_dir().join(format!("basalt-slow-{}", std::process::id()));
    let script = format!(
        "for i in $(seq 1 400); do head -c 65536 /dev/zero; echo $i > {}; done; rm {0}; echo end >&2",
        count.display()
    );
    let running = connection.exec(&sh(&script)).unwrap();
    // The file is empty for a moment whenever it is written.
    let written = || -> usize {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(written) = std::fs::read_to_string(&count)
                .ok()
                .and_then(|text| text.trim().parse().ok())
            {
                return written;
            }
            assert!(Instant::now() < end, "nothing is written");
            thread::sleep(Duration::from_millis(5));
        }
    };
    written();
    thread::sleep(Duration::from_millis(500));
    let written = written();
    assert!(
        written < 100,
        "{written} of 400 blocks were written although nobody reads"
    );
    let result = running.collect().unwrap();
    assert_eq!((result.stdout.len(), text(&result.stderr)), (400 * 65536, "end\n"));
}

#[test]
fn failures_to_start_have_their_kinds() {
    let mut connection = connect();
    let mut kind = |argv: &[&str], change: fn(&mut ExecRequest)| {
        let mut request = ExecRequest {
            argv: argv.iter().map(|arg| (*arg).into()).collect(),
            ..ExecRequest::default()
        };
        change(&mut request);
        match connection.exec(&request) {
            Err(agent_api::Error::Exec(failure)) => failure.kind,
            other => panic!("{argv:?}: {:?}", other.map(|running| running.pid)),
        }
    };
    let script = std::env::temp_dir().join(format!("basalt-script-{}", std::process::id()));
    let path = script.to_str().unwrap();
    assert_eq!(kind(&["no-such-program"], |_| ()), FailureKind::NotFound);
    assert_eq!(kind(&["/no/such/program"], |_| ()), FailureKind::NotFound);
    assert_eq!(kind(&["/etc"], |_| ()), FailureKind::NotExecutable);
    assert_eq!(kind(&["/etc/passwd"], |_| ()), FailureKind::NotExecutable);
    write_program(&script, "#!/no/such/interpreter");
    assert_eq!(kind(&[path], |_| ()), FailureKind::NotFound);
    write_program(&script, "neither a program nor a script");
    assert_eq!(kind(&[path], |_| ()), FailureKind::NotExecutable);
    std::fs::remove_file(&script).unwrap();
    assert_eq!(
        kind(&["true"], |request| request.user = Some("no-such-user".into())),
        FailureKind::BadUser
    );
    assert_eq!(
        kind(&["true"], |request| request.cwd = "/no/such/dir".into()),
        FailureKind::BadCwd
    );
    assert_eq!(
        kind(&["true"], |request| request.cwd = "relative".into()),
        FailureKind::BadCwd
    );
    assert_eq!(kind(&["true", "a\0b"], |_| ()), FailureKind::Other);
    assert_eq!(kind(&[], |_| ()), FailureKind::Other);
    // And the connection still works.
    connection.ping().unwrap();
}

#[test]
fn environment_directory_and_arguments_arrive_unchanged() {
    let request = ExecRequest {
        argv: vec![
            "/bin/sh".into(),
            "-c".into(),
            "pwd; printf '%s|' \"$@\"; env | sort".into(),
            "x".into(),
            "a b".into(),
            vec![0xff, 0x01].into(),
        ],
        env: vec!["GREETING=grüß dich".into(), "HOME=/elsewhere".into()],
        cwd: "/usr".into(),
        ..ExecRequest::default()
    };
    let result = connect().exec(&request).unwrap().collect().unwrap();
    let mut expected = b"/usr\na b|\xff\x01|".to_vec();
    expected.extend("GREETING=grüß dich\nHOME=/elsewhere\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:".bytes());
    expected.extend(b"/usr/bin:/sbin:/bin\nPWD=/usr\nUSER=root\n");
    assert!(result.stdout == expected, "{}", String::from_utf8_lossy(&result.stdout));
}

#[test]
fn another_user_with_groups_and_a_usable_stdout() {
    let request = ExecRequest {
        user: Some("nobody".into()),
        ..sh(
            "id -u; id -g; id -G; echo $HOME $USER; echo through > /dev/stdout; grep -E '^(SigIgn|SigBlk)' /proc/self/status",
        )
    };
    let result = connect().exec(&request).unwrap().collect().unwrap();
    assert_eq!(
        text(&result.stdout),
        "65534\n65534\n65534\n/nonexistent nobody\nthrough\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n",
        "{}",
        text(&result.stderr)
    );
    let request = ExecRequest {
        user: Some("4711:4712".into()),
        ..sh("id -u; id -g; id -G; echo $HOME")
    };
    let result = connect().exec(&request).unwrap().collect().unwrap();
    assert_eq!(text(&result.stdout), "4711\n4712\n4712\n/\n");
}

fn on_terminal(script: &str) -> ExecRequest {
    let tty = Tty {
        size: WinSize { rows: 31, cols: 97 },
        term: Some("vt100".into()),
    };
    ExecRequest {
        tty: Some(tty),
        stdin: true,
        ..sh(script)
    }
}

#[test]
fn a_terminal_has_its_size_follows_it_and_takes_keys() {
    let mut connection = connect();
    let script =
        "trap 'stty size' WINCH; stty size; echo $TERM; tty; while :; do read line || continue; echo got $line; done";
    let mut running = connection.exec(&on_terminal(script)).unwrap();
    let mut seen = String::new();
    let input = running.input.clone();
    let mut wait_for = |wanted: &str| {
        while !seen.contains(wanted) {
            match running.output.next().unwrap() {
                Event::Stdout(bytes) => seen.push_str(text(bytes)),
                other => panic!("{other:?} after {seen:?}"),
            }
        }
    };
    wait_for("31 97\r\nvt100\r\n/dev/pts/");
    input.resize(WinSize { rows: 12, cols: 34 }).unwrap();
    // A signal that comes just before the shell reads is dealt with after what it reads then.
    input.write(b"\r").unwrap();
    wait_for("12 34\r\n");
    input.write(b"hello\r").unwrap();
    wait_for("got hello\r\n");
    // Ctrl-C is a byte; the terminal makes a signal of it.
    input.write(b"\x03").unwrap();
    assert_eq!(running.collect().unwrap().status, ExitStatus::Signal(2));
}

#[test]
fn a_terminals_last_words_arrive_and_its_input_can_end() {
    for _ in 0..20 {
        let result = connect()
            .exec(&on_terminal("seq 1 2000; echo last"))
            .unwrap()
            .collect()
            .unwrap();
        assert!(text(&result.stdout).ends_with("1999\r\n2000\r\nlast\r\n"));
    }
    let mut connection = connect();
    let running = connection.exec(&on_terminal("stty -echo; cat; echo end")).unwrap();
    thread::sleep(Duration::from_millis(200));
    running.input.write(b"line\n").unwrap();
    running.input.close().unwrap();
    assert!(text(&running.collect().unwrap().stdout).ends_with("line\r\nend\r\n"));
}

#[test]
fn a_terminal_belongs_to_its_user() {
    let request = ExecRequest {
        user: Some("nobody".into()),
        ..on_terminal("echo x > $(tty) && stat -c %U $(tty)")
    };
    let result = connect().exec(&request).unwrap().collect().unwrap();
    assert_eq!(text(&result.stdout), "x\r\nnobody\r\n");
}

#[test]
fn a_reader_that_goes_is_a_broken_pipe_for_the_command() {
    let mut connection = connect();
    let mut running = connection.exec(&sh("yes; echo $? >&2")).unwrap();
    assert!(matches!(running.output.next().unwrap(), Event::Stdout(_)));
    running.input.close_output(agent_api::OutputStream::Stdout).unwrap();
    let result = running.collect().unwrap();
    assert!(
        ["141\n", "1\n"].contains(&text(&result.stderr)),
        "{:?}",
        text(&result.stderr)
    );
}

#[test]
fn many_at_once_do_not_mix() {
    let threads: Vec<_> = (0..40)
        .map(|number| {
            thread::spawn(move || {
                let mut connection = connect();
                for round in 0..5 {
                    let script = format!("echo {number}.{round}; head -c 100000 /dev/zero; exit {number}");
                    let result = connection.exec(&sh(&script)).unwrap().collect().unwrap();
                    assert_eq!(result.status, ExitStatus::Code(number));
                    let first = format!("{number}.{round}\n");
                    assert!(result.stdout.starts_with(first.as_bytes()));
                    assert_eq!(result.stdout.len(), first.len() + 100_000);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Starts a script that prints process ids, a line each, and leaves when there are `count`.
fn leave_behind(mut connection: Connection<UnixStream>, script: &str, count: usize) -> Vec<u32> {
    let mut running = connection.exec(&sh(script)).unwrap();
    let mut seen = String::new();
    while seen.lines().count() < count || !seen.ends_with('\n') {
        match running.output.next().unwrap() {
            Event::Stdout(bytes) => seen.push_str(text(bytes)),
            other => panic!("{other:?}"),
        }
    }
    seen.lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn a_client_that_disappears_takes_its_command_along() {
    // All ignore SIGHUP, so only SIGKILL helps; the last one has left the process group.
    let script = "trap '' HUP; echo $$; sleep 300 & echo $!; setsid sleep 300 & sleep 0.2; echo $!; wait";
    let Some(cgroups) = cgroups() else {
        panic!("this test needs cgroup version 2 somewhere below /sys/fs/cgroup")
    };
    for pid in leave_behind(connect_to(&server_with(None, Some(cgroups))), script, 3) {
        assert!(gone(pid, PATIENCE), "process {pid} is left");
    }
}

#[test]
fn without_cgroups_the_process_group_goes() {
    let script = "trap '' HUP; echo $$; sleep 300 & echo $!; wait; sleep 300";
    for pid in leave_behind(connect_to(&server_with(None, None)), script, 2) {
        assert!(gone(pid, PATIENCE), "process {pid} is left");
    }
    // The leader goes by SIGHUP; what it leaves in its group ignores that.
    let script = "(trap '' HUP; exec sleep 300) & echo $!; echo $$; sleep 300";
    for pid in leave_behind(connect_to(&server_with(None, None)), script, 2) {
        assert!(gone(pid, PATIENCE), "process {pid} is left");
    }
}

#[test]
fn a_client_that_disappears_while_nobody_reads_takes_its_command_along() {
    let mut connection = connect();
    let running = connection.exec(&sh("yes")).unwrap();
    let pid = running.pid;
    thread::sleep(Duration::from_millis(200));
    drop(running);
    drop(connection);
    assert!(gone(pid, PATIENCE));
}

#[test]
fn other_requests_wait_for_the_end_of_a_command() {
    let mut connection = connect();
    let mut stream = connection.stream().try_clone().unwrap();
    let mut running = connection.exec(&sh("echo ready; sleep 60")).unwrap();
    assert_eq!(running.output.next().unwrap(), Event::Stdout(b"ready\n"));
    let ping = wire::Header::encode(6, 1, 0).unwrap();
    stream.write_all(&[&ping[..], b"\"ping\""].concat()).unwrap();
    match running.output.next() {
        Err(agent_api::Error::Unexpected(reply)) => assert!(format!("{reply:?}").contains("is running")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_client_that_breaks_the_rules_is_cut_off() {
    let too_much = [&wire::Header::encode(200_000, 2, 0).unwrap()[..], &[0; 200_000]].concat();
    let nonsense = [&wire::Header::encode(3, 1, 0).unwrap()[..], b"{{{"].concat();
    let unknown = wire::Header::encode(0, 77, 0).unwrap().to_vec();
    let oversized = [0xff; 8].to_vec();
    for bytes in [too_much, nonsense, unknown, oversized] {
        let mut connection = connect();
        let mut stream: UnixStream = connection.stream().try_clone().unwrap();
        let request = ExecRequest {
            argv: vec!["sleep".into(), "60".into()],
            stdin: true,
            ..ExecRequest::default()
        };
        let running = connection.exec(&request).unwrap();
        let pid = running.pid;
        stream.write_all(&bytes).unwrap();
        assert!(running.collect().is_err());
        assert!(gone(pid, PATIENCE));
    }
}

#[test]
fn hello_tells_about_the_machine() {
    let info = connect().hello().unwrap();
    assert_eq!(info.agent_version, env!("CARGO_PKG_VERSION"));
    assert!(info.mem_total_kib >= info.mem_available_kib && info.mem_available_kib > 0);
    assert!(info.now_ns > info.started_ns && info.started_ns > 0);
    assert!(!info.kernel_release.is_empty());
}

#[test]
fn what_this_agent_may_not_do_is_refused() {
    let mut connection: Connection<UnixStream> = connect();
    let shutdown = agent_api::Shutdown {
        how: agent_api::PowerAction::PowerOff,
        grace_ms: 0,
    };
    assert!(matches!(
        connection.shutdown(shutdown),
        Err(agent_api::Error::Refused(_))
    ));
    let prepare = agent_api::Prepare {
        root: agent_api::RootDisk {
            disk: agent_api::DiskName::Path("/dev/vda".into()),
            fs: "erofs".into(),
        },
        writable: None,
        overlay_bytes: None,
        hostname: "x".into(),
        machine_id: None,
        clock_ns: 0,
        entropy: vec![0; 32],
        network: None,
        shared_directories: Vec::new(),
        tmpfs: Vec::new(),
        pids_max: None,
        accelerator: None,
    };
    assert!(matches!(
        connection.prepare(&prepare),
        Err(agent_api::Error::Refused(_))
    ));
    connection.ping().unwrap();
}
