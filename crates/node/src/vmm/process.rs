//! VMM processes: told apart by number and start time, so that a later process of the same number is never taken for
//! one; watched and killed through pidfds, whether this daemon or one before it started them.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use node_api::sandbox::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};

/// What is known of the process with this number, if there is one.
pub(crate) fn identify(pid: i32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    // proc(5): field 3 is the first behind the name.
    let state = fields.next()?;
    let start = fields.nth(18)?.parse().ok()?;
    (state != "Z").then_some(Process { pid, start })
}

/// Opens a process; `None` when it is gone.
pub(crate) fn open(process: Process) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = Pid::from_raw(process.pid) else {
        return Ok(None);
    };
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    // The descriptor holds on to whatever has this number; that it is the right one is looked at afterwards.
    Ok((identify(process.pid) == Some(process)).then_some(pidfd))
}

/// Kills a process; it is fine if it is gone.
pub(crate) fn kill(pidfd: impl AsFd) -> io::Result<()> {
    match pidfd_send_signal(pidfd, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Kills a process and waits for its end, at most `limit`; whether it is gone.
pub(crate) fn end(known: Process, limit: Duration) -> io::Result<bool> {
    let Some(pidfd) = open(known)? else { return Ok(true) };
    kill(&pidfd)?;
    let ended = readable(&pidfd, limit);
    if ended {
        reap(&pidfd);
    }
    Ok(ended)
}

/// Reaps a process that has ended, where it is this one's child.
pub(crate) fn reap(pidfd: impl AsFd) {
    match waitid(
        WaitId::PidFd(pidfd.as_fd()),
        WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
    ) {
        // CHILD: started by a daemon before this one; init reaps it.
        Ok(_) | Err(Errno::CHILD) => (),
        Err(error) => log::warn!("a VMM, or the server of an accelerator, cannot be reaped: {error}"),
    }
}

/// Waits until `fd` is readable, at most `limit`.
pub(crate) fn readable(fd: impl AsFd, limit: Duration) -> bool {
    let deadline = std::time::Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timespec(left))) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(Errno::INTR) => (),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_killed_and_not_taken_for_another() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let process = identify(i32::try_from(child.id()).unwrap()).unwrap();
        let older = Process {
            start: process.start - 1,
            ..process
        };
        assert!(open(older).unwrap().is_none());
        let pidfd = open(process).unwrap().unwrap();
        assert!(!readable(&pidfd, Duration::ZERO));
        kill(&pidfd).unwrap();
        assert!(readable(&pidfd, Duration::from_secs(90)));
        assert_eq!(identify(process.pid), None, "a zombie is gone");
        kill(&pidfd).unwrap();
        child.wait().unwrap();
        assert!(open(process).unwrap().is_none());
        assert!(open(Process { pid: 0, start: 0 }).unwrap().is_none());
    }
}
