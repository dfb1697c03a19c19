//! Room on the file system of the state directory: what a creation needs is asked for before anything is made, and a reserve lets
//! records be written when nothing else can be. Knows no sandbox.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use base::{ByteSize, space};
use rustix::fs::{FallocateFlags, fallocate};

use crate::Error;
use crate::error::space::{Lacking, is_full};

/// What the reserve takes: SQLite's log of changes grows to 4 MiB before it is written back, and records are small.
pub(crate) const RESERVE: ByteSize = ByteSize::mib(16);

/// A guest that was stopped goes on when there is so much room beside the reserve, and the reserve is made when as much stays.
pub(crate) const LEAST: ByteSize = ByteSize::mib(16);

/// What a sandbox takes besides its disk: record, logs, sockets, the first blocks that its guest writes.
pub(crate) const OF_A_SANDBOX: ByteSize = ByteSize::mib(16);

/// Bytes a second that the slowest disk takes, or gives.
const SLOWEST: u64 = 32 << 20;

/// How long the slowest disk takes for so many bytes.
pub(crate) fn time_for(bytes: u64) -> Duration {
    Duration::from_secs(bytes / SLOWEST)
}

/// Refuses what would not fit into the file system of `path`, before anything is made. `what` is to be made, as in "a snapshot".
pub(crate) fn require(path: &Path, needed: ByteSize, what: &'static str) -> Result<(), Error> {
    let free = space::available(path).map_err(Error::file("look for free space in", path))?;
    if free >= needed.bytes() {
        return Ok(());
    }
    Err(Lacking::Before {
        what,
        needed,
        free: ByteSize(free),
        path: path.to_owned(),
    }
    .into())
}

/// A file that holds room for records, and is removed when they cannot be written otherwise.
#[derive(Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    /// This file system cannot hold room: nobody is to try again.
    hopeless: AtomicBool,
}

impl Reserve {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self {
            path,
            hopeless: AtomicBool::new(false),
        }
    }

    pub(crate) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// Makes it where it is missing and the file system has plenty of room; false if that is to be tried again.
    pub(crate) fn keep(&self) -> bool {
        if self.exists() || self.hopeless.load(Ordering::Relaxed) {
            return true;
        }
        let directory = self.path.parent().unwrap_or(&self.path);
        let room = space::available(directory).unwrap_or(0);
        if room < RESERVE.bytes() + LEAST.bytes() {
            return false;
        }
        let Err(error) = self.make() else {
            return true;
        };
        // Somebody may have taken the room just now.
        let hopeless = !is_full(&error);
        log::warn!(
            "no room is held for the node's records in {}: {error}",
            self.path.display()
        );
        self.remove();
        self.hopeless.store(hopeless, Ordering::Relaxed);
        hopeless
    }

    fn make(&self) -> io::Result<()> {
        let mut options = File::options();
        let file = options.write(true).create_new(true).mode(0o600).open(&self.path)?;
        Ok(fallocate(&file, FallocateFlags::empty(), 0, RESERVE.bytes())?)
    }

    /// Removes it, so that what could not be written can be; false if it was not there.
    pub(crate) fn give_back(&self) -> bool {
        let removed = self.remove();
        if removed {
            log::warn!(
                "no space left in {}: {RESERVE} that were held for the node's records are used now; remove what is not needed \
                 (`basalt prune`, `basalt system df`)",
                self.path.display()
            );
        }
        removed
    }

    fn remove(&self) -> bool {
        match fs::remove_file(&self.path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => {
                log::error!("{} cannot be removed: {error}", self.path.display());
                false
            }
        }
    }
}

/// The state directory as the node has it: nobody else's, and with some room held.
#[derive(Debug)]
pub(crate) struct Hold {
    /// Released when dropped.
    #[cfg_attr(not(test), expect(dead_code, reason = "held, not read"))]
    lock: File,
    pub(crate) reserve: Reserve,
    pub(crate) lack: Lack,
}

impl Hold {
    pub(crate) fn new(lock: File, reserve: Reserve) -> Self {
        Self {
            lock,
            reserve,
            lack: Lack::default(),
        }
    }

    /// Writes a record, with the reserve's room where there is no other.
    pub(crate) fn with_room<T>(&self, write: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        match write() {
            Err(error) if error.is_no_space() => {
                self.lack.tell();
                match self.reserve.give_back() {
                    true => write(),
                    false => Err(error),
                }
            }
            other => other,
        }
    }

    /// Releases it now.
    #[cfg(test)]
    pub(crate) fn let_go(&self) {
        self.lock.unlock().unwrap();
    }
}

/// Wakes whoever looks after what lacks space.
#[derive(Debug, Default)]
pub(crate) struct Lack {
    told: Mutex<bool>,
    changed: Condvar,
}

impl Lack {
    /// Something lacks space from now on.
    pub(crate) fn tell(&self) {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits until something does.
    pub(crate) fn wait(&self) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        while !std::mem::take(&mut *told) {
            told = self.changed.wait(told).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::SmallDisk;

    #[test]
    fn what_does_not_fit_is_refused_with_the_figures_and_the_next_step() {
        let directory = tempfile::tempdir().unwrap();
        require(directory.path(), ByteSize(1), "a sandbox").unwrap();
        let error = require(directory.path(), ByteSize(u64::MAX), "a sandbox").unwrap_err();
        let (text, path) = (error.to_string(), directory.path().display().to_string());
        for part in ["no space left for a sandbox", "needed", "free", "`basalt prune`", &path] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_reserve_lets_something_be_written_once() {
        let disk = SmallDisk::of(ByteSize::mib(40));
        let reserve = Reserve::new(disk.path().join("reserve"));
        assert!(reserve.keep() && reserve.keep());
        assert_eq!(crate::saved::disk::taken(&disk.path().join("reserve")), RESERVE);
        disk.fill();
        let record = disk.path().join("record");
        assert!(fs::write(&record, vec![7; 1 << 20]).is_err(), "there is room");
        assert!(reserve.give_back());
        fs::write(&record, vec![7; 1 << 20]).unwrap();
        assert!(!reserve.give_back() && !reserve.keep(), "there is no room for another");
        disk.empty();
        assert!(reserve.keep());
    }
}
