//! What the daemon keeps of its sandboxes: each one's state in the database and in a record of its own, either of which can be
//! made again from the other. Opens both, says what was wrong with them, and changes them together. Knows where everything is in the
//! state directory and who may look there, and no VMM.

pub(crate) mod database;
pub(crate) mod devices;
mod merge;
pub(crate) mod operation;
pub(crate) mod paths;
pub(crate) mod private;
mod quarantine;
pub(crate) mod records;
pub(crate) mod remove;
pub(crate) mod unfinished;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use base::PciAddress;
use node_api::recovery::{Finding, Outcome, REPORT, Recovery, Subject};

use self::database::{Contents, Database, Opened, Stored};
use self::devices::{StoredDevice, StoredDevices, VfChange};
use self::merge::{Rename, of_sandbox};
use self::paths::Paths;
use self::records::Reach;
use crate::{Error, clock};

/// Both copies of what is known.
#[derive(Debug)]
pub(crate) struct StateStore {
    paths: Paths,
    database: Mutex<Database>,
    /// What was wrong at this start.
    findings: Mutex<Vec<Finding>>,
}

/// What there is when a daemon starts.
#[derive(Debug)]
pub(crate) struct Found {
    /// Every sandbox that has a directory.
    pub(crate) known: Vec<Stored>,
    /// Sandboxes in the database whose directories are gone.
    pub(crate) homeless: Vec<Stored>,
    /// Directories of no sandbox, with the reason.
    pub(crate) orphans: BTreeMap<String, String>,
    /// The host's devices that are, or were to be, sandboxes'.
    pub(crate) devices: StoredDevices,
}

impl StateStore {
    /// Opens database and records, and brings both to what the newer of each two copies says. `runs` tells whether a sandbox's VMM
    /// process is there, `rename` makes a name for one whose own is taken.
    pub(crate) fn open(
        paths: &Paths,
        runs: impl Fn(&Stored) -> bool,
        rename: Rename<'_>,
    ) -> Result<(Self, Found), Error> {
        let contents = Database::open(&paths.database())?;
        let Contents {
            database,
            opened,
            rows,
            devices,
        } = contents;
        let directories = records::scan(&paths.sandboxes())?;
        let has_any = !directories.is_empty();
        let store = Self {
            paths: paths.clone(),
            database: Mutex::new(database),
            findings: Mutex::default(),
        };
        let of_database = |outcome, why| Finding {
            subject: Subject::Database,
            name: "node.db".into(),
            outcome,
            why,
        };
        match &opened {
            Opened::SetAside { aside, why } => {
                let why = format!(
                    "{why}; it is {} now, and was made anew from the sandboxes' records",
                    aside.display()
                );
                store.found(of_database(Outcome::SetAside, why));
            }
            Opened::New if has_any => {
                let why = "it was missing or empty, and was made anew from the sandboxes' records".into();
                store.found(of_database(Outcome::Repaired, why));
            }
            Opened::New | Opened::Whole => (),
        }
        let mut merged = merge::merge(rows, directories);
        merged.settle_clashes(runs, rename);
        for finding in merged.findings {
            store.found(finding);
        }
        let anew = opened != Opened::Whole;
        for stored in &merged.known {
            let id = &stored.sandbox.id;
            if anew || merged.to_write.contains(id) {
                store.database().put(stored)?;
            }
            if merged.to_write.contains(id)
                && let Err(error) = records::write(&paths.sandbox(id).directory, stored, Reach::Disk)
            {
                log::error!("the record of sandbox {id} stays as it is: {error}");
            }
        }
        for id in merged.orphans.keys() {
            store.database().delete(id)?;
        }
        if anew {
            store.database().put_stored(&devices)?;
        }
        let found = Found {
            devices,
            known: merged.known,
            homeless: merged.homeless,
            orphans: merged.orphans,
        };
        Ok((store, found))
    }

    fn database(&self) -> MutexGuard<'_, Database> {
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Knows a new sandbox, which has no directory yet.
    pub(crate) fn put(&self, stored: &Stored) -> Result<(), Error> {
        self.database().put(stored)
    }

