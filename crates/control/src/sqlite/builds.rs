//! Templates, their builds and tags, and uploaded files in SQLite. Lists that are only read as a whole are JSON in a column.

use rusqlite::types::FromSql;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Sqlite, int, maybe, require_tenant, unsigned};
use crate::Error;
use crate::builds::{
    Build, BuildName, BuildState, Builds, Failure, Files, LogLine, Settings, StoredFile, Tag, Template, Templates,
};

/// The most templates of a tenant, builds of it that have not come to their end, and tags of a template.
const MAX_TEMPLATES: usize = 1000;
const MAX_UNFINISHED: usize = 100;
const MAX_TAGS: usize = 100;

/// So many builds of a template are remembered to which no tag leads.
const HISTORY: usize = 20;

/// So many builds of a template have a log, the newest.
const LOGS: usize = 5;

/// Since version 2 of the database.
pub(super) const TABLES: &str = "
CREATE TABLE templates (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants(name), name TEXT NOT NULL, created_ns INTEGER NOT NULL,
    UNIQUE (tenant, name)
) STRICT;
CREATE TABLE builds (
    id TEXT PRIMARY KEY, template TEXT NOT NULL REFERENCES templates(id) ON DELETE CASCADE, tenant TEXT NOT NULL,
    state TEXT NOT NULL, created_ns INTEGER NOT NULL, finished_ns INTEGER, cpus INTEGER, memory_mib INTEGER, disk_mib INTEGER,
    wanted TEXT NOT NULL, kept INTEGER NOT NULL, settings TEXT NOT NULL, failure TEXT, log TEXT
) STRICT;
CREATE INDEX builds_of ON builds (template, created_ns);
CREATE INDEX builds_by_state ON builds (state);
CREATE TABLE tags (
    template TEXT NOT NULL REFERENCES templates(id) ON DELETE CASCADE, tag TEXT NOT NULL,
    build TEXT NOT NULL REFERENCES builds(id) ON DELETE CASCADE, assigned_ns INTEGER NOT NULL, PRIMARY KEY (template, tag)
) STRICT;
CREATE INDEX tags_of ON tags (build);
CREATE TABLE files (
    tenant TEXT NOT NULL REFERENCES tenants(name), hash TEXT NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL,
    PRIMARY KEY (tenant, hash)
) STRICT;
";

/// In the column `kept`: there is a machine, and there is one that is being removed. 0 is none.
const KEPT: u8 = 1;
const GOING: u8 = 2;

/// All of a build but its log.
const BUILD: &str = "SELECT id, template, tenant, state, created_ns, finished_ns, cpus, memory_mib, disk_mib, wanted, kept, settings, failure
    FROM builds";

fn write(value: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|error| Error::Column(error.to_string()))
}

/// A column with JSON.
fn json<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    let text: String = row.get(column)?;
    serde_json::from_str(&text).map_err(|error| {
        let at = row.as_ref().column_index(column).unwrap_or_default();
        rusqlite::Error::FromSqlConversionFailure(at, rusqlite::types::Type::Text, Box::new(error))
    })
}

fn maybe_json<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>> {
    let there: Option<String> = row.get(column)?;
    there.map(|_| json(row, column)).transpose()
}

/// A state as its column has it.
fn word(state: BuildState) -> &'static str {
    match state {
        BuildState::Waiting => "waiting",
        BuildState::Building => "building",
        BuildState::Ready => "ready",
        BuildState::Failed => "failed",
    }
}

impl FromSql for BuildState {
    fn column_result(value: rusqlite::types::ValueRef<'_>) -> rusqlite::types::FromSqlResult<Self> {
        match value.as_str()? {
            "waiting" => Ok(Self::Waiting),
            "building" => Ok(Self::Building),
            "ready" => Ok(Self::Ready),
            "failed" => Ok(Self::Failed),
            _ => Err(rusqlite::types::FromSqlError::InvalidType),
        }
    }
}

fn template(row: &Row<'_>) -> rusqlite::Result<Template> {
    Ok(Template {
        id: row.get("id")?,
        tenant: row.get("tenant")?,
        name: row.get("name")?,
        created_ns: unsigned(row, "created_ns")?,
    })
}

fn build(row: &Row<'_>) -> rusqlite::Result<Build> {
    Ok(Build {
        id: row.get("id")?,
        template: row.get("template")?,
        tenant: row.get("tenant")?,
        state: row.get("state")?,
        created_ns: unsigned(row, "created_ns")?,
        finished_ns: maybe(row, "finished_ns")?,
        cpus: row.get("cpus")?,
        memory_mib: maybe(row, "memory_mib")?,
        disk_mib: maybe(row, "disk_mib")?,
        wanted: json(row, "wanted")?,
        kept: row.get("kept")?,
        settings: json::<Settings>(row, "settings")?,
        failure: maybe_json(row, "failure")?,
    })
}

