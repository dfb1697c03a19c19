//! `cargo xtask cuda-programs`, and the step `cuda-programs` of `make test`: programs that nvcc has made (accel/clients/cuda), each against a
//! server of ours with the back end that computes. They judge their results themselves.
//!
//! Knows the recipe, and that a program that is content says so in its last line; docs/accel-cuda.md is for its users.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Counts, Options, Report, Step, Task, run_steps};

/// What is compiled.
pub(crate) const RECIPE: Recipe = Recipe {
    name: "cuda-clients",
    dir: "accel/clients/cuda",
};

/// Where the case `cuda` finds them, beside our own programs.
const FOR_CASES: &str = "basalt-cuda-programs";

/// The longest that a program may take, on processors that do other things.
const LIMIT: Duration = Duration::from_secs(120);
const STARTING: Duration = Duration::from_secs(20);

/// The command.
pub(crate) fn command(context: &Context) -> Result<u8> {
    let options = Options {
        only: Vec::new(),
        json: false,
        keep_going: false,
        counts: false,
        verb: "cuda-programs",
        whole: true,
    };
    run_steps(context, crate::steps::cuda_programs(), &options)
}

/// What is done when the programs, the server and the library are there.
pub(crate) fn step() -> Step {
    Step::new("cuda-programs", run).hint(
        "target/cuda-programs has the server's log; each program says what was wrong, and runs by itself as docs/accel-cuda.md shows",
    )
}

/// Puts the programs where the case `cuda` looks; their paths.
pub(crate) fn for_cases(context: &Context) -> Result<Vec<PathBuf>> {
    let directory = context.release().join(FOR_CASES);
    if directory.exists() {
        fs::remove_dir_all(&directory).with_context(|| format!("cannot remove {}", directory.display()))?;
    }
    fs::create_dir_all(&directory)?;
    let copy = |program: PathBuf| {
        let path = directory.join(program.file_name().unwrap_or_default());
        fs::copy(&program, &path).with_context(|| format!("cannot copy {}", program.display()))?;
        Ok(path)
    };
    programs(context)?.into_iter().map(copy).collect()
}

/// The programs, as the recipe has made them.
fn programs(context: &Context) -> Result<Vec<PathBuf>> {
    let mut programs: Vec<PathBuf> = fs::read_dir(RECIPE.path(context)?)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    programs.sort();
    if programs.is_empty() {
        bail!("the recipe has made no program; see accel/clients/cuda/recipe.sh");
    }
    Ok(programs)
}

fn run(context: &Context, task: &mut Task) -> Result<Report> {
    let programs = programs(context)?;
    let scratch = context.target().join("cuda-programs");
    if scratch.exists() {
        fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
    }
    fs::create_dir_all(&scratch)?;
    let built = context.target().join("library");
    let server = Server::start(&built.join("basalt-accel-server"), &scratch)?;
    let mut lines = Vec::new();
    for program in &programs {
        let line = judged(task, program, &built.join("cuda"), &server.socket)
            .with_context(|| format!("the server's log is {}", scratch.join(LOG).display()))?;
        task.say(&line)?;
        lines.push(line);
    }
    Ok(Report {
        detail: format!("{} programs, right results", lines.len()),
        counts: Counts {
            passed: lines.len().try_into()?,
            ..Counts::default()
        },
        show: lines,
        ..Report::default()
    })
}

/// A program's last line, if it is content.
fn judged(task: &mut Task, program: &Path, libraries: &Path, socket: &Path) -> Result<String> {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut command = Command::new(program);
    command
        .env("LD_LIBRARY_PATH", libraries)
        .env("BASALT_ACCEL_SOCKET", socket)
        .env("BASALT_ACCEL_DEBUG", "1")
        .env_remove("BASALT_ACCEL_CUDA");
    let begin = Instant::now();
    let finished = task.run_within(&mut command, LIMIT)?;
    let last = finished.out.last().map_or("", String::as_str);
    if !last.starts_with(&format!("{name}: right")) {
        bail!("{name} has ended without an error and does not say that its results are right; its last line: {last:?}");
    }
    Ok(format!("{last}; {:.1} s", begin.elapsed().as_secs_f64()))
}

const LOG: &str = "server.log";

/// A server of ours, which ends with this.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(program: &Path, scratch: &Path) -> Result<Self> {
        let socket = scratch.join("accel.sock");
        let log = File::create(scratch.join(LOG))?;
        let mut command = Command::new(program);
        command.arg("--socket").arg(&socket).args(["--backend", "reference"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command
            .spawn()
            .with_context(|| format!("cannot run {}", program.display()))?;
        let mut server = Self { child, socket };
        let begin = Instant::now();
        while !server.socket.exists() {
            if let Some(status) = server.child.try_wait()? {
                let log = fs::read_to_string(scratch.join(LOG)).unwrap_or_default();
                bail!("the server has ended with {status} before it listened: {}", log.trim());
            }
            if begin.elapsed() > STARTING {
                bail!("the server does not listen after {} s", STARTING.as_secs());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended already cannot be ended, which is as well.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}
