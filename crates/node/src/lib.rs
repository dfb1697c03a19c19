//! The node: sandboxes with a life. Makes them from images, keeps what is known of them in a database, ends them, and
//! finds them again after a crash of its own.
//!
//! A daemon is this crate and a command line. VMMs are processes of their own that outlive it: their control and vsock
//! sockets have names in the state directory, their consoles and logs are files, and how a command ended is in its log. This
//! crate knows the VMM only by its contract (`vmm-api`) and the guest only by the agent's (`agent-api`).

mod blame;
mod builds;
mod clock;
mod clones;
mod cmdline;
mod command;
mod config;
mod database;
mod disk;
mod end;
mod entry;
mod error;
mod error_words;
mod events;
mod hold;
mod host_traits;
mod launch;
mod learned;
mod limits;
mod memory_files;
mod metrics;
mod monitor;
mod moves;
mod names;
mod node;
mod own_cgroup;
mod owned;
mod paths;
mod pool;
mod portable;
mod process;
mod programs;
mod reconcile;
mod requests;
mod rollback;
mod server;
mod shares;
mod shutdown;
mod sizes;
mod slots;
mod snapshots;
mod start;
mod tail;
mod templates;
mod timed;
mod trace;
mod tree;
mod vm;
mod volumes;

#[cfg(test)]
mod testing;

pub use cmdline::command_line;
pub use config::{Config, TimeLimits};
pub use error::Error;
pub use host::jail::Pool;
pub use metrics::Endpoint;
pub use node::{Node, instance};
pub use server::Server;
pub use shutdown::Ending;
pub use tail::Tail;
