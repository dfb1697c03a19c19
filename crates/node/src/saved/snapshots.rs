//! Snapshots as files: the directory `snapshots/NAME`, which comes and goes by one rename each, so that after a crash it is
//! there whole or not at all. What is half made or half removed has a name that no snapshot can have, and goes when the
//! daemon starts. Knows nothing of VMs; how a snapshot is taken is `hold`'s affair, what comes of it `clones`'.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_api::ExecRequest;
use node_api::recovery::{Finding, Outcome, Subject};
use node_api::snapshot::check_snapshot_name;
use node_api::{Resources, Snapshot, config};
use observe::span::span;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, renameat_with};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::node::Node;
use crate::resources::volumes::{UNFINISHED, unfinished};
use crate::saved::checksums;
use crate::saved::memory_files::{self, Counted};
use crate::store::remove::remove_directory;

/// A guest's memory holds its secrets.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// What is kept beside a snapshot's files: all that a sandbox needs which is made of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// What everybody may know.
    pub(crate) snapshot: Snapshot,
    /// What runs in it.
    pub(crate) command: ExecRequest,
    /// It has an interface in the node's network.
    pub(crate) networked: bool,
    /// It has as many devices for shared directories, none of which has one.
    #[serde(default)]
    pub(crate) share_slots: usize,
}

/// The directory of a snapshot, or of a template.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    path: PathBuf,
    /// What `path` stands for, where that is a descriptor's number.
    #[expect(dead_code, reason = "held, not read")]
    held: Option<Arc<OwnedFd>>,
}

impl Place {
    pub(crate) fn new(directory: &Path, name: &str) -> Self {
        Self {
            path: directory.join(name),
            held: None,
        }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.path
    }

    pub(crate) fn record(&self) -> PathBuf {
        self.path.join("record.json")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.path.join("state")
    }

    pub(crate) fn disk(&self) -> PathBuf {
        self.path.join("disk")
    }

    pub(crate) fn write_set(&self) -> PathBuf {
        self.path.join("write-set.json")
    }

    pub(crate) fn page_order(&self) -> PathBuf {
        self.path.join("page-order.json")
    }

    /// What is known of it; `None` if there is none.
    pub(crate) fn read<R: DeserializeOwned>(&self) -> Result<Option<R>, Error> {
        let text = match fs::read(self.record()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(Error::file("read", &self.record()))?,
        };
        let record = serde_json::from_slice(&text)
            .map_err(|error| checksums::record_damaged(&self.record(), &error.to_string()))?;
        Ok(Some(record))
    }

    /// All of its files are there.
    pub(crate) fn is_whole(&self, resources: &Resources) -> bool {
        let disk = resources.disk.map(|_| self.disk());
        let mut files = [self.record(), self.state()].into_iter().chain(disk);
        files.all(|path| path.exists()) && !memory_files::paths(&self.path).is_empty()
    }

    /// The same place by its directory, which is held open: whatever comes to its name, what is opened through this belongs
    /// together.
    pub(crate) fn hold(&self) -> Result<Self, Error> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(&self.path, flags, Mode::empty());
        let directory = directory.map_err(Error::file("open", &self.path))?;
        Ok(Self {
            path: format!("/proc/self/fd/{}", directory.as_raw_fd()).into(),
            held: Some(Arc::new(directory)),
        })
    }

    /// An empty file of it.
    pub(crate) fn create(&self, path: &Path) -> Result<File, Error> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(FILE_MODE);
        options.open(path).map_err(Error::file("make", path))
    }
}

/// Makes the place for snapshots, and removes what a daemon that was killed has left half done: this node has begun it, or was
/// asked to remove it, and nobody could use it. What cannot be removed stays for the next time: it is worth no daemon that does not
/// start.
pub(crate) fn clean(snapshots: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(DIRECTORY_MODE).create(snapshots)?;
    for entry in fs::read_dir(snapshots)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(UNFINISHED.as_bytes())
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            let path = entry.path();
            log::warn!(
                "what is left of a snapshot in {} stays: {error}; remove it by hand",
                path.display()
            );
        }
    }
    Ok(())
}

