//! What the daemon knows of its sandboxes, on disk: SQLite with a write-ahead log. A commit reaches the kernel before it
//! returns, so that `kill -9` loses nothing; it does not reach the disk, because what a power failure takes away has lost
//! its VMs anyway, and the log keeps the file whole.
//!
//! Each sandbox is one JSON document. Its newest change is the truth; nothing here knows what the states mean.

use std::fs;
use std::path::Path;
use std::time::Duration;

use agent_api::ExecRequest;
use node_api::Sandbox;
use rusqlite::{Connection, OpenFlags, params};
use serde::{Deserialize, Serialize};

use crate::Error;

/// A sandbox, and what only the daemon needs to know of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stored {
    /// What everybody may know.
    pub(crate) sandbox: Sandbox,
    /// Its number among those that are there: its user id and network address come from it.
    pub(crate) slot: u32,
    /// What runs in it.
    pub(crate) command: ExecRequest,
    /// How long its log was when its VM was last started: what is before belongs to earlier ones.
    #[serde(default)]
    pub(crate) log_from: u64,
    /// It has a place in the node's network.
    #[serde(default)]
    pub(crate) networked: bool,
    /// Somebody asked for its end.
    #[serde(default)]
    pub(crate) stopped: bool,
    /// It is held still for a snapshot: whoever finds it so lets it go on.
    #[serde(default)]
    pub(crate) held: bool,
    /// A template is built in it: without its asker, and this daemon, it is nobody's.
    #[serde(default)]
    pub(crate) building: bool,
    /// Its machine has as many devices for shared directories.
    #[serde(default)]
    pub(crate) share_slots: usize,
}

/// The database.
#[derive(Debug)]
pub(crate) struct Database(Connection);

/// What became of the database when it was opened.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    /// It was whole, or there was none yet.
    Whole,
    /// It was damaged and has been put aside under this name; the new one is empty.
    Replaced(std::path::PathBuf),
}

const SCHEMA: &str =
    "CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, stored TEXT NOT NULL) STRICT, WITHOUT ROWID;";

/// Counts up when older daemons would misread the tables.
const SCHEMA_VERSION: i64 = 1;

impl Database {
    /// Opens the database at `path`. One that is damaged is put aside, and an empty one takes its place.
    pub(crate) fn open(path: &Path) -> Result<(Self, Opened), Error> {
        match Self::try_open(path) {
            Ok(database) => Ok((database, Opened::Whole)),
            Err(error) if is_damage(&error) => {
                let aside = put_aside(path)?;
                Ok((Self::try_open(path)?, Opened::Replaced(aside)))
            }
            Err(error) => Err(error),
        }
    }

    fn try_open(path: &Path) -> Result<Self, Error> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags).map_err(Error::database("opening"))?;
        connection
            .busy_timeout(Duration::from_secs(5))
            .map_err(Error::database("opening"))?;
        let check: String = connection
            .query_row("PRAGMA quick_check(1)", [], |row| row.get(0))
            .map_err(Error::database("checking"))?;
        if check != "ok" {
            return Err(Error::DatabaseDamaged(check));
        }
        let version: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(Error::database("reading"))?;
        if version > SCHEMA_VERSION {
            return Err(Error::DatabaseNewer {
                found: version,
                known: SCHEMA_VERSION,
            });
        }
        let setup = format!(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA user_version = {SCHEMA_VERSION}; {SCHEMA}"
        );
        connection.execute_batch(&setup).map_err(Error::database("preparing"))?;
        let database = Self(connection);
        // What cannot be read now could not be read later.
        database.all()?;
        Ok(database)
    }

    /// Every sandbox.
    pub(crate) fn all(&self) -> Result<Vec<Stored>, Error> {
        let mut statement = self
            .0
            .prepare("SELECT stored FROM sandboxes")
            .map_err(Error::database("reading"))?;
        let rows = statement
            .query_map([], |row| row.get::<_, String>(0))
            .map_err(Error::database("reading"))?;
        let parse = |row: rusqlite::Result<String>| {
            let text = row.map_err(Error::database("reading"))?;
            serde_json::from_str(&text).map_err(|error| Error::DatabaseDamaged(error.to_string()))
        };
        rows.map(parse).collect()
    }

    /// Keeps a sandbox as it is now.
    pub(crate) fn put(&self, stored: &Stored) -> Result<(), Error> {
        let text = serde_json::to_string(stored).map_err(|error| Error::DatabaseDamaged(error.to_string()))?;
        let mut statement = self
            .0
            .prepare_cached("INSERT INTO sandboxes VALUES (?1, ?2) ON CONFLICT (id) DO UPDATE SET stored = ?2")
            .map_err(Error::database("writing to"))?;
        statement
            .execute(params![stored.sandbox.id, text])
            .map_err(Error::database("writing to"))?;
        Ok(())
    }

    /// Forgets a sandbox; it is fine if it is not known.
    pub(crate) fn delete(&self, id: &str) -> Result<(), Error> {
        self.0
            .execute("DELETE FROM sandboxes WHERE id = ?1", [id])
            .map_err(Error::database("writing to"))?;
        Ok(())
    }
}

