//! Memory that a descriptor shares with the kernel, such as the page in which a vCPU says why it came out, and memory of nobody else's. Knows
//! nothing of what is in it.
#![allow(
    unsafe_code,
    reason = "what is mapped has an address and no owner but this; each block says what it relies on"
)]

use std::io;
use std::os::fd::AsFd;

use rustix::mm::{MapFlags, ProtFlags};

/// A mapping of a descriptor's first bytes, or of zeroes, a `T` and what else is behind it, to be read and written; it stays when the
/// descriptor is closed.
#[derive(Debug)]
pub struct Mapping<T> {
    start: *mut T,
    length: usize,
}

// SAFETY: 1. the mapping belongs to this and is unmapped by its Drop only; 2. only its address is told: whoever accesses it says why
// that is sound.
unsafe impl<T> Send for Mapping<T> {}
// SAFETY: as for Send.
unsafe impl<T> Sync for Mapping<T> {}

impl<T> Mapping<T> {
    /// Maps so many bytes.
    ///
    /// # Errors
    /// They have no room for a `T`, or the descriptor cannot be mapped.
    pub fn new(fd: impl AsFd, length: usize) -> io::Result<Self> {
        has_room::<T>(length)?;
        // SAFETY: the kernel chooses the address, so nothing else of this process is there.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        }?;
        Ok(Self {
            start: address.cast(),
            length,
        })
    }

    /// So many bytes of zeroes, which are no file, and which no other process has. They take memory when they are first written to, and no
    /// more is promised.
    ///
    /// # Errors
    /// They have no room for a `T`, or there is no memory.
    pub fn private(length: usize) -> io::Result<Self> {
        has_room::<T>(length)?;
        let (protection, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // SAFETY: the kernel chooses the address, so nothing else of this process is there.
        let address = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, flags) }?;
        Ok(Self {
            start: address.cast(),
            length,
        })
    }

    /// Where it begins, on a page: the address is good as long as this lives.
    pub fn as_ptr(&self) -> *mut T {
        self.start
    }

    /// Bytes that are mapped from there.
    pub fn length(&self) -> usize {
        self.length
    }
}

fn has_room<T>(length: usize) -> io::Result<()> {
    match length < size_of::<T>() {
        true => Err(io::ErrorKind::InvalidInput.into()),
        false => Ok(()),
    }
}

impl<T> Drop for Mapping<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own, and whoever was told its address accesses it no longer.
        if let Err(error) = unsafe { rustix::mm::munmap(self.start.cast(), self.length) } {
            log::error!("a mapping of {} bytes could not be taken back: {error}", self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_memory_is_zeroes() {
        let mapping = Mapping::<u64>::private(8192).unwrap();
        // SAFETY: the mapping has a thousand and twenty-four of these, begins on a page, and nobody else knows of it.
        let words = unsafe { std::slice::from_raw_parts_mut(mapping.as_ptr(), 1024) };
        assert!(words.iter().all(|word| *word == 0));
        words.fill(7);
        assert!(Mapping::<u64>::private(7).is_err());
    }

    #[test]
    fn what_is_mapped_outlives_its_descriptor() {
        let file = crate::memfd::sized("mapping", 4096).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &7_u64.to_le_bytes(), 0).unwrap();
        let mapping = Mapping::<u64>::new(&file, 4096).unwrap();
        let too_small = Mapping::<[u64; 513]>::new(&file, 4096).unwrap_err();
        assert_eq!(too_small.kind(), io::ErrorKind::InvalidInput);
        drop(file);
        assert_eq!(mapping.length(), 4096);
        // SAFETY: the mapping holds more than these eight bytes, begins on a page, and nobody writes it now.
        assert_eq!(unsafe { mapping.as_ptr().read_volatile() }, 7);
    }
}
