//! The memory files of a snapshot, a template or a sandbox: how they are called, and that several can have the same ones.
//!
//! ```text
//!  snapshots/a/memory ──────────┬── snapshots/b/memory      what a's machine had
//!                               └── sandboxes/ID/memory
//!                                   snapshots/b/memory.1    what had changed until b
//! ```
//! A file has a name in each directory whose machine is mapped from it (link(2)), so it is there for as long as one of them is,
//! and nobody has to know of the others. Files that have a name here never change. The checksums of each go with it, under its names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::Error;
use crate::saved::checksums;

/// A file's blocks, as stat(2) counts them.
const STAT_BLOCK: u64 = 512;

/// More than a machine can have; whoever looks for files looks no further.
const MOST: usize = 16;

/// How long it is good to know what is in the page cache.
const GOOD_FOR: Duration = Duration::from_secs(5);

/// What a memory file is called before it is known how many lie below it.
const NEW: &str = "memory.new";

pub(crate) fn path(directory: &Path, number: usize) -> PathBuf {
    match number {
        0 => directory.join("memory"),
        number => directory.join(format!("memory.{number}")),
    }
}

/// The file that is being written.
pub(crate) fn new(directory: &Path) -> PathBuf {
    directory.join(NEW)
}

/// Those of a directory, the lowest first.
pub(crate) fn paths(directory: &Path) -> Vec<PathBuf> {
    let all = (0..MOST).map(|number| path(directory, number));
    all.take_while(|path| path.exists()).collect()
}

/// The same, open to be read.
pub(crate) fn open(directory: &Path) -> Result<Vec<File>, Error> {
    let open = |path: PathBuf| File::open(&path).map_err(Error::file("open", &path));
    paths(directory).into_iter().map(open).collect()
}

/// Gives the new file of a directory its name, above those that are there.
pub(crate) fn name_new(directory: &Path) -> Result<(), Error> {
    let new = new(directory);
    let goal = path(directory, paths(directory).len());
    fs::rename(&new, goal).map_err(Error::file("rename", &new))
}

/// Has the lowest file of a directory in the page cache in pieces of 2 MiB, when it has reached the disk: what clones only read of
/// it they map in such pieces then, which saves them some hundred faults. One that has another name, too, is mapped by a machine: either it
/// was read so before, or what is mapped of it stays in small pieces. It is a help and no more.
pub(crate) fn read_in_huge_pages(directory: &Path) {
    let path = path(directory, 0);
    let read = || {
        let file = File::open(&path)?;
        if file.metadata()?.nlink() > 1 {
            log::debug!("{} is in the page cache as it is", path.display());
            return Ok(());
        }
        file.sync_all()?;
        host::page_cache::read_in_huge_pages(&file)
    };
    if let Err(error) = read() {
        log::info!("clones map {} page by page: {error}", path.display());
    }
}

/// Gives those of `from` a name in `to`, in place of what there is. Where files cannot have two names, as on two file systems,
/// there are none then: the next snapshot is a whole one, as it is with others than those that the machine is mapped from.
pub(crate) fn share(from: &Path, to: &Path) -> Result<(), Error> {
    remove(to)?;
    for (number, file) in paths(from).iter().enumerate() {
        let goal = path(to, number);
        if let Err(error) = fs::hard_link(file, &goal) {
            remove(to)?;
            if !cannot_be_shared(&error) {
                return Err(Error::file("make", &goal)(error));
            }
            log::info!("{} is of no use for the next snapshot: {error}", file.display());
            return Ok(());
        }
    }
    share_sums(from, to)
}

/// Gives the checksums of the files that both directories have their names in `to`, too, where there are none.
pub(crate) fn share_sums(from: &Path, to: &Path) -> Result<(), Error> {
    for (file, other) in paths(from).iter().zip(paths(to)) {
        let is_same = identity(file)? == identity(&other)?;
        let (sums, goal) = (checksums::beside(file), checksums::beside(&other));
        match is_same.then(|| fs::hard_link(&sums, &goal)) {
            // Those of an older version have none.
            Some(Err(error)) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => {
                return Err(Error::file("make", &goal)(error));
            }
            _ => (),
        }
    }
    Ok(())
}

/// Which file it is, under whatever name.
pub(crate) fn identity(path: &Path) -> Result<(u64, u64), Error> {
    let metadata = fs::metadata(path).map_err(Error::file("look at", path))?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Whether two directories have the same files, and any.
pub(crate) fn are_same(one: &Path, other: &Path) -> Result<bool, Error> {
    let identities = |directory: &Path| {
        let paths = paths(directory);
        paths
            .iter()
            .map(|path| identity(path))
            .collect::<Result<Vec<_>, Error>>()
    };
    let one = identities(one)?;
    Ok(!one.is_empty() && one == identities(other)?)
}

/// Takes their names in a directory away; it is fine if there are none. The lowest goes last: whoever dies on the way leaves files
/// that the next one finds.
pub(crate) fn remove(directory: &Path) -> Result<(), Error> {
    for path in paths(directory).into_iter().rev() {
        checksums::remove(&path)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(Error::file("remove", &path)(error)),
            _ => (),
        }
    }
    Ok(())
}

/// Counts what directories take on the disk; what several have for the first of them.
#[derive(Debug, Default)]
pub(crate) struct Counted(BTreeSet<(u64, u64)>);

