//! The node daemon: opens the node, serves until it is told to end; or ends all sandboxes; holds the cgroup that they are
//! in; or fills a file with zeroed memory for another one. Everything else is crate `node`.

#![allow(
    unsafe_code,
    reason = "signals are blocked before any thread starts; a service manager hands descriptors over by number"
)]

mod group;
mod manager;
mod options;

use std::mem::MaybeUninit;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base::ByteSize;
use log::LevelFilter;
use node::{Config, Node, Pool, Programs, Server, ThisHost, TimeLimits, Zeroing};
use node_api::{Client, Request};

use crate::options::{Command, Options};

/// The cgroup of the process that holds those of sandboxes, beside theirs.
const HOLDER: &str = "holder";

/// How long a daemon that was asked to end may take.
const QUIT_LIMIT: Duration = Duration::from_secs(10);

fn open(options: Options) -> Result<Arc<Node>> {
    let config = Config {
        state: options.state,
        kernel: options.assets.join("vmlinux"),
        initramfs: options.assets.join("initramfs.cpio"),
        programs: Programs {
            vmm: options.assets.join("basalt-vmm"),
            accelerator: options.assets.join("basalt-accel-server"),
            opencl: options.assets.join("libbasalt_opencl.so"),
            opencl_musl: options.assets.join("libbasalt_opencl-musl.so"),
            cuda: options.assets.join("libbasalt_cuda.so"),
        },
        kvm: options.kvm,
        cpu_model: options.cpu_model,
        users: options.users.then(Pool::default),
        log_level: options.log_level,
        sockets: options.sockets,
        managed: manager::is_manager(),
        cgroup: options.cgroup,
        limits: if host::emulated() {
            TimeLimits::EMULATED
        } else {
            TimeLimits::REAL
        },
        spans: spans(),
        host: Arc::new(ThisHost),
        overcommit: options.overcommit,
        zeroing: Zeroing {
            rate: options.memory_fill_rate,
            ahead: options.zeroed_memory,
        },
    };
    Ok(Node::open(config)?)
}

fn serve(options: Options) -> Result<()> {
    let inherited = manager::socket()?;
    observe::logger::init("basaltd: ", options.log_level)?;
    raise_descriptor_limit();
    let signals = block_signals()?;
    let address = options.metrics;
    let node = open(options)?;
    let metrics = node.serve_metrics(address)?;
    if let Some(address) = metrics.tcp() {
        log::info!("metrics are served at http://{address}/metrics");
    }
    let server = match inherited {
        Some(socket) => Server::inherit(node, socket)?,
        None => Server::bind(node)?,
    };
    let stopper = server.stopper();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            wait_for_signal(&signals);
            stopper.signal();
        })
        .context("starting a thread")?;
    manager::tell("READY=1")?;
    server.serve()?;
    manager::tell("STOPPING=1")
}

/// Each sandbox takes some descriptors, and the soft limit is commonly 1024.
fn raise_descriptor_limit() {
    match base::open_files::raise() {
        Ok(limit) => log::debug!("{limit} files can be open at once"),
        Err(error) => log::warn!("the limit of open files stays as it is: {error}"),
    }
}

/// The host goes down, or Basalt is removed.
fn end_sandboxes(mut options: Options, grace: Duration) -> Result<()> {
    observe::logger::init("basaltd: ", options.log_level)?;
    raise_descriptor_limit();
    // A service manager has ended its daemon by now. Its socket would only start another.
    if manager::is_manager() {
        if manager::is_after_a_death() {
            log::warn!("the process that keeps the sandboxes' cgroup has died; they run on");
            return Ok(());
        }
    } else {
        end_daemon(&options)?;
    }
    // Nobody is to be started.
    options.zeroed_memory = ByteSize(0);
    let ending = open(options)?.end_all(grace)?;
    if ending.failed > 0 {
        bail!("{} sandboxes could not be ended, {} were", ending.failed, ending.ended);
    }
    log::info!("{} sandboxes have ended", ending.ended);
    Ok(())
}

/// Ends the daemon of this state directory, if one runs; its end lets go of the directory's lock.
fn end_daemon(options: &Options) -> Result<()> {
    let socket = options.state.join(node_api::SOCKET);
    let Ok(mut client) = Client::connect(&socket) else {
        return Ok(());
    };
    client.ask(Request::Quit { clean: false })?;
    let end = Instant::now() + QUIT_LIMIT;
    while Client::connect(&socket).is_ok() {
        if Instant::now() >= end {
            bail!("the daemon at {} does not end: kill it", socket.display());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Sandboxes' cgroups lie in that of a service of its own, which a restart of the daemon does not touch. A service's cgroup
/// is there as long as a process is in it: this one.
fn hold_cgroup() -> Result<()> {
    observe::logger::init("basaltd: ", LevelFilter::Warn)?;
    let signals = block_signals()?;
    host::cgroup::step_down(HOLDER)?;
    manager::tell("READY=1")?;
    wait_for_signal(&signals);
    manager::tell("STOPPING=1")
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

/// Returns at a signal that ends. A terminal that hangs up (SIGHUP) is nothing to a daemon.
fn wait_for_signal(set: &libc::sigset_t) {
    loop {
        let mut number = 0;
        // SAFETY: both pointers are valid for the call.
        let failed = unsafe { libc::sigwait(set, &raw mut number) };
        if failed != 0 || number == libc::SIGHUP {
            continue;
        }
        return log::info!("ending at signal {number}");
    }
}

fn main() -> ExitCode {
    node::keep_private();
    let done = |()| ExitCode::SUCCESS;
    let result = options::parse().and_then(|command| match command {
        Command::Serve(options) => serve(options).map(done),
        Command::EndSandboxes(options, grace) => end_sandboxes(options, grace).map(done),
        Command::HoldCgroup => hold_cgroup().map(done),
        Command::FillMemory(cgroup) => Ok(host::zeroed_memory::fill_for_parent(cgroup.as_deref())?.into()),
        Command::Print(text) => {
            use std::io::Write;
            Ok(std::io::stdout().write_all(text.as_bytes()).map(done)?)
        }
    });
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("basaltd: {error:#}");
            ExitCode::FAILURE
        }
    }
}
