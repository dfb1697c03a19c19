//! Waking the other side, and waiting for it to wake this one. Knows no ring: what is to be seen is written before a side is woken, and
//! looked at again by whoever wakes up.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use wire::ring::Word;

use crate::Error;

/// How two sides wake each other. One that wants to sleep takes [`Signal::seen`], says that it is to be woken, looks once more, and
/// waits: a wake-up since then is not missed. Waits may end early.
pub trait Signal: Debug + Send {
    /// Which wake-up of this side was the last one.
    fn seen(&self) -> u32;

    /// Wakes the other side, now or when it waits next.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn wake(&self) -> Result<(), Error>;

    /// Waits for a wake-up since `seen`, no longer than that. True if there was one.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn wait(&self, seen: u32, most: Duration) -> Result<bool, Error>;
}

/// By words in shared memory, each of which counts a side's wake-ups (futex(2)). What the other side writes there can wake this one
/// too often or not at all, and nothing else.
#[derive(Clone, Debug)]
pub struct FutexSignal {
    own: Word,
    other: Word,
}

impl FutexSignal {
    /// Of the word on which this side waits, and the other's.
    pub fn new(own: Word, other: Word) -> Self {
        Self { own, other }
    }
}

impl Signal for FutexSignal {
    fn seen(&self) -> u32 {
        self.own.load(Ordering::Acquire)
    }

    fn wake(&self) -> Result<(), Error> {
        ring(&self.other)
    }

    fn wait(&self, seen: u32, most: Duration) -> Result<bool, Error> {
        self.own.wait(seen, most).map_err(Error::io("wait for a futex"))?;
        Ok(self.seen() != seen)
    }
}

/// Counts a wake-up in a word, and wakes who waits for it.
pub(crate) fn ring(word: &Word) -> Result<(), Error> {
    word.add(1, Ordering::Release);
    word.wake().map_err(Error::io("wake by a futex")).map(drop)
}

/// By descriptors: this side waits until its own is readable, and writes eight bytes to the other's.
///
/// Between processes that do not trust each other they are pipes, whose ends are open file descriptions of their own: with an event fd,
/// whose description both would have, a hostile side could take `O_NONBLOCK` away and fill the counter, and the other one's next
/// wake-up would block for ever. Event fds will do where the kernel has the other end (a doorbell, an interrupt).
#[derive(Debug)]
pub struct DescriptorSignal {
    own: OwnedFd,
    other: OwnedFd,
}

impl DescriptorSignal {
    /// Of the one on which this side waits, and the other's.
    ///
    /// # Errors
    /// One cannot be made non-blocking.
    pub fn new(own: OwnedFd, other: OwnedFd) -> Result<Self, Error> {
        for fd in [&own, &other] {
            rustix::io::ioctl_fionbio(fd, true).map_err(Error::io("make a descriptor non-blocking"))?;
        }
        Ok(Self { own, other })
    }
}

impl Signal for DescriptorSignal {
    fn seen(&self) -> u32 {
        // What keeps a wake-up is the kernel's, so nothing need be seen before.
        0
    }

    fn wake(&self) -> Result<(), Error> {
        write(&self.other)
    }

    fn wait(&self, _: u32, most: Duration) -> Result<bool, Error> {
        let most = Timespec::try_from(most).unwrap_or(Timespec {
            tv_sec: i32::MAX.into(),
            tv_nsec: 0,
        });
        match poll(&mut [PollFd::new(&self.own, PollFlags::IN)], Some(&most)) {
            Ok(0) | Err(Errno::INTR) => return Ok(false),
            Ok(_) => (),
            Err(error) => return Err(Error::io("wait for a descriptor")(error)),
        }
        match rustix::io::read(&self.own, &mut [0; 512]) {
            // The end of a pipe: the other side has ended, or closed it.
            Ok(0) => Err(Error::PeerGone),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(Error::io("read a wake-up")(error)),
        }
    }
}

/// Makes a descriptor readable at its other end. One that is full is that already.
pub(crate) fn write(fd: &OwnedFd) -> Result<(), Error> {
    match rustix::io::write(fd, &1_u64.to_ne_bytes()) {
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(Errno::PIPE) => Err(Error::PeerGone),
        Err(error) => Err(Error::io("wake by a descriptor")(error)),
    }
}
