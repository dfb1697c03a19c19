//! The two tables of nft, as text: the namespace's, which translates and isolates without state, and the host's, which
//! tracks connections. Both are put in place whole, in one transaction.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::Error;
use crate::egress::{self, Egresses};
use crate::plan::{DNS_V6, GATEWAY_V4, GATEWAY_V6, GUEST_V4, GUEST_V6, Ranges};
use crate::published::Published;
use crate::resolvers::Resolvers;

/// The namespace's table. Its chains `quoted_*` are filled by [`crate::quoted`].
pub(crate) const INSIDE: &str = "sandboxes";

/// The namespace's link to the host.
pub(crate) const UPLINK: &str = "up0";

/// What TAPs' names begin with; the slot follows.
pub(crate) const TAP: &str = "tap";

/// The table of the namespace, with the TAPs of `slots`, which may send where `egresses` says.
///
/// What guests send is looked at before anything else is done with it, so that fragments are told apart by their slot's
/// address from the beginning. A guest's own address is replaced whatever it is: there is nothing to be spoofed.
pub(crate) fn inside(
    ranges: &Ranges,
    resolvers: &Resolvers,
    slots: &[u32],
    egresses: &Egresses,
) -> Result<String, Error> {
    let Ranges { v4, v6 } = ranges;
    let (host4, host6) = (ranges.host_v4(), ranges.host_v6());
    let (dns4, dns6) = (ranges.dns_v4(), ranges.dns_v6());
    // Questions go to an address of ours, by which the host knows where to send them and the answer is recognized.
    let ask4 = resolvers.v4.map_or(String::new(), |_| {
        format!(
            "ip daddr {GATEWAY_V4} udp dport 53 ip daddr set {dns4} accept
             ip daddr {GATEWAY_V4} tcp dport 53 ip daddr set {dns4} accept"
        )
    });
    let ask6 = resolvers.v6.map_or(String::new(), |_| {
        format!(
            "ip6 daddr {DNS_V6} udp dport 53 ip6 daddr set {dns6} accept
             ip6 daddr {DNS_V6} tcp dport 53 ip6 daddr set {dns6} accept"
        )
    });
    let (egress_map, egress) = (egress::map(), egress::rule());
    let mut text = format!(
        "add table inet {INSIDE}
delete table inet {INSIDE}
table inet {INSIDE} {{
    set taps {{ type ifname; }}
    map outer4 {{ type ifname : ipv4_addr; }}
    map outer6 {{ type ifname : ipv6_addr; }}
    {egress_map}
    chain prerouting {{
        type filter hook prerouting priority -450; policy accept;
        iifname != \"{TAP}*\" accept
        iifname != @taps drop
        meta protocol ip goto from_guest4
        meta protocol ip6 goto from_guest6
        drop
    }}
    chain from_guest4 {{
        ip saddr set iifname map @outer4
        ip protocol icmp icmp type {{ destination-unreachable, time-exceeded, parameter-problem }} jump quoted_receiver4
        ip daddr {host4} accept comment \"answers; the host drops what is none\"
        {egress}
        {ask4}
        ip daddr {GATEWAY_V4} icmp type echo-request accept
        ip daddr {{ {GATEWAY_V4}, {v4}, 0.0.0.0/8, 127.0.0.0/8, 169.254.0.0/16, 224.0.0.0/3 }} drop
        accept
    }}
    chain from_guest6 {{
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} ip6 hoplimit 255 goto neighbours
        ip6 saddr set iifname map @outer6
        icmpv6 type {{ 1, 2, 3, 4 }} jump quoted_receiver6
        ip6 daddr {host6} accept comment \"answers; the host drops what is none\"
        {egress}
        {ask6}
        ip6 daddr {DNS_V6} icmpv6 type echo-request accept
        ip6 daddr {{ {DNS_V6}, {v6}/64, ::/96, ::ffff:0:0/96, fe80::/10, ff00::/8, fd00:ec2::/32, fd20:ce::254 }} drop
        accept
    }}
    chain neighbours {{
        ip6 daddr {{ {GATEWAY_V6}, ff02::1:ff00:1 }} accept
        drop
    }}
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname \"lo\" accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        iifname \"{TAP}*\" icmp type echo-request accept
        iifname \"{TAP}*\" icmpv6 type echo-request accept
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop;
        iifname \"{TAP}*\" oifname \"{UPLINK}\" accept
        iifname \"{UPLINK}\" oifname \"{TAP}*\" accept
    }}
    chain postrouting {{
        type filter hook postrouting priority 150; policy accept;
        oifname != \"{TAP}*\" accept
        icmpv6 type {{ 130, 131, 132, 143 }} drop comment \"the link's own multicast listening, which each guest would look at when it starts\"
        ip saddr {dns4} ip saddr set {GATEWAY_V4}
        ip daddr {v4} ip daddr set {GUEST_V4}
        ip6 saddr {dns6} ip6 saddr set {DNS_V6}
        ip6 daddr {v6}/64 ip6 daddr set {GUEST_V6}
        ip protocol icmp icmp type {{ destination-unreachable, time-exceeded, parameter-problem }} jump quoted_sender4
        icmpv6 type {{ 1, 2, 3, 4 }} jump quoted_sender6
    }}
    chain quoted_sender4 {{ }}
    chain quoted_sender6 {{ }}
    chain quoted_receiver4 {{ }}
    chain quoted_receiver6 {{ }}
}}
"
    );
    // Before any TAP is known.
    text.push_str(&egress::all(egresses));
    text.push_str(&elements(ranges, slots)?);
    Ok(text)
}

