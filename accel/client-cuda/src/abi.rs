//! What types of C are in Rust. A name of an object is its address for the program, which never looks there.

use std::ffi::c_void;

/// An opaque address.
pub(crate) type P = *mut c_void;

/// `dim3`, and `uint3`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Dim3 {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) z: u32,
}

impl Dim3 {
    /// As it travels.
    pub(crate) fn bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        for (place, number) in bytes.chunks_exact_mut(4).zip([self.x, self.y, self.z]) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }
}

/// The name that an address stands for; one that no object has if it stands for none.
pub(crate) fn raw<T>(address: *const T) -> u32 {
    u32::try_from(address.addr()).unwrap_or(u32::MAX)
}

/// The address that stands for a name.
pub(crate) fn address(raw: u32) -> P {
    std::ptr::without_provenance_mut(raw as usize)
}
