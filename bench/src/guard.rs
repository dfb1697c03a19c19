//! A process beside a run, which takes away what the run leaves where it is killed: guests, its own and its node's, kernel modules,
//! functions of the PCI bus that are not the host's, and its directory. It waits for the end of a pipe that the run holds open. Knows
//! modules, nodes, functions and the directory by what the run writes there, processes by a variable in their environment.

use std::fs;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process, setsid};
use vfio::host::Sysfs;
use vfio::host::binding::BindingRecord;

use crate::{function, scratch};

/// The word that has this program be the guard.
pub(crate) const GUARD: &str = "guard";

/// Which run a process belongs to.
pub(crate) const RUN: &str = "BASALT_BENCH_RUN";

/// How long what was killed, and a module that something still uses, may take to go.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(50);

/// What a function's line has before its record.
const FUNCTION: &str = "function";
/// And a directory's before its path.
const SCRATCH: &str = "scratch";

/// Between the parts of a line.
const APART: char = '\t';

static PIPE: Mutex<Option<ChildStdin>> = Mutex::new(None);

/// Starts the guard of this run. The program is started anew first, with the variable that its children will have.
pub(crate) fn begin() -> Result<()> {
    let program = std::env::current_exe()?;
    let id = std::process::id().to_string();
    if std::env::var(RUN).as_deref() != Ok(id.as_str()) {
        let error = Command::new(program)
            .args(std::env::args_os().skip(1))
            .env(RUN, id)
            .exec();
        return Err(error).context("this program cannot be started anew");
    }
    let mut command = Command::new(program);
    let child = command
        .arg(GUARD)
        .arg(id)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn();
    let pipe = child.context("the guard cannot be started")?.stdin.take();
    *PIPE.lock().unwrap_or_else(PoisonError::into_inner) = pipe;
    Ok(())
}

/// Something that outlives a killed run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// A kernel module.
    Module(String),
    /// A daemon and its sandboxes: the program `basalt`, the state directory, the assets.
    Node([String; 3]),
    /// A PCI function that vfio-pci has, and how it was before.
    Function(BindingRecord),
    /// The run's own directory, with what is mounted there.
    Scratch(PathBuf),
}

impl Kept {
    /// A node's.
    pub(crate) fn node(program: &Path, state: &Path, assets: Option<&Path>) -> Self {
        let assets = assets.map_or_else(String::new, |assets| assets.display().to_string());
        Self::Node([program.display().to_string(), state.display().to_string(), assets])
    }

    /// Tells the guard that this is there from now on, or goes by itself.
    pub(crate) fn tell(&self, there: bool) {
        if let Some(pipe) = &mut *PIPE.lock().unwrap_or_else(PoisonError::into_inner)
            && let Err(error) = self.line(there).and_then(|line| Ok(pipe.write_all(line.as_bytes())?))
        {
            eprintln!("the guard is gone ({error}): what this run leaves if it is killed stays");
        }
    }

    fn line(&self, there: bool) -> Result<String> {
        let sign = if there { '+' } else { '-' };
        Ok(match self {
            Self::Module(name) => format!("{sign}{APART}{name}\n"),
            Self::Node([program, state, assets]) => {
                format!("{sign}{APART}{program}{APART}{state}{APART}{assets}\n")
            }
            Self::Function(record) => {
                format!("{sign}{APART}{FUNCTION}{APART}{}\n", serde_json::to_string(record)?)
            }
            Self::Scratch(directory) => format!("{sign}{APART}{SCRATCH}{APART}{}\n", directory.display()),
        })
    }

    fn read(line: &str) -> Option<(bool, Self)> {
        let mut words = line.split(APART).map(str::to_owned);
        let there = words.next()? == "+";
        let rest: Vec<String> = words.collect();
        let kept = match rest.as_slice() {
            [module] => Self::Module(module.clone()),
            [kind, record] if kind == FUNCTION => Self::Function(serde_json::from_str(record).ok()?),
            [kind, directory] if kind == SCRATCH => Self::Scratch(directory.into()),
            [program, state, assets] => Self::Node([program, state, assets].map(String::clone)),
            _ => return None,
        };
        Some((there, kept))
    }

