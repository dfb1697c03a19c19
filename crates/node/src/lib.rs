//! A sandbox from an image: prepares a VMM, boots it, talks to its agent, leaves nothing behind. Later the daemon's
//! core.
//!
//! Everything reaches the VMM as a descriptor; nothing here has a path that others could open. This crate knows the VMM
//! only by its contract (`vmm-api`) and the guest only by the agent's (`agent-api`).
#![allow(
    unsafe_code,
    reason = "between fork and exec the VMM's control socket is made inheritable and its parent's death signal set"
)]

mod cmdline;
mod error;
mod launch;
mod ring;
mod sandbox;
mod spec;
mod vmm;
mod watch;

#[cfg(test)]
mod tests;

pub use cmdline::command_line;
pub use error::Error;
pub use ring::Tail;
pub use sandbox::{Finished, Sandbox};
pub use spec::{SandboxSpec, check_cpus, check_memory};
