//! What is at a path, and in a directory and those below it. Follows links only to say where they lead. Sends nothing.

use std::fs::{self, File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use agent_api::{Entry, EntryKind, MAX_ENTRIES, OsText, RequestFailure};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::attributes::Of;
use super::failure::{Result, failed, invalid, is_gone};
use super::names::Names as DirectoryNames;
use super::paths::MAX_PATH;
use crate::identity::Names;

/// Looks at files, with the names of users and groups as they were when it was made.
pub(super) struct Looker(Names);

impl Looker {
    pub(super) fn new() -> Self {
        Self(Names::read())
    }

    /// What is at a path; a link at its end is not followed.
    pub(super) fn look(&self, path: &Path) -> Result<Entry> {
        let data = fs::symlink_metadata(path).map_err(failed("looking at", path))?;
        let mut entry = self.entry(path, &data);
        match entry.kind {
            EntryKind::Link => {
                let leads = fs::canonicalize(path).or_else(|_| fs::read_link(path));
                entry.target = leads.ok().map(|target| text(&target));
                entry.target_kind = fs::metadata(path).ok().map(|data| kind(&data));
            }
            EntryKind::File | EntryKind::Directory => entry.metadata = Of::At(path).read(),
            EntryKind::Other => {}
        }
        Ok(entry)
    }

    /// A file that is open, by the path that it was opened by.
    pub(super) fn look_at_open(&self, path: &Path, file: &File) -> Result<Entry> {
        let data = file.metadata().map_err(failed("looking at", path))?;
        let mut entry = self.entry(path, &data);
        entry.metadata = Of::Open(file).read();
        Ok(entry)
    }

    fn entry(&self, path: &Path, data: &Metadata) -> Entry {
        let seconds = data.mtime().saturating_mul(1_000_000_000);
        Entry {
            path: text(path),
            kind: kind(data),
            mode: data.mode(),
            size: data.size(),
            owner: self.0.user(data.uid()),
            group: self.0.group(data.gid()),
            modified_ns: seconds.saturating_add(data.mtime_nsec()),
            target: None,
            target_kind: None,
            metadata: std::collections::BTreeMap::new(),
        }
    }
}

fn text(path: &Path) -> OsText {
    path.as_os_str().into()
}

fn kind(data: &Metadata) -> EntryKind {
    match data {
        data if data.is_file() => EntryKind::File,
        data if data.is_dir() => EntryKind::Directory,
        data if data.is_symlink() => EntryKind::Link,
        _ => EntryKind::Other,
    }
}

/// A directory whose names are being gone through.
struct Level {
    path: PathBuf,
    names: DirectoryNames,
}

/// Everything in a directory and those below it, parents first. What goes meanwhile is left out, and so is what lies deeper than a path can
/// say.
pub(super) struct Lister {
    looker: Looker,
    levels: Vec<Level>,
    depth: usize,
    /// Names that were read so far.
    read: usize,
}

impl Lister {
    /// A link at the path's end is followed. A depth of 0 is taken for 1, the directory itself.
    pub(super) fn new(path: &Path, depth: u32) -> Result<Self> {
        let mut lister = Self {
            looker: Looker::new(),
            levels: Vec::new(),
            depth: usize::try_from(depth).unwrap_or(usize::MAX).max(1),
            read: 0,
        };
        match lister.enter(path, OFlags::empty())? {
            Some(failure) => Err(failure),
            None => Ok(lister),
        }
    }

    /// Goes into a directory, or says why it cannot be read. More entries than a list may have are an error.
    fn enter(&mut self, path: &Path, flags: OFlags) -> Result<Option<RequestFailure>> {
        let names = DirectoryNames::read(path, flags, MAX_ENTRIES.saturating_sub(self.read));
        let names = match names {
            Ok(names) => names,
            Err(error) => return Ok(Some(failed("listing", path)(error))),
        };
        let Some(names) = names else {
            return Err(invalid(format!(
                "there are more than {MAX_ENTRIES} entries: list a part of them, or less deep"
            )));
        };
        self.read += names.len();
        self.levels.push(Level {
            path: path.to_owned(),
            names,
        });
        Ok(None)
    }

    /// Looks at what is next and goes into it, if it is a directory that is not too deep. What cannot be looked at, such as what is mounted by
    /// a program that has ended, is left out, and what cannot be read is not gone into: the others are listed.
    fn visit(&mut self, path: &Path) -> Result<Option<Entry>> {
        if path.as_os_str().as_bytes().len() > MAX_PATH {
            return Ok(None);
        }
        let Ok(entry) = self.looker.look(path) else {
            return Ok(None);
        };
        let enters = entry.kind == EntryKind::Directory && self.levels.len() < self.depth;
        if enters
            && self
                .enter(path, OFlags::NOFOLLOW)?
                .is_some_and(|failure| is_gone(&failure))
        {
            return Ok(None);
        }
        Ok(Some(entry))
    }
}

impl Iterator for Lister {
    type Item = Result<Entry>;

    fn next(&mut self) -> Option<Result<Entry>> {
        loop {
            let level = self.levels.last_mut()?;
            let Some(name) = level.names.take() else {
                self.levels.pop();
                continue;
            };
            let path = level.path.join(name);
            match self.visit(&path) {
                Ok(None) => {}
                Ok(Some(entry)) => return Some(Ok(entry)),
                Err(failure) => {
                    self.levels.clear();
                    return Some(Err(failure));
                }
            }
        }
    }
}

/// The numbers in linux/magic.h of file systems that are the kernel's own words: proc, sysfs, cgroup2, devpts, debugfs, tracefs.
const KERNELS_OWN: [u64; 6] = [0x9fa0, 0x6265_6572, 0x6367_7270, 0x1cd1, 0x6462_6720, 0x7472_6163];

/// Nothing in the directory is anybody's file.
pub(super) fn is_kernels_own(directory: &Path) -> std::result::Result<bool, Errno> {
    let number = rustix::fs::statfs(directory)?.f_type;
    Ok(u64::try_from(number).is_ok_and(|number| KERNELS_OWN.contains(&number)))
}
