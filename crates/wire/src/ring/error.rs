//! What can be wrong with a ring, with the numbers. Knows neither who the other side is nor what becomes of it.

/// A ring that cannot be, or whose other side wrote what no sound one writes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A ring has a power of two of slots.
    #[error("a ring of {0} records cannot be: take a power of two from 2 to {most}", most = super::RingMemory::MOST)]
    Capacity(u32),
    /// A part of a region is outside of it.
    #[error("{length} bytes from {offset} are not within the {available} bytes of shared memory")]
    Bounds {
        /// Where the part begins.
        offset: u64,
        /// Its length.
        length: u64,
        /// Length of the region.
        available: u64,
    },
    /// A word or a slot would not be at a multiple of its size.
    #[error("what begins at byte {offset} of shared memory must begin at a multiple of {alignment}")]
    Alignment {
        /// Where it would begin.
        offset: u64,
        /// What it must be a multiple of.
        alignment: u64,
    },
    /// The consumer's index is no position that it can be at.
    #[error(
        "the other side says that it has taken records up to {head}, of which {taken} were taken before and {published} are there; \
         it is broken or hostile: end the connection"
    )]
    Head {
        /// What it wrote, the low half of a position.
        head: u32,
        /// The low half of the position that it had reached before.
        taken: u32,
        /// The low half of the position behind the last record that it was told of.
        published: u32,
    },
    /// A record has another number than the next.
    #[error(
        "a record has the sequence number {got} where {expected} is next; the other side is broken or hostile: end the connection"
    )]
    Sequence {
        /// What comes next.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// No end of a ring can be where one is said to have been.
    #[error("a position of a ring is said to be where no ring can be; what says so is not what was saved")]
    Position,
}