    /// Changes what is known of a sandbox, in the database first. `now` is one generation later than `before`.
    ///
    /// A record that cannot be written, on a disk that is full, fails a sandbox that nobody was told of yet. One that was
    /// acknowledged goes on: the database has its state, and the next change writes the record again.
    pub(crate) fn change(&self, before: &Stored, now: &Stored) -> Result<(), Error> {
        self.database().put(now)?;
        let directory = self.paths.sandbox(&now.sandbox.id).directory;
        let reach = match before.is_acknowledged() && now.lasts() {
            true => Reach::Disk,
            false => Reach::Kernel,
        };
        match records::write(&directory, now, reach) {
            // It has none yet, or no more.
            Err(Error::File { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) if before.is_acknowledged() || now.sandbox.state == node_api::State::Removing => {
                log::error!(
                    "the record of sandbox {} is older than its state: {error}",
                    now.sandbox.id
                );
                Ok(())
            }
            written => written,
        }
    }

    /// Waits until the disk of a new sandbox is whole: before that nothing may say that the sandbox is there.
    pub(crate) fn disk_reaches_disk(&self, stored: &Stored) -> Result<(), Error> {
        match stored.sandbox.config.resources.disk {
            Some(_) if stored.lasts() => records::sync_file(&self.paths.sandbox(&stored.sandbox.id).disk()),
            _ => Ok(()),
        }
    }

    /// Waits until a sandbox that nobody was told of yet is on the disk: from here on a power failure does not lose it.
    pub(crate) fn reaches_disk(&self, stored: &Stored) -> Result<(), Error> {
        if !stored.lasts() {
            return Ok(());
        }
        let directory = self.paths.sandbox(&stored.sandbox.id).directory;
        // Both at once: the file system's journal is written for them together.
        at_once([Box::new(|| self.sync()) as Flush<'_>], || records::sync(&directory))
    }

    /// Forgets a sandbox of which nothing is left.
    pub(crate) fn forget(&self, stored: &Stored) -> Result<(), Error> {
        self.database().delete(&stored.sandbox.id)?;
        if stored.lasts() && stored.is_acknowledged() {
            self.sync()?;
        }
        Ok(())
    }

    /// Keeps devices as they are now, all of them or none.
    pub(crate) fn put_devices(&self, devices: &[StoredDevice]) -> Result<(), Error> {
        self.database().put_devices(devices)
    }

    /// Forgets a device; it is fine if it is not known.
    pub(crate) fn forget_device(&self, address: PciAddress) -> Result<(), Error> {
        self.database().forget_device(address)
    }

    /// Keeps that a physical function's virtual ones are being changed.
    pub(crate) fn put_vf_change(&self, change: &VfChange) -> Result<(), Error> {
        self.database().put_vf_change(change)
    }

    /// They are not any more.
    pub(crate) fn forget_vf_change(&self, physical: PciAddress) -> Result<(), Error> {
        self.database().forget_vf_change(physical)
    }

    /// Waits for the database's commits without keeping others from theirs.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        let log = self.database().log();
        Database::sync(&log)
    }

    /// Notes something that was wrong at this start.
    pub(crate) fn found(&self, finding: Finding) {
        log::warn!("{finding}");
        let mut findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        findings.push(finding);
    }

    /// The same of a sandbox.
    pub(crate) fn found_sandbox(&self, name: &str, outcome: Outcome, why: impl Into<String>) {
        self.found(of_sandbox(name, outcome, why));
    }

    /// Moves what belongs to nobody to the quarantine. What cannot be moved stays where it is.
    pub(crate) fn set_aside(&self, subject: Subject, path: &Path, why: &str) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (outcome, why) = match quarantine::set_aside(&self.paths, subject, path, why) {
            Ok(place) => (Outcome::SetAside, format!("{why}; it is in {} now", place.display())),
            Err(error) => (Outcome::LeftAlone, format!("{why}; it cannot be moved: {error}")),
        };
        self.found(Finding {
            subject,
            name,
            outcome,
            why,
        });
    }

    /// Keeps what was wrong at this start, if anything was, for whoever asks later.
    pub(crate) fn report(&self) -> Result<(), Error> {
        let findings = std::mem::take(&mut *self.findings.lock().unwrap_or_else(PoisonError::into_inner));
        if findings.is_empty() {
            return Ok(());
        }
        log::warn!(
            "{} things in {} were not as they should be, and nothing was deleted: `basalt doctor` tells of them",
            findings.len(),
            self.paths.state().display()
        );
        let recovery = Recovery {
            time_ns: clock::now_ns(),
            findings,
        };
        let text = serde_json::to_vec_pretty(&recovery).map_err(|error| Error::Invalid(error.to_string()))?;
        let path = self.paths.state().join(REPORT);
        let next = path.with_extension("new");
        let write = || {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            options.open(&next)?.write_all(&text)?;
            fs::rename(&next, &path)
        };
        write().map_err(Error::file("write", &path))
    }

    /// What was set aside, at this start and earlier: names below the state directory.
    pub(crate) fn quarantine(&self) -> Result<Vec<String>, Error> {
        quarantine::list(&self.paths)
    }

    /// Deletes all of that, each by `remove`.
    pub(crate) fn prune_quarantine(&self, remove: impl Fn(&Path) -> io::Result<()>) -> Result<Vec<String>, Error> {
        quarantine::prune(&self.paths, remove)
    }
}

type Flush<'a> = Box<dyn FnOnce() -> Result<(), Error> + Send + 'a>;

/// Does `these` in threads of their own while `this` is done here; the first error of all. Where there is no thread to be had, that one
/// is done here, too.
fn at_once<const N: usize>(these: [Flush<'_>; N], this: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    std::thread::scope(|scope| {
        let begun = these.map(|work| {
            let work = Mutex::new(Some(work));
            let work = std::sync::Arc::new(work);
            let take = |work: &Mutex<Option<Flush<'_>>>| {
                let work = work.lock().unwrap_or_else(PoisonError::into_inner).take();
                work.map_or(Ok(()), |work| work())
            };
            let thread = std::thread::Builder::new().name("flush".into()).stack_size(512 << 10);
            let theirs = std::sync::Arc::clone(&work);
            match thread.spawn_scoped(scope, move || take(&theirs)) {
                Ok(thread) => Ok(thread),
                Err(_) => Err(take(&work)),
            }
        });
        let here = this();
        let ended = begun.map(|begun| match begun {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(done) => done,
        });
        ended.into_iter().fold(here, Result::and)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use base::ByteSize;
    use node_api::State;

    use super::*;
    use crate::testing::stored;

    const ID: &str = "aaaaaaaaaaaa";

    fn node() -> (tempfile::TempDir, Paths) {
        let directory = tempfile::tempdir().unwrap();
        let paths = Paths::new(directory.path().to_owned());
        fs::create_dir_all(paths.sandboxes()).unwrap();
        (directory, paths)
    }

    fn open(paths: &Paths) -> Result<(StateStore, Found), Error> {
        StateStore::open(paths, |_| false, &|id, _| id.to_owned())
    }

    /// A sandbox that somebody was told of.
    fn running(store: &StateStore, paths: &Paths, id: &str) -> Stored {
        let mut one = stored(id, id);
        (one.generation, one.sandbox.state) = (1, State::Creating);
        one.sandbox.config.resources.disk = Some(ByteSize::mib(16));
        store.put(&one).unwrap();
        let directory = paths.sandbox(id).directory;
        fs::create_dir(&directory).unwrap();
        records::write(&directory, &one, Reach::Kernel).unwrap();
        fs::write(paths.sandbox(id).disk(), vec![7; 1 << 20]).unwrap();
        let mut now = one.clone();
        (now.generation, now.sandbox.state, now.acknowledged) = (2, State::Running, true);
        store.change(&one, &now).unwrap();
        now
    }

    #[test]
    fn both_copies_have_each_change_and_either_is_enough() {
        let (_directory, paths) = node();
        let (store, found) = open(&paths).unwrap();
        assert!(found.known.is_empty() && store.findings.lock().unwrap().is_empty());
        let one = running(&store, &paths, ID);
        store.reaches_disk(&one).unwrap();
        drop(store);
        let (_, found) = open(&paths).unwrap();
        assert_eq!(found.known, std::slice::from_ref(&one));
        for lost in [paths.database(), paths.sandbox(ID).directory.join("record.json")] {
            fs::remove_file(&lost).unwrap();
            let (store, found) = open(&paths).unwrap();
            let [again] = &found.known[..] else { panic!("{found:?}") };
            assert!(again.generation > one.generation && again.sandbox == one.sandbox);
            assert!(!store.findings.lock().unwrap().is_empty());
            store.report().unwrap();
            assert!(lost.exists() && paths.state().join(REPORT).exists());
        }
    }

    #[test]
    fn a_removal_that_was_told_is_not_undone_by_an_older_copy() {
        let (_directory, paths) = node();
        let (store, _) = open(&paths).unwrap();
        let one = running(&store, &paths, ID);
        drop(store);
        // Its directory went, and the database's last change did not come to the disk.
        fs::rename(paths.sandbox(ID).directory, paths.sandboxes().join(".1234")).unwrap();
        let (store, found) = open(&paths).unwrap();
        assert!(found.known.is_empty() && found.orphans.is_empty());
        assert_eq!(found.homeless, [one]);
        drop(store);
        // Nor is one that was half removed when the database was lost.
        let (store, _) = open(&paths).unwrap();
        let one = running(&store, &paths, "bbbbbbbbbbbb");
        let mut removing = one.clone();
        (removing.generation, removing.sandbox.state) = (3, State::Removing);
        store.change(&one, &removing).unwrap();
        drop(store);
        fs::remove_file(paths.database()).unwrap();
        let (_, found) = open(&paths).unwrap();
        assert_eq!(found.known[0].sandbox.state, State::Removing);
    }

    #[test]
    fn a_record_that_cannot_be_written_fails_only_what_nobody_was_told_of() {
        let (_directory, paths) = node();
        let (store, _) = open(&paths).unwrap();
        let now = running(&store, &paths, ID);
        let directory = paths.sandbox(ID).directory;
        // Nothing can take its place.
        fs::remove_file(directory.join("record.json")).unwrap();
        fs::create_dir_all(directory.join("record.json/x")).unwrap();
        let mut next = now.clone();
        next.generation += 1;
        store.change(&now, &next).unwrap();
        let mut before = now.clone();
        (before.acknowledged, before.sandbox.state) = (false, State::Starting);
        store.change(&before, &next).unwrap_err();
    }

    /// What it costs that a power failure loses nothing: `cargo test -p basalt-node --lib what_durability -- --nocapture`, with
    /// `TMPDIR` on the disk in question. docs/daemon.md has figures.
    #[test]
    fn what_durability_costs() {
        const COUNT: u32 = 16;
        let (_directory, paths) = node();
        let (store, _) = open(&paths).unwrap();
        let mut took = std::collections::BTreeMap::new();
        for (number, kind) in (0..COUNT).flat_map(|number| [(number, "not flushed"), (number, "flushed")]) {
            let id = format!("{number:06x}{:06x}", kind.len());
            let begun = Instant::now();
            let one = running(&store, &paths, &id);
            if kind == "flushed" {
                store.reaches_disk(&one).unwrap();
            }
            *took.entry(("make", kind)).or_insert(0) += begun.elapsed().as_micros();
            let mut before = one.clone();
            if kind == "not flushed" {
                before.sandbox.config.remove = true;
            }
            let mut next = before.clone();
            (next.generation, next.sandbox.state) = (3, State::Exited);
            let begun = Instant::now();
            store.change(&before, &next).unwrap();
            *took.entry(("change", kind)).or_insert(0) += begun.elapsed().as_micros();
            let begun = Instant::now();
            let directory = paths.sandbox(&id).directory;
            fs::rename(&directory, directory.with_extension("gone")).unwrap();
            if kind == "flushed" {
                records::sync_directory(&paths.sandboxes()).unwrap();
            }
            store.forget(&next).unwrap();
            *took.entry(("remove", kind)).or_insert(0) += begun.elapsed().as_micros();
        }
        assert_eq!(took.len(), 6);
        for ((what, kind), micros) in took {
            let each = micros / u128::from(COUNT);
            writeln!(io::stderr(), "{what:>6} {kind:>11}: {each} us each").unwrap();
        }
    }
}
