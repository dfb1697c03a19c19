//! Checksums of the large files of a snapshot or a template, and what was found to be damaged.
//!
//! ```text
//!  memory, memory.1, disk                 never change once they have these names
//!  memory.sums, memory.1.sums, disk.sums  made of them when they were written (`state::Sums`); those of memory are shared as it is
//!  damage.json                            only where a verification has found damage; the next one that finds none removes it
//! ```
//! The state has checksums of its own (`state::Container`). Knows no sandbox, and not when somebody verifies.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::{process, thread};

use node_api::verify::MOST_DAMAGE;
use node_api::{Damage, Problem};
use state::{Container, Difference, Scan, Sums};

use crate::Error;
use crate::saved::memory_files;
use crate::saved::snapshots::Place;
use crate::saved::state_file;

/// A file's blocks, as stat(2) counts them.
const STAT_BLOCK: u64 = 512;

/// Longer sums are of no file that a snapshot can have.
const MOST_SUMS: u64 = 1 << 32;

/// Is told of bytes that were read, and ends it by an error.
pub(crate) type Step<'s> = &'s mut dyn FnMut(u64) -> io::Result<()>;

/// For whoever waits and hurries.
pub(crate) fn at_once(_: u64) -> io::Result<()> {
    Ok(())
}

/// Where the checksums of a file are.
pub(crate) fn beside(file: &Path) -> PathBuf {
    let mut name = OsString::from(file);
    name.push(".sums");
    name.into()
}

/// Removes the checksums of a file; it is fine if there are none.
pub(crate) fn remove(file: &Path) -> Result<(), Error> {
    let sums = beside(file);
    match fs::remove_file(&sums) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::file("remove", &sums)(error)),
        _ => Ok(()),
    }
}

/// Makes the checksums of a file, of what is in it now.
pub(crate) fn make(file: &Path, step: Step<'_>) -> Result<(), Error> {
    let scan = File::open(file).and_then(|open| Scan::of(&open, step));
    let scan = scan.map_err(Error::file("read", file))?;
    if let Some(part) = scan.unreadable.first() {
        let why = io::Error::other(format!("its disk does not give the bytes from {}", part.start));
        return Err(Error::file("read", file)(why));
    }
    put(&beside(file), &scan.sums.to_bytes())
}

/// Makes those of the newest memory file of a directory.
pub(crate) fn make_newest(directory: &Path) -> Result<(), Error> {
    match memory_files::paths(directory).last() {
        Some(newest) => make(newest, &mut at_once),
        None => Ok(()),
    }
}

/// Makes those that are not there; the names of their files.
pub(crate) fn make_missing(place: &Place, step: Step<'_>) -> Result<Vec<String>, Error> {
    let mut made = Vec::new();
    for file in files(place) {
        if !beside(&file).exists() {
            make(&file, step)?;
            made.push(name_of(&file));
        }
    }
    Ok(made)
}

/// Writes a file that is there whole or not at all.
fn put(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    // Two that write the same do not write to one file.
    let mut partial = OsString::from(path);
    partial.push(format!(".{}-{:?}", process::id(), thread::current().id()));
    let write = || -> io::Result<()> {
        let mut options = File::options();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&partial, path)
    };
    let written = write();
    if written.is_err() {
        // What there is of it takes room on a full disk.
        drop(fs::remove_file(&partial));
    }
    written.map_err(Error::file("write", path))
}

/// The files that have checksums.
fn files(place: &Place) -> Vec<PathBuf> {
    let mut files = memory_files::paths(place.directory());
    let others = [place.disk(), place.accelerator()];
    files.extend(others.into_iter().filter(|file| file.exists()));
    files
}

fn name_of(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What there is to be read at most.
pub(crate) fn total(place: &Place) -> u64 {
    let metadata = files(place).into_iter().filter_map(|file| fs::metadata(file).ok());
    metadata.map(|metadata| metadata.blocks() * STAT_BLOCK).sum()
}

/// What came of a verification.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Damaged parts, as many as are told of.
    pub(crate) damage: Vec<Damage>,
    /// How many parts more are.
    pub(crate) more: u64,
    /// Files without checksums.
    pub(crate) unsummed: Vec<String>,
}

