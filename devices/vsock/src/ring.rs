//! One virtqueue at work: when to ask for kicks, when to interrupt, and what to do with a ring that makes no sense.
//!
//! How the bytes of a chain lie in descriptors is the driver's choice (virtio 1.2, 2.7.4); [`transfer`] makes one row of
//! them. Knows no packet.

use std::io::{self, Write};
use std::sync::Arc;

use memory::GuestRam;
use observe::LogLimit;
use virtio::buffers::Cursor;
use virtio::virtio_queue::{QueueOwnedT, QueueT};
use virtio::{ActiveQueue, BadChain, Chain, QueueInterrupt, RingError};
use vm_memory::{VolatileMemoryError, VolatileSlice};

/// A queue and what was told to its driver.
#[derive(Debug)]
pub(crate) struct Ring {
    /// The queue; given back whole.
    pub(crate) active: ActiveQueue,
    listening: bool,
    used: bool,
    broken: bool,
    log_limit: Arc<LogLimit>,
}

impl Ring {
    /// Begins to work on `active`. The limit outlives it, or a guest could have a line with each reset.
    pub(crate) fn new(active: ActiveQueue, log_limit: Arc<LogLimit>) -> Self {
        Self {
            active,
            // The driver kicks until it is told not to.
            listening: true,
            used: false,
            broken: false,
            log_limit,
        }
    }

    /// How many chains fit.
    pub(crate) fn size(&self) -> u16 {
        self.active.queue.size()
    }

    fn take<'m>(&mut self, memory: &'m GuestRam) -> Option<Result<Chain<'m>, BadChain>> {
        if self.broken {
            return None;
        }
        match self.active.take(memory) {
            Ok(available) => available.map(virtio::Available::check),
            Err(error) => {
                self.fail(&error);
                None
            }
        }
    }

    /// Takes the next chain; when there is none, asks for a kick.
    pub(crate) fn take_or_listen<'m>(&mut self, memory: &'m GuestRam) -> Option<Result<Chain<'m>, BadChain>> {
        let chain = self.take(memory);
        if chain.is_some() || !self.listen(memory) {
            return chain;
        }
        // One came between the look and the request, or the driver says so against the truth.
        let chain = self.take(memory);
        if chain.is_none() {
            self.fail(&RingError::AvailableIndex);
        }
        chain
    }

    /// Undoes the last taking.
    pub(crate) fn put_back(&mut self) {
        self.active.queue.go_to_previous_position();
    }

    /// Gives a chain back with `written` bytes in it.
    pub(crate) fn give(&mut self, memory: &GuestRam, head: u16, written: usize) {
        let written = u32::try_from(written).unwrap_or(u32::MAX);
        match self.active.complete(memory, head, written) {
            Ok(()) => self.used = true,
            Err(error) => self.fail(&error),
        }
    }

    /// Asks for kicks. True when there are buffers already, for which none will come.
    fn listen(&mut self, memory: &GuestRam) -> bool {
        if self.broken {
            return false;
        }
        self.listening = true;
        self.active.enable_kicks(memory).unwrap_or_else(|error| {
            self.fail(&error);
            false
        })
    }

    /// Asks for no kicks.
    pub(crate) fn ignore(&mut self, memory: &GuestRam) {
        if !self.listening || self.broken {
            return;
        }
        self.listening = false;
        if let Err(error) = self.active.disable_kicks(memory) {
            self.fail(&error);
        }
    }

    /// Tells the driver of what was given back since the last time, if it wants to hear.
    pub(crate) fn publish(&mut self, memory: &GuestRam, interrupt: &dyn QueueInterrupt) {
        if std::mem::take(&mut self.used)
            && let Err(error) = self.active.notify(memory, interrupt)
        {
            self.fail(&error);
        }
    }

    /// The ring makes no sense. It is left alone until the driver resets the device; said once.
    fn fail(&mut self, error: &RingError) {
        if !std::mem::replace(&mut self.broken, true) && self.log_limit.allow() {
            log::warn!(
                "vsock queue {} is not served until the driver resets the device: {error}",
                self.active.index
            );
        }
    }
}

/// Writes `bytes` into a buffer, if they fit; how many were written.
pub(crate) fn put_bytes(chain: &Chain<'_>, bytes: &[u8]) -> usize {
    if chain.writable_bytes() < bytes.len() {
        return 0;
    }
    match chain.writer().write_all(bytes) {
        Ok(()) => bytes.len(),
        Err(_) => 0,
    }
}

/// Hands the next `length` bytes to `move_bytes`, piece by piece, until it moves less than a whole piece. Tells how many
/// were moved, and why it ended early if by an error.
pub(crate) fn transfer<'m>(
    cursor: &mut Cursor<'_, 'm>,
    length: usize,
    mut move_bytes: impl FnMut(&mut VolatileSlice<'m>) -> Result<usize, VolatileMemoryError>,
) -> (usize, Option<io::Error>) {
    let mut moved = 0;
    while moved < length
        && let Some(chunk) = cursor.chunk()
    {
        let size = chunk.len().min(length - moved);
        let result = chunk.subslice(0, size).and_then(|mut piece| move_bytes(&mut piece));
        let count = match result {
            Ok(count) => count,
            Err(VolatileMemoryError::IOError(error)) => return (moved, Some(error)),
            Err(error) => return (moved, Some(io::Error::other(error))),
        };
        cursor.advance(count);
        moved += count;
        if count < size {
            break;
        }
    }
    (moved, None)
}
