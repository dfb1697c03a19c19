//! What a stranger's record may say, of a snapshot or of a template, and which files may lie beside it. Whatever would be a name, a path
//! or a share of this host later is looked at here; the machine's state is its VMM's to understand, in its jail. Does not know what
//! there is on this node.

use std::fs::{self, File};
use std::io::Read;

use base::ByteSize;
use node_api::transfer::{Kind, MOST_RECORD, Transferred};
use node_api::{BuildConfig, Programs, Resources, Snapshot, check_name, check_snapshot_name};
use serde::de::DeserializeOwned;

use super::{memory, names_in};
use crate::Error;
use crate::ids::ID_BYTES;
use crate::resources::volume_shares;
use crate::saved::snapshots::{self, Place};
use crate::saved::templates;

/// The longest image name that is shown to anybody.
const MOST_IMAGE: usize = 512;

/// More memory than any machine has that could run it, and larger disks than anybody asks for: what is counted with them does not
/// overflow below.
const MOST_MEMORY: ByteSize = ByteSize(1 << 46);
const MOST_DISK: ByteSize = ByteSize(1 << 50);

/// What can be told of one in a packet, with room for what is added.
const MOST_TOLD: usize = wire::packet::MAX_PACKET - (16 << 10);

/// More names than anybody gives to one template.
const MOST_NAMES: usize = 64;

/// The longest thing that is told of a host: names of processors have 48 letters, a kernel's release has 64.
const MOST_OF_HOST: usize = 256;

/// A SHA-256 in hexadecimal digits.
const HASH: usize = 64;

/// Whoever builds it again waits as long.
const MOST_READY_MS: u64 = 24 * 60 * 60 * 1000;

/// A record that may come from anybody.
pub(super) trait Carried: DeserializeOwned {
    const KIND: Kind;

    /// What everybody may know of it.
    fn describe(&self) -> Transferred;

    /// Looks at all that is not files.
    fn check(&self) -> Result<(), Error>;
}

/// The refusal of one of this kind.
fn bad<S: Into<String>>(kind: Kind) -> impl Fn(S) -> Error {
    move |why| Error::NotToBeLoaded(kind, why.into())
}

/// A record of this kind, which says nothing that it may not.
fn parse<R: Carried>(text: &[u8], wanted: impl FnOnce(&mut R)) -> Result<(R, Transferred), Error> {
    let bad = bad::<String>(R::KIND);
    if text.len() as u64 > MOST_RECORD {
        return Err(bad(format!("its record has more than {MOST_RECORD} bytes")));
    }
    let record = serde_json::from_slice(text);
    let mut record: R = record.map_err(|error| bad(format!("its record is none: {error}")))?;
    wanted(&mut record);
    record.check()?;
    let described = record.describe();
    let length = serde_json::to_vec(&described).map_or(usize::MAX, |text| text.len());
    if length > MOST_TOLD {
        return Err(bad(format!(
            "its description has {length} bytes; the limit is {MOST_TOLD}"
        )));
    }
    Ok((record, described))
}

/// Whether a snapshot or a template could have this record.
pub(crate) fn judge(kind: Kind, text: &[u8]) -> Result<(), Error> {
    match kind {
        Kind::Snapshot => parse::<snapshots::Record>(text, |_| ()).map(drop),
        Kind::Template => parse::<templates::record::Record>(text, |_| ()).map(drop),
    }
}

