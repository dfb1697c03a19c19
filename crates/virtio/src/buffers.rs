//! Taking buffers from a ring and giving them back, so that devices do not repeat it.
//!
//! What a driver makes available is an allegation ([`Available`]) until [`Available::check`] has walked it once: then it
//! is a [`Chain`] whose every byte lies in guest memory. A chain that does not hold up becomes a [`BadChain`], which the
//! device gives back unread; a ring that does not hold up is a [`RingError`], and the device leaves it alone until it is
//! reset.
//!
//! ```text
//! loop {
//!     queue.disable_kicks(memory)?;
//!     for _ in 0..queue.queue.size() {          // bounded: between two passes look whether to stop
//!         let Some(available) = queue.take(memory)? else { break };
//!         match available.check() {
//!             Ok(chain) => queue.complete(memory, chain.head(), written)?,
//!             Err(bad) => queue.complete(memory, bad.head, 0)?,
//!         }
//!     }
//!     queue.notify(memory, interrupt)?;
//!     if !queue.enable_kicks(memory)? { wait for queue.kick; }
//! }
//! ```

use std::io;
use std::sync::atomic::{Ordering, fence};

use memory::GuestRam;
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, VolatileSlice};

use crate::descriptors::{Buffers, walk};
use crate::device::{ActiveQueue, QueueInterrupt};

/// A ring that contradicts itself. Nothing more can be taken from it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The available index jumped by more than the ring has entries (2.7.13.3).
    #[error("the available index jumped by more than the ring's size")]
    AvailableIndex,
    /// The available ring names a descriptor that is not in the table.
    #[error("descriptor {0} was made available, which is not in the table")]
    Head(u16),
    /// The ring's own memory cannot be accessed.
    #[error("the ring cannot be accessed: {0}")]
    Memory(String),
}

impl From<virtio_queue::Error> for RingError {
    fn from(error: virtio_queue::Error) -> Self {
        match error {
            virtio_queue::Error::InvalidAvailRingIndex => Self::AvailableIndex,
            other => Self::Memory(other.to_string()),
        }
    }
}

/// What is wrong with a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// It loops, leaves its table, is longer than the queue (2.7.5.2), or its indirect table is malformed (2.7.5.3).
    #[error("the chain does not end within its table")]
    Unterminated,
    /// A buffer lies outside of guest memory.
    #[error("a buffer lies outside of guest memory")]
    Address,
    /// A device-readable buffer follows a device-writable one (2.7.4.2).
    #[error("a readable buffer follows a writable one")]
    Order,
}

/// A chain that cannot be used; its head has to be given back all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("descriptor {head}: {fault}")]
pub struct BadChain {
    /// What to complete, with nothing written.
    pub head: u16,
    /// Why.
    pub fault: ChainFault,
}

/// A chain as the driver made it available, unchecked.
#[derive(Debug)]
#[must_use = "a buffer that was taken has to be used"]
pub struct Available<'m> {
    memory: &'m GuestRam,
    table: GuestAddress,
    size: u16,
    head: u16,
}

impl<'m> Available<'m> {
    /// Walks the chain, once.
    ///
    /// # Errors
    /// It does not hold up; the head is in the error.
    pub fn check(self) -> Result<Chain<'m>, BadChain> {
        let head = self.head;
        match walk(self.memory, (self.table, self.size), head) {
            Ok(buffers) => Ok(Chain { head, buffers }),
            Err(fault) => Err(BadChain { head, fault }),
        }
    }
}

/// A checked chain: buffers to read from, then buffers to write to, all of them guest memory.
#[derive(Debug)]
pub struct Chain<'m> {
    head: u16,
    buffers: Buffers<'m>,
}

impl<'m> Chain<'m> {
    /// Its first descriptor: what to give back.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// What the driver sends, in order.
    pub fn readable(&self) -> &[VolatileSlice<'m>] {
        &self.buffers.slices[..self.buffers.first_writable]
    }

    /// Where the driver wants to receive, in order.
    pub fn writable(&self) -> &[VolatileSlice<'m>] {
        &self.buffers.slices[self.buffers.first_writable..]
    }

    /// How much the driver sends.
    pub fn readable_bytes(&self) -> usize {
        self.buffers.readable_bytes
    }

    /// How much the driver can receive.
    pub fn writable_bytes(&self) -> usize {
        self.buffers.writable_bytes
    }

    /// Reads what the driver sends from its beginning on.
    pub fn reader(&self) -> Cursor<'_, 'm> {
        Cursor::new(self.readable())
    }

