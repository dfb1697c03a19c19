//! Links, addresses, routes and neighbours (rtnetlink(7)): what the network needs of them, each safe to be done again.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::socket::{Body, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, Socket, attributes};

// linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h, linux/neighbour.h
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_NEWQDISC: u16 = 36;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_QDISC: u16 = 6;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_NODAD: u8 = 0x02;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTN_UNICAST: u8 = 1;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const TCA_KIND: u16 = 1;
const TC_H_ROOT: u32 = u32::MAX;
const NUD_PERMANENT: u16 = 0x80;
const IFF_UP: u32 = 1;
const IFF_LOWER_UP: u32 = 1 << 16;

/// A link as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its number.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Somebody is at the other end: of a TAP, a descriptor is open.
    pub carrier: bool,
    /// The largest packet.
    pub mtu: u32,
    /// Its queueing discipline's kind; empty without one of its own.
    pub queueing: String,
}

/// The links of one namespace.
#[derive(Debug)]
pub struct Links(Socket);

impl Links {
    /// Those of this thread's namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open() -> io::Result<Self> {
        Ok(Self(Socket::route()?))
    }

    /// All of them.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn list(&self) -> io::Result<Vec<Link>> {
        let mut links = Vec::new();
        self.0.dump(RTM_GETLINK, &Body::new(&[0; 16]), |kind, data| {
            if kind == RTM_NEWLINK {
                links.extend(parse_link(data));
            }
        })?;
        Ok(links)
    }

    /// The one with this name.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn find(&self, name: &str) -> io::Result<Option<Link>> {
        Ok(self.list()?.into_iter().find(|link| link.name == name))
    }

    /// The one with this name, without listing the others.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn get(&self, name: &str) -> io::Result<Option<Link>> {
        let mut body = Body::new(&[0; 16]);
        body.text(IFLA_IFNAME, name);
        let mut found = None;
        let asked = self.0.ask(RTM_GETLINK, 0, &body, |kind, data| {
            if kind == RTM_NEWLINK {
                found = parse_link(data);
            }
        });
        match asked {
            Err(error) if is_gone(&error) => Ok(None),
            other => other.map(|()| found),
        }
    }

    /// The number of the one with this name.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn index(&self, name: &str) -> io::Result<u32> {
        let found = self.get(name)?;
        found.map(|link| link.index).ok_or_else(|| Errno::NODEV.into())
    }

    /// A pair of links, the second one in another namespace. Fails if there is a link `name`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn pair(&self, name: &str, peer: &str, namespace: BorrowedFd<'_>, mtu: u16) -> io::Result<()> {
        let mut far = Body::new(&link_header(0, 0));
        far.text(IFLA_IFNAME, peer)
            .attribute(IFLA_MTU, &u32::from(mtu).to_ne_bytes())
            .attribute(IFLA_NET_NS_FD, &namespace.as_raw_fd().to_ne_bytes());
        let mut data = Body::default();
        data.nested(VETH_INFO_PEER, &far);
        let mut info = Body::default();
        info.text(IFLA_INFO_KIND, "veth").nested(IFLA_INFO_DATA, &data);
        let mut body = Body::new(&link_header(0, 0));
        body.text(IFLA_IFNAME, name)
            .attribute(IFLA_MTU, &u32::from(mtu).to_ne_bytes())
            .nested(IFLA_LINKINFO, &info);
        self.0.request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &body)
    }

    /// Sets a link up, with its MTU and, if given, its Ethernet address.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn up(&self, index: u32, mtu: Option<u16>, mac: Option<[u8; 6]>) -> io::Result<()> {
        let mut body = Body::new(&link_header(index, IFF_UP));
        if let Some(mtu) = mtu {
            body.attribute(IFLA_MTU, &u32::from(mtu).to_ne_bytes());
        }
        if let Some(mac) = mac {
            body.attribute(IFLA_ADDRESS, &mac);
        }
        self.0.request(RTM_NEWLINK, 0, &body)
    }

    /// Takes a link's queueing discipline away: what it cannot take at once is dropped. By default each of a TAP's queues,
    /// which are 256 if it can have several, has one with three rings of `txqueuelen`, 6 MiB of the kernel's memory, and none of
    /// them ever holds a packet: a TAP's descriptors have queues of their own. A kernel without `CONFIG_NET_SCHED` keeps
    /// them.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn noqueue(&self, index: u32) -> io::Result<()> {
        // struct tcmsg: family, padding, index, handle, parent, info.
        let mut fixed = [0; 20];
        fixed[4..8].copy_from_slice(&index.to_ne_bytes());
        fixed[12..16].copy_from_slice(&TC_H_ROOT.to_ne_bytes());
        let mut body = Body::new(&fixed);
        body.text(TCA_KIND, "noqueue");
        match self.0.request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_REPLACE, &body) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) => Ok(()),
            other => other,
        }
    }

    /// Removes a link; no error if it is gone.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove(&self, index: u32) -> io::Result<()> {
        gone_is_fine(self.0.request(RTM_DELLINK, 0, &Body::new(&link_header(index, 0))))
    }

    /// Gives a link an address, to be used at once.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn address(&self, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
        // struct ifaddrmsg: family, prefix length, flags, scope, index.
        let mut fixed = vec![family(address), prefix, IFA_F_NODAD, RT_SCOPE_UNIVERSE];
        fixed.extend(index.to_ne_bytes());
        let mut body = Body::new(&fixed);
        body.attribute(IFA_LOCAL, &octets(address))
            .attribute(IFA_ADDRESS, &octets(address));
        self.0.request(RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, &body)
    }

    /// A route to `to` by a link, through a gateway or to the link itself.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn route(&self, to: (IpAddr, u8), index: u32, gateway: Option<IpAddr>) -> io::Result<()> {
        let (address, prefix) = to;
        let scope = if gateway.is_none() && address.is_ipv4() {
            RT_SCOPE_LINK
        } else {
            RT_SCOPE_UNIVERSE
        };
        // struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags.
        let mut body = Body::new(&[
            family(address),
            prefix,
            0,
            0,
            RT_TABLE_MAIN,
            RTPROT_STATIC,
            scope,
            RTN_UNICAST,
            0,
            0,
            0,
            0,
        ]);
        if prefix > 0 {
            body.attribute(RTA_DST, &octets(address));
        }
        body.attribute(RTA_OIF, &index.to_ne_bytes());
        if let Some(gateway) = gateway {
            body.attribute(RTA_GATEWAY, &octets(gateway));
        }
        self.0.request(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &body)
    }

    /// Says for good who has an address on a link, so that nobody is asked and nobody can say otherwise.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn neighbour(&self, index: u32, address: IpAddr, mac: [u8; 6]) -> io::Result<()> {
        // struct ndmsg: family, padding, index, state, flags, type.
        let mut fixed = vec![family(address), 0, 0, 0];
        fixed.extend(index.to_ne_bytes());
        fixed.extend(NUD_PERMANENT.to_ne_bytes());
        fixed.extend([0, 0]);
        let mut body = Body::new(&fixed);
        body.attribute(NDA_DST, &octets(address)).attribute(NDA_LLADDR, &mac);
        self.0.request(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &body)
    }

    /// The IPv4 routes of the main table: destination, length of its prefix, link.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn routes_v4(&self) -> io::Result<Vec<(Ipv4Addr, u8, u32)>> {
        let mut routes = Vec::new();
        let mut fixed = [0; 12];
        fixed[0] = family(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        self.0.dump(RTM_GETROUTE, &Body::new(&fixed), |kind, data| {
            if kind == RTM_NEWROUTE {
                routes.extend(parse_route(data));
            }
        })?;
        Ok(routes)
    }
}

