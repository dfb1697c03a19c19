//! A root with what one program needs, for a process that cannot do with an empty one: parts of the host's file system
//! that can be read alone, device files, mounts that its parent has made, and room to write that is bounded. Everything
//! else of the host's is gone. Does not know what the program does with it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MoveMountFlags, OpenTreeFlags};

use super::change_root;
use crate::Error;
use crate::mount_attributes::{
    self, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY, MountAttr,
};

/// The room to write, which is memory and is gone with the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Its directory.
    pub at: PathBuf,
    /// The most bytes that it takes.
    pub bytes: u64,
}

/// A file or directory for each so many bytes of [`Scratch`], as each takes memory that is no part of its bytes.
const BYTES_PER_FILE: u64 = 4096;

/// The options of the root itself, which holds nothing but directories, links and the places of files.
const ROOT_OPTIONS: &str = "size=1m,nr_inodes=1024,mode=0755";

/// What has no state that anybody else could see.
const DEVICES: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/urandom"];

#[derive(Debug)]
enum Kind {
    /// Part of the system: a link stays the link that it is, and what the host does not have is left out.
    System,
    ReadOnly,
    Device,
    /// A mount that is nowhere.
    Mount(OwnedFd),
}

#[derive(Debug)]
struct Entry {
    at: PathBuf,
    kind: Kind,
}

/// What is to be in the root. Each path is where it was.
#[derive(Debug)]
pub struct Root {
    entries: Vec<Entry>,
    scratch: Scratch,
}

/// What an entry became, before there is a root to put it into.
enum Found {
    Link(PathBuf),
    Mount { mount: OwnedFd, directory: bool },
}

impl Root {
    /// Nothing but room to write, and the devices that every program may count on.
    pub fn new(scratch: Scratch) -> Self {
        let root = Self {
            entries: Vec::new(),
            scratch,
        };
        DEVICES.iter().fold(root, Self::device)
    }

    /// Parts of the system that can be read and executed. What is a link of the host's is the same link here, and what the
    /// host does not have is left out.
    #[must_use]
    pub fn system(self, paths: &[&str]) -> Self {
        paths.iter().fold(self, |root, path| root.with(path, Kind::System))
    }

    /// A file or directory that can be read and executed, with what is mounted beneath it; sockets in it can be connected
    /// to.
    #[must_use]
    pub fn read_only(self, path: impl AsRef<Path>) -> Self {
        self.with(path, Kind::ReadOnly)
    }

    /// A file of a device.
    #[must_use]
    pub fn device(self, path: impl AsRef<Path>) -> Self {
        self.with(path, Kind::Device)
    }

    /// A mount that is nowhere ([`crate::share::read_only`]), for a directory to which this process has no way.
    #[must_use]
    pub fn mount(self, mount: OwnedFd, at: impl AsRef<Path>) -> Self {
        self.with(at, Kind::Mount(mount))
    }

    fn with(mut self, at: impl AsRef<Path>, kind: Kind) -> Self {
        let at = at.as_ref().to_owned();
        self.entries.push(Entry { at, kind });
        self
    }

    /// Makes it this process's root, and lets go of every other mount.
    pub(super) fn enter(self) -> Result<Scratch, Error> {
        let found: Vec<(PathBuf, Found, bool)> = self
            .entries
            .into_iter()
            .filter_map(|entry| {
                let keeps_what_is_there = matches!(entry.kind, Kind::System | Kind::ReadOnly);
                let found = find(&entry.at, entry.kind).transpose()?;
                Some(found.map(|found| (entry.at, found, keeps_what_is_there)))
            })
            .collect::<Result<_, _>>()?;
        change_root(
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
            ROOT_OPTIONS,
        )?;
        self.scratch.mount()?;
        for (at, found, keeps_what_is_there) in &found {
            // A part of what is there already, such as a library of /usr, which may be /lib by another name.
            if !(*keeps_what_is_there && at.exists()) {
                place(at, found).map_err(failed("putting it into the new root", at))?;
            }
        }
        let attr = MountAttr {
            attr_set: MOUNT_ATTR_RDONLY,
            ..MountAttr::default()
        };
        open("/")
            .and_then(|root| mount_attributes::set(root.as_fd(), &attr, false))
            .map_err(|error| failed("making the new root read-only", "/".as_ref())(error.into()))?;
        Ok(self.scratch)
    }
}

