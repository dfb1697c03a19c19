//! Divides the time of an accelerator between tenants, each of which is a server with clients of its own (docs/accel-sharing.md).
//!
//! ```text
//!   server ── Gate ──┐                                ┌── Rounds: who may use how much, by deficit round robin
//!                    ├── Page, a socket ── Arbiter ───┤
//!   server ── Gate ──┘   one pair for each server     └── shares: a weight and a priority for each, which the node says
//! ```
//!
//! A server asks nobody before each command: it compares two numbers in memory that it shares with the arbiter alone, and waits when its
//! credit is used up. While a tenant is the only one with work there is nothing to compare. Knows no API and no command, only how long
//! what a server has done took; knows no sandbox.

mod arbiter;
mod gate;
mod page;
mod rounds;

pub use arbiter::{Arbiter, ArbiterError, Report};
pub use gate::{Gate, Refusal};
pub use rounds::{Credit, DEFAULT_WEIGHT, Priority, Rounds, Seen, Share};