    /// Writes what the driver receives from its beginning on.
    pub fn writer(&self) -> Cursor<'_, 'm> {
        Cursor::new(self.writable())
    }
}

/// A position in a list of buffers. As other vCPUs can change the memory at any time, read each thing once.
#[derive(Clone, Debug)]
pub struct Cursor<'c, 'm> {
    slices: &'c [VolatileSlice<'m>],
    offset: usize,
    done: usize,
}

impl<'c, 'm> Cursor<'c, 'm> {
    /// At the beginning of `slices`.
    pub fn new(slices: &'c [VolatileSlice<'m>]) -> Self {
        Self {
            slices,
            offset: 0,
            done: 0,
        }
    }

    /// How many bytes lie behind.
    pub fn position(&self) -> usize {
        self.done
    }

    /// How many bytes lie ahead.
    pub fn remaining(&self) -> usize {
        self.slices.iter().map(VolatileSlice::len).sum::<usize>() - self.offset
    }

    /// The rest of the buffer at the position; `None` at the end.
    pub fn chunk(&mut self) -> Option<VolatileSlice<'m>> {
        while let Some((first, rest)) = self.slices.split_first() {
            match first.offset(self.offset) {
                Ok(slice) if !slice.is_empty() => return Some(slice),
                _ => {
                    self.slices = rest;
                    self.offset = 0;
                }
            }
        }
        None
    }

    /// Goes on by `count` bytes, which lie within the chunk.
    pub fn advance(&mut self, count: usize) {
        self.offset += count;
        self.done += count;
    }

    /// Goes on by `count` bytes, or to the end.
    pub fn skip(&mut self, count: usize) {
        self.transfer(count, |chunk, done| chunk.len().min(count - done));
    }

    /// Calls `copy` with chunks and the number of bytes copied so far, until `total` are or the end is reached.
    fn transfer(&mut self, total: usize, mut copy: impl FnMut(VolatileSlice<'m>, usize) -> usize) -> usize {
        let mut done = 0;
        while done < total {
            let Some(chunk) = self.chunk() else { break };
            let copied = copy(chunk, done);
            self.advance(copied);
            done += copied;
        }
        done
    }
}

impl io::Read for Cursor<'_, '_> {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        Ok(self.transfer(data.len(), |chunk, done| chunk.copy_to(&mut data[done..])))
    }
}

