//! What the bytes of a stream of records go through: a socket, as it is or with TLS on it. Knows no record.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};

use crate::Error;

/// How long one system call waits: between two of them deadlines are looked at.
pub(crate) const CALL: Duration = Duration::from_millis(40);

/// A connected stream socket whose calls wait for [`CALL`] at most, and then answer that they would block.
#[derive(Debug)]
pub(crate) enum Channel {
    /// A unix, vsock or TCP socket.
    Socket(OwnedFd),
    /// TLS, by TCP.
    Tls(Box<Tls>),
}

/// TLS on a socket, after its handshake or before.
#[derive(Debug)]
pub(crate) struct Tls {
    pub(crate) state: rustls::Connection,
    pub(crate) socket: TcpStream,
}

impl Channel {
    /// Of a socket.
    pub(crate) fn new(socket: OwnedFd) -> Result<Self, Error> {
        limit(socket.as_fd())?;
        Ok(Self::Socket(socket))
    }

    /// Of a socket with TLS.
    pub(crate) fn tls(socket: TcpStream, state: rustls::Connection) -> Result<Self, Error> {
        limit(socket.as_fd())?;
        Ok(Self::Tls(Box::new(Tls { state, socket })))
    }

    /// Its socket, to be looked at or shut down.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(socket) => socket.as_fd(),
            Self::Tls(tls) => tls.socket.as_fd(),
        }
    }

    /// Takes some bytes, of which [`Self::flush`] lets the last ones go.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Socket(socket) => Ok(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL)?),
            Self::Tls(tls) => {
                tls.flush()?;
                // It has room, as all that it had has gone.
                tls.state.writer().write(bytes)
            }
        }
    }

    /// Lets all go that was taken.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Socket(_) => Ok(()),
            Self::Tls(tls) => tls.flush(),
        }
    }

    /// Some bytes that have come; none at the end. [`io::ErrorKind::WouldBlock`] after a wait for nothing,
    /// [`io::ErrorKind::Interrupted`] at once if something has come of which nothing can be used yet.
    pub(crate) fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Socket(socket) => Ok(rustix::net::recv(socket, into, RecvFlags::empty())?.0),
            Self::Tls(tls) => tls.receive(into),
        }
    }
}

impl Tls {
    fn flush(&mut self) -> io::Result<()> {
        while self.state.wants_write() {
            self.state.write_tls(&mut NoSignal(&self.socket))?;
        }
        Ok(())
    }

    fn receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.state.reader().read(into) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => (),
            read => return read,
        }
        if self.advance()? == 0 {
            return Ok(0);
        }
        match self.state.reader().read(into) {
            // A part of what TLS encrypts at a time: who waits looks at the clock before the rest is waited for.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(io::ErrorKind::Interrupted.into()),
            read => read,
        }
    }

    /// Takes what has come, and says what the protocol has to say; zero at the socket's end.
    pub(crate) fn advance(&mut self) -> io::Result<usize> {
        self.flush()?;
        let got = self.state.read_tls(&mut &self.socket)?;
        let processed = self.state.process_new_packets();
        // An alert tells the other side what it did wrong.
        self.flush()?;
        processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(got)
    }
}

/// Writing to a socket whose other side is gone must not end a program that is somebody else's (SIGPIPE).
struct NoSignal<'a>(&'a TcpStream);

impl io::Write for NoSignal<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Has a socket's calls wait for no longer than a moment.
fn limit(socket: BorrowedFd<'_>) -> Result<(), Error> {
    for timeout in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(socket, timeout, Some(CALL)).map_err(Error::io("set a socket's timeout"))?;
    }
    Ok(())
}
