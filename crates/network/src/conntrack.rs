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
    delete(|message| ends(message).any(|(from, to)| addresses.contains(&from) || addresses.contains(&to)))
}

/// Forgets every connection that an address has with another one of which `is_cut` says so, whoever has begun it.
pub(crate) fn end(is_cut: impl Fn(IpAddr, IpAddr) -> bool) -> io::Result<()> {
    delete(|message| ends(message).any(|(from, to)| is_cut(from, to)))
}

/// Forgets every connection of this thread's namespace of which the kernel's message is wanted.
fn delete(wanted: impl Fn(&[u8]) -> bool) -> io::Result<()> {
    let socket = Socket::netfilter()?;
    let mut found = Vec::new();
    let list = NFNL_SUBSYS_CTNETLINK | IPCTNL_MSG_CT_GET;
    // struct nfgenmsg: family, version, res_id. Without a family it is a list of all.
    let listed = socket.dump(list, &Body::new(&[0; 4]), |_, data| {
        let Some((header, message)) = data.split_first_chunk::<4>() else {
            return;
        };
        if wanted(message)
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

/// From where and to where a connection's packets go, one way and the other.
fn ends(message: &[u8]) -> impl Iterator<Item = (IpAddr, IpAddr)> {
    attributes(message)
        .filter(|(kind, _)| [CTA_TUPLE_ORIG, CTA_TUPLE_REPLY].contains(kind))
        .flat_map(|(_, tuple)| attributes(tuple))
        .filter(|(kind, _)| *kind == CTA_TUPLE_IP)
        .filter_map(|(_, ip)| {
            let of = |kinds: [u16; 2]| attributes(ip).find(|(kind, _)| kinds.contains(kind));
            let from = address(of([CTA_IP_V4_SRC, CTA_IP_V6_SRC])?.1)?;
            Some((from, address(of([CTA_IP_V4_DST, CTA_IP_V6_DST])?.1)?))
        })
}

fn address(octets: &[u8]) -> Option<IpAddr> {
    match octets.len() {
        4 => Some(IpAddr::from(*octets.first_chunk::<4>()?)),
        16 => Some(IpAddr::from(*octets.first_chunk::<16>()?)),
        _ => None,
    }
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
