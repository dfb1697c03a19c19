//! CUDA on no device: a client's objects and memory, validated and accounted, and answers that are made up; no bytes are computed.
//!
//! ```text
//!   AnyCall ──▶ objects: made, there, dropped ──▶ memory: within an allocation, within the quota ──▶ AnyReply
//!                    └── what nobody waits for and fails is told by every later call that is waited for ──┘
//! ```
//!
//! Every number of a client's is an allegation: names are looked up, addresses compared with allocations, and what a client can have is
//! bounded. Knows no ring, no window and no library's function.

mod answers;
mod memory;
mod objects;
mod state;

pub use answers::{ATTRIBUTES, DEVICE_NAME, TOTAL_MEMORY, answer};
pub use memory::Quota;
pub use objects::{Failure, Objects};
pub use state::State;
