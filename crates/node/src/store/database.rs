//! What the daemon knows of its sandboxes, on disk: SQLite with a write-ahead log. A commit reaches the kernel before it
//! returns, so that `kill -9` loses nothing. One that a power failure must not lose either is followed by [`Database::sync`], which
//! does what `synchronous=FULL` does at each commit, once for all that were made until then.
//!
//! Each sandbox is one JSON document. Nothing here knows what the states mean, nor that each sandbox has a record of its own.
//! A database that cannot be read is set aside with its log, never written over.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_api::ExecRequest;
use base::PciAddress;
use node_api::recovery::DAMAGED_DATABASE;
use node_api::{Sandbox, State};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, params};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::store::devices::{self, StoredDevices};
use crate::store::operation::Operation;

/// The most sandboxes of one node: as many as there are users and addresses for. Slots are below it.
pub(crate) const MAX_SANDBOXES: u32 = 4096;

/// A sandbox, and what only the daemon needs to know of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stored {
    /// What everybody may know.
    pub(crate) sandbox: Sandbox,
    /// Counts up at every change, so that the newer of two copies is known. Zero: as a daemon wrote it that did not count.
    #[serde(default)]
    pub(crate) generation: u64,
    /// It has run, and whoever asked for it was told so: from here on it goes only if somebody asks for that.
    #[serde(default)]
    pub(crate) acknowledged: bool,
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
    /// What is under way with it.
    #[serde(
        default,
        alias = "held",
        deserialize_with = "Operation::read",
        skip_serializing_if = "Option::is_none"
    )]
    pub(crate) operation: Option<Operation>,
    /// A template is built in it: without its asker, and this daemon, it is nobody's.
    #[serde(default)]
    pub(crate) building: bool,
    /// It was suspended once: from then on a power failure must not lose what its record says, also if it is to be removed at its end.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) was_suspended: bool,
    /// Its machine has as many devices for shared directories.
    #[serde(default)]
    pub(crate) share_slots: usize,
    /// Devices of the host's that were detached for what is under way with it, or was: it gets them again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) detached: Vec<PciAddress>,
    /// All memory of its machine is its own, as a device was to reach it: it shares none with others that come of the same files.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) memory_is_private: bool,
    /// Memory of its machine that came zeroed.
    #[serde(default, skip_serializing_if = "CameZeroed::is_none")]
    pub(crate) came_zeroed: CameZeroed,
}

/// What a machine has of memory that was zeroed before it was given that, which is charged to the cgroup of whoever has zeroed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CameZeroed {
    /// So many bytes at most: what its VMM has taken, less what its guest cannot have any more.
    pub(crate) bytes: u64,
    /// All of it is there, and stays: its devices reach it, and its guest was not asked to give memory back.
    pub(crate) stays: bool,
}

impl CameZeroed {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// How much can be charged to no other cgroup.
    pub(crate) fn for_sure(self) -> u64 {
        if self.stays { self.bytes } else { 0 }
    }
}

impl Stored {
    /// Whether it has ever run. Earlier daemons told it by the state alone.
    pub(crate) fn is_acknowledged(&self) -> bool {
        let made = !matches!(self.sandbox.state, State::Creating | State::Starting);
        self.acknowledged || self.sandbox.restarts > 0 || (self.generation == 0 && made)
    }

    /// What is under way with it, as far as its record tells.
    pub(crate) fn under_way(&self) -> Option<Operation> {
        let told = || Operation::of_state(self.sandbox.state);
        self.operation.clone().or_else(told)
    }

    /// It has a command of its own, with which it ends.
    pub(crate) fn has_command(&self) -> bool {
        !self.sandbox.config.process.idle
    }

    /// Its machine stands still, and goes on.
    pub(crate) fn is_held(&self) -> bool {
        matches!(
            self.operation,
            Some(
                Operation::Snapshot
                    | Operation::Suspend { .. }
                    | Operation::Resume { is_spent: true }
                    | Operation::Move { .. }
            )
        )
    }

    /// Its devices stay its own although its machine ends: what is under way goes on with another one.
    pub(crate) fn keeps_devices(&self) -> bool {
        let goes_on = |operation: &Operation| {
            matches!(
                operation,
                Operation::Rollback { .. } | Operation::Move { saved_at: Some(_), .. }
            )
        };
        !self.detached.is_empty() && self.operation.as_ref().is_some_and(goes_on)
    }

    /// This is under way from here on.
    pub(crate) fn begins(&mut self, operation: Operation) {
        self.sandbox.state = operation.shown().unwrap_or(self.sandbox.state);
        self.operation = Some(operation);
    }

