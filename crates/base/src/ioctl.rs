//! Requests to drivers: ioctl(2), with numbers as the kernel's headers make them.
#![allow(
    unsafe_code,
    reason = "a request reads and writes what its number says, which no type tells"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The number in the type that this C library wants.
#[cfg(target_env = "musl")]
fn wanted(request: u32) -> libc::Ioctl {
    request.cast_signed()
}

#[cfg(not(target_env = "musl"))]
fn wanted(request: u32) -> libc::Ioctl {
    request.into()
}

/// Makes a request; what it answers is not negative.
///
/// # Errors
/// The driver's.
///
/// # Safety
/// The request reads and writes no more than what `argument` points to, or takes none or a number.
pub unsafe fn call<T>(fd: impl AsFd, request: u32, argument: *mut T) -> io::Result<i32> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: 1. the descriptor is open for the time of the call; 2. the caller knows the request.
    let result = unsafe { libc::ioctl(fd, wanted(request), argument) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_answered_or_refused() {
        let (near, far) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut &far, b"four").unwrap();
        let mut count = 0_i32;
        // SAFETY: FIONREAD writes an int.
        let asked = |fd: &std::io::PipeReader, count: &mut i32| unsafe { call(fd, 0x541b, count) };
        assert_eq!((asked(&near, &mut count).unwrap(), count), (0, 4));
        // SAFETY: no driver has this request, which has no argument.
        let refused = unsafe { call::<u8>(&near, 0xff_ffff, std::ptr::null_mut()) };
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }
}
