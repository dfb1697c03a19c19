//! Snapshots on their way out of a node and into one, as open files. Whoever has them packs or unpacks them elsewhere, however
//! long that takes; what is being loaded belongs to one connection, and goes with it until it is whole and has its name.
//! Knows no archive and no registry. What comes in is from strangers: a record is looked at here before anything believes it.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;

use base::ByteSize;
use node_api::message::LoadStep;
use node_api::snapshot::{MOST_RECORD, check_snapshot_name, is_file_name};
use node_api::{Reply, Snapshot, check_name};

use crate::node::Node;
use crate::snapshots::{Begun, Place, Record};
use crate::start::ID_BYTES;
use crate::{Error, memory_files, shares};

/// What travels with one packet.
const MOST_FILES: usize = wire::packet::MAX_FDS;

/// The longest image name that is shown to anybody.
const MOST_IMAGE: usize = 512;

/// More memory than any machine has that could run it, and larger disks than anybody asks for: what is counted with them does not
/// overflow below.
const MOST_MEMORY: ByteSize = ByteSize(1 << 46);
const MOST_DISK: ByteSize = ByteSize(1 << 50);

/// A snapshot that somebody is bringing.
#[derive(Debug)]
pub(crate) struct Loading {
    begun: Begun,
    name: Option<String>,
}

/// The names of the files in a place that belong to what is kept there, the record first.
fn names_in(place: &Place) -> Result<Vec<String>, Error> {
    let directory = place.directory();
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(Error::file("read", directory))? {
        let entry = entry.map_err(Error::file("read", directory))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && is_file_name(&name) {
            names.push(name);
        }
    }
    names.sort_by_key(|name| (name != "record.json", name.clone()));
    match names.len() <= MOST_FILES {
        true => Ok(names),
        false => Err(Error::Invalid(format!(
            "{} files are too many for one snapshot",
            names.len()
        ))),
    }
}

impl Node {
    /// The files of a snapshot, open for reading, and their names; whatever comes to its name, these belong together.
    pub(crate) fn open_snapshot(&self, name: &str) -> Result<(Vec<String>, Vec<OwnedFd>), Error> {
        let (place, record) = self.snapshot(name)?;
        if !place.is_whole(&record.snapshot.config.resources) {
            return Err(Error::SnapshotDamaged {
                path: place.record(),
                why: "a file beside it is missing".into(),
            });
        }
        let names = names_in(&place)?;
        let open = |name: &String| {
            let path = place.directory().join(name);
            File::open(&path).map(OwnedFd::from).map_err(Error::file("open", &path))
        };
        let files = names.iter().map(open).collect::<Result<_, _>>()?;
        Ok((names, files))
    }

    /// One step of loading a snapshot; `loading` is what this asker has begun.
    pub(crate) fn load(&self, loading: &mut Option<Loading>, step: LoadStep) -> Result<(Reply, Vec<OwnedFd>), Error> {
        let none = || Error::Invalid("nothing is being loaded on this connection: begin first".into());
        match step {
            LoadStep::Begin { name } => {
                *loading = Some(self.begin_load(name)?);
                Ok((Reply::Done, Vec::new()))
            }
            LoadStep::File { name } => {
                let file = loading.as_ref().ok_or_else(none)?.file(&name)?;
                Ok((Reply::Done, vec![file.into()]))
            }
            LoadStep::Keep => {
                let snapshot = self.keep_loaded(loading.take().ok_or_else(none)?)?;
                Ok((Reply::Snapshot(Box::new(snapshot)), Vec::new()))
            }
        }
    }

    fn begin_load(&self, name: Option<String>) -> Result<Loading, Error> {
        if let Some(name) = &name {
            self.check_free(name)?;
        }
        let begun = Begun::new(&self.paths.snapshots())?;
        Ok(Loading { begun, name })
    }

    fn check_free(&self, name: &str) -> Result<(), Error> {
        check_snapshot_name(name)?;
        match self.paths.snapshots().join(name).exists() {
            true => Err(Error::SnapshotTaken(name.to_owned())),
            false => Ok(()),
        }
    }

    /// Gives it its name, if it is what it should be.
    fn keep_loaded(&self, loading: Loading) -> Result<Snapshot, Error> {
        let Loading { begun, name } = loading;
        let mut record = checked(&begun.place)?;
        if let Some(name) = name {
            record.snapshot.name = name;
        }
        let name = record.snapshot.name.clone();
        self.check_free(&name)?;
        let path = begun.place.record();
        fs::remove_file(&path).map_err(Error::file("replace", &path))?;
        begun.describe(&record)?;
        begun.sync()?;
        memory_files::read_in_huge_pages(begun.place.directory());
        if !begun.keep(&name)? {
            return Err(Error::SnapshotTaken(name));
        }
        self.inspect_snapshot(&name)
    }
}

