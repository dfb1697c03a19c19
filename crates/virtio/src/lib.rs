//! Virtqueues, the virtio-pci transport, the [`VirtioDevice`] trait and the conformance kit. Knows no concrete device.
//!
//! Sections cited are those of the virtio 1.2 specification.

pub mod device;

pub use device::{Activation, ActiveQueue, DeviceError, QueueInterrupt, VirtioDevice};
pub use virtio_queue;
