//! What can go wrong with a store. Knows no store's library but SQLite's.

use std::io;
use std::path::PathBuf;

use crate::quota::Shortage;

/// Why a store did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its files cannot be made or opened.
    #[error("cannot {what} {path}")]
    File {
        /// What was to be done with it.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Others could read keys' hashes and the audit log.
    #[error("{path} has the mode {mode:o}, and is for this user alone: chmod 700 {path}, or give another --state")]
    Mode {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// SQLite failed.
    #[error(
        "the control database failed ({0}): look at the space left on its disk, and whether another program holds it"
    )]
    Database(#[from] rusqlite::Error),
    /// A newer program has made it.
    #[error(
        "the control database has the version {found}, and this program knows {known}: use the newer basalt-gateway"
    )]
    Version {
        /// What it says.
        found: i64,
        /// What is known here.
        known: i64,
    },
    /// The host gives no random bytes.
    #[error("the host gives no random bytes")]
    Random(#[source] io::Error),
    /// Not a tenant's name.
    #[error("`{0}` cannot be a tenant's name: 1 to 64 lower-case letters, digits and `-`, a letter or digit first")]
    TenantName(String),
    /// Not a key's name.
    #[error("`{0}` cannot be a key's name: 1 to 64 printable ASCII characters")]
    KeyName(String),
    /// There is none.
    #[error("there is no tenant `{0}`: make it with `basalt-gateway keys create --tenant {0}`")]
    NoTenant(String),
    /// A tenant has as many as it may have.
    #[error("there are {most} {what} already: {next}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there may be.
        most: usize,
        /// What to do.
        next: &'static str,
    },
    /// What a column holds is not what this program writes there.
    #[error("the control database holds something that is not understood ({0}): use the basalt-gateway that wrote it")]
    Column(String),
    /// The tenant has no more left.
    #[error(transparent)]
    Quota(#[from] Shortage),
}
