//! What a store keeps: plain data. Knows no store.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::quota::Quota;

/// The longest name of a tenant.
const MAX_TENANT: usize = 64;

/// Somebody whose sandboxes, snapshots and keys are apart from everybody else's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// What it is called.
    pub name: String,
    /// When it was made: seconds since 1970.
    pub created: u64,
    /// How much it may have.
    pub quota: Quota,
}

/// What is known of an API key; not the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyInfo {
    /// 16 hexadecimal digits, by which it is revoked.
    pub id: String,
    /// Whose it is.
    pub tenant: String,
    /// What it is called.
    pub name: String,
    /// When it was made: seconds since 1970.
    pub created: u64,
    /// When it was last used, to about a minute.
    pub last_used: Option<u64>,
    /// When it was revoked.
    pub revoked: Option<u64>,
}

/// A tenant's name for a template or a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alias {
    /// The name.
    pub name: String,
    /// Which version of it.
    pub tag: String,
    /// What it stands for: a template's id, or a snapshot's name.
    pub target: String,
    /// When it came to stand for that: seconds since 1970.
    pub assigned: u64,
}

/// One thing that was done, or was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditEntry {
    /// When: nanoseconds since 1970.
    pub time_ns: u64,
    /// By whom.
    pub tenant: String,
    /// With which key: its id.
    pub key: String,
    /// What, such as `POST /sandboxes`.
    pub action: String,
    /// To what: a sandbox's id, a template's name; empty where nothing came to be.
    pub object: String,
    /// How it went: an HTTP status.
    pub outcome: u16,
}

/// Checks a tenant's name.
///
/// # Errors
/// [`Error::TenantName`].
pub fn check_tenant_name(name: &str) -> Result<(), Error> {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let first = name.bytes().next().is_some_and(good);
    match first && name.len() <= MAX_TENANT && name.bytes().all(|byte| good(byte) || byte == b'-') {
        true => Ok(()),
        false => Err(Error::TenantName(name.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tenants() {
        for name in ["default", "a", "team-7", "9"] {
            assert!(check_tenant_name(name).is_ok(), "{name}");
        }
        for name in ["", "-a", "Team", "a b", "a/b", "ü", &"a".repeat(65)] {
            assert!(check_tenant_name(name).is_err(), "{name}");
        }
    }
}
