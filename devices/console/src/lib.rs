//! virtio-console (virtio 1.2, section 5.3): one port between the guest and a pair of file descriptors.
//!
//! ```text
//!  guest ──transmitq─▶ output.rs ──▶ a pipe, socket, terminal or file
//!  guest ◀─receiveq─── input.rs ◀─── a pipe, socket, terminal or file
//!                one thread: worker.rs
//! ```
//! Nothing is held between the two: what the host does not take waits in the guest's buffers. This crate does not know
//! who is at the other end.

mod device;
mod input;
mod metrics;
mod module;
mod output;
mod worker;

pub use device::Console;
pub use module::MODULE;
