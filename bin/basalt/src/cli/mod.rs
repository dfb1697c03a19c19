//! Every verb, flag and sentence of help: the one definition that parsing, completions and man pages come from.
//!
//! Flags mean what podman's of the same name mean. Knows nothing of what the verbs do.

mod accel;
mod device;
mod host;
mod hotplug;
mod image;
mod limits;
mod network;
mod parse;
mod process;
mod run;
mod sandbox;
mod size;
mod snapshot;
mod template;
mod transfer;
mod volume;
mod words;

use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand, ValueHint};

pub(crate) use accel::AccelVerb;
pub(crate) use device::{DeviceName, DeviceVerb};
pub(crate) use host::HostVerb;
pub(crate) use hotplug::{HotplugArgs, TimeLimit, UpdateArgs};
pub(crate) use image::{
    DfArgs, ImageVerb, ImportArgs, PruneArgs, PullArgs, PullPolicy, PushArgs, RegistryArgs, RmiArgs, SaveArgs,
    SourceArgs, SystemVerb, TagArgs,
};
pub(crate) use limits::LimitArgs;
pub(crate) use network::{NetworkVerb, UpdateNetworkArgs};
pub(crate) use process::ProcessArgs;
pub(crate) use run::RunArgs;
pub(crate) use sandbox::{
    AgentStreamArgs, CpArgs, DaemonArgs, DaemonWhat, ExecArgs, InspectArgs, KillArgs, LogsArgs, ManyArgs, PsArgs,
    QuarantineArgs, RmArgs, StatsArgs, StopArgs,
};
pub(crate) use size::SizeArgs;
pub(crate) use snapshot::{CloneArgs, CreateArgs, InspectSnapshotsArgs, MoveArgs, RollbackArgs, SnapshotVerb};
pub(crate) use template::{BuildArgs, InspectTemplatesArgs, TemplateVerb};
pub(crate) use transfer::{Errand, LoadFrom, PullFrom, PushTo, SaveTo, Way, Wish};
pub(crate) use volume::VolumeVerb;
pub(crate) use words::{LogLevel, Network};

/// What clap shows in colour, on terminals only and never under NO_COLOR.
const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default())
    .placeholder(AnsiColor::Cyan.on_default());

/// Runs programs from OCI images in virtual machines of their own.
#[derive(Debug, Parser)]
#[command(name = "basalt", version, styles = STYLES, max_term_width = 100)]
#[command(after_help = TOP_EXAMPLES)]
pub(crate) struct Cli {
    /// Print results and errors as JSON, for machines.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// How much to tell on standard error; `debug` includes the guest's console.
    #[arg(long, global = true, value_name = "LEVEL", default_value = "warn")]
    pub(crate) log_level: LogLevel,

    /// The gateway whose sandboxes are meant, instead of this host's: https://api.DOMAIN, or http://127.0.0.1:PORT on its own machine; else
    /// that of BASALT_HOST. Its key is in BASALT_API_KEY or E2B_API_KEY.
    #[arg(long, global = true, value_name = "URL", value_hint = ValueHint::Url)]
    pub(crate) host: Option<String>,