fn tag(row: &Row<'_>) -> rusqlite::Result<Tag> {
    Ok(Tag {
        tag: row.get("tag")?,
        build: row.get("build")?,
        assigned_ns: unsigned(row, "assigned_ns")?,
    })
}

fn stored_file(row: &Row<'_>) -> rusqlite::Result<StoredFile> {
    Ok(StoredFile {
        tenant: row.get("tenant")?,
        hash: row.get("hash")?,
        bytes: unsigned(row, "bytes")?,
        used: unsigned(row, "used")?,
    })
}

fn count(connection: &Connection, sql: &str, of: &str) -> Result<usize, Error> {
    let number: i64 = connection.query_row(sql, [of], |row| row.get(0))?;
    Ok(usize::try_from(number).unwrap_or(0))
}

fn named(connection: &Connection, tenant: &str, name: &str) -> Result<Option<Template>, Error> {
    let sql = "SELECT * FROM templates WHERE tenant = ?1 AND name = ?2";
    Ok(connection.query_row(sql, [tenant, name], template).optional()?)
}

fn assign(connection: &Connection, template: &str, build: &str, tags: &[String], now_ns: u64) -> Result<(), Error> {
    for tag in tags {
        connection.execute(
            "INSERT INTO tags (template, tag, build, assigned_ns) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (template, tag) DO UPDATE SET build = excluded.build, assigned_ns = excluded.assigned_ns",
            params![template, tag, build, int(now_ns)],
        )?;
    }
    bound_tags(connection, template, &[])
}

/// Whether a template with these tags besides has not too many.
fn bound_tags(connection: &Connection, template: &str, more: &[String]) -> Result<(), Error> {
    let sql = "SELECT count(*) FROM (SELECT tag FROM tags WHERE template = ?1 UNION SELECT value FROM json_each(?2))";
    let number: i64 = connection.query_row(sql, [template, &write(&more)?], |row| row.get(0))?;
    match usize::try_from(number).is_ok_and(|number| number <= MAX_TAGS) {
        false => Err(Error::TooMany {
            what: "tags of this template",
            most: MAX_TAGS,
            next: "remove some of them",
        }),
        true => Ok(()),
    }
}

/// Those of a build's tags that do not lead to one that was asked for later.
fn not_later(connection: &Connection, build: &Build) -> Result<Vec<String>, Error> {
    let mut query = connection.prepare_cached(
        "SELECT tags.tag FROM tags JOIN builds ON builds.id = tags.build WHERE tags.template = ?1 AND builds.created_ns > ?2",
    )?;
    let later = query.query_map(params![build.template, int(build.created_ns)], |row| row.get(0))?;
    let later = later.collect::<Result<Vec<String>, _>>()?;
    let wanted = build.wanted.iter().filter(|tag| !later.contains(tag));
    Ok(wanted.cloned().collect())
}

/// Older builds that nobody can ask for are forgotten.
fn bound_history(connection: &Connection, template: &str) -> Result<(), Error> {
    connection.execute(
        "DELETE FROM builds WHERE id IN (
            SELECT id FROM builds WHERE template = ?1 AND kept = 0 AND state IN ('ready', 'failed')
                AND id NOT IN (SELECT build FROM tags)
            ORDER BY created_ns DESC LIMIT -1 OFFSET ?2)",
        params![template, int(HISTORY as u64)],
    )?;
    connection.execute(
        "UPDATE builds SET log = NULL WHERE id IN (
            SELECT id FROM builds WHERE template = ?1 AND log IS NOT NULL ORDER BY created_ns DESC LIMIT -1 OFFSET ?2)",
        params![template, int(LOGS as u64)],
    )?;
    Ok(())
}

impl Templates for Sqlite {
    fn template(&self, tenant: &str, wanted: &str) -> Result<Option<Template>, Error> {
        let connection = self.lock();
        if let Some(found) = named(&connection, tenant, wanted)? {
            return Ok(Some(found));
        }
        let sql = "SELECT * FROM templates WHERE tenant = ?1 AND id = ?2";
        Ok(connection.query_row(sql, [tenant, wanted], template).optional()?)
    }

