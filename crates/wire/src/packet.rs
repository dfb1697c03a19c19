//! Packets with file descriptors over a unix SEQPACKET socket: one packet is one message.
//!
//! Descriptors travel by `SCM_RIGHTS` (unix(7)). This module does not know what a packet means.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};

/// The largest packet, in bytes; a socket's buffer has room for one by default (`net.core.wmem_default`). The counters of
/// the largest VM fit, and larger configurations do not exist; a larger packet is a broken peer.
pub const MAX_PACKET: usize = 160 << 10;

/// The most descriptors in one packet (the kernel's own limit, `SCM_MAX_FD`, is 253).
pub const MAX_FDS: usize = 64;

/// What can go wrong on a packet socket.
#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    /// The other side closed the socket.
    #[error("the other side closed the connection")]
    Closed,
    /// The packet does not fit.
    #[error("a packet of {0} bytes is larger than {MAX_PACKET}")]
    TooLarge(usize),
    /// Too many descriptors for one packet.
    #[error("{0} file descriptors in one packet, at most {MAX_FDS} can travel")]
    TooManyFds(usize),
    /// The kernel cut the packet or its descriptors off.
    #[error("the packet arrived incomplete")]
    Truncated,
    /// The moment until which was waited is over.
    #[error("the other side took too long")]
    Late,
    /// The socket failed.
    #[error("the packet socket failed")]
    Io(#[from] rustix::io::Errno),
}

/// One end of a packet connection.
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

impl PacketSocket {
    /// Two connected ends, closed on exec.
    ///
    /// # Errors
    /// Those of socketpair(2).
    pub fn pair() -> Result<(Self, Self), PacketError> {
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(a), Self(b)))
    }

    /// A packet socket out of a descriptor made elsewhere (inherited or accepted).
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Sends one packet; the descriptors are duplicated into the receiver.
    ///
    /// # Errors
    /// [`PacketError::Closed`] when nobody reads the other end any more.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), PacketError> {
        if bytes.len() > MAX_PACKET {
            return Err(PacketError::TooLarge(bytes.len()));
        }
        if fds.len() > MAX_FDS {
            return Err(PacketError::TooManyFds(fds.len()));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(PacketError::TooManyFds(fds.len()));
        }
        loop {
            match rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => (),
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(PacketError::Closed),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until a small packet can be sent at once.
    ///
    /// # Errors
    /// [`PacketError::Late`] when that is not so by then.
    pub fn wait_to_send(&self, deadline: Instant) -> Result<(), PacketError> {
        self.wait(PollFlags::OUT, deadline)
    }

    /// Waits until there is a packet, or the end.
    ///
    /// # Errors
    /// [`PacketError::Late`] when there is none by then.
    pub fn wait_to_receive(&self, deadline: Instant) -> Result<(), PacketError> {
        self.wait(PollFlags::IN, deadline)
    }

    fn wait(&self, flags: PollFlags, deadline: Instant) -> Result<(), PacketError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(|_| rustix::io::Errno::INVAL)?;
            match poll(&mut [PollFd::new(&self.0, flags)], Some(&left)) {
                Ok(0) => return Err(PacketError::Late),
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => (),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for one packet.
    ///
    /// # Errors
    /// [`PacketError::Closed`] at the end, [`PacketError::Truncated`] when it was too large for us.
    pub fn receive(&self) -> Result<(Vec<u8>, Vec<OwnedFd>), PacketError> {
        let mut bytes = vec![0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            match rustix::net::recvmsg(&self.0, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received,
                Err(rustix::io::Errno::INTR) => (),
                Err(rustix::io::Errno::CONNRESET) => return Err(PacketError::Closed),
                Err(error) => return Err(error.into()),
            }
        };
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        // An empty packet is how SEQPACKET says end of file; no protocol of ours sends one.
        if received.bytes == 0 {
            return Err(PacketError::Closed);
        }
        if received
            .flags
            .intersects(rustix::net::ReturnFlags::TRUNC | rustix::net::ReturnFlags::CTRUNC)
        {
            return Err(PacketError::Truncated);
        }
        bytes.truncate(received.bytes);
        bytes.shrink_to_fit();
        Ok((bytes, fds))
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<PacketSocket> for OwnedFd {
    fn from(socket: PacketSocket) -> Self {
        socket.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn descriptors_arrive_alive() {
        let (a, b) = PacketSocket::pair().unwrap();
        let (mut near, far) = UnixStream::pair().unwrap();
        a.send(b"take it", &[far.as_fd()]).unwrap();
        drop(far);
        let (bytes, mut fds) = b.receive().unwrap();
        assert_eq!(bytes, b"take it");
        near.write_all(b"hi").unwrap();
        let mut text = [0; 2];
        UnixStream::from(fds.remove(0)).read_exact(&mut text).unwrap();
        assert_eq!(&text, b"hi");
    }

    #[test]
    fn a_closed_end_is_told_to_both_directions() {
        let (a, b) = PacketSocket::pair().unwrap();
        drop(b);
        assert!(matches!(a.receive(), Err(PacketError::Closed)));
        assert!(matches!(a.send(b"x", &[]), Err(PacketError::Closed)));
    }

    #[test]
    fn too_large_is_refused_before_it_is_sent() {
        let (a, _b) = PacketSocket::pair().unwrap();
        assert!(matches!(
            a.send(&vec![0; MAX_PACKET + 1], &[]),
            Err(PacketError::TooLarge(_))
        ));
    }
}
