//! Files in this host's page cache. What is mapped of a file by huge pages must lie in the cache in such pieces, and a file that was
//! just written does not. Knows nothing of what is in a file.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr;

use base::sparse::blocks_with_data;
use rustix::fs::{Advice as FileAdvice, fadvise};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// A page of this architecture, and how many of them are looked at by one call.
const PAGE: usize = 4096;
const LOOKED_AT: usize = 1 << 16;

/// A huge page of this architecture.
const HUGE_PAGE: u64 = 2 << 20;

/// Has the data of a file, which has reached the disk, read into the page cache in pieces of huge pages, where the file system and
/// the kernel do that: XFS from Linux 5.18 on. Elsewhere it is in the cache as before, after being read once more. What somebody has
/// mapped of it already stays as it is. Holes are left out, but for those that share a huge page with data.
///
/// # Errors
/// The file cannot be mapped or read; what is missing of it in the cache then, the kernel was asked to read.
pub fn read_in_huge_pages(file: &File) -> io::Result<()> {
    let length = file.metadata()?.len();
    if length == 0 {
        return Ok(());
    }
    let runs = blocks_with_data(file, 0..length, HUGE_PAGE)?;
    // A kernel that cannot do it says so before anything is lost. By a mapping that is gone then: what is mapped is not dropped.
    Mapping::of_huge_pages(file, length)?.read(0..1)?;
    fadvise(file, 0, None, FileAdvice::DontNeed)?;
    let mapping = Mapping::of_huge_pages(file, length)?;
    let read = runs.into_iter().try_for_each(|run| mapping.read(run));
    if read.is_err() {
        fadvise(file, 0, None, FileAdvice::WillNeed)?;
    }
    read
}

