//! TAPs: made, opened by queues. Everything here is done by the thread inside the namespace.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

// linux/if_tun.h
const TUNSETIFF: libc::Ioctl = 0x4004_54ca_u32 as libc::Ioctl;
const TUNSETPERSIST: libc::Ioctl = 0x4004_54cb_u32 as libc::Ioctl;

/// Opens a queue of the TAP `name`, which is made if it is not there, with one queue or such that it can have `several`: the
/// kernel keeps room for 256 then. `EINVAL` if it is there and is of the other kind.
pub(crate) fn open(name: &str, several: bool) -> io::Result<OwnedFd> {
    let tap = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: 1. `ifreq` is plain data for which all zeros is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays the terminating zero.
    let room = request.ifr_name.len() - 1;
    for (place, byte) in request.ifr_name.iter_mut().take(room).zip(name.bytes()) {
        *place = byte.cast_signed() as libc::c_char;
    }
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if several {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
    // SAFETY: 1. the request is an `ifreq` with a terminated name and flags set, which lives for the call.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
    Ok(tap.into())
}

/// Lets the TAP stay when no descriptor is open any more.
pub(crate) fn persist(tap: &OwnedFd) -> io::Result<()> {
    // SAFETY: 1. TUNSETPERSIST takes a number and touches no memory.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETPERSIST, 1) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
