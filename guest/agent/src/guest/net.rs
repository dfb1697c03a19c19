//! The loopback interface. Other interfaces do not exist yet.

use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::Error;

/// linux/sockios.h; libc gives it a type that differs between C libraries.
const SIOCSIFFLAGS: libc::Ioctl = 0x8914;

/// Brings `lo` up; the kernel gives it its addresses.
pub(crate) fn loopback_up() -> Result<(), Error> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(Error::system("opening a socket for the loopback interface"))?;
    // SAFETY: 1. `ifreq` is plain data for which all zeros is valid.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    for (place, byte) in request.ifr_name.iter_mut().zip(c"lo".to_bytes_with_nul()) {
        *place = libc::c_char::try_from(*byte).unwrap_or(0);
    }
    let flags = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
    // SAFETY: 1. The request is an `ifreq` with a terminated name and flags set; the kernel only reads it.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCSIFFLAGS, &raw const request) };
    if result < 0 {
        return Err(Error::system("bringing the loopback interface up")(
            std::io::Error::last_os_error(),
        ));
    }
    Ok(())
}
