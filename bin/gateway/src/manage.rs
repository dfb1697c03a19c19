//! What an operator does with keys, tenants and the audit log: over the store alone, beside a gateway that runs. Prints nothing itself.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use base::ByteSize;
use control::{AuditLog, ControlStore, DEFAULT_TENANT, KeyHash, KeyInfo, Keys, Secret, Tenants, check_key_name};
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::options::Work;

/// The most rows of the audit log that are printed at once.
const MOST_ROWS: usize = 100_000;

/// Does it; what is to be printed.
pub(crate) fn run(store: &impl ControlStore, work: &Work) -> Result<String> {
    match work {
        Work::CreateKey { tenant, name, json } => create(store, tenant, name, *json),
        Work::ListKeys { tenant, json } => list(store, tenant.as_deref(), *json),
        Work::RevokeKey { id } => match store.revoke_key(id, now())? {
            true => Ok(format!("{id}\n")),
            false => bail!(
                "there is no key {id} that could be revoked: `basalt-gateway keys list` shows those that there are"
            ),
        },
        Work::ListTenants { json } => tenants(store, *json),
        Work::SetTenant { tenant, quota } => {
            store.make_tenant(tenant, now())?;
            store.set_quota(tenant, *quota)?;
            Ok(String::new())
        }
        Work::Audit { tenant, limit, json } => audit(store, tenant.as_deref(), *limit, *json),
    }
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

fn json(value: &impl Serialize) -> Result<String> {
    Ok(format!("{}\n", serde_json::to_string(value)?))
}

fn date(seconds: u64) -> String {
    let moment = i64::try_from(seconds)
        .ok()
        .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    let text = moment.and_then(|moment| moment.format(&Rfc3339).ok());
    text.unwrap_or_else(|| seconds.to_string())
}

/// A key that was made. It is shown here and nowhere else.
#[derive(Serialize)]
struct Made<'a> {
    id: &'a str,
    tenant: &'a str,
    name: &'a str,
    key: &'a str,
}

/// Whether a key is good, and this tenant's if one is named.
pub(crate) fn is_good(store: &impl Keys, key: &str, tenant: Option<&str>) -> Result<bool> {
    let Some(hash) = KeyHash::of(key) else {
        return Ok(false);
    };
    let found = store.find_key(&hash)?;
    Ok(found.is_some_and(|key| tenant.is_none_or(|tenant| key.tenant == tenant)))
}

/// A new key.
pub(crate) fn new_key(store: &impl ControlStore, tenant: Option<&str>, name: &str) -> Result<String> {
    Ok(make(store, tenant.unwrap_or(DEFAULT_TENANT), name)?.text)
}

fn make(store: &impl ControlStore, tenant: &str, name: &str) -> Result<Secret> {
    check_key_name(name)?;
    let now = now();
    store.make_tenant(tenant, now)?;
    let secret = Secret::new()?;
    let info = KeyInfo {
        id: secret.id.clone(),
        tenant: tenant.to_owned(),
        name: name.to_owned(),
        created: now,
        last_used: None,
        revoked: None,
    };
    store.add_key(&info, &secret.hash)?;
    Ok(secret)
}

fn create(store: &impl ControlStore, tenant: &str, name: &str, as_json: bool) -> Result<String> {
    let secret = make(store, tenant, name)?;
    match as_json {
        true => json(&Made {
            id: &secret.id,
            tenant,
            name,
            key: &secret.text,
        }),
        false => Ok(format!("{}\n", secret.text)),
    }
}

fn list(store: &impl Keys, tenant: Option<&str>, as_json: bool) -> Result<String> {
    let keys = store.keys(tenant)?;
    if as_json {
        return json(&keys);
    }
    let mut text = format!(
        "{:16}  {:16}  {:20}  {:20}  {}\n",
        "ID", "TENANT", "CREATED", "LAST USED", "NAME"
    );
    for key in keys {
        let used = match (key.revoked, key.last_used) {
            (Some(_), _) => "revoked".to_owned(),
            (None, Some(used)) => date(used),
            (None, None) => "never".to_owned(),
        };
        writeln!(
            text,
            "{:16}  {:16}  {:20}  {used:20}  {}",
            key.id,
            key.tenant,
            date(key.created),
            key.name
        )?;
    }
    Ok(text)
}

fn tenants(store: &impl Tenants, as_json: bool) -> Result<String> {
    let tenants = store.tenants()?;
    if as_json {
        return json(&tenants);
    }
    let number = |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), |limit| limit.to_string());
    let mut text = format!(
        "{:24}  {:>9}  {:>6}  {:>10}  {:>7}  {:>12}\n",
        "TENANT", "SANDBOXES", "VCPUS", "MEMORY", "VOLUMES", "VOLUME SPACE"
    );
    let size = |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), |bytes| ByteSize(bytes).to_string());
    for tenant in tenants {
        let quota = tenant.quota;
        let (memory, space) = (size(quota.memory), size(quota.volume_space));
        let (sandboxes, vcpus, volumes) = (number(quota.sandboxes), number(quota.vcpus), number(quota.volumes));
        writeln!(
            text,
            "{:24}  {sandboxes:>9}  {vcpus:>6}  {memory:>10}  {volumes:>7}  {space:>12}",
            tenant.name
        )?;
    }
    Ok(text)
}