/// Bytes of a file that are in the page cache, in whole pages. Nothing is read for it.
///
/// # Errors
/// The file cannot be mapped, or this process may not know it: it neither owns the file nor may write to it.
pub fn cached_bytes(file: &File) -> io::Result<u64> {
    let length = file.metadata()?.len();
    if length == 0 {
        return Ok(0);
    }
    let mapping = Mapping::new(file, length)?;
    let page = PAGE;
    let length = usize::try_from(length).map_err(|_| io::Error::from(Errno::NOMEM))?;
    let mut states = vec![0_u8; LOOKED_AT];
    let mut pages = 0_u64;
    for start in (0..length).step_by(LOOKED_AT * page) {
        let bytes = (length - start).min(LOOKED_AT * page);
        let place = mapping.file.wrapping_byte_add(start);
        // SAFETY: 1. the range lies in the file's mapping; 2. there is a byte for each of its pages, which lives through the call.
        if unsafe { libc::mincore(place, bytes, states.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let known = states.iter().take(bytes.div_ceil(page));
        pages += known.map(|state| u64::from(state & 1)).sum::<u64>();
    }
    Ok(pages * page as u64)
}

/// All of a file, at an address that huge pages can have.
struct Mapping {
    /// What was reserved for it.
    reserved: *mut c_void,
    length: usize,
    file: *mut c_void,
}

impl Mapping {
    fn new(file: &File, length: u64) -> io::Result<Self> {
        let too_large = |_| io::Error::from(Errno::NOMEM);
        let [bytes, huge] = [usize::try_from(length), usize::try_from(HUGE_PAGE)].map(|size| size.map_err(too_large));
        let (bytes, huge) = (bytes?, huge?);
        let length = bytes.checked_add(huge).ok_or(Errno::NOMEM)?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let reserved = unsafe { mmap_anonymous(ptr::null_mut(), length, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        let before = reserved.addr().next_multiple_of(huge) - reserved.addr();
        let mapping = Self {
            reserved,
            length,
            file: reserved.wrapping_byte_add(before),
        };
        let (place, flags) = (mapping.file, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: 1. the range lies in what was reserved above; 2. nobody reads it as memory: the kernel reads the file.
        unsafe { mmap(place, bytes, ProtFlags::READ, flags, file, 0) }?;
        Ok(mapping)
    }

    /// The same, to be read in huge pages.
    fn of_huge_pages(file: &File, length: u64) -> io::Result<Self> {
        let mapping = Self::new(file, length)?;
        let bytes = usize::try_from(length).map_err(|_| io::Error::from(Errno::NOMEM))?;
        // What is asked for is read, and not the huge page behind it, too.
        for advice in [Advice::LinuxHugepage, Advice::Random] {
            // SAFETY: 1. the range is the file's mapping; 2. how its pages are had does not change what they hold.
            unsafe { madvise(mapping.file, bytes, advice) }?;
        }
        Ok(mapping)
    }

    /// Has these bytes read.
    fn read(&self, bytes: Range<u64>) -> io::Result<()> {
        let [start, end] = [bytes.start, bytes.end].map(|place| usize::try_from(place).unwrap_or(usize::MAX));
        // SAFETY: 1. the range lies in the file's mapping; 2. reading ahead changes nothing that is in it.
        let read = unsafe {
            madvise(
                self.file.wrapping_byte_add(start),
                end - start,
                Advice::LinuxPopulateRead,
            )
        };
        Ok(read?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is what `new` has reserved, and nobody else knows of it.
        if let Err(error) = unsafe { munmap(self.reserved, self.length) } {
            log::debug!("a file stays mapped: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Whether the page at `place` is in the page cache.
    fn is_cached(file: &File, place: u64) -> bool {
        let mapping = Mapping::new(file, file.metadata().unwrap().len()).unwrap();
        let page = mapping
            .file
            .wrapping_byte_add(usize::try_from(place - place % 4096).unwrap());
        let mut state = 0_u8;
        // SAFETY: 1. the page lies in the mapping; 2. the byte lives through the call.
        let done = unsafe { libc::mincore(page, 4096, &raw mut state) };
        assert_eq!(done, 0);
        state & 1 == 1
    }

    #[test]
    fn what_is_in_the_cache_is_counted_without_reading_more() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(cached_bytes(&file).unwrap(), 0);
        file.write_all_at(&vec![7; 300 * 4096 + 1], 0).unwrap();
        // More than one call looks at, most of it a hole.
        file.set_len((LOOKED_AT as u64 + 10) * 4096).unwrap();
        file.write_all_at(b"end", (LOOKED_AT as u64 + 9) * 4096).unwrap();
        file.sync_all().unwrap();
        assert_eq!(cached_bytes(&file).unwrap(), 302 * 4096);
        fadvise(&file, 0, None, FileAdvice::DontNeed).unwrap();
        assert_eq!(cached_bytes(&file).unwrap(), 0, "it is in the cache whatever is done");
        fadvise(&file, 0, None, FileAdvice::Random).unwrap();
        let mut byte = [0];
        for page in [0, 5] {
            file.read_exact_at(&mut byte, page * 4096).unwrap();
        }
        assert_eq!(cached_bytes(&file).unwrap(), 2 * 4096);
    }

    #[test]
    fn data_is_in_the_cache_and_far_holes_are_not() {
        let file = tempfile::tempfile().unwrap();
        read_in_huge_pages(&file).unwrap();
        let length = 9 * HUGE_PAGE + 12345;
        file.set_len(length).unwrap();
        read_in_huge_pages(&file).unwrap();
        let places = [0, HUGE_PAGE - 3, HUGE_PAGE + 4096, length - 5];
        for place in places {
            file.write_all_at(b"hello", place).unwrap();
        }
        file.sync_all().unwrap();
        fadvise(&file, 0, None, FileAdvice::DontNeed).unwrap();
        assert!(!is_cached(&file, 0), "it is in the cache whatever is done");
        read_in_huge_pages(&file).unwrap();
        for place in places {
            assert!(is_cached(&file, place), "{place}");
            let mut found = [0; 5];
            file.read_exact_at(&mut found, place).unwrap();
            assert_eq!(&found, b"hello");
        }
        assert!(!is_cached(&file, 5 * HUGE_PAGE), "a hole was read");
        assert_eq!(file.metadata().unwrap().len(), length);
    }
}
