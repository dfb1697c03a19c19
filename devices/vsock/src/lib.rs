//! virtio-vsock (virtio 1.2, section 5.10), served inside the VMM by one thread; the host's side is unix sockets.
//!
//! ```text
//!  guest ◀─rx── to_guest.rs ◀──┐                     ┌──▶ listener: CONNECT <port> ─▶ a connection into the guest
//!                              ├─ table of connections ─┤
//!  guest ──tx─▶ from_guest.rs ─┘                     └──▶ acceptor: port + descriptor ◀─ a connection out of the guest
//!                              one thread: worker.rs
//! ```
//! Streams only. This crate knows neither who listens on the host nor what the bytes mean.

mod connection;
mod credit;
mod device;
mod events;
mod from_guest;
mod host;
mod metrics;
mod module;
mod packet;
mod resets;
mod ring;
mod sink;
mod switch;
mod table;
mod to_guest;
mod worker;

pub use device::Vsock;
pub use module::MODULE;
