//! `basalt-lab`: brings the lab (an emulated AMD host) up and down, and runs commands in it. Command line only; what the
//! subcommands do is in the other files.

mod console;
mod emulator;
mod freeze;
mod monitor;
mod parts;
mod ports;
mod progress;
mod remote;
mod share;
mod standstill;
mod state;
mod sync;
mod tsc;
mod tunnel;
mod up;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use serde_json::json;

use emulator::{Iommu, Machine};
use parts::{Emulator, HostKernel};
use progress::Progress;
use state::{Lab, State};

/// Exit code of `status` where no lab runs, as init scripts have it (LSB, "init script actions").
const NOT_RUNNING: u8 = 3;

/// Exit code of a failure of the lab itself, so that it is not taken for one of the command that was to run in it.
const LAB_FAILED: u8 = 125;

/// A signal ended the command.
#[derive(Debug)]
pub(crate) struct Interrupted(pub(crate) i32);

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "interrupted by signal {}; nothing was left running", self.0)
    }
}

impl std::error::Error for Interrupted {}

/// The lab: an emulated AMD machine with SVM in which Basalt's programs run where this machine cannot virtualize.
#[derive(Parser)]
#[command(
    name = "basalt-lab",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  basalt-lab up                                start the lab; nothing happens if it runs
  basalt-lab sync                              bring our programs and assets into it
  basalt-lab exec -- basalt doctor             run a command in it
  basalt-lab shell                             a terminal in it
  basalt-lab push image.erofs /var/tmp         put a file into it
  basalt-lab down                              power it off

Environment:
  BASALT_LAB_STATE     the lab's directory (default ~/.cache/basalt/lab)
  BASALT_LAB_PATIENCE  seconds after which a lab that does not answer stands still (default 150)
  BASALT_CACHE         where the emulator and the host system are (default ~/.cache/basalt)
  BASALT_ASSETS        the assets that `sync` sends (default basalt-assets beside this program)"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start the lab and wait until it answers
    Up(Up),
    /// Power the lab off; its data disks and logs are kept
    Down,
    /// Say whether the lab runs, and how to reach it (exit code 3 if it does not run)
    Status {
        /// Machine-readable
        #[arg(long)]
        json: bool,
    },
    /// Open a terminal in the lab
    Shell,
    /// Run a command in the lab; its exit code becomes ours
    Exec(Exec),
    /// Make /opt/basalt/bin in the lab equal to the programs and assets of this machine
    Sync {
        /// Machine-readable
        #[arg(long)]
        json: bool,
    },
    /// Put files into a directory of the lab, except those that are there with the same contents
    Push {
        /// Files of this machine, then a directory of the lab
        #[arg(required = true, num_args = 2.., value_names = ["FILE", "DIR"])]
        paths: Vec<PathBuf>,
        /// Machine-readable
        #[arg(long)]
        json: bool,
    },
    /// Serve a directory of this machine to the lab, as long as the lab is up; what `basalt run --volume` uses
    Share {
        /// Nothing can be changed
        #[arg(long)]
        read_only: bool,
        /// Machine-readable
        #[arg(long)]
        json: bool,
        /// The directory
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
    /// Lead a port of this machine to a port of the lab's loopback interface, until this command is ended
    Tunnel {
        /// A port of this machine, 0 for any, and one of the lab
        #[arg(value_name = "PORT:PORT")]
        ports: tunnel::Ports,
        /// Machine-readable
        #[arg(long)]
        json: bool,
    },
    /// What `share` starts
    #[command(hide = true)]
    ServeShare {
        #[arg(long)]
        read_only: bool,
        directory: PathBuf,
    },
    /// What `basalt` asks before everything else: how the lab is reached that runs, with this machine's programs in it
    #[command(hide = true)]
    Ready,
    /// Say where ports of this machine can be reserved that lead into the lab; the command, in the lab, tells which are in use
    #[command(hide = true)]
    Forward {
        #[arg(required = true, last = true, value_name = "COMMAND")]
        program: Vec<OsString>,
    },
    /// What `forward` starts
    #[command(hide = true)]
    ServePorts {
        #[arg(required = true, last = true, value_name = "COMMAND")]
        program: Vec<OsString>,
    },
    /// Have one of the lab's processors stand still for so many seconds, as one that hangs
    #[command(hide = true)]
    Freeze {
        cpu: u32,
        #[arg(value_parser = clap::value_parser!(u64).range(1..=600))]
        seconds: u64,
    },
    /// Print the console of this or the last start
    Logs {
        /// The emulator's messages instead
        #[arg(long)]
        emulator: bool,
        /// Only the last N lines
        #[arg(short = 'n', long, value_name = "N")]
        lines: Option<usize>,
        /// Go on printing what is added
        #[arg(short, long)]
        follow: bool,
    },
}

