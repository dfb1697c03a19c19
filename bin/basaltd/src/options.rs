//! The daemon's flags. Knows nothing of what they do.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::ByteSize;
use host::MemInfo;
use log::LevelFilter;
use node::{Overcommit, Sockets};
use node_api::CpuModel;

use crate::group;

const HELP: &str = "\
basaltd: keeps the sandboxes of a node (see docs/daemon.md)

Usage: basaltd [--state DIR] [--assets DIR] [--kvm PATH] [--cpu-model MODEL] [--cgroup PATH]
               [--no-users] [--group NAME] [--metrics ADDRESS] [--log-level LEVEL] [--memory-overcommit RATIO]
               [--clone-overcommit RATIO] [--disk-overcommit RATIO] [--memory-fill-rate SIZE]
               [--zeroed-memory SIZE] [--gateway-socket PATH] [--gateway-group NAME]
       basaltd --end-sandboxes [--grace SECONDS] [flags as above]
       basaltd --hold-cgroup

  --state DIR        where sandboxes and images are kept; /var/lib/basalt
  --assets DIR       the guest kernel, its initramfs and basalt-vmm; basalt-assets beside this program, or /usr/lib/basalt
  --kvm PATH         the KVM device; /dev/kvm
  --cpu-model MODEL  the processor that guests see if nobody says: host (default), common, x86-64-v2, x86-64-v3 or x86-64-v4
  --cgroup PATH      the delegated cgroup below which sandboxes have theirs; the top of the hierarchy
  --no-users         run VMMs as this user and in no namespaces of their own: for tests, and where root is not to be had
  --group NAME       the group, by name or number, whose members may use the socket, which makes them root on this host; a
                     group called basalt if there is one and this is root, otherwise nobody but this user
  --gateway-socket PATH, --gateway-group NAME
                     where gateways ask for their tenants, and for nothing that reaches this host: gateway.sock of the
                     state directory; and the group that may, besides this user: nobody
  --metrics ADDRESS  tell metrics to Prometheus there, too: a port of 127.0.0.1 or [::1]; always in metrics.sock of the
                     state directory
  --memory-overcommit RATIO, --clone-overcommit RATIO, --disk-overcommit RATIO
                     how many times over sandboxes may be promised the host's memory (1), all clones but the largest
                     theirs (16), and disks the state directory's file system (50); more is refused
  --memory-fill-rate SIZE
                     the most memory of a sandbox that is zeroed in a second ahead of being mapped for its devices: 64m
                     at least; no limit
  --zeroed-memory SIZE
                     how much memory to zero ahead, while no sandbox is being started, for the next ones with devices: a
                     multiple of 128m; 0
  --log-level LEVEL  off, error, warn (default), info, debug or trace; from debug on guests' kernels say everything
  --end-sandboxes    end all sandboxes in order and all at once, take network and cgroups away, and end; a daemon that runs
                     is ended first
  --grace SECONDS    with --end-sandboxes: how long their commands may take after SIGTERM; 10
  --hold-cgroup      do nothing but keep the cgroup alive that a service manager has started this in, until SIGTERM
  --version          print the version
  --help             print this text

SIGTERM and SIGINT end it; sandboxes run on, and the next basaltd on the same state directory finds them.
";

/// How long sandboxes' commands may take after SIGTERM, as with `basalt stop`.
const GRACE: Duration = Duration::from_secs(10);

