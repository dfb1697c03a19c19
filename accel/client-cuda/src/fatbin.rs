//! Where the fat binary is that a program has registered, and how long it is. What is in it is for the server.
//!
//! The layout is `accel_ptx::fatbin`'s. Headers are an allegation: what they say is compared with what is mapped before it is read, so that
//! one that lies is an error of the call, and not the program's end.
#![allow(unsafe_code, reason = "a fat binary is at an address that the program gives")]

use accel_ptx::fatbin::{HEADER, WRAPPER, container_size, wrapped};

use crate::generated::values::cudaErrorInvalidKernelImage;
use crate::stub::{self, Failure};

/// msync(2) and mmap(2) know pages of so many bytes.
const PAGE: usize = 4096;

/// The container that a wrapper at an address points to.
///
/// # Safety
///
/// What is mapped at the address, and where the wrapper points to, stays as it is for as long as what is returned is used.
pub(crate) unsafe fn container<'a>(wrapper: usize) -> Result<&'a [u8], Failure> {
    // SAFETY: 1. the caller's.
    unsafe { find(wrapper) }.map_err(|reason| {
        stub::say(&format!("a module of the program cannot be loaded: {reason}"));
        Failure::Code(cudaErrorInvalidKernelImage)
    })
}

/// A container by its own address.
///
/// # Safety
///
/// Like [`container`].
pub(crate) unsafe fn bare<'a>(place: usize) -> Result<&'a [u8], Failure> {
    // SAFETY: 1. the caller's.
    unsafe { whole(place) }.map_err(|reason| {
        stub::say(&format!("a library of the program cannot be loaded: {reason}"));
        Failure::Code(cudaErrorInvalidKernelImage)
    })
}

/// # Safety
///
/// Like [`container`].
unsafe fn find<'a>(wrapper: usize) -> Result<&'a [u8], String> {
    // SAFETY: 1. the caller's.
    let place = wrapped(unsafe { mapped(wrapper, WRAPPER) }?).map_err(|error| error.to_string())?;
    let place = usize::try_from(place).map_err(|error| error.to_string())?;
    // SAFETY: 1. the caller's.
    unsafe { whole(place) }
}

/// # Safety
///
/// Like [`container`].
unsafe fn whole<'a>(place: usize) -> Result<&'a [u8], String> {
    // SAFETY: 1. the caller's.
    let length = container_size(unsafe { mapped(place, HEADER) }?).map_err(|error| error.to_string())?;
    let length = usize::try_from(length).map_err(|error| error.to_string())?;
    // SAFETY: 1. the caller's.
    unsafe { mapped(place, length) }
}

/// Bytes at an address, if all of them are mapped.
///
/// # Safety
///
/// What is mapped there stays as it is, and can be read.
unsafe fn mapped<'a>(address: usize, length: usize) -> Result<&'a [u8], String> {
    let missing = || format!("{length} bytes at {address:#x} are not in memory; link the program again");
    let end = address
        .checked_add(length)
        .filter(|_| address != 0)
        .ok_or_else(missing)?;
    let begin = address & !(PAGE - 1);
    // With this flag msync(2) does nothing but look whether all pages are mapped.
    // SAFETY: 1. nothing is written, whatever is there.
    let there = unsafe { libc::msync(std::ptr::without_provenance_mut(begin), end - begin, libc::MS_ASYNC) };
    if there != 0 {
        return Err(missing());
    }
    // SAFETY: 1. it is mapped, as was just looked; 2. it stays so and can be read, as the caller says.
    Ok(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), length) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wrapper and a container of so many bytes, of which the header announces others.
    fn made(bytes: usize, announced: u64) -> (Vec<u8>, Vec<u8>) {
        let mut container = vec![0; bytes];
        container[..4].copy_from_slice(&0xba55_ed50_u32.to_le_bytes());
        container[4..8].copy_from_slice(&[1, 0, 16, 0]);
        container[8..16].copy_from_slice(&announced.to_le_bytes());
        let mut wrapper = vec![0; WRAPPER];
        wrapper[..4].copy_from_slice(&0x4662_43b1_u32.to_le_bytes());
        wrapper[4..8].copy_from_slice(&1_u32.to_le_bytes());
        wrapper[8..16].copy_from_slice(&(container.as_ptr().expose_provenance() as u64).to_le_bytes());
        (wrapper, container)
    }

    fn look(wrapper: &[u8]) -> Result<usize, String> {
        // SAFETY: 1. wrapper and container are vectors of the test's, which outlive what is returned.
        unsafe { find(wrapper.as_ptr().expose_provenance()) }.map(<[u8]>::len)
    }

    #[test]
    fn a_container_is_as_long_as_its_header_says_if_that_is_mapped() {
        let (wrapper, container) = made(80, 64);
        assert_eq!(look(&wrapper), Ok(container.len()));
        let (wrapper, _container) = made(80, 0x3000_0000);
        assert!(look(&wrapper).unwrap_err().contains("are not in memory"));
        let (wrapper, _container) = made(80, u64::MAX);
        assert!(look(&wrapper).unwrap_err().contains("are allowed"));
        let (mut wrapper, _container) = made(80, 64);
        wrapper[0] = 0;
        assert!(look(&wrapper).unwrap_err().contains("no fat binary"));
        let (mut wrapper, _container) = made(80, 64);
        wrapper[8..16].copy_from_slice(&64_u64.to_le_bytes());
        assert!(look(&wrapper).unwrap_err().contains("are not in memory"));
        // SAFETY: 1. nothing is mapped there.
        assert!(unsafe { find(0) }.is_err());
        // SAFETY: 1. the same.
        let code = unsafe { super::container(64) };
        assert_eq!(code, Err(Failure::Code(200)));
    }
}
