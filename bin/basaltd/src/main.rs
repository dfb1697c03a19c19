//! The node daemon: reads its flags, opens the node, serves until it is told to end. Everything else is crate `node`.

#![allow(unsafe_code, reason = "signals are blocked before any thread starts")]

use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use base::EventFd;
use log::LevelFilter;
use node::{Config, Endpoint, Node, Pool, Server, TimeLimits};

const HELP: &str = "\
basaltd: keeps the sandboxes of a node (see docs/daemon.md)

Usage: basaltd [--state DIR] [--assets DIR] [--kvm PATH] [--no-users] [--metrics ADDRESS]
               [--log-level LEVEL]

  --state DIR        where sandboxes and images are kept; /var/lib/basalt
  --assets DIR       the guest kernel, its initramfs and basalt-vmm; basalt-assets beside this program, or /usr/lib/basalt
  --kvm PATH         the KVM device; /dev/kvm
  --no-users         run VMMs as this user and in no namespaces of their own: for tests, and where root is not to be had
  --metrics ADDRESS  tell metrics to Prometheus there, too: a port of 127.0.0.1 or [::1]; always in metrics.sock of the
                     state directory
  --log-level LEVEL  off, error, warn (default), info, debug or trace; from debug on guests' kernels say everything
  --version          print the version
  --help             print this text

SIGTERM and SIGINT end it; sandboxes run on, and the next basaltd on the same state directory finds them.
";

struct Options {
    state: PathBuf,
    assets: PathBuf,
    kvm: PathBuf,
    users: bool,
    log_level: LevelFilter,
    metrics: Option<SocketAddr>,
}

enum Command {
    Run(Options),
    Print(String),
}

fn parse() -> Result<Command> {
    use lexopt::prelude::*;
    let mut options = Options {
        state: "/var/lib/basalt".into(),
        assets: default_assets(),
        kvm: host::kvm::DEVICE.into(),
        users: true,
        log_level: LevelFilter::Warn,
        metrics: None,
    };
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("state") => options.state = parser.value()?.into(),
            Long("assets") => options.assets = parser.value()?.into(),
            Long("kvm") => options.kvm = parser.value()?.into(),
            Long("no-users") => options.users = false,
            Long("metrics") => options.metrics = Some(metrics_address(&parser.value()?.string()?)?),
            Long("log-level") => options.log_level = parser.value()?.parse()?,
            Long("version") => {
                return Ok(Command::Print(
                    concat!("basaltd ", env!("CARGO_PKG_VERSION"), "\n").into(),
                ));
            }
            Short('h') | Long("help") => return Ok(Command::Print(HELP.to_owned())),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Command::Run(options))
}

fn metrics_address(text: &str) -> Result<SocketAddr> {
    text.parse()
        .with_context(|| format!("--metrics `{text}` is no address: write 127.0.0.1:PORT or [::1]:PORT"))
}

fn default_assets() -> PathBuf {
    let beside = std::env::current_exe()
        .ok()
        .and_then(|program| Some(program.parent()?.join("basalt-assets")))
        .filter(|directory| directory.is_dir());
    beside.unwrap_or_else(|| PathBuf::from("/usr/lib/basalt"))
}

fn run(options: Options) -> Result<()> {
    observe::logger::init("basaltd: ", options.log_level)?;
    let signals = block_signals()?;
    let absolute =
        |path: &Path| std::path::absolute(path).with_context(|| format!("{} cannot be made absolute", path.display()));
    let config = Config {
        state: absolute(&options.state)?,
        kernel: options.assets.join("vmlinux"),
        initramfs: options.assets.join("initramfs.cpio"),
        vmm: options.assets.join("basalt-vmm"),
        kvm: options.kvm,
        users: options.users.then(Pool::default),
        log_level: options.log_level,
        managed: std::env::var_os("INVOCATION_ID").is_some(),
        limits: if host::emulated() {
            TimeLimits::EMULATED
        } else {
            TimeLimits::REAL
        },
        spans: spans(),
    };
    let node = Node::open(config)?;
    let metrics = Endpoint::bind(&node, options.metrics)?;
    if let Some(address) = metrics.tcp() {
        log::info!("metrics are told on http://{address}/metrics");
    }
    let server = Server::bind(node)?;
    let stopper = server.stopper();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || wait_for_signal(&signals, &stopper))
        .context("starting a thread")?;
    Ok(server.serve()?)
}

/// Spans are worth less than sandboxes: a daemon that cannot send them says so and does without.
fn spans() -> Option<otlp::Exporter> {
    otlp::Exporter::from_environment(env!("CARGO_PKG_VERSION")).unwrap_or_else(|error| {
        log::error!("no spans are sent: {error}");
        None
    })
}

/// Blocks the signals that end the daemon, so that one thread can wait for them.
fn block_signals() -> Result<libc::sigset_t> {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` writes the whole set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the call above has written it; it cannot fail for a valid pointer.
    let mut set = unsafe { set.assume_init() };
    for number in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: the set was initialized above, and the numbers are signals.
        unsafe { libc::sigaddset(&raw mut set, number) };
    }
    // SAFETY: the set is initialized; the old mask is not asked for.
    let failed = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    if failed != 0 {
        bail!(
            "signals cannot be blocked: {}",
            std::io::Error::from_raw_os_error(failed)
        );
    }
    Ok(set)
}

/// Ends the server at a signal. A terminal that hangs up (SIGHUP) is nothing to a daemon.
fn wait_for_signal(set: &libc::sigset_t, stopper: &EventFd) {
    loop {
        let mut number = 0;
        // SAFETY: both pointers are valid for the call.
        let failed = unsafe { libc::sigwait(set, &raw mut number) };
        if failed != 0 || number == libc::SIGHUP {
            continue;
        }
        log::info!("ending at signal {number}");
        return stopper.signal();
    }
}

fn main() -> ExitCode {
    let result = parse().and_then(|command| match command {
        Command::Run(options) => run(options),
        Command::Print(text) => {
            use std::io::Write;
            Ok(std::io::stdout().write_all(text.as_bytes())?)
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("basaltd: {error:#}");
            ExitCode::FAILURE
        }
    }
}
