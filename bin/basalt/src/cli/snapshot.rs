//! The arguments of `basalt snapshot`, `clone`, `rollback` and `move`.

use clap::{Args, Subcommand};
use node_api::transfer::Kind;
use node_api::{Class, Paging};

use super::network::EgressArgs;
use super::parse;
use super::transfer::{Errand, LoadFrom, PullFrom, PushTo, SaveTo, Way, Wish};

/// `basalt snapshot ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotVerb {
    /// Keep a sandbox as it is now, memory and disk; it goes on.
    Create(CreateArgs),
    /// List the snapshots.
    Ls,
    /// Show all that is known of snapshots.
    Inspect(InspectSnapshotsArgs),
    /// Remove snapshots.
    Rm(NamesArgs),
    /// Compare the files of snapshots with their checksums.
    Verify(VerifySnapshotsArgs),
    #[command(flatten)]
    Files(SnapshotFiles),
}

/// Those that read or write files of the caller, beside what the daemon has.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotFiles {
    /// Write a snapshot with its image to one file.
    Save(SaveSnapshotArgs),
    /// Read a snapshot that was saved.
    Load(LoadSnapshotArgs),
    /// Send a snapshot to a registry.
    Push(PushSnapshotArgs),
    /// Fetch a snapshot from a registry.
    Pull(PullSnapshotArgs),
}

impl SnapshotFiles {
    pub(crate) fn errand(&self) -> Errand<'_> {
        // No snapshot is replaced.
        let force = false;
        Errand {
            kind: Kind::Snapshot,
            way: match self {
                Self::Save(args) => Way::Save(&args.name, &args.to),
                Self::Load(args) => {
                    let name = args.name.as_deref();
                    Way::Load(Wish { name, force }, &args.from)
                }
                Self::Push(args) => Way::Push(&args.name, &args.to),
                Self::Pull(args) => {
                    let name = args.name.as_deref();
                    Way::Pull(Wish { name, force }, &args.from)
                }
            },
        }
    }
}

const SAVE_HELP: &str = "\
Examples:
  basalt snapshot save -o ready.basalt ready
  basalt snapshot save ready | ssh there basalt snapshot load

The file has all that was in the guest's memory, keys and passwords too.";

/// `basalt snapshot save`.
#[derive(Args, Debug)]
#[command(after_help = SAVE_HELP)]
pub(crate) struct SaveSnapshotArgs {
    #[command(flatten)]
    to: SaveTo,

    /// The snapshot.
    #[arg(value_parser = name)]
    name: String,
}

const LOAD_HELP: &str = "\
Examples:
  basalt snapshot load -i ready.basalt
  basalt snapshot load --name again < ready.basalt";

/// `basalt snapshot load`.
#[derive(Args, Debug)]
#[command(after_help = LOAD_HELP)]
pub(crate) struct LoadSnapshotArgs {
    #[command(flatten)]
    from: LoadFrom,

    /// What the snapshot is called, instead of as it was.
    #[arg(long, value_name = "NAME", value_parser = name)]
    name: Option<String>,
}

/// `basalt snapshot push`.
#[derive(Args, Debug)]
pub(crate) struct PushSnapshotArgs {
    /// The snapshot.
    #[arg(value_parser = name)]
    name: String,

    #[command(flatten)]
    to: PushTo,
}

/// `basalt snapshot pull`.
#[derive(Args, Debug)]
pub(crate) struct PullSnapshotArgs {
    /// What the snapshot is called, instead of as it was.
    #[arg(long, value_name = "NAME", value_parser = name)]
    name: Option<String>,

    #[command(flatten)]
    from: PullFrom,
}

const CREATE_HELP: &str = "\
Examples:
  basalt snapshot create web ready
  basalt snapshot create --detach-devices db before    one that has a device of the host, which is attached again behind it";

/// `basalt snapshot create`.
#[derive(Args, Debug)]
#[command(after_help = CREATE_HELP)]
pub(crate) struct CreateArgs {
    /// The sandbox: a name, or an id or its beginning.
    pub(crate) sandbox: String,

    /// What the snapshot is called; the sandbox's name and a number otherwise.
    #[arg(value_parser = name)]
    pub(crate) name: Option<String>,

