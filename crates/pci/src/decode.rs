//! Which function answers at a memory address now: ranges sorted by address. Guests move BARs at will, onto each other
//! too; the lowest-numbered claimant of overlapping ranges wins, and nothing else breaks.

use crate::{BAR_COUNT, MemoryRanges, PciFunction};

/// A range of guest physical addresses that does not wrap around and is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    start: u64,
    length: u64,
}

impl MemoryRange {
    /// A range; `None` if it is empty or wraps around.
    pub fn new(start: u64, length: u64) -> Option<Self> {
        start.checked_add(length).filter(|_| length > 0)?;
        Some(Self { start, length })
    }

    /// The first address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The number of bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The offset of an access of `length` bytes at `address`, if all of it lies within.
    pub fn offset_of(&self, address: u64, length: usize) -> Option<u64> {
        let offset = address.checked_sub(self.start)?;
        let end = offset.checked_add(length as u64)?;
        (end <= self.length).then_some(offset)
    }
}

/// A hit: whose BAR, and where in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The device number.
    pub slot: usize,
    /// The BAR.
    pub bar: usize,
    /// The offset within the BAR.
    pub offset: u64,
}

/// All ranges that are decoded now.
#[derive(Debug, Default)]
pub struct DecodeMap {
    // At most 32 slots x 6 BARs and read on each MMIO exit: a linear scan of what is in use beats a tree.
    entries: Vec<(MemoryRange, usize, usize)>,
}

impl DecodeMap {
    /// Replaces what `slot` decodes.
    pub fn update(&mut self, slot: usize, ranges: &MemoryRanges) {
        self.entries.retain(|&(_, owner, _)| owner != slot);
        for (bar, range) in ranges.iter().enumerate().take(BAR_COUNT) {
            if let Some(range) = range {
                self.entries.push((*range, slot, bar));
            }
        }
        self.entries.sort_by_key(|&(_, slot, bar)| (slot, bar));
    }

    /// Who answers an access of `length` bytes at `address`.
    pub fn find(&self, address: u64, length: usize) -> Option<Hit> {
        self.entries.iter().find_map(|&(range, slot, bar)| {
            let offset = range.offset_of(address, length)?;
            Some(Hit { slot, bar, offset })
        })
    }
}

/// What BARs decode, of both address spaces.
#[derive(Default)]
pub(crate) struct Decode {
    pub(crate) memory: DecodeMap,
    pub(crate) ports: DecodeMap,
}

impl Decode {
    pub(crate) fn update(&mut self, slot: usize, function: &dyn PciFunction) {
        self.memory.update(slot, &function.memory_ranges());
        self.ports.update(slot, &function.port_ranges());
    }

    pub(crate) fn clear(&mut self, slot: usize) {
        self.memory.update(slot, &[None; BAR_COUNT]);
        self.ports.update(slot, &[None; BAR_COUNT]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_accesses_hit() {
        let mut map = DecodeMap::default();
        let mut ranges = [None; BAR_COUNT];
        ranges[1] = MemoryRange::new(0x1000, 0x100);
        map.update(3, &ranges);
        let hit = Hit {
            slot: 3,
            bar: 1,
            offset: 0xfc,
        };
        assert_eq!(map.find(0x10fc, 4), Some(hit));
        assert_eq!(map.find(0x10fd, 4), None);
        assert_eq!(map.find(0xfff, 4), None);
        assert_eq!(map.find(u64::MAX, 8), None);
        map.update(3, &[None; BAR_COUNT]);
        assert_eq!(map.find(0x10fc, 4), None);
    }

    #[test]
    fn overlaps_have_one_winner() {
        let mut map = DecodeMap::default();
        let mut ranges = [None; BAR_COUNT];
        ranges[0] = MemoryRange::new(0x1000, 0x1000);
        map.update(7, &ranges);
        map.update(2, &ranges);
        assert_eq!(map.find(0x1000, 1).unwrap().slot, 2);
        assert_eq!(MemoryRange::new(u64::MAX, 2), None);
        assert_eq!(MemoryRange::new(0, 0), None);
    }
}
