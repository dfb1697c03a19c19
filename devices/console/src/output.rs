//! Where the guest's output goes.
//!
//! ```text
//!             would block              nobody reads for PATIENCE
//!   Flowing ──────────────▶ Blocked ─────────────────────────────▶ Dropping
//!      ▲                       │ writable                             │ writable
//!      └───────────────────────┴──────────────────────────────────────┘
//!   each ──── an error, such as that the reader has gone ────▶ Closed (said once)
//! ```
//! A Linux guest spins with a lock held until its console has taken a buffer, so waiting has to end: what is written
//! while nobody reads is dropped. Knows no queue.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use base::FileBound;
use vm_memory::{VolatileMemoryError, VolatileSlice, WriteVolatile};

/// How long the guest waits for a reader that does not read.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Flowing,
    Blocked { until: Instant },
    Dropping,
    Closed,
}

/// What became of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// So many were written; offer the rest again.
    Written(usize),
    /// All are to be dropped.
    Dropped,
    /// They have to wait.
    Waiting,
}

/// A descriptor that does not block, and how it does.
#[derive(Debug)]
pub(crate) struct Output {
    fd: Option<OwnedFd>,
    bound: Option<FileBound>,
    state: State,
}

impl Output {
    /// Writes to `fd`, which does not block; drops everything when there is none. Of a file, the last `keep` bytes are
    /// kept.
    pub(crate) fn new(fd: Option<OwnedFd>, keep: Option<u64>) -> Self {
        let state = if fd.is_some() { State::Flowing } else { State::Closed };
        Self {
            fd,
            bound: keep.map(FileBound::new),
            state,
        }
    }

    /// Offers some bytes.
    pub(crate) fn write(&mut self, bytes: &VolatileSlice<'_>, now: Instant) -> Fate {
        let Some(mut fd) = self.fd.as_ref() else {
            return Fate::Dropped;
        };
        match self.state {
            State::Flowing => (),
            State::Blocked { .. } => return Fate::Waiting,
            State::Dropping | State::Closed => return Fate::Dropped,
        }
        match WriteVolatile::write_volatile(&mut fd, bytes) {
            Ok(count) => {
                if let Some(bound) = &mut self.bound
                    && let Err(error) = bound.wrote(fd, count as u64)
                {
                    // Without its limit a hostile guest would fill the disk.
                    self.close(&error);
                }
                Fate::Written(count)
            }
            Err(VolatileMemoryError::IOError(error)) => self.on_error(&error, now),
            Err(error) => self.on_error(&io::Error::other(error), now),
        }
    }

    fn on_error(&mut self, error: &io::Error, now: Instant) -> Fate {
        match error.kind() {
            io::ErrorKind::WouldBlock => {
                self.state = State::Blocked { until: now + PATIENCE };
                Fate::Waiting
            }
            io::ErrorKind::Interrupted => Fate::Written(0),
            _ => {
                self.close(error);
                Fate::Dropped
            }
        }
    }

    /// Drops everything from now on.
    pub(crate) fn close(&mut self, error: &io::Error) {
        log::warn!("the console's output is dropped from now on: {error}");
        self.state = State::Closed;
        self.fd = None;
    }

    /// The descriptor, until an error.
    pub(crate) fn fd(&self) -> Option<&OwnedFd> {
        self.fd.as_ref()
    }

    /// What to wait for until it can be written, if it is waited for.
    pub(crate) fn awaited(&self) -> Option<&OwnedFd> {
        match self.state {
            State::Blocked { .. } | State::Dropping => self.fd.as_ref(),
            State::Flowing | State::Closed => None,
        }
    }

    /// It can be written again (or an error is to be fetched).
    pub(crate) fn writable(&mut self) {
        if self.state != State::Closed {
            self.state = State::Flowing;
        }
    }

    /// When waiting ends.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Blocked { until } => Some(until),
            _ => None,
        }
    }

    /// Ends waiting, if it is time.
    pub(crate) fn expire(&mut self, now: Instant) {
        if self.deadline().is_some_and(|until| until <= now) {
            log::warn!("the console's output has no reader; it is dropped until there is one");
            self.state = State::Dropping;
        }
    }

    /// Work goes on after a pause: whoever reads has all of the time again.
    pub(crate) fn resume(&mut self, now: Instant) {
        if let State::Blocked { until } = &mut self.state {
            *until = now + PATIENCE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn waiting_ends_and_reading_starts_it_again() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let writer = OwnedFd::from(writer);
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let mut output = Output::new(Some(writer), None);
        let mut bytes = vec![b'x'; 4096];
        let slice = VolatileSlice::from(&mut bytes[..]);
        let now = Instant::now();
        let mut written = 0;
        while let Fate::Written(count) = output.write(&slice, now) {
            written += count;
        }
        assert_eq!(output.deadline(), Some(now + PATIENCE));
        output.expire(now + PATIENCE / 2);
        assert_eq!(output.write(&slice, now), Fate::Waiting);
        output.resume(now + PATIENCE / 2);
        output.expire(now + PATIENCE);
        assert_eq!(output.write(&slice, now), Fate::Waiting, "a pause gives more time");
        output.expire(now + 2 * PATIENCE);
        assert_eq!(output.write(&slice, now), Fate::Dropped);
        assert!(output.awaited().is_some());
        let mut all = vec![0; written];
        reader.read_exact(&mut all).unwrap();
        output.writable();
        assert_eq!(output.write(&slice, now), Fate::Written(4096));
        drop(reader);
        assert_eq!(output.write(&slice, now), Fate::Dropped);
        output.writable();
        assert_eq!(output.write(&slice, now), Fate::Dropped, "closed stays closed");
        assert!(output.awaited().is_none());
    }
}