impl io::Write for Cursor<'_, '_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        Ok(self.transfer(data.len(), |chunk, done| {
            let count = chunk.len().min(data.len() - done);
            chunk.copy_from(&data[done..done + count]);
            count
        }))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ActiveQueue {
    /// Takes the next chain that the driver made available.
    ///
    /// # Errors
    /// The ring contradicts itself; leave it alone until the next activation.
    pub fn take<'m>(&mut self, memory: &'m GuestRam) -> Result<Option<Available<'m>>, RingError> {
        let size = self.queue.size();
        let Some(head) = self.queue.iter(memory)?.next().map(|chain| chain.head_index()) else {
            return Ok(None);
        };
        if head >= size {
            // It cannot be given back: it was not taken, then.
            self.queue.go_to_previous_position();
            return Err(RingError::Head(head));
        }
        self.busy_poll.found();
        Ok(Some(Available {
            memory,
            table: GuestAddress(self.queue.desc_table()),
            size,
            head,
        }))
    }

    /// Takes the chains that an earlier activation has kept, as they stand in guest memory now: nothing is known of what was done
    /// of them.
    pub fn take_held<'m>(&mut self, memory: &'m GuestRam) -> Vec<Available<'m>> {
        let (table, size) = (GuestAddress(self.queue.desc_table()), self.queue.size());
        let held = std::mem::take(&mut self.held).into_iter();
        held.map(|head| Available {
            memory,
            table,
            size,
            head,
        })
        .collect()
    }

    /// Gives a chain back with `written` bytes in its writable part.
    ///
    /// # Errors
    /// The ring's memory cannot be accessed.
    pub fn complete(&mut self, memory: &GuestRam, head: u16, written: u32) -> Result<(), RingError> {
        Ok(self.queue.add_used(memory, head, written)?)
    }

    /// Gives several chains back in one step: the driver sees all of them or none, as it has to where they are parts of
    /// one thing (5.1.6.4.1). Goes with [`ActiveQueue::notify_since`], which [`ActiveQueue::notify`] cannot replace.
    ///
    /// # Errors
    /// The ring's memory cannot be accessed.
    pub fn complete_together(&mut self, memory: &GuestRam, chains: &[(u16, u32)]) -> Result<(), RingError> {
        let Some(((last, last_written), rest)) = chains.split_last() else {
            return Ok(());
        };
        let (ring, size) = (self.queue.used_ring(), self.queue.size());
        let mut at = self.queue.next_used();
        for &(head, written) in rest {
            // flags, idx, then elements of id and len (2.7.8).
            let slot = u64::from(at.checked_rem(size).unwrap_or(0));
            let element = [u32::from(head).to_le(), written.to_le()];
            memory
                .write_obj(element, GuestAddress(ring + 4 + 8 * slot))
                .map_err(|error| RingError::Memory(error.to_string()))?;
            at = at.wrapping_add(1);
        }
        // The index moves, past all of them, with the last.
        self.queue.set_next_used(at);
        Ok(self.queue.add_used(memory, *last, *last_written)?)
    }

    /// As [`ActiveQueue::notify`], for everything given back since the used index was `before`.
    ///
    /// # Errors
    /// The ring's memory cannot be accessed.
    pub fn notify_since(
        &mut self,
        memory: &GuestRam,
        before: u16,
        interrupt: &dyn QueueInterrupt,
    ) -> Result<(), RingError> {
        let now = self.queue.next_used();
        if now == before {
            return Ok(());
        }
        // What was given back is visible before the driver's wish is read (2.7.7.2).
        fence(Ordering::SeqCst);
        let wanted = if self.queue.event_idx_enabled() {
            let event = used_event(&self.queue, memory)?;
            // 2.7.10.1: whether `event` was passed.
            now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before)
        } else {
            u32::from(available_flags(&self.queue, memory)?) & VRING_AVAIL_F_NO_INTERRUPT == 0
        };
        if wanted {
            interrupt.signal_queue(self.index);
        }
        Ok(())
    }

    /// Tells the driver of everything given back so far, if it wants to hear of it (2.7.7.2, 2.7.10).
    ///
    /// # Errors
    /// The ring's memory cannot be accessed.
    pub fn notify(&mut self, memory: &GuestRam, interrupt: &dyn QueueInterrupt) -> Result<(), RingError> {
        if self.wants_interrupt(memory)? {
            interrupt.signal_queue(self.index);
        }
        Ok(())
    }

    /// Asks the driver not to kick for now; with event indices it does not anyway (2.7.10.1).
    ///
    /// # Errors
    /// The ring's memory cannot be accessed.
    pub fn disable_kicks(&mut self, memory: &GuestRam) -> Result<(), RingError> {
        Ok(self.queue.disable_notification(memory)?)
    }

    /// Asks the driver to kick again. True when there is more already: then look again before waiting.
    ///
    /// # Errors
    /// The ring's memory cannot be accessed.
    pub fn enable_kicks(&mut self, memory: &GuestRam) -> Result<bool, RingError> {
        self.busy_poll.ask();
        Ok(self.queue.enable_notification(memory)?)
    }

    /// The same for whoever serves this queue alone, and calls it again when nothing was there: true also when there may be more soon,
    /// and the driver was not asked.
    ///
    /// # Errors
    /// The ring's memory cannot be accessed.
    pub fn enable_kicks_unless_polling(&mut self, memory: &GuestRam) -> Result<bool, RingError> {
        Ok(self.busy_poll.goes_on() || self.enable_kicks(memory)?)
    }

    fn wants_interrupt(&mut self, memory: &GuestRam) -> Result<bool, RingError> {
        let needed = self.queue.needs_notification(memory)?;
        if !needed || self.queue.event_idx_enabled() {
            return Ok(needed);
        }
        let flags = available_flags(&self.queue, memory)?;
        Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }
}

/// Behind the ring of heads (2.7.6).
fn used_event(queue: &Queue, memory: &GuestRam) -> Result<u16, RingError> {
    let address = queue.avail_ring() + 4 + 2 * u64::from(queue.size());
    memory
        .load(GuestAddress(address), Ordering::Relaxed)
        .map(u16::from_le)
        .map_err(|error| RingError::Memory(error.to_string()))
}

fn available_flags(queue: &Queue, memory: &GuestRam) -> Result<u16, RingError> {
    memory
        .load(GuestAddress(queue.avail_ring()), Ordering::Relaxed)
        .map(u16::from_le)
        .map_err(|error| RingError::Memory(error.to_string()))
}
