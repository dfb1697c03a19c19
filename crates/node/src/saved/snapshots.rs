//! Snapshots as files: the directory `snapshots/NAME`, which comes and goes by one rename each, so that after a crash
//! it is there whole or not at all. What is half made or half removed has a name that no snapshot can have, and goes
//! when the daemon starts. `Snapshots` are those of a node, each looked for on the disk when somebody asks. Knows
//! nothing of VMs, nor how a snapshot is taken (`operations/snapshot.rs`) and what comes of it (`operations/clone.rs`).

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
use crate::saved::checksums;
use crate::saved::memory_files::{self, Counted};
use crate::store::StateStore;
use crate::store::remove::remove_directory;
use crate::store::unfinished::{UNFINISHED, unfinished};

/// A guest's memory holds its secrets.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// What is stored beside a snapshot's files: all that a sandbox needs which is made of it.
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

    /// The state of its sandbox's accelerator, if it has one.
    pub(crate) fn accelerator(&self) -> PathBuf {
        self.path.join("accelerator")
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

/// A snapshot that is being made. Unless it is saved under a name, nothing of it stays.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) place: Place,
    directory: PathBuf,
    saved: bool,
}

impl Begun {
    /// A place below `directory`, which is not there under any name before it is saved.
    pub(crate) fn new(directory: &Path) -> Result<Self, Error> {
        let name = unfinished().map_err(Error::host("reading entropy"))?;
        let place = Place::new(directory, &name);
        let mut builder = fs::DirBuilder::new();
        builder.mode(DIRECTORY_MODE);
        builder.create(&place.path).map_err(Error::file("make", &place.path))?;
        Ok(Self {
            directory: directory.to_owned(),
            saved: false,
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
    pub(crate) fn save_over(mut self, name: &str) -> Result<(), Error> {
        let goal = self.directory.join(name);
        let rename = |flags| renameat_with(CWD, &self.place.path, CWD, &goal, flags);
        match rename(RenameFlags::EXCHANGE) {
            // What was there has this one's name now, and goes with it.
            Ok(()) => (),
            Err(rustix::io::Errno::NOENT) => {
                rename(RenameFlags::NOREPLACE).map_err(Error::file("rename", &self.place.path))?;
                self.saved = true;
            }
            Err(error) => return Err(Error::file("rename", &self.place.path)(error)),
        }
        let synced = File::open(&self.directory).and_then(|directory| directory.sync_all());
        synced.map_err(Error::file("write", &self.directory))
    }

    /// Gives it its name; false if there is another of that name.
    pub(crate) fn save_as(mut self, name: &str) -> Result<bool, Error> {
        let goal = self.directory.join(name);
        match renameat_with(CWD, &self.place.path, CWD, &goal, RenameFlags::NOREPLACE) {
            Ok(()) => self.saved = true,
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
        if !self.saved
            && !std::thread::panicking()
            && let Err(error) = fs::remove_dir_all(&self.place.path)
        {
            // The next daemon tries again.
            log::warn!("{} stays behind: {error}", self.place.path.display());
        }
    }
}

/// The snapshots of a node.
#[derive(Debug)]
pub(crate) struct Snapshots {
    directory: PathBuf,
}

impl Snapshots {
    /// Those in `directory`, which is made if it is missing, without what a daemon that was killed has left half done.
    pub(crate) fn open(directory: PathBuf) -> Result<Self, Error> {
        clean(&directory).map_err(Error::file("clean", &directory))?;
        Ok(Self { directory })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The place of the one of this name, if there is one.
    pub(crate) fn place(&self, name: &str) -> Place {
        Place::new(&self.directory, name)
    }

    /// Looks at the snapshots that are there. A directory without a record is none, and is set aside; one whose record cannot be read
    /// stays where it is, as whoever has written it may read it.
    pub(crate) fn find_all(&self, store: &StateStore) -> Result<(), Error> {
        for name in self.names()? {
            let place = self.place(&name);
            match place.read::<Record>() {
                Ok(Some(_)) => (),
                Ok(None) => store.set_aside(Subject::Snapshot, place.directory(), "it has no record.json"),
                Err(error) => store.found(Finding {
                    subject: Subject::Snapshot,
                    name,
                    outcome: Outcome::LeftAlone,
                    why: error.to_string(),
                }),
            }
        }
        Ok(())
    }

    /// What may be a snapshot by its name.
    fn names(&self) -> Result<Vec<String>, Error> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(Error::file("read", &self.directory))? {
            let name = entry.map_err(Error::file("read", &self.directory))?.file_name();
            let name = name.to_str().filter(|name| check_snapshot_name(name).is_ok());
            names.extend(name.map(str::to_owned));
        }
        Ok(names)
    }

    /// Refuses a name that cannot be a snapshot's, or is one's already.
    pub(crate) fn check_free(&self, name: &str) -> Result<(), Error> {
        check_snapshot_name(name)?;
        match self.place(name).directory().exists() {
            true => Err(Error::SnapshotTaken(name.to_owned())),
            false => Ok(()),
        }
    }

    /// Takes a place for a snapshot, which is not there before it is saved.
    pub(crate) fn begin(&self, record: &Record) -> Result<Begun, Error> {
        self.check_free(&record.snapshot.name)?;
        let begun = Begun::new(&self.directory)?;
        begun.describe(record)?;
        Ok(begun)
    }

    /// A name for a snapshot: the one that is wanted, or the sandbox's with the next number that is free.
    pub(crate) fn name_for(&self, wanted: Option<&str>, sandbox: &str) -> Result<String, Error> {
        if let Some(name) = wanted {
            check_snapshot_name(name)?;
            return Ok(name.to_owned());
        }
        // Room for the number.
        let stem: String = sandbox.chars().take(config::MAX_NAME - 8).collect();
        let free = |number: &u32| !self.place(&format!("{stem}-{number}")).directory().exists();
        let number = (1..=u32::MAX).find(free).unwrap_or(u32::MAX);
        Ok(format!("{stem}-{number}"))
    }

    /// One that is there, and where. The place stays the same one, whatever comes to its name.
    pub(crate) fn get(&self, name: &str) -> Result<(Place, Record), Error> {
        check_snapshot_name(name)?;
        let place = match self.place(name).hold() {
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

    /// All of them, the oldest first. One that is damaged is left out, and the log tells of it. A file that several
    /// have counts for the oldest, unless it is `counted` already.
    pub(crate) fn list(&self, mut counted: Counted) -> Result<Vec<Snapshot>, Error> {
        let mut found = Vec::new();
        for name in self.names()? {
            let place = self.place(&name);
            match place.read::<Record>() {
                Ok(record) => found.extend(record.map(|record| Snapshot {
                    damaged: checksums::in_short(&checksums::known_damage(&place)),
                    ..record.snapshot
                })),
                Err(error) => log::error!("{error}"),
            }
        }
        found.sort_by(|a, b| (a.created_ns, &a.name).cmp(&(b.created_ns, &b.name)));
        for snapshot in &mut found {
            snapshot.bytes = counted.bytes(self.place(&snapshot.name).directory());
        }
        Ok(found)
    }

    /// One of them, with its size beside what is `counted`.
    pub(crate) fn inspect(&self, name: &str, counted: Counted) -> Result<Snapshot, Error> {
        let (_, record) = self.get(name)?;
        let found = self.list(counted)?.into_iter().find(|snapshot| snapshot.name == name);
        Ok(found.unwrap_or(record.snapshot))
    }

    /// Removes one; `hidden` is called when it has lost its name. VMs that were restored from it have its memory's file
    /// open, and keep it for as long as they run.
    pub(crate) fn remove(&self, name: &str, hidden: impl FnOnce()) -> Result<(), Error> {
        check_snapshot_name(name)?;
        match remove(&self.directory, name, hidden)? {
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
    use crate::store::paths::Paths;
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
        // Saved: all of it is there, for root alone.
        let one = begun("one");
        let memory = memory_files::new(one.place.directory());
        one.place.create(&memory).unwrap().set_len(1 << 30).unwrap();
        memory_files::name_new(one.place.directory()).unwrap();
        one.sync().unwrap();
        assert!(one.save_as("one").unwrap());
        let place = Place::new(&snapshots, "one");
        assert_eq!(place.read::<Record>().unwrap().unwrap(), described("one"));
        assert!(Counted::default().bytes(place.directory()) < 1 << 20, "holes count");
        let memory = memory_files::paths(place.directory()).remove(0);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&place.path), mode(&memory)), (0o700, 0o600));
        // Another of this name is refused, and the first one stays as it is.
        assert!(!begun("one").save_as("one").unwrap());
        assert!(memory.exists() && names().len() == 1);
        // Or takes its place, with all that is in it.
        begun("one").save_over("one").unwrap();
        assert!(!memory.exists() && names().len() == 1);
        begun("new").save_over("new").unwrap();
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

    fn snapshots(top: &Path) -> Snapshots {
        Snapshots::open(top.join("snapshots")).unwrap()
    }

    fn saved(snapshots: &Snapshots, name: &str, created_ns: u64) {
        let mut record = described(name);
        record.snapshot.created_ns = created_ns;
        assert!(snapshots.begin(&record).unwrap().save_as(name).unwrap());
    }

    #[test]
    fn names_are_given_once_and_those_of_a_sandbox_are_numbered() {
        let top = tempfile::tempdir().unwrap();
        let snapshots = snapshots(top.path());
        assert_eq!(snapshots.name_for(Some("mine"), "web").unwrap(), "mine");
        assert!(snapshots.name_for(Some("../mine"), "web").is_err());
        assert_eq!(snapshots.name_for(None, "web").unwrap(), "web-1");
        saved(&snapshots, "web-1", 1);
        saved(&snapshots, "web-3", 1);
        assert_eq!(snapshots.name_for(None, "web").unwrap(), "web-2");
        assert!(matches!(snapshots.begin(&described("web-1")), Err(Error::SnapshotTaken(name)) if name == "web-1"));
        assert!(matches!(snapshots.check_free("web-3"), Err(Error::SnapshotTaken(_))));
        snapshots.check_free("web-2").unwrap();
        let long = snapshots.name_for(None, &"x".repeat(config::MAX_NAME)).unwrap();
        snapshots.check_free(&long).unwrap();
    }

    #[test]
    fn one_is_found_until_it_is_removed_and_by_whoever_has_it_longer() {
        let top = tempfile::tempdir().unwrap();
        let snapshots = snapshots(top.path());
        for (name, created_ns) in [("b", 1), ("c", 3), ("a", 2)] {
            saved(&snapshots, name, created_ns);
        }
        let names = || {
            let all = snapshots.list(Counted::default()).unwrap().into_iter();
            all.map(|snapshot| snapshot.name).collect::<Vec<_>>()
        };
        assert_eq!(names(), ["b", "a", "c"]);
        let memory = vec![1; 1 << 16];
        fs::write(memory_files::path(snapshots.place("b").directory(), 0), memory).unwrap();
        memory_files::share(snapshots.place("b").directory(), snapshots.place("a").directory()).unwrap();
        let bytes = |counted, name| snapshots.inspect(name, counted).unwrap().bytes;
        assert!(bytes(Counted::default(), "b") >= 1 << 16 && bytes(Counted::default(), "a") < 1 << 16);
        let mut counted = Counted::default();
        counted.bytes(snapshots.place("a").directory());
        assert!(bytes(counted, "b") < 1 << 16, "it counts for what was counted before");
        // Damage is shown, and a record that cannot be read is left out.
        checksums::note_damage(&snapshots.place("a"), &[node_api::Damage::changed("memory", 0, 1)]).unwrap();
        assert!(snapshots.inspect("a", Counted::default()).unwrap().damaged.is_some());
        fs::write(snapshots.place("c").record(), "{").unwrap();
        assert_eq!(names(), ["b", "a"]);
        assert!(snapshots.get("c").is_err());
        // It is hidden before its files go; who has it goes on with it.
        let (place, record) = snapshots.get("b").unwrap();
        assert_eq!(record.snapshot.name, "b");
        let mut was_hidden = false;
        snapshots
            .remove("b", || {
                was_hidden = names() == ["a"] && place.record().exists();
            })
            .unwrap();
        assert!(was_hidden && !place.record().exists());
        assert!(matches!(snapshots.get("b"), Err(Error::NoSnapshot(_))));
        assert!(matches!(snapshots.remove("b", || ()), Err(Error::NoSnapshot(_))));
        assert!(snapshots.remove("../b", || ()).is_err());
    }

    #[test]
    fn what_is_no_snapshot_is_set_aside_and_what_cannot_be_read_stays() {
        let top = tempfile::tempdir().unwrap();
        let paths = Paths::new(top.path().to_owned());
        fs::create_dir_all(paths.sandboxes()).unwrap();
        let (store, _) = StateStore::open(&paths, |_| false, &|id, _| id.to_owned()).unwrap();
        let snapshots = snapshots(top.path());
        saved(&snapshots, "whole", 1);
        saved(&snapshots, "damaged", 1);
        fs::write(snapshots.place("damaged").record(), "{").unwrap();
        for directory in ["orphan", "no snapshot's name"] {
            fs::create_dir(snapshots.directory().join(directory)).unwrap();
        }
        snapshots.find_all(&store).unwrap();
        let is_there = |name: &str| snapshots.directory().join(name).exists();
        assert!(["whole", "damaged", "no snapshot's name"].into_iter().all(is_there));
        let aside = store.quarantine().unwrap();
        assert!(
            !is_there("orphan") && aside.len() == 1 && aside[0].ends_with("orphan"),
            "{aside:?}"
        );
        store.report().unwrap();
        let report = fs::read_to_string(paths.state().join(node_api::recovery::REPORT)).unwrap();
        assert!(
            report.contains(r#""name": "damaged""#) && !report.contains("whole"),
            "{report}"
        );
    }
}
