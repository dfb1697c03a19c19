//! The node: sandboxes with a life. Makes them from images, keeps what is known of them in a database, ends them, and
//! finds them again after a crash of its own.
//!
//! A daemon is this crate and a command line. VMMs are processes of their own that outlive it: their control and vsock
//! sockets have names in the state directory, their consoles and logs are files, and how a command ended is in its log. This
//! crate knows the VMM only by its contract (`vmm-api`) and the guest only by the agent's (`agent-api`).

mod accelerator_socket;
mod api;
mod clock;
mod config;
mod deadline_stream;
mod error;
mod events;
mod guest;
mod ids;
mod node;
mod operations;
mod recovery;
mod resources;
mod sandbox;
mod saved;
mod socket_file;
mod store;
mod telemetry;
mod thread;
mod transfer;
pub mod untrusted;
mod vmm;

#[cfg(test)]
mod sim;
#[cfg(test)]
mod testing;

pub use api::server::Server;
pub use config::{Config, Programs, Sockets, TimeLimits, Zeroing};
pub use error::Error;
pub use host::jail::Pool;
pub use node::{Node, instance};
pub use operations::shutdown::Ending;
pub use resources::budget::{HostNumbers, Overcommit, Refused, Space, ThisHost, Wish};
pub use store::private::keep_private;
pub use telemetry::metrics::Endpoint;
pub use vmm::cmdline::command_line;
pub use vmm::tail::Tail;
pub use vmm_api::devices::{MIN_FILL_RATE, ZEROED_PIECE};
