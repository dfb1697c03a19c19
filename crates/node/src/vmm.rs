//! The VMM's process: started, watched, killed, reaped. Knows nothing of what it is told over its socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::Error;
use crate::ring::{Ring, Tail};

/// A VMM process. Dropping it kills and reaps it.
///
/// A keeper thread starts the process and lives as long as it: the parent's death signal is sent when the *thread*
/// that forked ends, and so it comes exactly when this process ends.
#[derive(Debug)]
pub(crate) struct VmmProcess {
    pidfd: OwnedFd,
    keeper: Option<JoinHandle<io::Result<ExitStatus>>>,
    status: Option<ExitStatus>,
    log: Ring,
}

impl VmmProcess {
    /// Starts `program` with `arguments` and the control socket's number; the socket is all that it inherits besides
    /// its standard streams. It has a process group of its own, so that the terminal's Ctrl-C is not for it.
    pub(crate) fn spawn(program: &Path, control: OwnedFd) -> Result<Self, Error> {
        let (log, output) = Ring::start("the VMM's log", None).map_err(Error::host("making a pipe"))?;
        let second = output.try_clone().map_err(Error::host("making a pipe"))?;
        let mut command = Command::new(program);
        command
            .arg("--control-fd")
            .arg(control.as_raw_fd().to_string())
            .args(["--log-level", &log::max_level().as_str().to_ascii_lowercase()])
            .stdin(Stdio::null())
            .stdout(Stdio::from(output))
            .stderr(Stdio::from(second))
            .process_group(0);
        inherit(&mut command, control.as_raw_fd());
        let (started, wait) = mpsc::channel();
        let keeper = std::thread::Builder::new()
            .name("vmm-keeper".into())
            .spawn(move || keep(command, control, &started))
            .map_err(Error::host("starting a thread"))?;
        let failed = |cause| Error::Spawn {
            path: program.to_owned(),
            cause,
        };
        match wait.recv() {
            Ok(Ok(pidfd)) => Ok(Self {
                pidfd,
                keeper: Some(keeper),
                status: None,
                log,
            }),
            Ok(Err(cause)) => Err(failed(cause)),
            Err(mpsc::RecvError) => Err(failed(io::Error::other("the thread that starts it panicked"))),
        }
    }

    /// Readable when the process has ended.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Waits for the end, for so long; tells how it ended.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        if self.status.is_none() && readable(self.as_fd(), limit) {
            self.reap();
        }
        self.status
    }

    /// Kills the process; it is gone and reaped when this returns.
    pub(crate) fn kill(&mut self) {
        if self.keeper.is_none() {
            return;
        }
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            // Gone already.
            Ok(()) | Err(rustix::io::Errno::SRCH) => (),
            Err(error) => log::error!("the VMM cannot be killed: {error}"),
        }
        self.reap();
    }

    /// Kills the process from another thread.
    pub(crate) fn killer(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// The end of what it wrote.
    pub(crate) fn log_tail(&self) -> Tail {
        self.log.tail()
    }

    fn reap(&mut self) {
        let Some(keeper) = self.keeper.take() else { return };
        match keeper.join() {
            Ok(Ok(status)) => self.status = Some(status),
            Ok(Err(error)) => log::error!("the VMM's end cannot be learnt: {error}"),
            Err(_) => log::error!("the thread that waits for the VMM panicked"),
        }
    }
}

impl Drop for VmmProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

fn inherit(command: &mut Command, control: i32) {
    // SAFETY: `pre_exec` runs its closure between fork and exec, where only async-signal-safe calls are allowed: (1)
    // `for_child` makes two system calls and nothing else; (2) `control` stays open: `keep` owns it until after spawn.
    unsafe { command.pre_exec(move || for_child(control)) };
}

fn for_child(control: i32) -> io::Result<()> {
    // SAFETY: `fcntl` with F_SETFD takes an int and touches no memory.
    let inherited = unsafe { libc::fcntl(control, libc::F_SETFD, 0) };
    // SAFETY: `prctl` with PR_SET_PDEATHSIG takes a signal number and touches no memory.
    let armed = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if inherited == 0 && armed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn keep(mut command: Command, control: OwnedFd, started: &mpsc::Sender<io::Result<OwnedFd>>) -> io::Result<ExitStatus> {
    let opened = command.spawn().and_then(|mut child| match pidfd_of(&child) {
        Ok(pidfd) => Ok((pidfd, child)),
        Err(error) => {
            child.kill().and_then(|()| child.wait())?;
            Err(error)
        }
    });
    // The command holds the log pipe's write ends, and `control` the VMM's end of the socket: both must close here, or
    // nobody would see the VMM close them.
    drop(command);
    drop(control);
    let (pidfd, mut child) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            drop(started.send(Err(error)));
            return Err(io::Error::other("it never started"));
        }
    };
    if started.send(Ok(pidfd)).is_err() {
        child.kill()?;
    }
    child.wait()
}

fn pidfd_of(child: &Child) -> io::Result<OwnedFd> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("a process id out of range"))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Waits until `fd` is readable, at most `limit`.
pub(crate) fn readable(fd: BorrowedFd<'_>, limit: Duration) -> bool {
    let deadline = std::time::Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timespec(left))) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(rustix::io::Errno::INTR) => (),
            Err(error) => {
                log::error!("poll failed: {error}");
                return false;
            }
        }
    }
}

/// A duration as the kernel takes it.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
