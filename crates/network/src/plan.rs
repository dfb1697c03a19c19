//! Which address is whose: constants inside guests, and a function of the slot outside. Pure numbers.

use std::net::{Ipv4Addr, Ipv6Addr};

use sha2::{Digest, Sha256};

use crate::Error;

/// The guest's addresses, in every guest. IPv4 is the last block of the shared address space (RFC 6598), which hardly
/// any network uses; IPv6 is a unique local prefix (RFC 4193) of its own.
pub const GUEST_V4: Ipv4Addr = Ipv4Addr::new(100, 127, 255, 254);
/// The gateway, in every guest; name servers are asked there too.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(100, 127, 255, 253);
/// Length of the guest's IPv4 prefix.
pub const PREFIX_V4: u8 = 30;
/// As [`GUEST_V4`].
pub const GUEST_V6: Ipv6Addr = Ipv6Addr::new(0xfdba, 0x5a17, 0, 0, 0, 0, 0, 2);
/// Where guests ask name servers by IPv6.
pub const DNS_V6: Ipv6Addr = Ipv6Addr::new(0xfdba, 0x5a17, 0, 0, 0, 0, 0, 1);
/// The gateway by IPv6: routers are known by their link-local address.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
/// The namespace's link-local address on its uplink; the host has that of the gateway there.
pub(crate) const UPLINK_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);
/// The guest's Ethernet address, locally administered.
pub const GUEST_MAC: [u8; 6] = [0x02, 0x00, 0x00, 0xba, 0x5a, 0x02];
/// The gateway's, that is every TAP's.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x00, 0x00, 0xba, 0x5a, 0x01];

/// Offsets in the range: the host's end and the namespace's end, which are one small network, and, outside of it, where the
/// namespace sends questions of names.
const HOST: u32 = 1;
const NAMESPACE: u32 = 2;
const DNS: u32 = 8;
/// The first slot's.
const SLOTS: u32 = 16;

/// More would not be given out by any node.
const MOST_SLOTS: u32 = 0xff00;

/// Ranges of 16 bits that are tried in turn where none is configured, and the one that comes after them: 10.88, 10.216 and 172.24. Then
/// their neighbours, [`NEIGHBOURS`] of each: every daemon of a host has a range of its own.
const WIDE: [u32; 3] = [0x0a58_0000, 0x0ad8_0000, 0xac18_0000];
const NARROW: Ipv4Range = Ipv4Range {
    base: 0xc0a8_8000,
    length: 18,
}; // 192.168.128.0/18
const NEIGHBOURS: u32 = 7;

/// An IPv4 range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Range {
    base: u32,
    length: u8,
}

impl Ipv4Range {
    /// The range of `length` bits that `address` lies in.
    ///
    /// # Errors
    /// It has room for too few sandboxes, or more than one can have.
    pub fn new(address: Ipv4Addr, length: u8) -> Result<Self, Error> {
        if !(8..=24).contains(&length) {
            return Err(Error::Range {
                range: format!("{address}/{length}"),
                why: "its prefix must have 8 to 24 bits",
            });
        }
        let base = u32::from(address) & mask(length);
        Ok(Self { base, length })
    }

    /// Whether two ranges have an address in common.
    pub(crate) fn overlaps(self, other_base: u32, other_length: u8) -> bool {
        let common = mask(self.length.min(other_length));
        self.base & common == other_base & common
    }

    /// Whether it is this very range.
    pub(crate) fn is(self, first: Ipv4Addr, length: u8) -> bool {
        self.first() == first && self.length == length
    }

    /// Its first address.
    pub(crate) fn first(self) -> Ipv4Addr {
        self.at(0)
    }

    /// Bits of its prefix.
    pub(crate) fn length(self) -> u8 {
        self.length
    }

    fn at(self, offset: u32) -> Ipv4Addr {
        Ipv4Addr::from(self.base + offset)
    }

    /// The last slot.
    pub(crate) fn last_slot(self) -> u32 {
        // Without the broadcast address.
        (!mask(self.length) - 1 - SLOTS).min(MOST_SLOTS - 1)
    }
}

impl std::fmt::Display for Ipv4Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.at(0), self.length)
    }
}

fn mask(length: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0)
}

/// The ranges that the host and the namespace know sandboxes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranges {
    /// IPv4.
    pub v4: Ipv4Range,
    /// IPv6, a prefix of 64 bits.
    pub v6: Ipv6Addr,
}

impl Ranges {
    /// Ranges for `instance` that might be used, the best one first.
    pub(crate) fn candidates(instance: &str) -> impl Iterator<Item = Self> {
        let v6 = unique_local(instance);
        let wide = |base| Ipv4Range { base, length: 16 };
        let neighbours = (1..=NEIGHBOURS).flat_map(move |by| WIDE.map(|base| wide(base + (by << 16))));
        let all = WIDE.map(wide).into_iter().chain([NARROW]).chain(neighbours);
        all.map(move |v4| Self { v4, v6 })
    }

    /// The host's end of the pair.
    pub fn host_v4(&self) -> Ipv4Addr {
        self.v4.at(HOST)
    }

    /// The namespace's end of the pair.
    pub fn namespace_v4(&self) -> Ipv4Addr {
        self.v4.at(NAMESPACE)
    }

    pub(crate) fn dns_v4(&self) -> Ipv4Addr {
        self.v4.at(DNS)
    }

