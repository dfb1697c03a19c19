//! The end that takes records. Does not know who puts them, nor what they mean.

use std::sync::atomic::Ordering;

use super::{
    ConsumerPosition, Error, Index, Memory, Record, RingMemory, SEQUENCE_LIMIT, STAMP_WORD, Sequence, low, needs_bell,
    slot, wrap_counter,
};

/// Takes records out of a ring; there is one in all.
#[derive(Debug)]
pub struct Consumer<M: Memory = RingMemory> {
    memory: M,
    sequence: Sequence,
    /// Records taken, and what the producer was told of them.
    taken: u64,
    released: u64,
}

impl<M: Memory> Consumer<M> {
    /// Of a ring that is all zeroes, or was when the producer got it.
    pub fn new(memory: M, sequence: Sequence) -> Self {
        Self {
            memory,
            sequence,
            taken: 0,
            released: 0,
        }
    }

    /// Of a ring whose consumer was there, and has ended.
    ///
    /// # Errors
    /// [`Error::Position`].
    pub fn resume(memory: M, sequence: Sequence, position: ConsumerPosition) -> Result<Self, Error> {
        let ConsumerPosition { taken, released } = position;
        let capacity = u64::from(memory.capacity());
        match taken.checked_sub(released) {
            Some(held) if held <= capacity => Ok(Self {
                memory,
                sequence,
                taken,
                released,
            }),
            _ => Err(Error::Position),
        }
    }

    /// Where it is, for a consumer that goes on.
    pub fn position(&self) -> ConsumerPosition {
        ConsumerPosition {
            taken: self.taken,
            released: self.released,
        }
    }

    /// Takes the next record, a copy that nobody else has; `None` if none is there. Its slot is the producer's again by
    /// [`Consumer::release`] only.
    ///
    /// # Errors
    /// [`Error::Sequence`]; the record stays where it is.
    pub fn pop(&mut self) -> Result<Option<Record>, Error> {
        let capacity = self.memory.capacity();
        let slot = slot(self.taken, capacity);
        let stamp = self.memory.load_stamp(slot, Ordering::Acquire);
        if !self.is_new(stamp) {
            return Ok(None);
        }
        let number = stamp % SEQUENCE_LIMIT;
        if self.sequence == Sequence::Stamped && number != self.taken % SEQUENCE_LIMIT {
            return Err(Error::Sequence {
                expected: self.taken,
                got: number,
            });
        }
        let mut words = self.memory.load_body(slot);
        words[STAMP_WORD] = number;
        self.taken += 1;
        Ok(Some(Record::from_words(words)))
    }

    /// Gives the slots of all records that were taken back. True if the producer is to be woken, which waits for space.
    #[must_use = "a producer that sleeps is woken by nobody else"]
    pub fn release(&mut self) -> bool {
        if self.taken == self.released {
            return false;
        }
        let (old, new) = (self.released, self.taken);
        // What was read of the slots was read before.
        self.memory.store_index(Index::Head, low(new), Ordering::Release);
        self.released = new;
        self.memory.fence();
        let event = self.memory.load_index(Index::SpaceEvent, Ordering::Relaxed);
        needs_bell(event, low(new), low(old))
    }

    /// Whether so many slots were taken and not given back that it is time to: a quarter of the ring. What is asked of the producer's
    /// cache, and of this one's fence, is little then, and the producer does not run dry.
    pub fn should_release(&self) -> bool {
        self.taken - self.released >= u64::from(self.memory.capacity().div_ceil(4))
    }

    /// Records that were taken in all.
    pub fn count(&self) -> u64 {
        self.taken
    }

    /// For how many microseconds a producer need not wake it for records that it has not asked to be woken for ([`Consumer::arm_for`]).
    pub fn leave_for(&mut self, patience: u32) {
        self.memory
            .store_index(Index::RecordPatience, patience, Ordering::Relaxed);
    }

    /// Whether a record is there.
    pub fn has_record(&self) -> bool {
        let slot = slot(self.taken, self.memory.capacity());
        self.is_new(self.memory.load_stamp(slot, Ordering::Relaxed))
    }

    /// Asks to be woken at the next record. True if it is there already: then nobody may sleep.
    pub fn arm(&mut self) -> bool {
        self.arm_for(1)
    }

    /// Asks to be woken when so many records are there, of which there may be none in a ring and no more than it has slots. True if the
    /// next one is there already. Who sleeps then without end is woken for fewer by a producer alone that asks
    /// ([`Producer::consumer_may_sleep`](super::Producer::consumer_may_sleep)).
    pub fn arm_for(&mut self, records: u32) -> bool {
        let more = records.clamp(1, self.memory.capacity()) - 1;
        let event = low(self.taken).wrapping_add(more);
        self.memory.store_index(Index::RecordEvent, event, Ordering::Relaxed);
        self.memory.fence();
        self.has_record()
    }

    /// Who has asked to be woken is awake: nobody need wake it before it asks again, and it has to look before it sleeps.
    pub fn disarm(&mut self) {
        let event = low(self.taken).wrapping_sub(1);
        self.memory.store_index(Index::RecordEvent, event, Ordering::Relaxed);
    }

    /// Whether a stamp at the next position is of this round.
    fn is_new(&self, stamp: u64) -> bool {
        stamp & SEQUENCE_LIMIT == wrap_counter(self.taken, self.memory.capacity())
    }
}