    /// Its time begins at this moment, in nanoseconds since 1970.
    pub(crate) fn begins_time(&mut self, now: u64) {
        let limit = self.sandbox.config.time_limit.filter(|_| self.sandbox.state.has_vm());
        self.sandbox.ends_ns = limit.map(|limit| limit.end(now));
    }

    /// Nothing is under way any more.
    pub(crate) fn rests_as(&mut self, state: State) {
        (self.sandbox.state, self.operation) = (state, None);
    }

    /// Whether it is to be there after its VM has ended: others need not survive a power failure.
    pub(crate) fn lasts(&self) -> bool {
        (!self.sandbox.config.remove || self.was_suspended) && !self.building
    }
}

/// The database.
#[derive(Debug)]
pub(crate) struct Database {
    pub(super) connection: Connection,
    path: PathBuf,
}

/// What became of the database when it was opened.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    /// It was whole.
    Whole,
    /// There was none.
    New,
    /// It was damaged and has this name now; the new one is empty.
    SetAside {
        /// Where it is.
        aside: PathBuf,
        /// What was wrong with it.
        why: String,
    },
}

/// A database with what was in it.
#[derive(Debug)]
pub(crate) struct Contents {
    pub(crate) database: Database,
    pub(crate) opened: Opened,
    /// What could be read, of one that was set aside too.
    pub(crate) rows: Vec<Stored>,
    /// The same of the host's devices.
    pub(crate) devices: StoredDevices,
}

const SCHEMA: &str =
    "CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, stored TEXT NOT NULL) STRICT, WITHOUT ROWID;";

/// Counts up when older daemons would misread the tables.
const SCHEMA_VERSION: i64 = 2;

/// What SQLite keeps beside a database.
const WAL: &str = "-wal";
const SHM: &str = "-shm";

impl Database {
    /// Opens the database at `path`. One that is damaged is set aside with its log, and an empty one takes its place.
    pub(crate) fn open(path: &Path) -> Result<Contents, Error> {
        let (mut rows, mut devices) = (Vec::new(), StoredDevices::default());
        let opened = match find_damage(path, (&mut rows, &mut devices))? {
            Some(why) => Opened::SetAside {
                aside: set_aside(path)?,
                why,
            },
            None if path.exists() && !is_empty(path) => Opened::Whole,
            None => Opened::New,
        };
        let database = Self::make(path)?;
        Ok(Contents {
            database,
            opened,
            rows,
            devices,
        })
    }

    fn make(path: &Path) -> Result<Self, Error> {
        let connection = connect(path)?;
        let version: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(Error::database("reading"))?;
        // Setting it writes, which needs space.
        let numbered = match version {
            SCHEMA_VERSION => String::new(),
            _ => format!("PRAGMA user_version = {SCHEMA_VERSION};"),
        };
        let setup = format!(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; {numbered} {SCHEMA} {}",
            devices::SCHEMA
        );
        connection.execute_batch(&setup).map_err(Error::database("preparing"))?;
        Ok(Self {
            connection,
            path: path.to_owned(),
        })
    }

    /// Keeps a sandbox as it is now.
    pub(crate) fn put(&self, stored: &Stored) -> Result<(), Error> {
        let text = serde_json::to_string(stored).map_err(|error| Error::DatabaseDamaged(error.to_string()))?;
        let mut statement = self
            .connection
            .prepare_cached("INSERT INTO sandboxes VALUES (?1, ?2) ON CONFLICT (id) DO UPDATE SET stored = ?2")
            .map_err(Error::database("writing to"))?;
        statement
            .execute(params![stored.sandbox.id, text])
            .map_err(Error::database("writing to"))?;
        Ok(())
    }

    /// Forgets a sandbox; it is fine if it is not known.
    pub(crate) fn delete(&self, id: &str) -> Result<(), Error> {
        self.connection
            .execute("DELETE FROM sandboxes WHERE id = ?1", [id])
            .map_err(Error::database("writing to"))?;
        Ok(())
    }

    /// What [`Database::sync`] needs: whoever holds no lock can have it done.
    pub(crate) fn log(&self) -> PathBuf {
        beside(&self.path, WAL)
    }

    /// Waits until every commit that has been made until now is on the disk. `log` is its write-ahead log, which SQLite brings to the
    /// disk itself before it takes anything over from there.
    pub(crate) fn sync(log: &Path) -> Result<(), Error> {
        let synced = File::open(log).and_then(|log| log.sync_data());
        synced.map_err(Error::file("write", log))
    }
}

