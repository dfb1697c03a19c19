//! The application's side of shared virtual memory: memory at the addresses where the back end has its own, and what of it is mapped.
//!
//! ```text
//!   address from the server ── nothing is there here ──▶ reserved, a copy that maps fill ──freed──▶ given back
//! ```
//!
//! Of coarse grain (OpenCL API, section 5.6.1) the application looks at memory only while it is mapped, so two memories with the same
//! addresses are one to it. Knows no ring and no call.
#![allow(
    unsafe_code,
    reason = "memory at an address that another process has chosen is had by mmap(2) alone"
)]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Mutex;

use rustix::mm::{MapFlags, ProtFlags};

use crate::lock;

/// Bytes of a page.
const PAGE: usize = 4096;

/// Memory of this process from an address on, in whole pages.
#[derive(Debug)]
struct Reserved {
    at: usize,
    length: usize,
}

impl Reserved {
    /// Nothing if this process has anything there already.
    fn at(address: usize, size: usize) -> Option<Self> {
        let length = size.checked_next_multiple_of(PAGE)?;
        if address == 0 || !address.is_multiple_of(PAGE) || address.checked_add(length).is_none() {
            return None;
        }
        let wanted = std::ptr::with_exposed_provenance_mut::<c_void>(address);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: 1. a new mapping, which by its flags takes the place of nothing.
        let mapped = unsafe { rustix::mm::mmap_anonymous(wanted, length, access, flags) }.ok()?;
        let reserved = Self {
            at: mapped.expose_provenance(),
            length,
        };
        // Linux before 4.17 does not know the flag, and takes the address for a hint; what it has mapped elsewhere goes again.
        (reserved.at == address).then_some(reserved)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let at = std::ptr::with_exposed_provenance_mut::<c_void>(self.at);
        // SAFETY: 1. the mapping is this value's; the application has freed it, or was never told of it. A failure leaves it there.
        _ = unsafe { rustix::mm::munmap(at, self.length) };
    }
}

/// A part that is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapped {
    pub(crate) address: usize,
    pub(crate) size: u64,
    /// Whether the back end is to have it when it is unmapped.
    pub(crate) writes: bool,
}

/// An allocation.
#[derive(Debug)]
struct Region {
    size: u64,
    mapped: Vec<Mapped>,
    _memory: Reserved,
}

/// All of a connection's, by where they begin.
#[derive(Debug, Default)]
pub(crate) struct Regions(Mutex<BTreeMap<usize, Region>>);

impl Regions {
    /// Has memory there. False if something else is there.
    pub(crate) fn reserve(&self, address: usize, size: u64) -> bool {
        let Some(memory) = usize::try_from(size).ok().and_then(|size| Reserved::at(address, size)) else {
            return false;
        };
        let region = Region {
            size,
            mapped: Vec::new(),
            _memory: memory,
        };
        lock(&self.0).insert(address, region);
        true
    }

    /// Gives the memory that begins there back: how long it was, or nothing if there is none.
    pub(crate) fn give_back(&self, address: usize) -> Option<u64> {
        lock(&self.0).remove(&address).map(|region| region.size)
    }

    /// Whether so many bytes from there on are in one allocation; one byte at least.
    pub(crate) fn has(&self, address: usize, length: u64) -> bool {
        self.with(address, length, |_| ()).is_some()
    }

    /// A part of it is mapped.
    pub(crate) fn map(&self, mapped: Mapped) {
        self.with(mapped.address, mapped.size, |region| region.mapped.push(mapped));
    }

    /// What was mapped there last.
    pub(crate) fn unmap(&self, address: usize) -> Option<Mapped> {
        let taken = self.with(address, 0, |region| {
            let last = region.mapped.iter().rposition(|mapped| mapped.address == address)?;
            Some(region.mapped.remove(last))
        });
        taken.flatten()
    }

    fn with<T>(&self, address: usize, length: u64, change: impl FnOnce(&mut Region) -> T) -> Option<T> {
        let mut regions = lock(&self.0);
        let (begin, region) = regions.range_mut(..=address).next_back()?;
        let first = (address - begin) as u64;
        let end = first.checked_add(length.max(1))?;
        (end <= region.size).then(|| change(region))
    }
}

/// Where nothing is, for tests: far below what the kernel chooses, and elsewhere each time.
#[cfg(test)]
pub(crate) fn unused() -> usize {
    static TAKEN: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0x2000_0000_0000);
    TAKEN.fetch_add(16 * PAGE, std::sync::atomic::Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_takes_the_place_of_what_is_there() {
        let regions = Regions::default();
        let local = vec![0_u8; 4 * PAGE];
        let taken = local.as_ptr().expose_provenance().next_multiple_of(PAGE);
        assert!(!regions.reserve(taken, 8) && !regions.has(taken, 1));
        assert!(!regions.reserve(0, 8) && !regions.reserve(taken + 1, 8) && !regions.reserve(PAGE, u64::MAX));
        let at = unused();
        assert!(regions.reserve(at, 5000));
        assert!(!regions.reserve(at, 5000) && !regions.reserve(at + PAGE, 8));
        // SAFETY: 1. the memory was just reserved, and has two pages.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(at + 4999).write(7) };
        assert_eq!(regions.give_back(at), Some(5000));
        assert_eq!(regions.give_back(at), None);
        assert!(regions.reserve(at, 1));
    }

    #[test]
    fn parts_are_within_one_allocation() {
        let regions = Regions::default();
        let at = unused();
        assert!(regions.reserve(at, 5000) && regions.reserve(at + 2 * PAGE, 10));
        assert!(regions.has(at, 5000) && regions.has(at + 4999, 1) && regions.has(at + 2 * PAGE, 10));
        assert!(!regions.has(at, 5001) && !regions.has(at + 5000, 0) && !regions.has(at + 5, u64::MAX));
        assert!(!regions.has(at - 1, 1));
        let mapped = Mapped {
            address: at + 8,
            size: 16,
            writes: true,
        };
        regions.map(mapped);
        regions.map(Mapped {
            writes: false,
            ..mapped
        });
        assert_eq!(regions.unmap(at), None);
        assert_eq!(regions.unmap(at + 8).map(|mapped| mapped.writes), Some(false));
        assert_eq!(regions.unmap(at + 8), Some(mapped));
        assert_eq!(regions.unmap(at + 8), None);
    }
}
