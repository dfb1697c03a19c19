//! `basalt run`. Knows no other verb.

use std::time::Duration;

use clap::{ArgAction, Args, ValueHint};
use node_api::{Accelerator, Class, Idle, MemoryMode, OnTimeout, Paging};

use super::{DeviceName, HotplugArgs, LimitArgs, Network, ProcessArgs, PullPolicy, SizeArgs, parse, volume};

const RUN_HELP: &str = "\
Examples:
  basalt run python -- python3 -c 'print(6*7)'
  echo 'print(6*7)' | basalt run python -- python3 -
  basalt run --rm -it --cpus 2 --memory 1g python
  basalt run -d --name cache --volume cache:/data redis
  basalt run --rm --volume ./src:/src:ro python -- python3 /src/main.py
  basalt run --env A=1 --env HOME --workdir /tmp --user 1000:1000 python -- sh -c 'echo $A; id'
  basalt run --rm --template web -- curl localhost

Without --detach the sandbox lives as long as this program. Standard input, output and error are the command's own, byte by byte; SIGINT, SIGTERM, SIGHUP and
SIGQUIT reach it.

Exit code: the command's own, or
  124  --timeout ended it
  125  Basalt itself failed, a wrong flag included
  126  it cannot be executed
  127  it does not exist
  128+n  signal n ended it";

const RUN_USAGE: &str = "\
basalt run [OPTIONS] <IMAGE> [COMMAND]...
       basalt run [OPTIONS] --template <NAME> [COMMAND]...";

/// `basalt run`.
#[derive(Args, Clone, Debug)]
#[command(after_help = RUN_HELP, override_usage = RUN_USAGE)]
pub(crate) struct RunArgs {
    /// Give the command a terminal, whose size follows this one.
    #[arg(short, long)]
    pub(crate) tty: bool,

    /// Pass standard input on. On by default; `--interactive=false` gives the command an empty one.
    #[arg(short, long, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true")]
    #[arg(action = ArgAction::Set, value_name = "BOOL")]
    pub(crate) interactive: bool,

    #[command(flatten)]
    pub(crate) size: SizeArgs,

    /// Go on from a template that was built (`basalt template build`): a name, or an id or its beginning. Image, size and network
    /// are the template's, and what follows is the command.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["boot", "pull"])]
    pub(crate) template: Option<String>,

    #[command(flatten)]
    pub(crate) process: ProcessArgs,