fn parse_link(data: &[u8]) -> Option<Link> {
    // struct ifinfomsg: family, padding, type, index, flags, change.
    let index = u32::from_ne_bytes(data.get(4..8)?.try_into().ok()?);
    let flags = u32::from_ne_bytes(data.get(8..12)?.try_into().ok()?);
    let attribute = |wanted| {
        let mut all = attributes(data.get(16..).unwrap_or_default());
        all.find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
    };
    let text = |wanted| {
        let bytes = attribute(wanted)?.strip_suffix(&[0])?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    };
    let mtu = attribute(IFLA_MTU).and_then(|value| value.first_chunk::<4>());
    Some(Link {
        index,
        name: text(IFLA_IFNAME)?,
        carrier: flags & IFF_LOWER_UP != 0,
        mtu: mtu.map_or(0, |mtu| u32::from_ne_bytes(*mtu)),
        queueing: text(IFLA_QDISC).unwrap_or_default(),
    })
}

fn parse_route(data: &[u8]) -> Option<(Ipv4Addr, u8, u32)> {
    let (length, table) = (*data.get(1)?, *data.get(4)?);
    if table != RT_TABLE_MAIN {
        return None;
    }
    let (mut to, mut link) = (Ipv4Addr::UNSPECIFIED, 0);
    for (kind, value) in attributes(data.get(12..)?) {
        let Some(value) = value.first_chunk::<4>() else {
            continue;
        };
        match kind {
            RTA_DST => to = Ipv4Addr::from(*value),
            RTA_OIF => link = u32::from_ne_bytes(*value),
            _ => {}
        }
    }
    Some((to, length, link))
}

fn link_header(index: u32, up: u32) -> [u8; 16] {
    // struct ifinfomsg: family, padding, type, index, flags, mask of the flags that change.
    let mut fixed = [0; 16];
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    fixed[8..12].copy_from_slice(&up.to_ne_bytes());
    fixed[12..].copy_from_slice(&up.to_ne_bytes());
    fixed
}

fn family(address: IpAddr) -> u8 {
    // AF_INET, AF_INET6
    match address {
        IpAddr::V4(_) => 2,
        IpAddr::V6(_) => 10,
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn is_gone(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::NODEV)
}

fn gone_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if is_gone(&error) => Ok(()),
        other => other,
    }
}

/// An IPv6 address with all of its bits.
pub fn whole_v6(address: Ipv6Addr) -> (IpAddr, u8) {
    (IpAddr::V6(address), 128)
}

/// An IPv4 address with all of its bits.
pub fn whole_v4(address: Ipv4Addr) -> (IpAddr, u8) {
    (IpAddr::V4(address), 32)
}
