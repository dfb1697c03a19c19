//! The capabilities of a function, as its configuration space lists them (PCI 3.0, 6.7; PCI Express 5.0, 7.6.3). What a function says may be
//! wrong: a list ends where it leads back or out, and a capability ends where the next one by address begins. Data only.

use pci::config::{SIZE, register};

/// The status register's bit: there is a list (6.2.3).
const STATUS_CAPABILITIES_LIST: u16 = 1 << 4;

/// Bytes of configuration space with the extended part.
pub(crate) const EXTENDED_SIZE: usize = 4096;

/// A capability that the function has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Its id: 8 bits, of an extended one 16.
    pub(crate) id: u16,
    /// Where it begins.
    pub(crate) at: usize,
    /// How many bytes it can have at most.
    pub(crate) room: usize,
}

/// Those of the first 256 bytes, in the list's order.
pub(crate) fn list(config: &[u8]) -> Vec<Found> {
    if u16_at(config, register::STATUS) & STATUS_CAPABILITIES_LIST == 0 {
        return Vec::new();
    }
    let first = usize::from(u8_at(config, register::CAPABILITIES_POINTER) & !3);
    let next = |at: usize| usize::from(u8_at(config, at + 1) & !3);
    let places = follow(first, register::HEADER_END..SIZE, next);
    with_rooms(&places, SIZE, |at| u16::from(u8_at(config, at)))
}

/// Those behind the first 256 bytes.
pub(crate) fn extended(config: &[u8]) -> Vec<Found> {
    // Nothing there reads as zeroes, or as ones (7.6.3).
    let header = |at: usize| match u32_at(config, at) {
        u32::MAX => 0,
        header => header,
    };
    if config.len() < EXTENDED_SIZE || header(SIZE) == 0 {
        return Vec::new();
    }
    let next = |at: usize| usize::try_from(header(at) >> 20 & !3).unwrap_or(0);
    let places = follow(SIZE, SIZE..EXTENDED_SIZE, next);
    with_rooms(&places, EXTENDED_SIZE, |at| u16_at(config, at))
}

fn follow(first: usize, within: std::ops::Range<usize>, next: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut places = Vec::new();
    let mut at = first;
    while within.contains(&at) && !places.contains(&at) {
        places.push(at);
        at = next(at);
    }
    places
}

fn with_rooms(places: &[usize], end: usize, id: impl Fn(usize) -> u16) -> Vec<Found> {
    let found = places.iter().map(|&at| {
        let behind = places.iter().copied().filter(|&other| other > at).min();
        Found {
            id: id(at),
            at,
            room: behind.unwrap_or(end) - at,
        }
    });
    found.collect()
}

/// Registers; what is not there reads as zeroes.
pub(crate) fn u8_at(config: &[u8], at: usize) -> u8 {
    config.get(at).copied().unwrap_or(0)
}

pub(crate) fn u16_at(config: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([u8_at(config, at), u8_at(config, at + 1)])
}

pub(crate) fn u32_at(config: &[u8], at: usize) -> u32 {
    u32::from(u16_at(config, at)) | u32::from(u16_at(config, at + 2)) << 16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(config: &[u8]) -> Vec<(u16, usize, usize)> {
        list(config).iter().map(|one| (one.id, one.at, one.room)).collect()
    }

    /// Power management at 0x40, MSI-X at 0x60, something at 0x50.
    fn config() -> Vec<u8> {
        let mut config = vec![0; SIZE];
        config[register::STATUS] = 0x10;
        config[register::CAPABILITIES_POINTER] = 0x40;
        config[0x40..0x42].copy_from_slice(&[1, 0x60]);
        config[0x60..0x62].copy_from_slice(&[0x11, 0x52]);
        config[0x50] = 9;
        config
    }

    #[test]
    fn a_list_is_followed_and_each_ends_where_the_next_begins() {
        // The lowest two bits of a link are reserved (6.7).
        assert_eq!(found(&config()), [(1, 0x40, 0x10), (0x11, 0x60, 0xa0), (9, 0x50, 0x10)]);
        let mut none = config();
        none[register::STATUS] = 0;
        assert_eq!(found(&none), []);
    }

    #[test]
    fn circles_and_links_to_the_header_end_a_list() {
        let mut circle = config();
        circle[0x51] = 0x40;
        assert_eq!(found(&circle).len(), 3);
        circle[0x41] = 0x40;
        assert_eq!(found(&circle), [(1, 0x40, 0xc0)]);
        circle[0x41] = 0x3c;
        assert_eq!(found(&circle), [(1, 0x40, 0xc0)]);
        assert_eq!(
            found(&circle[..0x40]),
            [(0, 0x40, 0xc0)],
            "cut short: what is not there is zero"
        );
    }

    #[test]
    fn an_extended_list_is_followed_to_its_end() {
        let mut config = vec![0; EXTENDED_SIZE];
        assert_eq!(extended(&config), []);
        config[0x100..0x104].copy_from_slice(&(0x1401_0001_u32).to_le_bytes());
        config[0x140..0x144].copy_from_slice(&(0xffc1_0003_u32).to_le_bytes());
        config[0xffc..0x1000].copy_from_slice(&(0x1001_0010_u32).to_le_bytes());
        let found: Vec<_> = extended(&config).iter().map(|one| (one.id, one.at, one.room)).collect();
        assert_eq!(found, [(1, 0x100, 0x40), (3, 0x140, 0xebc), (0x10, 0xffc, 4)]);
        config[0x100..0x104].fill(0xff);
        assert_eq!(extended(&config), []);
        assert_eq!(extended(&config[..SIZE]), []);
    }
}