impl Found {
    fn add(&mut self, file: &str, problem: Problem) {
        self.put(Damage {
            file: file.to_owned(),
            problem,
        });
    }

    fn put(&mut self, damage: Damage) {
        match self.damage.len() < MOST_DAMAGE {
            true => self.damage.push(damage),
            false => self.more += 1,
        }
    }
}

/// Compares the files of a place, which is to have a disk or not, with their checksums.
pub(crate) fn verify(place: &Place, has_disk: bool, step: Step<'_>) -> Result<Found, Error> {
    let mut found = Found::default();
    let memory = memory_files::paths(place.directory());
    verify_state(place, memory.len(), &mut found)?;
    if has_disk && !place.disk().exists() {
        found.add("disk", Problem::Missing);
    }
    for file in files(place) {
        verify_file(&file, step, &mut found)?;
    }
    Ok(found)
}

/// The state has its own checksums, and says how many memory files there are.
fn verify_state(place: &Place, memory_files: usize, found: &mut Found) -> Result<(), Error> {
    let path = place.state();
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            found.add("state", Problem::Missing);
            return Ok(());
        }
        bytes => bytes.map_err(Error::file("read", &path))?,
    };
    match state_file::named(&bytes) {
        Ok(named) => {
            let missing = (memory_files..named).map(|number| name_of(&memory_files::path(Path::new(""), number)));
            missing.for_each(|name| found.add(&name, Problem::Missing));
        }
        Err(_) if Container::parse(&bytes).is_ok() && memory_files > 0 => {
            // It is whole, and of a version that says it in another way.
        }
        Err(why) => found.add("state", Problem::Invalid { why }),
    }
    Ok(())
}

fn verify_file(file: &Path, step: Step<'_>, found: &mut Found) -> Result<(), Error> {
    let name = name_of(file);
    let open = File::open(file).map_err(Error::file("open", file))?;
    let sums = match read_sums(&beside(file)) {
        Err(Error::File { cause, .. }) if cause.kind() == ErrorKind::NotFound => {
            found.unsummed.push(name);
            return Ok(());
        }
        Err(Error::File { cause, .. }) if cause.kind() == ErrorKind::InvalidData => {
            let why = cause.to_string();
            found.add(&name, Problem::Checksums { why });
            return Ok(());
        }
        sums => sums?,
    };
    let scan = Scan::of(&open, step).map_err(Error::file("read", file))?;
    for difference in sums.differences(&scan) {
        let damage = match difference {
            Difference::Content(part) => Damage::changed(&name, part.start, part.end - part.start),
            Difference::Unreadable(part) => Damage {
                problem: Problem::Unreadable {
                    offset: part.start,
                    bytes: part.end - part.start,
                },
                file: name.clone(),
            },
            Difference::Length { summed, found } => Damage {
                problem: Problem::Length {
                    expected: summed,
                    found,
                },
                file: name.clone(),
            },
        };
        found.put(damage);
    }
    Ok(())
}

fn read_sums(path: &Path) -> Result<Sums, Error> {
    let read = || {
        if fs::metadata(path)?.len() > MOST_SUMS {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                "the file of checksums is too long",
            ));
        }
        Sums::parse(&fs::read(path)?).map_err(|error| io::Error::new(ErrorKind::InvalidData, error.to_string()))
    };
    read().map_err(Error::file("read", path))
}

/// Where it stands that a place is damaged.
pub(crate) fn damage_file(place: &Place) -> PathBuf {
    place.directory().join("damage.json")
}

/// What the last verification has found to be damaged; none where nothing is known of damage.
pub(crate) fn known_damage(place: &Place) -> Vec<Damage> {
    let path = damage_file(place);
    let text = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(),
        text => text,
    };
    let known = text.and_then(|text| Ok(serde_json::from_slice::<Vec<Damage>>(&text)?));
    known.unwrap_or_else(|error| {
        vec![Damage {
            file: "damage.json".to_owned(),
            problem: Problem::Invalid {
                why: format!("it tells of damage, and cannot be read ({error})"),
            },
        }]
    })
}

