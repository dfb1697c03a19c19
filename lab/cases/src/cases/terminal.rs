//! `basalt run -t`: a real terminal on both sides, its size and its changes; and signals without a terminal.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, Signal};
use rustix::termios::Winsize;

use crate::basalt::command;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "terminal",
    limit: Duration::from_secs(240),
    host,
    guest: None,
};

pub(crate) const SIGNALS: Case = Case {
    name: "signals",
    limit: Duration::from_secs(300),
    host: signals,
    guest: None,
};

const PATIENCE: Duration = Duration::from_secs(90);

/// The user's end of a terminal.
struct Terminal {
    main: File,
    seen: String,
}

impl Terminal {
    fn open(rows: u16, cols: u16) -> Result<(Self, OwnedFd)> {
        let main = rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY)?;
        rustix::pty::grantpt(&main)?;
        rustix::pty::unlockpt(&main)?;
        let name = rustix::pty::ptsname(&main, Vec::new())?;
        let other = rustix::fs::open(name.as_c_str(), rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
        let mut terminal = Self {
            main: File::from(main),
            seen: String::new(),
        };
        terminal.resize(rows, cols)?;
        Ok((terminal, other))
    }

    fn resize(&mut self, rows: u16, cols: u16) -> Result<()> {
        Ok(rustix::termios::tcsetwinsize(
            &self.main,
            Winsize {
                ws_row: rows,
                ws_col: cols,
                ws_xpixel: 0,
                ws_ypixel: 0,
            },
        )?)
    }

    fn type_keys(&mut self, keys: &str) -> Result<()> {
        Ok(std::io::Write::write_all(&mut self.main, keys.as_bytes())?)
    }

    /// Reads until `text` has been shown.
    fn wait_for(&mut self, text: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !self.seen.contains(text) {
            ensure!(
                Instant::now() < deadline,
                "`{text}` was not shown; this was: {:?}",
                self.seen
            );
            let mut fds = [PollFd::new(&self.main, PollFlags::IN)];
            let step = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
            if rustix::event::poll(&mut fds, Some(&step))? == 0 {
                continue;
            }
            let mut buffer = [0; 4096];
            let length = self
                .main
                .read(&mut buffer)
                .with_context(|| format!("after {:?}", self.seen))?;
            self.seen
                .push_str(&String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()));
        }
        Ok(())
    }
}

fn wait(child: &mut Child) -> Result<i32> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait()? {
            return status.code().context("basalt itself was killed");
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            anyhow::bail!("basalt did not end within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[allow(unsafe_code, reason = "a controlling terminal is taken between fork and exec")]
fn on_terminal(host: &Host, other: &OwnedFd, words: &[&str]) -> Result<Child> {
    let arguments: Vec<_> = ["run", "-t", host.digest.as_str(), "--"]
        .iter()
        .chain(words)
        .copied()
        .collect();
    let mut command = command(host, &arguments);
    command
        .stdin(other.try_clone()?)
        .stdout(other.try_clone()?)
        .stderr(other.try_clone()?);
    // SAFETY: both calls are async-signal-safe and touch no memory of the parent's.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?)
        });
    }
    Ok(command.spawn()?)
}

fn host(host: &Host) -> Result<()> {
    let (mut terminal, other) = Terminal::open(31, 97)?;
    // Without Python's own buffers, and waited for rather than caught: a signal may come at any instruction.
    let script = "import os,signal\n\
                  def say(*words): os.write(1,(' '.join(map(str,words))+'\\n').encode())\n\
                  def end(*a): say('interrupted'); os._exit(9)\n\
                  signal.pthread_sigmask(signal.SIG_BLOCK,[signal.SIGWINCH])\n\
                  say('tty',all(os.isatty(f) for f in (0,1,2)),tuple(os.get_terminal_size()))\n\
                  signal.sigwait([signal.SIGWINCH])\n\
                  say('now',tuple(os.get_terminal_size()))\n\
                  say('got',input())\n\
                  signal.signal(signal.SIGINT,end)\n\
                  say('ready')\nsignal.pause()";
    let mut child = on_terminal(host, &other, &["python3", "-c", script])?;
    drop(other);
    terminal.wait_for("tty True (97, 31)")?;
    terminal.resize(40, 120)?;
    terminal.wait_for("now (120, 40)")?;
    terminal.type_keys("hello\r")?;
    terminal.wait_for("got hello")?;
    terminal.wait_for("ready")?;
    // Ctrl-C is a byte that the guest's own terminal turns into a signal.
    terminal.type_keys("\x03")?;
    terminal.wait_for("interrupted")?;
    let code = wait(&mut child)?;
    ensure!(code == 9, "it ended with {code}");
    Ok(())
}

fn signals(host: &Host) -> Result<()> {
    // Without Python's own buffers: the signal may come while `ready` is still being written.
    let script = "import os,signal\n\
                  def end(n,f): os.write(1,b'signal %d\\n' % n); os._exit(40+n)\n\
                  signal.signal(signal.SIGTERM,end); signal.signal(signal.SIGINT,end)\n\
                  os.write(1,b'ready\\n')\nsignal.pause()";
    for signal in [Signal::TERM, Signal::INT] {
        let mut child = command(host, &["run", host.digest.as_str(), "--", "python3", "-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let mut stdout = child.stdout.take().context("no output")?;
        read_until(&mut stdout, "ready")?;
        let pid = Pid::from_raw(i32::try_from(child.id())?).context("no process id")?;
        rustix::process::kill_process(pid, signal)?;
        read_until(&mut stdout, &format!("signal {}", signal.as_raw()))?;
        let code = wait(&mut child)?;
        ensure!(
            code == 40 + signal.as_raw(),
            "after signal {signal:?} it ended with {code}"
        );
    }
    Ok(())
}

fn read_until(stream: &mut (impl Read + AsFd), text: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut seen = String::new();
    while !seen.contains(text) {
        ensure!(Instant::now() < deadline, "`{text}` did not come; this did: {seen:?}");
        let mut fds = [PollFd::new(&*stream, PollFlags::IN)];
        let step = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
        if rustix::event::poll(&mut fds, Some(&step))? == 0 {
            continue;
        }
        let mut buffer = [0; 4096];
        let length = stream.read(&mut buffer)?;
        ensure!(length > 0, "the output ended without `{text}`: {seen:?}");
        seen.push_str(&String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()));
    }
    Ok(())
}
