//! Brings an interface up and gives it an address and a route, over rtnetlink. Knows no interface by name.
//!
//! Message layouts: Linux `include/uapi/linux/{netlink,rtnetlink,if_addr}.h`.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_CREATE: u16 = 0x400;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const AF_INET: u8 = 2;
const IFF_UP: u32 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_BOOT: u8 = 3;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RTN_UNICAST: u8 = 1;
/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;

/// A netlink socket of the routing family.
pub(crate) struct Route {
    socket: OwnedFd,
}

impl Route {
    /// Opens the socket.
    pub(crate) fn open() -> Result<Self> {
        // No protocol is NETLINK_ROUTE, which is 0.
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)
            .context("cannot open a netlink socket")?;
        Ok(Self { socket })
    }

    /// Sets the interface up and says its index.
    pub(crate) fn up(&self, interface: &str) -> Result<u32> {
        let index = rustix::net::netdevice::name_to_index(&self.socket, interface)
            .with_context(|| format!("there is no network interface {interface}"))?;
        // struct ifinfomsg: family, padding, type u16, index i32, flags, mask of the flags that change.
        let mut body = vec![0; 4];
        body.extend(index.to_le_bytes());
        body.extend(IFF_UP.to_le_bytes());
        body.extend(IFF_UP.to_le_bytes());
        self.request(RTM_NEWLINK, 0, &body)
            .with_context(|| format!("cannot bring {interface} up"))?;
        Ok(index)
    }

    /// Gives the interface an address.
    pub(crate) fn address(&self, index: u32, address: Ipv4Addr, prefix: u8) -> Result<()> {
        // struct ifaddrmsg: family, prefix length, flags, scope, index.
        let mut body = vec![AF_INET, prefix, 0, RT_SCOPE_UNIVERSE];
        body.extend(index.to_le_bytes());
        body.extend(attribute(IFA_LOCAL, address.octets()));
        body.extend(attribute(IFA_ADDRESS, address.octets()));
        self.request(RTM_NEWADDR, NLM_F_CREATE, &body)
            .with_context(|| format!("cannot set the address {address}"))
    }

    /// Sends what goes anywhere else through `gateway`.
    pub(crate) fn default_route(&self, index: u32, gateway: Ipv4Addr) -> Result<()> {
        // struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags u32.
        let mut body = vec![
            AF_INET,
            0,
            0,
            0,
            RT_TABLE_MAIN,
            RTPROT_BOOT,
            RT_SCOPE_UNIVERSE,
            RTN_UNICAST,
            0,
            0,
            0,
            0,
        ];
        body.extend(attribute(RTA_GATEWAY, gateway.octets()));
        body.extend(attribute(RTA_OIF, index.to_le_bytes()));
        self.request(RTM_NEWROUTE, NLM_F_CREATE, &body)
            .with_context(|| format!("cannot set the route over {gateway}"))
    }

    fn request(&self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        let message = message(kind, NLM_F_REQUEST | NLM_F_ACK | flags, body)?;
        rustix::net::sendto(
            &self.socket,
            &message,
            SendFlags::empty(),
            &SocketAddrNetlink::new(0, 0),
        )?;
        let mut reply = [0; 4096];
        let (_, length) = rustix::net::recv(&self.socket, &mut reply, RecvFlags::empty())?;
        acknowledgement(reply.get(..length).unwrap_or_default())
    }
}

/// One message: header and body.
fn message(kind: u16, flags: u16, body: &[u8]) -> Result<Vec<u8>> {
    let length = u32::try_from(HEADER + body.len())?;
    let mut message = length.to_le_bytes().to_vec();
    message.extend(kind.to_le_bytes());
    message.extend(flags.to_le_bytes());
    message.extend([0; 8]); // sequence number and port: one request is under way at a time
    message.extend(body);
    Ok(message)
}

/// One attribute of four bytes of data, which is all that is needed here and needs no padding.
fn attribute(kind: u16, data: [u8; 4]) -> [u8; 8] {
    let [k0, k1] = kind.to_le_bytes();
    let [d0, d1, d2, d3] = data;
    [8, 0, k0, k1, d0, d1, d2, d3]
}

/// Reads the kernel's answer: `NLMSG_ERROR` with a negated error number, zero for success.
fn acknowledgement(reply: &[u8]) -> Result<()> {
    let kind = reply
        .get(4..6)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u16::from_le_bytes);
    let code = reply
        .get(HEADER..HEADER + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map(i32::from_le_bytes);
    match (kind, code) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(code)) => Err(std::io::Error::from_raw_os_error(code.saturating_neg()).into()),
        _ => bail!(
            "the kernel's netlink answer is not an acknowledgement ({} bytes, kind {kind:?})",
            reply.len()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_carries_its_own_length() {
        let message = message(RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, &[9; 16]).unwrap();
        assert_eq!(message.len(), 32);
        assert_eq!(message[..8], [32, 0, 0, 0, 16, 0, 5, 0]);
        assert_eq!(message[16..], [9; 16]);
    }

    #[test]
    fn attributes_are_eight_bytes() {
        assert_eq!(attribute(IFA_LOCAL, [10, 0, 2, 15]), [8, 0, 2, 0, 10, 0, 2, 15]);
    }

    #[test]
    fn answers_are_told_apart() {
        let answer = |code: i32| {
            let mut reply = message(NLMSG_ERROR, 0, &code.to_le_bytes()).unwrap();
            reply.extend([0; HEADER]);
            reply
        };
        acknowledgement(&answer(0)).unwrap();
        let error = acknowledgement(&answer(-libc::EPERM)).unwrap_err().to_string();
        assert!(error.contains("not permitted"), "{error}");
        assert!(acknowledgement(&[]).is_err());
        assert!(acknowledgement(&[0; 20]).is_err());
    }
}
