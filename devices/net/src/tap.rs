//! A TAP queue: its ioctls, and packets between it and guest memory. The only unsafe code of this device.
//!
//! Addresses come from [`VolatileSlice`]s, which only exist for checked ranges of guest memory and borrow it.

use std::io::{self, IoSliceMut};
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ::device::CreateError;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
};
use vm_memory::VolatileSlice;

use crate::config::{Features, HEADER};

/// The most buffers of one call (`IOV_MAX`).
pub(crate) const IOV_MAX: usize = 1024;

// linux/if_tun.h
const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0_u32 as libc::Ioctl;
const TUNGETIFF: libc::Ioctl = 0x8004_54d2_u32 as libc::Ioctl;
const TUNSETVNETHDRSZ: libc::Ioctl = 0x4004_54d8_u32 as libc::Ioctl;
const TUNSETQUEUE: libc::Ioctl = 0x4004_54d9_u32 as libc::Ioctl;
const TUN_F_CSUM: libc::c_ulong = 0x01;
const TUN_F_TSO4: libc::c_ulong = 0x02;
const TUN_F_TSO6: libc::c_ulong = 0x04;
const TUN_F_TSO_ECN: libc::c_ulong = 0x08;

/// One queue of a TAP.
#[derive(Debug)]
pub(crate) struct Tap(OwnedFd);

impl Tap {
    /// Takes a descriptor over: it has to be a TAP's, with headers.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self, CreateError> {
        let tap = Self(fd);
        let host = |what| move |source| CreateError::Host { what, source };
        let flags = i32::from(
            tap.flags()
                .map_err(host("a descriptor in `taps` is not that of a TAP"))?,
        );
        let wanted = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & wanted != wanted {
            return Err(CreateError::Value(format!(
                "a descriptor in `taps` has the flags {flags:#x}: open it with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR"
            )));
        }
        rustix::io::ioctl_fionbio(&tap.0, true)
            .map_err(io::Error::from)
            .map_err(host("making a TAP non-blocking"))?;
        tap.set_header_size().map_err(host("TUNSETVNETHDRSZ"))?;
        Ok(tap)
    }

    fn flags(&self) -> io::Result<i16> {
        let mut request = empty_request();
        // SAFETY: 1. the request is an `ifreq`, which the kernel fills; 2. it lives for the call.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), TUNGETIFF, &raw mut request) };
        check(result)?;
        // SAFETY: 1. TUNGETIFF sets this member of the union (tun(4)); any value is one.
        Ok(unsafe { request.ifr_ifru.ifru_flags })
    }

    fn set_header_size(&self) -> io::Result<()> {
        let size = libc::c_int::try_from(HEADER).unwrap_or(libc::c_int::MAX);
        // SAFETY: 1. the kernel reads an int, which lives for the call.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), TUNSETVNETHDRSZ, &raw const size) })
    }

    /// What packets may be like that the guest is given. Holds for all queues of the TAP.
    pub(crate) fn set_offload(&self, features: Features) -> io::Result<()> {
        let mut offload = 0;
        // Segmentation needs checksums (5.1.3.1); a driver that takes the one without the other gets neither.
        if features.has(VIRTIO_NET_F_GUEST_CSUM) {
            offload |= TUN_F_CSUM;
            for (bit, flag) in [
                (VIRTIO_NET_F_GUEST_TSO4, TUN_F_TSO4),
                (VIRTIO_NET_F_GUEST_TSO6, TUN_F_TSO6),
            ] {
                if features.has(bit) {
                    offload |= flag;
                }
            }
            if features.has(VIRTIO_NET_F_GUEST_ECN) && offload != TUN_F_CSUM {
                offload |= TUN_F_TSO_ECN;
            }
        }
        // SAFETY: 1. TUNSETOFFLOAD takes a number and touches no memory.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), TUNSETOFFLOAD, offload) })
    }

    /// Whether this queue takes part. One that another device had need not.
    pub(crate) fn is_attached(&self) -> io::Result<bool> {
        Ok(i32::from(self.flags()?) & libc::IFF_DETACH_QUEUE == 0)
    }

    /// Has this queue take part, or not. One that does not is given no packets, and takes none.
    pub(crate) fn set_attached(&self, attached: bool) -> io::Result<()> {
        let flag = if attached {
            libc::IFF_ATTACH_QUEUE
        } else {
            libc::IFF_DETACH_QUEUE
        };
        let mut request = empty_request();
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flag).unwrap_or(0);
        // SAFETY: 1. the request is an `ifreq` with its flags set, which the kernel only reads.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), TUNSETQUEUE, &raw const request) };
        match check(result) {
            // It is so already.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    }

    /// Sends one packet: header and frame.
    pub(crate) fn write(&self, vectors: &IoVecs<'_>) -> io::Result<usize> {
        let (list, count) = vectors.parts();
        // SAFETY: 1. `list` is valid for `count` vectors and lives for the call; 2. each names a range of mapped guest
        // memory, borrowed by `vectors`, that the kernel only reads.
        let result = unsafe { libc::writev(self.0.as_raw_fd(), list, count) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Receives one packet: header and frame.
    pub(crate) fn read(&self, vectors: &IoVecs<'_>) -> io::Result<usize> {
        let (list, count) = vectors.parts();
        // SAFETY: 1. `list` is valid for `count` vectors and lives for the call; 2. each names a range of mapped guest
        // memory, borrowed by `vectors`; 3. nothing in this process holds references into guest memory.
        let result = unsafe { libc::readv(self.0.as_raw_fd(), list, count) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Receives one packet into memory of our own. By the call of [`Tap::read`]: the thread may make no other (bin/vmm/seccomp/net.toml).
    pub(crate) fn read_copy(&self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::readv(&self.0, &mut [IoSliceMut::new(bytes)])?)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn empty_request() -> libc::ifreq {
    // SAFETY: 1. `ifreq` is plain data for which all zeros is valid.
    unsafe { std::mem::zeroed() }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Buffers in guest memory, in order, as the kernel takes them.
#[derive(Debug, Default)]
pub(crate) struct IoVecs<'m> {
    vectors: Vec<libc::iovec>,
    /// Those before it are gone.
    first: usize,
    memory: PhantomData<VolatileSlice<'m>>,
}

impl<'m> IoVecs<'m> {
    pub(crate) fn clear(&mut self) {
        self.vectors.clear();
        self.first = 0;
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.vectors.len() - self.first
    }

    /// Adds buffers, one vector each.
    pub(crate) fn extend(&mut self, slices: &[VolatileSlice<'m>]) {
        self.vectors.extend(slices.iter().map(|slice| libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        }));
    }

    /// Leaves the first `count` out.
    pub(crate) fn drop_front(&mut self, count: usize) {
        self.first = (self.first + count).min(self.vectors.len());
        // Now and then, so that a long list is not moved for each packet.
        if self.first >= IOV_MAX || self.first == self.vectors.len() {
            self.vectors.drain(..self.first);
            self.first = 0;
        }
    }

    fn parts(&self) -> (*const libc::iovec, libc::c_int) {
        let rest = &self.vectors[self.first..];
        let count = rest.len().min(IOV_MAX);
        (rest.as_ptr(), libc::c_int::try_from(count).unwrap_or(0))
    }
}
