//! The quarantine: what a daemon found in its state directory and could not tell whose it is. It is moved here, never deleted;
//! only `basalt prune --quarantine --force` deletes it.
//!
//! ```text
//!  quarantine/TIME-KIND-NAME/    NAME: what was found, as it was
//!                                why.txt: what was wrong with it, and how it can be brought back
//! ```
//! The note is written first: what is here always says why.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use node_api::recovery::{DAMAGED_DATABASE, REPORT, Subject};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::store::paths::Paths;
use crate::store::records::sync_directory;
use crate::{Error, clock};

/// What is here may hold secrets of guests.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

const NOTE: &str = "why.txt";

/// Moves `path` here; where it is now.
pub(crate) fn set_aside(paths: &Paths, subject: Subject, path: &Path, why: &str) -> Result<PathBuf, Error> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let quarantine = paths.quarantine();
    let place = quarantine.join(format!("{}-{subject}-{name}", clock::now_ns()));
    let made = DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(&place);
    made.map_err(Error::file("make", &place))?;
    let note = place.join(NOTE);
    let text = format!(
        "This was {} and was set aside when basaltd was started: {why}.\n\
         Nothing of it was changed. If you know what it is, end basaltd, move `{name}` back to where it was, and start basaltd.\n\
         If nobody needs it, `basalt prune --quarantine --force` deletes it with everything else that is here.\n",
        path.display(),
    );
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(FILE_MODE);
    let written = options.open(&note).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(Error::file("write", &note))?;
    let moved = renameat_with(CWD, path, CWD, place.join(&name), RenameFlags::NOREPLACE);
    if let Err(error) = moved {
        // Nothing was moved: a note alone would mislead.
        fs::remove_dir_all(&place).map_err(Error::file("remove", &place))?;
        return Err(Error::file("set aside", path)(error));
    }
    sync_directory(&place)?;
    sync_directory(&quarantine)?;
    path.parent().map_or(Ok(()), sync_directory)?;
    Ok(place)
}

/// What is here, and the damaged databases that were set aside: their names below the state directory.
pub(crate) fn list(paths: &Paths) -> Result<Vec<String>, Error> {
    let mut found = Vec::new();
    let quarantine = paths.quarantine();
    for name in names(&quarantine)? {
        found.push(format!("{}/{name}", node_api::recovery::QUARANTINE));
    }
    let databases = names(paths.state())?.into_iter();
    found.extend(databases.filter(|name| name.starts_with(DAMAGED_DATABASE)));
    found.sort();
    Ok(found)
}

/// Deletes all of that by `remove`, which must bear whatever a guest has made of it, and the report of it; what was deleted.
pub(crate) fn prune(paths: &Paths, remove: impl Fn(&Path) -> io::Result<()>) -> Result<Vec<String>, Error> {
    let found = list(paths)?;
    for name in &found {
        let path = paths.state().join(name);
        remove(&path).map_err(Error::file("remove", &path))?;
    }
    let report = paths.state().join(REPORT);
    match fs::remove_file(&report) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::file("remove", &report)(error)),
        _ => Ok(found),
    }
}

fn names(directory: &Path) -> Result<Vec<String>, Error> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::file("list", directory))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::file("list", directory))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn remove(path: &Path) -> io::Result<()> {
        match path.is_dir() {
            true => fs::remove_dir_all(path),
            false => fs::remove_file(path),
        }
    }

    #[test]
    fn what_is_set_aside_is_whole_says_why_and_goes_when_it_is_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let paths = Paths::new(directory.path().to_owned());
        assert!(list(&paths).unwrap().is_empty());
        let lost = paths.sandboxes().join("aaaaaaaaaaaa");
        fs::create_dir_all(&lost).unwrap();
        fs::write(lost.join("disk"), "precious").unwrap();
        let place = set_aside(&paths, Subject::Sandbox, &lost, "it has no record.json").unwrap();
        assert!(!lost.exists());
        assert_eq!(fs::read_to_string(place.join("aaaaaaaaaaaa/disk")).unwrap(), "precious");
        let note = fs::read_to_string(place.join(NOTE)).unwrap();
        assert!(
            note.contains("it has no record.json") && note.contains("sandboxes/aaaaaaaaaaaa"),
            "{note}"
        );
        for path in [&place, &paths.quarantine()] {
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o700);
        }
        fs::write(directory.path().join("node.db.damaged-1"), "x").unwrap();
        fs::write(directory.path().join("node.db"), "not this").unwrap();
        let found = list(&paths).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[1].ends_with("-sandbox-aaaaaaaaaaaa"), "{found:?}");
        assert_eq!(prune(&paths, remove).unwrap(), found);
        assert!(list(&paths).unwrap().is_empty() && paths.database().exists());
    }

    #[test]
    fn what_cannot_be_moved_stays_where_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let paths = Paths::new(directory.path().to_owned());
        let gone = paths.sandboxes().join("aaaaaaaaaaaa");
        set_aside(&paths, Subject::Sandbox, &gone, "it never was").unwrap_err();
        assert!(list(&paths).unwrap().is_empty());
    }
}
