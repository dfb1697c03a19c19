//! What `kmod/uapi/basalt.h` says of claims, for Rust. Knows nothing of what is done with them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::request::{self, Way, number};

/// The version of the interface that this is.
pub(crate) const API_VERSION: u32 = 6;

/// CPUs of one claim.
pub const MAX_CPUS: usize = 64;

/// Whose virtualization the host's CPUs have: AMD's.
pub(crate) const VENDOR_AMD: u32 = 1;

/// `struct basalt_info`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Info {
    pub(crate) version: u32,
    pub(crate) vendor: u32,
    pub(crate) tsc_khz: u32,
    pub(crate) reserved0: u32,
    pub(crate) memory: u64,
    pub(crate) memory_free: u64,
    pub(crate) reserved: [u32; 8],
}

/// `struct basalt_claim`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ClaimRequest {
    pub(crate) flags: u32,
    pub(crate) count: u32,
    pub(crate) cpus: [u32; MAX_CPUS],
    pub(crate) failed: u32,
    pub(crate) reserved: [u32; 5],
}

impl Default for ClaimRequest {
    fn default() -> Self {
        Self {
            flags: 0,
            count: 0,
            cpus: [0; MAX_CPUS],
            failed: 0,
            reserved: [0; 5],
        }
    }
}

/// `struct basalt_claimed`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Claimed {
    pub(crate) count: u32,
    pub(crate) cpus: [u32; MAX_CPUS],
    pub(crate) tsc_khz: u32,
    pub(crate) reserved: [u32; 14],
}

impl Default for Claimed {
    fn default() -> Self {
        Self {
            count: 0,
            cpus: [0; MAX_CPUS],
            tsc_khz: 0,
            reserved: [0; 14],
        }
    }
}

const GET_INFO: u32 = number::<Info>(Way::Read, 0x00);
const CLAIM: u32 = number::<ClaimRequest>(Way::Both, 0x01);
const GET_CLAIMED: u32 = number::<Claimed>(Way::Read, 0x02);

/// Makes a request of which the kernel writes and reads no more than `argument`.
fn ioctl<T>(fd: impl AsFd, number: u32, argument: &mut T) -> io::Result<i32> {
    // SAFETY: the request's number has the size of `T`, which is what the kernel copies from and to the argument.
    unsafe { request::call(fd, number, argument) }
}

/// Of the device, or of a claim.
pub(crate) fn get_info(device: impl AsFd) -> io::Result<Info> {
    let mut info = Info::default();
    ioctl(device, GET_INFO, &mut info)?;
    Ok(info)
}

/// Of the device: a claim's descriptor. On failure the request says which CPU could not be had.
pub(crate) fn claim(device: impl AsFd, asked: &mut ClaimRequest) -> io::Result<OwnedFd> {
    let result = ioctl(device, CLAIM, asked)?;
    // SAFETY: the request answers with a descriptor that was made for us.
    Ok(unsafe { request::descriptor(result) })
}

/// Of a claim.
pub(crate) fn get_claimed(claim: impl AsFd) -> io::Result<Claimed> {
    let mut claimed = Claimed::default();
    ioctl(claim, GET_CLAIMED, &mut claimed)?;
    Ok(claimed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_header() {
        // By gcc 12, of kmod/uapi/basalt.h.
        let sizes = [size_of::<Info>(), size_of::<ClaimRequest>(), size_of::<Claimed>()];
        assert_eq!(sizes, [64, 288, 320]);
    }
}
