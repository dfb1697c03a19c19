//! What a store can do, in traits. All methods block, and are called from threads that may. Knows no store.

use crate::builds::{Builds, Files, Templates};
use crate::quota::{Claim, InUse, Quota};
use crate::types::{Alias, AuditEntry, KeyInfo, Tenant};
use crate::{Error, KeyHash};

/// Everything that is kept of those who use a node.
pub trait ControlStore:
    Tenants + Keys + Quotas + Aliases + AuditLog + Templates + Builds + Files + Send + Sync
{
}

impl<S> ControlStore for S where
    S: Tenants + Keys + Quotas + Aliases + AuditLog + Templates + Builds + Files + Send + Sync
{
}

/// Who there is.
pub trait Tenants {
    /// Makes one; it is fine if there is one of this name, which keeps its quota.
    ///
    /// # Errors
    /// It cannot be called so, or the store failed.
    fn make_tenant(&self, name: &str, now: u64) -> Result<Tenant, Error>;

    /// All of them, by name.
    ///
    /// # Errors
    /// The store failed.
    fn tenants(&self) -> Result<Vec<Tenant>, Error>;

    /// How much one may have from now on.
    ///
    /// # Errors
    /// There is no such tenant, or the store failed.
    fn set_quota(&self, tenant: &str, quota: Quota) -> Result<(), Error>;
}

/// By what they are known.
pub trait Keys {
    /// Keeps one.
    ///
    /// # Errors
    /// There is no such tenant, or the store failed.
    fn add_key(&self, key: &KeyInfo, hash: &KeyHash) -> Result<(), Error>;

    /// One that was not revoked.
    ///
    /// # Errors
    /// The store failed.
    fn find_key(&self, hash: &KeyHash) -> Result<Option<KeyInfo>, Error>;

    /// All keys, of one tenant or of all, the oldest first.
    ///
    /// # Errors
    /// The store failed.
    fn keys(&self, tenant: Option<&str>) -> Result<Vec<KeyInfo>, Error>;

    /// It is good for nothing any more. False if there is none of this id, or it was revoked before.
    ///
    /// # Errors
    /// The store failed.
    fn revoke_key(&self, id: &str, now: u64) -> Result<bool, Error>;

    /// It was used.
    ///
    /// # Errors
    /// The store failed.
    fn touch_key(&self, id: &str, now: u64) -> Result<(), Error>;
}

/// How much they may have.
pub trait Quotas {
    /// How much a tenant may have.
    ///
    /// # Errors
    /// There is no such tenant, or the store failed.
    fn quota(&self, tenant: &str) -> Result<Quota, Error>;

    /// Claims something, if the tenant has that much left beside what there is and what is claimed.
    ///
    /// # Errors
    /// [`Error::Quota`], or the store failed.
    fn reserve(&self, claim: &Claim, in_use: &[InUse], now: u64) -> Result<(), Error>;

    /// It has become this sandbox.
    ///
    /// # Errors
    /// The store failed.
    fn settle(&self, claim: &str, sandbox: &str, now: u64) -> Result<(), Error>;

    /// It has become nothing.
    ///
    /// # Errors
    /// The store failed.
    fn drop_claim(&self, claim: &str) -> Result<(), Error>;

    /// This sandbox is gone.
    ///
    /// # Errors
    /// The store failed.
    fn release(&self, sandbox: &str) -> Result<(), Error>;
}

/// What they call their templates and snapshots.
pub trait Aliases {
    /// A name stands for something from now on, in place of what it stood for.
    ///
    /// # Errors
    /// There is no such tenant, or the store failed.
    fn set_alias(&self, tenant: &str, alias: &Alias) -> Result<(), Error>;

    /// What a name stands for.
    ///
    /// # Errors
    /// The store failed.
    fn alias(&self, tenant: &str, name: &str, tag: &str) -> Result<Option<Alias>, Error>;

    /// All of a tenant's names, by name and tag.
    ///
    /// # Errors
    /// The store failed.
    fn aliases(&self, tenant: &str) -> Result<Vec<Alias>, Error>;

    /// All names of something stand for nothing any more.
    ///
    /// # Errors
    /// The store failed.
    fn forget_target(&self, tenant: &str, target: &str) -> Result<(), Error>;
}

/// What they did.
pub trait AuditLog {
    /// Adds a row. Rows are never changed; the oldest go when there are too many, or when they are too old.
    ///
    /// # Errors
    /// The store failed.
    fn audit(&self, entry: &AuditEntry) -> Result<(), Error>;

    /// The newest rows, of one tenant or of all, the newest first.
    ///
    /// # Errors
    /// The store failed.
    fn audited(&self, tenant: Option<&str>, limit: usize) -> Result<Vec<AuditEntry>, Error>;
}
