//! The store in SQLite: one file of this user alone, with a write-ahead log. Two processes use it at once: the gateway, and whoever makes
//! and revokes keys. Knows nothing of what its rows are for.

mod builds;

use std::fs::{self, DirBuilder, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};

use crate::quota::{self, Amount, Claim, InUse, Quota, RESERVED, SETTLED};
use crate::store::{Aliases, AuditLog, Keys, Quotas, Tenants};
use crate::types::{Alias, AuditEntry, KeyInfo, Tenant, check_tenant_name};
use crate::{Error, KeyHash};

/// The file's name in the state directory.
const FILE: &str = "control.db";

/// `user_version` of the tables below, with those of `builds`, which came with 2, and the quota of volumes, which came with 3.
const VERSION: i64 = 3;

/// How long is waited for another process that writes.
const BUSY: Duration = Duration::from_secs(5);

/// A key's last use is written when it is older than that, in seconds.
const TOUCH: u64 = 60;

/// The most rows of the audit log.
pub const AUDIT_ROWS: u64 = 1_000_000;

/// How old a row of the audit log becomes.
pub const AUDIT_AGE: Duration = Duration::from_secs(90 * 24 * 3600);

/// The oldest rows are looked for when so many were added.
const AUDIT_STEP: u64 = 1024;

const TABLES: &str = "
CREATE TABLE tenants (
    name TEXT PRIMARY KEY, created INTEGER NOT NULL,
    max_sandboxes INTEGER, max_vcpus INTEGER, max_memory INTEGER
) STRICT;
CREATE TABLE keys (
    hash BLOB PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL REFERENCES tenants(name), name TEXT NOT NULL,
    created INTEGER NOT NULL, last_used INTEGER, revoked INTEGER
) STRICT;
CREATE TABLE claims (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants(name), sandbox TEXT,
    sandboxes INTEGER NOT NULL, vcpus INTEGER NOT NULL, memory INTEGER NOT NULL, expires INTEGER NOT NULL
) STRICT;
CREATE TABLE aliases (
    tenant TEXT NOT NULL REFERENCES tenants(name), name TEXT NOT NULL, tag TEXT NOT NULL, target TEXT NOT NULL,
    assigned INTEGER NOT NULL, PRIMARY KEY (tenant, name, tag)
) STRICT;
CREATE INDEX aliases_of ON aliases (tenant, target);
CREATE TABLE audit (
    row INTEGER PRIMARY KEY AUTOINCREMENT, time_ns INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL,
    action TEXT NOT NULL, object TEXT NOT NULL, outcome INTEGER NOT NULL
) STRICT;
CREATE INDEX audit_of ON audit (tenant, row);
CREATE INDEX audit_by_time ON audit (time_ns);
";

/// Since version 3 of the database.
const VOLUME_QUOTA: &str = "
ALTER TABLE tenants ADD COLUMN max_volumes INTEGER;
ALTER TABLE tenants ADD COLUMN max_volume_space INTEGER;
";

/// The store.
#[derive(Debug)]
pub struct Sqlite {
    connection: Mutex<Connection>,
    /// Rows that were added to the audit log since this was opened.
    audited: AtomicU64,
}