/// What is known of a place that somebody else has filled, with what whoever loads it wants otherwise.
pub(super) fn checked<R: Carried>(place: &Place, wanted: impl FnOnce(&mut R)) -> Result<R, Error> {
    let bad = bad::<String>(R::KIND);
    let path = place.record();
    let mut text = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(MOST_RECORD + 1).read_to_end(&mut text));
    read.map_err(|error| bad(format!("its record cannot be read: {error}")))?;
    let (record, described) = parse(&text, wanted)?;
    let accelerated = matches!(&described, Transferred::Snapshot(snapshot) if snapshot.config.accelerator.is_some());
    if !place.is_whole(described.resources()) || accelerated && !place.accelerator().exists() {
        return Err(bad("a file of it is missing".into()));
    }
    for name in names_in(place)? {
        let path = place.directory().join(&name);
        let length = fs::metadata(&path).map_err(Error::file("look at", &path))?.len();
        match described.most_bytes(&name) {
            Some(most) if length <= most => (),
            Some(most) => return Err(bad(format!("{name} has {length} bytes where {most} are the most"))),
            None => return Err(bad(format!("it has a file {name} and should have none"))),
        }
    }
    memory::check(place, R::KIND)?;
    Ok(record)
}

impl Carried for snapshots::Record {
    const KIND: Kind = Kind::Snapshot;

    fn describe(&self) -> Transferred {
        Transferred::Snapshot(Box::new(self.snapshot.clone()))
    }

    fn check(&self) -> Result<(), Error> {
        let Self {
            snapshot,
            command: _,
            networked: _,
            share_slots,
        } = self;
        let Snapshot {
            name,
            sandbox,
            sandbox_name,
            config,
            digest,
            programs,
            created_ns: _,
            bytes: _,
            damaged: _,
        } = snapshot;
        let bad = bad::<&str>(Self::KIND);
        check_snapshot_name(name)?;
        config.validate()?;
        check_name(sandbox_name)?;
        // A volume is a directory of whoever has it; what would be shared by this one is another's word.
        if !config.volumes.is_empty() {
            return Err(bad("its sandbox has volumes"));
        }
        if *share_slots > volume_shares::SLOTS {
            return Err(bad("it has more devices for volumes than a saved machine can have"));
        }
        check_machine(&config.resources, digest, programs).map_err(&bad)?;
        if !is_hex(sandbox, 2 * ID_BYTES) {
            return Err(bad("it has no id of a sandbox"));
        }
        let shown = |text: &str| text.len() <= MOST_IMAGE && text.bytes().all(|byte| byte.is_ascii_graphic());
        match shown(&config.image) {
            true => Ok(()),
            false => Err(bad("its image has a name that none can have")),
        }
    }
}

impl Carried for templates::record::Record {
    const KIND: Kind = Kind::Template;

    fn describe(&self) -> Transferred {
        Transferred::Template(Box::new(self.template.clone()))
    }

    fn check(&self) -> Result<(), Error> {
        let bad = bad::<&str>(Self::KIND);
        let template = &self.template;
        let Some(recipe) = &template.recipe else {
            return Err(bad("it was not built by `basalt template build`"));
        };
        check_machine(&template.resources, &template.digest, &template.programs).map_err(&bad)?;
        if !is_hex(&template.id, HASH)
            || template.names.len() > MOST_NAMES
            || self.shape.share_slots > volume_shares::SLOTS
        {
            return Err(bad(
                "it has no id of a template, or more names or devices for volumes than one can have",
            ));
        }
        // What is built anew of it later is what somebody here could have asked for.
        let config = BuildConfig {
            names: template.names.clone(),
            replaces: None,
            image: template.digest.clone(),
            resources: template.resources.clone(),
            recipe: recipe.clone(),
            force: false,
            sized: false,
        };
        config.validate()?;
        // They are shown on a terminal, now or when it is built again.
        let is_plain = |text: &String| {
            !text
                .chars()
                .any(|letter| letter.is_control() && !"\n\r\t".contains(letter) || turns_text(letter))
        };
        let host = template.host.iter();
        let mut host = host.flat_map(|host| [&host.kernel, &host.vendor, &host.processor, &host.features]);
        let is_a_line = |text: &String| is_plain(text) && !text.contains(char::is_control);
        if !host.all(|text| text.len() <= MOST_OF_HOST && is_a_line(text)) {
            return Err(bad("it is of a host that there cannot be"));
        }
        let texts = recipe.commands.iter().chain(&recipe.ready).chain(&recipe.env);
        match texts.chain(&recipe.workdir).chain(&recipe.user).all(is_plain) {
            true if recipe.ready_ms <= MOST_READY_MS => Ok(()),
            true => Err(bad("it may take longer than a day to be ready")),
            false => Err(bad("a command or a setting of its recipe has control characters")),
        }
    }
}

