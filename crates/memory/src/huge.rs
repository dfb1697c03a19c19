//! Huge pages that the host has set aside (hugetlb), for guests whose memory stays where it is: of 1 GiB first, then of 2 MiB, as
//! many as there are. Does not know who asks for them.
//!
//! ```text
//!  a region   1 GiB | 1 GiB | 2 MiB pages ...... | what any other process has
//! ```
//! They are pieces of one region, which begins where the largest page in it may begin. Each is made elsewhere and filled, and only
//! then moved to its place: what the host cannot give is found out while the region is whole, and never by a signal later. Linux
//! gives reserved pages by number, and can fail to find them where a thread touches them (a cpuset, a cgroup's limit).

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::{io, iter};

use base::ByteSize;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, madvise, mmap_anonymous, mremap_fixed, munmap};
use vm_memory::MmapRegion;

use crate::{HUGE_PAGE, MemoryError, PROTECTION};

/// The largest page that there is.
pub(crate) const GIANT_PAGE: usize = 1 << 30;

/// The sizes of pages, the largest first.
const SIZES: [(usize, MapFlags); 2] = [(GIANT_PAGE, MapFlags::HUGE_1GB), (HUGE_PAGE, MapFlags::HUGE_2MB)];

/// How much of a memory lies in pages that the host had set aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugeBytes {
    /// In pages of 1 GiB.
    pub in_1g: u64,
    /// In pages of 2 MiB.
    pub in_2m: u64,
}

impl HugeBytes {
    fn add(&mut self, page: usize, bytes: usize) {
        let sum = if page == GIANT_PAGE {
            &mut self.in_1g
        } else {
            &mut self.in_2m
        };
        *sum += bytes as u64;
    }
}

/// Where a region has to begin so that the largest pages that fit in it lie in the guest as they do in the host.
pub(crate) fn alignment(length: usize) -> usize {
    if length < GIANT_PAGE { HUGE_PAGE } else { GIANT_PAGE }
}

/// Puts huge pages of the host into a region that nobody has touched, as many as there are, and counts them.
///
/// # Errors
/// Some were had, and could not be put there.
pub(crate) fn fill(mapping: &MmapRegion<()>, counted: &mut HugeBytes) -> Result<(), MemoryError> {
    let start = mapping.as_ptr().addr();
    let mut left: Vec<_> = iter::once(start..start + mapping.size()).collect();
    for (page, flag) in SIZES.into_iter().filter(|(page, _)| start.is_multiple_of(*page)) {
        let mut smaller = Vec::new();
        for range in left {
            let whole = whole_pages(&range, page);
            let had = in_pieces(whole.len() / page, |first, pages| {
                piece(mapping, whole.start + first * page, (page, pages), flag)
            });
            let had = had.map_err(|source| MemoryError::Map {
                size: ByteSize(mapping.size() as u64),
                source: vm_memory::mmap::MmapRegionError::Mmap(source),
            })?;
            counted.add(page, had * page);
            smaller.extend([range.start..whole.start, whole.start + had * page..range.end]);
        }
        left = smaller;
    }
    Ok(())
}

/// The whole pages in a range of addresses; empty, and at its start, if there are none.
fn whole_pages(range: &Range<usize>, page: usize) -> Range<usize> {
    let first = range.start.next_multiple_of(page);
    let end = range.end - range.end % page;
    if first < end {
        first..end
    } else {
        range.start..range.start
    }
}

/// Has up to `wanted` pages in few pieces, one behind the other: `get(first, pages)` says whether it could have so many at once. Their
/// number.
fn in_pieces(wanted: usize, mut get: impl FnMut(usize, usize) -> io::Result<bool>) -> io::Result<usize> {
    let (mut had, mut try_next) = (0, wanted);
    while try_next > 0 {
        if get(had, try_next)? {
            had += try_next;
            try_next = try_next.min(wanted - had);
        } else {
            try_next /= 2;
        }
    }
    Ok(had)
}

