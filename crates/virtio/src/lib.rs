//! Virtqueues, the virtio-pci transport, the [`VirtioDevice`] trait and the conformance kit. Knows no concrete device.
//!
//! Sections cited are those of the virtio 1.2 specification.

pub mod buffers;
mod busy_poll;
mod config_interrupt;
pub mod conformance;
mod descriptors;
pub mod device;
pub mod device_worker;
mod queue_loop;
pub mod transport;

pub use buffers::{Available, BadChain, Chain, RingError};
pub use busy_poll::BusyPoll;
pub use config_interrupt::ConfigInterrupt;
pub use device::{Activation, ActiveQueue, DeviceError, QueueInterrupt, VirtioDevice};
pub use device_worker::{DeviceWorker, take_queue};
pub use queue_loop::QueueLoop;
pub use transport::{DeviceState, Reach, TransportError, TransportState, VirtioPciDevice};
pub use virtio_queue;