/// Keeps what was found, for whoever comes later.
pub(crate) fn note_damage(place: &Place, damage: &[Damage]) -> Result<(), Error> {
    let path = damage_file(place);
    if damage.is_empty() {
        return match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::file("remove", &path)(error)),
            _ => Ok(()),
        };
    }
    let text = serde_json::to_vec_pretty(damage).map_err(|error| Error::Invalid(error.to_string()))?;
    put(&path, &text)
}

/// The refusal of a place whose record is of no use.
pub(crate) fn record_damaged(record: &Path, why: &str) -> Error {
    Error::SnapshotDamaged(format!(
        "the record {} is damaged ({why}): put it back from a backup, or load the snapshot under another name from a file or a registry \
         where it was saved",
        record.display()
    ))
}

/// Damage in few words: the first part, and how many more.
pub(crate) fn in_short(damage: &[Damage]) -> Option<String> {
    let first = damage.first()?.to_string();
    Some(match damage.len() {
        1 => first,
        parts => format!("{first}, and {} more", parts - 1),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::saved::state_file::tests::naming;

    const CHUNK: u64 = state::CHUNK;

    /// A place with two memory files and a disk, all of which have checksums.
    fn place(top: &Path) -> Place {
        let place = Place::new(top, "web");
        fs::create_dir(place.directory()).unwrap();
        fs::write(place.state(), naming(2)).unwrap();
        for name in ["memory", "memory.1", "disk"] {
            let file = File::create(place.directory().join(name)).unwrap();
            file.set_len(8 * CHUNK).unwrap();
            file.write_all_at(&vec![0x5a; 2 * 65536], CHUNK).unwrap();
        }
        assert_eq!(
            make_missing(&place, &mut at_once).unwrap(),
            ["memory", "memory.1", "disk"]
        );
        assert_eq!(make_missing(&place, &mut at_once).unwrap(), [""; 0]);
        place
    }

    fn found(damage: impl FnOnce(&Path)) -> Vec<String> {
        let top = tempfile::tempdir().unwrap();
        let place = place(top.path());
        assert_eq!(verify(&place, true, &mut at_once).unwrap(), Found::default());
        damage(place.directory());
        let found = verify(&place, true, &mut at_once).unwrap();
        assert_eq!(found.more, 0);
        found.damage.iter().map(Damage::to_string).collect()
    }

    fn flip(file: &Path, at: u64) {
        let file = File::options().read(true).write(true).open(file).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x80], at).unwrap();
    }

    #[test]
    fn one_bit_in_any_file_is_found_and_named() {
        assert_eq!(
            found(|at| flip(&at.join("memory"), CHUNK + 5)),
            ["memory: 64 KiB from offset 65536 have changed (guest physical 0x10000)"]
        );
        assert_eq!(
            found(|at| flip(&at.join("memory.1"), 7 * CHUNK)),
            ["memory.1: 64 KiB from offset 458752 have changed (guest physical 0x70000)"]
        );
        assert_eq!(
            found(|at| flip(&at.join("disk"), 2 * CHUNK)),
            ["disk: 64 KiB from offset 131072 have changed"]
        );
        let sums = found(|at| flip(&at.join("memory.sums"), 50));
        assert_eq!(
            sums,
            ["memory: it cannot be checked, as the file of checksums is damaged: its own checksum differs"]
        );
        let state = found(|at| flip(&at.join("state"), 200));
        assert!(state.len() == 1 && state[0].starts_with("state: "), "{state:?}");
    }

    #[test]
    fn what_is_cut_punched_or_missing_is_found_and_named() {
        let cut = |name: &'static str| {
            move |at: &Path| {
                let file = File::options().write(true).open(at.join(name)).unwrap();
                file.set_len(CHUNK).unwrap();
            }
        };
        let parts = found(cut("memory"));
        assert_eq!(parts, ["memory: it has 65536 bytes and had 524288"]);
        assert_eq!(found(cut("disk")), ["disk: it has 65536 bytes and had 524288"]);
        let punched = found(|at| {
            let file = File::options().write(true).open(at.join("memory")).unwrap();
            let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, flags, CHUNK, 2 * CHUNK).unwrap();
        });
        assert_eq!(
            punched,
            ["memory: 128 KiB from offset 65536 have changed (guest physical 0x10000)"]
        );
        for name in ["memory.1", "disk", "state"] {
            let missing = found(|at| fs::remove_file(at.join(name)).unwrap());
            assert_eq!(missing, [format!("{name}: it is missing")]);
        }
    }

    #[test]
    fn files_without_checksums_are_whole_until_they_have_some() {
        let top = tempfile::tempdir().unwrap();
        let place = place(top.path());
        remove(&place.disk()).unwrap();
        remove(&place.disk()).unwrap();
        flip(&place.disk(), 0);
        let found = verify(&place, true, &mut at_once).unwrap();
        assert_eq!((found.damage, found.unsummed), (vec![], vec!["disk".to_owned()]));
        make_missing(&place, &mut at_once).unwrap();
        flip(&place.disk(), 0);
        assert_eq!(verify(&place, true, &mut at_once).unwrap().damage.len(), 1);
    }

    #[test]
    fn many_damaged_parts_are_counted() {
        let top = tempfile::tempdir().unwrap();
        let place = place(top.path());
        let disk = File::options().write(true).open(place.disk()).unwrap();
        disk.set_len(400 * CHUNK).unwrap();
        make(&place.disk(), &mut at_once).unwrap();
        for part in 0..100 {
            disk.write_all_at(b"x", (10 + 2 * part) * CHUNK).unwrap();
        }
        let found = verify(&place, true, &mut at_once).unwrap();
        assert_eq!(
            (found.damage.len(), found.more),
            (MOST_DAMAGE, 100 - MOST_DAMAGE as u64)
        );
    }

    #[test]
    fn what_was_found_is_kept_until_nothing_is_found() {
        let top = tempfile::tempdir().unwrap();
        let place = place(top.path());
        assert_eq!(in_short(&known_damage(&place)), None);
        let damage = vec![
            Damage::changed("disk", 0, CHUNK),
            Damage::changed("disk", 2 * CHUNK, CHUNK),
        ];
        note_damage(&place, &damage).unwrap();
        assert_eq!(known_damage(&place), damage);
        let told = in_short(&known_damage(&place)).unwrap();
        assert_eq!(told, "disk: 64 KiB from offset 0 have changed, and 1 more");
        // It tells of damage, whatever is in it.
        fs::write(damage_file(&place), "[").unwrap();
        assert!(in_short(&known_damage(&place)).unwrap().contains("damage.json"));
        for _ in 0..2 {
            note_damage(&place, &[]).unwrap();
            assert_eq!(known_damage(&place), []);
        }
    }

    #[test]
    fn checksums_go_where_their_files_go() {
        let top = tempfile::tempdir().unwrap();
        let place = place(top.path());
        let sandbox = top.path().join("sandbox");
        fs::create_dir(&sandbox).unwrap();
        memory_files::share(place.directory(), &sandbox).unwrap();
        let sums = |directory: &Path, name: &str| memory_files::identity(&directory.join(name)).unwrap();
        for name in ["memory.sums", "memory.1.sums"] {
            assert_eq!(sums(&sandbox, name), sums(place.directory(), name));
        }
        assert!(!sandbox.join("disk.sums").exists());
        // Made later, they follow.
        fs::remove_file(sandbox.join("memory.1.sums")).unwrap();
        memory_files::share_sums(place.directory(), &sandbox).unwrap();
        assert_eq!(
            sums(&sandbox, "memory.1.sums"),
            sums(place.directory(), "memory.1.sums")
        );
        memory_files::remove(&sandbox).unwrap();
        assert_eq!(fs::read_dir(&sandbox).unwrap().count(), 0);
    }
}
