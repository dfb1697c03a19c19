//! Where a machine may send: ranges of addresses that are allowed and denied. Plain values; knows neither machines nor how rules are kept.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The most ranges of one policy, allowed and denied together.
pub const MAX_RANGES: usize = 512;

/// So much is repeated of a text that is no range.
const SHOWN: usize = 64;

/// Where IPv4 addresses are in IPv6 for who translates (RFC 6052, 2.1).
const TRANSLATED: u128 = 0x0064_ff9b << 96;

/// A range of addresses of one family, as a prefix and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    first: IpAddr,
    length: u8,
}

/// Why something is no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EgressError {
    /// Not a range.
    #[error(
        "`{0}` is neither an IP address nor a range of them: write such as 192.0.2.1, 10.0.0.0/8 or 2001:db8::/32 (names of hosts are not known here)"
    )]
    Range(String),
    /// A range that begins within itself.
    #[error("`{given}` has bits set behind its prefix: write {range} for the range, or the address without a length")]
    HostBits {
        /// What was given.
        given: String,
        /// The range that the address is in.
        range: String,
    },
    /// An IPv4 address in IPv6's clothes, which no packet ever has.
    #[error("`{0}` is an IPv4 address written as one of IPv6: write it as IPv4")]
    Mapped(String),
    /// Too many of them.
    #[error("{0} ranges of addresses are too many: allow and deny {MAX_RANGES} at most, together")]
    TooMany(usize),
}

impl Cidr {
    /// All addresses of IPv4; in a list of what is denied it stands for those of IPv6, too.
    pub const ALL_V4: Self = Self {
        first: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        length: 0,
    };

    /// All addresses of IPv6.
    pub const ALL_V6: Self = Self {
        first: IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        length: 0,
    };

    /// It has addresses of IPv6.
    pub fn is_v6(self) -> bool {
        self.first.is_ipv6()
    }

    /// It is all addresses of its family.
    pub fn is_all(self) -> bool {
        self.length == 0
    }

    /// The address is one of these.
    pub fn contains(self, address: IpAddr) -> bool {
        self.first.is_ipv4() == address.is_ipv4() && masked(address, self.length) == self.first
    }

    /// Each address of the other is one of these.
    fn covers(self, other: Self) -> bool {
        self.length <= other.length && self.contains(other.first)
    }

    /// Where IPv4 addresses of these are reached by IPv6, if somebody translates.
    fn translated(self) -> Option<Self> {
        let IpAddr::V4(first) = self.first else { return None };
        Some(Self {
            first: Ipv6Addr::from(TRANSLATED | u128::from(u32::from(first))).into(),
            length: 96 + self.length,
        })
    }
}

/// An address without the bits behind a prefix of so many.
fn masked(address: IpAddr, length: u8) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
            Ipv4Addr::from(u32::from(address) & mask).into()
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0);
            Ipv6Addr::from(u128::from(address) & mask).into()
        }
    }
}

impl FromStr for Cidr {
    type Err = EgressError;

    /// `ADDRESS` or `ADDRESS/LENGTH`.
    fn from_str(text: &str) -> Result<Self, EgressError> {
        let shown = || {
            text.chars()
                .take(SHOWN)
                .flat_map(char::escape_debug)
                .collect::<String>()
        };
        let bad = || EgressError::Range(shown());
        let (address, length) = text
            .split_once('/')
            .map_or((text, None), |(address, length)| (address, Some(length)));
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let length = match length {
            // `+8` and `08` are numbers for the standard library, and no lengths.
            Some(digits) if digits.starts_with('+') || (digits.len() > 1 && digits.starts_with('0')) => {
                return Err(bad());
            }
            Some(digits) => digits.parse().ok().filter(|length| *length <= most).ok_or_else(bad)?,
            None => most,
        };
        let range = Self {
            first: masked(address, length),
            length,
        };
        if range.first != address {
            return Err(EgressError::HostBits {
                given: shown(),
                range: range.to_string(),
            });
        }
        match address {
            IpAddr::V6(address) if length >= 96 && address.to_ipv4_mapped().is_some() => {
                Err(EgressError::Mapped(shown()))
            }
            _ => Ok(range),
        }
    }
}

