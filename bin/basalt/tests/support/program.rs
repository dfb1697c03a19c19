//! The program as its users start it: with pipes, and on a terminal. Knows nothing of what it is asked.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// More than any of these cases needs on a machine that does other things, too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

fn resize(master: impl AsFd, rows: u16, cols: u16) {
    tcsetwinsize(
        master,
        Winsize {
            ws_row: rows,
            ws_col: cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        },
    )
    .unwrap();
}

/// The program in progress, killed if the test fails.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Reads a line of its standard output, byte by byte: nothing is read ahead.
    pub(crate) fn line(&mut self) -> String {
        let mut line = Vec::new();
        let out = self.0.stdout.as_mut().unwrap();
        let mut byte = [0];
        loop {
            let mut fds = [PollFd::new(&*out, PollFlags::IN)];
            let limit = Timespec::try_from(PATIENCE).unwrap();
            assert!(
                poll(&mut fds, Some(&limit)).unwrap() > 0,
                "no line came in time, but: {:?}",
                text(&line)
            );
            if out.read(&mut byte).unwrap() == 0 || byte[0] == b'\n' {
                break;
            }
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for the end; tells the exit code and what was written to standard error.
    pub(crate) fn end(&mut self) -> (Option<i32>, String) {
        let status = wait_for("the end of basalt", || self.0.try_wait().unwrap());
        let mut stderr = Vec::new();
        if let Some(pipe) = &mut self.0.stderr {
            pipe.read_to_end(&mut stderr).unwrap();
        }
        (status.code(), text(&stderr))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|status| status.is_none()) {
            self.0
                .kill()
                .and_then(|()| self.0.wait())
                .expect("a child that can be killed");
        }
    }
}

/// The program on a terminal.
pub(crate) struct Terminal {
    master: File,
    seen: String,
    pub(crate) child: Running,
}

impl Terminal {
    /// Starts a command on a new terminal of this size.
    pub(crate) fn start(mut command: Command, rows: u16, cols: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let slave = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        resize(&master, rows, cols);
        command
            .env("TERM", "vt100")
            .stdin(slave.try_clone().unwrap())
            .stdout(slave.try_clone().unwrap())
            .stderr(slave);
        // SAFETY: the closure runs between fork and exec; both calls are async-signal-safe system calls.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        // The command holds the slave's descriptors; the terminal must hang up when the child has gone.
        drop(command);
        Self {
            master: File::from(master),
            seen: String::new(),
            child: Running(child),
        }
    }

    pub(crate) fn type_in(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn resize(&mut self, rows: u16, cols: u16) {
        resize(&self.master, rows, cols);
    }

    /// Reads what the terminal shows until `wanted` is in it; forgets all up to its end.
    pub(crate) fn expect(&mut self, wanted: &str) {
        let mut buffer = [0; 4096];
        loop {
            if let Some(at) = self.seen.find(wanted) {
                self.seen.drain(..at + wanted.len());
                return;
            }
            let mut fds = [PollFd::new(&self.master, PollFlags::IN)];
            let limit = Timespec::try_from(PATIENCE).unwrap();
            assert!(
                poll(&mut fds, Some(&limit)).unwrap() > 0,
                "`{wanted}` did not come in time, but: {:?}",
                self.seen
            );
            // A terminal whose other side is closed reads as EIO.
            let got = self.master.read(&mut buffer).unwrap_or(0);
            assert!(got > 0, "`{wanted}` did not come, but: {:?}", self.seen);
            self.seen.push_str(&String::from_utf8_lossy(&buffer[..got]));
        }
    }
}

/// Asks until there is an answer.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begun.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