fn is_damage(error: &Error) -> bool {
    use rusqlite::ErrorCode;
    match error {
        Error::DatabaseDamaged(_) => true,
        Error::Database { cause, .. } => matches!(
            cause.sqlite_error_code(),
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
        ),
        _ => false,
    }
}

/// Renames the database and its log out of the way.
fn put_aside(path: &Path) -> Result<std::path::PathBuf, Error> {
    let mark = crate::clock::now_ns();
    let named = |suffix: &str| std::path::PathBuf::from(format!("{}{suffix}", path.display()));
    let aside = named(&format!(".damaged-{mark}"));
    fs::rename(path, &aside).map_err(Error::file("put aside", path))?;
    for suffix in ["-wal", "-shm"] {
        match fs::remove_file(named(suffix)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::file("remove", &named(suffix))(error));
            }
            _ => (),
        }
    }
    Ok(aside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stored;

    #[test]
    fn what_was_put_is_there_after_a_crash() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.db");
        let (database, opened) = Database::open(&path).unwrap();
        assert_eq!(opened, Opened::Whole);
        let (one, mut two) = (stored("aaaaaaaaaaaa", "one"), stored("bbbbbbbbbbbb", "two"));
        database.put(&one).unwrap();
        database.put(&two).unwrap();
        two.sandbox.restarts = 7;
        database.put(&two).unwrap();
        database.delete("aaaaaaaaaaaa").unwrap();
        database.delete("aaaaaaaaaaaa").unwrap();
        // No orderly end: the files as they lie there.
        let copy = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(directory.path()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
        let (database, opened) = Database::open(&copy.path().join("node.db")).unwrap();
        assert_eq!((opened, database.all().unwrap()), (Opened::Whole, vec![two]));
    }

    #[test]
    fn a_damaged_one_is_put_aside() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.db");
        for damage in [
            "",
            "this is no database, and long enough to be seen as none of its kind, whatever it is",
        ] {
            let (database, _) = Database::open(&path).unwrap();
            database.put(&stored("aaaaaaaaaaaa", "one")).unwrap();
            if damage.is_empty() {
                database.0.execute("UPDATE sandboxes SET stored = '{}'", []).unwrap();
            }
            drop(database);
            if !damage.is_empty() {
                fs::write(&path, damage.repeat(100)).unwrap();
            }
            let (database, opened) = Database::open(&path).unwrap();
            let Opened::Replaced(aside) = opened else {
                panic!("{opened:?}")
            };
            assert!(aside.exists() && database.all().unwrap().is_empty());
        }
    }

    #[test]
    fn a_newer_one_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.db");
        let (database, _) = Database::open(&path).unwrap();
        database.0.execute_batch("PRAGMA user_version = 99").unwrap();
        drop(database);
        let error = Database::open(&path).unwrap_err();
        assert!(error.to_string().contains("99"), "{error}");
    }
}
