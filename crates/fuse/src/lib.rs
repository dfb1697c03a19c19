//! A directory served by FUSE messages: what a file system's kernel half asks, answered with system calls beneath one
//! directory. Does not know how messages come and go, nor whose virtual machine asks.
//!
//! The other side is hostile. It names files by numbers that it was given, and by single names within directories that it
//! has such numbers of; no name with a slash, no `.` or `..`, and no symbolic link is ever followed here, so there is no
//! path to be led astray. Only regular files and directories are opened; the kernel of the other side has its own
//! devices, FIFOs and sockets. Numbers and open files are bounded.
//!
//! ```text
//!  request ─► message ─► server: which operation ─┬─► tree: names        ┐
//!                                                 ├─► attributes         ├─► nodes, handles
//!                                                 ├─► data               │
//!                                                 └─► xattr              ┘
//! ```

pub mod abi;
mod attributes;
mod data;
mod handles;
mod known;
mod message;
mod nodes;
mod owner;
mod server;
pub mod stream;
mod tree;
mod xattr;

#[cfg(test)]
mod tests;

pub use known::{Known, KnownFile, KnownHandle, KnownNode, Path};
pub use message::{MAX_IO, MAX_REPLY, MAX_REQUEST, Reply};
pub use owner::Owners;
pub use server::{Options, Server};
pub use stream::Answer;

/// Why a directory cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is none.
    #[error("what is to be served is no directory")]
    NoDirectory,
    /// Nobody here knows what a guest knows of it.
    #[error(
        "a directory that is served on another machine has no part in a snapshot, as what a guest has open there is not known here: \
         take the snapshot of a sandbox without it"
    )]
    Elsewhere,
    /// A step failed.
    #[error("{step}: {cause}")]
    System {
        /// What was being done.
        step: &'static str,
        /// Why it failed.
        cause: rustix::io::Errno,
    },
}
