//! Allocations of a client: ranges of addresses that the client has chosen, and what they take of a quota.
//!
//! Knows no call.

use std::collections::BTreeMap;

use crate::Failure;

/// Allocations of a client at a time: each takes memory of the server's.
const MOST: usize = 1 << 20;

/// Who counts the bytes of all clients.
pub trait Quota {
    /// So many bytes more; whether they are within what there is.
    fn charge(&mut self, bytes: u64) -> bool;

    /// So many bytes less.
    fn give_back(&mut self, bytes: u64);
}

/// A client's allocations: lengths by addresses.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    ranges: BTreeMap<u64, u64>,
    used: u64,
}

impl Memory {
    /// Bytes of all of them.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// A new one, where the client says.
    pub(crate) fn add(&mut self, begin: u64, length: u64, quota: &mut dyn Quota) -> Result<(), Failure> {
        let end = begin
            .checked_add(length)
            .filter(|_| begin > 0 && length > 0)
            .ok_or(Failure::InvalidValue)?;
        let before = self.ranges.range(..end).next_back();
        if before.is_some_and(|(other, length)| other + length > begin) {
            return Err(Failure::InvalidValue);
        }
        if self.ranges.len() >= MOST || !quota.charge(length) {
            return Err(Failure::OutOfMemory);
        }
        self.ranges.insert(begin, length);
        self.used += length;
        Ok(())
    }

    /// One that begins there is gone.
    pub(crate) fn remove(&mut self, begin: u64, quota: &mut dyn Quota) -> Result<(), Failure> {
        let length = self.ranges.remove(&begin).ok_or(Failure::InvalidValue)?;
        self.used -= length;
        quota.give_back(length);
        Ok(())
    }

    /// Whether so many bytes from there on are in one of them.
    pub(crate) fn check(&self, begin: u64, length: u64) -> Result<(), Failure> {
        let end = begin.checked_add(length).ok_or(Failure::IllegalAddress)?;
        let range = self.ranges.range(..=begin).next_back();
        let within = range.is_some_and(|(other, length)| end <= other + length && begin < other + length);
        if within { Ok(()) } else { Err(Failure::IllegalAddress) }
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
    fn ranges_do_not_overlap_and_are_within_the_quota() {
        let (mut memory, mut quota) = (Memory::default(), Most(300));
        memory.add(1000, 100, &mut quota).unwrap();
        memory.add(1100, 100, &mut quota).unwrap();
        for (begin, length) in [
            (1050, 1),
            (999, 2),
            (900, 300),
            (1199, 10),
            (0, 1),
            (u64::MAX, 2),
            (2000, 0),
        ] {
            assert_eq!(
                memory.add(begin, length, &mut quota),
                Err(Failure::InvalidValue),
                "{begin} {length}"
            );
        }
        assert_eq!(memory.add(2000, 101, &mut quota), Err(Failure::OutOfMemory));
        assert_eq!((memory.used(), quota.0), (200, 100));
        assert_eq!(memory.check(1000, 100), Ok(()));
        for (begin, length) in [(1000, 101), (999, 1), (1200, 0), (1199, 2), (u64::MAX, 1)] {
            assert_eq!(
                memory.check(begin, length),
                Err(Failure::IllegalAddress),
                "{begin} {length}"
            );
        }
        assert_eq!(memory.remove(1001, &mut quota), Err(Failure::InvalidValue));
        memory.remove(1000, &mut quota).unwrap();
        assert_eq!((memory.used(), quota.0), (100, 200));
    }
}
