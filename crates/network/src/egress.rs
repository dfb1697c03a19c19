//! What of the namespace's table says where each slot may send: a chain for each slot that is restricted, and a map that leads what comes
//! from its TAP there. Each packet is looked at by itself, so that what a connection may do is what may be done now.
//!
//! ```text
//!  from_guest4 ─► answers to the host ─► egress: tap5 ─► egress5 ─┬ allowed: back
//!                                                                 ├ denied: dropped
//!                                                                 └ neither: back ─► what nobody reaches ─► accepted
//! ```
//! A chain drops or lets a packet come back to where it was: nothing that nobody may reach is reached by it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use base::{Cidr, Egress};
use serde_json::Value;

use crate::rules::{INSIDE, TAP};
use crate::{Error, rules};

/// Where each slot may send; one that says nothing may send everywhere.
pub type Egresses = BTreeMap<u32, Egress>;

/// The map.
const MAP: &str = "egress";

/// The map in the text of the table.
pub(crate) fn map() -> String {
    format!("map {MAP} {{ type ifname : verdict; }}")
}

/// The rule that leads to the chains.
pub(crate) fn rule() -> String {
    format!("iifname vmap @{MAP}")
}

/// The commands by which a slot is restricted as `egress` says, or not at all, whatever was there.
pub(crate) fn of_slot(slot: u32, egress: &Egress) -> String {
    let chain = format!("inet {INSIDE} {MAP}{slot}");
    let element = format!("inet {INSIDE} {MAP} {{ \"{TAP}{slot}\"");
    let jump = format!("add element {element} : jump {MAP}{slot} }}\n");
    let mut text = format!("add chain {chain}\nflush chain {chain}\n");
    if !egress.restricts() {
        // One that is not there cannot be taken away.
        let _ = write!(text, "{jump}delete element {element} }}\ndelete chain {chain}\n");
        return text;
    }
    for v6 in [false, true] {
        for (ranges, verdict) in [(egress.allowed(v6), "return"), (egress.denied(v6), "drop")] {
            if let Some(those) = condition(&ranges, v6) {
                // Writing to a String cannot fail.
                let _ = writeln!(text, "add rule {chain} {those} {verdict}");
            }
        }
    }
    text.push_str(&jump);
    text
}

/// The same of all slots that are restricted, in a table that restricts none.
pub(crate) fn all(egresses: &Egresses) -> String {
    let restricted = egresses.iter().filter(|(_, egress)| egress.restricts());
    restricted.map(|(&slot, egress)| of_slot(slot, egress)).collect()
}

/// How a rule names packets to these addresses; `None` where there are none.
fn condition(ranges: &[Cidr], v6: bool) -> Option<String> {
    let (family, field) = if v6 { ("ipv6", "ip6") } else { ("ipv4", "ip") };
    if ranges.is_empty() {
        return None;
    }
    if ranges.iter().any(|range| range.is_all()) {
        return Some(format!("meta nfproto {family}"));
    }
    let ranges: Vec<String> = ranges.iter().map(Cidr::to_string).collect();
    Some(format!("{field} daddr {{ {} }}", ranges.join(", ")))
}

/// Which slots the table restricts that is there. In the namespace.
pub(crate) fn restricted() -> Result<BTreeSet<u32>, Error> {
    match rules::run("where guests send", &["-j", "list", "map", "inet", INSIDE, MAP], "") {
        Ok(text) => parse(&text).ok_or(Error::Answer("where guests send")),
        // A daemon of before restricted none.
        Err(Error::Nft { message, .. }) if message.contains("No such file or directory") => Ok(BTreeSet::new()),
        Err(error) => Err(error),
    }
}

fn parse(text: &str) -> Option<BTreeSet<u32>> {
    let document: Value = serde_json::from_str(text).ok()?;
    let mut slots = BTreeSet::new();
    for object in document.get("nftables")?.as_array()? {
        let elements = object.get("map").and_then(|map| map.get("elem"));
        for element in elements.and_then(Value::as_array).into_iter().flatten() {
            let tap = element.as_array()?.first()?.as_str()?;
            slots.insert(tap.strip_prefix(TAP)?.parse().ok()?);
        }
    }
    Some(slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn egress(allow: &[&str], deny: &[&str]) -> Egress {
        let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        Egress::new(ranges(allow), ranges(deny)).unwrap()
    }

    #[test]
    fn what_is_allowed_comes_first_and_comes_back() {
        let text = of_slot(7, &egress(&["1.1.1.1", "8.8.8.0/24", "2001:db8::1"], &["0.0.0.0/0"]));
        let wanted = "add chain inet sandboxes egress7
flush chain inet sandboxes egress7
add rule inet sandboxes egress7 ip daddr { 1.1.1.1, 8.8.8.0/24 } return
add rule inet sandboxes egress7 meta nfproto ipv4 drop
add rule inet sandboxes egress7 ip6 daddr { 2001:db8::1 } return
add rule inet sandboxes egress7 meta nfproto ipv6 drop
add element inet sandboxes egress { \"tap7\" : jump egress7 }
";
        assert_eq!(text, wanted);
        assert!(!text.contains("accept"), "nothing is let past the rules behind it");
    }

    #[test]
    fn a_slot_without_a_policy_has_no_chain() {
        for none in [Egress::default(), egress(&["1.1.1.1"], &[])] {
            let text = of_slot(7, &none);
            assert!(
                text.ends_with(
                    "delete element inet sandboxes egress { \"tap7\" }\ndelete chain inet sandboxes egress7\n"
                )
            );
            assert!(!text.contains("add rule"), "{text}");
        }
    }

    #[test]
    fn ranges_that_overlap_are_one_for_nft() {
        let text = of_slot(
            1,
            &egress(&[], &["10.0.0.0/8", "10.1.0.0/16", "10.0.0.0/8", "255.255.255.255"]),
        );
        assert!(text.contains("ip daddr { 10.0.0.0/8, 255.255.255.255 } drop"), "{text}");
        assert!(
            text.contains("ip6 daddr { 64:ff9b::a00:0/104, 64:ff9b::ffff:ffff } drop"),
            "{text}"
        );
    }

    #[test]
    fn what_nft_tells_is_read() {
        let text = r#"{"nftables": [{"metainfo": {"version": "1.0.6"}}, {"map": {"family": "inet", "name": "egress", "table": "sandboxes",
            "type": "ifname", "handle": 2, "map": "verdict", "elem": [["tap5", {"jump": {"target": "egress5"}}]]}}]}"#;
        assert_eq!(parse(text), Some(BTreeSet::from([5])));
        assert_eq!(
            parse(r#"{"nftables": [{"map": {"name": "egress"}}]}"#),
            Some(BTreeSet::new())
        );
        assert_eq!(parse(&text.replace("tap5", "eth0")), None);
    }
}
