//! What a guest writes to a network device and the device reads itself, for whoever feeds it more than tests do (`basalt-fuzz`). Packets
//! are the kernel's to read.

use std::io;
use std::sync::Arc;

use memory::GuestRam;
use observe::Registry;
use virtio::{ActiveQueue, QueueInterrupt, RingError};

use crate::control::Control;
use crate::device::Pairs;
use crate::metrics::Metrics;

/// A control queue and what it rules: no pair at all, so that no command is carried out.
pub struct ControlQueue {
    control: Control,
    metrics: Metrics,
}

impl ControlQueue {
    /// Of this queue.
    ///
    /// # Errors
    /// The host has no more descriptors.
    pub fn new(queue: ActiveQueue) -> io::Result<Self> {
        let control = Control {
            queue,
            pairs: Arc::new(Pairs::new(Vec::new())?),
            broken: false,
        };
        let metrics = Metrics::new(&Registry::new(), "net");
        Ok(Self { control, metrics })
    }

    /// Serves what the driver has made available: how many commands, and how many chains, were refused.
    ///
    /// # Errors
    /// The ring contradicts itself.
    pub fn serve(&mut self, memory: &GuestRam, interrupt: &dyn QueueInterrupt) -> Result<(u64, u64), RingError> {
        self.control.serve(memory, interrupt, &self.metrics)?;
        Ok((self.metrics.refused_commands.value(), self.metrics.refused.value()))
    }
}
