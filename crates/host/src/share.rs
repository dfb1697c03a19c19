//! A directory handed to another process as the root of a mount of its own: no path leads out of it, its files' owners
//! are those of the process's user namespace, and it can be read-only. The mount is in no file system tree and goes with
//! its last descriptor. Does not know what the process does with it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::OpenTreeFlags;

use crate::Error;
use crate::mount_attributes::{
    self, MOUNT_ATTR_IDMAP, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NOSYMFOLLOW,
    MOUNT_ATTR_RDONLY, MountAttr,
};

const NO_MAPPING: &str = "the file system there cannot map owners: share a directory of ext4, XFS or btrfs (from \
                          Linux 6.3 on also tmpfs), or of another disk";
const MAPPED: &str = "files there have owners that are mapped already, or the file system is one of another user \
                      namespace: share the directory where it was mounted first, or one of another disk";
const NO_MOUNTS: &str = "run the node's daemon as root, on Linux 5.14 or later";

/// The directory that `open` is, for the process `pid` in its user namespace; `path` is its name for messages. Mounts below
/// it are left out.
///
/// # Errors
/// [`Error::Share`]: rights, kernel or the file system do not suffice.
pub fn directory(open: BorrowedFd<'_>, path: &Path, read_only: bool, pid: u32) -> Result<OwnedFd, Error> {
    let mount = detached(open, path)?;
    let namespace = format!("/proc/{pid}/ns/user");
    let namespace = rustix::fs::open(&namespace, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|cause| failed("finding the user namespace", path, cause, "the process has ended"))?;
    let read_only = if read_only { MOUNT_ATTR_RDONLY } else { 0 };
    // Whoever serves it tells of links and follows none.
    set(&mount, MOUNT_ATTR_NOSYMFOLLOW | read_only, None)
        .map_err(|cause| failed("restricting the mount", path, cause, NO_MOUNTS))?;
    set(&mount, 0, Some(&namespace)).map_err(|cause| {
        let root = rustix::process::geteuid().is_root();
        failed("mapping the owners", path, cause, after_mapping(cause, root))
    })?;
    Ok(mount)
}

/// The directory that `open` is, to be read alone, for a process that has no way to it: it finds files there, and connects to
/// sockets. Owners stay whoever they are, so what may be looked at is what others may look at. Mounts below it are left out.
///
/// # Errors
/// [`Error::Share`].
pub fn read_only(open: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Error> {
    let mount = detached(open, path)?;
    set(&mount, MOUNT_ATTR_RDONLY, None).map_err(|cause| failed("restricting the mount", path, cause, NO_MOUNTS))?;
    Ok(mount)
}

/// What to do about owners that cannot be mapped.
fn after_mapping(cause: Errno, root: bool) -> &'static str {
    match (cause, root) {
        (Errno::INVAL, _) => NO_MAPPING,
        (Errno::PERM, true) => MAPPED,
        _ => NO_MOUNTS,
    }
}

/// `/proc/PID/fd` of a process, from which no path leads to the rest of `/proc`.
///
/// # Errors
/// [`Error::Share`].
pub fn descriptors(pid: u32) -> Result<OwnedFd, Error> {
    let path = format!("/proc/{pid}/fd");
    let path = Path::new(&path);
    let open = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|cause| failed("opening it", path, cause, "the process has ended"))?;
    let mount = detached(open.as_fd(), path)?;
    set(&mount, 0, None).map_err(|cause| failed("restricting the mount", path, cause, NO_MOUNTS))?;
    Ok(mount)
}

fn failed(step: &'static str, path: &Path, cause: Errno, next: &str) -> Error {
    Error::Share {
        step,
        path: path.to_owned(),
        why: format!("{}; {next}", io::Error::from(cause)),
    }
}

fn detached(open: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Error> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    // An empty name: what the descriptor is.
    rustix::mount::open_tree(open, c"", flags)
        .map_err(|cause| failed("making a mount of its own", path, cause, NO_MOUNTS))
}

/// Sets attributes of a mount and makes it nobody's peer, or sets the namespace whose users are its files' owners.
fn set(mount: &OwnedFd, more: u64, owners: Option<&OwnedFd>) -> Result<(), Errno> {
    let mapped = owners.map_or(0, |_| MOUNT_ATTR_IDMAP);
    // A copy is a peer of its original: what is mounted below that later would come here too, where the kernel lets it come to
    // mounts that are nowhere. Once is enough.
    let alone = owners.map_or(libc::MS_PRIVATE, |_| 0);
    let attr = MountAttr {
        attr_set: MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC | more | mapped,
        attr_clr: 0,
        propagation: alone,
        userns_fd: owners.map_or(0, |fd| u64::from(fd.as_raw_fd().cast_unsigned())),
    };
    mount_attributes::set(mount.as_fd(), &attr, false)
}

#[cfg(test)]
mod tests {
    use rustix::fs::CWD;
    use rustix::mount::{
        MountFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags, mount, mount_change, move_mount, unmount,
    };

    use super::*;

    /// Goes with the mounts below it, whatever becomes of the test.
    struct Mounted(tempfile::TempDir);

    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = unmount(self.0.path(), UnmountFlags::DETACH);
        }
    }

    #[test]
    fn the_mount_of_its_own_is_nobodys_peer() {
        let mounted = Mounted(tempfile::tempdir().unwrap());
        let base = mounted.0.path();
        mount("none", base, c"tmpfs", MountFlags::empty(), None).unwrap();
        mount_change(base, MountPropagationFlags::PRIVATE).unwrap();
        let (place, seen) = (base.join("place"), base.join("seen"));
        for directory in [&place, &seen] {
            std::fs::create_dir(directory).unwrap();
        }
        mount("none", &place, c"tmpfs", MountFlags::empty(), None).unwrap();
        mount_change(&place, MountPropagationFlags::SHARED).unwrap();
        let open = rustix::fs::open(&place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let copy = detached(open.as_fd(), &place).unwrap();
        set(&copy, 0, None).unwrap();
        // Only what is somewhere is told of.
        move_mount(&copy, c"", CWD, &seen, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).unwrap();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let is_shared = |path: &Path| {
            let path = format!(" {} ", path.display());
            mounts
                .lines()
                .find(|line| line.contains(&path))
                .unwrap()
                .contains(" shared:")
        };
        assert!(is_shared(&place) && !is_shared(&seen), "{mounts}");
    }

    #[test]
    fn root_is_not_told_to_become_root() {
        assert!(after_mapping(Errno::PERM, true).contains("mapped already"));
        assert!(after_mapping(Errno::PERM, false).contains("as root"));
        assert!(after_mapping(Errno::INVAL, true).contains("ext4"));
        assert!(after_mapping(Errno::NOSYS, true).contains("Linux 5.14"));
    }
}