#[derive(Args)]
struct Up {
    /// Processors of the lab
    #[arg(long, env = "BASALT_LAB_CPUS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// Memory of the lab in MiB [default: 6144, or half of this machine's if that is less]
    #[arg(long, env = "BASALT_LAB_MEMORY", value_name = "MIB",
          value_parser = clap::value_parser!(u64).range(1024..=1_048_576))]
    memory: Option<u64>,
    /// TCP port of 127.0.0.1 for the lab's agent; any free one if not given
    #[arg(long, env = "BASALT_LAB_PORT")]
    port: Option<u16>,
    /// Start the lab anew if the one that runs does not answer, or was made of other parts (emulator, host system, init) than
    /// there are now
    #[arg(long)]
    fresh: bool,
    /// What `--fresh` was called
    #[arg(long, hide = true)]
    renew: bool,
    /// Processor of the lab, as QEMU calls it, such as EPYC-Milan or EPYC-Rome,-avx2; SVM and x2APIC are added
    #[arg(long, env = "BASALT_LAB_CPU_MODEL", value_name = "MODEL", default_value = emulator::CPU_MODEL)]
    cpu_model: String,
    /// Kernel of the lab's host
    #[arg(long, env = "BASALT_LAB_KERNEL", value_name = "KERNEL", default_value = "default")]
    kernel: HostKernel,
    /// QEMU that emulates the lab
    #[arg(
        long,
        env = "BASALT_LAB_EMULATOR",
        value_name = "EMULATOR",
        default_value = "default"
    )]
    emulator: Emulator,
    /// IOMMU of the lab [default: intel, and amd with the newer kernel]
    #[arg(long, env = "BASALT_LAB_IOMMU", value_name = "VENDOR")]
    iommu: Option<Iommu>,
    /// More words for the lab's kernel command line
    #[arg(long, env = "BASALT_LAB_KERNEL_ARGS", value_name = "WORDS", default_value = "")]
    kernel_args: String,
    /// Seconds that one boot may take
    #[arg(long, env = "BASALT_LAB_TIMEOUT", default_value_t = 120, value_name = "SECONDS")]
    timeout: u64,
    /// Machine-readable
    #[arg(long)]
    json: bool,
}

impl Up {
    fn iommu(&self) -> Result<Iommu> {
        match (self.iommu, self.kernel) {
            (Some(Iommu::Amd), HostKernel::Default) => {
                bail!("the lab's default kernel has no driver of AMD's IOMMU: add --kernel newer, or leave --iommu out")
            }
            (Some(iommu), _) => Ok(iommu),
            (None, HostKernel::Default) => Ok(Iommu::Intel),
            (None, HostKernel::Newer) => Ok(Iommu::Amd),
        }
    }
}

#[derive(Args)]
struct Exec {
    /// Give the command a terminal
    #[arg(short, long)]
    tty: bool,
    /// Do not send standard input
    #[arg(long)]
    no_stdin: bool,
    /// Set a variable for the command
    #[arg(short, long, value_name = "NAME=VALUE")]
    env: Vec<OsString>,
    /// Directory to run it in
    #[arg(short, long, value_name = "DIR", default_value = "/root")]
    workdir: String,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    argv: Vec<OsString>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(error) if reader_left(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("basalt-lab: {error:#}");
            ExitCode::from(error_code(&error))
        }
    }
}

fn error_code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref::<Interrupted>() {
        Some(Interrupted(number)) => u8::try_from(128_i32.saturating_add(*number)).unwrap_or(LAB_FAILED),
        None => LAB_FAILED,
    }
}