    /// What to do.
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

const TOP_EXAMPLES: &str = "\
Examples:
  basalt doctor                                   what this host can do
  basalt pull registry.example:5000/python        fetch an image
  basalt import --name python ./python.tar        make an image of an archive
  basalt run python -- python3 -c 'print(6*7)'    run a command in a virtual machine of its own
  basalt run --rm -it python                      the image's own command, on this terminal
  basalt run -d --name cache redis                one that runs by itself
  basalt exec -it cache sh                        a shell in it
  basalt --host https://api.sb.example ps         what a gateway has for the key in BASALT_API_KEY";

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Run a command from an image in a virtual machine of its own.
    Run(Box<RunArgs>),
    /// Run another command in a sandbox that runs.
    Exec(Box<ExecArgs>),
    /// List the sandboxes.
    Ps(PsArgs),
    /// Copy files between this host and sandboxes.
    Cp(CpArgs),
    /// Join standard input and output to a sandbox's agent: for a `basalt` outside of the lab.
    #[command(hide = true)]
    AgentStream(AgentStreamArgs),
    /// Print the ports that sandboxes publish, and again when they change: for the lab's port forwarding.
    #[command(hide = true)]
    Published,
    /// Show what a sandbox's command has written.
    Logs(LogsArgs),
    /// Start sandboxes that have ended.
    Start(ManyArgs),
    /// End sandboxes: SIGTERM to the command, the rest after a grace period.
    Stop(StopArgs),
    /// End sandboxes and start them again.
    Restart(StopArgs),
    /// Send a sandbox's command a signal; SIGKILL, the default, ends the virtual machine.
    Kill(KillArgs),
    /// Stop sandboxes' virtual CPUs where they are.
    Pause(ManyArgs),
    /// Let sandboxes go on that are paused or suspended.
    #[command(visible_alias = "resume")]
    Unpause(ManyArgs),
    /// Save sandboxes' memory on the disk and end their virtual machines, until `basalt resume`.
    #[command(after_help = sandbox::SUSPEND_HELP)]
    Suspend(ManyArgs),
    /// Wait until sandboxes have ended; print their exit codes.
    Wait(ManyArgs),
    /// Remove sandboxes with their disks and logs.
    Rm(RmArgs),
    /// Remove all sandboxes that have ended, or what was set aside.
    Prune(QuarantineArgs),
    /// Show all that is known of a sandbox.
    Inspect(InspectArgs),
    /// Show what sandboxes use.
    Stats(StatsArgs),
    /// Show what happens to sandboxes, as it happens.
    Events,
    /// Accelerators that sandboxes have by forwarded calls.
    #[command(subcommand)]
    Accel(AccelVerb),
    /// Named volumes: directories that outlive the sandboxes that have them.
    #[command(subcommand)]
    Volume(VolumeVerb),
    /// Snapshots: sandboxes as they were at one moment.
    #[command(subcommand)]
    Snapshot(SnapshotVerb),
    /// Templates: machines that have booted an image, and maybe run commands, of which `run` clones sandboxes.
    #[command(subcommand)]
    Template(TemplateVerb),
    /// Make a sandbox that goes on from a snapshot; print its id.
    Clone(CloneArgs),
    /// Let a sandbox go on from a snapshot of it: what it has done since is lost.
    Rollback(RollbackArgs),
    /// Let a sandbox that runs go on as another class: its guest notices a pause.
    Move(MoveArgs),
    /// Change how much memory a sandbox has, also while it runs.
    Update(UpdateArgs),
    /// What sandboxes reach by their network.
    #[command(subcommand)]
    Network(NetworkVerb),
    /// The host's CPUs: which sandbox owns which, and which are isolated.
    #[command(subcommand)]
    Host(HostVerb),
    /// The host's PCI devices: which sandboxes may have, and which has which.
    #[command(subcommand)]
    Device(DeviceVerb),
    /// Tell how the daemon is, or end it; sandboxes that are detached run on.
    Daemon(DaemonArgs),
    /// List the images.
    Images,
    /// Fetch an image from a registry.
    Pull(PullArgs),
    /// Send an image to a registry.
    Push(PushArgs),
    /// Give an image more names.
    Tag(TagArgs),
    /// Write an image into an archive that podman and docker load, too.
    Save(SaveArgs),
    /// Make an image of an OCI layout or a docker-archive.
    Import(ImportArgs),
    /// Remove images.
    Rmi(RmiArgs),
    /// More that is done with images.
    #[command(subcommand)]
    Image(ImageVerb),
    /// What all of it together needs.
    #[command(subcommand)]
    System(SystemVerb),
    /// Tell what this host can do and what to do about the rest.
    #[command(after_help = DOCTOR_HELP)]
    Doctor,
    /// Bring the lab up and down: the emulated host for machines without usable KVM.
    #[command(after_help = LAB_EXAMPLES, disable_help_flag = true)]
    Lab(LabArgs),
    /// Print what moves a program with the E2B SDKs to this host's gateway, for a shell's eval: `basalt-gateway env`.
    #[command(disable_help_flag = true)]
    Env(LabArgs),
    /// Print a completion script for a shell.
    #[command(after_help = COMPLETION_EXAMPLES)]
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write a man page of each verb.
    Man {
        /// The directory; it is made if missing.
        #[arg(value_hint = ValueHint::DirPath)]
        directory: PathBuf,
    },
    /// Print the version.
    Version,
}

