//! Waking the other side, and waiting for it to wake this one. Knows no ring: what is to be seen is written before a side is woken, and
//! looked at again by whoever wakes up.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
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

/// By a stream socket, whose two ends are file descriptions of their own: this side waits until it can be read, and sends a byte to wake
/// the other. Between processes it is a pair of unix sockets; between a guest and its host, where words in shared memory wake nobody, a
/// vsock stream. A side that sends without end fills the socket, and then wakes this one no more often than it reads.
#[derive(Debug)]
pub struct SocketSignal(OwnedFd);

impl SocketSignal {
    /// Of this side's end.
    pub fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }
}

impl Signal for SocketSignal {
    fn seen(&self) -> u32 {
        // What keeps a wake-up is the kernel's, so nothing need be seen before.
        0
    }

    fn wake(&self) -> Result<(), Error> {
        wake_by(&self.0)
    }

    fn wait(&self, _: u32, most: Duration) -> Result<bool, Error> {
        wait_for(&self.0, most)
    }
}

/// Sends a byte, without a signal (SIGPIPE) for a program that is somebody else's.
pub(crate) fn wake_by(socket: &OwnedFd) -> Result<(), Error> {
    match rustix::net::send(socket, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        // One that is full wakes whoever reads it.
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(Error::PeerGone),
        Err(error) => Err(Error::io("wake by a socket")(error)),
    }
}

/// Waits for bytes, and takes them. True if there were some.
pub(crate) fn wait_for(socket: &OwnedFd, most: Duration) -> Result<bool, Error> {
    let most = Timespec::try_from(most).unwrap_or(Timespec {
        tv_sec: i32::MAX.into(),
        tv_nsec: 0,
    });
    match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&most)) {
        Ok(0) | Err(Errno::INTR) => return Ok(false),
        Ok(_) => (),
        Err(error) => return Err(Error::io("wait for a socket")(error)),
    }
    match rustix::net::recv(socket, &mut [0; 512], RecvFlags::DONTWAIT) {
        // The other side has ended, or this one's connection is over.
        Ok((_, 0)) | Err(Errno::CONNRESET | Errno::NOTCONN) => Err(Error::PeerGone),
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::INTR) => Ok(false),
        Err(error) => Err(Error::io("read a wake-up")(error)),
    }
}
