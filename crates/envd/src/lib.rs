//! What the E2B SDKs find at port 49983 of a sandbox ("envd"), answered on the host over the protocol of the sandbox's agent:
//! processes and files by the Connect protocol, whole files by HTTP. Knows no node, no API key and no other sandbox; whoever serves it
//! says how the one sandbox's agent is reached ([`Guest`]) and who may ask ([`Access`]). `docs/e2b.md` says what is served.

mod access;
mod agent;
mod connect;
mod cors;
mod error;
mod files;
mod filesystem;
mod guest;
mod memory;
mod process;
mod sandbox;
mod signature;
mod state;

pub use access::Access;
pub use guest::{Connecting, Guest, GuestError, Opened};
pub use memory::{Memory, Share};
pub use process::note_of_shell;
pub use sandbox::Sandbox;

/// The version of envd whose behaviour is here: the SDKs decide by it what they may ask. Everything that they know of a newer one is
/// either there or not asked for; 0.6.4 is the newest that they look for.
pub const VERSION: &str = "0.6.4";

/// The port of a sandbox that envd is asked at.
pub const PORT: u16 = 49983;
