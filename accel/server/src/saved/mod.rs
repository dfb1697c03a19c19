//! The state of a server's clients, saved with their machine and made again by another server: for snapshots, clones and rollback.
//!
//! ```text
//!   save:    each thread between two records ─▶ queues drained ─▶ window, objects' calls, programs' binaries, bytes of memory ─▶ file
//!   restore: file ─▶ objects by their calls, under their names ─▶ threads from where they were in their rings
//! ```
//! What a client has in its own memory, and in the window, comes with its machine. Objects are made again in the order in which they were
//! made (`calls`); memory is made of the file itself where the back end takes the host's, so that clones share what they do not write.
//! Knows no sandbox, and nothing of how a file is kept.

#[cfg(test)]
mod again;
mod calls;
mod client;
mod contents;
mod devices;
mod query;
mod restore;
mod save;
mod state;
mod whole;

use std::io;

use crate::api::Code;

#[cfg(test)]
pub(crate) use again::Kept;
pub(crate) use calls::{Logged, Order, log};
pub(crate) use restore::{Contents, Replay, original, source};
#[cfg(test)]
pub(crate) use save::drain;
pub(crate) use save::prepare;
pub use state::Output;
pub use whole::fill_window;
pub(crate) use whole::{Image, Resumed, Saving, restore_all, save_all};

/// Why a server's state cannot be saved, or not be made again.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Commands go on.
    #[error(
        "commands of the accelerator did not end in time: a kernel runs for long, or commands wait for an event that its program has not \
         set yet; try again later"
    )]
    Busy,
    /// Clients that are not served yet, or whose end is not over.
    #[error("a program is about to get its accelerator, or to let it go; try again later")]
    OnItsWay,
    /// A client without a window.
    #[error(
        "a program reaches the accelerator by a stream, which cannot be resumed; start the sandbox with --accel ...:transport=spin"
    )]
    Stream,
    /// There is an object that no call would make again as it is.
    #[error("it has {0}, which cannot be saved; end the program that has it")]
    CannotBeMadeAgain(&'static str),
    /// The driver refuses.
    #[error("the accelerator's driver refuses what saving or restoring needs: {0}")]
    Driver(String),
    /// Where it was saved there was another accelerator.
    #[error("it was saved with {saved}, and here is {here}: restore it on a host with the same accelerator and driver")]
    OtherDevice {
        /// What there was.
        saved: String,
        /// What there is.
        here: String,
    },
    /// The file is none of ours.
    #[error("the saved state of the accelerator cannot be read: {0}")]
    Format(String),
    /// The file.
    #[error("the saved state of the accelerator: {0}")]
    Io(#[from] io::Error),
}

impl Refusal {
    /// Of a call that failed.
    pub(crate) fn code(code: Code) -> Self {
        Self::Driver(format!("error {}", code.0))
    }
}
