//! Forgetting connections: what went on with a slot's address is not to go on with the slot's next guest.

use std::io;
use std::net::IpAddr;

use netlink::{Body, Socket, attributes};

// linux/netfilter/nfnetlink.h, linux/netfilter/nfnetlink_conntrack.h
const NFNL_SUBSYS_CTNETLINK: u16 = 1 << 8;
const IPCTNL_MSG_CT_GET: u16 = 1;
const IPCTNL_MSG_CT_DELETE: u16 = 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_TUPLE_IP: u16 = 1;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;

/// Forgets every connection of this thread's namespace that has one of these addresses at one end. They are looked for all at once,
/// and seldom: for a list the kernel goes through its whole table, which is the host's: 262144 buckets on a large one, 25 ms of the
/// lab's processor, by a trace.
pub(crate) fn forget(addresses: &[IpAddr]) -> io::Result<()> {
    let socket = Socket::netfilter()?;
    let octets = |address: &IpAddr| match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let wanted: Vec<Vec<u8>> = addresses.iter().map(octets).collect();
    let mut found = Vec::new();
    let list = NFNL_SUBSYS_CTNETLINK | IPCTNL_MSG_CT_GET;
    // struct nfgenmsg: family, version, res_id. Without a family it is a list of all.
    let listed = socket.dump(list, &Body::new(&[0; 4]), |_, data| {
        let Some((header, message)) = data.split_first_chunk::<4>() else {
            return;
        };
        if wanted.iter().any(|octets| is_about(message, octets))
            && let Some((_, tuple)) = attributes(message).find(|(kind, _)| *kind == CTA_TUPLE_ORIG)
        {
            found.push((header[0], tuple.to_vec()));
        }
    });
    match listed {
        // Nothing is tracked on a kernel that has not loaded it.
        Err(error)
            if [libc::EINVAL, libc::EOPNOTSUPP]
                .map(Some)
                .contains(&error.raw_os_error()) =>
        {
            return Ok(());
        }
        other => other?,
    }
    for (family, tuple) in found {
        let mut body = Body::new(&[family, 0, 0, 0]);
        let mut inner = Body::default();
        for (kind, data) in attributes(&tuple) {
            // Both, addresses and ports, are attributes of attributes.
            let mut part = Body::default();
            for (kind, data) in attributes(data) {
                part.attribute(kind, data);
            }
            inner.nested(kind, &part);
        }
        body.nested(CTA_TUPLE_ORIG, &inner);
        match socket.request(NFNL_SUBSYS_CTNETLINK | IPCTNL_MSG_CT_DELETE, 0, &body) {
            // It has ended by itself.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Whether one of the four ends of a connection is that address.
fn is_about(message: &[u8], octets: &[u8]) -> bool {
    attributes(message)
        .filter(|(kind, _)| [CTA_TUPLE_ORIG, CTA_TUPLE_REPLY].contains(kind))
        .flat_map(|(_, tuple)| attributes(tuple))
        .filter(|(kind, _)| *kind == CTA_TUPLE_IP)
        .flat_map(|(_, ip)| attributes(ip))
        .filter(|(kind, _)| [CTA_IP_V4_SRC, CTA_IP_V4_DST, CTA_IP_V6_SRC, CTA_IP_V6_DST].contains(kind))
        .any(|(_, data)| data == octets)
}

/// Who has opened the IPv4 and IPv6 connections of this thread's namespace.
#[cfg(test)]
pub(crate) fn sources() -> io::Result<Vec<IpAddr>> {
    let socket = Socket::netfilter()?;
    let mut found = Vec::new();
    socket.dump(
        NFNL_SUBSYS_CTNETLINK | IPCTNL_MSG_CT_GET,
        &Body::new(&[0; 4]),
        |_, data| {
            let tuples = attributes(data.get(4..).unwrap_or_default()).filter(|(kind, _)| *kind == CTA_TUPLE_ORIG);
            let addresses = tuples
                .flat_map(|(_, tuple)| attributes(tuple))
                .filter(|(kind, _)| *kind == CTA_TUPLE_IP)
                .flat_map(|(_, ip)| attributes(ip));
            for (kind, data) in addresses {
                if let (CTA_IP_V4_SRC, Some(octets)) = (kind, data.first_chunk::<4>()) {
                    found.push(IpAddr::from(*octets));
                }
                if let (CTA_IP_V6_SRC, Some(octets)) = (kind, data.first_chunk::<16>()) {
                    found.push(IpAddr::from(*octets));
                }
            }
        },
    )?;
    Ok(found)
}
