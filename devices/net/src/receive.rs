//! Packets for the guest: from the TAP into its receive queue.
//!
//! ```text
//!  enough room for the largest packet ─▶ readv into the buffers ─▶ as many as it filled are used, the others stay taken
//!  less room ─▶ read into memory of our own ─▶ copied once it fits; dropped if no more buffers can come
//! ```
//! What stays taken is put back into the ring when the worker stops.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Instant;

use ::device::RateLimiter;
use memory::GuestRam;
use virtio::buffers::Cursor;
use virtio::virtio_queue::{QueueOwnedT, QueueT};
use virtio::{ActiveQueue, Chain, QueueInterrupt, RingError};
use vm_memory::VolatileSlice;

use crate::config::{HEADER, LARGEST, NUM_BUFFERS};
use crate::metrics::Metrics;
use crate::tap::{IOV_MAX, IoVecs, Tap};
use crate::worker::{Pass, TURNS};

/// A receive queue.
pub(crate) struct Receive {
    pub(crate) queue: ActiveQueue,
    pub(crate) limit: Option<Arc<RateLimiter>>,
    /// Its ring contradicts itself: it is left alone until the next reset.
    pub(crate) broken: bool,
    /// A packet may use several chains (VIRTIO_NET_F_MRG_RXBUF).
    pub(crate) mergeable: bool,
    /// The largest packet that may come, header included.
    pub(crate) largest: usize,
    /// The TAP may have a packet. Its epoll event comes once, so it is remembered.
    pub(crate) ready: bool,
}

/// Buffers that were taken and not used yet, and a packet that waits for more of them.
#[derive(Default)]
pub(crate) struct Room<'m> {
    slots: VecDeque<Slot<'m>>,
    bytes: usize,
    vectors: IoVecs<'m>,
    waiting: Vec<u8>,
    used: Vec<(u16, u32)>,
}

/// A chain that was taken. One without room is used along with the next packet: buffers are put back from the end only,
/// so none may be used before those that were taken earlier.
enum Slot<'m> {
    Chain(Chain<'m>),
    Useless(u16),
}

impl Slot<'_> {
    fn head(&self) -> u16 {
        match self {
            Self::Chain(chain) => chain.head(),
            Self::Useless(head) => *head,
        }
    }
}

impl<'m> Slot<'m> {
    fn buffers(&self) -> &[VolatileSlice<'m>] {
        match self {
            Self::Chain(chain) => chain.writable(),
            Self::Useless(_) => &[],
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Chain(chain) => chain.writable_bytes(),
            Self::Useless(_) => 0,
        }
    }
}

impl<'m> Room<'m> {
    fn push(&mut self, slot: Slot<'m>) {
        self.bytes += slot.bytes();
        self.vectors.extend(slot.buffers());
        self.slots.push_back(slot);
    }

    fn pop(&mut self) -> Option<Slot<'m>> {
        let slot = self.slots.pop_front()?;
        self.bytes -= slot.bytes();
        self.vectors.drop_front(slot.buffers().len());
        Some(slot)
    }

    fn buffers(&self) -> Vec<VolatileSlice<'m>> {
        self.slots.iter().flat_map(Slot::buffers).copied().collect()
    }
}

/// What one look at the TAP brought.
enum Turn {
    Packet,
    Nothing,
    NoRoom,
}

