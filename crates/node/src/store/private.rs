//! Closes the state directory to other users: what is below it is for the daemon's user alone, whatever the modes were
//! that an earlier version, or somebody's umask, has given it.
//!
//! New files need none of this: the daemon's umask is 077. Knows only the names that [`super::paths`] lists: a state
//! directory may lie in one that has other files, which are not ours to change. What is inside a named volume keeps the
//! modes that guests have given it; the directory around it is closed. No symbolic link is followed.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use super::paths::{Paths, TENANT_VOLUMES};

/// The bits that other users have of a mode.
const OTHERS: u32 = 0o077;

/// The state directory's mode where a group may reach the socket in it: its members can pass through, and list nothing.
const REACHED_BY_GROUP: u32 = 0o710;

/// Where the directories of named volumes are, each with its files in a directory below that is not entered.
const VOLUMES: &str = "volumes";

/// What is ours in the state directory, but for the socket, whose mode says who may ask. A database has files beside it.
const NAMES: [&str; 14] = [
    "lock",
    "reserve",
    node_api::recovery::QUARANTINE,
    node_api::recovery::REPORT,
    node_api::METRICS_SOCKET,
    "basaltd.log",
    "images",
    "disks",
    VOLUMES,
    TENANT_VOLUMES,
    "snapshots",
    "templates",
    "sandboxes",
    "run",
];
const DATABASE: &str = "node.db";

/// How deep it is looked. What lies deeper is behind directories that are closed.
const DEPTH: usize = 8;

/// What was open to others and is closed now.
#[derive(Debug, Default)]
pub(crate) struct Closed {
    /// How many files and directories.
    pub(crate) count: usize,
    /// The first that could not be closed, and why.
    pub(crate) failed: Option<(String, io::Error)>,
}

/// Whatever this process makes from now on is for its user alone, unless it says otherwise.
pub fn keep_private() {
    rustix::process::umask(Mode::from_raw_mode(OTHERS));
}

/// Makes the state directory if there is none, and closes it and what is in it. Members of `group` may pass through it, to
/// its socket.
pub(crate) fn close(paths: &Paths, group: Option<u32>) -> io::Result<Closed> {
    let state = paths.state();
    fs::DirBuilder::new().recursive(true).mode(0o700).create(state)?;
    let mut closed = Closed::default();
    match close_state(state, group) {
        Ok(true) => closed.count += 1,
        Ok(false) => (),
        Err(error) => closed.failed = Some((state.display().to_string(), error)),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = openat(CWD, state, flags, Mode::empty())?;
    for name in names(directory.as_fd())? {
        if is_ours(&name) {
            let inside = match name.to_bytes() {
                name if name == VOLUMES.as_bytes() => 1,
                // What is below is behind this, and file systems of guests are mounted there.
                name if name == TENANT_VOLUMES.as_bytes() => 0,
                _ => DEPTH,
            };
            close_entry(directory.as_fd(), &name, inside, &mut closed);
        }
    }
    Ok(closed)
}

/// Whether the state directory itself was more open than it is to be.
fn close_state(state: &Path, group: Option<u32>) -> io::Result<bool> {
    let metadata = fs::metadata(state)?;
    if metadata.mode() & 0o1000 != 0 {
        return Err(io::Error::other(
            "everybody can write there, as in /tmp: give Basalt a directory of its own",
        ));
    }
    let before = metadata.mode() & 0o7777;
    let wanted = match group {
        Some(group) => {
            if metadata.gid() != group {
                std::os::unix::fs::chown(state, None, Some(group))?;
            }
            REACHED_BY_GROUP
        }
        None => before & !OTHERS,
    };
    if before != wanted {
        fs::set_permissions(state, fs::Permissions::from_mode(wanted))?;
    }
    Ok(before & OTHERS & !wanted != 0)
}

fn is_ours(name: &CStr) -> bool {
    let name = name.to_bytes();
    NAMES.iter().any(|ours| name == ours.as_bytes()) || name.starts_with(DATABASE.as_bytes())
}

/// Closes one entry of `parent`, and what is in it, so many levels down.
fn close_entry(parent: BorrowedFd<'_>, name: &CStr, inside: usize, closed: &mut Closed) {
    if let Err(error) = try_close_entry(parent, name, inside, closed)
        // It has gone meanwhile.
        && error.kind() != io::ErrorKind::NotFound
    {
        closed
            .failed
            .get_or_insert((name.to_string_lossy().into_owned(), error));
    }
}

fn try_close_entry(parent: BorrowedFd<'_>, name: &CStr, inside: usize, closed: &mut Closed) -> io::Result<()> {
    let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind == FileType::Symlink {
        return Ok(());
    }
    if stat.st_mode & OTHERS != 0 && close_one(parent, name)? {
        closed.count += 1;
    }
    if kind == FileType::Directory && inside > 0 {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(parent, name, flags, Mode::empty())?;
        for name in names(directory.as_fd())? {
            close_entry(directory.as_fd(), &name, inside - 1, closed);
        }
    }
    Ok(())
}

/// Takes away what others have; false if it is a symbolic link by now.
fn close_one(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
    // A socket can be opened in no other way, and by this descriptor the mode of what was looked at is changed.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let entry: OwnedFd = openat(parent, name, flags, Mode::empty())?;
    let mode = rustix::fs::fstat(&entry)?.st_mode;
    if FileType::from_raw_mode(mode) == FileType::Symlink {
        return Ok(false);
    }
    let path = format!("/proc/self/fd/{}", entry.as_raw_fd());
    fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777 & !OTHERS))?;
    Ok(true)
}

