//! What a guest's memory and disk hold for nobody, before they are kept: deleted files' blocks and caches that can be read again go,
//! and free pages become zeroes, which take no room in a snapshot. Knows nothing of snapshots, and lets everything run meanwhile.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;

use observe::marks;

use crate::Error;
use crate::info::Memory;

/// Drops the page cache, and dentries and inodes (Linux, `Documentation/admin-guide/sysctl/vm.rst`).
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
const ALL_CACHES: &str = "3";

/// As `linux/fs.h` has it.
const FITRIM: libc::Ioctl = libc::_IOWR::<Range>(b'X' as u32, 121);

/// What the kernel keeps for itself, in KiB.
const MIN_FREE: &str = "/proc/sys/vm/min_free_kbytes";

/// So much is filled at a time: what others take meanwhile is seen before the next.
const STEP_KIB: u64 = 16 << 10;

/// Left alone whatever the machine's size is.
const LEAST_RESERVE_KIB: u64 = 4 << 10;

/// Everything is on the disks, and nothing else on the one that takes what is written; memory that nobody needs is zeroes.
pub(crate) fn shed(disk: Option<&File>) -> Result<(), Error> {
    rustix::fs::sync();
    marks::mark("shed: disks written");
    disk.map_or(Ok(()), trim)?;
    marks::mark("shed: disk trimmed");
    fs::write(DROP_CACHES, ALL_CACHES).map_err(Error::system(format!("writing {ALL_CACHES} to {DROP_CACHES}")))?;
    marks::mark("shed: caches dropped");
    let kept = fs::read_to_string(MIN_FREE).map_err(Error::system(format!("reading {MIN_FREE}")))?;
    let kept = kept.trim().parse().unwrap_or(0);
    let mut held = Vec::new();
    while let Some(kib) = next(&Memory::read()?, kept) {
        held.push(Zeroes::fill(kib)?);
    }
    drop(held);
    marks::mark("shed: free memory cleared");
    Ok(())
}

/// The kernel's `struct fstrim_range`.
#[repr(C)]
struct Range {
    start: u64,
    length: u64,
    least: u64,
}

/// Tells the host which blocks of the file system hold nothing. Where nobody can be told so, nobody is.
fn trim(directory: &File) -> Result<(), Error> {
    let mut all = Range {
        start: 0,
        length: u64::MAX,
        least: 0,
    };
    // SAFETY: FITRIM reads one `struct fstrim_range`, which `all` is, and writes its length.
    let result = unsafe { libc::ioctl(directory.as_raw_fd(), FITRIM, &raw mut all) };
    let error = match result {
        0 => return Ok(()),
        _ => io::Error::last_os_error(),
    };
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOTTY) => Ok(()),
        _ => Err(Error::system("trimming the writable disk")(error)),
    }
}

/// How much more can be filled, in KiB, without the kernel having to look for memory: it would take it from those that run.
fn next(now: &Memory, kept_kib: u64) -> Option<u64> {
    // High watermarks are one and a half times what the kernel keeps; zones that this process must not empty are a part of the
    // whole (`vm.lowmem_reserve_ratio`).
    let reserve = 2 * kept_kib + LEAST_RESERVE_KIB + now.total_kib / 64;
    let free = now.free_kib.min(now.available_kib).saturating_sub(reserve);
    (free > 0).then_some(free.min(STEP_KIB))
}

/// Pages of zeroes that are this process's, until it drops them. The kernel has cleared them, and nobody writes to them.
struct Zeroes {
    address: *mut libc::c_void,
    length: usize,
}

impl Zeroes {
    fn fill(kib: u64) -> Result<Self, Error> {
        let length = usize::try_from(kib << 10).unwrap_or(0);
        // SAFETY: a new private mapping at an address of the kernel's choice touches nobody's memory.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(Error::system("taking free memory to clear it")(
                io::Error::last_os_error(),
            ));
        }
        Ok(Self { address, length })
    }
}

impl Drop for Zeroes {
    fn drop(&mut self) {
        // SAFETY: this is the whole mapping that `fill` has made, and nothing refers to it.
        let unmapped = unsafe { libc::munmap(self.address, self.length) };
        debug_assert_eq!(unmapped, 0, "a mapping of our own can be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_filled_step_by_step_up_to_the_reserve() {
        let with_free = |free_kib, available_kib| Memory {
            total_kib: 128 << 10,
            free_kib,
            available_kib,
            ..Memory::default()
        };
        let kept = 1024;
        let reserve = 2048 + 4096 + 2048;
        assert_eq!(next(&with_free(100 << 10, 110 << 10), kept), Some(STEP_KIB));
        assert_eq!(next(&with_free(reserve + 12, 110 << 10), kept), Some(12));
        assert_eq!(next(&with_free(reserve, 110 << 10), kept), None);
        // What is free and may not be had is no more than what is not free.
        assert_eq!(next(&with_free(100 << 10, 1000), kept), None);
    }

    #[test]
    fn a_file_system_that_cannot_be_trimmed_is_none_of_our_business() {
        trim(&File::open("/proc").unwrap()).unwrap();
    }

    #[test]
    fn what_is_filled_is_there_and_goes() {
        let resident = || {
            let status = fs::read_to_string("/proc/self/statm").unwrap();
            status.split(' ').nth(1).unwrap().parse::<u64>().unwrap()
        };
        let before = resident();
        let held = Zeroes::fill(32 << 10).unwrap();
        // Half of its pages, as other tests take and give memory meanwhile.
        assert!(resident() >= before + 4096, "the pages are not there");
        drop(held);
        assert!(resident() < before + 4096, "the pages stay");
    }
}