fn run(command: Command) -> Result<u8> {
    let state = State::open(&parts::state()?)?;
    match command {
        Command::Up(options) => up(&state, &options),
        Command::Down => {
            let there = up::down(&state, &mut Progress::new(false))?;
            print(if there { "the lab is down" } else { "no lab was running" })?;
            Ok(0)
        }
        Command::Freeze { cpu, seconds } => freeze::freeze(&state, cpu, Duration::from_secs(seconds)).map(|()| 0),
        Command::Status { json } => status(&state, json),
        Command::Shell => {
            if !io::stdin().is_terminal() {
                bail!("`shell` needs a terminal; use `basalt-lab exec -- COMMAND`");
            }
            let argv = vec!["/bin/bash".into(), "-i".into()];
            let job = remote::Job {
                argv,
                env: Vec::new(),
                cwd: "/root".into(),
                tty: true,
                stdin: true,
            };
            remote::run(&state, &running(&state)?, &job)
        }
        Command::Exec(exec) => {
            let Exec {
                tty,
                no_stdin,
                env,
                workdir,
                argv,
            } = exec;
            let job = remote::Job {
                argv,
                env,
                cwd: workdir,
                tty,
                stdin: !no_stdin,
            };
            remote::run(&state, &running(&state)?, &job)
        }
        Command::Sync { json } => {
            let mut remote = remote::connect(&running(&state)?)?;
            report(&sync::sync(&state, &mut remote, &mut Progress::new(json))?, json)
        }
        Command::Push { mut paths, json } => {
            let directory = paths.pop().context("no directory is named")?;
            let directory = directory.to_str().context("the directory's name is not UTF-8")?;
            if !directory.starts_with('/') {
                bail!("{directory:?} is not an absolute path in the lab");
            }
            let mut remote = remote::connect(&running(&state)?)?;
            report(
                &sync::push(&mut remote, &paths, directory, &mut Progress::new(json))?,
                json,
            )
        }
        Command::Share {
            read_only,
            json,
            directory,
        } => {
            let shared = share::share(&state, &running(&state)?, &directory, read_only)?;
            print(&match json {
                true => serde_json::to_string(&shared)?,
                false => format!("{} is served at {}", shared.directory, shared.address),
            })?;
            Ok(0)
        }
        Command::Tunnel { ports, json } => tunnel(running(&state)?, ports, json),
        Command::ServeShare { read_only, directory } => {
            share::serve(&running(&state)?, &directory, read_only)?;
            Ok(0)
        }
        Command::Ready => ready(&state),
        Command::Forward { program } => {
            running(&state)?;
            print(&serde_json::to_string(&ports::ensure_served(&state, &program)?)?)?;
            Ok(0)
        }
        Command::ServePorts { program } => {
            ports::serve(&state, &running(&state)?, &program)?;
            Ok(0)
        }
        Command::Logs {
            emulator,
            lines,
            follow,
        } => logs(
            &if emulator {
                state.emulator_log()
            } else {
                state.console()
            },
            lines,
            follow,
        ),
    }
}

fn tunnel(lab: Lab, ports: tunnel::Ports, json: bool) -> Result<u8> {
    let ready = |port| {
        print(&match json {
            true => json!({ "port": port }).to_string(),
            false => format!("port {port} of this machine leads to port {} of the lab", ports.lab),
        })
    };
    tunnel::serve(lab, ports, ready)?;
    Ok(0)
}

/// The lab, or an error that says how to get one.
fn running(state: &State) -> Result<Lab> {
    match state.running()? {
        Some(lab) => Ok(lab),
        None => bail!("the lab does not run; start it with `basalt-lab up`"),
    }
}

fn up(state: &State, options: &Up) -> Result<u8> {
    let mut progress = Progress::new(options.json);
    if options.renew {
        progress.warn("`--renew` is called `--fresh` now, and will be removed in the next release");
    }
    let wish = up::Wish {
        machine: Machine {
            cpus: options.cpus,
            memory_mib: emulator::memory(options.memory)?,
            cpu_model: options.cpu_model.clone(),
            iommu: options.iommu()?,
            kernel_args: options.kernel_args.clone(),
        },
        kernel: options.kernel,
        emulator: options.emulator,
        port: options.port,
        fresh: options.fresh || options.renew,
        timeout: Duration::from_secs(options.timeout),
    };
    let lab = up::up(state, &parts::cache()?, &wish, &mut progress)?;
    if options.json {
        print(&serde_json::to_string_pretty(&lab)?)?;
    } else {
        print(&format!("the lab is up at {}", lab.address))?;
    }
    Ok(0)
}

