//! What a node has ready for sandboxes to come. Plain data; knows no sandbox.

use serde::{Deserialize, Serialize};

use crate::transfer::Kind;

/// The most templates and snapshots that one list of pools tells of: the newest of them.
pub const MOST_MEMORIES: usize = 256;

/// Something that is ready. Sandboxes are no pool: a node keeps no machine that runs for nobody.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pool {
    /// Interfaces of the node's network, made before somebody needs them.
    Interfaces {
        /// So many are ready.
        ready: u64,
        /// So many are to be.
        size: u64,
    },
    /// The memory of a template or a snapshot, which its clones map from files: what of these is in the page cache is there at once, and
    /// the rest is read from the disk when a clone touches it.
    Memory {
        /// Which of the two.
        kind: Kind,
        /// A template's id, a snapshot's name.
        name: String,
        /// Bytes that the files have.
        size: u64,
        /// So many of them were in the page cache a few seconds ago at most; `None` where that could not be told.
        cached: Option<u64>,
    },
}