/// A snapshot that is being made. Unless it is kept, nothing of it stays.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) place: Place,
    directory: PathBuf,
    kept: bool,
}

impl Begun {
    /// A place below `directory`, which is not there under any name before it is kept.
    pub(crate) fn new(directory: &Path) -> Result<Self, Error> {
        let name = unfinished().map_err(Error::host("reading entropy"))?;
        let place = Place::new(directory, &name);
        let mut builder = fs::DirBuilder::new();
        builder.mode(DIRECTORY_MODE);
        builder.create(&place.path).map_err(Error::file("make", &place.path))?;
        Ok(Self {
            directory: directory.to_owned(),
            kept: false,
            place,
        })
    }

    /// Writes what is to be known of it.
    pub(crate) fn describe(&self, record: &impl Serialize) -> Result<(), Error> {
        let text = serde_json::to_vec_pretty(record).map_err(|error| Error::Invalid(error.to_string()))?;
        let path = self.place.record();
        let mut file = self.place.create(&path)?;
        io::Write::write_all(&mut file, &text).map_err(Error::file("write", &path))
    }

    /// Makes the checksums of all of its files, while they are in the page cache.
    pub(crate) fn sum(&self) -> Result<(), Error> {
        let _span = span("checksums");
        checksums::make_missing(&self.place, &mut checksums::at_once).map(drop)
    }

    /// Waits until all of it has reached the disk.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        let written = || -> io::Result<()> {
            for entry in fs::read_dir(&self.place.path)? {
                File::open(entry?.path())?.sync_all()?;
            }
            File::open(&self.place.path)?.sync_all()
        };
        written().map_err(Error::file("write", &self.place.path))
    }

    /// Gives it its name, in place of another that may have it, which goes.
    pub(crate) fn keep_over(mut self, name: &str) -> Result<(), Error> {
        let goal = self.directory.join(name);
        let rename = |flags| renameat_with(CWD, &self.place.path, CWD, &goal, flags);
        match rename(RenameFlags::EXCHANGE) {
            // What was there has this one's name now, and goes with it.
            Ok(()) => (),
            Err(rustix::io::Errno::NOENT) => {
                rename(RenameFlags::NOREPLACE).map_err(Error::file("rename", &self.place.path))?;
                self.kept = true;
            }
            Err(error) => return Err(Error::file("rename", &self.place.path)(error)),
        }
        let synced = File::open(&self.directory).and_then(|directory| directory.sync_all());
        synced.map_err(Error::file("write", &self.directory))
    }

    /// Gives it its name; false if there is another of that name.
    pub(crate) fn keep(mut self, name: &str) -> Result<bool, Error> {
        let goal = self.directory.join(name);
        match renameat_with(CWD, &self.place.path, CWD, &goal, RenameFlags::NOREPLACE) {
            Ok(()) => self.kept = true,
            Err(rustix::io::Errno::EXIST) => return Ok(false),
            Err(error) => return Err(Error::file("rename", &self.place.path)(error)),
        }
        let synced = File::open(&self.directory).and_then(|directory| directory.sync_all());
        synced.map_err(Error::file("write", &self.directory))?;
        Ok(true)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // The next daemon does it for one that panics.
        if !self.kept
            && !std::thread::panicking()
            && let Err(error) = fs::remove_dir_all(&self.place.path)
        {
            // The next daemon tries again.
            log::warn!("{} stays behind: {error}", self.place.path.display());
        }
    }
}