/// What a node is opened with.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) state: PathBuf,
    pub(crate) assets: PathBuf,
    pub(crate) kvm: PathBuf,
    pub(crate) cpu_model: CpuModel,
    pub(crate) cgroup: Option<PathBuf>,
    pub(crate) users: bool,
    /// Where and by whom it may be asked.
    pub(crate) sockets: Sockets,
    pub(crate) log_level: LevelFilter,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) overcommit: Overcommit,
    pub(crate) memory_fill_rate: Option<ByteSize>,
    pub(crate) zeroed_memory: ByteSize,
}

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Command {
    Serve(Options),
    EndSandboxes(Options, Duration),
    HoldCgroup,
    /// Of a daemon's child: to fill its standard input with zeroed memory, in this cgroup.
    FillMemory(Option<PathBuf>),
    Print(&'static str),
}

/// Reads this process's arguments.
pub(crate) fn parse() -> Result<Command> {
    parse_from(lexopt::Parser::from_env())
}

fn parse_from(mut parser: lexopt::Parser) -> Result<Command> {
    use lexopt::prelude::*;
    let mut options = Options {
        state: "/var/lib/basalt".into(),
        assets: default_assets(),
        kvm: host::kvm::DEVICE.into(),
        cpu_model: CpuModel::default(),
        cgroup: None,
        users: true,
        sockets: Sockets::default(),
        log_level: LevelFilter::Warn,
        metrics: None,
        overcommit: Overcommit::default(),
        memory_fill_rate: None,
        zeroed_memory: ByteSize(0),
    };
    let (mut ends, mut holds, mut grace) = (false, false, None);
    let (mut group, mut gateway_group) = (None, None);
    while let Some(argument) = parser.next()? {
        match argument {
            Long("state") => options.state = parser.value()?.into(),
            Long("assets") => options.assets = parser.value()?.into(),
            Long("kvm") => options.kvm = parser.value()?.into(),
            Long("cpu-model") => options.cpu_model = parser.value()?.parse()?,
            Long("cgroup") => options.cgroup = Some(parser.value()?.into()),
            Long("no-users") => options.users = false,
            Long("group") => group = Some(parser.value()?.string()?),
            Long("gateway-socket") => options.sockets.gateway = Some(parser.value()?.into()),
            Long("gateway-group") => gateway_group = Some(parser.value()?.string()?),
            Long("metrics") => options.metrics = Some(metrics_address(&parser.value()?.string()?)?),
            Long("memory-overcommit") => options.overcommit.memory = parser.value()?.parse()?,
            Long("clone-overcommit") => options.overcommit.clones = parser.value()?.parse()?,
            Long("disk-overcommit") => options.overcommit.disk = parser.value()?.parse()?,
            Long("memory-fill-rate") => options.memory_fill_rate = Some(fill_rate(&parser.value()?.string()?)?),
            Long("zeroed-memory") => options.zeroed_memory = zeroed_memory(&parser.value()?.string()?)?,
            Long("fill-memory") => return Ok(Command::FillMemory(parser.optional_value().map(PathBuf::from))),
            Long("log-level") => options.log_level = parser.value()?.parse()?,
            Long("end-sandboxes") => ends = true,
            Long("grace") => grace = Some(Duration::from_secs(parser.value()?.parse()?)),
            Long("hold-cgroup") => holds = true,
            Long("version") => {
                return Ok(Command::Print(concat!("basaltd ", env!("CARGO_PKG_VERSION"), "\n")));
            }
            Short('h') | Long("help") => return Ok(Command::Print(HELP)),
            other => return Err(other.unexpected().into()),
        }
    }
    let absolute =
        |path: &Path| std::path::absolute(path).with_context(|| format!("{} cannot be made absolute", path.display()));
    options.state = absolute(&options.state)?;
    options.sockets.group = match group {
        Some(group) => Some(group::named(&group)?),
        None if rustix::process::geteuid().is_root() => group::usual()?,
        None => None,
    };
    options.sockets.gateway = options.sockets.gateway.as_deref().map(absolute).transpose()?;
    options.sockets.gateway_group = gateway_group.as_deref().map(group::named).transpose()?;
    if let Some(path) = options.cgroup.as_ref().filter(|path| !is_plain(path)) {
        bail!(
            "--cgroup {}: give the path from the top of the hierarchy, such as /system.slice/basalt-sandboxes.service",
            path.display()
        );
    }
    match (ends, holds, grace) {
        (true, true, _) => bail!("--end-sandboxes and --hold-cgroup are two different things: give one of them"),
        (false, _, Some(_)) => bail!("--grace is of use with --end-sandboxes only"),
        (true, ..) => Ok(Command::EndSandboxes(options, grace.unwrap_or(GRACE))),
        (_, true, _) => Ok(Command::HoldCgroup),
        _ => Ok(Command::Serve(options)),
    }
}

fn metrics_address(text: &str) -> Result<SocketAddr> {
    text.parse()
        .with_context(|| format!("--metrics `{text}` is no address: write 127.0.0.1:PORT or [::1]:PORT"))
}

fn fill_rate(text: &str) -> Result<ByteSize> {
    let rate: ByteSize = text.parse().context("--memory-fill-rate")?;
    if rate < node::MIN_FILL_RATE {
        bail!(
            "--memory-fill-rate {text} is too low: starts with devices would time out; give {} a second at least, or leave it out for no limit",
            node::MIN_FILL_RATE
        );
    }
    Ok(rate)
}

fn zeroed_memory(text: &str) -> Result<ByteSize> {
    let (size, piece) = (text.parse::<ByteSize>().context("--zeroed-memory")?, node::ZEROED_PIECE);
    if !size.bytes().is_multiple_of(piece.bytes()) {
        bail!("--zeroed-memory {text} is made in pieces of {piece}: give a multiple of that, or 0 for none");
    }
    let host = MemInfo::read().context("--zeroed-memory: how much memory this host has is not known")?;
    if size > host.total {
        bail!(
            "--zeroed-memory {text} is more than this host has ({}): give less",
            host.total
        );
    }
    Ok(size)
}

/// Absolute, and without steps upwards.
fn is_plain(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == std::path::Component::ParentDir)
}

