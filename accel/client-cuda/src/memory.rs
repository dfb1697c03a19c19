//! Addresses: a part of this process' address space that belongs to the device's memory and in which nothing lies, and the ranges that the
//! program has there and in memory of its own that it has told of.
//!
//! ```text
//!   reserved (PROT_NONE) ──take──▶ an allocation, before the server has heard of it ──give back──▶ free, grown together
//! ```
//!
//! The server is told of each range, and is the one who counts; what is counted here is only so that a program hears of an end at once.
#![allow(unsafe_code, reason = "a part of the address space is reserved by mmap(2)")]

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::lock;
use crate::stub::Failure;

/// How much of the address space there is for the device's memory. No page of it exists.
const SPACE: usize = 1 << 40;
/// What allocations begin at a multiple of: natively it is 256, and programs rely on that.
const ALIGNMENT: u64 = 512;
/// `cudaErrorMemoryAllocation`.
const OUT_OF_MEMORY: Failure = Failure::Code(2);
/// `cudaErrorInvalidValue`.
const INVALID_VALUE: Failure = Failure::Code(1);

/// What lies at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The device's memory.
    Device,
    /// A variable of a module, which is the device's memory, too.
    Variable,
    /// Memory of the process that was allocated for copies.
    Host,
    /// Memory of the program's own that it has told of.
    Registered,
}

/// All ranges.
#[derive(Debug, Default)]
struct Memory {
    /// Free parts of the space: lengths by begins. Empty until it is reserved.
    free: BTreeMap<u64, u64>,
    is_reserved: bool,
    ranges: BTreeMap<u64, (u64, Kind)>,
    used: u64,
}

static MEMORY: Mutex<Memory> = Mutex::new(Memory {
    free: BTreeMap::new(),
    is_reserved: false,
    ranges: BTreeMap::new(),
    used: 0,
});

/// An allocation of the device's memory, of which the program may have so many bytes in all.
pub(crate) fn allocate(size: u64, most: u64) -> Result<u64, Failure> {
    take(size, most, Kind::Device)
}

/// The same for a variable of a module.
pub(crate) fn allocate_variable(size: u64, most: u64) -> Result<u64, Failure> {
    take(size, most, Kind::Variable)
}

/// A variable's place is free again, as the server has not heard of it.
pub(crate) fn forget_variable(begin: u64) {
    let mut memory = lock(&MEMORY);
    if let Ok(length) = memory.remove(begin, Kind::Variable) {
        memory.give_back(begin, length);
    }
}

/// Memory of the device's that the server has put there.
pub(crate) fn insert(begin: u64, length: u64, kind: Kind) {
    let mut memory = lock(&MEMORY);
    if let Some((before, _)) = memory.ranges.insert(begin, (length, kind)) {
        memory.used -= before;
    }
    memory.used += length;
}

/// Where all allocations begin, but for variables.
pub(crate) fn allocations() -> Vec<u64> {
    let memory = lock(&MEMORY);
    let all = memory.ranges.iter().filter(|(_, (_, kind))| *kind == Kind::Device);
    all.map(|(begin, _)| *begin).collect()
}

fn take(size: u64, most: u64, kind: Kind) -> Result<u64, Failure> {
    let mut memory = lock(&MEMORY);
    let length = size.max(1).checked_next_multiple_of(ALIGNMENT).ok_or(OUT_OF_MEMORY)?;
    if memory.used.checked_add(length).is_none_or(|used| used > most) {
        return Err(OUT_OF_MEMORY);
    }
    memory.reserve()?;
    let begin = memory.take(length).ok_or(OUT_OF_MEMORY)?;
    memory.ranges.insert(begin, (length, kind));
    memory.used += length;
    Ok(begin)
}

/// An allocation's end, of which `tell` tells the server. Its address is another's only behind that, as the server has records in order.
pub(crate) fn free(begin: u64, tell: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let length = lock(&MEMORY).remove(begin, Kind::Device)?;
    let told = tell();
    lock(&MEMORY).give_back(begin, length);
    told
}

/// Memory of the process' own that is for copies.
pub(crate) fn note(begin: u64, length: u64, kind: Kind) -> Result<(), Failure> {
    let mut memory = lock(&MEMORY);
    let end = begin.checked_add(length.max(1)).ok_or(INVALID_VALUE)?;
    let before = memory.ranges.range(..end).next_back();
    if before.is_some_and(|(other, (length, _))| other + length > begin) {
        // cudaErrorHostMemoryAlreadyRegistered
        return Err(Failure::Code(712));
    }
    memory.ranges.insert(begin, (length.max(1), kind));
    Ok(())
}

