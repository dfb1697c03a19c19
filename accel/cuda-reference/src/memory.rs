//! A client's allocations: bytes at the addresses that the client has chosen, charged to its quota, and copies between them.
//!
//! Knows no call. Bytes of an allocation are zero until somebody writes them, and the host has no page of them until then.

use std::cell::Cell;

use accel_cuda_null::{Failure, Quota};
use accel_ptx::{Memory as Global, OutOfRange};
use zerocopy::FromZeros as _;

/// Allocations of a client at a time. A new one moves what the table has of those behind it, which is 2 MiB at most.
const MOST: usize = 1 << 16;
/// Addresses from here on are of other state spaces than global memory (`accel_ptx::Memory`).
pub(crate) const END: u64 = 1 << 60;
/// How many places there are to note which allocation an address was in, and the address's bits by which they are found.
const HINTS: usize = 64;
const HINT_SHIFT: u32 = 12;

#[derive(Debug)]
struct Region {
    begin: u64,
    bytes: Box<[u8]>,
}

impl Region {
    /// Where so many bytes from an address on are, if all of them are in it.
    #[inline]
    fn place(&self, address: u64, length: usize) -> Option<usize> {
        let offset = usize::try_from(address.checked_sub(self.begin)?).ok()?;
        (self.bytes.len().checked_sub(offset)? >= length).then_some(offset)
    }
}

/// A client's allocations.
#[derive(Debug)]
pub(crate) struct Memory {
    /// By address.
    regions: Vec<Region>,
    used: u64,
    most: u64,
    /// Which allocation an address of this hash was in last. One that is out of date costs a search.
    hints: [Cell<u32>; HINTS],
}

impl Memory {
    /// Without any; all together have no more bytes than that.
    pub(crate) fn new(most: u64) -> Self {
        Self {
            regions: Vec::new(),
            used: 0,
            most,
            hints: [const { Cell::new(0) }; HINTS],
        }
    }

    /// Bytes of all of them.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// What all of them may have.
    pub(crate) fn most(&self) -> u64 {
        self.most
    }

    /// A new one, where the client says.
    pub(crate) fn add(&mut self, begin: u64, length: u64, quota: &mut dyn Quota) -> Result<(), Failure> {
        let end = begin
            .checked_add(length)
            .filter(|end| begin > 0 && length > 0 && *end <= END)
            .ok_or(Failure::InvalidValue)?;
        let after = self.regions.partition_point(|region| region.begin < end);
        let before = after.checked_sub(1).and_then(|index| self.regions.get(index));
        if before.is_some_and(|other| other.begin + other.bytes.len() as u64 > begin) {
            return Err(Failure::InvalidValue);
        }
        let all = self.used.saturating_add(length);
        if self.regions.len() >= MOST || all > self.most || !quota.charge(length) {
            return Err(Failure::OutOfMemory);
        }
        let bytes = usize::try_from(length)
            .ok()
            .and_then(|length| <[u8]>::new_box_zeroed_with_elems(length).ok());
        let Some(bytes) = bytes else {
            quota.give_back(length);
            return Err(Failure::OutOfMemory);
        };
        self.regions.insert(after, Region { begin, bytes });
        self.used = all;
        Ok(())
    }

