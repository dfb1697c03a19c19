//! vsock sockets (vsock(7)), as far as an agent needs them. A connected one is a stream socket like any other: reads,
//! writes, timeouts and shutdown are the same system calls, so `UnixStream` carries it.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::{Error, Listener, say};

/// The host's address.
pub(crate) const HOST: u32 = libc::VMADDR_CID_HOST;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// Connects to a port.
pub(crate) fn dial(cid: u32, port: u32) -> io::Result<UnixStream> {
    let socket = open()?;
    let address = address(cid, port);
    // SAFETY: 1. `address` is a `sockaddr_vm` of the length given.
    let result = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(UnixStream::from(socket))
}

/// Accepts the host's connections.
pub(crate) struct VsockListener(OwnedFd);

impl VsockListener {
    /// Listens on a port.
    pub(crate) fn bind(port: u32) -> Result<Self, Error> {
        let fail = |what| Error::system(format!("{what} on vsock port {port}"));
        let socket = open().map_err(fail("opening a socket to listen"))?;
        let address = address(libc::VMADDR_CID_ANY, port);
        // SAFETY: 1. `address` is a `sockaddr_vm` of the length given.
        let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) };
        if result != 0 {
            return Err(fail("binding")(io::Error::last_os_error()));
        }
        // SAFETY: 1. No memory is touched.
        let result = unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) };
        if result != 0 {
            return Err(fail("listening")(io::Error::last_os_error()));
        }
        Ok(Self(socket))
    }
}

impl Listener for VsockListener {
    type Stream = UnixStream;

    fn accept(&self) -> io::Result<Option<UnixStream>> {
        let mut peer = address(0, 0);
        let mut length = LENGTH;
        // SAFETY: 1. `peer` is writable and as long as `length` says.
        let fd = unsafe {
            libc::accept4(
                self.0.as_raw_fd(),
                (&raw mut peer).cast(),
                &raw mut length,
                libc::SOCK_CLOEXEC,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: 1. The descriptor was just made and nobody else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // A process of the guest could come through the local address and run commands as root.
        if peer.svm_cid != HOST {
            say(format_args!(
                "a connection from CID {} was refused: only the host may connect",
                peer.svm_cid
            ));
            return Ok(None);
        }
        Ok(Some(UnixStream::from(socket)))
    }
}

#[expect(clippy::cast_possible_truncation, reason = "16 bytes (linux/vm_sockets.h)")]
const LENGTH: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

fn open() -> io::Result<OwnedFd> {
    // SAFETY: 1. No memory is touched.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: 1. The descriptor was just made and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: 1. `sockaddr_vm` is plain data for which all zeros is valid.
    let mut address: libc::sockaddr_vm = unsafe { MaybeUninit::zeroed().assume_init() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap_or(0);
    address.svm_cid = cid;
    address.svm_port = port;
    address
}
