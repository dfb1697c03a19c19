//! The one thread of the device: requests in their order, then a wait for a kick or its stop. Nothing is under way between two requests.

use std::sync::Arc;

use base::StopSignal;
use memory::GuestRam;
use virtio::{ActiveQueue, QueueInterrupt, QueueLoop, RingError};

use crate::domains::Domains;
use crate::requests;

/// Its name.
pub(crate) const THREAD: &str = "iommu";

/// Requests between two looks whether to stop.
const ROUND: usize = 64;

/// Bytes that they map, all together, which have to be filled first: the request that comes to so many is the last. Who pauses the device waits
/// for it; it may map as much as the guest has memory by itself.
pub(crate) const ROUND_BYTES: u64 = 128 << 20;

/// What the thread owns.
pub(crate) struct Server {
    pub(crate) queue: ActiveQueue,
    /// Never looked at.
    pub(crate) events: Option<ActiveQueue>,
    pub(crate) memory: Arc<GuestRam>,
    pub(crate) interrupt: Arc<dyn QueueInterrupt>,
    pub(crate) domains: Domains,
}

impl Server {
    /// Serves requests until it is stopped.
    pub(crate) fn run(mut self: Box<Self>, queue_loop: &QueueLoop, stop: &StopSignal) -> Box<Self> {
        let metrics = Arc::clone(&self.domains.metrics);
        queue_loop.serve(THREAD, stop, &metrics.log_limit, || self.round());
        self
    }

    fn round(&mut self) -> Result<bool, RingError> {
        let memory = Arc::clone(&self.memory);
        self.queue.disable_kicks(&memory)?;
        for _ in 0..ROUND {
            let Some(available) = self.queue.take(&memory)? else {
                break;
            };
            let (head, written) = match available.check() {
                Ok(chain) => (chain.head(), requests::serve(&mut self.domains, &chain)),
                Err(bad) => {
                    self.domains.metrics.refused_chains.increment();
                    (bad.head, 0)
                }
            };
            self.queue.complete(&memory, head, written)?;
            // A driver waits for each with a lock of its own held.
            self.queue.notify(&memory, self.interrupt.as_ref())?;
            if self.domains.asked >= ROUND_BYTES {
                break;
            }
        }
        self.domains.asked = 0;
        self.queue.enable_kicks_unless_polling(&memory)
    }
}