    /// If it has devices of the host, which no snapshot has: detach them for that, and attach them again.
    #[arg(long)]
    pub(crate) detach_devices: bool,
}

/// Several snapshots.
#[derive(Args, Debug)]
pub(crate) struct NamesArgs {
    /// The snapshots' names.
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
}

const VERIFY_HELP: &str = "\
Examples:
  basalt snapshot verify ready
  basalt snapshot verify --all

Each damaged part is named by file and offset, and by its guest physical address if it is memory; the exit code is 1 then. Of a damaged snapshot
nothing is cloned until a verification finds it whole. Files without checksums, such as those of an older version of Basalt, get some.";

/// `basalt snapshot verify`.
#[derive(Args, Debug)]
#[command(after_help = VERIFY_HELP)]
pub(crate) struct VerifySnapshotsArgs {
    /// All snapshots.
    #[arg(short, long, conflicts_with = "names")]
    pub(crate) all: bool,

    /// The snapshots' names.
    #[arg(required_unless_present = "all", value_name = "NAME")]
    pub(crate) names: Vec<String>,
}

/// `basalt snapshot inspect`.
#[derive(Args, Debug)]
pub(crate) struct InspectSnapshotsArgs {
    /// Show the values of environment variables, too.
    #[arg(long)]
    pub(crate) show_secrets: bool,

    #[command(flatten)]
    pub(crate) of: NamesArgs,
}

const CLONE_HELP: &str = "\
Examples:
  basalt snapshot create web ready
  basalt clone --name one -p 8081:80 ready
  basalt clone --name two -p 8082:80 ready

A clone goes on where the sandbox was when its snapshot was taken, detached, with the same memory and disk; its name, host name, machine id, random numbers,
published ports and address outside are its own. It reaches what the snapshot's sandbox might, unless --egress-deny says otherwise.";

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

    /// In place of the snapshot's.
    #[command(flatten)]
    pub(crate) egress: EgressArgs,

    /// Mark it with KEY=VALUE, over the marks of the snapshot's sandbox.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse::label)]
    pub(crate) label: Vec<(String, String)>,

    /// How memory comes from the snapshot: mapped, shared with other clones until it is written; eager, the same, but all of it at once;
    /// on-demand, its own, read when it is touched, or before as the first clone has touched it.
    #[arg(long, value_name = "WAY", default_value_t)]
    pub(crate) paging: Paging,

    /// Remove the sandbox when it ends.
    #[arg(long)]
    pub(crate) rm: bool,

    /// The snapshot.
    #[arg(value_parser = name)]
    pub(crate) snapshot: String,
}

const ROLLBACK_HELP: &str = "\
Examples:
  basalt rollback web ready
  basalt rollback --detach-devices db before    one that has a device of the host: what is on that stays";

/// `basalt rollback`.
#[derive(Args, Clone, Debug)]
#[command(after_help = ROLLBACK_HELP)]
pub(crate) struct RollbackArgs {
    /// The sandbox: a name, or an id or its beginning.
    pub(crate) sandbox: String,

    /// A snapshot of it.
    #[arg(value_parser = name)]
    pub(crate) snapshot: String,

    /// If it has devices of the host, which no snapshot has: detach them for that, and attach them again.
    #[arg(long)]
    pub(crate) detach_devices: bool,
}

const MOVE_HELP: &str = "\
Examples:
  basalt move --class dedicated web
  basalt move --class dedicated --detach-devices db    one that has a device of the host, which is attached again behind it";

/// `basalt move`.
#[derive(Args, Clone, Debug)]
#[command(after_help = MOVE_HELP)]
pub(crate) struct MoveArgs {
    /// How it has the host's processors from then on: standard, dedicated or bare. To and from bare only sandboxes move that run with
    /// --cpu-model common.
    #[arg(long, value_name = "CLASS")]
    pub(crate) class: Class,

    /// The sandbox: a name, or an id or its beginning.
    pub(crate) sandbox: String,

    /// If it has devices of the host, which stay where they are: detach them for that, and attach them again.
    #[arg(long)]
    pub(crate) detach_devices: bool,
}

/// A snapshot's name.
pub(super) fn name(text: &str) -> Result<String, String> {
    node_api::check_snapshot_name(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}