fn names(directory: BorrowedFd<'_>) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name);
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    fn open(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// A state directory as an earlier version has left it.
    fn older(state: &Path) {
        for directory in [
            "sandboxes/aaaaaaaaaaaa",
            "run/aaaaaaaaaaaa",
            "images/blobs",
            "volumes/v/_data/sub",
            "others",
        ] {
            fs::create_dir_all(state.join(directory)).unwrap();
        }
        for directory in [
            "",
            "sandboxes",
            "sandboxes/aaaaaaaaaaaa",
            "run",
            "run/aaaaaaaaaaaa",
            "images",
            "images/blobs",
            "volumes",
            "volumes/v",
        ] {
            open(&state.join(directory), 0o755);
        }
        for file in [
            "node.db",
            "node.db-wal",
            "basaltd.log",
            "sandboxes/aaaaaaaaaaaa/disk",
            "volumes/v/_data/sub/f",
            "others/f",
        ] {
            fs::write(state.join(file), "x").unwrap();
            open(&state.join(file), 0o644);
        }
        open(&state.join("volumes/v/_data"), 0o1777);
        for socket in ["run/aaaaaaaaaaaa/control", "basaltd.sock"] {
            drop(UnixListener::bind(state.join(socket)).unwrap());
            open(&state.join(socket), 0o777);
        }
    }

    #[test]
    fn what_was_open_is_closed_and_volumes_and_what_is_not_ours_stay() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        older(&state);
        let outside = directory.path().join("outside");
        fs::write(&outside, "x").unwrap();
        open(&outside, 0o644);
        std::os::unix::fs::symlink(&outside, state.join("sandboxes/aaaaaaaaaaaa/log")).unwrap();
        std::os::unix::fs::symlink(directory.path(), state.join("sandboxes/link")).unwrap();
        let kept = [
            "others",
            "others/f",
            "basaltd.sock",
            "volumes/v/_data",
            "volumes/v/_data/sub/f",
        ]
        .map(|it| state.join(it));
        let before = kept.each_ref().map(|path| mode(path));

        let paths = Paths::new(state.clone());
        let closed = close(&paths, None).unwrap();
        assert!(closed.failed.is_none(), "{closed:?}");
        for ours in [
            "",
            "node.db",
            "node.db-wal",
            "basaltd.log",
            "sandboxes",
            "sandboxes/aaaaaaaaaaaa/disk",
            "run/aaaaaaaaaaaa/control",
            "images/blobs",
            "volumes",
            "volumes/v",
        ] {
            assert_eq!(mode(&state.join(ours)) & OTHERS, 0, "{ours}");
        }
        assert_eq!(kept.each_ref().map(|path| mode(path)), before);
        assert_eq!(mode(&outside), 0o644);
        // Nine directories, four files and a socket.
        assert_eq!(closed.count, 14);
        assert_eq!(close(&paths, None).unwrap().count, 0);
    }

    #[test]
    fn a_group_passes_through_and_lists_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let paths = Paths::new(directory.path().join("state"));
        let group = fs::metadata(directory.path()).unwrap().gid();
        assert_eq!(close(&paths, Some(group)).unwrap().count, 0);
        assert_eq!(mode(paths.state()), 0o710);
        // Whoever takes the group away closes it.
        assert_eq!(close(&paths, None).unwrap().count, 1);
        assert_eq!(mode(paths.state()), 0o700);
    }

    #[test]
    fn a_directory_that_is_everybodys_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        open(directory.path(), 0o1777);
        let closed = close(&Paths::new(directory.path().to_owned()), None).unwrap();
        assert!(closed.failed.is_some() && mode(directory.path()) == 0o1777);
    }
}