fn audit(store: &impl AuditLog, tenant: Option<&str>, limit: usize, as_json: bool) -> Result<String> {
    let rows = store.audited(tenant, limit.min(MOST_ROWS))?;
    let mut text = String::new();
    for row in rows {
        match as_json {
            true => text.push_str(&json(&row)?),
            false => writeln!(
                text,
                "{}  {:16}  {:16}  {}  {}  {}",
                date(row.time_ns / 1_000_000_000),
                row.tenant,
                row.key,
                row.outcome,
                row.action.escape_debug(),
                row.object.escape_debug()
            )?,
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use control::{AuditEntry, Quota, Sqlite};

    use super::*;

    fn open() -> (tempfile::TempDir, Sqlite) {
        let directory = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&directory.path().join("state")).unwrap();
        (directory, store)
    }

    #[test]
    fn a_key_is_shown_once() {
        let (_directory, store) = open();
        let make = |json| {
            let work = Work::CreateKey {
                tenant: "a".into(),
                name: "ci".into(),
                json,
            };
            run(&store, &work).unwrap()
        };
        let plain = make(false);
        let found = store.find_key(&KeyHash::of(plain.trim()).unwrap()).unwrap().unwrap();
        assert_eq!((found.tenant.as_str(), found.name.as_str()), ("a", "ci"));
        let made: serde_json::Value = serde_json::from_str(&make(true)).unwrap();
        assert!(KeyHash::of(made["key"].as_str().unwrap()).is_some());
        let listed = run(
            &store,
            &Work::ListKeys {
                tenant: None,
                json: false,
            },
        );
        let listed = listed.unwrap();
        assert!(listed.contains(&found.id) && listed.contains("never"), "{listed}");
        assert!(!listed.contains(plain.trim()) && !listed.contains("e2b_"), "{listed}");
    }

    #[test]
    fn a_key_that_is_shown_is_good_for_its_tenant_until_it_is_revoked() {
        let (_directory, store) = open();
        let key = new_key(&store, Some("a"), "env").unwrap();
        let good = |key: &str, tenant| is_good(&store, key, tenant).unwrap();
        assert!(good(&key, None) && good(&key, Some("a")) && !good(&key, Some("b")));
        assert!(!good("", None) && !good("e2b_00", None) && !good(&"0".repeat(64), None));
        let other = new_key(&store, None, "env").unwrap();
        assert!(good(&other, Some(DEFAULT_TENANT)) && other != key);
        let id = store.keys(Some("a")).unwrap()[0].id.clone();
        run(&store, &Work::RevokeKey { id }).unwrap();
        assert!(!good(&key, None));
    }

    #[test]
    fn a_key_is_revoked_once() {
        let (_directory, store) = open();
        let made = run(
            &store,
            &Work::CreateKey {
                tenant: "a".into(),
                name: "ci".into(),
                json: false,
            },
        );
        let id = store.keys(None).unwrap()[0].id.clone();
        let revoke = || run(&store, &Work::RevokeKey { id: id.clone() });
        assert_eq!(revoke().unwrap(), format!("{id}\n"));
        assert!(revoke().unwrap_err().to_string().contains("keys list"));
        assert_eq!(
            store.find_key(&KeyHash::of(made.unwrap().trim()).unwrap()).unwrap(),
            None
        );
    }

    #[test]
    fn tenants_and_what_they_did_are_listed() {
        let (_directory, store) = open();
        let quota = Quota {
            sandboxes: Some(3),
            vcpus: None,
            memory: Some(1 << 30),
            volumes: None,
            volume_space: Some(5 << 30),
        };
        let tenant = "a".to_owned();
        run(&store, &Work::SetTenant { tenant, quota }).unwrap();
        let listed = run(&store, &Work::ListTenants { json: false }).unwrap();
        let row = listed.lines().nth(1).unwrap().split_whitespace();
        assert!(row.eq(["a", "3", "-", "1", "GiB", "-", "5", "GiB"]), "{listed}");
        let entry = AuditEntry {
            time_ns: 1_763_710_727_000_000_000,
            tenant: "a".into(),
            key: "k".into(),
            action: "POST /sandboxes".into(),
            object: "0123456789ab".into(),
            outcome: 201,
        };
        store.audit(&entry).unwrap();
        let rows = |json| {
            let work = Work::Audit {
                tenant: None,
                limit: 9,
                json,
            };
            run(&store, &work).unwrap()
        };
        assert!(rows(false).contains("2025-11-21T07:38:47Z") && rows(false).contains("POST /sandboxes"));
        let row: AuditEntry = serde_json::from_str(&rows(true)).unwrap();
        assert_eq!(row, entry);
    }
}