fn connect(path: &Path) -> Result<Connection, Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(Error::database("opening"))?;
    connection
        .busy_timeout(Duration::from_secs(5))
        .map_err(Error::database("opening"))?;
    Ok(connection)
}

/// Looks through the database at `path`, if there is one, and reads its rows, as many as can be read. Gives what is wrong with it
/// where that must not be written to any more.
fn find_damage(path: &Path, (rows, kept): (&mut Vec<Stored>, &mut StoredDevices)) -> Result<Option<String>, Error> {
    if path.is_dir() {
        return Ok(Some("it is a directory".into()));
    }
    if is_empty(path) {
        // SQLite would remove the log of an empty database, whatever is in it.
        let has_log = fs::metadata(beside(path, WAL)).is_ok_and(|log| log.len() > 0);
        return Ok(has_log.then(|| "it is empty or missing, and its write-ahead log is not".into()));
    }
    let connection = connect(path)?;
    // Looked at and closed again, a damaged one stays as it is, with its log.
    connection
        .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)
        .map_err(Error::database("opening"))?;
    let checked = check(&connection);
    let read = match &checked {
        Err(Error::DatabaseNewer { .. }) => Ok(()),
        _ => read_rows(&connection, rows).and(devices::read(&connection, kept)),
    };
    match checked.and(read) {
        Ok(()) => Ok(None),
        Err(error) if is_damage(&error) => Ok(Some(match error {
            Error::Database { cause, .. } => cause.to_string(),
            Error::DatabaseDamaged(why) => why,
            other => other.to_string(),
        })),
        Err(error) => Err(error),
    }
}

fn check(connection: &Connection) -> Result<(), Error> {
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
    // One that was killed before it had its table has no rows.
    let tables = "SELECT count(*) FROM sqlite_schema WHERE name = 'sandboxes'";
    let tables: i64 = connection
        .query_row(tables, [], |row| row.get(0))
        .map_err(Error::database("reading"))?;
    match (tables, version) {
        (0, 1..) => Err(Error::DatabaseDamaged("it has no table of sandboxes".into())),
        _ => Ok(()),
    }
}

fn read_rows(connection: &Connection, rows: &mut Vec<Stored>) -> Result<(), Error> {
    let key = |stored: &Stored| stored.sandbox.id.clone();
    read_table(connection, "SELECT id, stored FROM sandboxes", ("sandbox", key), rows)
}

/// Reads a table's rows, of a key and what is stored, until there are no more or one cannot be reached; then tells of the first that is none,
/// or that is another's by its key.
pub(super) fn read_table<T: DeserializeOwned>(
    connection: &Connection,
    query: &str,
    (kind, key_of): (&str, impl Fn(&T) -> String),
    into: &mut Vec<T>,
) -> Result<(), Error> {
    let mut statement = match connection.prepare(query) {
        // Not even made, or by an earlier daemon, which had no such table: `check` has seen that this is no damage.
        Err(rusqlite::Error::SqliteFailure(_, Some(why))) if why.contains("no such table") => return Ok(()),
        statement => statement.map_err(Error::database("reading"))?,
    };
    let found = statement
        .query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))
        .map_err(Error::database("reading"))?;
    let mut damaged = None;
    for row in found {
        let (key, text) = row.map_err(Error::database("reading"))?;
        match serde_json::from_str::<T>(&text) {
            Ok(stored) if key_of(&stored) == key => into.push(stored),
            Ok(_) => damaged = Some(format!("the row of {kind} {key} is of another one")),
            Err(error) => damaged = Some(format!("the row of {kind} {key} cannot be read: {error}")),
        }
    }
    damaged.map_or(Ok(()), |why| Err(Error::DatabaseDamaged(why)))
}

/// There is nothing in it, or no such file.
fn is_empty(path: &Path) -> bool {
    fs::metadata(path).map_or(true, |database| database.len() == 0)
}