    /// All allocations: where they begin, and their bytes.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.regions.iter().map(|region| (region.begin, &*region.bytes))
    }

    /// Bytes that a client has beside its allocations, until it ends.
    pub(crate) fn charge(&mut self, bytes: u64, quota: &mut dyn Quota) -> Result<(), Failure> {
        let all = self.used.saturating_add(bytes);
        if all > self.most || !quota.charge(bytes) {
            return Err(Failure::OutOfMemory);
        }
        self.used = all;
        Ok(())
    }

    /// Such bytes are not there any more.
    pub(crate) fn give_back(&mut self, bytes: u64, quota: &mut dyn Quota) {
        self.used = self.used.saturating_sub(bytes);
        quota.give_back(bytes);
    }

    /// One that begins there is gone.
    pub(crate) fn remove(&mut self, begin: u64, quota: &mut dyn Quota) -> Result<(), Failure> {
        let found = self.regions.binary_search_by_key(&begin, |region| region.begin);
        let region = self.regions.remove(found.map_err(|_| Failure::InvalidValue)?);
        let length = region.bytes.len() as u64;
        self.used -= length;
        quota.give_back(length);
        Ok(())
    }

    /// Whether there is an allocation that an address is in.
    pub(crate) fn check(&self, address: u64) -> Result<(), Failure> {
        self.find(address, 1).map(drop)
    }

    #[inline]
    fn find(&self, address: u64, length: usize) -> Result<(usize, usize), Failure> {
        let hash = usize::try_from(address >> HINT_SHIFT).unwrap_or_default() % HINTS;
        let within = |index: usize| {
            let region = self.regions.get(index)?;
            region.place(address, length).map(|offset| (index, offset))
        };
        if let Some(found) = within(self.hints[hash].get() as usize) {
            return Ok(found);
        }
        let after = self.regions.partition_point(|region| region.begin <= address);
        let found = after.checked_sub(1).and_then(within).ok_or(Failure::IllegalAddress)?;
        self.hints[hash].set(u32::try_from(found.0).unwrap_or_default());
        Ok(found)
    }

    /// So many bytes from there on, which are in one allocation.
    pub(crate) fn bytes(&self, address: u64, length: u64) -> Result<&[u8], Failure> {
        let length = usize::try_from(length).map_err(|_| Failure::IllegalAddress)?;
        if length == 0 {
            return Ok(&[]);
        }
        let (index, offset) = self.find(address, length)?;
        Ok(&self.regions[index].bytes[offset..offset + length])
    }

    /// The same, to be written.
    pub(crate) fn bytes_mut(&mut self, address: u64, length: u64) -> Result<&mut [u8], Failure> {
        let length = usize::try_from(length).map_err(|_| Failure::IllegalAddress)?;
        if length == 0 {
            return Ok(&mut []);
        }
        let (index, offset) = self.find(address, length)?;
        Ok(&mut self.regions[index].bytes[offset..offset + length])
    }

    /// Copies from one place to another; as if by a buffer between them if they overlap.
    pub(crate) fn copy(&mut self, to: u64, from: u64, length: u64) -> Result<(), Failure> {
        let length = usize::try_from(length).map_err(|_| Failure::IllegalAddress)?;
        if length == 0 {
            return Ok(());
        }
        let (source, from) = self.find(from, length)?;
        let (target, to) = self.find(to, length)?;
        if source == target {
            self.regions[source].bytes.copy_within(from..from + length, to);
            return Ok(());
        }
        let [source, target] = self
            .regions
            .get_disjoint_mut([source, target])
            .map_err(|_| Failure::IllegalAddress)?;
        target.bytes[to..to + length].copy_from_slice(&source.bytes[from..from + length]);
        Ok(())
    }
}

impl Global for Memory {
    #[inline]
    fn load(&self, address: u64, into: &mut [u8]) -> Result<(), OutOfRange> {
        let (index, offset) = self.find(address, into.len()).map_err(|_| OutOfRange)?;
        into.copy_from_slice(&self.regions[index].bytes[offset..offset + into.len()]);
        Ok(())
    }

