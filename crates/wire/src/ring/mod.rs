//! Rings of 64-byte records in memory that two processes share which do not trust each other: one puts records, the other takes them.
//!
//! The two ends are types of their own, [`Producer`] and [`Consumer`], over the same [`Memory`]. A record is in the ring when its stamp
//! is: the word with its sequence number, whose highest bit, the wrap counter, differs from round to round (as the flags of packed
//! virtqueues do, VIRTIO 1.2, 2.8.1). So a record and the news of it are one cache line, and a consumer that looks for it waits for one
//! line to travel, not for two: there is no index of the producer's in shared memory. The consumer's is there, in a line of its own; the
//! producer keeps a copy of it and reads it only when the ring seems full. Bells are suppressed by event indexes (2.7.10): who is about
//! to sleep says at which position it wants one, so a batch costs one bell and a peer that is awake costs none.
//!
//! ```text
//!   0 head u32          positions taken             written by the consumer
//!   4 record event u32  "ring when you put this"    written by the consumer
//!   8 patience u32      "or when so many microseconds are over"   written by the consumer
//! 128 space event u32   "ring when this is taken"   written by the producer
//! 256 slots, 64 bytes each: word 0 | stamp: wrap counter (bit 63), sequence number | words 2 to 7
//! ```
//!
//! All starts as zeroes, which is a ring without records. Neither end waits, rings or knows what a bell is; what is in a record but
//! for the stamp is nothing to it.
//!
//! What the peer may do: write anything anywhere at any time. A record is copied out of the shared memory once, before anybody looks
//! at it; an index is read once and compared with what this side knows by itself. A head that is no position between the last one and
//! what was published is an [`Error`], and so is a stamp with another number than the next where numbers are the ring's own
//! ([`Sequence::Stamped`]). There is no loop in here, so nothing that a peer writes makes one longer.

mod consumer;
mod error;
mod memory;
mod producer;
mod record;
mod region;
#[cfg(test)]
mod tests;

pub use consumer::Consumer;
pub use error::Error;
pub use memory::{Index, Memory, RingMemory, STAMP_WORD, WORDS};
pub use producer::Producer;
pub use record::{RECORD_LEN, Record, SEQUENCE_LIMIT};
pub use region::{Region, Slots, Word};

/// Where a consumer is: by this another one goes on in memory that has the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ConsumerPosition {
    /// Records that were taken.
    pub taken: u64,
    /// Records whose slots were given back.
    pub released: u64,
}

/// Where a producer is: by this another one goes on in memory that has the same bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ProducerPosition {
    /// Records that were published.
    pub published: u64,
    /// Records that are known to be taken.
    pub taken: u64,
}

/// Whose the sequence numbers of a ring's records are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sequence {
    /// The ring's: the producer stamps each record with its position, from 0, and the consumer takes no other.
    Stamped,
    /// The caller's, for instance the number of the request that a record answers; they travel unchecked.
    Callers,
}

/// Whether who waits for `event` is to be woken by positions `old` (not included) to `new` (VIRTIO 1.2, 2.7.10).
fn needs_bell(event: u32, new: u32, old: u32) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A position as it is told: positions are counted in 64 bits, and their low halves travel.
#[expect(clippy::cast_possible_truncation, reason = "the low half is what is meant")]
fn low(position: u64) -> u32 {
    position as u32
}

/// The wrap counter's bit in the stamp of a record at a position: set in the first round, so that zeroes are no record.
fn wrap_counter(position: u64, capacity: u32) -> u64 {
    match (position / u64::from(capacity)).is_multiple_of(2) {
        true => SEQUENCE_LIMIT,
        false => 0,
    }
}

/// The slot of a position; the capacity is a power of two.
fn slot(position: u64, capacity: u32) -> u32 {
    low(position) & (capacity - 1)
}
