//! What can be wrong with a window, with the numbers.

use std::io;
use std::ops::RangeInclusive;

/// An error of a window.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused memory, a mapping or a thread.
    #[error("cannot {what} for a window of shared memory: {source}")]
    Io {
        /// What was to be done.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A ring or a part of the window is not where it could be.
    #[error(transparent)]
    Ring(#[from] wire::ring::Error),
    /// Numbers of which no window can be made.
    #[error(
        "a window with {pairs} pairs of rings of {records} records and an arena of {arena} bytes cannot be: \
         1 to {most_pairs} pairs, a power of two of records from 2 to {most_records}, an arena of whole pages of 4096 bytes up to 1 TiB",
        most_pairs = super::Geometry::MOST_PAIRS, most_records = wire::ring::RingMemory::MOST
    )]
    Geometry {
        /// Pairs of rings.
        pairs: u32,
        /// Records of each ring.
        records: u32,
        /// Bytes of the arena.
        arena: u64,
    },
    /// The memory is smaller than the window in it says.
    #[error("a window of {needed} bytes does not fit the {available} bytes of shared memory")]
    TooSmall {
        /// What it takes.
        needed: u64,
        /// What is there.
        available: u64,
    },
    /// Whoever made the memory can take it away again, which would end this process by SIGBUS.
    #[error(
        "the shared memory is not sealed against shrinking (F_SEAL_SHRINK): whoever offers it must seal it, or is not to be trusted"
    )]
    Unsealed,
    /// There is something else in the memory.
    #[error("the shared memory is no window: it begins with {0:02x?}")]
    NoWindow([u8; 8]),
    /// No version that both sides know.
    #[error(
        "the server speaks versions {theirs:?} of the window, this side {ours:?}; use programs of one Basalt release on both sides"
    )]
    Version {
        /// What the header says.
        theirs: RangeInclusive<u32>,
        /// What this side knows.
        ours: RangeInclusive<u32>,
    },
    /// There is no such pair of rings.
    #[error("there is no pair {pair} of rings: the window has {pairs}")]
    Pair {
        /// Which was asked for.
        pair: u32,
        /// How many there are.
        pairs: u32,
    },
    /// The arena has no room.
    #[error(
        "{length} bytes are not free in one piece in the arena: of its {size} bytes {free} are free, {largest} in one piece"
    )]
    Full {
        /// What was asked for.
        length: u64,
        /// All of the arena.
        size: u64,
        /// What is free.
        free: u64,
        /// The largest piece of that.
        largest: u64,
    },
}

impl Error {
    /// What the kernel refused.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
