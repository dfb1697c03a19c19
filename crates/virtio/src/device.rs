//! What a virtio device is to its transport.
//!
//! ```text
//!            activate(queues)                deactivate() -> queues
//!  idle ───────────────────────▶ active ───────────────────────────▶ idle
//!   ▲  driver sets DRIVER_OK       │        pause: the transport keeps the queues and activates with them again
//!   └──────────────────────────────┘        reset: the transport drops them
//! ```
//! Sleeping *is* giving the queues back: a device has no other notion of pause and resume. A device that owes its driver something beyond
//! its queues is told of a reset as well.

use std::sync::Arc;

use base::EventFd;
use memory::GuestRam;
use state::{Saved, StateError};
use virtio_queue::Queue;

use crate::busy_poll::BusyPoll;

/// A virtqueue in the hands of a device.
#[derive(Debug)]
pub struct ActiveQueue {
    /// Its number.
    pub index: u16,
    /// The ring; set up and ready.
    pub queue: Queue,
    /// Signalled when the driver has made buffers available. Level: read it, then look at the ring.
    pub kick: Arc<EventFd>,
    /// How long to look for more before the driver is asked to kick.
    pub busy_poll: BusyPoll,
    /// Chains that the device has taken and neither used nor given up: [`ActiveQueue::take_held`] gives them to it again at the
    /// next activation. A queue with such chains cannot be saved.
    pub held: Vec<u16>,
}

/// How a device tells the driver something. One object a device, shared by its threads.
pub trait QueueInterrupt: Send + Sync {
    /// The used ring of queue `index` has news the driver wants to hear of (2.7.10). The caller has asked
    /// `Queue::needs_notification`.
    fn signal_queue(&self, index: u16);

    /// The configuration space has changed (4.1.4.5).
    fn signal_config(&self);
}

/// All that a device needs to work.
pub struct Activation {
    /// Guest memory.
    pub memory: Arc<GuestRam>,
    /// The way back to the driver.
    pub interrupt: Arc<dyn QueueInterrupt>,
    /// The features that the driver accepted.
    pub features: u64,
    /// The queues that the driver enabled, by rising number; those it left out are missing.
    pub queues: Vec<ActiveQueue>,
}

/// Why a device cannot start, be saved or be restored.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The driver left out a queue that the device cannot work without.
    #[error("the driver did not enable queue {0}")]
    MissingQueue(u16),
    /// The host refused a resource.
    #[error("the device could not be started: {0}")]
    Host(#[from] std::io::Error),
    /// Devices of this kind have no saved form.
    #[error("devices of its kind cannot be part of a snapshot: take the snapshot of a VM without it")]
    NotSaved,
    /// What it had is gone.
    #[error("it has lost a thread and what that had, and cannot be saved: its driver has to reset it")]
    Lost,
    /// The saved state cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The saved state belongs to a device that was configured otherwise.
    #[error("{0}: restore with the configuration that it was saved with")]
    Unlike(String),
    /// What it has cannot be part of a snapshot, or cannot go on from this one.
    #[error("{0}")]
    Refused(String),
}

/// A virtio device as its transport sees it. The transport calls from one thread at a time.
pub trait VirtioDevice: Send {
    /// The device id (section 5), such as 2 for a block device.
    fn device_type(&self) -> u16;

    /// The device's own feature bits (0 to 23 and 50 to 127); ring and transport bits are the transport's.
    fn features(&self) -> u64;

    /// The largest size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Fills `data` from the configuration space; the transport has filled it with zeroes.
    fn read_config(&self, offset: usize, data: &mut [u8]);

    /// Takes a write to the configuration space. Devices without writable fields ignore it.
    fn write_config(&mut self, offset: usize, data: &[u8]);

    /// Starts to work. Buffers that were made available earlier are looked for at once, without a kick.
    ///
    /// # Errors
    /// The transport sets `DEVICE_NEEDS_RESET`.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;

    /// Its driver gives up all that it has asked for: called before [`VirtioDevice::deactivate`] where a reset is the reason. What the device
    /// has not begun need not be done, and is answered with an error; most devices have begun everything.
    fn discard(&mut self) {}

    /// Stops to work and gives the queues back: no thread of the device touches guest memory afterwards, and every
    /// buffer taken has been used, or stands in [`ActiveQueue::held`]. Empty when the device was not active.
    fn deactivate(&mut self) -> Vec<ActiveQueue>;

    /// Its driver starts anew, or the machine ends: called when it has no queues any more. What a driver has had a device do that outlives its
    /// queues ends here; most devices do nothing of that kind.
    fn reset(&mut self) {}

    /// Everything of the device that neither the transport nor the configuration knows, while it has no queues. A device
    /// that does not have this refuses: nothing is ever left out in silence.
    ///
    /// # Errors
    /// It cannot be saved; why.
    fn save(&self) -> Result<Saved, DeviceError> {
        Err(DeviceError::NotSaved)
    }

    /// Takes over what [`VirtioDevice::save`] gave, into a device that was just made and has not been activated. If its
    /// like was active, it is activated next, with queues that go on where they were.
    ///
    /// # Errors
    /// The state is another device's.
    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let _ = saved;
        Err(DeviceError::NotSaved)
    }
}
