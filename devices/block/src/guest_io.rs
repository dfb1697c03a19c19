//! Guest memory as the kernel takes it: lists of addresses and lengths, and the two calls that use them directly.
//!
//! With `uring` the only unsafe code of this device. Addresses come from [`VolatileSlice`]s, which only exist for
//! checked ranges of guest memory and borrow it.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::AsRawFd;

use vm_memory::{Bytes, VolatileSlice};

/// The most buffers of one call (`IOV_MAX`).
const IOV_MAX: usize = 1024;

/// One byte of guest memory.
#[derive(Debug)]
pub(crate) struct GuestByte<'m>(VolatileSlice<'m>);

// SAFETY: 1. guest memory is mapped for the whole process and outlives 'm; 2. vCPUs write to it at any time, so that it
// is accessed by volatile operations only, whatever the thread.
unsafe impl Send for GuestByte<'_> {}

impl<'m> GuestByte<'m> {
    /// The last byte of `slice`; `None` when it is empty.
    pub(crate) fn last_of(slice: &VolatileSlice<'m>) -> Option<Self> {
        let last = slice.len().checked_sub(1)?;
        slice.offset(last).ok().map(Self)
    }

    pub(crate) fn set(&self, value: u8) {
        if let Err(error) = self.0.write_obj(value, 0) {
            // It has one byte, so there is room for it.
            log::error!("a status byte could not be written: {error}");
        }
    }
}

/// Buffers in guest memory, in order.
#[derive(Debug)]
pub(crate) struct IoVecs<'m> {
    vectors: Vec<libc::iovec>,
    first: usize,
    length: usize,
    memory: PhantomData<VolatileSlice<'m>>,
}

// SAFETY: 1. the addresses are those of guest memory, which is mapped for the whole process and outlives 'm; 2. nothing
// in this process dereferences them: only the kernel does, for whichever thread asks.
unsafe impl Send for IoVecs<'_> {}

impl<'m> IoVecs<'m> {
    /// All of `slices` after `skip` bytes and without the last `drop` ones.
    pub(crate) fn new(slices: &[VolatileSlice<'m>], skip: usize, drop: usize) -> Self {
        let total: usize = slices.iter().map(VolatileSlice::len).sum();
        let mut skip = skip;
        let mut left = total.saturating_sub(skip).saturating_sub(drop);
        let length = left;
        let mut vectors: Vec<libc::iovec> = Vec::with_capacity(slices.len());
        for slice in slices {
            let skipped = skip.min(slice.len());
            skip -= skipped;
            let count = (slice.len() - skipped).min(left);
            left -= count;
            if count == 0 {
                continue;
            }
            let base: *mut libc::c_void = slice.ptr_guard_mut().as_ptr().wrapping_add(skipped).cast();
            match vectors.last_mut() {
                // Fewer vectors are fewer steps in the kernel. Guest memory that is contiguous here is one buffer.
                Some(last) if last.iov_base.wrapping_byte_add(last.iov_len) == base => last.iov_len += count,
                _ => vectors.push(libc::iovec {
                    iov_base: base,
                    iov_len: count,
                }),
            }
        }
        Self {
            vectors,
            first: 0,
            length,
            memory: PhantomData,
        }
    }

    /// None at all.
    pub(crate) fn none() -> Self {
        Self::new(&[], 0, 0)
    }

    /// How many bytes are left.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// What is left, as much as one call takes.
    pub(crate) fn vectors(&self) -> &[libc::iovec] {
        let rest = &self.vectors[self.first..];
        &rest[..rest.len().min(IOV_MAX)]
    }

    /// Leaves out the next `count` bytes.
    pub(crate) fn advance(&mut self, count: usize) {
        let mut count = count.min(self.length);
        self.length -= count;
        while let Some(vector) = self.vectors.get_mut(self.first) {
            if count < vector.iov_len {
                vector.iov_base = vector.iov_base.wrapping_byte_add(count);
                vector.iov_len -= count;
                return;
            }
            count -= vector.iov_len;
            self.first += 1;
        }
    }

    /// Reads from `file` at `offset` into the buffers, as preadv(2).
    pub(crate) fn read_from(&self, file: &File, offset: u64) -> io::Result<usize> {
        let vectors = self.vectors();
        let (count, offset) = (call_count(vectors), call_offset(offset)?);
        // SAFETY: 1. the vectors are valid for `count` and live for the call; 2. each names a range of mapped guest
        // memory, borrowed for 'm; 3. nothing in this process holds references into guest memory.
        let result = unsafe { libc::preadv(file.as_raw_fd(), vectors.as_ptr(), count, offset) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// The same where it takes no waiting for the disk, as preadv2(2) with `RWF_NOWAIT`; `EAGAIN` where it does.
    pub(crate) fn read_cached(&self, file: &File, offset: u64) -> io::Result<usize> {
        let vectors = self.vectors();
        let (count, offset) = (call_count(vectors), call_offset(offset)?);
        // SAFETY: 1. the vectors are valid for `count` and live for the call; 2. each names a range of mapped guest
        // memory, borrowed for 'm; 3. nothing in this process holds references into guest memory.
        let result = unsafe { libc::preadv2(file.as_raw_fd(), vectors.as_ptr(), count, offset, libc::RWF_NOWAIT) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Writes the buffers to `file` at `offset`, as pwritev(2).
    pub(crate) fn write_to(&self, file: &File, offset: u64) -> io::Result<usize> {
        let vectors = self.vectors();
        let (count, offset) = (call_count(vectors), call_offset(offset)?);
        // SAFETY: 1. the vectors are valid for `count` and live for the call; 2. each names a range of mapped guest
        // memory, borrowed for 'm, that the kernel only reads.
        let result = unsafe { libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), count, offset) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }
}

fn call_count(vectors: &[libc::iovec]) -> libc::c_int {
    // At most IOV_MAX.
    libc::c_int::try_from(vectors.len()).unwrap_or(0)
}

fn call_offset(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}
