//! Calling a thread out of a system call, by a signal that does nothing else. Knows neither the thread nor the call.
#![allow(
    unsafe_code,
    reason = "signals have handlers and go to threads by number only in libc; each block says what it relies on"
)]

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

/// The first real-time signal is the C library's in some builds; this one is nobody's.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 1
}

extern "C" fn ignore(_: libc::c_int) {}

/// A signal that is ignored would not interrupt a system call; one with a handler does.
fn install_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a zeroed sigaction is a valid one: no flags (so calls are not restarted), empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
        // SAFETY: 1. `action` lives through the call; 2. the handler is async-signal-safe: it does nothing.
        let result = unsafe { libc::sigaction(signal(), &raw const action, std::ptr::null_mut()) };
        if result != 0 {
            log::error!("the signal for threads has no handler: {}", io::Error::last_os_error());
        }
    });
}

/// A thread that may be in a system call, once one has said that it is that one. A thread that is not in one, or not yet, does not
/// notice: what it is to see is set before it is nudged, and looked at by whatever the call does first.
#[derive(Debug)]
pub struct Nudge(AtomicI32);

impl Default for Nudge {
    fn default() -> Self {
        Self::new()
    }
}

impl Nudge {
    /// Nobody yet.
    pub fn new() -> Self {
        install_handler();
        Self(AtomicI32::new(0))
    }

    /// It is the current thread from now on, which must not end before the last nudge.
    pub fn adopt_current_thread(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.0.store(thread, Ordering::SeqCst);
    }

    /// Has the thread's system call end with `EINTR`, if it is in one that waits.
    pub fn nudge(&self) {
        let thread = self.0.load(Ordering::SeqCst);
        if thread != 0 {
            let process = rustix::process::getpid().as_raw_nonzero().get();
            // SAFETY: tgkill takes plain numbers; a thread that has ended gives ESRCH.
            unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;
    use crate::EventFd;

    #[test]
    fn a_call_that_waits_is_interrupted() {
        let nudge = Arc::new(Nudge::new());
        // Nobody is there yet.
        nudge.nudge();
        let (say, said) = channel();
        let own = Arc::clone(&nudge);
        let thread = std::thread::spawn(move || {
            own.adopt_current_thread();
            let never = EventFd::new().unwrap();
            say.send(()).unwrap();
            poll(&mut [PollFd::new(&never, PollFlags::IN)], None)
        });
        said.recv().unwrap();
        while !thread.is_finished() {
            nudge.nudge();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(thread.join().unwrap(), Err(rustix::io::Errno::INTR));
    }
}