    fn templates(&self, tenant: &str) -> Result<Vec<Template>, Error> {
        let connection = self.lock();
        let sql = "SELECT * FROM templates WHERE tenant = ?1 ORDER BY created_ns DESC, id DESC";
        let mut query = connection.prepare_cached(sql)?;
        Ok(query.query_map([tenant], template)?.collect::<Result<_, _>>()?)
    }

    fn remove_template(&self, template: &str) -> Result<Vec<Build>, Error> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let kept = {
            let mut query = transaction.prepare(&format!("{BUILD} WHERE template = ?1 AND kept != 0"))?;
            query.query_map([template], build)?.collect::<Result<Vec<Build>, _>>()?
        };
        transaction.execute("DELETE FROM templates WHERE id = ?1", [template])?;
        transaction.commit()?;
        Ok(kept)
    }

    fn tags(&self, template: &str) -> Result<Vec<Tag>, Error> {
        let connection = self.lock();
        let mut query = connection.prepare_cached("SELECT * FROM tags WHERE template = ?1 ORDER BY tag")?;
        Ok(query.query_map([template], tag)?.collect::<Result<_, _>>()?)
    }

    fn build_names(&self, tenant: &str) -> Result<Vec<BuildName>, Error> {
        let connection = self.lock();
        let sql = "SELECT tags.build, templates.name, tags.tag FROM templates JOIN tags ON tags.template = templates.id
            WHERE templates.tenant = ?1 ORDER BY templates.name, tags.tag";
        let mut query = connection.prepare_cached(sql)?;
        let named = |row: &Row<'_>| {
            Ok(BuildName {
                build: row.get(0)?,
                template: row.get(1)?,
                tag: row.get(2)?,
            })
        };
        Ok(query.query_map([tenant], named)?.collect::<Result<_, _>>()?)
    }

    fn assign_tags(&self, template: &str, build: &str, tags: &[String], now_ns: u64) -> Result<bool, Error> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let sql = format!("SELECT count(*) FROM builds WHERE id = ?1 AND kept = {KEPT}");
        if count(&transaction, &sql, build)? == 0 {
            return Ok(false);
        }
        assign(&transaction, template, build, tags, now_ns)?;
        transaction.commit()?;
        Ok(true)
    }

    fn remove_tags(&self, template: &str, tags: Option<&[String]>) -> Result<(), Error> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        match tags {
            None => drop(transaction.execute("DELETE FROM tags WHERE template = ?1", [template])?),
            Some(tags) => {
                for tag in tags {
                    transaction.execute("DELETE FROM tags WHERE template = ?1 AND tag = ?2", [template, tag])?;
                }
            }
        }
        Ok(transaction.commit()?)
    }
}

