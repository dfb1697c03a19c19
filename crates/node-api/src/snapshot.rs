//! Snapshots: what a daemon tells of one.

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, SandboxConfig, check_name};

/// A sandbox as it was at one moment: the state of its machine, its memory and its disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Unique on its node; what is right for a sandbox's name is right for this one.
    pub name: String,
    /// When it was taken: nanoseconds since 1970.
    pub created_ns: u64,
    /// The id of the sandbox that it is of.
    pub sandbox: String,
    /// Its name.
    pub sandbox_name: String,
    /// What that was asked to be.
    pub config: SandboxConfig,
    /// The image's digest, 64 hexadecimal digits.
    pub digest: String,
    /// What the machine was made with.
    pub programs: Programs,
    /// Bytes that it takes on the host.
    #[serde(default)]
    pub bytes: u64,
}

/// SHA-256 of the programs that a machine was made with, 64 hexadecimal digits each; `None` where the file was replaced
/// between the machine's start and its snapshot, or cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    /// The VMM.
    pub vmm: Option<String>,
    /// The guest's kernel.
    pub kernel: Option<String>,
    /// The initramfs with the agent.
    pub initramfs: Option<String>,
}

/// Checks a snapshot's name.
///
/// # Errors
/// [`ConfigError::Snapshot`].
pub fn check_snapshot_name(name: &str) -> Result<(), ConfigError> {
    check_name(name).map_err(|_| ConfigError::Snapshot(name.to_owned()))
}
