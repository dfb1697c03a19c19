//! The end that puts records. Does not know who takes them, nor how it is woken.

use std::sync::atomic::Ordering;

use super::{
    Error, Index, Memory, ProducerPosition, Record, RingMemory, SEQUENCE_LIMIT, Sequence, low, needs_bell, slot,
    wrap_counter,
};

/// Puts records into a ring; there is one in all.
///
/// Records that were put are seen by the consumer once they are published: until then the stamp of the first of them is held back, and
/// a consumer takes none behind one that is not there.
#[derive(Debug)]
pub struct Producer<M: Memory = RingMemory> {
    memory: M,
    sequence: Sequence,
    /// Records put, published, and taken as far as is known.
    put: u64,
    published: u64,
    taken: u64,
    /// The stamp of the record at `published`, where that one is put.
    held: u64,
}

impl<M: Memory> Producer<M> {
    /// Of a ring that is all zeroes.
    pub fn new(memory: M, sequence: Sequence) -> Self {
        Self {
            memory,
            sequence,
            put: 0,
            published: 0,
            taken: 0,
            held: 0,
        }
    }

    /// Of a ring whose producer was there, and has ended.
    ///
    /// # Errors
    /// [`Error::Position`].
    pub fn resume(memory: M, sequence: Sequence, position: ProducerPosition) -> Result<Self, Error> {
        let ProducerPosition { published, taken } = position;
        let capacity = u64::from(memory.capacity());
        match published.checked_sub(taken) {
            Some(held) if held <= capacity => Ok(Self {
                memory,
                sequence,
                put: published,
                published,
                taken,
                held: 0,
            }),
            _ => Err(Error::Position),
        }
    }

    /// Where it is, for a producer that goes on. Records that were not published are lost.
    pub fn position(&self) -> ProducerPosition {
        ProducerPosition {
            published: self.published,
            taken: self.taken,
        }
    }

    /// Puts a record, and tells its sequence number; `None` if there is no space, which [`Producer::arm`] waits for once all is
    /// published.
    ///
    /// # Errors
    /// [`Error::Head`].
    pub fn push(&mut self, record: &Record) -> Result<Option<u64>, Error> {
        let capacity = self.memory.capacity();
        if !self.has_space()? {
            return Ok(None);
        }
        let number = match self.sequence {
            Sequence::Stamped => self.put,
            Sequence::Callers => record.sequence(),
        } % SEQUENCE_LIMIT;
        let stamp = number | wrap_counter(self.put, capacity);
        let slot = slot(self.put, capacity);
        self.memory.store_body(slot, record.words());
        match self.put == self.published {
            true => self.held = stamp,
            // Nobody looks here before the stamp that is held back is there, whose order is enough for both.
            false => self.memory.store_stamp(slot, stamp, Ordering::Relaxed),
        }
        self.put += 1;
        Ok(Some(number))
    }

    /// Lets the consumer see all records that were put. True if it is to be woken, which it has asked for since it was the last time.
    #[must_use = "a consumer that sleeps is woken by nobody else"]
    pub fn publish(&mut self) -> bool {
        if self.put == self.published {
            return false;
        }
        let (old, new) = (self.published, self.put);
        let slot = slot(old, self.memory.capacity());
        self.memory.store_stamp(slot, self.held, Ordering::Release);
        self.published = new;
        // Either the consumer sees the record when it has armed and looks once more, or this sees that it has.
        self.memory.fence();
        let event = self.memory.load_index(Index::RecordEvent, Ordering::Relaxed);
        needs_bell(event, low(new), low(old))
    }

    /// Whether the consumer may sleep until more is there than was published ([`Consumer::arm_for`](super::Consumer::arm_for)): who waits
    /// for what it does wakes it, as [`Producer::publish`] need not have. False as well if it has been awake since what was published last.
    pub fn consumer_may_sleep(&self) -> bool {
        // Behind the fence of what was published last: either the consumer has seen that, or this sees what it asked for.
        let event = self.memory.load_index(Index::RecordEvent, Ordering::Relaxed);
        event.wrapping_sub(low(self.published)) < self.memory.capacity()
    }

    /// For how many microseconds the consumer leaves records that it has not asked to be woken for ([`Consumer::leave_for`]
    /// (super::Consumer::leave_for)).
    pub fn patience(&self) -> u32 {
        self.memory.load_index(Index::RecordPatience, Ordering::Relaxed)
    }

    /// Records that were put and not published.
    pub fn unpublished(&self) -> u64 {
        self.put - self.published
    }

    /// How many records a ring has place for.
    pub fn capacity(&self) -> u32 {
        self.memory.capacity()
    }

    /// Records that were put in all.
    pub fn count(&self) -> u64 {
        self.put
    }

    /// Asks to be woken when more is taken than is known. True if there is space already: then nobody may sleep.
    ///
    /// # Errors
    /// [`Error::Head`].
    pub fn arm(&mut self) -> Result<bool, Error> {
        self.memory
            .store_index(Index::SpaceEvent, low(self.taken), Ordering::Relaxed);
        self.memory.fence();
        self.look_for_space()
    }

    /// Whether there is space for a record.
    ///
    /// # Errors
    /// [`Error::Head`].
    pub fn has_space(&mut self) -> Result<bool, Error> {
        Ok(self.put - self.taken < u64::from(self.memory.capacity()) || self.look_for_space()?)
    }

    /// Whether there is space, by what the consumer says now.
    fn look_for_space(&mut self) -> Result<bool, Error> {
        // Behind what the consumer read before it said so.
        let head = self.memory.load_index(Index::Head, Ordering::Acquire);
        let more = u64::from(head.wrapping_sub(low(self.taken)));
        if more > self.published - self.taken {
            return Err(Error::Head {
                head,
                taken: low(self.taken),
                published: low(self.published),
            });
        }
        self.taken += more;
        Ok(self.put - self.taken < u64::from(self.memory.capacity()))
    }
}