impl Builds for Sqlite {
    fn add_build(&self, wanted: &Template, build: &Build) -> Result<Template, Error> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        require_tenant(&transaction, &wanted.tenant)?;
        let unfinished = "SELECT count(*) FROM builds WHERE tenant = ?1 AND state IN ('waiting', 'building')";
        if count(&transaction, unfinished, &wanted.tenant)? >= MAX_UNFINISHED {
            return Err(Error::TooMany {
                what: "builds that have not come to their end",
                most: MAX_UNFINISHED,
                next: "wait until some have",
            });
        }
        let template = match named(&transaction, &wanted.tenant, &wanted.name)? {
            Some(template) => template,
            None => {
                let all = "SELECT count(*) FROM templates WHERE tenant = ?1";
                if count(&transaction, all, &wanted.tenant)? >= MAX_TEMPLATES {
                    return Err(Error::TooMany {
                        what: "templates",
                        most: MAX_TEMPLATES,
                        next: "delete some of them",
                    });
                }
                let Template {
                    id,
                    tenant,
                    name,
                    created_ns,
                } = wanted;
                transaction.execute(
                    "INSERT INTO templates (id, tenant, name, created_ns) VALUES (?1, ?2, ?3, ?4)",
                    params![id, tenant, name, int(*created_ns)],
                )?;
                wanted.clone()
            }
        };
        bound_tags(&transaction, &template.id, &build.wanted)?;
        transaction.execute(
            "INSERT INTO builds (id, template, tenant, state, created_ns, cpus, memory_mib, wanted, kept, settings)
             VALUES (?1, ?2, ?3, 'waiting', ?4, ?5, ?6, ?7, 0, ?8)",
            params![
                build.id,
                template.id,
                template.tenant,
                int(build.created_ns),
                build.cpus,
                build.memory_mib.map(int),
                write(&build.wanted)?,
                write(&build.settings)?
            ],
        )?;
        transaction.commit()?;
        Ok(template)
    }

    fn build(&self, tenant: &str, id: &str) -> Result<Option<Build>, Error> {
        let connection = self.lock();
        let mut query = connection.prepare_cached(&format!("{BUILD} WHERE tenant = ?1 AND id = ?2"))?;
        Ok(query.query_row([tenant, id], build).optional()?)
    }

    fn builds(&self, template: &str) -> Result<Vec<Build>, Error> {
        let connection = self.lock();
        let sql = format!("{BUILD} WHERE template = ?1 ORDER BY created_ns DESC, id DESC");
        let mut query = connection.prepare_cached(&sql)?;
        Ok(query.query_map([template], build)?.collect::<Result<_, _>>()?)
    }

    fn all_builds(&self, tenant: &str) -> Result<Vec<Build>, Error> {
        let connection = self.lock();
        let sql = format!(
            "{BUILD} WHERE template IN (SELECT id FROM templates WHERE tenant = ?1) ORDER BY created_ns DESC, id DESC"
        );
        let mut query = connection.prepare_cached(&sql)?;
        Ok(query.query_map([tenant], build)?.collect::<Result<_, _>>()?)
    }

    fn begin_build(&self, id: &str) -> Result<bool, Error> {
        let sql = "UPDATE builds SET state = 'building' WHERE id = ?1 AND state = 'waiting'";
        Ok(self.lock().execute(sql, [id])? > 0)
    }

    fn finish_build(&self, build: &Build, log: &[LogLine]) -> Result<bool, Error> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let changed = transaction.execute(
            "UPDATE builds SET state = ?2, finished_ns = ?3, cpus = ?4, memory_mib = ?5, disk_mib = ?6, kept = ?7, settings = ?8,
                failure = ?9, log = ?10
             WHERE id = ?1",
            params![
                build.id,
                word(build.state),
                build.finished_ns.map(int),
                build.cpus,
                build.memory_mib.map(int),
                build.disk_mib.map(int),
                build.kept,
                write(&build.settings)?,
                build.failure.as_ref().map(write).transpose()?,
                write(&log)?
            ],
        )?;
        if changed == 0 {
            return Ok(false);
        }
        if build.state == BuildState::Ready {
            let now_ns = build.finished_ns.unwrap_or(build.created_ns);
            let tags = not_later(&transaction, build)?;
            assign(&transaction, &build.template, &build.id, &tags, now_ns)?;
        }
        bound_history(&transaction, &build.template)?;
        transaction.commit()?;
        Ok(true)
    }

    fn build_log(&self, id: &str) -> Result<Vec<LogLine>, Error> {
        let connection = self.lock();
        let mut query = connection.prepare_cached("SELECT log FROM builds WHERE id = ?1")?;
        let log = query.query_row([id], |row| maybe_json(row, "log")).optional()?;
        Ok(log.flatten().unwrap_or_default())
    }

    fn fail_unfinished(&self, failure: &Failure, now_ns: u64) -> Result<Vec<Build>, Error> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let unfinished = {
            let mut query = transaction.prepare(&format!("{BUILD} WHERE state = 'building'"))?;
            query.query_map([], build)?.collect::<Result<Vec<Build>, _>>()?
        };
        transaction.execute(
            "UPDATE builds SET state = 'failed', finished_ns = ?1, failure = ?2, kept = 1 WHERE state = 'building'",
            params![int(now_ns), write(failure)?],
        )?;
        transaction.commit()?;
        Ok(unfinished)
    }

    fn drop_waiting(&self, before_ns: u64) -> Result<(), Error> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let sql = "DELETE FROM builds WHERE state = 'waiting' AND created_ns < ?1";
        transaction.execute(sql, [int(before_ns)])?;
        let sql = "DELETE FROM templates WHERE created_ns < ?1 AND id NOT IN (SELECT template FROM builds)";
        transaction.execute(sql, [int(before_ns)])?;
        Ok(transaction.commit()?)
    }

    fn useless(&self) -> Result<Vec<Build>, Error> {
        let connection = self.lock();
        let sql = format!("{BUILD} WHERE kept != 0 AND id NOT IN (SELECT build FROM tags) ORDER BY created_ns");
        let mut query = connection.prepare_cached(&sql)?;
        Ok(query.query_map([], build)?.collect::<Result<_, _>>()?)
    }

    fn retire(&self, id: &str) -> Result<bool, Error> {
        let sql = format!(
            "UPDATE builds SET kept = {GOING} WHERE id = ?1 AND kept != 0 AND id NOT IN (SELECT build FROM tags)"
        );
        Ok(self.lock().execute(&sql, [id])? > 0)
    }

    fn forget(&self, id: &str) -> Result<(), Error> {
        self.lock().execute("UPDATE builds SET kept = 0 WHERE id = ?1", [id])?;
        Ok(())
    }
}

