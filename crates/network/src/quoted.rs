//! What ICMP errors quote: the beginning of the packet that they are about, whose addresses have to be translated too, or
//! nobody recognizes it. nft's language has no words for a change of a quoted header that mends the quoted checksum, so
//! these few rules are made by netlink (linux/netfilter/nf_tables.h).
//!
//! An error to a guest quotes what it sent, by its slot's address; an error from a guest quotes what it got, by its own.
//! ICMP's own checksum needs no change: a header together with its checksum adds up to the same, and IPv6, which has none,
//! has addresses that do ([`crate::plan::Ranges::slot_v6`]).

use std::io;

use netlink::socket::{NLM_F_APPEND, NLM_F_CREATE};
use netlink::{Body, Socket};

use crate::plan::{GUEST_V4, GUEST_V6};
use crate::rules::INSIDE;

pub(crate) const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_NEWRULE: u16 = 6;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_LIST_ELEM: u16 = 1;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_IMMEDIATE_DREG: u16 = 1;
const NFTA_IMMEDIATE_DATA: u16 = 2;
const NFTA_META_DREG: u16 = 1;
const NFTA_META_KEY: u16 = 2;
const NFT_META_IIFNAME: u32 = 6;
const NFTA_LOOKUP_SET: u16 = 1;
const NFTA_LOOKUP_SREG: u16 = 2;
const NFTA_LOOKUP_DREG: u16 = 3;
const NFTA_PAYLOAD_BASE: u16 = 2;
const NFTA_PAYLOAD_OFFSET: u16 = 3;
const NFTA_PAYLOAD_LEN: u16 = 4;
const NFTA_PAYLOAD_SREG: u16 = 5;
const NFTA_PAYLOAD_CSUM_TYPE: u16 = 6;
const NFTA_PAYLOAD_CSUM_OFFSET: u16 = 7;
const NFT_PAYLOAD_TRANSPORT_HEADER: u32 = 2;
const NFT_PAYLOAD_CSUM_NONE: u32 = 0;
const NFT_PAYLOAD_CSUM_INET: u32 = 1;
const NFT_REG_1: u32 = 1;
const NFT_REG_2: u32 = 2;

/// `NFPROTO_INET`.
pub(crate) const INET: u8 = 1;

/// Bytes of an ICMP error before what it quotes (RFC 792, RFC 4443).
const QUOTE: u32 = 8;

/// Where an address is in a quoted header, how long it is, and where the header's checksum is, if it has one.
struct Field {
    offset: u32,
    length: u32,
    checksum: Option<u32>,
}

const fn v4(offset: u32) -> Field {
    Field {
        offset: QUOTE + offset,
        length: 4,
        checksum: Some(QUOTE + 10),
    }
}

const fn v6(offset: u32) -> Field {
    Field {
        offset: QUOTE + offset,
        length: 16,
        checksum: None,
    }
}

/// Fills the empty chains of the namespace's table. In the namespace.
pub(crate) fn fill() -> io::Result<()> {
    let rules = [
        rule("quoted_sender4", [constant(&GUEST_V4.octets()), set(&v4(12))]),
        rule("quoted_sender6", [constant(&GUEST_V6.octets()), set(&v6(8))]),
        rule("quoted_receiver4", [interface(), looked_up("outer4"), set(&v4(16))]),
        rule("quoted_receiver6", [interface(), looked_up("outer6"), set(&v6(24))]),
    ];
    let messages = rules.map(|body| (NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND, body));
    Socket::netfilter()?.transaction(NFNL_SUBSYS_NFTABLES, &messages)
}

fn rule<const N: usize>(chain: &str, expressions: [Body; N]) -> Body {
    let mut list = Body::default();
    for expression in &expressions {
        list.nested(NFTA_LIST_ELEM, expression);
    }
    let mut body = Body::new(&[INET, 0, 0, 0]);
    body.text(NFTA_RULE_TABLE, INSIDE)
        .text(NFTA_RULE_CHAIN, chain)
        .nested(NFTA_RULE_EXPRESSIONS, &list);
    body
}

fn expression(name: &str, data: &Body) -> Body {
    let mut body = Body::default();
    body.text(NFTA_EXPR_NAME, name).nested(NFTA_EXPR_DATA, data);
    body
}

/// Register 2 becomes a constant.
fn constant(value: &[u8]) -> Body {
    let mut data = Body::default();
    data.attribute(NFTA_DATA_VALUE, value);
    let mut body = Body::default();
    number(&mut body, NFTA_IMMEDIATE_DREG, NFT_REG_2);
    body.nested(NFTA_IMMEDIATE_DATA, &data);
    expression("immediate", &body)
}

/// Register 1 becomes the name of the link that the packet came by.
fn interface() -> Body {
    let mut body = Body::default();
    number(&mut body, NFTA_META_DREG, NFT_REG_1);
    number(&mut body, NFTA_META_KEY, NFT_META_IIFNAME);
    expression("meta", &body)
}

/// Register 2 becomes what a map has for register 1.
fn looked_up(map: &str) -> Body {
    let mut body = Body::default();
    body.text(NFTA_LOOKUP_SET, map);
    number(&mut body, NFTA_LOOKUP_SREG, NFT_REG_1);
    number(&mut body, NFTA_LOOKUP_DREG, NFT_REG_2);
    expression("lookup", &body)
}

/// The field becomes register 2, and the quoted header's checksum fits.
fn set(field: &Field) -> Body {
    let mut body = Body::default();
    let kind = field.checksum.map_or(NFT_PAYLOAD_CSUM_NONE, |_| NFT_PAYLOAD_CSUM_INET);
    for (attribute, value) in [
        (NFTA_PAYLOAD_SREG, NFT_REG_2),
        (NFTA_PAYLOAD_BASE, NFT_PAYLOAD_TRANSPORT_HEADER),
        (NFTA_PAYLOAD_OFFSET, field.offset),
        (NFTA_PAYLOAD_LEN, field.length),
        (NFTA_PAYLOAD_CSUM_TYPE, kind),
        (NFTA_PAYLOAD_CSUM_OFFSET, field.checksum.unwrap_or(0)),
    ] {
        number(&mut body, attribute, value);
    }
    expression("payload", &body)
}

/// nf_tables' numbers are in network order.
fn number(body: &mut Body, kind: u16, value: u32) {
    body.attribute(kind, &value.to_be_bytes());
}
