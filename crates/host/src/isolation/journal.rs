//! Who has which CPU, and what the kernel's files said before. One for the host, whichever daemon writes it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use base::CpuSet;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::{Error, Owner};

const LOCK: &str = "lock";

/// A thread that may run on some CPUs only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Bound {
    /// When it began, in ticks since the boot: numbers come again.
    pub(super) start: u64,
    pub(super) cpus: CpuSet,
}

/// Who has which CPU, and what the kernel's files said before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Journal {
    /// Isolated by an operator, whoever owns them now.
    pub(super) pool: CpuSet,
    pub(super) dedicated: BTreeMap<u32, Owner>,
    /// Sandboxes' ids.
    #[serde(rename = "claimed")]
    pub(super) reserved: BTreeMap<u32, String>,
    /// What files said, by their paths.
    pub(super) files: BTreeMap<PathBuf, String>,
    /// Cgroups whose children have cpusets since then, from the top on.
    pub(super) enabled: Vec<PathBuf>,
    /// What threads of the root cgroup are kept off; several where a change has not come to its end.
    pub(super) applied: Vec<CpuSet>,
    /// CPUs that were reserved when those were.
    pub(super) missed: CpuSet,
    /// Timers were taken away from these.
    pub(super) emptied: CpuSet,
    /// This one is on its way offline and online again for that.
    pub(super) emptying: Option<u32>,
    /// Those threads that are bound otherwise, by their numbers.
    pub(super) tasks: BTreeMap<u32, Bound>,
}

impl Journal {
    /// Nothing is anybody's.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What everything else is to be kept off.
    pub(super) fn isolated(&self) -> CpuSet {
        self.pool.or(&self.dedicated.keys().copied().collect())
    }

    pub(super) fn owned(&self) -> CpuSet {
        self.dedicated.keys().chain(self.reserved.keys()).copied().collect()
    }

    /// The sandbox that owns a CPU.
    pub(super) fn owner(&self, cpu: u32) -> Option<&str> {
        let dedicated = self.dedicated.get(&cpu).map(|owner| &owner.sandbox);
        dedicated.or(self.reserved.get(&cpu)).map(String::as_str)
    }

    pub(super) fn owner_among(&self, cpus: &CpuSet) -> Option<(u32, &str)> {
        cpus.iter().find_map(|cpu| Some((cpu, self.owner(cpu)?)))
    }

    pub(super) fn forget(&mut self, sandbox: &str) {
        self.dedicated.retain(|_, owner| owner.sandbox != sandbox);
        self.reserved.retain(|_, owner| owner != sandbox);
    }

    /// Nothing of the host is as it is because of this.
    pub(super) fn is_without_effect(&self) -> bool {
        let owners = Self {
            reserved: self.reserved.clone(),
            ..Self::default()
        };
        *self == owners
    }

    /// Forgets the sandboxes that are gone, and tells where they were; nothing where all are there. A reserved CPU that is online has been
    /// given back.
    pub(super) fn drop_stale(&mut self, online: &CpuSet) -> Option<Vec<PathBuf>> {
        let (all, reserved) = (self.dedicated.len(), self.reserved.len());
        let gone = self.dedicated.values().filter(|owner| !owner.is_there());
        let mut gone: Vec<_> = gone.map(|owner| owner.cgroup.clone()).collect();
        gone.dedup();
        self.dedicated.retain(|_, owner| !gone.contains(&owner.cgroup));
        self.reserved.retain(|cpu, _| !online.contains(*cpu));
        (all != self.dedicated.len() || reserved != self.reserved.len()).then_some(gone)
    }
}

pub(super) fn path(directory: &Path) -> PathBuf {
    directory.join("journal.json")
}

/// As it is now; nothing where there is none.
pub(super) fn read(directory: &Path) -> Result<Journal, Error> {
    let path = path(directory);
    let text = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Journal::default()),
        read => read.map_err(Error::file("read", &path))?,
    };
    serde_json::from_slice(&text).map_err(|error| Error::Format {
        path,
        why: format!("{error}; remove it when no sandbox owns CPUs, or start the host again"),
    })
}

/// The journal, with everybody else locked out.
#[derive(Debug)]
pub(super) struct Locked {
    pub(super) journal: Journal,
    path: PathBuf,
    /// Released when closed.
    _lock: File,
}

impl Locked {
    pub(super) fn open(directory: &Path) -> Result<Self, Error> {
        let path = directory.join(LOCK);
        let lock = loop {
            match fs::create_dir_all(directory) {
                // It has gone while it was looked for.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made.map_err(Error::file("make", directory))?,
            }
            let lock = match File::create(&path) {
                // Whoever had it last has taken it away.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                made => made.map_err(Error::file("make", &path))?,
            };
            rustix::fs::flock(&lock, FlockOperation::LockExclusive)
                .map_err(|error| Error::file("lock", &path)(error.into()))?;
            if is_there(&lock, &path)? {
                break lock;
            }
        };
        Ok(Self {
            journal: read(directory)?,
            path: self::path(directory),
            _lock: lock,
        })
    }

    /// As one step, so that whoever dies leaves the one or the other.
    pub(super) fn store(&self) -> Result<(), Error> {
        let text = serde_json::to_vec(&self.journal).map_err(|error| Error::Format {
            path: self.path.clone(),
            why: error.to_string(),
        })?;
        let new = self.path.with_extension("new");
        fs::write(&new, text).map_err(Error::file("write", &new))?;
        fs::rename(&new, &self.path).map_err(Error::file("rename", &new))
    }

    /// The lock goes too, which whoever waits for it finds out.
    fn remove(&self) -> Result<(), Error> {
        let Some(directory) = self.path.parent() else {
            return Ok(());
        };
        for path in [self.path.clone(), directory.join(LOCK)] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => (),
                removed => removed.map_err(Error::file("remove", &path))?,
            }
        }
        match fs::remove_dir(directory) {
            // The next one is there already.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => Ok(()),
            removed => removed.map_err(Error::file("remove", directory)),
        }
    }
}

impl Drop for Locked {
    /// Nothing is left of a journal in which nothing is anybody's.
    fn drop(&mut self) {
        if self.journal.is_empty()
            && let Err(error) = self.remove()
        {
            log::warn!("an empty journal of isolated CPUs stays: {error:?}");
        }
    }
}

/// Whether a file is still the one of its name.
fn is_there(file: &File, path: &Path) -> Result<bool, Error> {
    let own = file.metadata().map_err(Error::file("look at", path))?;
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        found => {
            let found = found.map_err(Error::file("look at", path))?;
            Ok((found.dev(), found.ino()) == (own.dev(), own.ino()))
        }
    }
}
