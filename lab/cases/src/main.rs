//! VM test cases: host half and guest half in one file each, many cases in one boot of the lab host.
//!
//! `run` is what CI calls inside the lab; each case is a process of its own (`host NAME`) with a hard time limit, and
//! the guest half runs in a VM as `guest NAME`, from a copy of this very program.

mod archive;
mod audit;
mod basalt;
mod cases;
mod daemon;
mod function_files;
mod host_ends;
mod intrude;
mod kernel_log;
mod leaks;
mod long_mode;
mod runner;
mod stall;
mod systemd;
mod vm;
mod vmm;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};

/// What a case knows of its surroundings.
#[derive(Clone)]
pub(crate) struct Host {
    /// Where `basalt`, `basalt-vmm` and the assets are.
    pub(crate) binaries: PathBuf,
    /// Where the case leaves its logs.
    pub(crate) logs: PathBuf,
    /// A directory of the case's own, removed afterwards; on the file system with reflinks.
    pub(crate) scratch: PathBuf,
    /// The image that sandboxes of the case run, by its digest.
    pub(crate) digest: String,
}

impl Host {
    /// One of the assets: guest kernel, initramfs.
    pub(crate) fn asset(&self, name: &str) -> PathBuf {
        self.binaries.join("basalt-assets").join(name)
    }

    /// The image's file system.
    pub(crate) fn image(&self) -> Result<File> {
        let path = Path::new(BLOBS).join(format!("{}.erofs", self.digest));
        File::open(&path).with_context(|| format!("cannot open {}", path.display()))
    }
}

/// The guest half: what it is called with after its name.
type GuestFn = fn(&[String]) -> Result<()>;

/// One test case.
pub(crate) struct Case {
    /// Unique; what `--filter` matches.
    pub(crate) name: &'static str,
    /// The hard limit: afterwards the case's processes are killed. Generous, as emulated time is.
    pub(crate) limit: Duration,
    /// The half that runs on the lab host.
    pub(crate) host: fn(&Host) -> Result<()>,
    /// The half that runs inside the guest, if there is one.
    pub(crate) guest: Option<GuestFn>,
}

#[derive(Parser)]
#[command(about = "Runs Basalt's VM test cases; meant to run inside the lab")]
struct Options {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run cases one after the other and print a summary.
    Run {
        /// Only cases whose name contains this.
        #[arg(long, default_value = "")]
        filter: String,
        /// Only this case and those behind it.
        #[arg(long, value_name = "NAME")]
        from: Option<String>,
        /// Only this case, by its whole name.
        #[arg(long, value_name = "NAME", conflicts_with_all = ["filter", "from", "newer"])]
        case: Option<String>,
        /// Those of a host with the newer kernel (`basalt-lab up --kernel newer`).
        #[arg(long)]
        newer: bool,
        /// Times the limit of each case, for one that is asked for more rounds.
        #[arg(long, value_name = "TIMES", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
        patience: u32,
        /// Where consoles and outputs are kept, a directory for each case.
        #[arg(long, default_value = "/var/lib/basalt/cases")]
        logs: PathBuf,
    },
    /// Compare the VMM's system call filters with the calls that it makes in cases, by strace.
    Audit {
        /// Where traces are kept.
        #[arg(long, default_value = "/var/tmp/basalt-audit")]
        traces: PathBuf,
        /// Run nothing: compare with the traces that are there.
        #[arg(long)]
        compare_only: bool,
    },
    /// List the cases.
    List {
        /// Those of a host with the newer kernel.
        #[arg(long)]
        newer: bool,
    },
    /// End this host while a guest owns a CPU of it (`cargo xtask test --only host-ends` looks at it from outside).
    End {
        /// How.
        way: host_ends::Way,
    },
    /// The host half of one case (used by `run`).
    #[command(hide = true)]
    Host { name: String },
    /// The guest half of one case (used by its host half).
    #[command(hide = true)]
    Guest { name: String, arguments: Vec<String> },
}

/// Where images lie that were sent to the lab (docs/images.md).
const BLOBS: &str = "/var/lib/basalt/images/blobs";

/// The digest of the image whose command is python3: what the cases' sandboxes run.
fn python_image() -> Result<String> {
    for entry in std::fs::read_dir(BLOBS).with_context(|| format!("cannot read {BLOBS}"))? {
        let path = entry?.path();
        let (Some(stem), Some("json")) = (path.file_stem(), path.extension().and_then(|e| e.to_str())) else {
            continue;
        };
        let image: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        if image["config"]["cmd"][0] == "python3" {
            return Ok(stem.to_string_lossy().into_owned());
        }
    }
    bail!("the lab has no python image: `basalt run python -- true` outside of it sends one")
}

/// The variable by which `run` tells the host half that the case is made once more: its guests' kernels tell everything then.
const AGAIN: &str = "BASALT_CASE_AGAIN";

/// The directory variable by which `run` tells the host half where its logs go.
const LOGS: &str = "BASALT_CASE_LOGS";

fn find(name: &str) -> Result<&'static Case> {
    let mut all = cases::ALL.iter().chain(cases::NEWER).copied();
    all.find(|case| case.name == name)
        .with_context(|| format!("there is no case `{name}`"))
}

/// The cases of a host with the kernel of the lab's release, or of one with the newer.
fn list(newer: bool) -> runner::Cases {
    if newer { cases::NEWER } else { cases::ALL }
}

/// The directory with this program and all others.
fn binaries() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    Ok(own.parent().context("this program has no directory")?.to_owned())
}

fn end_host(way: host_ends::Way) -> Result<()> {
    let host = Host {
        binaries: binaries()?,
        logs: "/tmp".into(),
        scratch: "/tmp".into(),
        digest: python_image()?,
    };
    host_ends::end(&host, way)
}

fn host_half(name: &str) -> Result<()> {
    let case = find(name)?;
    let logs = PathBuf::from(std::env::var_os(LOGS).unwrap_or_else(|| "/tmp".into()));
    let scratch = PathBuf::from("/var/lib/basalt").join(format!("scratch-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&scratch)?;
    let before = leaks::Snapshot::take()?;
    let host = Host {
        binaries: binaries()?,
        logs,
        scratch: scratch.clone(),
        digest: python_image()?,
    };
    let result = (case.host)(&host);
    std::fs::remove_dir_all(&scratch)?;
    let leaked = before.compare_within(Duration::from_secs(10))?;
    result?;
    if !leaked.is_empty() {
        bail!("left behind: {}", leaked.join(", "));
    }
    Ok(())
}

fn main() -> ExitCode {
    if foreign::is_init() {
        let Err(error) = foreign::become_agent();
        eprintln!("no agent: {error}");
        // The kernel panics, and resets as it is told to.
        return ExitCode::FAILURE;
    }
    let result = match Options::parse().verb {
        Verb::Run {
            filter,
            from,
            case,
            newer,
            patience,
            logs,
        } => {
            let choice = match &case {
                Some(name) => runner::Choice::Case(name),
                None => runner::Choice::All {
                    list: list(newer),
                    filter: &filter,
                    from: from.as_deref(),
                },
            };
            runner::run(&choice, patience, &logs)
        }
        Verb::Audit { traces, compare_only } => audit::run(&traces, compare_only),
        Verb::List { newer } => runner::print(list(newer)),
        Verb::End { way } => end_host(way).map(|()| true),
        Verb::Host { name } => host_half(&name).map(|()| true),
        Verb::Guest { name, arguments } => find(&name)
            .and_then(|case| case.guest.with_context(|| format!("case `{name}` has no guest half")))
            .and_then(|guest| guest(&arguments))
            .map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
