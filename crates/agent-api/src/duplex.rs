//! A stream with two directions that can be used from two threads. Knows sockets, not messages.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A connected stream socket. As a descriptor it can be waited for beside others.
pub trait Duplex: Read + Write + AsFd + Send + Sized {
    /// A second handle to the same stream.
    fn try_clone(&self) -> io::Result<Self>;

    /// Bounds how long a read waits; `None` is for ever.
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;

    /// Ends both directions; reads in other threads return.
    fn close(&self);

    /// Ends the direction away from here; the other side reads what was sent, and then the end.
    fn close_writing(&self);

    /// Something can be read, or the other side is gone.
    fn has_input(&self) -> bool;
}

fn has_input(stream: impl AsFd) -> bool {
    let nothing = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut fds = [PollFd::new(&stream, PollFlags::IN)];
    // What cannot be asked is found out by reading.
    poll(&mut fds, Some(&nothing)).is_ok_and(|ready| ready > 0)
}

impl Duplex for UnixStream {
    fn try_clone(&self) -> io::Result<Self> {
        Self::try_clone(self)
    }

    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        Self::set_read_timeout(self, timeout)
    }

    fn close(&self) {
        // Fails only if the peer has already ended the connection, and then there is nothing to do.
        drop(self.shutdown(Shutdown::Both));
    }

    fn close_writing(&self) {
        // As above.
        drop(self.shutdown(Shutdown::Write));
    }

    fn has_input(&self) -> bool {
        has_input(self)
    }
}

impl Duplex for TcpStream {
    fn try_clone(&self) -> io::Result<Self> {
        Self::try_clone(self)
    }

    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        Self::set_read_timeout(self, timeout)
    }

    fn close(&self) {
        // As above.
        drop(self.shutdown(Shutdown::Both));
    }

    fn close_writing(&self) {
        // As above.
        drop(self.shutdown(Shutdown::Write));
    }

    fn has_input(&self) -> bool {
        has_input(self)
    }
}
