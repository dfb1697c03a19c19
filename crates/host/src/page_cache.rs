//! Files in this host's page cache. What is mapped of a file by huge pages must lie in the cache in such pieces, and a file that was
//! just written does not. Knows nothing of what is in a file.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ptr;

use rustix::fs::{Advice as FileAdvice, SeekFrom, fadvise, seek};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// A huge page of this architecture.
const HUGE_PAGE: u64 = 2 << 20;

/// Has the data of a file, which has reached the disk, read into the page cache in pieces of huge pages, where the file system and
/// the kernel do that: XFS from Linux 5.18 on. Elsewhere the file is in the cache as before. What somebody has mapped of it already stays
/// as it is. Holes are left out, but for those that share a huge page with data.
///
/// # Errors
/// The file cannot be mapped or read.
pub fn read_in_huge_pages(file: &File) -> io::Result<()> {
    let length = file.metadata()?.len();
    if length == 0 {
        return Ok(());
    }
    fadvise(file, 0, None, FileAdvice::DontNeed)?;
    let mapping = Mapping::new(file, length)?;
    let mut end = 0;
    while let Some((from, to)) = data(file, end)? {
        // What the piece before has brought along is there.
        let start = (from - from % HUGE_PAGE).max(end);
        end = to.next_multiple_of(HUGE_PAGE).min(length);
        if start < end {
            mapping.read(start, end)?;
        }
    }
    Ok(())
}

/// The first range from `place` on that is no hole.
fn data(file: &File, place: u64) -> io::Result<Option<(u64, u64)>> {
    match seek(file, SeekFrom::Data(place)) {
        Ok(from) => Ok(Some((from, seek(file, SeekFrom::Hole(from))?))),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
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
        // SAFETY: 1. the range is the file's mapping; 2. how its pages are had does not change what they hold.
        match unsafe { madvise(place, bytes, Advice::LinuxHugepage) } {
            // A kernel without transparent huge pages.
            Ok(()) | Err(Errno::INVAL) => Ok(mapping),
            Err(error) => Err(error.into()),
        }
    }

    /// Has these bytes read.
    fn read(&self, start: u64, end: u64) -> io::Result<()> {
        let [start, end] = [start, end].map(|place| usize::try_from(place).unwrap_or(usize::MAX));
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

    #[test]
    fn a_file_is_what_it_was_with_data_anywhere() {
        let file = tempfile::tempfile().unwrap();
        read_in_huge_pages(&file).unwrap();
        let length = 3 * HUGE_PAGE + 12345;
        file.set_len(length).unwrap();
        read_in_huge_pages(&file).unwrap();
        let places = [0, HUGE_PAGE - 3, HUGE_PAGE + 4096, length - 5];
        for place in places {
            file.write_all_at(b"hello", place).unwrap();
        }
        file.sync_all().unwrap();
        read_in_huge_pages(&file).unwrap();
        for place in places {
            let mut found = [0; 5];
            file.read_exact_at(&mut found, place).unwrap();
            assert_eq!(&found, b"hello");
        }
        let mut hole = [1];
        file.read_exact_at(&mut hole, HUGE_PAGE / 2).unwrap();
        assert_eq!(hole, [0]);
        assert_eq!(file.metadata().unwrap().len(), length);
    }
}