fn status(state: &State, json: bool) -> Result<u8> {
    let Some(lab) = state.running()? else {
        let stale = state.is_stale()?;
        if json {
            print(&json!({ "running": false, "stale": stale }).to_string())?;
        } else if stale {
            print(
                "the lab does not run; the last one ended without `basalt-lab down`, the next `up` cleans up after it",
            )?;
        } else {
            print("the lab does not run")?;
        }
        return Ok(NOT_RUNNING);
    };
    let info = remote::connect(&lab)?.hello()?;
    if json {
        let answer = json!({ "running": true, "lab": lab, "agent": info });
        print(&serde_json::to_string_pretty(&answer)?)?;
    } else {
        print(&format!(
            "the lab runs at {}, process {}\n{} CPUs, {} MiB of memory, {} MiB available\nLinux {}, up for {} s\nstate in {}",
            lab.address,
            lab.pid,
            lab.cpus,
            lab.memory_mib,
            info.mem_available_kib / 1024,
            info.kernel_release,
            info.now_ns / 1_000_000_000,
            state.directory().display()
        ))?;
    }
    Ok(0)
}

/// The lab that runs, with the programs and assets of this machine in it. Where that is known already nothing is asked of the
/// lab: whoever wants to know how it is reached connects to it next.
fn ready(state: &State) -> Result<u8> {
    let Some(lab) = state.running()? else {
        print(&json!({ "running": false }).to_string())?;
        return Ok(NOT_RUNNING);
    };
    let items = sync::items()?;
    let checked = sync::Checked::of(&lab, &items)?;
    if !checked.is_known(state)? {
        sync::sync(state, &mut remote::connect(&lab)?, &mut Progress::new(false))?;
        checked.keep(state)?;
    }
    print(&json!({ "running": true, "lab": lab }).to_string())?;
    Ok(0)
}

fn report(outcome: &sync::Outcome, json: bool) -> Result<u8> {
    if json {
        print(&serde_json::to_string_pretty(outcome)?)?;
        return Ok(0);
    }
    for path in &outcome.sent {
        print(&format!("sent {path}"))?;
    }
    for name in &outcome.missing {
        print(&format!("not built on this machine: {name}"))?;
    }
    print(&format!(
        "{} sent, {} unchanged",
        outcome.sent.len(),
        outcome.unchanged.len()
    ))?;
    Ok(0)
}

fn logs(path: &std::path::Path, lines: Option<usize>, follow: bool) -> Result<u8> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut stdout = io::stdout().lock();
    if let Some(lines) = lines {
        let text = io::read_to_string(&file)?;
        let all: Vec<&str> = text.split_inclusive('\n').collect();
        let last = all.get(all.len().saturating_sub(lines)..).unwrap_or_default().concat();
        stdout.write_all(last.as_bytes())?;
    } else {
        io::copy(&mut file, &mut stdout)?;
    }
    if !follow {
        return Ok(0);
    }
    loop {
        std::thread::sleep(Duration::from_millis(200));
        io::copy(&mut file, &mut stdout)?;
        stdout.flush()?;
    }
}

/// A line on standard output.
fn print(line: &str) -> Result<()> {
    Ok(writeln!(io::stdout(), "{line}")?)
}

/// Whether the reader of our output has seen enough and left, as `head` does, which is no failure.
fn reader_left(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_two_dashes_is_the_command() {
        let cli = Cli::try_parse_from(["basalt-lab", "exec", "-t", "-e", "A=b", "--", "ls", "-l", "--", "x"]).unwrap();
        let Command::Exec(exec) = cli.command else {
            panic!("no exec")
        };
        assert_eq!(exec.argv, ["ls", "-l", "--", "x"]);
        assert!(exec.tty && !exec.no_stdin);
        assert!(Cli::try_parse_from(["basalt-lab", "exec", "--"]).is_err());
    }

    #[test]
    fn absurd_machines_are_refused() {
        for arguments in [
            ["--cpus", "0"],
            ["--cpus", "1000"],
            ["--memory", "1"],
            ["--port", "70000"],
        ] {
            let all = ["basalt-lab", "up"].into_iter().chain(arguments);
            assert!(Cli::try_parse_from(all).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn push_needs_a_file_and_a_directory() {
        assert!(Cli::try_parse_from(["basalt-lab", "push", "file"]).is_err());
        assert!(Cli::try_parse_from(["basalt-lab", "push", "one", "two", "/tmp"]).is_ok());
    }

    #[test]
    fn an_interruption_has_the_exit_code_of_its_signal() {
        assert_eq!(error_code(&Interrupted(15).into()), 143);
        assert_eq!(error_code(&anyhow::anyhow!("other")), LAB_FAILED);
    }
}
