//! Attributes of a mount that has no path, by mount_setattr(2), which rustix does not have. Constants and structure are
//! those of Linux `uapi/linux/mount.h`. Does not know what is mounted.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// `struct mount_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MountAttr {
    pub(crate) attr_set: u64,
    pub(crate) attr_clr: u64,
    pub(crate) propagation: u64,
    pub(crate) userns_fd: u64,
}

pub(crate) const MOUNT_ATTR_RDONLY: u64 = 0x0000_0001;
pub(crate) const MOUNT_ATTR_NOSUID: u64 = 0x0000_0002;
pub(crate) const MOUNT_ATTR_NODEV: u64 = 0x0000_0004;
pub(crate) const MOUNT_ATTR_NOEXEC: u64 = 0x0000_0008;
pub(crate) const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
pub(crate) const MOUNT_ATTR_NOSYMFOLLOW: u64 = 0x0020_0000;

/// `AT_RECURSIVE` (linux/fcntl.h): the mounts beneath too.
const AT_RECURSIVE: libc::c_int = 0x8000;

/// Changes the mount that this descriptor is the root of, and with `recursive` those beneath it.
pub(crate) fn set(mount: BorrowedFd<'_>, attr: &MountAttr, recursive: bool) -> Result<(), Errno> {
    let (call, fd, name) = (libc::SYS_mount_setattr, mount.as_raw_fd(), c"".as_ptr());
    let flags = libc::AT_EMPTY_PATH | if recursive { AT_RECURSIVE } else { 0 };
    let attr = std::ptr::from_ref(attr);
    // SAFETY: 1. name and structure live through the call and are only read; 2. the size is the structure's.
    let result = unsafe { libc::syscall(call, fd, name, flags, attr, size_of::<MountAttr>()) };
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}