impl Loading {
    /// An empty file of it.
    fn file(&self, name: &str) -> Result<File, Error> {
        if !is_file_name(name) || names_in(&self.begun.place)?.len() >= MOST_FILES {
            return Err(bad(format!("{name:?} is no file of a snapshot, or one too many")));
        }
        let place = &self.begun.place;
        place.create(&place.directory().join(name))
    }
}

fn bad(why: impl Into<String>) -> Error {
    Error::BadSnapshot(why.into())
}

/// What is known of a place that somebody else has filled. Whatever would be a name, a path or a share of this host later is looked at
/// now; the machine's state is its VMM's to look at, in its jail.
fn checked(place: &Place) -> Result<Record, Error> {
    let path = place.record();
    let mut text = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(MOST_RECORD + 1).read_to_end(&mut text));
    read.map_err(|error| bad(format!("its record cannot be read: {error}")))?;
    if text.len() as u64 > MOST_RECORD {
        return Err(bad(format!("its record has more than {MOST_RECORD} bytes")));
    }
    let record: Record = serde_json::from_slice(&text).map_err(|error| bad(format!("its record is none: {error}")))?;
    check_record(&record)?;
    let resources = &record.snapshot.config.resources;
    if !place.is_whole(resources) {
        return Err(bad("a file of it is missing"));
    }
    for name in names_in(place)? {
        let path = place.directory().join(&name);
        let length = fs::metadata(&path).map_err(Error::file("look at", &path))?.len();
        match record.snapshot.most_bytes(&name) {
            Some(most) if length <= most => (),
            Some(most) => return Err(bad(format!("{name} has {length} bytes where {most} are the most"))),
            None => return Err(bad(format!("it has a file {name} and should have none"))),
        }
    }
    Ok(record)
}