impl Verb {
    /// What it is called in a trace.
    pub(crate) fn span_name(&self) -> &'static str {
        match self {
            Self::Run(_) => "basalt run",
            Self::Exec(_) => "basalt exec",
            Self::Start(_) => "basalt start",
            Self::Stop(_) => "basalt stop",
            Self::Restart(_) => "basalt restart",
            Self::Kill(_) => "basalt kill",
            Self::Rm(_) => "basalt rm",
            Self::Snapshot(_) => "basalt snapshot",
            Self::Template(_) => "basalt template",
            Self::Clone(_) => "basalt clone",
            Self::Rollback(_) => "basalt rollback",
            Self::Move(_) => "basalt move",
            Self::Update(_) => "basalt update",
            Self::Pull(_) => "basalt pull",
            Self::Import(_) => "basalt import",
            _ => "basalt",
        }
    }

    /// What it is about.
    pub(crate) fn concern(&self) -> Concern {
        match self {
            Self::Run(_)
            | Self::Exec(_)
            | Self::Ps(_)
            | Self::Cp(_)
            | Self::Logs(_)
            | Self::Start(_)
            | Self::Stop(_)
            | Self::Restart(_)
            | Self::Kill(_)
            | Self::Pause(_)
            | Self::Unpause(_)
            | Self::Suspend(_)
            | Self::Wait(_)
            | Self::Rm(_)
            | Self::Prune(_)
            | Self::Inspect(_)
            | Self::Stats(_)
            | Self::Events
            | Self::Host(_)
            | Self::Device(_)
            | Self::Accel(_)
            | Self::Volume(_)
            | Self::Snapshot(_)
            | Self::Template(_)
            | Self::Clone(_)
            | Self::Rollback(_)
            | Self::Move(_)
            | Self::Update(_)
            | Self::Network(_)
            | Self::Daemon(_) => Concern::Sandboxes,
            Self::Images
            | Self::Pull(_)
            | Self::Push(_)
            | Self::Tag(_)
            | Self::Save(_)
            | Self::Import(_)
            | Self::Rmi(_)
            | Self::Image(_)
            | Self::System(_) => Concern::Images,
            Self::AgentStream(_)
            | Self::Published
            | Self::Doctor
            | Self::Lab(_)
            | Self::Env(_)
            | Self::Completion { .. }
            | Self::Man { .. }
            | Self::Version => Concern::ThisMachine,
        }
    }
}

/// What a verb is about, and so where it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Concern {
    /// Sandboxes: where they are.
    Sandboxes,
    /// Images: this host's, and no gateway's.
    Images,
    /// This machine, or this program.
    ThisMachine,
}

const DOCTOR_HELP: &str = "\
Exit code: 0 where sandboxes can run, on this host or in the lab; 1 where they cannot.";

const LAB_EXAMPLES: &str = "\
Examples:
  basalt lab up        start the lab, or do nothing if it is up
  basalt lab status    is it up?
  basalt lab shell     a shell in it
  basalt lab down      stop it

Everything after `lab` goes to the program basalt-lab beside this one; `basalt lab --help` is its help.";

const COMPLETION_EXAMPLES: &str = "\
Examples:
  basalt completion bash > /etc/bash_completion.d/basalt
  basalt completion zsh > \"${fpath[1]}/_basalt\"";

/// `basalt lab`, and `basalt env`.
#[derive(Args, Debug)]
pub(crate) struct LabArgs {
    /// What that program is given.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub(crate) arguments: Vec<std::ffi::OsString>,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use base::ByteSize;
    use clap::CommandFactory;

    fn run(args: &[&str]) -> Result<RunArgs, clap::Error> {
        let argv = ["basalt", "run"].iter().chain(args);
        Cli::try_parse_from(argv).map(|cli| match cli.verb {
            Verb::Run(args) => *args,
            other => panic!("{other:?}"),
        })
    }

