//! The sandboxes' own records: `sandboxes/ID/record.json`, the second copy of what the database has, written again at every
//! change. Reads and writes them; which of the two copies counts is `merge`'s affair.
//!
//! A record is replaced by a rename, so whoever reads it finds the old one or the new one. From the moment that a sandbox is
//! acknowledged the new one is on the disk before it gets the name, so that a power failure leaves one of the two, too.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::Error;
use crate::store::database::{MAX_SANDBOXES, Stored};

const RECORD: &str = "record.json";

/// What a record is called until it is whole.
const NEXT: &str = "record.new";

/// It has the environment of the sandbox's command, which may hold secrets.
const MODE: u32 = 0o600;

/// Where a change must have come to before it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// A daemon that is killed does not lose it.
    Kernel,
    /// A power failure does not lose it either.
    Disk,
}

/// A directory below `sandboxes/`.
#[derive(Debug)]
pub(crate) struct Directory {
    pub(crate) id: String,
    /// Its record, or why there is none that can be used.
    pub(crate) record: Result<Stored, String>,
    /// There are other files in it than records.
    pub(crate) has_files: bool,
}

/// Writes the record of the sandbox in `directory`.
pub(crate) fn write(directory: &Path, stored: &Stored, reach: Reach) -> Result<(), Error> {
    let text = serde_json::to_vec(stored).map_err(|error| Error::Invalid(error.to_string()))?;
    let (path, next) = (directory.join(RECORD), directory.join(NEXT));
    let write = || -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(MODE);
        let mut file = options.open(&next)?;
        file.write_all(&text)?;
        if reach == Reach::Disk {
            file.sync_data()?;
        }
        fs::rename(&next, &path)
    };
    write().map_err(Error::file("write", &path))
}

/// Waits until the record of the sandbox in `directory` is on the disk, with the names of all that is there and of the directory.
pub(crate) fn sync(directory: &Path) -> Result<(), Error> {
    sync_file(&directory.join(RECORD))?;
    sync_directory(directory)?;
    directory.parent().map_or(Ok(()), sync_directory)
}

/// Waits until what a file has is on the disk.
pub(crate) fn sync_file(path: &Path) -> Result<(), Error> {
    let synced = File::open(path).and_then(|file| file.sync_data());
    synced.map_err(Error::file("write", path))
}

/// Waits until the names in a directory are on the disk.
pub(crate) fn sync_directory(path: &Path) -> Result<(), Error> {
    let synced = File::open(path).and_then(|directory| directory.sync_all());
    synced.map_err(Error::file("write", path))
}

/// All directories of sandboxes. What begins with a dot is being removed, and is none.
pub(crate) fn scan(sandboxes: &Path) -> Result<Vec<Directory>, Error> {
    let mut found = Vec::new();
    for entry in fs::read_dir(sandboxes).map_err(Error::file("list", sandboxes))? {
        let entry = entry.map_err(Error::file("list", sandboxes))?;
        let id = entry.file_name().to_string_lossy().into_owned();
        if id.starts_with('.') {
            continue;
        }
        let files = fs::read_dir(entry.path()).into_iter().flatten().flatten();
        let mut names = files.map(|file| file.file_name());
        found.push(Directory {
            record: read(&entry.path(), &id),
            has_files: names.any(|name| name != RECORD && name != NEXT),
            id,
        });
    }
    Ok(found)
}

fn read(directory: &Path, id: &str) -> Result<Stored, String> {
    let text = match fs::read(directory.join(RECORD)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err("it has no record.json".into()),
        text => text.map_err(|error| format!("its record.json cannot be read: {error}"))?,
    };
    let stored: Stored =
        serde_json::from_slice(&text).map_err(|error| format!("its record.json is damaged: {error}"))?;
    if stored.sandbox.id != id {
        return Err(format!("its record.json is of the sandbox {}", stored.sandbox.id));
    }
    if stored.slot >= MAX_SANDBOXES {
        return Err(format!(
            "its record.json says slot {}, which no sandbox has",
            stored.slot
        ));
    }
    Ok(stored)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stored;

    #[test]
    fn a_record_is_replaced_as_a_whole() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("aaaaaaaaaaaa");
        fs::create_dir(&directory).unwrap();
        let mut one = stored("aaaaaaaaaaaa", "one");
        write(&directory, &one, Reach::Kernel).unwrap();
        // A daemon that was killed while it wrote the next one.
        fs::write(directory.join(NEXT), "{\"half\":").unwrap();
        let found = scan(top.path()).unwrap().remove(0);
        assert_eq!((found.record.as_ref(), found.has_files), (Ok(&one), false));
        one.generation = 9;
        write(&directory, &one, Reach::Disk).unwrap();
        fs::write(directory.join("disk"), "x").unwrap();
        sync(&directory).unwrap();
        sync_file(&directory.join("disk")).unwrap();
        let found = scan(top.path()).unwrap().remove(0);
        assert_eq!((found.record.as_ref(), found.has_files), (Ok(&one), true));
        assert!(!directory.join(NEXT).exists());
    }

    #[test]
    fn what_is_no_record_of_this_sandbox_is_told() {
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("aaaaaaaaaaaa");
        fs::create_dir(&directory).unwrap();
        fs::create_dir(top.path().join(".removed")).unwrap();
        let why = || {
            let found = scan(top.path()).unwrap();
            assert_eq!(found.len(), 1, "what is being removed is no sandbox");
            found.into_iter().next().unwrap().record.unwrap_err()
        };
        assert!(why().contains("no record"), "{}", why());
        for (text, says) in [("", "damaged"), ("{}", "damaged"), ("\0\0\0", "damaged")] {
            fs::write(directory.join(RECORD), text).unwrap();
            assert!(why().contains(says), "{}", why());
        }
        write(&directory, &stored("bbbbbbbbbbbb", "two"), Reach::Kernel).unwrap();
        assert!(why().contains("bbbbbbbbbbbb"), "{}", why());
        let mut far = stored("aaaaaaaaaaaa", "one");
        far.slot = MAX_SANDBOXES;
        write(&directory, &far, Reach::Kernel).unwrap();
        assert!(why().contains("slot"), "{}", why());
    }
}
