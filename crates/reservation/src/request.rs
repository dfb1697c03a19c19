//! Requests to the module: ioctl(2) with the kernel's numbers.

use std::os::fd::{FromRawFd, OwnedFd};

pub use base::ioctl::call;

/// Which way a request's argument goes.
#[derive(Clone, Copy)]
pub enum Way {
    /// To the caller.
    Read,
    /// To the kernel.
    Write,
    /// Both.
    Both,
}

/// A request's number, as `_IOC` of the kernel makes it: the argument's size has 14 bits.
#[expect(
    clippy::cast_possible_truncation,
    reason = "no argument has 16 KiB, and `try_from` is not for constants"
)]
pub const fn number<T>(way: Way, request: u32) -> u32 {
    let way = match way {
        Way::Write => 1,
        Way::Read => 2,
        Way::Both => 3,
    };
    way << 30 | (size_of::<T>() as u32) << 16 | 0xba << 8 | request
}

/// The descriptor that a request has answered with.
///
/// # Safety
/// It is one, and nobody else's.
pub unsafe fn descriptor(result: i32) -> OwnedFd {
    // SAFETY: the caller's.
    unsafe { OwnedFd::from_raw_fd(result) }
}
