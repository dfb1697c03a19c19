//! One cgroup (v2) a sandbox, all below one root: made, limited, watched, killed, removed.
//!
//! The root has no processes of its own, so that its controllers can be handed down ("no internal process" rule, Linux
//! `cgroup-v2.rst`). Everything is named by the root's and the sandbox's name alone: what exists is asked of the kernel,
//! and making or removing twice is as good as once. Does not know what runs in a cgroup.

mod file;
mod limits;
mod own;
mod usage;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::Error;
use file::Directory;

pub use limits::{IoLimit, Limits};
pub use own::step_down;
pub use usage::{IoUsage, MemoryUsage, Usage};

/// The controllers that limits need, in the kernel's words.
pub const CONTROLLERS: [&str; 4] = ["cpu", "memory", "pids", "io"];

/// How often a wait looks again by itself: a safety net, as the kernel tells of changes.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A controller that sandboxes cannot have, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// One of [`CONTROLLERS`].
    pub controller: &'static str,
    /// In words.
    pub reason: String,
}

/// The cgroup above all sandboxes of one node.
#[derive(Debug)]
pub struct Root {
    directory: Directory,
    missing: Vec<Missing>,
}

impl Root {
    /// Makes, or finds, the cgroup `instance` at the top of the hierarchy, and enables the controllers for its children.
    ///
    /// # Errors
    /// There is no cgroup v2, or no right to make cgroups. A controller that cannot be had is no error: see
    /// [`Root::missing`].
    pub fn open(instance: &str) -> Result<Self, Error> {
        Self::open_below(Path::new(""), instance)
    }

    /// The same below a cgroup that its manager has delegated (systemd's `Delegate=`): `parent` is its path from the top
    /// of the hierarchy, as in `/proc/PID/cgroup`. It must exist, and have no processes of its own.
    ///
    /// # Errors
    /// As [`Root::open`]; the parent is not there.
    pub fn open_below(parent: &Path, instance: &str) -> Result<Self, Error> {
        let below = parent.strip_prefix("/").unwrap_or(parent);
        let top = Directory::open(&mount_point()?.join(below))?;
        let directory = make(&top, instance)?;
        let mut missing = Vec::new();
        for controller in CONTROLLERS {
            let enable = |directory: &Directory| directory.write("cgroup.subtree_control", &format!("+{controller}"));
            if !top.lists("cgroup.controllers", controller)? {
                let reason = format!(
                    "it is not in {}/cgroup.controllers; is it compiled in, not used by a cgroup v1 mount, and delegated?",
                    top.path().display()
                );
                missing.push(Missing { controller, reason });
            } else if let Err(error) = enable(&top).and_then(|()| enable(&directory)) {
                let reason = match &error {
                    Error::Cgroup { path, cause, .. } => format!("{}: {cause}", path.display()),
                    other => other.to_string(),
                };
                missing.push(Missing { controller, reason });
            }
        }
        Ok(Self { directory, missing })
    }

    /// Controllers that limits cannot use on this host.
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Tells whether this host has the controllers that these limits need, and changes nothing.
    ///
    /// # Errors
    /// A limit needs a missing controller.
    pub fn check(&self, limits: &Limits) -> Result<(), Error> {
        limits.check(&self.directory, &self.missing)
    }

    /// Makes the cgroup of a sandbox and sets its limits; one that is there already gets the limits anew.
    ///
    /// # Errors
    /// The name is none, the kernel refuses, or a limit needs a missing controller (nothing is left behind then).
    pub fn create(&self, id: &str, limits: &Limits) -> Result<Cgroup, Error> {
        let existed = self.exists(id)?;
        let cgroup = Cgroup {
            directory: make(&self.directory, id)?,
            id: id.to_owned(),
        };
        if let Err(error) = limits.apply(&cgroup.directory, &self.missing) {
            if !existed {
                self.remove(id)?;
            }
            return Err(error);
        }
        Ok(cgroup)
    }

    /// Finds the cgroup of a sandbox; `None` when there is none.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn find(&self, id: &str) -> Result<Option<Cgroup>, Error> {
        check_name(id)?;
        Ok(self.directory.child(id)?.map(|directory| Cgroup {
            directory,
            id: id.to_owned(),
        }))
    }

    /// The names of the sandboxes that have a cgroup, as the kernel knows them; sorted.
    ///
    /// # Errors
    /// The root cannot be read.
    pub fn list(&self) -> Result<Vec<String>, Error> {
        self.directory.children()
    }

    /// Removes a sandbox's cgroup. It is fine if there is none.
    ///
    /// # Errors
    /// There are processes in it still ([`Cgroup::kill`] and [`Cgroup::wait_empty`] come first).
    pub fn remove(&self, id: &str) -> Result<(), Error> {
        check_name(id)?;
        let removed = self.directory.remove_child(id);
        let Err(error) = removed else { return Ok(()) };
        // One that is divided for threads has children, and these none.
        let Some(divided) = self.directory.child(id)? else {
            return Err(error);
        };
        for child in divided.children()? {
            divided.remove_child(&child)?;
        }
        self.directory.remove_child(id)
    }

    /// Removes the root itself, if no sandbox has a cgroup any more. It is fine if there is none.
    ///
    /// # Errors
    /// Something is in it.
    pub fn remove_root(self) -> Result<(), Error> {
        file::remove(self.directory.path())
    }

    fn exists(&self, id: &str) -> Result<bool, Error> {
        Ok(self.find(id)?.is_some())
    }
}

