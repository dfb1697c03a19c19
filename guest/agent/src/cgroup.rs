//! One cgroup (version 2) per command, so that all it started can be found and killed, wherever it went. The one above them
//! bounds how many processes they have together, where that is asked for; otherwise each has a bound of its own. Each has its share of the
//! processors: one that is full of processes leaves the others theirs.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::freezer::Freezer;
use crate::{Error, say};

/// `CGROUP2_SUPER_MAGIC`, linux/magic.h.
const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// A command may have one process or thread for so many bytes of the machine's memory, within these numbers: as many small processes fit.
const BYTES_EACH: u64 = 512 << 10;
const FEWEST: u64 = 256;
const MOST: u64 = 16_384;

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
    /// The most processes and threads of each command.
    each: Option<u64>,
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
        write(self.base.join("pids.max"), &most.to_string())?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.each.take().is_some() {
            for command in fs::read_dir(&self.base).into_iter().flatten().flatten() {
                let own = command.path().join("pids.max");
                if own.exists() {
                    write(own, "max")?;
                }
            }
        }
        Ok(())
    }

    /// Gives each command that is started from here on a share of the processors as large as any other's, and, if `bounded`, processes
    /// and threads for a part of the machine's memory (`pids.max`): a fork bomb leaves room for other commands.
    fn set_apart(&self, bounded: bool) -> Result<(), Error> {
        for path in self.base.parent().into_iter().chain([self.base.as_path()]) {
            let path = path.join("cgroup.subtree_control");
            let failed = || format!("giving commands controllers by writing {}", path.display());
            fs::write(&path, "+cpu +pids").map_err(|error| Error::system(failed())(error))?;
        }
        if bounded {
            let info = rustix::system::sysinfo();
            let memory = info.totalram.saturating_mul(u64::from(info.mem_unit));
            self.state.lock().unwrap_or_else(PoisonError::into_inner).each = Some(most_processes(memory));
        }
        Ok(())
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
                    if let Some(most) = state.each {
                        let limit = path.join("pids.max");
                        let failed = || format!("limiting a command's processes by writing {}", limit.display());
                        fs::write(&limit, most.to_string()).map_err(|error| Error::system(failed())(error))?;
                    }
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

/// Before the first command of a machine: keeps commands apart, and bounds the processes of all together if that is asked for.
pub(crate) fn prepare(cgroups: Option<&Cgroups>, most: Option<u64>) -> Result<(), Error> {
    const NONE: &str = "this agent has no cgroups to limit processes by";
    let Some(cgroups) = cgroups else {
        return most.map_or(Ok(()), |_| Err(Error::Refused(NONE.to_owned())));
    };
    if let Err(error) = cgroups.set_apart(most.is_none()) {
        // A kernel without these controllers still runs commands.
        say(format_args!(
            "commands may take one another's processors and processes: {error}"
        ));
    }
    most.map_or(Ok(()), |most| cgroups.limit_processes(most))
}

/// The most processes and threads of a command that has no other limit, in a machine with so much memory.
fn most_processes(memory: u64) -> u64 {
    (memory / BYTES_EACH).clamp(FEWEST, MOST)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_processes_for_a_part_of_the_memory() {
        for (memory, most) in [
            (0, 256),
            (64 << 20, 256),
            (512 << 20, 1024),
            (4 << 30, 8192),
            (1 << 40, 16_384),
        ] {
            assert_eq!(most_processes(memory), most);
        }
    }
}
