//! What the daemon has promised its sandboxes of the host, how much it can promise, and what it holds for those to come. Knows no sandbox.

use base::ByteSize;
use serde::{Deserialize, Serialize};

/// Something of which there is only so much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resource {
    /// Linux's memory, in bytes.
    Memory,
    /// Room for disks, in bytes.
    Disk,
    /// The daemon's file descriptors.
    Descriptors,
}

impl std::fmt::Display for Resource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Descriptors => "descriptors",
        })
    }
}

/// How much of it is promised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promised {
    /// Of what.
    pub resource: Resource,
    /// To all sandboxes, and requests under way.
    pub promised: u64,
    /// All that can be promised.
    pub total: u64,
    /// How many times over it may be promised; `None` for what may not.
    pub overcommit: Option<String>,
}

/// Memory that a daemon zeroes while no sandbox is being started, for the next ones with devices. No sandbox is refused for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZeroedMemory {
    /// So much is to be ready.
    pub size: ByteSize,
    /// So much is.
    pub ready: ByteSize,
    /// So much was given to sandboxes since the daemon was started.
    pub handed_out: ByteSize,
    /// Why the last piece could not be made, with the next step where there is one.
    pub failed: Option<String>,
}
