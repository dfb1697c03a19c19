//! The arguments of `basalt snapshot`.

use clap::{Args, Subcommand};

/// `basalt snapshot ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotVerb {
    /// Keep a sandbox as it is now, memory and disk; it goes on.
    Create(CreateArgs),
    /// List the snapshots.
    Ls,
    /// Show all that is known of snapshots.
    Inspect(NamesArgs),
    /// Remove snapshots.
    Rm(NamesArgs),
}

/// `basalt snapshot create`.
#[derive(Args, Debug)]
pub(crate) struct CreateArgs {
    /// The sandbox: a name, or an id or its beginning.
    pub(crate) sandbox: String,

    /// What the snapshot is called; the sandbox's name and a number otherwise.
    #[arg(value_parser = name)]
    pub(crate) name: Option<String>,
}

/// Several snapshots.
#[derive(Args, Debug)]
pub(crate) struct NamesArgs {
    /// The snapshots' names.
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
}

/// A snapshot's name.
pub(super) fn name(text: &str) -> Result<String, String> {
    node_api::check_snapshot_name(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}