/// What makes TAPs known to the namespace's table.
pub(crate) fn elements(ranges: &Ranges, slots: &[u32]) -> Result<String, Error> {
    let (mut taps, mut outer4, mut outer6) = (Vec::new(), Vec::new(), Vec::new());
    for &slot in slots {
        taps.push(format!("\"{TAP}{slot}\""));
        outer4.push(format!("\"{TAP}{slot}\" : {}", ranges.slot_v4(slot)?));
        outer6.push(format!("\"{TAP}{slot}\" : {}", ranges.slot_v6(slot)?));
    }
    let mut text = String::new();
    for (name, elements) in [("outer4", outer4), ("outer6", outer6), ("taps", taps)] {
        if !elements.is_empty() {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "add element inet {INSIDE} {name} {{ {} }}", elements.join(", "));
        }
    }
    Ok(text)
}

/// What makes a TAP unknown to the namespace's table.
#[cfg(test)]
pub(crate) fn forget(slot: u32) -> String {
    ["outer4", "outer6", "taps"]
        .map(|name| format!("delete element inet {INSIDE} {name} {{ \"{TAP}{slot}\" }}\n"))
        .concat()
}

/// What the host's table is about.
#[derive(Debug)]
pub(crate) struct HostTable<'a> {
    /// The table's name.
    pub(crate) name: &'a str,
    /// The host's end of the pair of links.
    pub(crate) link: &'a str,
    pub(crate) ranges: &'a Ranges,
    pub(crate) resolvers: &'a Resolvers,
    /// The most connections of one slot that are tracked at a time.
    pub(crate) connections: Option<u32>,
}

