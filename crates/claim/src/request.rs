//! Requests to the module: ioctl(2) with the kernel's numbers.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

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

/// The number in the type that this C library wants.
#[cfg(target_env = "musl")]
fn wanted(request: u32) -> libc::Ioctl {
    request.cast_signed()
}

#[cfg(not(target_env = "musl"))]
fn wanted(request: u32) -> libc::Ioctl {
    request.into()
}

/// Makes a request.
///
/// # Errors
/// The module's.
///
/// # Safety
/// The request reads and writes no more than `argument` says, or takes none.
pub unsafe fn call<T>(fd: impl AsFd, request: u32, argument: *mut T) -> io::Result<i32> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: 1. the descriptor is open for the time of the call; 2. the caller knows the request.
    let result = unsafe { libc::ioctl(fd, wanted(request), argument) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// The descriptor that a request has answered with.
///
/// # Safety
/// It is one, and nobody else's.
pub unsafe fn descriptor(result: i32) -> OwnedFd {
    // SAFETY: the caller's.
    unsafe { OwnedFd::from_raw_fd(result) }
}
