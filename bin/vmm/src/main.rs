//! One process per VM. Wiring only; `catalog.rs` is the one file that names every device.
//!
//! The process does nothing until it is told to over its control socket, so it can be started, confined and kept
//! ready before it is known what it will run.

mod balloon;
mod bare;
mod catalog;
mod control;
mod counted;
mod devices;
mod functions;
mod kvm;
mod made;
mod refusal;
mod request_fds;
mod restore;
mod seccomp;
mod shared;
mod taps;
mod vm;

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use log::LevelFilter;
use observe::marks;
use rustix::fs::Mode;
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::restore::ahead::Files;

const HELP: &str = "\
basalt-vmm: runs one virtual machine, driven over a control socket (see docs/vmm.md)

Usage: basalt-vmm --control-fd N [--kvm-fd N [--state-fd N --memory-fd N ...]] [--own-cpus] [--jail [--volumes]] | --control PATH [--log-level LEVEL]

  --control-fd N     an inherited SEQPACKET socket. A connected one: when its other end closes, the VM ends.
                     A listening one: a VM that was started outlives its drivers
  --control PATH     listen on a SEQPACKET socket at PATH; the VM outlives its drivers
  --kvm-fd N         an inherited /dev/kvm: a VM is made of it at once, for a `restore` that sends none
  --state-fd N       with --kvm-fd, the inherited state of a snapshot, read at once for a `restore` of these files
  --memory-fd N      with --state-fd, its memory; once for each of its files, the lowest first
  --own-cpus         each vCPU has a CPU to itself: guests halt, wait and pause on it without leaving it
  --jail             give up everything but what was inherited, then filter system calls: no file system, no network,
                     no capability; best in namespaces that whoever starts it has made (see docs/vmm.md)
  --seccomp MODE     with --jail, what a forbidden system call does: kill (default), or, for finding out which,
                     trap (it is named, then the process dies) or log (it is made, and the kernel's log names it)
  --volumes          with --jail, keep the rights to files for the threads that serve shared directories, and for no others
  --log-level LEVEL  off, error, warn (default), info, debug or trace; lines go to standard error
  --version          print the version
  --help             print this text
";

enum Control {
    Inherited(OwnedFd),
    Listen(PathBuf),
}

struct Options {
    control: Control,
    log_level: LevelFilter,
    /// An inherited KVM.
    kvm: Option<OwnedFd>,
    /// Inherited files of a snapshot.
    snapshot: Option<Files>,
    /// Nothing else runs where its vCPUs do.
    own_cpus: bool,
    /// Whether to be confined, and what becomes of a forbidden system call.
    jail: Option<seccomp::Mode>,
    /// Whether there will be shared directories.
    volumes: bool,
}

enum Command {
    Run(Options),
    Print(String),
}

fn parse() -> Result<Command> {
    use lexopt::prelude::*;
    let mut parser = lexopt::Parser::from_env();
    let mut taken = Vec::new();
    let (mut control, mut kvm, mut own_cpus) = (None, None, false);
    let (mut state, mut memory) = (None, Vec::new());
    let mut log_level = LevelFilter::Warn;
    let (mut jail, mut volumes, mut mode) = (false, false, None);
    while let Some(argument) = parser.next()? {
        match argument {
            Long("control-fd") => {
                let number = parser.value()?.parse()?;
                control = Some(Control::Inherited(inherited("--control-fd", number, &mut taken)?));
            }
            Long("kvm-fd") => kvm = Some(inherited("--kvm-fd", parser.value()?.parse()?, &mut taken)?),
            Long("state-fd") => state = Some(inherited("--state-fd", parser.value()?.parse()?, &mut taken)?),
            Long("memory-fd") => memory.push(inherited("--memory-fd", parser.value()?.parse()?, &mut taken)?),
            Long("control") => control = Some(Control::Listen(parser.value()?.into())),
            Long("log-level") => log_level = parser.value()?.parse()?,
            Long("own-cpus") => own_cpus = true,
            Long("jail") => jail = true,
            Long("volumes") => volumes = true,
            Long("seccomp") => mode = Some(parser.value()?.parse::<seccomp::Mode>()?),
            Long("version") => {
                return Ok(Command::Print(
                    concat!("basalt-vmm ", env!("CARGO_PKG_VERSION"), "\n").into(),
                ));
            }
            Short('h') | Long("help") => return Ok(Command::Print(HELP.to_owned())),
            other => return Err(other.unexpected().into()),
        }
    }
    let Some(control) = control else {
        bail!("no control socket was given: see basalt-vmm --help")
    };
    if jail && matches!(control, Control::Listen(_)) {
        bail!(
            "--jail leaves no file system for --control PATH: bind the socket, and give it as --control-fd, listening"
        );
    }
    if kvm.is_some() && matches!(control, Control::Listen(_)) {
        bail!("--kvm-fd is for a VM whose driver has the other end of --control-fd: with --control PATH leave it out");
    }
    if state.is_some() == memory.is_empty() || (state.is_some() && kvm.is_none()) {
        bail!(
            "--state-fd, --memory-fd and --kvm-fd are for a snapshot that is restored: give all of them, or --kvm-fd alone"
        );
    }
    if mode.is_some() && !jail {
        bail!("--seccomp says how --jail works: give both");
    }
    if volumes && !jail {
        bail!("--volumes says what --jail keeps: give both");
    }
    let jail = jail.then(|| mode.unwrap_or(seccomp::Mode::Kill));
    Ok(Command::Run(Options {
        control,
        kvm,
        snapshot: state.map(|state| Files {
            state: state.into(),
            memory: memory.into_iter().map(File::from).collect(),
        }),
        own_cpus,
        log_level,
        jail,
        volumes,
    }))
}

/// Takes over a descriptor that the parent left open for us; `taken` has those that are.
#[allow(unsafe_code, reason = "an inherited descriptor is a bare number")]
fn inherited(option: &str, number: RawFd, taken: &mut Vec<RawFd>) -> Result<OwnedFd> {
    if taken.contains(&number) {
        bail!("{option} {number} was given for something else: give another number");
    }
    if number < 3 {
        bail!("{option} {number} is a standard stream: give a number from 3 on");
    }
    // SAFETY: nothing in this process has opened a descriptor yet, so whatever this number is belongs to nobody else, and none is
    // taken twice; that it is open at all is checked next.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    if let Err(error) = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC) {
        std::mem::forget(fd);
        bail!("{option} {number} is not open: {error}");
    }
    taken.push(number);
    Ok(fd)
}