fn default_assets() -> PathBuf {
    let beside = std::env::current_exe()
        .ok()
        .and_then(|program| Some(program.parent()?.join("basalt-assets")))
        .filter(|directory| directory.is_dir());
    beside.unwrap_or_else(|| PathBuf::from("/usr/lib/basalt"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<Command> {
        parse_from(lexopt::Parser::from_args(words))
    }

    #[test]
    fn each_way_to_call_it() {
        let Command::EndSandboxes(options, grace) =
            parsed(&["--end-sandboxes", "--grace", "3", "--cgroup", "/a/b"]).unwrap()
        else {
            panic!()
        };
        assert_eq!((options.cgroup, grace), (Some("/a/b".into()), Duration::from_secs(3)));
        assert!(matches!(
            parsed(&["--end-sandboxes"]),
            Ok(Command::EndSandboxes(_, GRACE))
        ));
        assert!(matches!(parsed(&["--hold-cgroup"]), Ok(Command::HoldCgroup)));
        assert!(matches!(parsed(&[]), Ok(Command::Serve(_))));
        let words = [
            "--memory-overcommit",
            "1.5",
            "--clone-overcommit",
            "4",
            "--disk-overcommit=2",
            "--memory-fill-rate",
            "4GiB",
            "--zeroed-memory=384m",
        ];
        let Command::Serve(options) = parsed(&words).unwrap() else {
            panic!()
        };
        let Overcommit { memory, clones, disk } = options.overcommit;
        assert_eq!([memory, clones, disk].map(|ratio| ratio.to_string()), ["1.5", "4", "2"]);
        assert_eq!(options.memory_fill_rate, Some(ByteSize::gib(4)));
        assert_eq!(options.zeroed_memory, ByteSize::mib(384));
        // What a daemon starts for it knows nothing else.
        for (word, cgroup) in [("--fill-memory", None), ("--fill-memory=/a/b", Some("/a/b".into()))] {
            let Command::FillMemory(its) = parsed(&[word]).unwrap() else {
                panic!()
            };
            assert_eq!(its, cgroup);
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for words in [
            &["--grace", "3"][..],
            &["--end-sandboxes", "--hold-cgroup"],
            &["--cgroup", "a"],
            &["--cgroup", "/a/../b"],
            &["--end-sandboxes", "--grace", "soon"],
            &["serve"],
            &["--memory-overcommit", "much"],
            &["--disk-overcommit", "0"],
            &["--memory-fill-rate", "fast"],
            &["--memory-fill-rate", "0"],
            &["--memory-fill-rate", "63m"],
            &["--zeroed-memory", "some"],
            &["--zeroed-memory", "100m"],
            &["--zeroed-memory", "1048576g"],
        ] {
            assert!(parsed(words).is_err(), "{words:?}");
        }
    }
}