impl Counted {
    /// Bytes that the files of a directory take that were not counted before.
    pub(crate) fn bytes(&mut self, directory: &Path) -> u64 {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let files = entries.filter_map(|entry| entry.metadata().ok());
        let new = files.filter(|file| self.0.insert((file.dev(), file.ino())));
        new.map(|file| file.blocks() * STAT_BLOCK).sum()
    }
}

/// Bytes that the files of a directory take that no other has.
pub(crate) fn own_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| entry.metadata().ok());
    let own = files.filter(|file| file.is_dir() || file.nlink() == 1);
    own.map(|file| file.blocks() * STAT_BLOCK).sum()
}

/// How much of the memory files of directories is in the page cache. A look at a file takes time by its size, so one is made at a time, and
/// what it found is good for a moment, whoever asks.
#[derive(Debug, Default)]
pub(crate) struct Cached(Mutex<BTreeMap<PathBuf, Look>>);

#[derive(Debug)]
struct Look {
    at: Instant,
    found: InCache,
}

/// What a directory's memory files have, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InCache {
    /// On the disk.
    pub(crate) size: u64,
    /// In the page cache, if that is known.
    pub(crate) cached: Option<u64>,
}

impl Cached {
    /// Of one directory. What is not there has nothing.
    pub(crate) fn of(&self, directory: &Path) -> InCache {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        looks.retain(|_, look| look.at.elapsed() < GOOD_FOR);
        let look = looks.entry(directory.to_owned()).or_insert_with(|| Look {
            at: Instant::now(),
            found: look(directory),
        });
        look.found
    }
}

fn look(directory: &Path) -> InCache {
    let mut found = InCache {
        size: 0,
        cached: Some(0),
    };
    for path in paths(directory) {
        let looked = File::open(&path).and_then(|file| {
            let size = file.metadata()?.blocks() * STAT_BLOCK;
            found.size += size;
            // A page of a hole that was read is in the cache, too, and has no bytes.
            Ok(host::page_cache::cached_bytes(&file)?.min(size))
        });
        found.cached = match looked {
            Ok(bytes) => found.cached.map(|sum| sum + bytes),
            Err(error) => {
                log::debug!("what of {} is in the page cache is not known: {error}", path.display());
                None
            }
        };
    }
    found
}

/// It is the file systems that do not want it.
fn cannot_be_shared(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::CrossesDevices
            | io::ErrorKind::TooManyLinks
            | io::ErrorKind::Unsupported
            | io::ErrorKind::PermissionDenied
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, bytes: usize) {
        fs::write(path, vec![1; bytes]).unwrap();
    }

    #[test]
    fn what_is_in_the_page_cache_is_looked_at_once_in_a_while() {
        let top = tempfile::tempdir().unwrap();
        assert_eq!(look(top.path()).size, 0);
        write(&path(top.path(), 0), 8192);
        write(&path(top.path(), 1), 4096);
        let known = Cached::default();
        for path in paths(top.path()) {
            File::open(path).unwrap().sync_all().unwrap();
        }
        let found = known.of(top.path());
        assert_eq!((found.size, found.cached), (12288, Some(12288)));
        write(&path(top.path(), 2), 4096);
        assert_eq!(known.of(top.path()), found, "it was looked at again at once");
        let old = Instant::now().checked_sub(GOOD_FOR).unwrap();
        known.0.lock().unwrap().values_mut().for_each(|look| look.at = old);
        assert_eq!(known.of(top.path()).cached, Some(16384));
    }

    #[test]
    fn files_are_there_for_as_long_as_anybody_has_them() {
        let top = tempfile::tempdir().unwrap();
        let [a, b, sandbox] = ["a", "b", "sandbox"].map(|name| top.path().join(name));
        for path in [&a, &b, &sandbox] {
            fs::create_dir(path).unwrap();
        }
        write(&new(&a), 8192);
        name_new(&a).unwrap();
        share(&a, &sandbox).unwrap();
        share(&sandbox, &b).unwrap();
        write(&new(&b), 4096);
        name_new(&b).unwrap();
        assert_eq!(paths(&b), [b.join("memory"), b.join("memory.1")]);
        assert_eq!(open(&b).unwrap().len(), 2);
        // Each is counted once, and for the sandbox only what nobody else has.
        let mut counted = Counted::default();
        let sizes = [&a, &b, &sandbox].map(|path| counted.bytes(path));
        assert!(sizes[0] >= 8192 && sizes[1] >= 4096 && sizes[1] < 8192, "{sizes:?}");
        assert_eq!(sizes[2], 0);
        assert_eq!(own_bytes(&sandbox), 0);
        assert!(are_same(&a, &sandbox).unwrap() && !are_same(&b, &sandbox).unwrap());
        share(&b, &sandbox).unwrap();
        assert_eq!(paths(&sandbox).len(), 2);
        assert!(!are_same(&a, &sandbox).unwrap() && are_same(&b, &sandbox).unwrap());
        assert!(!are_same(top.path(), top.path()).unwrap(), "nothing is the same");
        fs::remove_dir_all(&a).unwrap();
        fs::remove_dir_all(&b).unwrap();
        assert_eq!(open(&sandbox).unwrap().len(), 2);
        assert!(own_bytes(&sandbox) >= 8192 + 4096);
        // Where one cannot be removed those below it stay, and are found again.
        let stuck = path(&sandbox, 2);
        fs::create_dir(&stuck).unwrap();
        assert!(remove(&sandbox).is_err());
        assert_eq!(paths(&sandbox).len(), 3);
        fs::remove_dir(&stuck).unwrap();
        remove(&sandbox).unwrap();
        remove(&sandbox).unwrap();
        assert!(paths(&sandbox).is_empty());
    }
}