impl Sqlite {
    /// Opens the store in this directory, which is made if there is none.
    ///
    /// # Errors
    /// The directory is open to others, or its files cannot be used.
    pub fn open(directory: &Path) -> Result<Self, Error> {
        make_private(directory)?;
        let path = directory.join(FILE);
        // SQLite gives its log and its shared memory the mode that this file has.
        let made = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
        made.map_err(file("make", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(file("set the mode of", &path))?;
        let mut connection = Connection::open(&path)?;
        connection.busy_timeout(BUSY)?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        // A key that was revoked is revoked also after a power failure.
        connection.pragma_update(None, "synchronous", "full")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        migrate(&mut connection)?;
        Ok(Self {
            connection: Mutex::new(connection),
            audited: AtomicU64::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn file(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { what, path, source }
}

fn make_private(directory: &Path) -> Result<(), Error> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(directory).map_err(file("make", directory))?;
    let mode = fs::metadata(directory).map_err(file("look at", directory))?.mode() & 0o7777;
    match mode & 0o077 {
        0 => Ok(()),
        _ => Err(Error::Mode {
            path: directory.to_owned(),
            mode,
        }),
    }
}

fn migrate(connection: &mut Connection) -> Result<(), Error> {
    // Another process may be at it: whoever is second finds the tables.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let found: i64 = transaction.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    // What each version has brought.
    let steps = [TABLES, builds::TABLES, VOLUME_QUOTA];
    let done = usize::try_from(found).ok().and_then(|found| steps.get(found..));
    for step in done.ok_or(Error::Version { found, known: VERSION })? {
        transaction.execute_batch(step)?;
    }
    transaction.pragma_update(None, "user_version", VERSION)?;
    Ok(transaction.commit()?)
}

/// SQLite's integers have a sign; what is larger than they are is limited by nothing that there is.
fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn unsigned(row: &Row<'_>, column: &str) -> rusqlite::Result<u64> {
    Ok(u64::try_from(row.get::<_, i64>(column)?).unwrap_or(0))
}

fn maybe(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<u64>> {
    let number: Option<i64> = row.get(column)?;
    Ok(number.map(|number| u64::try_from(number).unwrap_or(0)))
}

fn tenant(row: &Row<'_>) -> rusqlite::Result<Tenant> {
    Ok(Tenant {
        name: row.get("name")?,
        created: unsigned(row, "created")?,
        quota: Quota {
            sandboxes: maybe(row, "max_sandboxes")?,
            vcpus: maybe(row, "max_vcpus")?,
            memory: maybe(row, "max_memory")?,
            volumes: maybe(row, "max_volumes")?,
            volume_space: maybe(row, "max_volume_space")?,
        },
    })
}

fn key(row: &Row<'_>) -> rusqlite::Result<KeyInfo> {
    Ok(KeyInfo {
        id: row.get("id")?,
        tenant: row.get("tenant")?,
        name: row.get("name")?,
        created: unsigned(row, "created")?,
        last_used: maybe(row, "last_used")?,
        revoked: maybe(row, "revoked")?,
    })
}

fn claim(row: &Row<'_>) -> rusqlite::Result<Claim> {
    Ok(Claim {
        id: row.get("id")?,
        tenant: row.get("tenant")?,
        sandbox: row.get("sandbox")?,
        amount: Amount {
            sandboxes: unsigned(row, "sandboxes")?,
            vcpus: unsigned(row, "vcpus")?,
            memory: unsigned(row, "memory")?,
        },
    })
}

fn alias(row: &Row<'_>) -> rusqlite::Result<Alias> {
    Ok(Alias {
        name: row.get("name")?,
        tag: row.get("tag")?,
        target: row.get("target")?,
        assigned: unsigned(row, "assigned")?,
    })
}

fn audit_entry(row: &Row<'_>) -> rusqlite::Result<AuditEntry> {
    Ok(AuditEntry {
        time_ns: unsigned(row, "time_ns")?,
        tenant: row.get("tenant")?,
        key: row.get("key")?,
        action: row.get("action")?,
        object: row.get("object")?,
        outcome: row.get("outcome")?,
    })
}

fn find_tenant(connection: &Connection, name: &str) -> Result<Option<Tenant>, Error> {
    let mut query = connection.prepare_cached("SELECT * FROM tenants WHERE name = ?1")?;
    Ok(query.query_row([name], tenant).optional()?)
}

fn require_tenant(connection: &Connection, name: &str) -> Result<Tenant, Error> {
    find_tenant(connection, name)?.ok_or_else(|| Error::NoTenant(name.to_owned()))
}

impl Tenants for Sqlite {
    fn make_tenant(&self, name: &str, now: u64) -> Result<Tenant, Error> {
        check_tenant_name(name)?;
        let connection = self.lock();
        connection.execute(
            "INSERT INTO tenants (name, created) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
            params![name, int(now)],
        )?;
        require_tenant(&connection, name)
    }

    fn tenants(&self) -> Result<Vec<Tenant>, Error> {
        let connection = self.lock();
        let mut query = connection.prepare("SELECT * FROM tenants ORDER BY name")?;
        Ok(query.query_map([], tenant)?.collect::<Result<_, _>>()?)
    }

    fn set_quota(&self, tenant: &str, quota: Quota) -> Result<(), Error> {
        let changed = self.lock().execute(
            "UPDATE tenants SET max_sandboxes = ?2, max_vcpus = ?3, max_memory = ?4, max_volumes = ?5, max_volume_space = ?6
             WHERE name = ?1",
            params![
                tenant,
                quota.sandboxes.map(int),
                quota.vcpus.map(int),
                quota.memory.map(int),
                quota.volumes.map(int),
                quota.volume_space.map(int)
            ],
        )?;
        match changed {
            0 => Err(Error::NoTenant(tenant.to_owned())),
            _ => Ok(()),
        }
    }
}

impl Keys for Sqlite {
    fn add_key(&self, key: &KeyInfo, hash: &KeyHash) -> Result<(), Error> {
        let connection = self.lock();
        require_tenant(&connection, &key.tenant)?;
        connection.execute(
            "INSERT INTO keys (hash, id, tenant, name, created) VALUES (?1, ?2, ?3, ?4, ?5)",
            params![&hash.bytes()[..], key.id, key.tenant, key.name, int(key.created)],
        )?;
        Ok(())
    }

    fn find_key(&self, hash: &KeyHash) -> Result<Option<KeyInfo>, Error> {
        let connection = self.lock();
        let mut query = connection.prepare_cached("SELECT * FROM keys WHERE hash = ?1 AND revoked IS NULL")?;
        Ok(query.query_row([&hash.bytes()[..]], key).optional()?)
    }

    fn keys(&self, tenant: Option<&str>) -> Result<Vec<KeyInfo>, Error> {
        let connection = self.lock();
        let mut query =
            connection.prepare("SELECT * FROM keys WHERE ?1 IS NULL OR tenant = ?1 ORDER BY created, rowid")?;
        Ok(query.query_map([tenant], key)?.collect::<Result<_, _>>()?)
    }

    fn revoke_key(&self, id: &str, now: u64) -> Result<bool, Error> {
        let sql = "UPDATE keys SET revoked = ?2 WHERE id = ?1 AND revoked IS NULL";
        Ok(self.lock().execute(sql, params![id, int(now)])? > 0)
    }

    fn touch_key(&self, id: &str, now: u64) -> Result<(), Error> {
        let sql = "UPDATE keys SET last_used = ?2 WHERE id = ?1 AND (last_used IS NULL OR last_used <= ?3)";
        self.lock()
            .execute(sql, params![id, int(now), int(now.saturating_sub(TOUCH))])?;
        Ok(())
    }
}

fn claims(transaction: &Transaction<'_>, tenant: &str) -> Result<Vec<Claim>, Error> {
    let mut query = transaction.prepare_cached("SELECT * FROM claims WHERE tenant = ?1")?;
    Ok(query.query_map([tenant], claim)?.collect::<Result<_, _>>()?)
}

impl Quotas for Sqlite {
    fn quota(&self, tenant: &str) -> Result<Quota, Error> {
        Ok(require_tenant(&self.lock(), tenant)?.quota)
    }

    fn reserve(&self, claim: &Claim, in_use: &[InUse], now: u64) -> Result<(), Error> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        transaction.execute("DELETE FROM claims WHERE expires <= ?1", [int(now)])?;
        let quota = require_tenant(&transaction, &claim.tenant)?.quota;
        quota::check(&quota, in_use, &claims(&transaction, &claim.tenant)?, claim)?;
        let Amount {
            sandboxes,
            vcpus,
            memory,
        } = claim.amount;
        let expires = now.saturating_add(RESERVED.as_secs());
        transaction.execute(
            "INSERT INTO claims (id, tenant, sandbox, sandboxes, vcpus, memory, expires) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            params![claim.id, claim.tenant, claim.sandbox, int(sandboxes), int(vcpus), int(memory), int(expires)],
        )?;
        Ok(transaction.commit()?)
    }

    fn settle(&self, claim: &str, sandbox: &str, now: u64) -> Result<(), Error> {
        let expires = int(now.saturating_add(SETTLED.as_secs()));
        let sql = "UPDATE claims SET sandbox = ?2, expires = ?3 WHERE id = ?1";
        self.lock().execute(sql, params![claim, sandbox, expires])?;
        Ok(())
    }

    fn drop_claim(&self, claim: &str) -> Result<(), Error> {
        self.lock().execute("DELETE FROM claims WHERE id = ?1", [claim])?;
        Ok(())
    }

    fn release(&self, sandbox: &str) -> Result<(), Error> {
        self.lock()
            .execute("DELETE FROM claims WHERE sandbox = ?1", [sandbox])?;
        Ok(())
    }
}

impl Aliases for Sqlite {
    fn set_alias(&self, tenant: &str, alias: &Alias) -> Result<(), Error> {
        let connection = self.lock();
        require_tenant(&connection, tenant)?;
        connection.execute(
            "INSERT INTO aliases (tenant, name, tag, target, assigned) VALUES (?1, ?2, ?3, ?4, ?5)
             ON CONFLICT (tenant, name, tag) DO UPDATE SET target = excluded.target, assigned = excluded.assigned",
            params![tenant, alias.name, alias.tag, alias.target, int(alias.assigned)],
        )?;
        Ok(())
    }

    fn alias(&self, tenant: &str, name: &str, tag: &str) -> Result<Option<Alias>, Error> {
        let connection = self.lock();
        let mut query =
            connection.prepare_cached("SELECT * FROM aliases WHERE tenant = ?1 AND name = ?2 AND tag = ?3")?;
        Ok(query.query_row([tenant, name, tag], alias).optional()?)
    }

    fn aliases(&self, tenant: &str) -> Result<Vec<Alias>, Error> {
        let connection = self.lock();
        let mut query = connection.prepare_cached("SELECT * FROM aliases WHERE tenant = ?1 ORDER BY name, tag")?;
        Ok(query.query_map([tenant], alias)?.collect::<Result<_, _>>()?)
    }

    fn forget_target(&self, tenant: &str, target: &str) -> Result<(), Error> {
        let sql = "DELETE FROM aliases WHERE tenant = ?1 AND target = ?2";
        self.lock().execute(sql, [tenant, target])?;
        Ok(())
    }
}

impl AuditLog for Sqlite {
    fn audit(&self, entry: &AuditEntry) -> Result<(), Error> {
        let connection = self.lock();
        connection.execute(
            "INSERT INTO audit (time_ns, tenant, key, action, object, outcome) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            params![
                int(entry.time_ns),
                entry.tenant,
                entry.key,
                entry.action,
                entry.object,
                entry.outcome
            ],
        )?;
        if self.audited.fetch_add(1, Ordering::Relaxed).is_multiple_of(AUDIT_STEP) {
            bound_audit(&connection, entry.time_ns, AUDIT_ROWS)?;
        }
        Ok(())
    }

    fn audited(&self, tenant: Option<&str>, limit: usize) -> Result<Vec<AuditEntry>, Error> {
        let connection = self.lock();
        let mut query =
            connection.prepare("SELECT * FROM audit WHERE ?1 IS NULL OR tenant = ?1 ORDER BY row DESC LIMIT ?2")?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        Ok(query
            .query_map(params![tenant, limit], audit_entry)?
            .collect::<Result<_, _>>()?)
    }
}

fn bound_audit(connection: &Connection, now_ns: u64, rows: u64) -> Result<(), Error> {
    let age = u64::try_from(AUDIT_AGE.as_nanos()).unwrap_or(u64::MAX);
    let oldest = int(now_ns.saturating_sub(age));
    connection.execute("DELETE FROM audit WHERE time_ns < ?1", params![oldest])?;
    connection.execute(
        "DELETE FROM audit WHERE row <= (SELECT max(row) FROM audit) - ?1",
        params![int(rows)],
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> (tempfile::TempDir, Sqlite) {
        let directory = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&directory.path().join("state")).unwrap();
        (directory, store)
    }

    crate::suite::suite!(open());

    #[test]
    fn nobody_else_can_read_it() {
        let (directory, store) = open();
        store.make_tenant("a", 1).unwrap();
        let state = directory.path().join("state");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&state), 0o700);
        for name in ["control.db", "control.db-wal", "control.db-shm"] {
            assert_eq!(mode(&state.join(name)), 0o600, "{name}");
        }
        drop(store);
        fs::set_permissions(&state, fs::Permissions::from_mode(0o750)).unwrap();
        let error = Sqlite::open(&state).unwrap_err().to_string();
        assert!(error.contains("750") && error.contains("chmod 700"), "{error}");
    }

    #[test]
    fn it_is_found_again_and_a_newer_one_is_left_alone() {
        let (directory, store) = open();
        store.make_tenant("a", 1).unwrap();
        let path = directory.path().join("state");
        // Another process.
        assert_eq!(Sqlite::open(&path).unwrap().tenants().unwrap().len(), 1);
        store.lock().pragma_update(None, "user_version", 9).unwrap();
        assert!(matches!(
            Sqlite::open(&path),
            Err(Error::Version {
                found: 9,
                known: VERSION
            })
        ));
    }

    #[test]
    fn an_older_one_gets_what_came_later() {
        for (version, tables) in [
            (1, include_str!("../golden/control-v1.sql")),
            (2, include_str!("../golden/control-v2.sql")),
        ] {
            is_brought_up_to_date(version, tables);
        }
    }

    fn is_brought_up_to_date(version: i64, tables: &str) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        make_private(&path).unwrap();
        let old = Connection::open(path.join(FILE)).unwrap();
        old.execute_batch(tables).unwrap();
        old.pragma_update(None, "user_version", version).unwrap();
        old.execute("INSERT INTO tenants (name, created) VALUES ('a', 1)", [])
            .unwrap();
        drop(old);
        for _ in 0..2 {
            let store = Sqlite::open(&path).unwrap();
            assert_eq!(store.tenants().unwrap().len(), 1);
            assert!(crate::Templates::templates(&store, "a").unwrap().is_empty());
            let tables = |connection: &Connection| -> Vec<String> {
                let mut query = connection
                    .prepare("SELECT sql FROM sqlite_schema WHERE sql NOT NULL ORDER BY name")
                    .unwrap();
                let all = query.query_map([], |row| row.get(0)).unwrap();
                all.collect::<Result<_, _>>().unwrap()
            };
            let (_directory, new) = open();
            assert_eq!(tables(&store.lock()), tables(&new.lock()));
        }
    }

    #[test]
    fn the_audit_log_is_bounded_by_age_and_number() {
        let (_directory, store) = open();
        let entry = |time_ns| AuditEntry {
            time_ns,
            tenant: "a".into(),
            key: "k".into(),
            action: "POST /sandboxes".into(),
            object: String::new(),
            outcome: 201,
        };
        let age = u64::try_from(AUDIT_AGE.as_nanos()).unwrap();
        for time in [1, age, age + 1, age + 2] {
            store.audit(&entry(time)).unwrap();
        }
        let times = |store: &Sqlite| -> Vec<u64> {
            let all = store.audited(None, 10).unwrap();
            all.into_iter().map(|entry| entry.time_ns).collect()
        };
        assert_eq!(times(&store), [age + 2, age + 1, age, 1]);
        bound_audit(&store.lock(), age + 2, 3).unwrap();
        assert_eq!(times(&store), [age + 2, age + 1, age]);
        bound_audit(&store.lock(), age + 2, 1).unwrap();
        assert_eq!(times(&store), [age + 2]);
        for time in 0..AUDIT_STEP {
            store.audit(&entry(3 * age + time)).unwrap();
        }
        assert!(!times(&store).contains(&(age + 2)), "nobody has looked for old rows");
    }
}
