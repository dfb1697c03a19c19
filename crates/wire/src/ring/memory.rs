//! Where a ring's indexes and slots are: in shared memory, and in tests where all orders in which memory is seen are tried.

use std::sync::atomic::{Ordering, fence};

use super::{Error, RECORD_LEN, Region, Slots, Word};

/// Words of a record.
pub const WORDS: usize = RECORD_LEN / 8;

/// Which of them is the stamp.
pub const STAMP_WORD: usize = 1;

/// An index of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Index {
    /// How many records were taken; the consumer writes it.
    Head,
    /// The position at whose record the consumer is to be woken.
    RecordEvent,
    /// For how many microseconds the consumer leaves records for which it has not asked to be woken; the consumer writes it.
    RecordPatience,
    /// The position whose taking the producer is to be woken by.
    SpaceEvent,
}

/// A ring's memory, by its places. Each access is one of its words, in the order that the ends ask for: values come out, and no
/// reference. The body of a record is its words but for the stamp, which here are 0.
pub trait Memory {
    /// How many slots there are, a power of two.
    fn capacity(&self) -> u32;
    /// Reads an index.
    fn load_index(&self, index: Index, order: Ordering) -> u32;
    /// Writes an index.
    fn store_index(&self, index: Index, value: u32, order: Ordering);
    /// Reads the stamp of a slot.
    fn load_stamp(&self, slot: u32, order: Ordering) -> u64;
    /// Writes the stamp of a slot.
    fn store_stamp(&self, slot: u32, stamp: u64, order: Ordering);
    /// Copies the body of a slot out, each word once, in no order.
    fn load_body(&self, slot: u32) -> [u64; WORDS];
    /// Copies a body into a slot, in no order.
    fn store_body(&self, slot: u32, body: &[u64; WORDS]);
    /// Puts what was written before it, in all eyes, before what is read behind it.
    fn fence(&self);
}

/// A ring's memory in a region that is shared with another process.
#[derive(Clone, Debug)]
pub struct RingMemory {
    head: Word,
    record_event: Word,
    record_patience: Word,
    space_event: Word,
    slots: Slots,
}

impl RingMemory {
    /// The most records of a ring: 4 MiB of slots.
    pub const MOST: u32 = 1 << 16;

    /// Where the slots begin. What each side writes is 128 bytes from what the other writes: processors fetch lines of 64 bytes in pairs.
    const SLOTS: u64 = 256;

    /// Bytes that a ring of so many records takes.
    ///
    /// # Errors
    /// [`Error::Capacity`].
    pub fn size(capacity: u32) -> Result<u64, Error> {
        if !capacity.is_power_of_two() || !(2..=Self::MOST).contains(&capacity) {
            return Err(Error::Capacity(capacity));
        }
        Ok(Self::SLOTS + u64::from(capacity) * RECORD_LEN as u64)
    }

    /// The ring of so many records at the beginning of a region. Whoever makes the second end passes the same capacity: it is not read
    /// from the region.
    ///
    /// # Errors
    /// [`Error::Capacity`]; the region is too small for it, or begins at no multiple of 64.
    pub fn new(region: &Region, capacity: u32) -> Result<Self, Error> {
        let length = Self::size(capacity)?;
        let region = region.part(0, length)?;
        Ok(Self {
            head: region.word(0)?,
            record_event: region.word(4)?,
            record_patience: region.word(8)?,
            space_event: region.word(128)?,
            slots: region.slots(Self::SLOTS, capacity)?,
        })
    }

    fn word(&self, index: Index) -> &Word {
        match index {
            Index::Head => &self.head,
            Index::RecordEvent => &self.record_event,
            Index::RecordPatience => &self.record_patience,
            Index::SpaceEvent => &self.space_event,
        }
    }
}

impl Memory for RingMemory {
    fn capacity(&self) -> u32 {
        self.slots.count()
    }

    fn load_index(&self, index: Index, order: Ordering) -> u32 {
        self.word(index).load(order)
    }

    fn store_index(&self, index: Index, value: u32, order: Ordering) {
        self.word(index).store(value, order);
    }

    fn load_stamp(&self, slot: u32, order: Ordering) -> u64 {
        self.slots.load(slot, STAMP_WORD, order)
    }

    fn store_stamp(&self, slot: u32, stamp: u64, order: Ordering) {
        self.slots.store(slot, STAMP_WORD, stamp, order);
    }

    fn load_body(&self, slot: u32) -> [u64; WORDS] {
        std::array::from_fn(|word| match word {
            STAMP_WORD => 0,
            word => self.slots.load(slot, word, Ordering::Relaxed),
        })
    }

    fn store_body(&self, slot: u32, body: &[u64; WORDS]) {
        for (word, value) in body.iter().enumerate().filter(|(word, _)| *word != STAMP_WORD) {
            self.slots.store(slot, word, *value, Ordering::Relaxed);
        }
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}
