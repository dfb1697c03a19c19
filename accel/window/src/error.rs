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
    /// An image cannot be so large.
    #[error("an image of {size} bytes cannot be: 32 MiB to 64 GiB, in multiples of 2 MiB")]
    ImageSize {
        /// What was asked for.
        size: u64,
    },
    /// An image cannot have such a file.
    #[error("an image cannot have the file {name:?}: {why}")]
    ImageFile {
        /// The file's name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Files with contents leave no room for slots.
    #[error(
        "an image of {size} bytes is too small for its files and three slots: ask for {needed} bytes or more, or leave files away"
    )]
    ImageFull {
        /// Bytes of the image.
        size: u64,
        /// What they take together with metadata for the image as it is.
        needed: u64,
    },
    /// Contents that are not those that the image's layout was made for.
    #[error(
        "the contents for an image are not as many, or not as long, as the files of its layout: make the layout from their lengths"
    )]
    ImageContents,
    /// The file for an image is not what one can be written into.
    #[error(
        "an image of {wanted} bytes is written into a file of that size without data, and this one has {size} bytes: make a fresh one"
    )]
    ImageFresh {
        /// What its size must be.
        wanted: u64,
        /// What it is.
        size: u64,
    },
}

impl Error {
    /// What the kernel refused.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