    /// As [`Ranges::host_v4`].
    pub fn host_v6(&self) -> Ipv6Addr {
        self.v6_at(HOST)
    }

    /// As [`Ranges::namespace_v4`].
    pub fn namespace_v6(&self) -> Ipv6Addr {
        self.v6_at(NAMESPACE)
    }

    pub(crate) fn dns_v6(&self) -> Ipv6Addr {
        self.v6_at(DNS)
    }

    /// What the host knows slot `slot` by.
    ///
    /// # Errors
    /// There is no such slot.
    pub fn slot_v4(&self, slot: u32) -> Result<Ipv4Addr, Error> {
        self.check(slot)?;
        Ok(self.v4.at(SLOTS + slot))
    }

    /// As [`Ranges::slot_v4`]. The last 16 bits are such that the address has the checksum of [`GUEST_V6`]: it can be put
    /// in its place, also where an ICMPv6 message quotes it, and every checksum still holds (the idea of RFC 6296).
    ///
    /// # Errors
    /// There is no such slot.
    pub fn slot_v6(&self, slot: u32) -> Result<Ipv6Addr, Error> {
        self.check(slot)?;
        let mut address = self.v6.segments();
        address[6] = u16::try_from(SLOTS + slot).unwrap_or(u16::MAX);
        let wanted = sum(GUEST_V6.segments()) % 0xffff;
        let have = sum(address) % 0xffff;
        address[7] = u16::try_from((wanted + 0xffff - have) % 0xffff).unwrap_or(0);
        Ok(Ipv6Addr::from(address))
    }

    /// The slot that has an address.
    pub(crate) fn slot_of_v4(&self, address: Ipv4Addr) -> Option<u32> {
        let slot = u32::from(address).checked_sub(self.v4.base + SLOTS)?;
        (slot <= self.v4.last_slot()).then_some(slot)
    }

    /// As [`Ranges::slot_of_v4`].
    pub(crate) fn slot_of_v6(&self, address: Ipv6Addr) -> Option<u32> {
        let slot = u32::from(address.segments()[6]).checked_sub(SLOTS)?;
        (self.slot_v6(slot).ok()? == address).then_some(slot)
    }

    fn check(&self, slot: u32) -> Result<(), Error> {
        let last = self.v4.last_slot();
        if slot > last {
            return Err(Error::Slot { slot, last });
        }
        Ok(())
    }

    fn v6_at(&self, offset: u32) -> Ipv6Addr {
        Ipv6Addr::from(u128::from(self.v6) + u128::from(offset))
    }
}

fn sum(segments: [u16; 8]) -> u32 {
    segments.into_iter().map(u32::from).sum()
}

/// A unique local prefix (RFC 4193, 3.1) that the instance's name stands for.
fn unique_local(instance: &str) -> Ipv6Addr {
    let digest = Sha256::digest(format!("basalt network {instance}"));
    let mut bytes = [0; 16];
    bytes[0] = 0xfd;
    for (byte, value) in bytes[1..6].iter_mut().zip(digest) {
        *byte = value;
    }
    Ipv6Addr::from(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges() -> Ranges {
        Ranges::candidates("basalt").next().unwrap()
    }

    #[test]
    fn a_slot_has_its_own_addresses() {
        let ranges = ranges();
        assert_eq!(ranges.slot_v4(0).unwrap().to_string(), "10.88.0.16");
        assert_eq!(ranges.slot_v4(1000).unwrap().to_string(), "10.88.3.248");
        assert_eq!(ranges.slot_of_v4(ranges.slot_v4(1000).unwrap()), Some(1000));
        assert_eq!(ranges.slot_of_v4(ranges.host_v4()), None);
        assert_ne!(ranges.slot_v6(3).unwrap(), ranges.slot_v6(4).unwrap());
        let last = ranges.v4.last_slot();
        assert!(ranges.slot_v4(last).is_ok());
        assert!(
            ranges
                .slot_v4(last + 1)
                .unwrap_err()
                .to_string()
                .contains("beyond the last one")
        );
        let small = Ipv4Range::new(Ipv4Addr::new(192, 0, 2, 77), 24).unwrap();
        assert_eq!(small.to_string(), "192.0.2.0/24");
        assert_eq!(small.last_slot(), 238);
    }

    #[test]
    fn every_slots_v6_address_has_the_checksum_of_the_guests() {
        let ranges = ranges();
        for slot in (0..ranges.v4.last_slot()).step_by(97) {
            let address = ranges.slot_v6(slot).unwrap();
            assert_eq!(
                sum(address.segments()) % 0xffff,
                sum(GUEST_V6.segments()) % 0xffff,
                "{address}"
            );
        }
    }

    #[test]
    fn overlaps_are_seen_both_ways() {
        let range = Ipv4Range::new(Ipv4Addr::new(10, 88, 0, 0), 16).unwrap();
        let overlaps = |text: &str, length| range.overlaps(u32::from(text.parse::<Ipv4Addr>().unwrap()), length);
        assert!(overlaps("10.88.7.0", 24));
        assert!(overlaps("10.0.0.0", 8));
        assert!(!overlaps("10.89.0.0", 16));
        assert!(!overlaps("192.168.0.0", 16));
        assert!(Ipv4Range::new(Ipv4Addr::LOCALHOST, 30).is_err());
    }
}
