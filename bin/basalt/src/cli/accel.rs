//! The arguments of `basalt accel`.

use clap::Subcommand;

/// `basalt accel ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum AccelVerb {
    /// List the sandboxes that have an accelerator: what they have of its memory and time, and the processes that serve them.
    Ls,
}
