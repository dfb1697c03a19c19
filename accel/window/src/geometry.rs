//! Where everything is in a window, by three numbers. Knows no memory.

use wire::ring::RingMemory;

use crate::Error;

/// What all parts begin at a multiple of: a page.
pub const PAGE: u64 = 4096;

/// How many pairs of rings a window has, of how many records, and how large its arena is. Sound once it is made: no sum of its numbers
/// wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pairs: u32,
    records: u32,
    arena: u64,
}

impl Geometry {
    /// The most pairs of rings: a pair for each thread of a client.
    pub const MOST_PAIRS: u32 = 1024;

    /// The largest arena.
    const MOST_ARENA: u64 = 1 << 40;

    /// Bytes of a pair before its rings: the bells and the client's CPU, in lines of their own.
    pub(crate) const PAIR_HEADER: u64 = 512;

    /// Of numbers that may be anything.
    ///
    /// # Errors
    /// [`Error::Geometry`].
    pub fn new(pairs: u32, records: u32, arena: u64) -> Result<Self, Error> {
        let geometry = Self { pairs, records, arena };
        let sound = (1..=Self::MOST_PAIRS).contains(&pairs)
            && RingMemory::size(records).is_ok()
            && arena <= Self::MOST_ARENA
            && arena.is_multiple_of(PAGE);
        sound
            .then_some(geometry)
            .ok_or(Error::Geometry { pairs, records, arena })
    }

    /// Pairs of rings.
    pub fn pairs(&self) -> u32 {
        self.pairs
    }

    /// Records of each ring.
    pub fn records(&self) -> u32 {
        self.records
    }

    /// Bytes of the arena.
    pub fn arena(&self) -> u64 {
        self.arena
    }

    /// Bytes of one ring; the size was checked.
    pub(crate) fn ring(&self) -> u64 {
        RingMemory::size(self.records).unwrap_or_default()
    }

    /// Bytes from one pair to the next.
    pub(crate) fn stride(&self) -> u64 {
        (Self::PAIR_HEADER + 2 * self.ring()).next_multiple_of(PAGE)
    }

    /// Where a pair begins.
    pub(crate) fn pair_at(&self, pair: u32) -> u64 {
        PAGE + u64::from(pair) * self.stride()
    }

    /// Where the arena begins.
    pub fn arena_at(&self) -> u64 {
        self.pair_at(self.pairs)
    }

    /// Bytes of the window.
    pub fn length(&self) -> u64 {
        self.arena_at() + self.arena
    }
}