    fn end(&self) -> Result<()> {
        match self {
            Self::Module(name) => unload(name),
            Self::Node(node) => end_node(node),
            Self::Function(record) => function::give_back(&Sysfs::of_host(), record),
            Self::Scratch(directory) => scratch::remove(directory),
        }
    }
}

/// The guard: waits for the run's end, and takes away what is left then.
pub(crate) fn guard(id: &str) -> Result<()> {
    // Keys of the terminal are for the run; the guard ends after it.
    setsid().context("a session of its own")?;
    let left = until_the_end(std::io::stdin().lock());
    // Nodes first, whose daemons belong to the run; then whatever uses a module or a function.
    let (nodes, others): (Vec<_>, Vec<_>) = left.into_iter().partition(|kept| matches!(kept, Kept::Node(_)));
    let mut result = nodes.iter().try_for_each(Kept::end);
    result = result.and(kill_run(id));
    others.iter().rev().try_for_each(Kept::end).and(result)
}

fn until_the_end(lines: impl BufRead) -> Vec<Kept> {
    let mut left = Vec::new();
    for line in lines.lines().map_while(Result::ok) {
        match Kept::read(&line) {
            Some((true, kept)) => left.push(kept),
            Some((false, kept)) => left.retain(|other| *other != kept),
            None => (),
        }
    }
    left
}

fn end_node([program, state, assets]: &[String; 3]) -> Result<()> {
    let basalt = |arguments: &[&str]| {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("BASALT_STATE", state)
            .env("BASALT_ENGINE", "kvm");
        if !assets.is_empty() {
            command.env("BASALT_ASSETS", assets);
        }
        let output = command
            .stdin(Stdio::null())
            .output()
            .context("basalt cannot be started")?;
        ensure!(
            output.status.success(),
            "basalt {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    };
    let ids = basalt(&["ps", "--all", "--quiet"])?;
    let ids: Vec<&str> = ids.lines().collect();
    if !ids.is_empty() {
        basalt(&[&["rm", "--force"], ids.as_slice()].concat())?;
    }
    basalt(&["daemon", "--stop", "--clean"]).map(drop)
}

/// Kills every process of a run but this one.
fn kill_run(id: &str) -> Result<()> {
    let begun = Instant::now();
    loop {
        let processes = of_run(id)?;
        if processes.is_empty() {
            return Ok(());
        }
        ensure!(
            begun.elapsed() < PATIENCE,
            "processes {processes:?} of a killed run stay"
        );
        for process in processes {
            // It may end by itself just now.
            kill_process(process, Signal::KILL).unwrap_or_default();
        }
        std::thread::sleep(PAUSE);
    }
}

fn of_run(id: &str) -> Result<Vec<Pid>> {
    let mark = format!("{RUN}={id}");
    let own = rustix::process::getpid();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(process) = entry
            .file_name()
            .to_str()
            .and_then(|name| Pid::from_raw(name.parse().ok()?))
        else {
            continue;
        };
        // Empty of one that has ended and was not waited for.
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        if process != own && environment.split(|&byte| byte == 0).any(|word| word == mark.as_bytes()) {
            found.push(process);
        }
    }
    Ok(found)
}

fn unload(name: &str) -> Result<()> {
    let begun = Instant::now();
    while Path::new("/sys/module").join(name).exists() {
        let unloaded = crate::class::run("rmmod", &[name]);
        if begun.elapsed() >= PATIENCE {
            return unloaded;
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_gone_by_itself_is_not_left() {
        let node = Kept::node(Path::new("/bin/basalt"), Path::new("/mnt/a b"), None);
        let module = Kept::Module("basalt".to_owned());
        let line = |kept: &Kept, there| kept.line(there).unwrap();
        let function = Kept::Function(BindingRecord::lost("0000:01:00.0".parse().unwrap()));
        let scratch = Kept::Scratch("/mnt/basalt-bench-1".into());
        let lines = [
            line(&module, true),
            line(&node, true),
            line(&function, true),
            line(&module, false),
            line(&scratch, true),
            "?\n".to_owned(),
            "+\tfunction\tnone\n".to_owned(),
        ];
        assert_eq!(
            until_the_end(lines.concat().as_bytes()),
            [node.clone(), function.clone(), scratch]
        );
        let gone = [line(&function, true), line(&function, false), line(&node, false)].concat();
        assert_eq!(until_the_end(gone.as_bytes()), []);
    }
}
