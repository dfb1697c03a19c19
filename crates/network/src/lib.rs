//! The node's network: one namespace with a TAP for each sandbox, joined to the host by one pair of links. Knows
//! neither VMMs nor sandboxes, only slots: small numbers that its caller gives out.
//!
//! ```text
//!  guest ── tapN ┐   namespace /run/netns/<instance>          host
//!  guest ── tapM ┼─ nft: inside address ◀─▶ slot's address ── up0 ══ v-<instance> ── nft: masquerade, published ports,
//!                ┘  no state, no connection tracking                                 nothing for the host itself
//! ```
//! Inside every guest the addresses are the same constants ([`plan`]), so that a clone's network works as it is. What a
//! guest sends gets its slot's address by the TAP it came from, whatever it says; what is sent to a slot's address gets the
//! guest's. Both are changes of one header field, made for each packet by itself; connections are tracked by the host
//! alone. The host gets one table of nft, one link, and forwarding switched on; nothing else there is touched.
//!
//! Everything can be done again: `open` repairs what it finds, and whatever a killed process left is seen by
//! [`Network::slots`] and removed by [`Network::detach`] or [`Network::teardown`].

#![allow(
    unsafe_code,
    reason = "namespaces of threads, and ioctls of TAPs, have no safe wrappers; `inside` and `tap` only"
)]

mod conntrack;
mod egress;
mod error;
mod host;
mod inside;
mod network;
pub mod plan;
pub mod ports;
mod published;
mod quoted;
pub mod resolvers;
mod rules;
mod tap;

#[cfg(test)]
mod tests;

pub use egress::Egresses;
pub use error::Error;
pub use network::{Attachment, Network, NetworkConfig, Ports, SlotState, default_connections};
pub use plan::Ranges;
pub use ports::{PortMapping, Protocol};