    fn refusal(args: &[&str]) -> String {
        run(args).unwrap_err().to_string()
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_image_is_the_command_with_and_without_dashes() {
        let command = |args: &[&str]| run(args).unwrap().command;
        assert_eq!(command(&["python"]), Vec::<String>::new());
        assert_eq!(command(&["python", "--", "sh", "-c", "exit 3"]), ["sh", "-c", "exit 3"]);
        assert_eq!(command(&["python", "sh", "-c", "exit 3"]), ["sh", "-c", "exit 3"]);
        assert_eq!(
            command(&["python", "sh", "--cpus", "9", "--", "x"]),
            ["sh", "--cpus", "9", "--", "x"]
        );
        assert_eq!(command(&["python", "--", "sh", "--", "--help"]), ["sh", "--", "--help"]);
        let args = run(&["--cpus", "2", "python", "sh", "--cpus", "9"]).unwrap();
        assert_eq!((args.size.cpus, args.image()), (Some(2), Some("python")));
    }

    #[test]
    fn with_a_template_all_that_follows_is_the_command() {
        let both = |args: &[&str]| {
            let args = run(args).unwrap();
            (args.image().map(str::to_owned), args.command())
        };
        assert_eq!(both(&["--template", "web"]), (None, Vec::new()));
        for args in [
            &["--template", "web", "sh", "-c", "exit 3"][..],
            &["--template", "web", "--", "sh", "-c", "exit 3"],
        ] {
            assert_eq!(both(args), (None, ["sh", "-c", "exit 3"].map(str::to_owned).to_vec()));
        }
        for flag in ["--boot", "--pull=always"] {
            assert!(refusal(&["--template", "web", flag]).contains("--template"), "{flag}");
        }
    }

    #[test]
    fn podmans_habits_work() {
        let args = run(&[
            "--rm", "-it", "-m", "1g", "-e", "A=b=c", "-e", "B", "-w", "/x", "-u", "1:2", "img",
        ])
        .unwrap();
        assert!(args.tty && args.interactive && args.rm);
        assert_eq!(args.size.memory, Some(ByteSize::gib(1)));
        assert_eq!(args.process.env, ["A=b=c", "B"]);
        assert_eq!(
            (args.process.workdir.as_deref(), args.process.user.as_deref()),
            (Some("/x"), Some("1:2"))
        );
        assert!(run(&["img"]).unwrap().interactive);
        assert!(!run(&["--interactive=false", "img"]).unwrap().interactive);
        assert!(run(&["-i", "img", "false"]).unwrap().interactive);
    }

    #[test]
    fn bad_numbers_are_refused_with_the_limits() {
        assert!(refusal(&["--cpus", "0", "img"]).contains("0 CPUs cannot be had: give 1 to 64"));
        assert!(refusal(&["--cpus", "1000", "img"]).contains("1000 CPUs cannot be had: give 1 to 64"));
        assert!(refusal(&["--cpus", "1.5", "img"]).contains("whole CPUs"));
        assert!(refusal(&["--cpus=-1", "img"]).contains("whole CPUs"));
        assert!(refusal(&["--memory", "1m", "img"]).contains("at least 32 MiB"));
        assert!(refusal(&["--memory", "lots", "img"]).contains("such as 512M"));
        assert!(refusal(&["--memory", "99999999999t", "img"]).contains("too large"));
        let odd = run(&["--memory", "33554433", "img"]).unwrap();
        assert_eq!(odd.size.memory, Some(ByteSize::mib(32)));
        assert!(refusal(&["--timeout", "0", "img"]).contains("more than 0"));
        assert!(refusal(&["--timeout", "soon", "img"]).contains("30s"));
        assert_eq!(
            run(&["--timeout", "2m", "img"]).unwrap().timeout,
            Some(Duration::from_secs(120))
        );
    }

    #[test]
    fn bad_words_are_refused_with_what_is_right() {
        assert!(refusal(&["--env", "=x", "img"]).contains("KEY=VALUE"));
        assert!(refusal(&["--env", "", "img"]).contains("KEY=VALUE"));
        assert!(refusal(&["--workdir", "tmp", "img"]).contains("starts with a slash"));
        assert!(refusal(&["--user", "a:b:c", "img"]).contains("USER:GROUP"));
        assert!(refusal(&["--user", ":0", "img"]).contains("USER:GROUP"));
        assert!(refusal(&["--hostname", "a b", "img"]).contains("letters, digits"));
        assert!(refusal(&["--bogus", "img"]).contains("--bogus"));
        assert!(
            refusal(&["--cpu", "1", "img"]).contains("--cpus"),
            "a near miss names what was meant"
        );
        assert!(refusal(&[]).contains("<IMAGE"), "{}", refusal(&[]));
    }

    #[test]
    fn lab_takes_everything_that_follows() {
        let cli = Cli::try_parse_from(["basalt", "lab", "up", "--memory", "4g", "--help"]).unwrap();
        let Verb::Lab(args) = cli.verb else { panic!() };
        assert_eq!(args.arguments, ["up", "--memory", "4g", "--help"]);
    }
}
