//! One process per VM. Wiring only; `catalog.rs` is the one file that names every device.
//!
//! The process does nothing until it is told to over its control socket, so it can be started, confined and kept
//! ready before it is known what it will run.

mod catalog;
mod control;
mod vm;

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use log::LevelFilter;
use rustix::process::{Resource, getrlimit, setrlimit};

const HELP: &str = "\
basalt-vmm: runs one virtual machine, driven over a control socket (see docs/vmm.md)

Usage: basalt-vmm --control-fd N | --control PATH [--log-level LEVEL]

  --control-fd N     an inherited SEQPACKET socket. A connected one: when its other end closes, the VM ends.
                     A listening one: a VM that was started outlives its drivers
  --control PATH     listen on a SEQPACKET socket at PATH; the VM outlives its drivers
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
}

enum Command {
    Run(Options),
    Print(String),
}

fn parse() -> Result<Command> {
    use lexopt::prelude::*;
    let mut parser = lexopt::Parser::from_env();
    let mut control = None;
    let mut log_level = LevelFilter::Warn;
    while let Some(argument) = parser.next()? {
        match argument {
            Long("control-fd") => control = Some(Control::Inherited(inherited(parser.value()?.parse()?)?)),
            Long("control") => control = Some(Control::Listen(parser.value()?.into())),
            Long("log-level") => log_level = parser.value()?.parse()?,
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
    Ok(Command::Run(Options { control, log_level }))
}

/// Takes over a descriptor that the parent left open for us.
#[allow(unsafe_code, reason = "an inherited descriptor is a bare number")]
fn inherited(number: RawFd) -> Result<OwnedFd> {
    if number < 3 {
        bail!("--control-fd {number} is a standard stream: give a number from 3 on");
    }
    // SAFETY: nothing in this process has opened a descriptor yet, so whatever this number is belongs to nobody else;
    // that it is open at all is checked next.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    if let Err(error) = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC) {
        std::mem::forget(fd);
        bail!("--control-fd {number} is not open: {error}");
    }
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

fn run(options: Options) -> Result<()> {
    observe::logger::init("basalt-vmm: ", options.log_level)?;
    raise_descriptor_limit();
    match options.control {
        Control::Inherited(socket) => control::serve_inherited(socket),
        Control::Listen(path) => control::listen(&path).with_context(|| format!("control socket {}", path.display())),
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
            eprintln!("basalt-vmm: {error:#}");
            ExitCode::FAILURE
        }
    }
}
