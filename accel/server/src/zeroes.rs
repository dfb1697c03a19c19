//! Zero bytes to make memory of: what a back end does not promise, that new memory has nobody else's bytes.
//!
//! OpenCL leaves the contents of a new object undefined, and drivers that allocate by malloc(3), as PoCL does, hand out what the process had
//! there before: of another client, or of the server. Knows no call.
#![allow(unsafe_code, reason = "maps memory that is read alone")]

use std::ptr::NonNull;
use std::sync::LazyLock;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::api::{Code, P};

/// What a huge page is long.
const HUGE: usize = 2 << 20;

/// Zero bytes for all objects that are no longer than a huge page, mapped once.
static SHORT: LazyLock<Option<Mapped>> = LazyLock::new(|| Mapped::new(2 * HUGE).ok());

/// So many zero bytes, to be read. They take address space and no memory: all pages are the kernel's page of zeroes, huge where it has such.
#[derive(Debug)]
pub(crate) struct Zeroes {
    at: P,
    _own: Option<Mapped>,
}

impl Zeroes {
    pub(crate) fn new(length: u64) -> Result<Self, Code> {
        let length = usize::try_from(length).map_err(|_| Code::OUT_OF_HOST_MEMORY)?.max(1);
        if length <= HUGE
            && let Some(mapped) = &*SHORT
        {
            let at = mapped.at.as_ptr();
            let skipped = at.align_offset(HUGE);
            return Ok(Self {
                at: at.wrapping_byte_add(skipped.min(HUGE)),
                _own: None,
            });
        }
        let mapped = Mapped::new(length)?;
        Ok(Self {
            at: mapped.at.as_ptr(),
            _own: Some(mapped),
        })
    }

    pub(crate) fn pointer(&self) -> P {
        self.at
    }
}

/// Pages that can be read alone.
#[derive(Debug)]
struct Mapped {
    at: NonNull<std::ffi::c_void>,
    length: usize,
}

// SAFETY: 1. the address is of no thread; 2. nobody writes there.
unsafe impl Send for Mapped {}
// SAFETY: as for Send.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(length: usize) -> Result<Self, Code> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: 1. a new mapping, at an address that the kernel chooses; 2. it is this value's until it is dropped.
        let mapped = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::READ, flags) };
        let at = mapped.ok().and_then(NonNull::new).ok_or(Code::OUT_OF_HOST_MEMORY)?;
        if length >= HUGE {
            // SAFETY: 1. the mapping is this function's, and what is advised changes no byte. A kernel without huge pages refuses, and goes on
            // with small ones.
            _ = unsafe { rustix::mm::madvise(at.as_ptr(), length, Advice::LinuxHugepage) };
        }
        Ok(Self { at, length })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: 1. the mapping is this value's, and whoever has read there has returned.
        if let Err(error) = unsafe { rustix::mm::munmap(self.at.as_ptr(), self.length) } {
            log::error!("{} bytes of zeroes stay mapped: {error}", self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_them_are_zero_and_can_be_read() {
        for length in [1, 4096, HUGE as u64, HUGE as u64 + 1, 5 << 20] {
            let zeroes = Zeroes::new(length).unwrap();
            let length = usize::try_from(length).unwrap();
            // SAFETY: 1. there are as many bytes, until `zeroes` is dropped.
            let bytes = unsafe { std::slice::from_raw_parts(zeroes.pointer().cast::<u8>(), length) };
            assert!(bytes.iter().all(|byte| *byte == 0), "{length}");
        }
    }
}
