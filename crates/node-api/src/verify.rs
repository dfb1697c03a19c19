//! What is found when the files of a snapshot or a template are compared with their checksums. Does not know how.

use std::fmt;

use base::ByteSize;
use serde::{Deserialize, Serialize};

use crate::transfer::Kind;

/// The most damaged parts that are told of one; more are counted.
pub const MOST_DAMAGE: usize = 64;

/// Guest RAM ends here below 4 GiB, and goes on at 4 GiB (`memory::layout`): a memory file has no such gap.
const LOW_RAM_END: u64 = 3 << 30;
const HIGH_RAM_START: u64 = 4 << 30;

/// A part of a file that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The file's name in the directory of the snapshot or the template.
    pub file: String,
    /// What is wrong with it.
    #[serde(flatten)]
    pub problem: Problem,
}

/// What can be wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "problem", rename_all = "kebab-case")]
pub enum Problem {
    /// Its content is not the one that was written.
    Changed {
        /// The first byte of the damaged chunks.
        offset: u64,
        /// How long they are.
        bytes: u64,
        /// Where a guest has them, if it is a file of memory.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        guest_physical: Option<u64>,
    },
    /// The host's disk does not give a part of it (EIO).
    Unreadable {
        /// The first byte.
        offset: u64,
        /// How many.
        bytes: u64,
    },
    /// It was cut or has grown.
    Length {
        /// Bytes that it had.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// It is not there.
    Missing,
    /// It may be whole, but the file with its checksums is damaged.
    Checksums {
        /// What is wrong with that.
        why: String,
    },
    /// It is a state that no VMM would take.
    Invalid {
        /// Why.
        why: String,
    },
}

impl Damage {
    /// Chunks that have changed.
    pub fn changed(file: &str, offset: u64, bytes: u64) -> Self {
        let guest_physical = file.starts_with("memory").then(|| guest_physical(offset));
        let problem = Problem::Changed {
            offset,
            bytes,
            guest_physical,
        };
        Self {
            file: file.to_owned(),
            problem,
        }
    }
}

/// The address at which a guest has what lies at `offset` in a file of its memory.
fn guest_physical(offset: u64) -> u64 {
    match offset.checked_sub(LOW_RAM_END) {
        Some(above) => HIGH_RAM_START.saturating_add(above),
        None => offset,
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, problem } = self;
        match problem {
            Problem::Changed {
                offset,
                bytes,
                guest_physical,
            } => {
                write!(f, "{file}: {} from offset {offset} have changed", ByteSize(*bytes))?;
                guest_physical.map_or(Ok(()), |address| write!(f, " (guest physical {address:#x})"))
            }
            Problem::Unreadable { offset, bytes } => {
                write!(f, "{file}: {} from offset {offset} cannot be read", ByteSize(*bytes))
            }
            Problem::Length { expected, found } => write!(f, "{file}: it has {found} bytes and had {expected}"),
            Problem::Missing => write!(f, "{file}: it is missing"),
            Problem::Checksums { why } => write!(f, "{file}: it cannot be checked, as {why}"),
            Problem::Invalid { why } => write!(f, "{file}: {why}"),
        }
    }
}

/// What came of comparing the files of one with their checksums.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// Which of the two it is.
    pub kind: Kind,
    /// The snapshot's name, or the template's id.
    pub name: String,
    /// Bytes that were read; holes are not.
    pub bytes: u64,
    /// How long it took.
    pub ms: u64,
    /// How much of a processor's time.
    pub cpu_ms: u64,
    /// Files that had no checksums, as those of an older version of Basalt: they have some now, of what is in them.
    pub summed: Vec<String>,
    /// What is damaged, the first [`MOST_DAMAGE`] parts of it.
    pub damage: Vec<Damage>,
    /// How many parts more are damaged.
    pub more: u64,
    /// What to do about it, if anything is damaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// How far a verification is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyProgress {
    /// Bytes that were read.
    pub done: u64,
    /// Bytes that the files take on the host.
    pub total: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_of_memory_is_named_by_the_guests_address_too() {
        let told = |file: &str, offset| Damage::changed(file, offset, 65536).to_string();
        assert_eq!(
            told("memory.1", 65536),
            "memory.1: 64 KiB from offset 65536 have changed (guest physical 0x10000)"
        );
        assert!(told("memory", (3 << 30) - 65536).contains("0xbfff0000"));
        assert!(told("memory", 3 << 30).contains("0x100000000"));
        assert_eq!(told("disk", 0), "disk: 64 KiB from offset 0 have changed");
    }

    #[test]
    fn damage_for_machines_is_flat() {
        let json = serde_json::to_value(Damage::changed("memory", 0, 65536)).unwrap();
        let expected = serde_json::json!({
            "file": "memory", "problem": "changed", "offset": 0, "bytes": 65536, "guest_physical": 0
        });
        assert_eq!(json, expected);
        assert_eq!(
            serde_json::from_value::<Damage>(json).unwrap(),
            Damage::changed("memory", 0, 65536)
        );
    }
}
