//! Registers of a function as memory of this process.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Whole pages of a region. They are there for whoever is given their address: nothing here reads or writes them.
#[derive(Debug)]
pub struct Mapping {
    address: *mut c_void,
    length: usize,
}

// SAFETY: it is an address and a length, and nobody accesses what lies there by it.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(function: impl AsFd, offset: u64, length: usize) -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a mapping of its own, where the kernel likes, that nobody makes a reference to.
        let address = unsafe { mmap(std::ptr::null_mut(), length, protection, flags, function, offset) }?;
        Ok(Self { address, length })
    }

    /// Where it is.
    pub fn address(&self) -> u64 {
        self.address as u64
    }

    /// How many bytes it has.
    pub fn length(&self) -> u64 {
        self.length as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it is the whole of our own mapping, and nobody has a reference to it; a guest that reaches it loses it first.
        if let Err(error) = unsafe { munmap(self.address, self.length) } {
            // Nothing that could be done about it.
            debug_assert!(false, "munmap: {error}");
        }
    }
}