/// It is the process' own alone again; how long it was.
pub(crate) fn forget(begin: u64, kind: Kind) -> Result<u64, Failure> {
    let mut memory = lock(&MEMORY);
    match memory.ranges.get(&begin) {
        Some(&(length, found)) if found == kind => {
            memory.ranges.remove(&begin);
            Ok(length)
        }
        // cudaErrorHostMemoryNotRegistered
        _ if kind == Kind::Registered => Err(Failure::Code(713)),
        _ => Err(INVALID_VALUE),
    }
}

/// What lies at an address, and how many bytes from there on.
pub(crate) fn find(address: u64) -> Option<(Kind, u64)> {
    let memory = lock(&MEMORY);
    let (begin, &(length, kind)) = memory.ranges.range(..=address).next_back()?;
    let left = (begin + length).checked_sub(address).filter(|left| *left > 0)?;
    Some((kind, left))
}

/// Whether an address belongs to the device's memory, allocated or not.
pub(crate) fn is_device(address: u64) -> bool {
    find(address).is_some_and(|(kind, _)| matches!(kind, Kind::Device | Kind::Variable))
}

impl Memory {
    fn reserve(&mut self) -> Result<(), Failure> {
        if self.is_reserved {
            return Ok(());
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: 1. nothing is replaced: where it goes is the kernel's choice; 2. nobody may look there.
        let place = unsafe { libc::mmap64(std::ptr::null_mut(), SPACE, libc::PROT_NONE, flags, -1, 0) };
        if place == libc::MAP_FAILED {
            return Err(OUT_OF_MEMORY);
        }
        let begin = (place.addr() as u64).next_multiple_of(2 << 20);
        self.free.insert(begin, SPACE as u64 - (2 << 20));
        self.is_reserved = true;
        Ok(())
    }

    /// The first free part that is large enough.
    fn take(&mut self, length: u64) -> Option<u64> {
        let (&begin, &free) = self.free.iter().find(|(_, free)| **free >= length)?;
        self.free.remove(&begin);
        if free > length {
            self.free.insert(begin + length, free - length);
        }
        Some(begin)
    }

    /// An allocation is none any more; how long it was.
    fn remove(&mut self, begin: u64, kind: Kind) -> Result<u64, Failure> {
        let found = self.ranges.get(&begin).filter(|(_, found)| *found == kind);
        let &(length, _) = found.ok_or(INVALID_VALUE)?;
        self.ranges.remove(&begin);
        self.used -= length;
        Ok(length)
    }

    fn give_back(&mut self, mut begin: u64, mut length: u64) {
        if !self.is_reserved {
            // The server has put it there, and knows what is free.
            return;
        }
        if let Some((&before, &size)) = self.free.range(..begin).next_back()
            && before + size == begin
        {
            self.free.remove(&before);
            (begin, length) = (before, length + size);
        }
        if let Some(size) = self.free.remove(&(begin + length)) {
            length += size;
        }
        self.free.insert(begin, length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_taken_given_back_and_found() {
        let most = 1 << 20;
        let first = allocate(100, most).unwrap();
        let second = allocate(1000, most).unwrap();
        assert_eq!((second, first % ALIGNMENT), (first + ALIGNMENT, 0));
        assert_eq!(find(first + 511), Some((Kind::Device, 1)));
        assert_eq!(find(second + 1024), None);
        assert!(is_device(second) && !is_device(first.wrapping_sub(1)));
        assert_eq!(allocate(most, most), Err(OUT_OF_MEMORY), "together it is too much");
        assert_eq!(free(first + 1, || Ok(())), Err(INVALID_VALUE));
        let mut third = 0;
        let tell = || {
            third = allocate(100, most).unwrap();
            Ok(())
        };
        assert_eq!(
            (free(first, tell), free(first, || Ok(()))),
            (Ok(()), Err(INVALID_VALUE))
        );
        assert_eq!(third, second + 1024, "another's only when the server has been told");
        assert_eq!(free(third, || Ok(())), Ok(()));
        assert_eq!(free(second, || Err(Failure::Gone)), Err(Failure::Gone));
        assert_eq!(allocate(2048, most), Ok(first), "free parts have grown together");
        let variable = allocate_variable(4, most).unwrap();
        assert!(is_device(variable) && free(variable, || Ok(())) == Err(INVALID_VALUE));
        assert!(allocations().contains(&first) && !allocations().contains(&variable));
        forget_variable(variable);
        assert_eq!(find(variable), None);
        free(first, || Ok(())).unwrap();
        note(0x1000, 16, Kind::Registered).unwrap();
        assert_eq!(note(0x100f, 1, Kind::Host), Err(Failure::Code(712)));
        assert_eq!(forget(0x1000, Kind::Host), Err(INVALID_VALUE));
        assert_eq!(
            (forget(0x1000, Kind::Registered), forget(0x1000, Kind::Registered)),
            (Ok(16), Err(Failure::Code(713)))
        );
    }
}
