//! The event queue (5.10.6.7): after a restore the driver is told that the transport was reset, as the host's ends of all
//! connections are gone.
//!
//! ```text
//!  Quiet ◀── restore ──▶ Due ── the driver has buffers ──▶ Told ── it has given one back ──▶ Quiet
//! ```
//! A driver deals with the event by closing every connection that it has, so until it has, no packet goes to it: a new
//! connection would be closed with the old ones. It is known to have dealt with it when it offers a buffer anew. Knows no
//! connection.

use std::sync::atomic::Ordering;

use memory::GuestRam;
use virtio::QueueInterrupt;
use virtio::virtio_queue::QueueT;

use crate::ring::{Ring, put_bytes};

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`, the id of `struct virtio_vsock_event`.
const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();

/// How far the driver has heard of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// There is nothing to hear of.
    Quiet,
    /// It is to be told.
    Due,
    /// It has been told, when its available index was this.
    Told(u16),
}

/// The event queue at work.
pub(crate) struct Events {
    /// Missing where the driver has not set it up: it then hears of nothing.
    pub(crate) ring: Option<Ring>,
    pub(crate) stage: Stage,
}

impl Events {
    /// Moves on as far as possible without waiting. True when packets may go to the driver.
    pub(crate) fn settle(&mut self, memory: &GuestRam, interrupt: &dyn QueueInterrupt) -> bool {
        let Some(ring) = &mut self.ring else { return true };
        if self.stage == Stage::Due {
            self.stage = tell(ring, memory);
            ring.publish(memory, interrupt);
        }
        if let Stage::Told(index) = self.stage {
            // A ring that cannot be read will never tell: the driver has to reset the device.
            let now = ring.active.queue.avail_idx(memory, Ordering::Acquire);
            if now.is_ok_and(|now| now.0 != index) {
                self.stage = Stage::Quiet;
            }
        }
        !matches!(self.stage, Stage::Told(_))
    }
}

/// Puts the event into the first buffer and gives all others back with nothing in them: the next one that is made available is
/// then one that the driver gives back, and its kick is not suppressed. To deal with the event costs the driver two exits, so it
/// is not told so more than once.
fn tell(ring: &mut Ring, memory: &GuestRam) -> Stage {
    let mut told = false;
    for _ in 0..ring.size() {
        match ring.take_or_listen(memory) {
            None => break,
            Some(Ok(chain)) => {
                let event: &[u8] = if told { &[] } else { &TRANSPORT_RESET };
                let written = put_bytes(&chain, event);
                ring.give(memory, chain.head(), written);
                told |= written == TRANSPORT_RESET.len();
            }
            Some(Err(bad)) => ring.give(memory, bad.head, 0),
        }
    }
    match told {
        true => Stage::Told(ring.active.queue.next_avail()),
        false => Stage::Due,
    }
}