impl Node {
    /// Looks at the snapshots that are there. A directory without a record is none, and is set aside; one whose record cannot be read
    /// stays where it is, as whoever has written it may read it.
    pub(crate) fn find_snapshots(&self) -> Result<(), Error> {
        let directory = self.paths.snapshots();
        for entry in fs::read_dir(&directory).map_err(Error::file("read", &directory))? {
            let entry = entry.map_err(Error::file("read", &directory))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if check_snapshot_name(&name).is_err() {
                continue;
            }
            match Place::new(&directory, &name).read::<Record>() {
                Ok(Some(_)) => (),
                Ok(None) => {
                    let why = "it has no record.json";
                    self.store.set_aside(Subject::Snapshot, &entry.path(), why);
                }
                Err(error) => self.store.found(Finding {
                    subject: Subject::Snapshot,
                    name,
                    outcome: Outcome::LeftAlone,
                    why: error.to_string(),
                }),
            }
        }
        Ok(())
    }

    /// Takes a place for a snapshot, which is not there before it is kept.
    pub(crate) fn begin_snapshot(&self, record: &Record) -> Result<Begun, Error> {
        let snapshots = self.paths.snapshots();
        if snapshots.join(&record.snapshot.name).exists() {
            return Err(Error::SnapshotTaken(record.snapshot.name.clone()));
        }
        let begun = Begun::new(&snapshots)?;
        begun.describe(record)?;
        Ok(begun)
    }

    /// A name for a snapshot: the one that is wanted, or the sandbox's with the next number that is free.
    pub(crate) fn snapshot_name(&self, wanted: Option<&str>, sandbox: &str) -> Result<String, Error> {
        if let Some(name) = wanted {
            check_snapshot_name(name)?;
            return Ok(name.to_owned());
        }
        // Room for the number.
        let stem: String = sandbox.chars().take(config::MAX_NAME - 8).collect();
        let snapshots = self.paths.snapshots();
        let free = |number: &u32| !snapshots.join(format!("{stem}-{number}")).exists();
        let number = (1..=u32::MAX).find(free).unwrap_or(u32::MAX);
        Ok(format!("{stem}-{number}"))
    }

