//! An epoll set, level-triggered unless asked otherwise, whose tokens are small integers chosen by the caller.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

/// The longest wait, which is one that the kernel takes in milliseconds of 32 bits: for a longer one there is another system call, which
/// threads with a filter may not make.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// What a descriptor is watched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Wake when a read would not block.
    pub read: bool,
    /// Wake when a write would not block.
    pub write: bool,
    /// Once for each time that it becomes so, or is told so again, rather than for as long as it is (`EPOLLET`).
    pub edge: bool,
}

impl Interest {
    /// Readable only.
    pub const READ: Self = Self {
        read: true,
        write: false,
        edge: false,
    };
    /// Readable only, told at each signal: an event fd need not be read back to zero.
    pub const READ_EDGE: Self = Self {
        read: true,
        write: false,
        edge: true,
    };
    /// Writable only.
    pub const WRITE: Self = Self {
        read: false,
        write: true,
        edge: false,
    };
    /// Both directions.
    pub const BOTH: Self = Self {
        read: true,
        write: true,
        edge: false,
    };
    /// Neither; errors and hang-ups are still reported.
    pub const NONE: Self = Self {
        read: false,
        write: false,
        edge: false,
    };

    fn flags(self) -> EventFlags {
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN | EventFlags::RDHUP, self.read);
        flags.set(EventFlags::OUT, self.write);
        flags.set(EventFlags::ET, self.edge);
        flags
    }
}

/// One descriptor that became ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The token given to [`Epoll::add`].
    pub token: u64,
    /// A read would not block (end of file included).
    pub readable: bool,
    /// A write would not block.
    pub writable: bool,
    /// The other side hung up or the descriptor is in error.
    pub hangup: bool,
}

/// A set of descriptors to wait for.
#[derive(Debug)]
pub struct Epoll {
    fd: OwnedFd,
}

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// Those of epoll_create1(2).
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            fd: epoll::create(CreateFlags::CLOEXEC)?,
        })
    }

    /// Watches `fd`; `token` comes back in [`Ready`].
    ///
    /// # Errors
    /// `EEXIST` when the descriptor is in the set already, `EPERM` when it cannot be polled.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.fd, fd, EventData::new_u64(token), interest.flags())?)
    }

    /// Changes what `fd` is watched for.
    ///
    /// # Errors
    /// `ENOENT` when the descriptor is not in the set.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(
            &self.fd,
            fd,
            EventData::new_u64(token),
            interest.flags(),
        )?)
    }

    /// Stops watching `fd`.
    ///
    /// # Errors
    /// `ENOENT` when the descriptor is not in the set.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.fd, fd)?)
    }

    /// Waits until a descriptor is ready or `timeout` has passed (`None`: for ever; a day at most), and appends what is
    /// ready to `out` after clearing it. Interrupted waits start again.
    ///
    /// # Errors
    /// Those of epoll_wait(2) other than `EINTR`.
    pub fn wait(&self, out: &mut Vec<Ready>, timeout: Option<Duration>) -> io::Result<()> {
        const MOST: usize = 32;
        out.clear();
        let mut room = [const { MaybeUninit::uninit() }; MOST];
        let timeout = timeout
            .map(|timeout| timeout.min(LONGEST))
            .map(|timeout| rustix::time::Timespec {
                tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(timeout.subsec_nanos()),
            });
        let events = loop {
            match epoll::wait(&self.fd, &mut room, timeout.as_ref()) {
                Ok((events, _)) => break events,
                Err(rustix::io::Errno::INTR) => (),
                Err(error) => return Err(error.into()),
            }
        };
        out.extend(events.iter().map(|event| {
            let flags = event.flags;
            Ready {
                token: event.data.u64(),
                readable: flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP),
                writable: flags.contains(EventFlags::OUT),
                hangup: flags.intersects(EventFlags::HUP | EventFlags::ERR),
            }
        }));
        Ok(())
    }
}

impl AsFd for Epoll {
    /// Readable while a descriptor of the set is ready: a set can be in another one.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_wait_of_years_is_one_that_filters_let_through() {
        let epoll = Epoll::new().unwrap();
        let (mut a, b) = UnixStream::pair().unwrap();
        epoll.add(&b, 1, Interest::READ).unwrap();
        a.write_all(b"x").unwrap();
        let mut ready = Vec::new();
        epoll.wait(&mut ready, Some(Duration::MAX)).unwrap();
        assert_eq!(ready.len(), 1);
        // epoll_pwait(2) takes milliseconds, as a C int.
        assert!(i32::try_from(LONGEST.as_millis()).is_ok());
    }

    #[test]
    fn reports_the_token_of_the_ready_descriptor_only() {
        let epoll = Epoll::new().unwrap();
        let (mut a, b) = UnixStream::pair().unwrap();
        let (_c, d) = UnixStream::pair().unwrap();
        epoll.add(&b, 7, Interest::READ).unwrap();
        epoll.add(&d, 8, Interest::READ).unwrap();
        let mut ready = Vec::new();
        epoll.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert!(ready.is_empty());
        a.write_all(b"x").unwrap();
        epoll.wait(&mut ready, None).unwrap();
        assert_eq!(
            ready
                .iter()
                .map(|r| (r.token, r.readable, r.hangup))
                .collect::<Vec<_>>(),
            [(7, true, false)]
        );
    }

    #[test]
    fn a_set_is_ready_while_something_in_it_is() {
        let (inner, outer) = (Epoll::new().unwrap(), Epoll::new().unwrap());
        let event = crate::EventFd::new().unwrap();
        inner.add(&event, 1, Interest::READ).unwrap();
        outer.add(&inner, 2, Interest::READ).unwrap();
        let mut ready = Vec::new();
        for is_signalled in [false, true, false] {
            if is_signalled {
                event.signal();
            } else {
                event.consume();
            }
            outer.wait(&mut ready, Some(Duration::ZERO)).unwrap();
            assert_eq!(ready.len(), usize::from(is_signalled));
        }
    }

    #[test]
    fn an_edge_is_told_once_for_each_signal() {
        let epoll = Epoll::new().unwrap();
        let event = crate::EventFd::new().unwrap();
        epoll.add(&event, 1, Interest::READ_EDGE).unwrap();
        let mut ready = Vec::new();
        for _ in 0..2 {
            event.signal();
            epoll.wait(&mut ready, Some(Duration::ZERO)).unwrap();
            assert_eq!(ready.len(), 1);
            epoll.wait(&mut ready, Some(Duration::ZERO)).unwrap();
            assert!(ready.is_empty(), "it was not read, and is not told again");
        }
    }

    #[test]
    fn a_closed_peer_is_readable_and_hung_up() {
        let epoll = Epoll::new().unwrap();
        let (a, b) = UnixStream::pair().unwrap();
        epoll.add(&b, 1, Interest::NONE).unwrap();
        drop(a);
        let mut ready = Vec::new();
        epoll.wait(&mut ready, None).unwrap();
        assert!(ready[0].hangup);
    }
}
