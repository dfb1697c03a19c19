//! `basalt run`: decides what runs and where, then runs it here on KVM or hands it to the lab.

pub(crate) mod command;
pub(crate) mod environment;

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use agent_api::{ExecRequest, LocalIo, OsText, Signals, local_tty};
use anyhow::{Context, Result, bail};
use host::Verdict;
use node::{Finished, Sandbox, SandboxSpec};

use crate::cli::{LogLevel, RunArgs};
use crate::images::Opened;
use crate::output::Output;
use crate::{images, lab, places};

/// `--timeout` ended the command (the code of timeout(1)).
const EXIT_TIMED_OUT: u8 = 124;

/// A kernel boots in a second; a loaded machine may need many.
const BOOT_LIMIT: Duration = Duration::from_secs(60);

/// Where the host is emulated a boot takes seconds, and its other guests slow it down.
const BOOT_LIMIT_EMULATED: Duration = Duration::from_secs(120);

/// How long an orderly end may take before it is a disorderly one.
const POWER_OFF_LIMIT: Duration = Duration::from_secs(5);

/// The same on an emulated host.
const POWER_OFF_LIMIT_EMULATED: Duration = Duration::from_secs(30);

/// Where a sandbox runs.
enum Engine {
    /// On this host's KVM.
    Kvm,
    /// In the lab, and why.
    Lab(String),
}

/// Runs a command in a sandbox; the code is the command's.
pub(crate) fn run(args: &RunArgs, log_level: LogLevel, output: &Output) -> Result<u8> {
    let wanted = wanted_engine()?;
    let image = images::open(&args.image)?;
    let argv = command::resolve(image.command(), args.entrypoint.as_deref(), &args.command)?;
    let set = environment::given(&args.env_file, &args.env, own_variable)?;
    match wanted.unwrap_or_else(usable_engine) {
        Engine::Kvm => here(args, &image, &argv, &set, output),
        Engine::Lab(reason) => {
            output.note(&format!("no usable KVM ({reason}); running in the lab"));
            lab::run(args, &image, &set, log_level, output)
        }
    }
}

/// What `$BASALT_ENGINE` says.
fn wanted_engine() -> Result<Option<Engine>> {
    match std::env::var("BASALT_ENGINE").unwrap_or_default().as_str() {
        "" => Ok(None),
        "kvm" => Ok(Some(Engine::Kvm)),
        "lab" => Ok(Some(Engine::Lab("BASALT_ENGINE is `lab`".into()))),
        other => bail!("BASALT_ENGINE is `{other}`: set it to `kvm` or `lab`, or unset it"),
    }
}

/// What this host can do.
fn usable_engine() -> Engine {
    match host::usable_kvm() {
        Verdict::Kvm => Engine::Kvm,
        Verdict::Lab(reason) => Engine::Lab(reason),
    }
}

fn own_variable(name: &str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(value) => Ok(Some(value)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => {
            bail!("the variable {name} of this environment is not UTF-8 text: set it with --env {name}=VALUE")
        }
    }
}

/// Runs the sandbox on this host.
fn here(args: &RunArgs, image: &Opened, argv: &[String], set: &[String], output: &Output) -> Result<u8> {
    // Before anything is started, so that a signal that comes while the guest boots ends the sandbox in order.
    let signals = Signals::install()?;
    let emulated = host::emulated();
    let spec = specify(args, image, emulated)?;
    let request = request(args, image, argv, set);
    let finished = Sandbox::launch(spec, Some(&signals)).and_then(|mut sandbox| {
        let io = LocalIo::std(args.interactive, args.tty);
        let finished = sandbox.run(&request, &io, &signals, args.timeout);
        // A sandbox that failed is not asked to power off: dropping it ends it.
        if finished.is_ok() {
            sandbox.power_off(if emulated {
                POWER_OFF_LIMIT_EMULATED
            } else {
                POWER_OFF_LIMIT
            })?;
        }
        finished
    });
    match finished {
        Ok(Finished::Exited(status)) => Ok(status.exit_code()),
        Ok(Finished::TimedOut) => {
            let limit = args.timeout.unwrap_or_default();
            output.error(&anyhow::anyhow!(
                "the command was ended after {limit:?}, as --timeout says"
            ));
            Ok(EXIT_TIMED_OUT)
        }
        Err(error) => {
            let code = error.exit_code();
            output.error(&error.into());
            Ok(code)
        }
    }
}

fn specify(args: &RunArgs, image: &Opened, emulated: bool) -> Result<SandboxSpec> {
    Ok(SandboxSpec {
        root: image.root()?,
        cpus: args.cpus,
        memory: args.memory,
        hostname: args.hostname.clone(),
        kernel: places::asset("vmlinux")?,
        initramfs: places::asset("initramfs.cpio")?,
        kvm: places::kvm(),
        vmm: places::asset("basalt-vmm")?,
        cmdline: node::command_line(log::max_level()),
        boot_limit: if emulated { BOOT_LIMIT_EMULATED } else { BOOT_LIMIT },
        console_copy: console_copy()?,
    })
}

/// The file that `$BASALT_CONSOLE_LOG` names, for whoever looks into what a guest's kernel said.
fn console_copy() -> Result<Option<File>> {
    let Some(path) = std::env::var_os("BASALT_CONSOLE_LOG")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
    else {
        return Ok(None);
    };
    let file = File::options().append(true).create(true).open(&path);
    let file = file.with_context(|| format!("BASALT_CONSOLE_LOG names {}, which cannot be written", path.display()))?;
    Ok(Some(file))
}

fn request(args: &RunArgs, image: &Opened, argv: &[String], set: &[String]) -> ExecRequest {
    let texts = |words: &[String]| words.iter().map(|word| OsText::from(word.as_str())).collect();
    ExecRequest {
        argv: texts(argv),
        env: texts(&environment::merge(image.env(), set)),
        cwd: OsText::from(args.workdir.as_deref().unwrap_or_else(|| image.workdir())),
        user: args.user.clone().or_else(|| image.user().map(str::to_owned)),
        tty: args.tty.then(local_tty),
        stdin: args.interactive,
    }
}