    /// One that is there, and where.
    pub(crate) fn snapshot(&self, name: &str) -> Result<(Place, Record), Error> {
        check_snapshot_name(name)?;
        let place = Place::new(&self.paths.snapshots(), name);
        let place = match place.hold() {
            Err(Error::File { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => {
                return Err(Error::NoSnapshot(name.to_owned()));
            }
            held => held?,
        };
        match place.read()? {
            Some(record) => Ok((place, record)),
            None => Err(Error::NoSnapshot(name.to_owned())),
        }
    }

    /// All of them, the oldest first. One that is damaged is left out, and the log tells of it.
    pub(crate) fn snapshots(&self) -> Result<Vec<Snapshot>, Error> {
        let directory = self.paths.snapshots();
        let mut found = Vec::new();
        for entry in fs::read_dir(&directory).map_err(Error::file("read", &directory))? {
            let entry = entry.map_err(Error::file("read", &directory))?;
            let name = entry.file_name();
            if name.to_str().is_none_or(|name| check_snapshot_name(name).is_err()) {
                continue;
            }
            let place = Place::new(&directory, &name.to_string_lossy());
            match place.read::<Record>() {
                Ok(record) => found.extend(record.map(|record| Snapshot {
                    damaged: checksums::in_short(&checksums::known_damage(&place)),
                    ..record.snapshot
                })),
                Err(error) => log::error!("{error}"),
            }
        }
        found.sort_by(|a, b| (a.created_ns, &a.name).cmp(&(b.created_ns, &b.name)));
        // A file that several have counts for the oldest, and for a template before all.
        let mut counted = Counted::default();
        for template in self.templates() {
            counted.bytes(&self.paths.templates().join(template.id));
        }
        for snapshot in &mut found {
            snapshot.bytes = counted.bytes(&directory.join(&snapshot.name));
        }
        Ok(found)
    }

    /// One of them, with its size.
    pub(crate) fn inspect_snapshot(&self, name: &str) -> Result<Snapshot, Error> {
        let (_, record) = self.snapshot(name)?;
        let found = self.snapshots()?.into_iter().find(|snapshot| snapshot.name == name);
        Ok(found.unwrap_or(record.snapshot))
    }

    /// Removes one. VMs that were restored from it have its memory's file open, and keep it for as long as they run.
    pub(crate) fn remove_snapshot(&self, name: &str) -> Result<(), Error> {
        check_snapshot_name(name)?;
        let removed = remove(&self.paths.snapshots(), name, || {
            self.points.at(base::points::SNAPSHOT_HIDDEN);
        });
        match removed? {
            true => Ok(()),
            false => Err(Error::NoSnapshot(name.to_owned())),
        }
    }
}

/// Removes a place, which has lost its name first; false if there is none. `hidden` is called between the two.
pub(crate) fn remove(directory: &Path, name: &str, hidden: impl FnOnce()) -> Result<bool, Error> {
    let place = directory.join(name);
    let nameless = directory.join(unfinished().map_err(Error::host("reading entropy"))?);
    match fs::rename(&place, &nameless) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        renamed => renamed.map_err(Error::file("remove", &place))?,
    }
    // Whoever was told that it is gone does not see it again after a power failure.
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(Error::file("write", directory))?;
    hidden();
    remove_directory(&nameless)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::testing::stored;

    fn described(name: &str) -> Record {
        let stored = stored("aaaaaaaaaaaa", "web");
        Record {
            snapshot: Snapshot {
                name: name.into(),
                created_ns: 1,
                sandbox: stored.sandbox.id,
                sandbox_name: stored.sandbox.name,
                config: stored.sandbox.config,
                digest: stored.sandbox.digest,
                programs: node_api::Programs::default(),
                bytes: 0,
                damaged: None,
            },
            command: stored.command,
            networked: true,
            share_slots: 0,
        }
    }

    #[test]
    fn one_is_there_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let snapshots = directory.path().join("snapshots");
        clean(&snapshots).unwrap();
        let names = || {
            let entries = fs::read_dir(&snapshots).unwrap();
            entries.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
        };
        // Given up: nothing stays.
        let begun = |name: &str| {
            let begun = Begun::new(&snapshots).unwrap();
            begun.describe(&described(name)).unwrap();
            begun
        };
        let one = begun("one");
        assert!(!snapshots.join("one").exists() && names().len() == 1);
        drop(one);
        assert!(names().is_empty());
        // Kept: all of it is there, for root alone.
        let one = begun("one");
        let memory = memory_files::new(one.place.directory());
        one.place.create(&memory).unwrap().set_len(1 << 30).unwrap();
        memory_files::name_new(one.place.directory()).unwrap();
        one.sync().unwrap();
        assert!(one.keep("one").unwrap());
        let place = Place::new(&snapshots, "one");
        assert_eq!(place.read::<Record>().unwrap().unwrap(), described("one"));
        assert!(Counted::default().bytes(place.directory()) < 1 << 20, "holes count");
        let memory = memory_files::paths(place.directory()).remove(0);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&place.path), mode(&memory)), (0o700, 0o600));
        // Another of this name is refused, and the first one stays as it is.
        assert!(!begun("one").keep("one").unwrap());
        assert!(memory.exists() && names().len() == 1);
        // Or takes its place, with all that is in it.
        begun("one").keep_over("one").unwrap();
        assert!(!memory.exists() && names().len() == 1);
        begun("new").keep_over("new").unwrap();
        assert_eq!(names().len(), 2);
        assert!(remove(&snapshots, "new", || ()).unwrap());
        // What a crash has left goes, and nothing else.
        std::mem::forget(begun("two"));
        assert_eq!(names().len(), 2);
        clean(&snapshots).unwrap();
        assert_eq!(names(), ["one"]);
        fs::write(place.record(), "{").unwrap();
        let told = place.read::<Record>().unwrap_err().to_string();
        assert!(
            told.contains("put it back from a backup") && !told.contains("snapshot rm"),
            "{told}"
        );
    }
}