impl fmt::Display for Cidr {
    /// As it is parsed; one address has no length.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.length) {
            (IpAddr::V4(_), 32) | (IpAddr::V6(_), 128) => write!(f, "{}", self.first),
            _ => write!(f, "{}/{}", self.first, self.length),
        }
    }
}

impl TryFrom<String> for Cidr {
    type Error = EgressError;

    fn try_from(text: String) -> Result<Self, EgressError> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(range: Cidr) -> Self {
        range.to_string()
    }
}

/// Where a machine may send: everywhere but to what is denied and not allowed. What is allowed wins, however wide or narrow either is; what
/// is in neither list may be reached, so that a list of what is allowed is of use beside one that denies the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Lists")]
pub struct Egress {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    allow: Vec<Cidr>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    deny: Vec<Cidr>,
}

/// The same, not counted.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Lists {
    #[serde(default)]
    allow: Vec<Cidr>,
    #[serde(default)]
    deny: Vec<Cidr>,
}

impl TryFrom<Lists> for Egress {
    type Error = EgressError;

    fn try_from(lists: Lists) -> Result<Self, EgressError> {
        Self::new(lists.allow, lists.deny)
    }
}

impl Egress {
    /// Of both lists, which may overlap.
    ///
    /// # Errors
    /// [`EgressError::TooMany`].
    pub fn new(allow: Vec<Cidr>, deny: Vec<Cidr>) -> Result<Self, EgressError> {
        let count = allow.len() + deny.len();
        match count <= MAX_RANGES {
            true => Ok(Self { allow, deny }),
            false => Err(EgressError::TooMany(count)),
        }
    }

    /// Nothing can be reached.
    pub fn nothing() -> Self {
        Self {
            allow: Vec::new(),
            deny: vec![Cidr::ALL_V4],
        }
    }

    /// What is allowed, as it was given.
    pub fn allow(&self) -> &[Cidr] {
        &self.allow
    }

    /// What is denied, as it was given.
    pub fn deny(&self) -> &[Cidr] {
        &self.deny
    }

    /// Nothing is said: neither list has anything.
    pub fn is_empty(&self) -> bool {
        self.allow.is_empty() && self.deny.is_empty()
    }

    /// Something is denied.
    pub fn restricts(&self) -> bool {
        !self.deny.is_empty()
    }

    /// All is denied and nothing allowed.
    pub fn is_nothing(&self) -> bool {
        self.allow.is_empty() && self.deny.contains(&Cidr::ALL_V4)
    }

    /// The addresses that cannot be reached.
    pub fn unreachable(&self) -> Unreachable {
        Unreachable {
            denied: [false, true].map(|v6| self.denied(v6)),
            allowed: [false, true].map(|v6| self.allowed(v6)),
        }
    }

    /// What is allowed of a family, in order; no range has an address of another one.
    pub fn allowed(&self, v6: bool) -> Vec<Cidr> {
        disjoint(self.allow.iter().copied().filter(|range| range.is_v6() == v6))
    }

    /// What is denied of a family, in order; no range has an address of another one. `0.0.0.0/0` is what everybody writes for all: IPv6 is not
    /// left open by it, nor by any other range of IPv4 where somebody translates.
    pub fn denied(&self, v6: bool) -> Vec<Cidr> {
        let of = |range: &Cidr| match (range.is_v6() == v6, v6) {
            (true, _) => Some(*range),
            (false, true) if *range == Cidr::ALL_V4 => Some(Cidr::ALL_V6),
            (false, true) => range.translated(),
            (false, false) => None,
        };
        disjoint(self.deny.iter().filter_map(of))
    }
}