    #[inline]
    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), OutOfRange> {
        let (index, offset) = self.find(address, from.len()).map_err(|_| OutOfRange)?;
        self.regions[index].bytes[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Most(u64);

    impl Quota for Most {
        fn charge(&mut self, bytes: u64) -> bool {
            self.0.checked_sub(bytes).map(|left| self.0 = left).is_some()
        }

        fn give_back(&mut self, bytes: u64) {
            self.0 += bytes;
        }
    }

    #[test]
    fn ranges_do_not_overlap_and_are_within_both_limits() {
        let (mut memory, mut quota) = (Memory::new(250), Most(300));
        memory.add(1000, 100, &mut quota).unwrap();
        memory.add(1100, 100, &mut quota).unwrap();
        for (begin, length) in [
            (1050, 1),
            (999, 2),
            (900, 300),
            (1199, 10),
            (0, 1),
            (u64::MAX, 2),
            (END - 1, 2),
            (2000, 0),
        ] {
            assert_eq!(
                memory.add(begin, length, &mut quota),
                Err(Failure::InvalidValue),
                "{begin} {length}"
            );
        }
        assert_eq!(
            memory.add(2000, 51, &mut quota),
            Err(Failure::OutOfMemory),
            "its own limit"
        );
        quota.0 = 10;
        assert_eq!(memory.add(2000, 50, &mut quota), Err(Failure::OutOfMemory), "the quota");
        assert_eq!((memory.used(), quota.0), (200, 10));
        assert_eq!(memory.remove(1001, &mut quota), Err(Failure::InvalidValue));
        memory.remove(1000, &mut quota).unwrap();
        assert_eq!((memory.used(), quota.0), (100, 110));
        assert_eq!(memory.bytes(1000, 1), Err(Failure::IllegalAddress));
    }

    #[test]
    fn what_the_host_does_not_have_is_refused_and_not_charged() {
        let (mut memory, mut quota) = (Memory::new(u64::MAX), Most(u64::MAX));
        assert_eq!(memory.add(1 << 20, 1 << 59, &mut quota), Err(Failure::OutOfMemory));
        assert_eq!((memory.used(), quota.0), (0, u64::MAX));
    }

    #[test]
    fn bytes_are_found_in_any_order_and_only_in_one_allocation() {
        let (mut memory, mut quota) = (Memory::new(1 << 20), Most(1 << 20));
        // In the same place of the hints, and side by side.
        for index in [3, 1, 2, 0_u64] {
            memory
                .add((1 << 18) * (index + 1), 1 << (10 + index), &mut quota)
                .unwrap();
        }
        for index in [0, 2, 1, 3, 3, 0_u64] {
            let begin = (1 << 18) * (index + 1);
            memory.store(begin, &[u8::try_from(index).unwrap() + 1; 4]).unwrap();
        }
        for index in [2, 0, 3, 1_u64] {
            let begin = (1 << 18) * (index + 1);
            assert_eq!(
                memory.bytes(begin, 5).unwrap(),
                [[u8::try_from(index).unwrap() + 1; 4].as_slice(), &[0]].concat()
            );
            assert_eq!(
                memory.bytes(begin, (1 << (10 + index)) + 1),
                Err(Failure::IllegalAddress)
            );
            assert_eq!(memory.load(begin - 1, &mut [0]), Err(OutOfRange));
        }
        memory.add((1 << 18) + 1024, 8, &mut quota).unwrap();
        assert_eq!(
            memory.bytes((1 << 18) + 1020, 8),
            Err(Failure::IllegalAddress),
            "across two"
        );
        assert_eq!(memory.bytes(u64::MAX, 2), Err(Failure::IllegalAddress));
    }

    #[test]
    fn copies_are_within_one_allocation_and_between_two() {
        let (mut memory, mut quota) = (Memory::new(1 << 20), Most(1 << 20));
        memory.add(0x1000, 8, &mut quota).unwrap();
        memory.add(0x2000, 8, &mut quota).unwrap();
        memory
            .bytes_mut(0x1000, 8)
            .unwrap()
            .copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        memory.copy(0x1002, 0x1000, 6).unwrap();
        assert_eq!(memory.bytes(0x1000, 8).unwrap(), [1, 2, 1, 2, 3, 4, 5, 6]);
        memory.copy(0x2001, 0x1003, 2).unwrap();
        assert_eq!(memory.bytes(0x2000, 8).unwrap(), [0, 2, 3, 0, 0, 0, 0, 0]);
        assert_eq!(memory.copy(0x2001, 0x1003, 6), Err(Failure::IllegalAddress));
        assert_eq!(memory.copy(0x2003, 0x1001, 6), Err(Failure::IllegalAddress));
        assert_eq!(memory.copy(0, 0, 0), Ok(()));
    }
}
