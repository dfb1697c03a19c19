//! One cgroup (version 2) per command, so that all it started can be found and killed, wherever it went. The one above them
//! bounds how many processes they have together; nothing else is limited here.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::freezer::Freezer;

/// `CGROUP2_SUPER_MAGIC`, linux/magic.h.
const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// How often it is looked whether killed processes are gone.
const CLEAR_STEP: Duration = Duration::from_millis(5);

/// The directory below which commands get their cgroups.
#[derive(Debug)]
pub struct Cgroups {
    base: PathBuf,
    state: Mutex<State>,
    freezer: Freezer,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Those whose command has ended while something it started went on.
    leftover: Vec<PathBuf>,
}

impl Cgroups {
    /// Uses `<mount>/basalt`; `mount` must be a cgroup2 file system.
    pub fn at(mount: &Path) -> Result<Self, Error> {
        let kind = rustix::fs::statfs(mount)
            .map_err(Error::system(format!("looking at {}", mount.display())))?
            .f_type;
        if u64::try_from(kind).ok() != Some(CGROUP2_MAGIC) {
            return Err(Error::Refused(format!(
                "{} is not a cgroup2 file system",
                mount.display()
            )));
        }
        let base = mount.join("basalt");
        make_dir(&base)?;
        Ok(Self {
            freezer: Freezer::new(mount, &base),
            base,
            state: Mutex::default(),
        })
    }

    /// What lets everything stand still.
    pub(crate) fn freezer(&self) -> &Freezer {
        &self.freezer
    }

    /// Bounds the processes and threads of all commands together (`pids.max`).
    pub(crate) fn limit_processes(&self, most: u64) -> Result<(), Error> {
        let write = |path: PathBuf, text: &str| {
            fs::write(&path, text).map_err(Error::system(format!(
                "limiting processes to {most} by writing {}",
                path.display()
            )))
        };
        // The root of the hierarchy may have processes of its own and hand controllers down.
        if let Some(mount) = self.base.parent() {
            write(mount.join("cgroup.subtree_control"), "+pids")?;
        }
        write(self.base.join("pids.max"), &most.to_string())
    }

    /// A new, empty cgroup.
    pub(crate) fn create(&self) -> Result<Cgroup<'_>, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state
            .leftover
            .retain(|path| fs::remove_dir(path).is_err_and(|error| error.kind() != ErrorKind::NotFound));
        loop {
            state.next += 1;
            let path = self.base.join(state.next.to_string());
            // A directory from an earlier agent is not ours to use.
            match fs::create_dir(&path) {
                Ok(()) => {
                    return Ok(Cgroup {
                        owner: self,
                        path,
                        made: Instant::now(),
                    });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::system(format!("making {}", path.display()))(error)),
            }
        }
    }
}

fn make_dir(path: &Path) -> Result<(), Error> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(Error::system(format!("making {}", path.display()))(error))
        }
        _ => Ok(()),
    }
}

/// A command's cgroup. Dropping removes it, now or when what is left in it has ended.
#[derive(Debug)]
pub(crate) struct Cgroup<'a> {
    owner: &'a Cgroups,
    path: PathBuf,
    made: Instant,
}

impl Cgroup<'_> {
    /// A connection that is lost now is lost by a restore, not by its client (see [`Freezer::spares`]).
    pub(crate) fn spares(&self) -> bool {
        self.owner.freezer.spares(self.made)
    }

    /// A process that writes `0` here enters.
    pub(crate) fn entrance(&self) -> Result<OwnedFd, Error> {
        let path = self.path.join("cgroup.procs");
        let file = OpenOptions::new().write(true).open(&path);
        Ok(file
            .map_err(Error::system(format!("opening {}", path.display())))?
            .into())
    }

    /// Waits until all that was killed is gone, and removes the cgroup; what is left then stays for later.
    pub(crate) fn clear(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while fs::remove_dir(&self.path).is_err_and(|error| error.kind() == ErrorKind::ResourceBusy)
            && Instant::now() < end
        {
            thread::sleep(CLEAR_STEP);
        }
    }

    /// Kills everything inside.
    pub(crate) fn kill(&self) -> Result<(), Error> {
        let path = self.path.join("cgroup.kill");
        let written = File::options()
            .write(true)
            .open(&path)
            .and_then(|mut file| file.write_all(b"1"));
        written.map_err(Error::system(format!("writing {}", path.display())))
    }
}

impl Drop for Cgroup<'_> {
    fn drop(&mut self) {
        if fs::remove_dir(&self.path).is_err_and(|error| error.kind() != ErrorKind::NotFound) {
            let mut state = self.owner.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.leftover.push(std::mem::take(&mut self.path));
        }
    }
}