/// The addresses that an [`Egress`] lets nobody reach, for who asks of many of them.
#[derive(Clone, Debug)]
pub struct Unreachable {
    /// Of IPv4 and of IPv6, in order; no range has an address of another one.
    denied: [Vec<Cidr>; 2],
    allowed: [Vec<Cidr>; 2],
}

impl Unreachable {
    /// The address is one of these.
    pub fn has(&self, address: IpAddr) -> bool {
        let is_in = |lists: &[Vec<Cidr>; 2]| {
            let ranges = &lists[usize::from(address.is_ipv6())];
            let behind = ranges.partition_point(|range| range.first <= address);
            ranges[..behind].last().is_some_and(|range| range.contains(address))
        };
        is_in(&self.denied) && !is_in(&self.allowed)
    }
}

/// Without what another one covers: two ranges that have an address in common are one in the other.
fn disjoint(ranges: impl Iterator<Item = Cidr>) -> Vec<Cidr> {
    let mut sorted: Vec<Cidr> = ranges.collect();
    // By first address, and the widest first.
    sorted.sort();
    let mut kept: Vec<Cidr> = Vec::new();
    for range in sorted {
        if !kept.last().is_some_and(|last| last.covers(range)) {
            kept.push(range);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(texts: &[&str]) -> Vec<Cidr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn egress(allow: &[&str], deny: &[&str]) -> Egress {
        Egress::new(ranges(allow), ranges(deny)).unwrap()
    }

    fn denies(policy: &Egress, address: &str) -> bool {
        policy.unreachable().has(address.parse().unwrap())
    }

    #[test]
    fn ranges_are_read_as_they_are_written() {
        for text in [
            "1.1.1.1",
            "10.0.0.0/8",
            "0.0.0.0/0",
            "2001:db8::/32",
            "::/0",
            "fe80::1",
            "255.255.255.255",
        ] {
            assert_eq!(text.parse::<Cidr>().unwrap().to_string(), text);
        }
        assert_eq!("1.1.1.1/32".parse::<Cidr>().unwrap().to_string(), "1.1.1.1");
        assert_eq!("::1/128".parse::<Cidr>().unwrap().to_string(), "::1");
    }

    #[test]
    fn what_is_no_range_is_refused_with_what_is_one() {
        let refusal = |text: &str| text.parse::<Cidr>().unwrap_err().to_string();
        for text in [
            "",
            "/",
            "1.1.1",
            "1.1.1.1/",
            "1.1.1.1/33",
            "1.1.1.1/-1",
            "1.1.1.1/+8",
            "10.0.0.0/08",
            "::/129",
            "example.com",
            "*.example.com",
            "1.1.1.1:80",
            "[::1]",
            "fe80::1%eth0",
            " 1.1.1.1",
            "1.1.1.1/8/8",
            "01.1.1.1",
            "0x1.1.1.1",
            "10.0.0.0/256",
            "all",
        ] {
            assert!(refusal(text).contains("10.0.0.0/8"), "{text}: {}", refusal(text));
        }
        assert!(refusal("10.1.2.3/8").contains("write 10.0.0.0/8"));
        assert!(refusal("2001:db8::1/32").contains("write 2001:db8::/32"));
        for text in ["::ffff:1.2.3.4", "::ffff:0:0/96", "::ffff:1.2.3.0/120"] {
            assert!(refusal(text).contains("write it as IPv4"), "{text}");
        }
        let long = refusal(&format!("\u{1b}[31m{}", "x".repeat(100_000)));
        assert!(long.len() < 300 && !long.contains('\u{1b}'), "{long}");
    }

    #[test]
    fn what_is_allowed_wins_and_the_rest_is_as_the_denied_say() {
        let policy = egress(&["1.1.1.1", "8.8.8.0/24"], &["0.0.0.0/0"]);
        for (address, denied) in [
            ("1.1.1.1", false),
            ("8.8.8.255", false),
            ("8.8.9.0", true),
            ("2001:db8::1", true),
        ] {
            assert_eq!(denies(&policy, address), denied, "{address}");
        }
        let some = egress(&["10.1.0.0/16"], &["10.0.0.0/8", "2001:db8::/32"]);
        for (address, denied) in [
            ("10.1.2.3", false),
            ("10.2.0.0", true),
            ("11.0.0.0", false),
            ("2001:db8::1", true),
            ("2001:db9::", false),
        ] {
            assert_eq!(denies(&some, address), denied, "{address}");
        }
        // A wide one that is allowed wins over a narrow one that is denied.
        assert!(!denies(&egress(&["10.0.0.0/8"], &["10.1.2.3"]), "10.1.2.3"));
        // Of IPv6 alone.
        assert!(!denies(&egress(&[], &["::/0"]), "1.1.1.1"));
        // Nothing but what is denied is restricted.
        let allowed = egress(&["1.1.1.1"], &[]);
        assert!(!allowed.restricts() && !denies(&allowed, "9.9.9.9") && !allowed.is_empty());
        assert!(Egress::nothing().is_nothing() && denies(&Egress::nothing(), "::1"));
        assert!(!policy.is_nothing() && Egress::default().is_empty());
        // By way of who translates.
        assert!(denies(&some, "64:ff9b::10.2.0.0") && !denies(&some, "64:ff9b::11.0.0.0"));
    }

    #[test]
    fn ranges_that_overlap_become_one() {
        let policy = egress(
            &["1.1.1.1", "1.1.1.0/24", "1.1.1.1", "1.1.0.0/16", "2.0.0.0/8"],
            &["10.0.0.0/8", "10.0.0.0/8", "::/0", "2001:db8::/32"],
        );
        assert_eq!(policy.allowed(false), ranges(&["1.1.0.0/16", "2.0.0.0/8"]));
        assert_eq!(policy.denied(true), [Cidr::ALL_V6]);
        assert_eq!(policy.denied(false), ranges(&["10.0.0.0/8"]));
        assert_eq!(policy.allow().len(), 5, "what was given is kept");
        for address in ["9.255.255.255", "11.0.0.0"] {
            assert!(!denies(&policy, address), "{address}");
        }
        for address in ["10.0.0.0", "10.255.255.255", "2001:db8::1", "::"] {
            assert!(denies(&policy, address), "{address}");
        }
    }

    #[test]
    fn a_policy_travels_and_is_counted() {
        let policy = egress(&["1.1.1.1"], &["0.0.0.0/0"]);
        let text = r#"{"allow":["1.1.1.1"],"deny":["0.0.0.0/0"]}"#;
        let lists: Lists = serde_json::from_str(text).unwrap();
        assert_eq!(Egress::try_from(lists).unwrap(), policy);
        assert_eq!(serde_json::to_string(&policy).unwrap(), text);
        assert_eq!(serde_json::from_str::<Egress>("{}").unwrap(), Egress::default());
        for bad in [r#"{"allow":["x"]}"#, r#"{"permit":[]}"#, r#"{"deny":"0.0.0.0/0"}"#] {
            assert!(serde_json::from_str::<Egress>(bad).is_err(), "{bad}");
        }
        let many = vec![Cidr::ALL_V4; MAX_RANGES];
        assert!(Egress::new(many.clone(), Vec::new()).is_ok());
        let refused = Egress::new(many.clone(), vec![Cidr::ALL_V4]).unwrap_err();
        assert!(refused.to_string().contains("513 ranges"), "{refused}");
        let text = serde_json::json!({ "allow": many, "deny": ["::/0"] }).to_string();
        assert!(
            serde_json::from_str::<Egress>(&text)
                .unwrap_err()
                .to_string()
                .contains("too many")
        );
    }
}