impl Files for Sqlite {
    fn put_file(&self, file: &StoredFile) -> Result<(), Error> {
        let connection = self.lock();
        require_tenant(&connection, &file.tenant)?;
        connection.execute(
            "INSERT INTO files (tenant, hash, bytes, used) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (tenant, hash) DO UPDATE SET bytes = excluded.bytes, used = excluded.used",
            params![file.tenant, file.hash, int(file.bytes), int(file.used)],
        )?;
        Ok(())
    }

    fn use_file(&self, tenant: &str, hash: &str, now: u64) -> Result<Option<StoredFile>, Error> {
        let connection = self.lock();
        let sql = "UPDATE files SET used = max(used, ?3) WHERE tenant = ?1 AND hash = ?2 RETURNING *";
        let mut query = connection.prepare_cached(sql)?;
        Ok(query
            .query_row(params![tenant, hash, int(now)], stored_file)
            .optional()?)
    }

    fn files(&self, tenant: Option<&str>) -> Result<Vec<StoredFile>, Error> {
        let connection = self.lock();
        let sql = "SELECT * FROM files WHERE ?1 IS NULL OR tenant = ?1 ORDER BY used, tenant, hash";
        let mut query = connection.prepare_cached(sql)?;
        Ok(query.query_map([tenant], stored_file)?.collect::<Result<_, _>>()?)
    }

    fn files_total(&self, tenant: &str, but: &str) -> Result<(u64, u64), Error> {
        let connection = self.lock();
        let sql =
            "SELECT count(*) AS files, coalesce(sum(bytes), 0) AS bytes FROM files WHERE tenant = ?1 AND hash != ?2";
        let mut query = connection.prepare_cached(sql)?;
        Ok(query.query_row([tenant, but], |row| {
            Ok((unsigned(row, "files")?, unsigned(row, "bytes")?))
        })?)
    }

    fn remove_file(&self, tenant: &str, hash: &str) -> Result<(), Error> {
        let sql = "DELETE FROM files WHERE tenant = ?1 AND hash = ?2";
        self.lock().execute(sql, [tenant, hash])?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LogLevel, Tenants};

    #[test]
    fn a_log_and_a_failure_are_read_as_they_were_written() {
        let directory = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&directory.path().join("state")).unwrap();
        store.make_tenant("a", 1).unwrap();
        let (wanted, mut one) = crate::suite::a_build("a", "web", 1);
        store.add_build(&wanted, &one).unwrap();
        one.state = BuildState::Failed;
        one.failure = Some(Failure {
            message: "no".into(),
            step: Some("2".into()),
        });
        let log = [LogLine {
            time_ns: 7,
            level: LogLevel::Warn,
            step: None,
            message: "ü \u{1b}[0m".into(),
        }];
        assert!(store.finish_build(&one, &log).unwrap());
        assert_eq!(store.build_log(&one.id).unwrap(), log);
        assert_eq!(store.build("a", &one.id).unwrap().unwrap().failure, one.failure);
        store.lock().execute("UPDATE builds SET settings = 'x'", []).unwrap();
        assert!(matches!(store.build("a", &one.id), Err(Error::Database(_))));
    }

    #[test]
    fn the_history_is_bounded_and_what_a_tag_leads_to_stays() {
        let directory = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&directory.path().join("state")).unwrap();
        store.make_tenant("a", 1).unwrap();
        for number in 0..30 {
            let (wanted, mut one) = crate::suite::a_build("a", "web", number);
            one.template = store.add_build(&wanted, &one).unwrap().id;
            let first = number == 0;
            one.state = if first { BuildState::Ready } else { BuildState::Failed };
            one.kept = first;
            let line = LogLine {
                time_ns: 1,
                level: LogLevel::Info,
                step: None,
                message: "x".into(),
            };
            assert!(store.finish_build(&one, &[line]).unwrap());
        }
        let template = store.template("a", "web").unwrap().unwrap();
        let builds = store.builds(&template.id).unwrap();
        assert_eq!(builds.len(), HISTORY + 1);
        assert_eq!(builds.last().map(|one| one.state), Some(BuildState::Ready));
        let has_log = |one: &&Build| !store.build_log(&one.id).unwrap().is_empty();
        assert_eq!(builds.iter().filter(has_log).count(), LOGS);
        assert!(has_log(&&builds[0]));
    }
}
