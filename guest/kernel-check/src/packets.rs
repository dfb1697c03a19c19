//! Checks of the packet filter: nf_tables rules are made, the iptables tables and their extensions looked up. Knows no link.

use crate::Check;
use crate::files::missing;
use crate::links::own_network;
use crate::netlink::{NLM_F_CREATE, Socket, attribute, message, nest, request};
use crate::syscall::Arg::{Num, Out};
use crate::syscall::call;
use std::fs;
use std::io;

pub(crate) const CHECKS: &[Check] = &[
    ("nftables: masquerade", || rule(INET, "nat", "masq", &[])),
    ("nftables: redirect", || rule(INET, "nat", "redir", &[])),
    ("nftables: counter", || rule(INET, "filter", "counter", &[])),
    ("nftables: conntrack", || {
        rule(INET, "filter", "ct", &[attribute(1, &be(1)), attribute(2, &be(0))])
    }),
    ("nftables: log", || rule(INET, "filter", "log", &[])),
    ("nftables: bridge", || rule(BRIDGE, "filter", "counter", &[])),
    ("iptables: filter", || table(2, "filter")),
    ("iptables: nat", || table(2, "nat")),
    ("iptables: mangle", || table(2, "mangle")),
    ("iptables: raw", || table(2, "raw")),
    ("ip6tables: filter", || table(10, "filter")),
    ("ip6tables: nat", || table(10, "nat")),
    ("iptables: matches", matches),
    ("iptables: targets", targets),
];

const NETLINK_NETFILTER: u64 = 12;
const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const INET: u8 = 1;
const BRIDGE: u8 = 7;

/// Numbers in nf_tables attributes are big-endian.
fn be(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

/// struct nfgenmsg: family, version, resource (big-endian).
fn header(family: u8, resource: u16) -> Vec<u8> {
    [vec![family, 0], resource.to_be_bytes().to_vec()].concat()
}

fn table_message(kind: u16, family: u8, attributes: &[Vec<u8>]) -> Vec<u8> {
    let body = [header(family, 0), attributes.concat()].concat();
    request(NFNL_SUBSYS_NFTABLES << 8 | kind, NLM_F_CREATE, &body)
}

/// One transaction: a table, a base chain of type `kind` at the last hook, a rule with the one expression `name`.
fn rule(family: u8, kind: &str, name: &str, data: &[Vec<u8>]) -> io::Result<()> {
    own_network()?;
    // linux/netfilter/nf_tables.h: NFT_MSG_NEWTABLE 0, NFT_MSG_NEWCHAIN 3, NFT_MSG_NEWRULE 6 and their attributes.
    let hook = nest(
        4,
        &[
            attribute(1, &be(if kind == "nat" && name == "redir" { 0 } else { 4 })),
            attribute(2, &be(100)),
        ],
    );
    let table = table_message(0, family, &[attribute(1, b"check\0")]);
    let chain = table_message(
        3,
        family,
        &[
            attribute(1, b"check\0"),
            attribute(3, b"chain\0"),
            hook,
            attribute(7, format!("{kind}\0").as_bytes()),
        ],
    );
    let expression = nest(1, &[attribute(1, format!("{name}\0").as_bytes()), nest(2, data)]);
    let rule = table_message(
        6,
        family,
        &[
            attribute(1, b"check\0"),
            attribute(2, b"chain\0"),
            nest(4, &[expression]),
        ],
    );
    let begin = message(NFNL_MSG_BATCH_BEGIN, 0, &header(0, NFNL_SUBSYS_NFTABLES));
    let end = message(NFNL_MSG_BATCH_END, 0, &header(0, NFNL_SUBSYS_NFTABLES));
    Socket::open(NETLINK_NETFILTER)?.ask(&[begin, table, chain, rule, end], 3)
}

/// Asks for the table's description (`IPT_SO_GET_INFO`), which makes it.
fn table(family: u64, name: &str) -> io::Result<()> {
    let raw = call(libc::SYS_socket, [Num(family), Num(3), Num(255)])?;
    let level = if family == 2 { 0 } else { 41 };
    // struct ipt_getinfo: a name of 32 bytes, then the answer.
    let mut info = [0_u8; 84];
    info[..name.len()].copy_from_slice(name.as_bytes());
    let mut length = 84_u32.to_ne_bytes();
    call(
        libc::SYS_getsockopt,
        [Num(raw), Num(level), Num(64), Out(&mut info), Out(&mut length)],
    )
    .map(drop)
}

fn listed(file: &str, wanted: &[&'static str]) -> io::Result<()> {
    let text = fs::read_to_string(file)?;
    let known: Vec<&str> = text.lines().collect();
    missing(wanted.iter().copied().filter(|name| !known.contains(name)))
}

fn matches() -> io::Result<()> {
    let wanted = [
        "addrtype",
        "bpf",
        "cgroup",
        "comment",
        "connlimit",
        "connmark",
        "conntrack",
        "hashlimit",
        "limit",
        "mac",
        "mark",
        "multiport",
        "owner",
        "physdev",
        "recent",
        "state",
        "statistic",
    ];
    listed("/proc/net/ip_tables_matches", &wanted)
}

fn targets() -> io::Result<()> {
    let wanted = [
        "CHECKSUM",
        "CONNMARK",
        "CT",
        "DNAT",
        "LOG",
        "MARK",
        "MASQUERADE",
        "NFLOG",
        "REDIRECT",
        "REJECT",
        "SNAT",
        "TCPMSS",
    ];
    listed("/proc/net/ip_tables_targets", &wanted)
}