/// Puts so many pages of the host at an address of the region, if the host has them.
#[allow(unsafe_code, reason = "a part of a region is mapped anew")]
fn piece(mapping: &MmapRegion<()>, address: usize, (page, pages): (usize, usize), flag: MapFlags) -> io::Result<bool> {
    let Some(filled) = Filled::make(page * pages, flag) else {
        return Ok(false);
    };
    let place: *mut c_void = mapping.as_ptr().with_addr(address).cast();
    let (from, length) = (filled.0, filled.1);
    // SAFETY: 1. both are aligned to the page; 2. the old range is the whole mapping that `filled` owns, to which nobody has a
    // reference; 3. the new one lies within the region's own mapping, which the region unmaps as a whole, and to which nobody has
    // references either: it was just made.
    let moved = unsafe { mremap_fixed(from, length, length, MremapFlags::MAYMOVE, place) };
    if moved.is_ok() {
        // It is the region's.
        std::mem::forget(filled);
    }
    Ok(moved.map(|_| true)?)
}

/// Huge pages that nobody uses yet; given back when dropped.
struct Filled(*mut c_void, usize);

impl Filled {
    /// `None` if the host has not so many.
    #[allow(unsafe_code, reason = "memory is mapped and filled")]
    fn make(length: usize, flag: MapFlags) -> Option<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | flag;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), length, PROTECTION, flags) };
        let filled = mapped.and_then(|start| {
            let made = Self(start, length);
            loop {
                // SAFETY: 1. the range is the mapping just made; 2. it then holds zeroes, as it does now for whoever looks.
                match unsafe { madvise(start, length, Advice::LinuxPopulateWrite) } {
                    // A signal; what is there stays.
                    Err(Errno::INTR) => {}
                    result => return result.map(|()| made),
                }
            }
        });
        match filled {
            Ok(filled) => Some(filled),
            // Too few of them, or a host that has no pages of this size.
            Err(error) => {
                log::debug!("no {} in huge pages of the host: {error}", ByteSize(length as u64));
                None
            }
        }
    }
}

impl Drop for Filled {
    #[allow(unsafe_code, reason = "memory is given back")]
    fn drop(&mut self) {
        // SAFETY: 1. the range is the whole mapping of `make`; 2. nobody has a reference to it.
        if let Err(error) = unsafe { munmap(self.0, self.1) } {
            log::warn!("huge pages of the host cannot be given back: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is had of `wanted` pages where there are `there`, and in how many attempts; pieces follow each other.
    fn had(wanted: usize, there: usize) -> (usize, usize) {
        let (mut free, mut attempts, mut next) = (there, 0, 0);
        let had = in_pieces(wanted, |first, pages| {
            attempts += 1;
            assert_eq!(first, next, "a piece is not behind the one before");
            let enough = pages <= free;
            if enough {
                free -= pages;
                next += pages;
            }
            Ok(enough)
        });
        (had.unwrap(), attempts)
    }

    #[test]
    fn as_many_pages_as_there_are_come_in_few_pieces() {
        assert_eq!(had(0, 5), (0, 0));
        assert_eq!(had(512, 1 << 20), (512, 1));
        for wanted in [1, 2, 3, 100, 511, 512, 513, 32768] {
            for there in [0, 1, 2, 3, 99, 511, 512, 32767] {
                let (got, attempts) = had(wanted, there);
                assert_eq!(got, wanted.min(there), "of {wanted}, where there are {there}");
                assert!(
                    attempts <= 40,
                    "{attempts} attempts for {wanted}, where there are {there}"
                );
            }
        }
    }

    #[test]
    fn what_is_no_whole_page_is_left_to_smaller_ones() {
        let gib = GIANT_PAGE;
        assert_eq!(whole_pages(&(0..gib + gib / 2), gib), 0..gib);
        assert_eq!(whole_pages(&(gib / 2..3 * gib + 4096), gib), gib..3 * gib);
        assert!(whole_pages(&(4096..gib), gib).is_empty());
        assert!(whole_pages(&(gib / 2..gib + gib / 2), gib).is_empty());
        assert_eq!(alignment(gib - HUGE_PAGE), HUGE_PAGE);
        assert_eq!(alignment(gib), gib);
    }
}