    /// Program to run instead of the image's entrypoint: a path, or a JSON array; "" for none.
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) entrypoint: Option<String>,

    /// Host name of the virtual machine, instead of the sandbox's id.
    #[arg(long, value_name = "NAME", value_parser = parse::hostname)]
    pub(crate) hostname: Option<String>,

    /// Name of the sandbox; one is made up otherwise.
    #[arg(long, value_name = "NAME", value_parser = parse::sandbox_name)]
    pub(crate) name: Option<String>,

    /// Let it run by itself; print its id.
    #[arg(short, long)]
    pub(crate) detach: bool,

    /// Run no command, the image's neither: it is there for `basalt exec` until it is stopped. With --detach.
    #[arg(long, requires = "detach", conflicts_with_all = ["entrypoint", "tty"])]
    pub(crate) no_command: bool,

    /// How it reaches the world: `none` not at all, `node` by the node's network, `auto` so if the node has one.
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub(crate) network: Network,

    /// Mount a file system in memory: PATH[:size=SIZE,mode=OCTAL,exec].
    #[arg(long, value_name = "PATH[:OPTIONS]")]
    pub(crate) tmpfs: Vec<node_api::Tmpfs>,

    /// Let a port of the host lead into it: [IP:]HOST:GUEST[/tcp|udp].
    #[arg(short, long, value_name = "PORTS")]
    pub(crate) publish: Vec<String>,

    /// Give it a device of the host, by its address (see `basalt device`) or its name by the Container Device Interface (VENDOR/CLASS=NAME),
    /// each time that it is started. Several times for several.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Vec<DeviceName>,

    /// Share a directory with it, or a named volume: HOST:GUEST[:ro] or NAME:GUEST[:ro].
    #[arg(short, long, value_name = "VOLUME", value_parser = volume::mount)]
    pub(crate) volume: Vec<node_api::VolumeMount>,

    /// The same as JSON, passed by the `basalt` outside of the lab to the one inside.
    #[arg(long, hide = true, value_name = "JSON", value_parser = volume::described)]
    pub(crate) volume_json: Vec<node_api::VolumeMount>,

    /// Mark it with KEY=VALUE.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse::label)]
    pub(crate) label: Vec<(String, String)>,

    /// End the command after so long, such as 30s or 5m; with --detach the sandbox, each time that it is started.
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) timeout: Option<Duration>,

    /// What is done with a detached sandbox when its --timeout is over: stop, or suspend.
    #[arg(long, value_name = "WHAT", requires_all = ["detach", "timeout"])]
    pub(crate) on_timeout: Option<OnTimeout>,

    /// How it has the host's processors: standard, shared with everything else; dedicated, each virtual CPU has one to
    /// itself as long as the sandbox runs; bare, it owns one that Linux gives up (needs basalt.ko).
    #[arg(long, value_name = "CLASS", default_value_t)]
    pub(crate) class: Class,

    /// What its processors do that have nothing to do: halt; wait for a write by another (MWAIT, with --class bare);
    /// or poll (with --class dedicated or bare). The latter two need no interrupt to go on.
    #[arg(long, value_name = "WHAT", default_value_t)]
    pub(crate) idle: Idle,

    /// Where its guest sees its memory: translated, which keeps it apart from all other; or identity (with --class bare), where the
    /// host's bus has it, from memory that was reserved for it. Nothing is translated then, and the guest can reach all of
    /// the host's memory: for guests that are trusted as the host's kernel is.
    #[arg(long, value_name = "MODE", default_value_t)]
    pub(crate) memory_mode: MemoryMode,

    /// An accelerator of the host's by forwarded calls:
    /// opencl[:memory=SIZE,share=1..1000,priority=low|high,window=SIZE,transport=spin|bell,poll=MICROSECONDS]: the most memory of the
    /// accelerator that its programs may have (1g), their part of its time beside other sandboxes (100), whether they have it before those of
    /// low priority (high), what they and the host share for data (256m), and how long both sides look for calls before they sleep (spin 50,
    /// bell 10); reference[:...]: CUDA computed on the host's processor, to test programs that nvcc has made; or null to try without a
    /// driver. Programs find OpenCL's driver by its loader, and CUDA's libraries by LD_LIBRARY_PATH.
    #[arg(long, value_name = "API")]
    pub(crate) accel: Option<Accelerator>,

    /// Boot a kernel, also where a template could be cloned, and keep none.
    #[arg(long)]
    pub(crate) boot: bool,

    /// How memory comes from a template: mapped, shared with other clones until it is written; eager, the same, but all of it at once;
    /// on-demand, its own, read when it is touched, or before as the first clone has touched it.
    #[arg(long, value_name = "WAY", default_value_t)]
    pub(crate) paging: Paging,

    /// Remove the sandbox when it ends.
    #[arg(long)]
    pub(crate) rm: bool,

    #[command(flatten)]
    pub(crate) hotplug: HotplugArgs,

    #[command(flatten)]
    pub(crate) limits: LimitArgs,

    /// Print where the time until the command's first output went, on standard error, after the command has ended.
    #[arg(long)]
    pub(crate) trace: bool,

    /// When to fetch the image from its registry.
    #[arg(long, value_name = "WHEN", default_value = "missing")]
    pub(crate) pull: PullPolicy,

    /// The image: a name, or a digest or its beginning.
    #[arg(required_unless_present = "template")]
    image: Option<String>,

    /// The command and its arguments, instead of the image's.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
    pub(super) command: Vec<String>,
}

impl RunArgs {
    /// The image; none where there is a template.
    pub(crate) fn image(&self) -> Option<&str> {
        self.image.as_deref().filter(|_| self.template.is_none())
    }

    /// The command and its arguments.
    pub(crate) fn command(&self) -> Vec<String> {
        let first = self.image.iter().filter(|_| self.template.is_some());
        first.chain(&self.command).cloned().collect()
    }
}
