//! landlock: no path can be opened but beneath what is named, whatever else goes wrong. Constants are those of Linux `uapi/linux/landlock.h`.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::Errno;

use super::{failed, last_error};
use crate::Error;

/// `struct landlock_ruleset_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RulesetAttr {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

const CREATE_RULESET_VERSION: libc::c_ulong = 1 << 0;

/// `LANDLOCK_ACCESS_FS_EXECUTE` to `_MAKE_SYM`: bits 0 to 12.
const FS_FIRST: u64 = (1 << 13) - 1;
/// `LANDLOCK_ACCESS_FS_REFER`, version 2.
const FS_REFER: u64 = 1 << 13;
/// `LANDLOCK_ACCESS_FS_TRUNCATE`, version 3.
const FS_TRUNCATE: u64 = 1 << 14;
/// `LANDLOCK_ACCESS_FS_IOCTL_DEV`, version 5. Descriptors from elsewhere, such as `/dev/kvm`'s, are not affected.
const FS_IOCTL_DEV: u64 = 1 << 15;
/// `LANDLOCK_ACCESS_NET_BIND_TCP` and `_CONNECT_TCP`, version 4.
const NET: u64 = 0b11;
/// `LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET` and `_SIGNAL`, version 6.
const SCOPES: u64 = 0b11;

/// All that this version can deny, and the size of the structure that it knows.
fn everything(version: u32) -> (RulesetAttr, usize) {
    let mut attr = RulesetAttr {
        handled_access_fs: FS_FIRST,
        ..RulesetAttr::default()
    };
    let mut size = size_of::<u64>();
    if version >= 2 {
        attr.handled_access_fs |= FS_REFER;
    }
    if version >= 3 {
        attr.handled_access_fs |= FS_TRUNCATE;
    }
    if version >= 4 {
        attr.handled_access_net = NET;
        size = 2 * size_of::<u64>();
    }
    if version >= 5 {
        attr.handled_access_fs |= FS_IOCTL_DEV;
    }
    if version >= 6 {
        attr.scoped = SCOPES;
        size = 3 * size_of::<u64>();
    }
    (attr, size)
}

/// `struct landlock_path_beneath_attr`, which the kernel has packed.
#[repr(C, packed)]
struct PathBeneathAttr {
    allowed_access: u64,
    parent_fd: i32,
}

/// `LANDLOCK_RULE_PATH_BENEATH`.
const RULE_PATH_BENEATH: libc::c_int = 1;

/// What files and directories of a share can be: everything but programs that run, and device nodes.
pub(super) const FS_BENEATH: u64 = ((FS_FIRST & !FS_EXECUTE) & !FS_MAKE_CHAR & !FS_MAKE_BLOCK) | FS_REFER | FS_TRUNCATE;
/// What can be looked at and executed.
pub(super) const FS_READ: u64 = FS_EXECUTE | FS_READ_FILE | FS_READ_DIR;
/// Devices that are used.
pub(super) const FS_DEVICES: u64 = FS_READ_FILE | FS_READ_DIR | FS_WRITE_FILE | FS_IOCTL_DEV;
/// `LANDLOCK_ACCESS_FS_EXECUTE`, `_WRITE_FILE`, `_READ_FILE`, `_READ_DIR`, `_MAKE_CHAR`, `_MAKE_BLOCK`.
pub(super) const FS_EXECUTE: u64 = 1 << 0;
const FS_WRITE_FILE: u64 = 1 << 1;
const FS_READ_FILE: u64 = 1 << 2;
const FS_READ_DIR: u64 = 1 << 3;
const FS_MAKE_CHAR: u64 = 1 << 6;
const FS_MAKE_BLOCK: u64 = 1 << 11;

/// Whether this version can keep somebody beneath so many directories. The first one denies every rename and link from one
/// directory to another, also beneath what is allowed, and cannot be told otherwise.
fn serves(version: u32, directories: usize) -> bool {
    directories == 0 || version >= 2
}

/// Denies all of it, with no exception. Needs no_new_privs. Gives the version, or `None` where there is no landlock.
pub(super) fn deny_everything() -> Result<Option<u32>, Error> {
    deny_all_but(&[])
}

/// A directory, and what is allowed beneath it.
pub(super) type Beneath<'a> = (BorrowedFd<'a>, u64);

/// Denies all of it, but for what is allowed beneath these directories. `None` also where landlock is too old for
/// directories.
pub(super) fn deny_all_but(directories: &[Beneath<'_>]) -> Result<Option<u32>, Error> {
    let step = failed("restricting itself with landlock", "");
    let null = std::ptr::null::<RulesetAttr>();
    // SAFETY: with this flag the kernel reads no structure.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, null, 0_usize, CREATE_RULESET_VERSION) };
    let Ok(version) = u32::try_from(version) else {
        return match last_error() {
            Errno::NOSYS | Errno::OPNOTSUPP => Ok(None),
            error => Err(step(error)),
        };
    };
    if !serves(version, directories.len()) {
        return Ok(None);
    }
    let (attr, size) = everything(version);
    // SAFETY: the structure lives through the call and is at least `size` bytes long.
    let ruleset = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size, 0_u32) };
    let Some(ruleset) = RawFd::try_from(ruleset).ok().filter(|&fd| fd >= 0) else {
        return Err(step(last_error()));
    };
    // SAFETY: the kernel has just made this descriptor for us.
    let ruleset = unsafe { OwnedFd::from_raw_fd(ruleset) };
    for (directory, allowed) in directories {
        let rule = PathBeneathAttr {
            allowed_access: allowed & attr.handled_access_fs,
            parent_fd: directory.as_raw_fd(),
        };
        let number = ruleset.as_raw_fd();
        let add = libc::SYS_landlock_add_rule;
        // SAFETY: the structure lives through the call, is the one of this kind of rule, and is only read.
        let added = unsafe { libc::syscall(add, number, RULE_PATH_BENEATH, &raw const rule, 0_u32) };
        if added != 0 {
            return Err(step(last_error()));
        }
    }
    // SAFETY: both arguments are numbers.
    match unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0_u32) } {
        0 => Ok(Some(version)),
        _ => Err(step(last_error())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_version_is_not_for_who_moves_files() {
        assert!(serves(1, 0) && serves(2, 1));
        assert!(!serves(1, 1));
    }

    #[test]
    fn each_version_is_asked_for_what_it_knows() {
        assert_eq!(everything(1).0.handled_access_fs, 0x1fff);
        assert_eq!(everything(1).1, 8);
        assert_eq!(everything(4).1, 16);
        let (newest, size) = everything(9);
        assert_eq!(
            (newest.handled_access_fs, newest.handled_access_net, newest.scoped, size),
            (0xffff, 3, 3, 24)
        );
    }
}