impl Scratch {
    fn mount(&self) -> Result<(), Error> {
        let step = failed("mounting room to write", &self.at);
        let options = format!(
            "size={},nr_inodes={},mode=0700",
            self.bytes,
            (self.bytes / BYTES_PER_FILE).max(1)
        );
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        let options = std::ffi::CString::new(options).map_err(|error| step(io::Error::other(error)))?;
        fs::create_dir_all(&self.at).map_err(&step)?;
        rustix::mount::mount("basalt", &self.at, "tmpfs", flags, options.as_c_str()).map_err(|error| step(error.into()))
    }
}

/// A descriptor that stands for a path and can do nothing else.
pub(super) fn open(path: impl AsRef<Path>) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path.as_ref(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

fn failed(step: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    move |cause| Error::Root {
        step,
        path: path.to_owned(),
        cause,
    }
}

/// A mount of what is there, which is nowhere yet. `None` for a part of the system that the host does not have.
fn find(at: &Path, kind: Kind) -> Result<Option<Found>, Error> {
    let step = failed("taking it over", at);
    if matches!(kind, Kind::System) {
        match fs::symlink_metadata(at) {
            Ok(metadata) if metadata.is_symlink() => {
                return fs::read_link(at).map(|target| Some(Found::Link(target))).map_err(step);
            }
            Ok(_) => (),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(step(error)),
        }
    }
    let more = match kind {
        Kind::System | Kind::ReadOnly => MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV,
        Kind::Device => MOUNT_ATTR_NOEXEC,
        Kind::Mount(_) => MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC,
    };
    let device = matches!(kind, Kind::Device);
    let restricting = match kind {
        Kind::Mount(_) => "restricting a mount that was given, and has to be in no file system tree (open_tree(2)),",
        _ => "restricting its mount",
    };
    let mount = match kind {
        Kind::Mount(mount) => mount,
        _ => {
            // With all beneath, as the parts of a mount that came from another user namespace cannot be taken alone.
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
            rustix::mount::open_tree(CWD, at, flags).map_err(|error| step(error.into()))?
        }
    };
    let attr = MountAttr {
        attr_set: MOUNT_ATTR_NOSUID | more,
        // What is mounted there later is none of ours.
        propagation: libc::MS_PRIVATE,
        ..MountAttr::default()
    };
    mount_attributes::set(mount.as_fd(), &attr, true).map_err(|error| failed(restricting, at)(error.into()))?;
    let stat = rustix::fs::fstat(&mount).map_err(|error| step(error.into()))?;
    let file = FileType::from_raw_mode(stat.st_mode);
    if device && file != FileType::CharacterDevice {
        return Err(step(io::Error::other(
            "it is no character device: name one beneath /dev",
        )));
    }
    let directory = file == FileType::Directory;
    Ok(Some(Found::Mount { mount, directory }))
}

/// Puts it into the new root, which this process is in.
fn place(at: &Path, found: &Found) -> io::Result<()> {
    if let Some(parent) = at.parent() {
        fs::create_dir_all(parent)?;
    }
    match found {
        Found::Link(target) => std::os::unix::fs::symlink(target, at),
        Found::Mount { mount, directory } => {
            match (directory, at.exists()) {
                (_, true) => (),
                (true, false) => fs::create_dir(at)?,
                (false, false) => drop(File::create_new(at)?),
            }
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            Ok(rustix::mount::move_mount(mount, c"", CWD, at, flags)?)
        }
    }
}