impl HostTable<'_> {
    /// The whole table, with what is published.
    pub(crate) fn text(&self, published: &Published) -> String {
        let Self { name, link, ranges, .. } = self;
        let Ranges { v4, v6 } = ranges;
        let mut text = format!(
            "add table inet {name}
delete table inet {name}
table inet {name} {{
{maps}
    set connections4 {{ type ipv4_addr; size 65535; flags dynamic; }}
    set connections6 {{ type ipv6_addr; size 65535; flags dynamic; }}
    chain connections {{
{connections}
    }}
    chain published {{
{published_rules}
    }}
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
{dns}
        iifname \"{link}\" accept
        fib daddr type local jump published
    }}
    chain output {{
        type nat hook output priority -100; policy accept;
        ip6 daddr ::1 accept
        fib daddr type local jump published
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        oifname \"{link}\" ct status dnat fib saddr type local masquerade
        oifname \"{link}\" accept
        ip saddr {v4} masquerade
        ip6 saddr {v6}/64 masquerade
    }}
    chain input {{
        type filter hook input priority filter; policy accept;
        iifname != \"{link}\" accept
        ct state established,related accept
        ct state new jump connections
        ct status dnat accept
        icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
        drop
    }}
    chain forward {{
        type filter hook forward priority filter; policy accept;
        iifname \"{link}\" oifname \"{link}\" drop
        iifname \"{link}\" ct state new jump connections
        oifname \"{link}\" ct state new jump connections
        iifname \"{link}\" ip saddr {v4} accept
        iifname \"{link}\" ip6 saddr {v6}/64 accept
        iifname \"{link}\" drop
        oifname != \"{link}\" accept
        ct state established,related accept
        ct status dnat accept
        drop
    }}
}}
",
            maps = maps(),
            connections = self.counted(),
            published_rules = published_rules(),
            dns = self.dns(),
        );
        text.push_str(&published.add(name));
        text
    }

    /// One more connection of a slot that has as many as it may: dropped before it is tracked. Those that a published port brings count
    /// as well. A packet that is not the first of its connection does not come here.
    fn counted(&self) -> String {
        let Ranges { v4, v6 } = self.ranges;
        let mut rules = String::new();
        let Some(most) = self.connections else { return rules };
        for end in ["saddr", "daddr"] {
            // Writing to a String cannot fail.
            let _ = writeln!(
                rules,
                "        ip {end} {v4} add @connections4 {{ ip {end} ct count over {most} }} drop
        ip6 {end} {v6}/64 add @connections6 {{ ip6 {end} ct count over {most} }} drop"
            );
        }
        rules
    }

    /// Where questions of names go.
    fn dns(&self) -> String {
        let mut rules = String::new();
        let link = self.link;
        for protocol in ["udp", "tcp"] {
            if let Some(to) = self.resolvers.v4 {
                let asked = self.ranges.dns_v4();
                let rule = format!("iifname \"{link}\" ip daddr {asked} {protocol} dport 53 dnat ip to {to}");
                // Writing to a String cannot fail.
                let _ = writeln!(rules, "        {rule}");
            }
            if let Some(to) = self.resolvers.v6 {
                let asked = self.ranges.dns_v6();
                let rule = format!("iifname \"{link}\" ip6 daddr {asked} {protocol} dport 53 dnat ip6 to {to}");
                let _ = writeln!(rules, "        {rule}");
            }
        }
        rules
    }
}

/// Published ports are looked up, however many there are: by port alone, and by address and port.
fn maps() -> String {
    let mut text = String::new();
    for protocol in ["tcp", "udp"] {
        for family in [4, 6] {
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "    map {protocol}{family} {{ type inet_service : ipv{family}_addr . inet_service; }}
    map {protocol}{family}_at {{ type ipv{family}_addr . inet_service : ipv{family}_addr . inet_service; }}"
            );
        }
    }
    text
}

fn published_rules() -> String {
    let mut text = String::new();
    for protocol in ["tcp", "udp"] {
        for (family, ip) in [(4, "ip"), (6, "ip6")] {
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "        dnat {ip} to {ip} daddr . {protocol} dport map @{protocol}{family}_at
        dnat {ip} to {protocol} dport map @{protocol}{family}"
            );
        }
    }
    text
}

/// Has nft carry out `script`, in this thread's namespace: all of it or nothing.
pub(crate) fn apply(what: &'static str, script: &str) -> Result<(), Error> {
    run(what, &["-f", "-"], script).map(drop)
}

/// Runs nft; gives what it printed.
pub(crate) fn run(what: &'static str, arguments: &[&str], input: &str) -> Result<String, Error> {
    let mut child = Command::new("nft")
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(Error::NoNft)?;
    // nft reads everything before it prints anything.
    let written = child
        .stdin
        .take()
        .map_or(Ok(()), |mut pipe| pipe.write_all(input.as_bytes()));
    let output = child.wait_with_output().map_err(Error::host("waiting for nft"))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::Nft { what, message });
    }
    written.map_err(Error::host("giving nft its rules"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
