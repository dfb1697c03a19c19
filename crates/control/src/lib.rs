//! Who may use a node's API and how much: tenants, their API keys and quotas, the names of their snapshots, the templates that they have
//! built, and an audit log.
//!
//! All of it is behind traits ([`ControlStore`]), which block; [`Sqlite`] is the one store there is. Every store has to pass one
//! test-suite (`suite.rs`). Knows no HTTP, no node and no sandbox: a sandbox here is an identifier that is counted.

mod builds;
mod error;
mod key;
mod quota;
mod sqlite;
mod store;
#[cfg(test)]
mod suite;
mod types;

pub use builds::{
    Build, BuildName, BuildState, Builds, Failure, Files, LogLevel, LogLine, Settings, StoredFile, Tag, Template,
    Templates,
};
pub use error::Error;
pub use key::{KEY_PREFIX, KeyHash, Secret, check_key_name, random_hex};
pub use quota::{Amount, Claim, InUse, Quota, RESERVED, SETTLED, Shortage};
pub use sqlite::{AUDIT_AGE, AUDIT_ROWS, Sqlite};
pub use store::{Aliases, AuditLog, ControlStore, Keys, Quotas, Tenants};
pub use types::{Alias, AuditEntry, KeyInfo, Tenant, check_tenant_name};

/// The tag of a template's name where none is written.
pub const DEFAULT_TAG: &str = "default";

/// The tenant that there is from the beginning.
pub const DEFAULT_TENANT: &str = "default";
