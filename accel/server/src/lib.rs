//! Carries out what clients of an accelerator's API ask for by forwarded calls: objects of each client, what is checked of what it sends,
//! and the back end that does the work.
//!
//! ```text
//!   client thread ── ServerEnd ── Worker ── Session ─┬─ tables of objects, window, callbacks: one Client for a process
//!                                                    └─ Backend: the API in C, out of a library or `null`
//! ```
//!
//! A client is trusted with nothing: records are copied and decoded (`accel/proto`), names of objects are looked up in its own tables, parts
//! of the arena are compared with its size, and bytes that a back end would take for addresses do not reach it. Code of the client's that
//! runs on the accelerator is the back end's to keep apart, or, where that is this host's CPU, the process's. Knows no sandbox.

mod api;
mod arguments;
mod completions;
mod cuda;
mod direct;
mod dispatch;
mod generated;
mod guest;
mod manual;
mod marshal;
mod meter;
mod null;
mod objects;
mod passive;
mod quota;
mod saved;
mod server;
mod session;
mod simulated;
mod stats;
mod svm;
mod table;
mod tenant;
#[cfg(test)]
mod tests;
mod zeroes;

pub use api::{Backend, BackendError};
pub use direct::{Direct, DirectError, DirectThread, Left};
pub use guest::{Guest, Slot, SlotError, Slots};
pub use passive::serve_passive;
pub use saved::{Output, Refusal, fill_window};
pub use server::{Server, ServerError};
pub use stats::{ClientStats, MemoryStats, Stats, TimeStats};
pub use tenant::TenantLimits;
