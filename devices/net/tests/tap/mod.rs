//! TAPs for this crate's tests, each in a network namespace of its own. Needs root; knows no guest.
#![allow(unsafe_code, reason = "sockets and ioctls that rustix has no wrappers for")]
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

// linux/if_tun.h
const TUNSETIFF: libc::Ioctl = 0x4004_54ca_u32 as libc::Ioctl;

/// The far side of a TAP: frames go in and out by a packet socket.
#[derive(Debug)]
pub struct FarSide(OwnedFd);

/// Makes a TAP with so many queues, up and silent, in a namespace that goes with it.
///
/// # Errors
/// The host refuses: no root, no `/dev/net/tun`.
pub fn tap(queues: usize) -> io::Result<(Vec<OwnedFd>, FarSide)> {
    let made = std::thread::spawn(move || make(queues)).join();
    made.unwrap_or_else(|_| Err(io::Error::other("the thread that makes a TAP panicked")))
}

fn make(queues: usize) -> io::Result<(Vec<OwnedFd>, FarSide)> {
    // SAFETY: 1. unshare(2) takes a number and touches no memory; only this thread moves.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
    // No router solicitations: what comes from the far side is what a test sends.
    fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
    let mut request = request();
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    let taps = (0..queues)
        .map(|_| {
            let tap = File::options().read(true).write(true).open("/dev/net/tun")?;
            // SAFETY: 1. the request is an `ifreq` with a terminated name and flags set.
            check(unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETIFF, &raw const request) })?;
            Ok(OwnedFd::from(tap))
        })
        .collect::<io::Result<Vec<_>>>()?;
    let socket = packet_socket()?;
    let index = bring_up(&socket)?;
    // SAFETY: 1. `sockaddr_ll` is plain data for which all zeros is valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::c_ushort::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
    address.sll_protocol = every_protocol();
    address.sll_ifindex = index;
    let length = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    // SAFETY: 1. the address is a whole `sockaddr_ll` of `length` bytes, which the kernel only reads.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok((taps, FarSide(socket)))
}

impl FarSide {
    /// Sends a frame to the TAP.
    ///
    /// # Errors
    /// Those of send(2).
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        rustix::net::send(&self.0, frame, rustix::net::SendFlags::empty())?;
        Ok(())
    }

    /// The next frame that came out of the TAP.
    ///
    /// # Errors
    /// None came within ninety seconds.
    pub fn receive(&self) -> io::Result<Vec<u8>> {
        let mut frame = vec![0; 70_000];
        let (_, length) = rustix::net::recv(&self.0, &mut frame[..], rustix::net::RecvFlags::empty())?;
        frame.truncate(length);
        Ok(frame)
    }
}

fn packet_socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: 1. socket(2) takes numbers and touches no memory.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, libc::c_int::from(every_protocol())) };
    check(fd)?;
    // SAFETY: 1. the descriptor was just made, and nobody else knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let patience = rustix::net::sockopt::Timeout::Recv;
    rustix::net::sockopt::set_socket_timeout(&socket, patience, Some(std::time::Duration::from_secs(90)))?;
    Ok(socket)
}

fn bring_up(socket: &OwnedFd) -> io::Result<libc::c_int> {
    let mut request = request();
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP).map_err(io::Error::other)?;
    let set_flags = libc::SIOCSIFFLAGS as libc::Ioctl;
    // SAFETY: 1. the request is an `ifreq` with a terminated name and flags set, which the kernel only reads.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), set_flags, &raw const request) })?;
    // SAFETY: 1. the name is terminated and only read.
    let index = unsafe { libc::if_nametoindex(request.ifr_name.as_ptr()) };
    libc::c_int::try_from(index).map_err(io::Error::other)
}

/// A request about the TAP `t`; every namespace has its own.
fn request() -> libc::ifreq {
    // SAFETY: 1. `ifreq` is plain data for which all zeros is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b't'.cast_signed() as libc::c_char;
    request
}

/// `ETH_P_ALL` in network order.
fn every_protocol() -> u16 {
    u16::try_from(libc::ETH_P_ALL).unwrap_or(0).to_be()
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