fn check_record(record: &Record) -> Result<(), Error> {
    let Record {
        snapshot,
        command: _,
        networked: _,
        share_slots,
    } = record;
    let Snapshot {
        name,
        sandbox,
        sandbox_name,
        config,
        digest,
        programs,
        created_ns: _,
        bytes: _,
    } = snapshot;
    check_snapshot_name(name)?;
    config.validate()?;
    check_name(sandbox_name)?;
    // A volume is a directory of whoever has it; what would be shared by this one is another's word.
    if !config.volumes.is_empty() {
        return Err(bad("its sandbox has volumes"));
    }
    if *share_slots > shares::SLOTS {
        return Err(bad("no machine that can be kept has so many devices for volumes"));
    }
    let resources = &config.resources;
    let disk = resources.disk.unwrap_or_default();
    let cpus = 1..=vmm_api::config::MAX_CPUS;
    if !cpus.contains(&resources.cpus) || resources.memory > MOST_MEMORY || disk > MOST_DISK {
        return Err(bad("no machine has so many processors, so much memory or such a disk"));
    }
    let is_hex =
        |text: &str, length| text.len() == length && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !is_hex(digest, 64) || !is_hex(sandbox, 2 * ID_BYTES) {
        return Err(bad("it has no digest of an image, or no id of a sandbox"));
    }
    let hashes = [&programs.vmm, &programs.kernel, &programs.initramfs];
    if hashes.into_iter().flatten().any(|hash| !is_hex(hash, 64)) {
        return Err(bad("it has a program's hash that is none"));
    }
    let shown = |text: &str| text.len() <= MOST_IMAGE && text.bytes().all(|byte| byte.is_ascii_graphic());
    match shown(&config.image) {
        true => Ok(()),
        false => Err(bad("its image has a name that none can have")),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use node_api::Programs;

    use super::*;
    use crate::testing::stored;

    fn record() -> Record {
        let stored = stored("aaaaaaaaaaaa", "web");
        Record {
            snapshot: Snapshot {
                name: "web-1".into(),
                created_ns: 1,
                sandbox: stored.sandbox.id,
                sandbox_name: stored.sandbox.name,
                config: stored.sandbox.config,
                digest: "0".repeat(64),
                programs: Programs::default(),
                bytes: 0,
            },
            command: stored.command,
            networked: false,
            share_slots: 2,
        }
    }

    /// A place with this record, and these files with so many bytes.
    fn place(directory: &Path, record: &Record, files: &[(&str, u64)]) -> Begun {
        let begun = Begun::new(directory).unwrap();
        begun.describe(record).unwrap();
        for (name, length) in files {
            let file = begun.place.create(&begun.place.directory().join(name)).unwrap();
            file.set_len(*length).unwrap();
        }
        begun
    }

    const MEMORY: u64 = 128 << 20;

    /// A record made wrong, and what is said of it.
    type Change = (fn(&mut Record), &'static str);

    #[test]
    fn what_a_strangers_record_may_not_say_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let files = [("state", 10), ("memory", MEMORY)];
        let refused = |change: fn(&mut Record)| {
            let mut record = record();
            change(&mut record);
            checked(&place(directory.path(), &record, &files).place).map_err(|error| error.to_string())
        };
        assert!(refused(|_| ()).is_ok());
        let digest = |record: &mut Record| record.snapshot.digest = "../../../../etc/passwd".into();
        let changes: [Change; 13] = [
            (|r| r.share_slots = usize::MAX, "devices for volumes"),
            (digest, "no digest"),
            (|r| r.snapshot.sandbox = "../x".into(), "no id"),
            (|r| r.snapshot.name = "../x".into(), "cannot be a snapshot's name"),
            (
                |r| r.snapshot.sandbox_name = "\x1b[2J".into(),
                "cannot be a sandbox's name",
            ),
            (|r| r.snapshot.config.image = "\x1b[2J".into(), "its image has a name"),
            (|r| r.snapshot.config.image = "x".repeat(600), "its image has a name"),
            (
                |r| r.snapshot.config.volumes = vec!["/:/host".parse().unwrap()],
                "volumes",
            ),
            (|r| r.snapshot.programs.vmm = Some("x".into()), "hash"),
            (|r| r.snapshot.config.resources.cpus = 0, "no machine has"),
            (
                |r| r.snapshot.config.resources.memory = ByteSize(u64::MAX),
                "no machine has",
            ),
            (
                |r| r.snapshot.config.resources.disk = Some(ByteSize(u64::MAX)),
                "no machine has",
            ),
            (
                |r| r.snapshot.config.resources.disk = Some(ByteSize::mib(64)),
                "missing",
            ),
        ];
        for (change, says) in changes {
            let error = refused(change).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn files_are_those_of_the_record_and_no_larger() {
        let directory = tempfile::tempdir().unwrap();
        let refused = |record: &Record, files: &[(&str, u64)]| {
            checked(&place(directory.path(), record, files).place)
                .unwrap_err()
                .to_string()
        };
        let with_disk = || {
            let mut record = record();
            record.snapshot.config.resources.disk = Some(ByteSize::mib(64));
            record
        };
        let files = [
            ("state", 10),
            ("memory", MEMORY),
            ("memory.1", MEMORY),
            ("disk", 64 << 20),
        ];
        let whole = place(directory.path(), &with_disk(), &files);
        assert!(checked(&whole.place).is_ok());
        assert_eq!(
            names_in(&whole.place).unwrap(),
            ["record.json", "disk", "memory", "memory.1", "state"]
        );
        let told = refused(&record(), &files);
        assert!(told.contains("a file disk and should have none"), "{told}");
        for (name, length) in [
            ("memory", MEMORY + 1),
            ("memory.1", MEMORY + 1),
            ("disk", (64 << 20) + 1),
            ("state", 65 << 20),
        ] {
            let mut files = files;
            files.iter_mut().find(|file| file.0 == name).unwrap().1 = length;
            let told = refused(&with_disk(), &files);
            assert!(told.contains(&format!("{name} has {length} bytes")), "{told}");
        }
        assert!(refused(&record(), &[("state", 10)]).contains("missing"));
        let begun = place(directory.path(), &record(), &[]);
        fs::write(begun.place.record(), vec![b' '; 2 << 20]).unwrap();
        let told = checked(&begun.place).unwrap_err().to_string();
        assert!(told.contains("more than"), "{told}");
        fs::write(begun.place.record(), "{}").unwrap();
        let told = checked(&begun.place).unwrap_err().to_string();
        assert!(told.contains("get it again"), "{told}");
        let loading = Loading { begun, name: None };
        for name in ["../x", "log", "record.json"] {
            assert!(loading.file(name).is_err(), "{name}");
        }
        assert!(loading.file("memory").is_ok());
        let place = loading.begun.place.directory().to_owned();
        drop(loading);
        assert!(!place.exists(), "it stays behind");
    }
}
