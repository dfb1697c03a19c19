//! Event fds: a counter in the kernel that wakes whoever polls it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

/// A non-blocking event fd, closed on exec.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A fresh one, not signalled.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM` of eventfd(2).
    pub fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// A second handle to the same counter.
    ///
    /// # Errors
    /// `EMFILE` when the process has no descriptor left.
    pub fn try_clone(&self) -> io::Result<Self> {
        // In one system call: the C library's way takes a second in some builds, which threads with a filter may not make.
        Ok(Self(rustix::io::fcntl_dupfd_cloexec(&self.0, 0)?))
    }

    /// Wakes whoever polls this. Never blocks; a counter that is full is signalled already.
    pub fn signal(&self) {
        match rustix::io::write(&self.0, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::AGAIN) => (),
            // EINTR cannot come from a non-blocking event fd; anything else is a descriptor that is none.
            Err(error) => log::error!("an event fd could not be signalled: {error}"),
        }
    }

    /// Takes the signal back. Tells whether there was one.
    pub fn consume(&self) -> bool {
        let mut counter = [0; 8];
        matches!(rustix::io::read(&self.0, &mut counter), Ok(8))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl From<EventFd> for OwnedFd {
    fn from(event: EventFd) -> Self {
        event.0
    }
}

#[cfg(test)]
mod tests {
    use super::EventFd;

    #[test]
    fn a_signal_is_consumed_once() {
        let event = EventFd::new().unwrap();
        assert!(!event.consume());
        event.signal();
        event.signal();
        assert!(event.consume());
        assert!(!event.consume());
    }
}