/// Each vsock connection is a descriptor, and the soft limit is commonly 1024 for the sake of programs that use
/// select(2), which this is not: takes what the hard limit allows.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        log::warn!("the limit of open files stays as it is: {error}");
    }
}

/// What the names of threads begin with that serve shared directories (devices/fs).
const FILE_THREADS: &str = "fs-q";

/// Confines the process, for good, before it has read anything.
fn confine(mode: seccomp::Mode, volumes: bool) -> Result<()> {
    // Executed from a descriptor, it has that one's number for a name.
    rustix::thread::set_name(c"basalt-vmm").context("naming the process")?;
    let report = host::confine::enter(|| match volumes {
        true => base::thread::start_privileged_factory(FILE_THREADS, || {
            host::confine::keep_files().map_err(io::Error::other)
        }),
        false => Ok(()),
    })?;
    marks::mark("confined");
    if !report.prepared {
        log::warn!(
            "the jail is one of this process's own making: it shares its user outside and its pid namespace with others"
        );
    }
    match report.landlock {
        Some(version) => log::debug!("landlock, version {version}, denies every path"),
        None => log::info!("this kernel has no landlock: the empty root has to do"),
    }
    seccomp::enter(mode).context("system calls cannot be filtered: use a kernel with CONFIG_SECCOMP_FILTER")?;
    marks::mark("calls filtered");
    Ok(())
}

fn run(options: Options) -> Result<()> {
    observe::logger::init("basalt-vmm: ", options.log_level)?;
    raise_descriptor_limit();
    // What guests make in shared directories has the mode that they say; nothing else is ever made.
    rustix::process::umask(Mode::empty());
    let vm = match options.jail {
        None => vm::Vm::new(),
        Some(mode) => {
            // While there is a file system: a snapshot needs it.
            let pagemap = vm::pagemap();
            confine(mode, options.volumes)?;
            vm::Vm::jailed(pagemap)
        }
    };
    let vm = match options.own_cpus {
        true => vm.on_own_cpus(),
        false => vm,
    };
    let vm = match options.kvm {
        Some(kvm) => vm.with_kvm(kvm, options.snapshot),
        None => vm,
    };
    match options.control {
        Control::Inherited(socket) => control::serve_inherited(socket, vm),
        Control::Listen(path) => control::listen(&path).with_context(|| format!("control socket {}", path.display())),
    }
}

fn main() -> ExitCode {
    marks::mark("main");
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
            eprintln!("basalt-vmm: {error:#}");
            ExitCode::FAILURE
        }
    }
}
