//! Allocations of a client: addresses that the library has given, with their lengths.
//!
//! Knows no call and no quota.

use std::collections::{BTreeMap, BTreeSet};

use crate::failure::Failure;

/// Allocations of a client at a time: each takes memory of the server's.
const MOST: usize = 1 << 20;

/// Lengths by addresses.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    ranges: BTreeMap<u64, u64>,
    /// Those of modules' variables, which go with their modules.
    variables: BTreeMap<u64, u64>,
    /// Beginnings of each module's.
    of_modules: BTreeMap<u32, BTreeSet<u64>>,
    used: u64,
}

impl Memory {
    /// Bytes of all of them.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Whether there can be one more.
    pub(crate) fn has_room(&self) -> Result<(), Failure> {
        if self.ranges.len() + self.variables.len() < MOST {
            Ok(())
        } else {
            Err(Failure::OutOfMemory)
        }
    }

    /// A new one.
    pub(crate) fn add(&mut self, begin: u64, length: u64) {
        if let Some(before) = self.ranges.insert(begin, length) {
            self.used -= before;
        }
        self.used += length;
    }

    /// A variable of a module.
    pub(crate) fn add_variable(&mut self, module: u32, begin: u64, length: u64) {
        self.variables.insert(begin, length);
        self.of_modules.entry(module).or_default().insert(begin);
    }

    /// A module's variables are gone.
    pub(crate) fn remove_variables(&mut self, module: u32) {
        for begin in self.of_modules.remove(&module).unwrap_or_default() {
            self.variables.remove(&begin);
        }
    }

    /// How long the one is that begins there.
    pub(crate) fn length(&self, begin: u64) -> Result<u64, Failure> {
        self.ranges.get(&begin).copied().ok_or(Failure::InvalidValue)
    }

    /// It is gone.
    pub(crate) fn remove(&mut self, begin: u64) {
        if let Some(length) = self.ranges.remove(&begin) {
            self.used -= length;
        }
    }

    /// Whether so many bytes from there on are in one of them.
    pub(crate) fn check(&self, begin: u64, length: u64) -> Result<(), Failure> {
        let end = begin.checked_add(length).ok_or(Failure::IllegalAddress)?;
        let within = [&self.ranges, &self.variables].into_iter().any(|ranges| {
            let range = ranges.range(..=begin).next_back();
            range.is_some_and(|(other, length)| begin - other < *length && end - other <= *length)
        });
        if within { Ok(()) } else { Err(Failure::IllegalAddress) }
    }

    /// Rows of so many bytes, each so many behind the one before.
    pub(crate) fn check_rows(&self, begin: u64, pitch: u64, width: u64, height: u64) -> Result<(), Failure> {
        if width > pitch {
            return Err(Failure::InvalidValue);
        }
        let Some(more) = height.checked_sub(1) else {
            return Ok(());
        };
        let length = more.checked_mul(pitch).and_then(|rows| rows.checked_add(width));
        self.check(begin, length.ok_or(Failure::IllegalAddress)?)
    }

    /// Beginnings and lengths of all of them, which are none any more.
    pub(crate) fn take_all(&mut self) -> BTreeMap<u64, u64> {
        self.used = 0;
        self.variables.clear();
        self.of_modules.clear();
        std::mem::take(&mut self.ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_within_one_allocation() {
        let mut memory = Memory::default();
        memory.add(1000, 100);
        memory.add(1100, 50);
        assert_eq!(memory.used(), 150);
        for (begin, length) in [(1000, 100), (1000, 0), (1099, 1), (1149, 1)] {
            assert_eq!(memory.check(begin, length), Ok(()), "{begin} {length}");
        }
        for (begin, length) in [(1000, 101), (999, 1), (1150, 0), (u64::MAX, 1), (1001, u64::MAX)] {
            assert_eq!(
                memory.check(begin, length),
                Err(Failure::IllegalAddress),
                "{begin} {length}"
            );
        }
        assert_eq!(memory.length(1001), Err(Failure::InvalidValue));
        memory.add_variable(1, 5000, 4);
        memory.add_variable(2, 6000, 4);
        assert_eq!((memory.used(), memory.check(5000, 4)), (150, Ok(())));
        assert_eq!(memory.check(5000, 5), Err(Failure::IllegalAddress));
        assert_eq!(memory.length(5000), Err(Failure::InvalidValue), "nobody can free it");
        memory.remove_variables(1);
        assert_eq!(
            memory.check(5000, 4),
            Err(Failure::IllegalAddress),
            "its module is gone"
        );
        assert_eq!(memory.check(6000, 4), Ok(()), "that of another one is not");
        memory.remove(1000);
        assert_eq!(
            (memory.used(), memory.check(1000, 1)),
            (50, Err(Failure::IllegalAddress))
        );
    }

    #[test]
    fn rows_end_where_the_last_one_does() {
        let mut memory = Memory::default();
        memory.add(1000, 100);
        assert_eq!(memory.check_rows(1000, 30, 10, 4), Ok(()));
        assert_eq!(memory.check_rows(1000, 31, 10, 4), Err(Failure::IllegalAddress));
        assert_eq!(memory.check_rows(1000, 9, 10, 1), Err(Failure::InvalidValue));
        assert_eq!(memory.check_rows(1000, 100, 100, 0), Ok(()));
        assert_eq!(memory.check_rows(1000, 1 << 63, 1, 4), Err(Failure::IllegalAddress));
    }
}