/// What has nothing to do with what runs in it.
fn check_machine(resources: &Resources, digest: &str, programs: &Programs) -> Result<(), &'static str> {
    let disk = resources.disk.unwrap_or_default();
    let cpus = 1..=vmm_api::config::MAX_CPUS;
    if !cpus.contains(&resources.cpus)
        || resources.most_memory().max(resources.memory) > MOST_MEMORY
        || disk > MOST_DISK
    {
        return Err("no machine has so many processors, so much memory or such a disk");
    }
    if !resources.memory_mode.is_translated() {
        return Err("its machine's memory was not translated, and goes on nowhere else");
    }
    if !is_hex(digest, HASH) {
        return Err("it has no digest of an image");
    }
    let hashes = [&programs.vmm, &programs.kernel, &programs.initramfs];
    match hashes.into_iter().flatten().all(|hash| is_hex(hash, HASH)) {
        true => Ok(()),
        false => Err("it has a program's hash that is none"),
    }
}

/// Letters that have a terminal show what follows in another order (Unicode's bidirectional controls).
fn turns_text(letter: char) -> bool {
    matches!(letter, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::Path;

    use node_api::{Class, MemoryMode, Programs, Recipe, Template};

    use super::super::Loading;
    use super::*;
    use crate::saved::programs::Files;
    use crate::saved::snapshots::{Begun, Record};
    use crate::saved::state_file::tests::naming;
    use crate::saved::templates::record::Shape;
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
                damaged: None,
            },
            command: stored.command,
            networked: false,
            share_slots: 2,
        }
    }

    /// A state of this length is one that names so many memory files.
    const STATE: u64 = 10;
    const NAMED: usize = 2;

    /// A place with this record, and these files with so many bytes.
    fn place(directory: &Path, record: &Record, files: &[(&str, u64)]) -> Begun {
        let begun = Begun::new(directory).unwrap();
        begun.describe(record).unwrap();
        for (name, length) in files {
            let mut file = begun.place.create(&begun.place.directory().join(name)).unwrap();
            match (*name, *length) {
                ("state", STATE) => file.write_all(&naming(NAMED)).unwrap(),
                (_, length) => file.set_len(length).unwrap(),
            }
        }
        begun
    }

    const MEMORY: u64 = 128 << 20;

    /// A record made wrong, and what is said of it.
    type Change<R = Record> = (fn(&mut R), &'static str);

    #[test]
    fn what_a_strangers_record_may_not_say_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let files = [("state", STATE), ("memory", MEMORY), ("memory.1", 0)];
        let refused = |change: fn(&mut Record)| {
            let mut record = record();
            change(&mut record);
            checked::<Record>(&place(directory.path(), &record, &files).place, |_| ())
                .map_err(|error| error.to_string())
        };
        assert!(refused(|_| ()).is_ok());
        let digest = |record: &mut Record| record.snapshot.digest = "../../../../etc/passwd".into();
        let changes: [Change; 14] = [
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
                |r| {
                    let resources = &mut r.snapshot.config.resources;
                    (resources.class, resources.memory_mode) = (Class::Bare, MemoryMode::Identity);
                },
                "was not translated",
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
    fn a_template_is_one_that_somebody_could_have_built_here() {
        let stored = stored("aaaaaaaaaaaa", "web");
        let shape = Shape::new(
            &"0".repeat(64),
            &stored.sandbox.config.resources,
            None,
            String::new(),
            2,
        );
        let recipe = Some(Recipe::default());
        let mut right = templates::record::Record::of(&stored, shape, Files::default(), Programs::default(), recipe);
        right.template.digest = "0".repeat(64);
        right.template.names = vec!["web".into()];
        right.check().unwrap();
        let refused = |change: fn(&mut Template)| {
            let mut record = right.clone();
            change(&mut record.template);
            record.check().unwrap_err().to_string()
        };
        let changes: [Change<Template>; 9] = [
            (|t| t.recipe = None, "it was not built by `basalt template build`"),
            (|t| t.id = "x".into(), "no id of a template"),
            (|t| t.names = vec!["web".into(); 65], "more names"),
            (|t| t.names = vec!["../x".into()], "cannot be a template's name"),
            (|t| t.names = vec!["abcdef012345".into()], "looks like an id"),
            (|t| t.resources.memory = ByteSize(u64::MAX), "no machine has"),
            (|t| t.resources.memory_mode = MemoryMode::Identity, "was not translated"),
            (
                |t| t.host.as_mut().unwrap().kernel = "\x1b[2J".into(),
                "a host that there cannot be",
            ),
            (
                |t| t.host.as_mut().unwrap().processor = "x".repeat(257),
                "a host that there cannot be",
            ),
        ];
        for (change, says) in changes {
            let told = refused(change);
            assert!(told.contains(says), "{says}: {told}");
        }
        let mut long = record();
        long.snapshot.config.process.env = vec![format!("A={}", "x".repeat(MOST_TOLD))];
        let directory = tempfile::tempdir().unwrap();
        let place = place(directory.path(), &long, &[("state", 1), ("memory", MEMORY)]);
        let told = checked::<Record>(&place.place, |_| ()).unwrap_err().to_string();
        assert!(told.contains("its description has"), "{told}");
    }

    #[test]
    fn files_are_those_of_the_record_and_no_larger() {
        let directory = tempfile::tempdir().unwrap();
        let refused = |record: &Record, files: &[(&str, u64)]| {
            checked::<Record>(&place(directory.path(), record, files).place, |_| ())
                .unwrap_err()
                .to_string()
        };
        let with_disk = || {
            let mut record = record();
            record.snapshot.config.resources.disk = Some(ByteSize::mib(64));
            record
        };
        let files = [
            ("state", STATE),
            ("memory", MEMORY),
            ("memory.1", MEMORY),
            ("disk", 64 << 20),
        ];
        let whole = place(directory.path(), &with_disk(), &files);
        assert!(checked::<Record>(&whole.place, |_| ()).is_ok());
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
        assert!(refused(&record(), &[("state", STATE)]).contains("missing"));
        // There are as many as the state names, and one after the other.
        let memory = |names: &[&'static str], says: &str| {
            let mut files = vec![("state", STATE)];
            files.extend(names.iter().map(|&name| (name, MEMORY)));
            let told = refused(&record(), &files);
            assert!(told.contains(says), "{says}: {told}");
        };
        memory(&["memory"], "of memory files its state names 2, and 1 have come");
        memory(
            &["memory", "memory.1", "memory.2"],
            "of memory files its state names 2, and 3 have come",
        );
        memory(
            &["memory", "memory.2"],
            "of its 2 memory files one is missing after the first 1",
        );
        let told = refused(&record(), &[("state", STATE + 1), ("memory", MEMORY)]);
        assert!(told.contains("its state cannot be used: this is no snapshot"), "{told}");
        let begun = place(directory.path(), &record(), &[]);
        fs::write(begun.place.record(), vec![b' '; 2 << 20]).unwrap();
        let told = checked::<Record>(&begun.place, |_| ()).unwrap_err().to_string();
        assert!(told.contains("more than"), "{told}");
        fs::write(begun.place.record(), "{}").unwrap();
        let told = checked::<Record>(&begun.place, |_| ()).unwrap_err().to_string();
        assert!(told.contains("get it again"), "{told}");
        let loading = Loading {
            begun,
            kind: Kind::Snapshot,
            name: None,
            force: false,
        };
        for name in ["../x", "log", "record.json"] {
            assert!(loading.file(name).is_err(), "{name}");
        }
        assert!(loading.file("memory").is_ok());
        let place = loading.begun.place.directory().to_owned();
        drop(loading);
        assert!(!place.exists(), "it stays behind");
    }
}
