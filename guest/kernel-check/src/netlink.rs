//! Netlink messages (RFC 3549 framing): builds requests, sends them, reads the acknowledgement. Knows no protocol's meaning.

use crate::syscall::Arg::{In, Num, Out};
use crate::syscall::call;
use std::io;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
/// Creates what does not exist.
pub(crate) const NLM_F_CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 2;
const NLA_F_NESTED: u16 = 0x8000;

/// A netlink socket of one protocol.
pub(crate) struct Socket(u64);

/// An attribute: 2 bytes length, 2 bytes type, payload, padded to 4.
pub(crate) fn attribute(kind: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len() + 4).expect("attributes here are short");
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// An attribute that holds attributes.
pub(crate) fn nest(kind: u16, members: &[Vec<u8>]) -> Vec<u8> {
    attribute(kind | NLA_F_NESTED, &members.concat())
}

/// A whole message; `flags` in addition to "this is a request".
pub(crate) fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 16).expect("messages here are short");
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    bytes.extend([0; 8]); // sequence number and port: one request at a time
    bytes.extend(body);
    bytes
}

/// A message that is answered, also when all is well.
pub(crate) fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    message(kind, flags | NLM_F_ACK, body)
}

impl Socket {
    pub(crate) fn open(protocol: u64) -> io::Result<Self> {
        call(libc::SYS_socket, [Num(16), Num(3), Num(protocol)]).map(Self)
    }

    /// Sends `messages` in one packet and waits for `answers` acknowledgements; the first refusal is the error.
    pub(crate) fn ask(&self, messages: &[Vec<u8>], answers: usize) -> io::Result<()> {
        let packet = messages.concat();
        // Address: the kernel (family AF_NETLINK, everything else 0).
        let kernel = [16_u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let length = packet.len() as u64;
        call(
            libc::SYS_sendto,
            [Num(self.0), In(&packet), Num(length), Num(0), In(&kernel), Num(12)],
        )?;
        let mut seen = 0;
        while seen < answers {
            seen += self.receive()?;
        }
        Ok(())
    }

    /// Reads one packet and returns how many acknowledgements it held.
    fn receive(&self) -> io::Result<usize> {
        let mut buffer = vec![0_u8; 8192];
        let read = call(
            libc::SYS_recvfrom,
            [Num(self.0), Out(&mut buffer), Num(8192), Num(0), Num(0), Num(0)],
        )?;
        let mut rest = buffer
            .get(..usize::try_from(read).map_err(io::Error::other)?)
            .unwrap_or_default();
        let mut seen = 0;
        while let Some((head, tail)) = rest.split_first_chunk::<16>() {
            let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
            if u16::from_ne_bytes([head[4], head[5]]) == NLMSG_ERROR {
                let code = tail.first_chunk::<4>().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
                if code != 0 {
                    return Err(io::Error::from_raw_os_error(-code));
                }
                seen += 1;
            }
            rest = rest.get(length.max(16).next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(seen)
    }
}