impl Receive {
    /// Gives the guest what is there, a bounded number of packets.
    pub(crate) fn pass<'m>(
        &mut self,
        memory: &'m GuestRam,
        tap: &Tap,
        room: &mut Room<'m>,
        interrupt: &dyn QueueInterrupt,
        metrics: &Metrics,
    ) -> Result<Pass, RingError> {
        if !self.ready && room.waiting.is_empty() {
            return Ok(Pass::Idle);
        }
        let before = self.queue.queue.next_used();
        let mut outcome = Pass::More;
        self.queue.disable_kicks(memory)?;
        for _ in 0..TURNS {
            if let Some(wait) = self.limit.as_ref().and_then(|limit| limit.wait(Instant::now())) {
                metrics.throttled.increment();
                outcome = Pass::After(wait);
                break;
            }
            match self.turn(memory, tap, room, metrics)? {
                Turn::Packet => {}
                Turn::Nothing => {
                    outcome = Pass::Idle;
                    break;
                }
                Turn::NoRoom if self.queue.enable_kicks(memory)? => self.queue.disable_kicks(memory)?,
                Turn::NoRoom => {
                    outcome = Pass::Idle;
                    break;
                }
            }
        }
        self.queue.notify_since(memory, before, interrupt)?;
        Ok(outcome)
    }

    /// Puts what was taken back into the ring. A packet that waits is lost, as on any link.
    pub(crate) fn put_back(&mut self, room: Room<'_>, metrics: &Metrics) {
        for _ in &room.slots {
            self.queue.queue.go_to_previous_position();
        }
        if !room.waiting.is_empty() {
            metrics.receive.dropped.increment();
        }
    }

    fn turn<'m>(
        &mut self,
        memory: &'m GuestRam,
        tap: &Tap,
        room: &mut Room<'m>,
        metrics: &Metrics,
    ) -> Result<Turn, RingError> {
        self.fill(memory, room, metrics)?;
        if !room.waiting.is_empty() {
            return self.deliver_copy(memory, room, metrics);
        }
        if room.slots.is_empty() {
            return Ok(Turn::NoRoom);
        }
        let length = if self.has_room(room) {
            self.handled(tap.read(&room.vectors), metrics)
        } else {
            room.waiting.resize(LARGEST, 0);
            let length = self.handled(tap.read_copy(&mut room.waiting), metrics);
            room.waiting.truncate(length.unwrap_or(0));
            if length.is_some() {
                metrics.copied.increment();
                return self.deliver_copy(memory, room, metrics);
            }
            length
        };
        let Some(length) = length else {
            return Ok(Turn::Nothing);
        };
        self.finish(memory, room, length, metrics)?;
        Ok(Turn::Packet)
    }

    /// Takes buffers until the largest packet fits, or there are no more.
    fn fill<'m>(&mut self, memory: &'m GuestRam, room: &mut Room<'m>, metrics: &Metrics) -> Result<(), RingError> {
        while !self.has_room(room) && (self.mergeable || room.slots.is_empty()) && room.vectors.len() < IOV_MAX {
            let Some(available) = self.queue.take(memory)? else {
                break;
            };
            let head = match available.check() {
                Ok(chain) if chain.writable_bytes() >= HEADER => {
                    room.push(Slot::Chain(chain));
                    continue;
                }
                Ok(chain) => chain.head(),
                Err(bad) => bad.head,
            };
            metrics.refused.increment();
            if room.slots.is_empty() {
                self.queue.complete(memory, head, 0)?;
            } else {
                room.push(Slot::Useless(head));
            }
        }
        Ok(())
    }

    fn has_room(&self, room: &Room<'_>) -> bool {
        room.bytes >= self.largest && room.vectors.len() <= IOV_MAX
    }

    /// The length of what was read; `None` when there is nothing to be read for now.
    fn handled(&mut self, result: io::Result<usize>, metrics: &Metrics) -> Option<usize> {
        match result {
            // Nothing shorter than a header comes from a TAP; were there no header, the guest must not see the rest.
            Ok(length) if length > HEADER => Some(length),
            Ok(_) => {
                self.ready = false;
                None
            }
            Err(error) => {
                self.ready = false;
                // EBADFD: the queue is detached, as the guest wants it.
                let expected = [libc::EAGAIN, libc::EBADFD].map(Some).contains(&error.raw_os_error());
                if !expected && metrics.log_limit.allow() {
                    log::warn!("net: the TAP cannot be read: {error}");
                }
                None
            }
        }
    }

    /// Copies the packet that waits, if it fits.
    fn deliver_copy(&mut self, memory: &GuestRam, room: &mut Room<'_>, metrics: &Metrics) -> Result<Turn, RingError> {
        let length = room.waiting.len();
        if length > room.bytes {
            // Without merging, or with all of the ring taken, it will never fit.
            let ring = usize::from(self.queue.queue.size());
            let hopeless = if self.mergeable {
                room.slots.len() >= ring || room.vectors.len() >= IOV_MAX
            } else {
                !room.slots.is_empty()
            };
            if !hopeless {
                return Ok(Turn::NoRoom);
            }
            room.waiting.clear();
            metrics.receive.dropped.increment();
            return Ok(Turn::Packet);
        }
        let packet = std::mem::take(&mut room.waiting);
        let written = Cursor::new(&room.buffers()).write(&packet).unwrap_or(0);
        self.finish(memory, room, written, metrics)?;
        Ok(Turn::Packet)
    }

    /// Uses the chains that a packet of `length` bytes lies in.
    fn finish(
        &mut self,
        memory: &GuestRam,
        room: &mut Room<'_>,
        length: usize,
        metrics: &Metrics,
    ) -> Result<(), RingError> {
        let frame = length.saturating_sub(HEADER);
        let mut left = length;
        let mut first = None;
        room.used.clear();
        while left > 0 {
            let Some(slot) = room.pop() else { break };
            let here = slot.bytes().min(left);
            left -= here;
            room.used.push((slot.head(), u32::try_from(here).unwrap_or(u32::MAX)));
            first = first.or(Some(slot));
        }
        // Any driver that has accepted VIRTIO_F_VERSION_1 finds it, merging or not (5.1.6.4.1).
        let count = u16::try_from(room.used.len()).unwrap_or(u16::MAX);
        if let Some(slot) = first {
            let mut header = Cursor::new(slot.buffers());
            header.skip(NUM_BUFFERS);
            // The first one has HEADER bytes at least: `fill` saw to that.
            let written = header.write(&count.to_le_bytes()).unwrap_or(0);
            debug_assert_eq!(written, 2);
        }
        self.queue.complete_together(memory, &room.used)?;
        if let Some(limit) = &self.limit {
            limit.spend(frame);
        }
        metrics.receive.packets.increment();
        metrics.receive.bytes.add(frame as u64);
        Ok(())
    }
}
