//! Checks of socket families and virtual links, each made for real in a network namespace of its own. Knows no packet filter.

use crate::Check;
use crate::netlink::{NLM_F_CREATE, Socket, attribute, nest, request};
use crate::syscall::Arg::Num;
use crate::syscall::call;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};

pub(crate) const CHECKS: &[Check] = &[
    ("IPv4 socket", || socket(2, 1, 0)),
    ("IPv6 socket", || socket(10, 1, 0)),
    ("unix socket", || socket(1, 1, 0)),
    ("packet socket", || socket(17, 3, 0)),
    ("vsock socket", || socket(40, 1, 0)),
    ("socket diagnosis", || socket(16, 3, 4)),
    ("socket diagnosis: a connection's end", end_connection),
    ("link: dummy", || link("dummy")),
    ("link: veth", || link("veth")),
    ("link: bridge", || link("bridge")),
    ("link: wireguard", || link("wireguard")),
    ("link: macvlan", || stacked("macvlan")),
    ("link: ipvlan", || stacked("ipvlan")),
    ("qdisc: fq_codel", || qdisc("fq_codel", ROOT, &[])),
    ("qdisc: fq", || qdisc("fq", ROOT, &[])),
    // struct tc_htb_glob: version 3, rate to quantum 10.
    ("qdisc: htb", || {
        qdisc(
            "htb",
            ROOT,
            &[attribute(
                TCA_HTB_INIT,
                &[3_u32, 10, 0, 0, 0].map(u32::to_ne_bytes).concat(),
            )],
        )
    }),
    ("qdisc: clsact", || qdisc("clsact", CLSACT, &[])),
];

// rtnetlink(7) and linux/if_link.h.
const RTM_NEWLINK: u16 = 16;
const RTM_NEWQDISC: u16 = 36;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_HTB_INIT: u16 = 2;
/// The index under which the lower link of a stacked one is made.
const LOWER: u32 = 100;
const ROOT: u32 = 0xffff_ffff;
const CLSACT: u32 = 0xffff_fff1;

fn socket(family: u64, kind: u64, protocol: u64) -> io::Result<()> {
    call(libc::SYS_socket, [Num(family), Num(kind), Num(protocol)]).map(drop)
}

/// A network namespace of this check's own: everything in it goes with the process.
pub(crate) fn own_network() -> io::Result<()> {
    call(libc::SYS_unshare, [Num(u64::from(libc::CLONE_NEWNET.cast_unsigned()))]).map(drop)
}

/// A connection over loopback is ended by whoever asks for that, and its owner hears of it.
fn end_connection() -> io::Result<()> {
    // linux/inet_diag.h and linux/sock_diag.h
    const NETLINK_SOCK_DIAG: u64 = 4;
    const SOCK_DESTROY: u16 = 21;
    const ANY_COOKIE: [u8; 8] = [0xff; 8];
    own_network()?;
    // struct ifinfomsg: the loopback interface is the first; IFF_UP, and that this flag changes.
    let up = [[0; 4], 1_u32.to_ne_bytes(), 1_u32.to_ne_bytes(), 1_u32.to_ne_bytes()].concat();
    Socket::open(0)?.ask(&[request(RTM_NEWLINK, 0, &up)], 1)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut stream = TcpStream::connect(listener.local_addr()?)?;
    let ends = [stream.local_addr()?, stream.peer_addr()?];
    // struct inet_diag_req_v2: AF_INET, IPPROTO_TCP, extensions, padding, all states; then who it is.
    let mut body = vec![2, 6, 0, 0, 0xff, 0xff, 0xff, 0xff];
    body.extend(ends.iter().flat_map(|end| end.port().to_be_bytes()));
    for end in ends {
        let SocketAddr::V4(end) = end else { continue };
        body.extend(end.ip().octets());
        body.extend([0; 12]);
    }
    body.extend([0; 4]);
    body.extend(ANY_COOKIE);
    Socket::open(NETLINK_SOCK_DIAG)?.ask(&[request(SOCK_DESTROY, 0, &body)], 1)?;
    match stream.read(&mut [0]) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
        other => Err(io::Error::other(format!("its owner reads {other:?}"))),
    }
}

fn link(kind: &str) -> io::Result<()> {
    own_network()?;
    Socket::open(0)?.ask(&[new_link("check", kind, 0, None)], 1)
}

/// A link on top of a dummy one.
fn stacked(kind: &str) -> io::Result<()> {
    own_network()?;
    let route = Socket::open(0)?;
    route.ask(&[new_link("lower", "dummy", LOWER, None)], 1)?;
    route.ask(&[new_link("check", kind, 0, Some(LOWER))], 1)
}

fn new_link(name: &str, kind: &str, index: u32, lower: Option<u32>) -> Vec<u8> {
    let info = [attribute(IFLA_INFO_KIND, kind.as_bytes())];
    // struct ifinfomsg: family, padding, type, index, flags, change.
    let mut body = [[0; 4], index.to_ne_bytes(), [0; 4], [0; 4]].concat();
    body.extend(attribute(IFLA_IFNAME, format!("{name}\0").as_bytes()));
    body.extend(nest(IFLA_LINKINFO, &info));
    if let Some(lower) = lower {
        body.extend(attribute(IFLA_LINK, &lower.to_ne_bytes()));
    }
    request(RTM_NEWLINK, NLM_F_CREATE, &body)
}

fn qdisc(kind: &str, parent: u32, options: &[Vec<u8>]) -> io::Result<()> {
    own_network()?;
    let route = Socket::open(0)?;
    route.ask(&[new_link("lower", "dummy", LOWER, None)], 1)?;
    // struct tcmsg: family and padding, index, handle, parent, info.
    let mut body = [[0; 4], LOWER.to_ne_bytes(), [0; 4], parent.to_ne_bytes(), [0; 4]].concat();
    body.extend(attribute(TCA_KIND, format!("{kind}\0").as_bytes()));
    if !options.is_empty() {
        body.extend(nest(TCA_OPTIONS, options));
    }
    route.ask(&[request(RTM_NEWQDISC, NLM_F_CREATE, &body)], 1)
}
