//! Netlink requests to the kernel, one at a time, each waited for. Knows the format of messages (linux/netlink.h), not what
//! they are about.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Header of a message: length, type, flags, sequence number, port.
const HEADER: usize = 16;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
/// Make it if it is not there.
pub const NLM_F_CREATE: u16 = 0x400;
/// Put it in the place of what is there.
pub const NLM_F_REPLACE: u16 = 0x100;
/// Fail if it is there.
pub const NLM_F_EXCL: u16 = 0x200;

/// Put it behind the others.
pub const NLM_F_APPEND: u16 = 0x800;

const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLA_F_NESTED: u16 = 1 << 15;
/// The bits of an attribute's type that are no flags.
const NLA_TYPE_MASK: u16 = 0x3fff;

/// A body under construction.
#[derive(Debug, Default)]
pub struct Body(Vec<u8>);

impl Body {
    /// Begins with a fixed structure.
    pub fn new(fixed: &[u8]) -> Self {
        Self(fixed.to_vec())
    }

    /// Adds an attribute.
    pub fn attribute(&mut self, kind: u16, data: &[u8]) -> &mut Self {
        let length = u16::try_from(4 + data.len()).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(data);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Adds a text with its terminating zero.
    pub fn text(&mut self, kind: u16, text: &str) -> &mut Self {
        self.attribute(kind, &[text.as_bytes(), &[0]].concat())
    }

    /// Adds attributes within an attribute.
    pub fn nested(&mut self, kind: u16, inner: &Self) -> &mut Self {
        self.attribute(kind | NLA_F_NESTED, &inner.0)
    }

    /// What was built.
    #[cfg(test)]
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Attributes of a message, by kind.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(bytes.first_chunk::<2>().copied()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & NLA_TYPE_MASK;
        let data = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, data))
    })
}

/// A socket, in the namespace of the thread that opened it.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// A socket for links, addresses and routes (rtnetlink(7)).
    ///
    /// # Errors
    /// Those of socket(2).
    pub fn route() -> io::Result<Self> {
        Self::open(None)
    }

    /// A socket for connection tracking.
    ///
    /// # Errors
    /// Those of socket(2).
    pub fn netfilter() -> io::Result<Self> {
        Self::open(Some(rustix::net::netlink::NETFILTER))
    }

    /// A socket for what sockets there are (sock_diag(7)).
    ///
    /// # Errors
    /// Those of socket(2).
    pub fn diagnosis() -> io::Result<Self> {
        Self::open(Some(rustix::net::netlink::SOCK_DIAG))
    }

    fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
        Ok(Self(socket))
    }

    /// Asks for a change and waits for its acknowledgement.
    ///
    /// # Errors
    /// The kernel refuses, or its answer is malformed.
    pub fn request(&self, kind: u16, flags: u16, body: &Body) -> io::Result<()> {
        self.ask(kind, flags, body, |_, _| {})
    }

    /// Asks for something; `each` gets the answers before the acknowledgement.
    ///
    /// # Errors
    /// The kernel refuses, or its answer is malformed.
    pub fn ask(&self, kind: u16, flags: u16, body: &Body, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.send(kind, NLM_F_ACK | flags, body)?;
        let mut done = false;
        while !done {
            self.receive(|kind, data| {
                if kind == NLMSG_ERROR {
                    done = true;
                    return error_of(data);
                }
                each(kind, data);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Asks for everything of a kind; `each` gets the type and the body of every message.
    ///
    /// # Errors
    /// The kernel refuses, or its answer is malformed.
    pub fn dump(&self, kind: u16, body: &Body, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.send(kind, NLM_F_DUMP, body)?;
        let mut done = false;
        while !done {
            self.receive(|kind, data| {
                match kind {
                    NLMSG_DONE => done = true,
                    NLMSG_ERROR => {
                        done = true;
                        return error_of(data);
                    }
                    _ => each(kind, data),
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Asks for several changes of one netfilter subsystem: all of them or none. The socket is of no further use after an
    /// error.
    ///
    /// # Errors
    /// The kernel refuses one of them.
    pub fn transaction(&self, subsystem: u16, messages: &[(u16, u16, Body)]) -> io::Result<()> {
        // struct nfgenmsg: family, version, res_id in network order.
        let [high, low] = subsystem.to_be_bytes();
        let frame = Body::new(&[0, 0, high, low]);
        let mut datagram = message(NFNL_MSG_BATCH_BEGIN, 0, &frame);
        for (kind, flags, body) in messages {
            datagram.extend(message(subsystem << 8 | kind, NLM_F_ACK | flags, body));
        }
        datagram.extend(message(NFNL_MSG_BATCH_END, 0, &frame));
        rustix::net::sendto(&self.0, &datagram, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let mut left = messages.len();
        while left > 0 {
            self.receive(|kind, data| {
                if kind == NLMSG_ERROR {
                    left = left.saturating_sub(1);
                    return error_of(data);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn send(&self, kind: u16, flags: u16, body: &Body) -> io::Result<()> {
        let message = message(kind, flags, body);
        rustix::net::sendto(&self.0, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        Ok(())
    }

    /// The messages of one datagram.
    fn receive(&self, mut each: impl FnMut(u16, &[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        let (_, length) = rustix::net::recv(&self.0, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = buffer.get(..length).unwrap_or_default();
        while let Some(header) = rest.first_chunk::<HEADER>() {
            let [l0, l1, l2, l3, k0, k1, ..] = *header;
            let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
            let body = rest.get(HEADER..length).ok_or_else(malformed)?;
            each(u16::from_ne_bytes([k0, k1]), body)?;
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(())
    }
}

/// One message: header and body.
fn message(kind: u16, flags: u16, body: &Body) -> Vec<u8> {
    let length = u32::try_from(HEADER + body.0.len()).unwrap_or(u32::MAX);
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    // Sequence number and port: one request is under way at a time.
    message.extend([0; 8]);
    message.extend(&body.0);
    message
}

/// `NLMSG_ERROR` has a negated error number, zero for success.
fn error_of(data: &[u8]) -> io::Result<()> {
    let code = data.first_chunk::<4>().ok_or_else(malformed)?;
    match i32::from_ne_bytes(*code) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a netlink message is cut short")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_they_were_written() {
        let mut inner = Body::default();
        inner.text(1, "up0").attribute(2, &[7]);
        let mut body = Body::default();
        body.nested(3, &inner).attribute(4, &[1, 2, 3, 4]);
        let outer: Vec<_> = attributes(body.bytes()).collect();
        assert_eq!(outer[1], (4, &[1, 2, 3, 4][..]));
        let read: Vec<_> = attributes(outer[0].1).collect();
        assert_eq!(read, [(1, &b"up0\0"[..]), (2, &[7][..])]);
    }

    #[test]
    fn what_is_cut_short_ends_the_list() {
        let mut body = Body::default();
        body.attribute(1, &[1, 2, 3, 4]).attribute(2, &[5, 6, 7, 8]);
        for length in 0..body.bytes().len() {
            assert!(attributes(&body.bytes()[..length]).count() < 2);
        }
        assert_eq!(attributes(&[0; 64]).next(), None, "a length of zero");
    }
}