/// Whether it is the database that an error is about, and not the host: on a host that cannot read or write just now, nothing is
/// set aside.
fn is_damage(error: &Error) -> bool {
    use rusqlite::ErrorCode;
    match error {
        Error::DatabaseDamaged(_) => true,
        Error::Database { cause, .. } => !matches!(
            cause.sqlite_error_code(),
            Some(
                ErrorCode::DatabaseBusy
                    | ErrorCode::DatabaseLocked
                    | ErrorCode::SystemIoFailure
                    | ErrorCode::DiskFull
                    | ErrorCode::CannotOpen
                    | ErrorCode::PermissionDenied
                    | ErrorCode::ReadOnly
                    | ErrorCode::OutOfMemory
                    | ErrorCode::OperationInterrupted
            )
        ),
        _ => false,
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Renames a database together with its log, so that both can still be read together.
fn set_aside(path: &Path) -> Result<PathBuf, Error> {
    let aside = path.with_file_name(format!("{DAMAGED_DATABASE}{}", crate::clock::now_ns()));
    for suffix in [WAL, SHM, ""] {
        let (from, to) = (beside(path, suffix), beside(&aside, suffix));
        match fs::rename(&from, &to) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => (),
            renamed => renamed.map_err(Error::file("put aside", &from))?,
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
        let Contents { database, opened, .. } = Database::open(&path).unwrap();
        assert_eq!(opened, Opened::New);
        let (one, mut two) = (stored("aaaaaaaaaaaa", "one"), stored("bbbbbbbbbbbb", "two"));
        database.put(&one).unwrap();
        database.put(&two).unwrap();
        two.sandbox.restarts = 7;
        database.put(&two).unwrap();
        database.delete("aaaaaaaaaaaa").unwrap();
        database.delete("aaaaaaaaaaaa").unwrap();
        Database::sync(&database.log()).unwrap();
        // No orderly end: the files as they lie there.
        let copy = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(directory.path()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
        let contents = Database::open(&copy.path().join("node.db")).unwrap();
        assert_eq!((contents.opened, contents.rows), (Opened::Whole, vec![two]));
    }

    #[test]
    fn a_damaged_one_is_set_aside_with_its_log() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.db");
        let names = || {
            let entries = fs::read_dir(directory.path()).unwrap().flatten();
            let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
            names.filter(|name| name.starts_with(DAMAGED_DATABASE)).count()
        };
        // What a daemon leaves that was killed: a log that has not all of the database.
        let contents = Database::open(&path).unwrap();
        let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
        let connection = &contents.database.connection;
        connection.query_row(checkpoint, [], |_| Ok(())).unwrap();
        connection
            .execute("INSERT INTO sandboxes VALUES ('aaaaaaaaaaaa', '{}')", [])
            .unwrap();
        let log = fs::read(beside(&path, WAL)).unwrap();
        assert!(log.len() > 4096);
        std::mem::forget(contents);
        fs::write(
            &path,
            "this is no database, and long enough to be seen as none".repeat(100),
        )
        .unwrap();
        let contents = Database::open(&path).unwrap();
        let Opened::SetAside { ref aside, .. } = contents.opened else {
            panic!("{:?}", contents.opened)
        };
        assert!(contents.rows.is_empty());
        assert_eq!(fs::read(beside(aside, WAL)).unwrap(), log);
        let of_first = names();
        // One row that is none: the others are read, and the whole is kept.
        contents.database.put(&stored("bbbbbbbbbbbb", "two")).unwrap();
        let spoil = "INSERT INTO sandboxes VALUES ('cccccccccccc', '{}')";
        contents.database.connection.execute(spoil, []).unwrap();
        drop(contents);
        let contents = Database::open(&path).unwrap();
        assert!(
            matches!(contents.opened, Opened::SetAside { .. }),
            "{:?}",
            contents.opened
        );
        assert_eq!(contents.rows, [stored("bbbbbbbbbbbb", "two")]);
        assert!(names() > of_first);
    }

    #[test]
    fn a_log_without_its_database_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.db");
        for empty in [true, false] {
            let contents = Database::open(&path).unwrap();
            contents.database.put(&stored("aaaaaaaaaaaa", "one")).unwrap();
            let log = fs::read(beside(&path, WAL)).unwrap();
            std::mem::forget(contents);
            fs::remove_file(&path).unwrap();
            if empty {
                fs::write(&path, "").unwrap();
            }
            let contents = Database::open(&path).unwrap();
            let Opened::SetAside { ref aside, .. } = contents.opened else {
                panic!("{:?}", contents.opened)
            };
            assert_eq!(fs::read(beside(aside, WAL)).unwrap(), log);
        }
    }

    #[test]
    fn a_newer_one_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.db");
        let contents = Database::open(&path).unwrap();
        let newer = "PRAGMA user_version = 99";
        contents.database.connection.execute_batch(newer).unwrap();
        drop(contents);
        let error = Database::open(&path).unwrap_err();
        assert!(error.to_string().contains("99"), "{error}");
        let names = fs::read_dir(directory.path()).unwrap().flatten();
        let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        assert!(!names.any(|name| name.starts_with(DAMAGED_DATABASE)));
    }
}
