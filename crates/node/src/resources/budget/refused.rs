//! Why something is not accepted: which resource is short, in numbers, and what to do about it.

use std::fmt;

use base::{ByteSize, Ratio};

/// What is to be done, and with which sandbox; the beginning of each refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish(String);

impl Wish {
    /// Something with a sandbox, which may have no name yet.
    pub(crate) fn new(verb: &str, name: Option<&str>) -> Self {
        Self(match name {
            Some(name) => format!("cannot {verb} '{name}'"),
            None => format!("cannot {verb} a sandbox"),
        })
    }

    /// Any request.
    pub(crate) fn request() -> Self {
        Self("the request cannot be carried out now".to_owned())
    }
}

impl fmt::Display for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// There is no room on this host.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// No host of this size can have such a guest.
    #[error("{asked} of memory were asked for, but this host has {total} ({available} available): ask for less")]
    LargerThanHost {
        /// The guest's memory.
        asked: ByteSize,
        /// `MemTotal`.
        total: ByteSize,
        /// `MemAvailable`.
        available: ByteSize,
    },
    /// Others were promised it.
    #[error(
        "{wish}: it needs {needed} of memory, and {left} of the {total} that sandboxes can have are not promised to others; remove \
         sandboxes, ask for less (--memory), or raise memory.overcommit (basaltd --memory-overcommit, now {overcommit})"
    )]
    Memory {
        /// What was to be done.
        wish: Wish,
        /// With its VMM and the kernel's tables.
        needed: ByteSize,
        /// Promised to nobody.
        left: ByteSize,
        /// All that can be promised.
        total: ByteSize,
        /// The setting.
        overcommit: Ratio,
    },
    /// It is in use now, by whomever.
    #[error(
        "{wish}: it needs {needed} of memory to begin with, and the host has {available} available, of which {kept} are kept for the host \
         itself; end other programs, or remove sandboxes"
    )]
    MemoryInUse {
        /// What was to be done.
        wish: Wish,
        /// At its start, with others that are being started.
        needed: ByteSize,
        /// `MemAvailable`.
        available: ByteSize,
        /// For the host.
        kept: ByteSize,
    },
    /// Memory that is reserved for guests whose memory is not translated.
    #[error(
        "{wish}: it needs {needed} of reserved memory, and {left} of {total} are not promised to others; remove sandboxes with \
         --memory-mode identity, ask for less (--memory), or reserve more (docs/bare.md)"
    )]
    Reserved {
        /// What was to be done.
        wish: Wish,
        /// The guest's memory.
        needed: ByteSize,
        /// Promised to nobody.
        left: ByteSize,
        /// All of it.
        total: ByteSize,
    },
    /// The disks' sizes add up to too much.
    #[error(
        "{wish}: it needs a disk of {needed}, and {left} of the {total} that disks can have together are not promised to others ({free} are \
         free); remove sandboxes or images, ask for less (--disk), or raise disk.overcommit (basaltd --disk-overcommit, now {overcommit})"
    )]
    Disk {
        /// What was to be done.
        wish: Wish,
        /// Its size.
        needed: ByteSize,
        /// Promised to nobody.
        left: ByteSize,
        /// All that can be promised.
        total: ByteSize,
        /// What the file system has.
        free: ByteSize,
        /// The setting.
        overcommit: Ratio,
    },
    /// The daemon would run out of descriptors.
    #[error(
        "{wish}: it needs {needed} file descriptors of the daemon, and {left} of {total} are neither in use nor promised to others; ask again \
         when other requests have ended, remove sandboxes, or raise the daemon's limit (LimitNOFILE= of basaltd.service, `ulimit -n`)"
    )]
    Descriptors {
        /// What was to be done.
        wish: Wish,
        /// At once.
        needed: u64,
        /// Promised to nobody.
        left: u64,
        /// All that can be promised.
        total: u64,
    },
    /// The host's numbers cannot be read.
    #[error(
        "{wish}: what the host has cannot be read ({what}: {cause}); see that /proc is mounted and the state directory is there"
    )]
    Unknown {
        /// What was to be done.
        wish: Wish,
        /// Which numbers.
        what: &'static str,
        /// Why not.
        cause: std::io::Error,
    },
}

impl Refused {
    /// The resource, in a word that is always the same.
    pub(crate) fn resource(&self) -> &'static str {
        match self {
            Self::LargerThanHost { .. } | Self::Memory { .. } | Self::MemoryInUse { .. } | Self::Reserved { .. } => {
                "memory"
            }
            Self::Disk { .. } => "disk",
            Self::Descriptors { .. } => "descriptors",
            Self::Unknown { .. } => "host",
        }
    }

    /// It could not be had on this host even if nobody else were there.
    pub(crate) fn is_of_request(&self) -> bool {
        matches!(self, Self::LargerThanHost { .. })
    }
}
