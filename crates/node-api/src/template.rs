//! Templates: what a daemon tells of one.

use serde::{Deserialize, Serialize};

use crate::config::Resources;
use crate::snapshot::Programs;

/// A machine that has booted an image and runs nothing yet, of which sandboxes are cloned instead of being booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// SHA-256 of all that it was made of, 64 hexadecimal digits.
    pub id: String,
    /// When it was made: nanoseconds since 1970.
    pub created_ns: u64,
    /// When a sandbox was last cloned of it, or it was made.
    #[serde(default)]
    pub used_ns: u64,
    /// The image's digest, 64 hexadecimal digits.
    pub digest: String,
    /// How large its machine is.
    pub resources: Resources,
    /// It has an interface in the node's network.
    pub networked: bool,
    /// What the machine was made with.
    pub programs: Programs,
    /// Bytes that it takes on the host.
    #[serde(default)]
    pub bytes: u64,
}
