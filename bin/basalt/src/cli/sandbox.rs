//! The arguments of the verbs for sandboxes that are there.

use std::time::Duration;

use clap::{ArgAction, Args, ValueHint};
use node_api::State;

use super::{ProcessArgs, parse};
use crate::copy::End;

/// A sandbox: a name, or an id or the beginning of one.
#[derive(Args, Clone, Debug)]
pub(crate) struct OneArgs {
    /// The sandbox: a name, or an id or its beginning.
    pub(crate) sandbox: String,
}

/// Several of them.
#[derive(Args, Clone, Debug)]
pub(crate) struct ManyArgs {
    /// The sandboxes: names, or ids or their beginnings.
    #[arg(required = true, value_name = "SANDBOX")]
    pub(crate) sandboxes: Vec<String>,
}

/// `basalt inspect`.
#[derive(Args, Clone, Debug)]
pub(crate) struct InspectArgs {
    /// Show the values of environment variables, too.
    #[arg(long)]
    pub(crate) show_secrets: bool,

    #[command(flatten)]
    pub(crate) many: ManyArgs,
}

/// `basalt ps`.
#[derive(Args, Clone, Debug)]
pub(crate) struct PsArgs {
    /// Also those that have ended.
    #[arg(short, long)]
    pub(crate) all: bool,

    /// Only those with this mark of `basalt run --label`. Several times for several, which they all have.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse::label)]
    pub(crate) label: Vec<(String, String)>,

    /// Only those in this state. Several times for several, one of which they are in.
    #[arg(long, value_name = "STATE", conflicts_with = "all")]
    pub(crate) state: Vec<State>,

    /// Print ids only.
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

const EXEC_HELP: &str = "\
Examples:
  basalt exec cache redis-cli ping
  basalt exec -it cache sh

Exit code: the command's own; 125, 126, 127 and 128+n as those of `basalt run`.";

/// `basalt exec`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXEC_HELP)]
pub(crate) struct ExecArgs {
    /// Give the command a terminal, whose size follows this one.
    #[arg(short, long)]
    pub(crate) tty: bool,

    /// Pass standard input on. On by default; `--interactive=false` gives the command an empty one.
    #[arg(short, long, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true")]
    #[arg(action = ArgAction::Set, value_name = "BOOL")]
    pub(crate) interactive: bool,

    /// Start it and do not wait for it; its output is dropped.
    #[arg(short, long)]
    pub(crate) detach: bool,

    #[command(flatten)]
    pub(crate) process: ProcessArgs,

    /// The sandbox: a name, or an id or its beginning.
    pub(crate) sandbox: String,

    /// The command and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    #[arg(value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<String>,
}

const CP_HELP: &str = "\
Examples:
  basalt cp ./site web:/srv/www           a directory, or a file
  basalt cp web:/var/log/. ./logs         what is in a directory
  basalt cp web:/etc - | tar t            an archive on standard output
  tar c . | basalt cp - web:/srv          one from standard input

Where the destination is a directory, the source gets its own name in it; with /. at the end of the source what is in it goes there. Links are copied as links; devices, pipes and sockets are
left out.";

/// `basalt cp`.
#[derive(Args, Clone, Debug)]
#[command(after_help = CP_HELP)]
pub(crate) struct CpArgs {
    /// Keep users, groups and set-user-id bits; otherwise all belongs to you here, and to root in a sandbox.
    #[arg(short, long)]
    pub(crate) archive: bool,

    /// What: SANDBOX:PATH, PATH, or - for an archive on standard input.
    #[arg(value_parser = crate::copy::parse, value_hint = ValueHint::AnyPath)]
    pub(crate) source: End,

    /// Where to: SANDBOX:PATH, PATH, or - for an archive on standard output.
    #[arg(value_parser = crate::copy::parse, value_hint = ValueHint::AnyPath)]
    pub(crate) destination: End,
}

/// `basalt agent-stream`.
#[derive(Args, Clone, Debug)]
pub(crate) struct AgentStreamArgs {
    #[command(flatten)]
    pub(crate) one: OneArgs,
}

/// `basalt logs`.
#[derive(Args, Clone, Debug)]
pub(crate) struct LogsArgs {
    /// Go on until the sandbox has ended.
    #[arg(short, long)]
    pub(crate) follow: bool,

    /// Only the last so many lines.
    #[arg(short = 'n', long, value_name = "LINES")]
    pub(crate) tail: Option<usize>,

    /// Begin each line with its time (RFC 3339, UTC).
    #[arg(short, long)]
    pub(crate) timestamps: bool,

    /// What the guest's kernel wrote, instead of the command.
    #[arg(long, conflicts_with_all = ["follow", "tail", "timestamps"])]
    pub(crate) console: bool,

    #[command(flatten)]
    pub(crate) one: OneArgs,
}

/// `basalt stop` and `basalt restart`.
#[derive(Args, Clone, Debug)]
pub(crate) struct StopArgs {
    /// How long the command may take to end after SIGTERM, such as 10s.
    #[arg(short, long, value_name = "TIME", default_value = "10s", value_parser = parse::grace)]
    pub(crate) time: Duration,

    #[command(flatten)]
    pub(crate) many: ManyArgs,
}

/// `basalt kill`.
#[derive(Args, Clone, Debug)]
pub(crate) struct KillArgs {
    /// The signal, by name or number.
    #[arg(short, long, value_name = "SIGNAL", default_value = "KILL", value_parser = parse::signal)]
    pub(crate) signal: i32,

    #[command(flatten)]
    pub(crate) many: ManyArgs,
}

/// `basalt rm`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RmArgs {
    /// Also those that run: they are killed.
    #[arg(short, long)]
    pub(crate) force: bool,

    #[command(flatten)]
    pub(crate) many: ManyArgs,
}

/// `basalt prune`.
#[derive(Args, Clone, Debug)]
pub(crate) struct QuarantineArgs {
    /// Instead of sandboxes: list what the daemon has set aside because it could not tell whose it is, and damaged databases.
    #[arg(long)]
    pub(crate) quarantine: bool,

    /// With --quarantine: delete all of it for good.
    #[arg(long, requires = "quarantine")]
    pub(crate) force: bool,
}

/// `basalt stats`.
#[derive(Args, Clone, Debug)]
pub(crate) struct StatsArgs {
    /// Show them once.
    #[arg(long)]
    pub(crate) no_stream: bool,

    /// The sandbox; all that run otherwise.
    pub(crate) sandbox: Option<String>,
}

/// What `basalt daemon` can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum DaemonWhat {
    /// Its metrics and its sandboxes', as Prometheus reads them.
    Metrics,
}

/// `basalt daemon`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DaemonArgs {
    /// What to tell instead of how it is.
    #[arg(value_enum, conflicts_with_all = ["stop", "clean"])]
    pub(crate) what: Option<DaemonWhat>,

    /// End it.
    #[arg(long)]
    pub(crate) stop: bool,

    /// With --stop: take its network and cgroup away, too; there may be no sandboxes.
    #[arg(long, requires = "stop")]
    pub(crate) clean: bool,
}

/// Of `suspend`.
pub(super) const SUSPEND_HELP: &str = "\
Examples:
  basalt suspend web
  basalt resume web

A suspended sandbox takes no memory and no processors of the host, and outlives its reboot. It keeps
its name, address, disk, memory and what runs in it; TCP connections that lead out of it end.
`basalt stop` gives up what was in its memory.";