/// The cgroup of one sandbox.
#[derive(Debug)]
pub struct Cgroup {
    directory: Directory,
    id: String,
}

impl Cgroup {
    /// The sandbox's name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Changes the limits; `root` knows which controllers there are.
    ///
    /// # Errors
    /// The kernel refuses, or a limit needs a missing controller.
    pub fn set_limits(&self, root: &Root, limits: &Limits) -> Result<(), Error> {
        limits.apply(&self.directory, &root.missing)
    }

    /// Kills everything in it (`cgroup.kill`, Linux 5.14), new processes included. Does not wait.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kill(&self) -> Result<(), Error> {
        self.directory.write("cgroup.kill", "1")
    }

    /// Whether a process is in it.
    ///
    /// # Errors
    /// The cgroup is gone or cannot be read.
    pub fn populated(&self) -> Result<bool, Error> {
        self.directory.flag("cgroup.events", "populated")
    }

    /// Waits until no process is in it.
    ///
    /// # Errors
    /// [`Error::StillPopulated`] when that takes longer than `limit`.
    pub fn wait_empty(&self, limit: Duration) -> Result<(), Error> {
        if self.wait_event("populated", false, limit)? {
            return Ok(());
        }
        Err(Error::StillPopulated {
            path: self.path().to_owned(),
            processes: self.processes()?.len(),
            waited: limit,
        })
    }

    /// Stops all processes in it; tells whether they had all stopped within `limit`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn freeze(&self, limit: Duration) -> Result<bool, Error> {
        self.directory.write("cgroup.freeze", "1")?;
        self.wait_event("frozen", true, limit)
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn thaw(&self) -> Result<(), Error> {
        self.directory.write("cgroup.freeze", "0")
    }

    /// The processes in it, by their numbers in our pid namespace.
    ///
    /// # Errors
    /// The cgroup is gone or cannot be read.
    pub fn processes(&self) -> Result<Vec<u32>, Error> {
        let text = self.directory.read("cgroup.procs")?;
        let numbers = text.lines().map(|line| line.parse().map_err(|_| line));
        numbers
            .collect::<Result<_, _>>()
            .map_err(|line| self.directory.bad("cgroup.procs", line))
    }

    /// What it uses and has used.
    ///
    /// # Errors
    /// The cgroup is gone or cannot be read. What a missing controller would tell is `None` instead.
    pub fn usage(&self) -> Result<Usage, Error> {
        usage::read(&self.directory)
    }

    /// An open `cgroup.events`: poll it for `POLLPRI` to learn that [`Cgroup::populated`] may have changed.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn events(&self) -> Result<OwnedFd, Error> {
        self.directory.open_file("cgroup.events", OFlags::RDONLY)
    }

    /// Waits until `key` in `cgroup.events` has this value; `false` when `limit` was over first.
    fn wait_event(&self, key: &str, wanted: bool, limit: Duration) -> Result<bool, Error> {
        let deadline = Instant::now() + limit;
        // Opened before the first look: a change after it wakes the poll.
        let events = self.events()?;
        loop {
            if self.directory.flag_of(&events, "cgroup.events", key)? == wanted {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let left = left.min(LOOK_AGAIN);
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            match poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => (),
                Err(error) => return Err(self.directory.failed("polling", "cgroup.events", error)),
            }
        }
    }
}

impl AsFd for Cgroup {
    /// The directory, as `CLONE_INTO_CGROUP` takes it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

/// Where cgroup2 is mounted: the usual place, or else the first there is.
pub(crate) fn mount_point() -> Result<PathBuf, Error> {
    const PATH: &str = "/proc/self/mountinfo";
    let text = std::fs::read_to_string(PATH).map_err(|cause| Error::Cgroup {
        operation: "reading",
        path: PATH.into(),
        cause,
    })?;
    find_mount(&text).map(PathBuf::from).ok_or(Error::NoCgroup2)
}

/// The mount point is the fifth word of a line, the kind of file system the first after ` - ` (proc_pid_mountinfo(5)).
fn find_mount(mountinfo: &str) -> Option<&str> {
    let mut found = mountinfo.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        (kind.split(' ').next()? == "cgroup2").then_some(())?;
        mount.split(' ').nth(4)
    });
    found
        .clone()
        .find(|&path| path == "/sys/fs/cgroup")
        .or_else(|| found.next())
}

/// Checks that a name is one plain component of a path.
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let sound = (1..=200).contains(&name.len()) && name.bytes().all(plain) && !name.starts_with(['.', '-']);
    if sound {
        Ok(())
    } else {
        Err(Error::Name(name.to_owned()))
    }
}

fn make(parent: &Directory, name: &str) -> Result<Directory, Error> {
    check_name(name)?;
    match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => (),
        Err(error) => return Err(parent.failed("making", name, error)),
    }
    let gone = || parent.failed("opening", name, Errno::NOENT);
    parent.child(name)?.ok_or_else(gone)
}

/// The subdirectories of a cgroup: its children.
fn children(directory: &Directory) -> Result<Vec<String>, Error> {
    let failed = |error| directory.failed("listing", "", error);
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy();
        if entry.file_type() == FileType::Directory && name != "." && name != ".." {
            names.push(name.into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// rmdir below `parent`; it is fine if there is nothing.
fn remove_child(parent: &Directory, name: &str) -> Result<(), Error> {
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(parent.failed("removing", name, error)),
    }
}

#[cfg(test)]
mod tests;
