//! userfaultfd(2), as far as a pager needs it (linux/userfaultfd.h, Documentation/admin-guide/mm/userfaultfd.rst): who touches a page
//! that is not there waits until it is put there. Knows no files.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Updater, ioctl, opcode};

use crate::PAGE;

const API: u64 = 0xaa;
const GROUP: u8 = 0xaa;

/// `USERFAULTFD_IOC_NEW`, of /dev/userfaultfd (Linux 6.1): faults in the kernel, such as KVM's, count as well.
const NEW: Opcode = opcode::none(GROUP, 0);
const SET_API: Opcode = opcode::read_write::<UffdApi>(GROUP, 0x3f);
const REGISTER: Opcode = opcode::read_write::<UffdRegister>(GROUP, 0);
const WAKE: Opcode = opcode::read::<UffdRange>(GROUP, 2);
const COPY: Opcode = opcode::read_write::<UffdCopy>(GROUP, 3);
const ZEROPAGE: Opcode = opcode::read_write::<UffdZeropage>(GROUP, 4);

/// Pages that are missing, rather than protected.
const MODE_MISSING: u64 = 1;

/// `UFFD_EVENT_PAGEFAULT`.
const PAGEFAULT: u8 = 0x12;

/// `struct uffd_msg`, and where it has a fault's address.
const MESSAGE: usize = 32;
const ADDRESS: usize = 16;

/// Of them as many are read at a time.
const MESSAGES: usize = 16;

#[repr(C)]
struct UffdApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdRange {
    start: u64,
    length: u64,
}

#[repr(C)]
struct UffdRegister {
    range: UffdRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdCopy {
    to: u64,
    from: u64,
    length: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
struct UffdZeropage {
    range: UffdRange,
    mode: u64,
    zeroed: i64,
}

/// Answers with a descriptor.
struct New;

// SAFETY: 1. the call takes flags in place of a pointer, and reads and writes nothing of this process; 2. its result is a new
// descriptor.
#[allow(unsafe_code, reason = "an ioctl whose result is a descriptor")]
unsafe impl Ioctl for New {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        NEW
    }

    fn as_ptr(&mut self) -> *mut c_void {
        let flags = rustix::fs::OFlags::CLOEXEC | rustix::fs::OFlags::NONBLOCK;
        std::ptr::without_provenance_mut(flags.bits() as usize)
    }

    unsafe fn output_from_ptr(fd: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the call has succeeded, so this is a descriptor that nobody else knows of.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// The calling process's missing pages, of the ranges that are registered.
#[derive(Debug)]
pub(crate) struct Userfault(OwnedFd);

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Userfault {
    /// Of this process; `device` is /dev/userfaultfd.
    #[allow(unsafe_code, reason = "ioctls without wrappers")]
    pub(crate) fn new(device: impl AsFd) -> rustix::io::Result<Self> {
        // SAFETY: as the implementation says.
        let fd = unsafe { ioctl(device, New) }?;
        let mut api = UffdApi {
            api: API,
            features: 0,
            ioctls: 0,
        };
        // SAFETY: the structure is the one that the call reads and writes.
        unsafe { call::<SET_API, _>(&fd, &mut api) }?;
        Ok(Self(fd))
    }

    /// Pages of an anonymous mapping are missing from now on where they have not been touched.
    #[allow(unsafe_code, reason = "ioctls without wrappers")]
    pub(crate) fn register(&self, start: usize, length: usize) -> rustix::io::Result<()> {
        let mut register = UffdRegister {
            range: range(start, length),
            mode: MODE_MISSING,
            ioctls: 0,
        };
        // SAFETY: the structure is the one that the call reads and writes; what is mapped stays mapped.
        unsafe { call::<REGISTER, _>(&self.0, &mut register) }
    }

    /// Puts a page with this content there, and wakes who waits for it; one that is there stays.
    pub(crate) fn put(&self, to: usize, page: &[u8; PAGE]) -> Result<(), Errno> {
        let empty = page.iter().all(|&byte| byte == 0);
        loop {
            let put = match empty {
                true => self.zero(to),
                false => self.copy(to, page),
            };
            match put {
                // The process's mappings were changing.
                Err(Errno::AGAIN) => (),
                Err(Errno::EXIST) => return self.wake(to),
                // Something else is mapped there by now.
                Err(Errno::NOENT) => return Ok(()),
                result => return result,
            }
        }
    }

    #[allow(unsafe_code, reason = "ioctls without wrappers")]
    fn copy(&self, to: usize, page: &[u8; PAGE]) -> Result<(), Errno> {
        let mut copy = UffdCopy {
            to: to as u64,
            from: page.as_ptr().addr() as u64,
            length: PAGE as u64,
            mode: 0,
            copied: 0,
        };
        // SAFETY: 1. the structure is the one that the call reads and writes; 2. it reads `page`, which lives through it; 3. it
        // writes to a page alone that nobody could read yet.
        unsafe { call::<COPY, _>(&self.0, &mut copy) }
    }

    #[allow(unsafe_code, reason = "ioctls without wrappers")]
    fn zero(&self, to: usize) -> Result<(), Errno> {
        let mut zero = UffdZeropage {
            range: range(to, PAGE),
            mode: 0,
            zeroed: 0,
        };
        // SAFETY: the structure is the one that the call reads and writes; a page that was there stays.
        unsafe { call::<ZEROPAGE, _>(&self.0, &mut zero) }
    }

    /// Has whoever waits for a page look again.
    #[allow(unsafe_code, reason = "ioctls without wrappers")]
    fn wake(&self, at: usize) -> Result<(), Errno> {
        let mut range = range(at, PAGE);
        // SAFETY: the structure is the one that the call reads.
        match unsafe { call::<WAKE, _>(&self.0, &mut range) } {
            Err(Errno::NOENT) => Ok(()),
            result => result,
        }
    }

    /// Where pages are waited for; what has been told before is not told again.
    pub(crate) fn faults(&self, out: &mut Vec<usize>) -> Result<(), Errno> {
        out.clear();
        let mut messages = [0; MESSAGE * MESSAGES];
        let length = match rustix::io::read(&self.0, &mut messages) {
            Ok(length) => length,
            Err(Errno::AGAIN) => 0,
            Err(error) => return Err(error),
        };
        let whole = messages.get(..length).unwrap_or_default().as_chunks::<MESSAGE>().0;
        out.extend(whole.iter().filter(|message| message[0] == PAGEFAULT).map(|message| {
            let address = message[ADDRESS..]
                .first_chunk()
                .map_or(0, |bytes| usize::from_ne_bytes(*bytes));
            address & !(PAGE - 1)
        }));
        Ok(())
    }
}

/// # Safety
/// The structure must be the one that the call reads and writes, and what else the call does must be sound.
#[allow(unsafe_code, reason = "ioctls without wrappers")]
unsafe fn call<const OPCODE: Opcode, T>(fd: &OwnedFd, value: &mut T) -> Result<(), Errno> {
    // SAFETY: the caller says so.
    let call = unsafe { Updater::<OPCODE, T>::new(value) };
    // SAFETY: as above.
    unsafe { ioctl(fd, call) }
}

fn range(start: usize, length: usize) -> UffdRange {
    UffdRange {
        start: start as u64,
        length: length as u64,
    }
}
