//! The arguments of `basalt snapshot`, `clone` and `rollback`.

use clap::{Args, Subcommand};

use super::parse;

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

const CLONE_HELP: &str = "\
Examples:
  basalt snapshot create web ready
  basalt clone --name one -p 8081:80 ready
  basalt clone --name two -p 8082:80 ready

A clone goes on where the sandbox was when its snapshot was taken, detached, with the same memory and disk; its name, host name, machine id, random numbers,
published ports and address outside are its own.";

/// `basalt clone`.
#[derive(Args, Clone, Debug)]
#[command(after_help = CLONE_HELP)]
pub(crate) struct CloneArgs {
    /// Name of the sandbox; one is made up otherwise.
    #[arg(long, value_name = "NAME", value_parser = parse::sandbox_name)]
    pub(crate) name: Option<String>,

    /// Host name of the virtual machine, instead of the sandbox's id.
    #[arg(long, value_name = "NAME", value_parser = parse::hostname)]
    pub(crate) hostname: Option<String>,

    /// Let a port of the host lead into it: [IP:]HOST:GUEST[/tcp|udp].
    #[arg(short, long, value_name = "PORTS")]
    pub(crate) publish: Vec<String>,

    /// Mark it with KEY=VALUE, over the marks of the snapshot's sandbox.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse::label)]
    pub(crate) label: Vec<(String, String)>,

    /// Remove the sandbox when it ends.
    #[arg(long)]
    pub(crate) rm: bool,

    /// The snapshot.
    #[arg(value_parser = name)]
    pub(crate) snapshot: String,
}

/// `basalt rollback`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RollbackArgs {
    /// The sandbox: a name, or an id or its beginning.
    pub(crate) sandbox: String,

    /// A snapshot of it.
    #[arg(value_parser = name)]
    pub(crate) snapshot: String,
}

/// A snapshot's name.
pub(super) fn name(text: &str) -> Result<String, String> {
    node_api::check_snapshot_name(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}
