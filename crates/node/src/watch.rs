//! Threads that end a running command from outside: when the VM has ended under it, and when its time is over. Know
//! nothing of why a VM ends.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use agent_api::Input;
use base::EventFd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, pidfd_send_signal};

use crate::Error;

/// Between SIGTERM and SIGKILL when a command's time is over.
const TERM_GRACE: Duration = Duration::from_secs(2);

/// Between SIGKILL inside the guest and the end of the whole VM.
const KILL_GRACE: Duration = Duration::from_secs(3);

/// Closes the agent's connection when the VM has ended. A VMM that says so and then hangs would keep it open, and
/// whoever waits for the command would wait for ever.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: EventFd,
    thread: JoinHandle<()>,
}

impl Watch {
    /// Starts watching: the VM has ended when one of `ends` is readable. Nobody may ask the VMM anything meanwhile, as an
    /// answer is readable, too.
    pub(crate) fn start(ends: [BorrowedFd<'_>; 2], stream: io::Result<UnixStream>) -> Result<Self, Error> {
        let failed = Error::host("watching the VM");
        let prepared = || -> io::Result<_> {
            let [client, process] = ends.map(|fd| fd.try_clone_to_owned());
            let stop = EventFd::new()?;
            Ok((client?, process?, stream?, stop.try_clone()?, stop))
        };
        let (client, process, stream, stopped, stop) = match prepared() {
            Ok(prepared) => prepared,
            Err(error) => return Err(failed(error)),
        };
        let thread = std::thread::Builder::new()
            .name("vm-watch".into())
            .spawn(move || watch(&[client, process], &stream, &stopped))
            .map_err(Error::host("starting a thread"))?;
        Ok(Self { stop, thread })
    }

    /// Ends the watch.
    pub(crate) fn stop(self) {
        self.stop.signal();
        if self.thread.join().is_err() {
            log::error!("the thread that watches the VM panicked");
        }
    }
}

fn watch(ends: &[OwnedFd; 2], stream: &UnixStream, stopped: &EventFd) {
    let [client, process] = ends;
    loop {
        let mut fds = [
            PollFd::new(stopped, PollFlags::IN),
            PollFd::new(client, PollFlags::IN),
            PollFd::new(process, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => (),
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return log::error!("the VM cannot be watched: {error}"),
        }
        if fds[0].revents().is_empty() {
            // What has come already can still be read. It fails where the other side was quicker.
            drop(stream.shutdown(Shutdown::Both));
        }
        return;
    }
}

/// Ends a command whose time is over: SIGTERM, then SIGKILL, then the whole VM.
#[derive(Debug)]
pub(crate) struct Timer {
    expired: Arc<AtomicBool>,
    done: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Timer {
    pub(crate) fn start(limit: Duration, input: Input<UnixStream>, killer: io::Result<OwnedFd>) -> Result<Self, Error> {
        let killer = killer.map_err(Error::host("keeping the VMM's descriptor"))?;
        let expired = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&expired);
        let (done, wait) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("time-limit".into())
            .spawn(move || enforce(limit, &input, killer.as_fd(), &flag, &wait))
            .map_err(Error::host("starting a thread"))?;
        Ok(Self { expired, done, thread })
    }

    /// Ends the timer; tells whether the time was over.
    pub(crate) fn stop(self) -> bool {
        drop(self.done);
        if self.thread.join().is_err() {
            log::error!("the thread that keeps the time limit panicked");
        }
        self.expired.load(Ordering::Acquire)
    }
}

fn enforce(
    limit: Duration,
    input: &Input<UnixStream>,
    vmm: BorrowedFd<'_>,
    expired: &AtomicBool,
    done: &mpsc::Receiver<()>,
) {
    let over = |limit| done.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
    if !over(limit) {
        return;
    }
    expired.store(true, Ordering::Release);
    for (signal, grace) in [(libc::SIGTERM, TERM_GRACE), (libc::SIGKILL, KILL_GRACE)] {
        if let Err(error) = input.signal(signal) {
            log::info!("signal {signal} did not reach the command: {error}");
        }
        if !over(grace) {
            return;
        }
    }
    if let Err(error) = pidfd_send_signal(vmm, Signal::KILL) {
        log::info!("the VMM could not be killed: {error}");
    }
}
