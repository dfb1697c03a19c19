//! How records of a forwarded accelerator travel between a client and its server, and what each side waits by; chosen when they meet.
//!
//! ```text
//!   client thread ── ClientEnd ─┬─ RingEnd ── rings in a window ── RingEnd ─┬─ ServerEnd ── server thread
//!                               │    └ Signal: futex or socket, by which a sleeping side is woken
//!                               └─ StreamEnd ── Channel: unix, vsock, TCP, TLS ── StreamEnd ┘
//! ```
//!
//! [`connect`] and [`accept`] agree on a [`Transport`] over a packet socket, which stays open: that it is hung up is how each side learns
//! that the other has ended. Whatever is waited for ends in a record, or in an [`Error`] that says which of three it was: the other side
//! is gone, the time is over, or it broke the protocol. This crate knows no call and no API; a record is 64 bytes with a number.

mod busy_poll;
mod channel;
mod coalesce;
mod connection;
mod end;
mod enter;
mod error;
mod greeting;
mod peer;
mod place;
mod placement;
mod remote;
mod resumption;
mod ring_end;
mod signal;
mod stream_end;
pub mod tls;
mod transport;

pub use coalesce::DEFAULT as COALESCE;
pub use connection::{ClientConnection, Offer, ServerConnection, Settings, accept, connect};
pub use end::{ClientEnd, Counters, ServerEnd};
pub use enter::{Enter, Entered, Link, connect_by_entering, run_when_others_sleep, wait_to_be_entered};
pub use error::{Error, Protocol};
pub use greeting::Agreement;
pub use place::{Place, may_be_linked};
pub use remote::{Address, AddressError, Meeting, connect_remote};
pub use ring_end::Position;
pub use signal::{FutexSignal, Signal, SocketSignal};
pub use transport::{Transport, TransportError};
