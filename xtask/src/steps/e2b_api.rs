//! What is said of E2B's API by facts: the step `e2b-api` compares the one that the SDKs have with the gateway's document, the step
//! `schemathesis` has requests made up by that document, and the table of docs/e2b-compatibility.md is made of, and checked by, what the
//! step `e2b` has exercised. Knows no endpoint; the programs in tests/e2b/api and tests/schemathesis do.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::build::cargo;
use super::e2b::CLIENTS;
use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Report, Step, Task};

/// What makes up requests.
pub(crate) const SCHEMATHESIS: Recipe = Recipe {
    name: "schemathesis-client",
    dir: "tests/schemathesis",
};

/// The gateway over a node without machines, as `build-tests` leaves it.
pub(super) const FAKE_GATEWAY: &str = "debug/examples/fake_gateway";

/// What compares, and makes the table.
const PROGRAMS: &str = "tests/e2b/api";

/// The page with the table.
const PAGE: &str = "docs/e2b-compatibility.md";

/// Each takes seconds.
const LIMIT: Duration = Duration::from_secs(120);
/// Some thousand requests, in the background.
const MADE_UP_LIMIT: Duration = Duration::from_secs(30 * 60);

/// Requests for each operation and phase, in `make test` and by night.
const EXAMPLES: &str = "5";
const EXAMPLES_BY_NIGHT: &str = "500";

/// Compares the API of the SDKs with the gateway's document.
pub(crate) fn api() -> Step {
    Step::new("e2b-api", |context, task| {
        let mut itself = Command::new(CLIENTS.path(context)?.join("python/bin/python"));
        itself.args(["-m", "unittest", "discover", "-p", "self_test.py"]);
        itself
            .current_dir(context.root.join(PROGRAMS))
            .env("PYTHONDONTWRITEBYTECODE", "1");
        task.run_within(&mut itself, LIMIT)?;
        let document = document(context, task)?;
        let mut command = python(context, "compare.py")?;
        let finished = task.finish_within(command.arg("--document").arg(document), LIMIT)?;
        let last = finished.out.last().cloned().unwrap_or_default();
        ensure!(finished.status.success(), "{last}");
        Ok(Report {
            detail: last,
            ..Report::default()
        })
    })
    .check()
    .hint("a difference stands with its reason in tests/e2b/api/differences.toml")
}

/// Has requests made up, a few.
pub(crate) fn made_up() -> Step {
    requests("schemathesis", EXAMPLES, "1".to_owned())
}

/// The same with many, and with others each time.
pub(crate) fn made_up_by_night() -> Step {
    requests("long-schemathesis", EXAMPLES_BY_NIGHT, super::now().to_string())
}

fn requests(name: &'static str, examples: &'static str, seed: String) -> Step {
    Step::new(name, move |context, task| {
        let python = SCHEMATHESIS.path(context)?.join("python/bin/python");
        let mut command = Command::new(python);
        command
            .arg(context.root.join(SCHEMATHESIS.dir).join("check.py"))
            .arg(context.target().join(FAKE_GATEWAY))
            .args(["--examples", examples, "--seed", &seed]);
        let finished = task.finish_within(&mut command, MADE_UP_LIMIT)?;
        let last = finished.out.last().cloned().unwrap_or_default();
        ensure!(finished.status.success(), "seed {seed}: {last}");
        Ok(Report {
            detail: last,
            ..Report::default()
        })
    })
    .check()
    .hint("the log has each answer that was wrong, with a curl command that repeats it")
}

/// Fails if the page says of an operation that it is exercised, and the run of this log has not.
pub(crate) fn check_table(context: &Context, task: &mut Task, log: &Path) -> Result<()> {
    let document = document(context, task)?;
    let mut command = table_command(context, &document, log)?;
    let finished = task.finish_within(command.arg("--check"), LIMIT)?;
    ensure!(
        finished.status.success(),
        "{PAGE} is not what this run has exercised; `cargo xtask e2b-table` writes it anew"
    );
    Ok(())
}

/// Writes the page's tables by the log of the last step `e2b`.
pub(crate) fn write_table(context: &Context) -> Result<u8> {
    let log = context.logs().join(super::e2b::LOG);
    ensure!(
        log.exists(),
        "{} is not there: `cargo xtask test --only e2b` leaves it",
        log.display()
    );
    let document = context.target().join("e2b/openapi.json");
    let status = table_command(context, &document, &log)?.arg("--write").status()?;
    Ok(u8::from(!status.success()))
}

/// Builds the gateway over a node without machines as it is released, and prints what it is measured to do.
pub(crate) fn print_figures(context: &Context) -> Result<u8> {
    let clients = CLIENTS.path(context)?;
    ensure!(
        clients.is_dir(),
        "the SDKs are not there: `cargo xtask test --only e2b-clients` gets them"
    );
    let build = [
        "build",
        "--release",
        "--package",
        "basalt-gateway",
        "--example",
        "fake_gateway",
    ];
    ensure!(cargo(context, &build).status()?.success(), "the gateway was not built");
    let status = Command::new(clients.join("python/bin/python"))
        .arg(context.root.join("bench/gateway/figures.py"))
        .arg(context.target().join("release/examples/fake_gateway"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .status()?;
    Ok(u8::from(!status.success()))
}

fn table_command(context: &Context, document: &Path, log: &Path) -> Result<Command> {
    let mut command = python(context, "table.py")?;
    command.arg("--document").arg(document).arg("--log").arg(log);
    command.arg(context.root.join(PAGE));
    Ok(command)
}

/// One of the programs, with the SDKs that it reads.
fn python(context: &Context, program: &str) -> Result<Command> {
    let clients = CLIENTS.path(context)?;
    let mut command = Command::new(clients.join("python/bin/python"));
    command
        .arg(context.root.join(PROGRAMS).join(program))
        .arg("--modules")
        .arg(clients.join("node_modules"))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    Ok(command)
}

/// The gateway's document, as a file.
fn document(context: &Context, task: &mut Task) -> Result<PathBuf> {
    let mut command = Command::new(context.release().join("basalt-gateway"));
    let printed = task.run_within(command.arg("openapi"), LIMIT)?.out.join("\n");
    let directory = context.target().join("e2b");
    std::fs::create_dir_all(&directory)?;
    let path = directory.join("openapi.json");
    std::fs::write(&path, printed).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}
