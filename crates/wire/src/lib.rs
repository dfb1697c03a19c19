//! Framed messages over byte streams, packets with file descriptors over unix sockets, and rings of records in shared memory; never looks
//! into a message.
//!
//! A peer may be hostile: every length is checked before memory is taken for it, nothing panics on what a peer sends.

mod error;
mod frame;
mod handshake;
pub mod packet;
pub mod ring;

pub use error::Error;
pub use frame::{Frame, FrameReader, FrameWriter, HEADER_LEN, Header, MAX_PAYLOAD, decode};
pub use handshake::{Protocol, Token, accept, await_answer, offer, send_offer};
