//! Checks of the sources: format, lints, tidy, dependencies, and the commands that the documentation shows.
//!
//! Each is one test in the sum. Knows the tools' command lines; the rules are in clippy.toml, deny.toml, layers.toml.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::build::cargo;
use crate::context::Context;
use crate::runner::{Counts, Report, Step, Task};
use crate::{docs as documents, tidy as rules};

const LIMIT: Duration = Duration::from_secs(30 * 60);

/// The version of cargo-deny that deny.toml is written for.
const DENY_VERSION: &str = "0.20.2";

/// `cargo fmt --check`.
pub(crate) fn fmt() -> Step {
    Step::new("fmt", |context, task| {
        let mut command = Command::new("cargo");
        task.run_within(
            command.args(["fmt", "--all", "--check"]).current_dir(&context.root),
            LIMIT,
        )?;
        Ok(Report::default())
    })
    .check()
    .hint("`make fmt` formats the sources")
}

/// All lints, in tests and benches too, as errors.
pub(crate) fn clippy() -> Step {
    Step::new("clippy", |context, task| {
        let mut command = cargo(context, &["clippy", "--workspace", "--all-targets"]);
        if context.ci {
            command.arg("--locked");
        }
        task.run_within(command.args(["--", "-D", "warnings"]), LIMIT)?;
        Ok(Report::default())
    })
    .after(&["apt-packages"])
    .check()
    .hint("the lints are in Cargo.toml and clippy.toml; an `allow` needs a reason")
}

/// The rules that no compiler knows.
pub(crate) fn tidy() -> Step {
    Step::new("tidy", |context, task| {
        let findings = rules::check(&context.root)?;
        for finding in &findings {
            task.say(&finding.to_string())?;
        }
        if !findings.is_empty() {
            anyhow::bail!("{} places to mend", findings.len());
        }
        Ok(Report::default())
    })
    .check()
    .hint("`cargo xtask tidy` shows the places; an exception stands with its reason in layers.toml")
}

/// Licences, sources and wildcards of dependencies.
pub(crate) fn deny() -> Step {
    Step::new("deny", |context, task| {
        let tool = deny_tool(context, task)?;
        let mut command = Command::new(tool);
        command
            .args(["--color", "never", "check", "licenses", "bans", "sources"])
            .current_dir(&context.root);
        task.run_within(&mut command, LIMIT)?;
        Ok(Report::default())
    })
    .after(&["apt-packages"])
    .check()
    .hint("deny.toml says what is allowed and why")
}

/// Built once into the cache. Without optimization, because it runs for a second and compiles for minutes.
fn deny_tool(context: &Context, task: &mut Task) -> Result<PathBuf> {
    let home = context.cache.join("tools").join(format!("cargo-deny-{DENY_VERSION}"));
    let tool = home.join("bin/cargo-deny");
    if tool.exists() {
        return Ok(tool);
    }
    let partial = home.with_extension(format!("{}.partial", std::process::id()));
    let mut command = Command::new("cargo");
    command
        .args([
            "install",
            "--locked",
            "--debug",
            "cargo-deny",
            "--version",
            DENY_VERSION,
            "--root",
        ])
        .arg(&partial);
    command
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_TARGET_DIR", partial.join("build"));
    let installed = task.run_within(&mut command, LIMIT);
    if installed.is_ok() {
        fs::remove_dir_all(partial.join("build"))?;
        fs::rename(&partial, &home)?;
    } else if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    installed?;
    Ok(tool)
}

/// The commands of README and docs.
pub(crate) fn docs() -> Step {
    Step::new("docs", |context, task| {
        let found = documents::run(context, task)?;
        let failed = u64::try_from(found.failures.len())?;
        let detail = match found.failures.first() {
            Some(first) => first.clone(),
            None => format!("{} blocks and commands", found.checked),
        };
        let counts = Counts {
            passed: found.checked - failed,
            failed,
            skipped: 0,
        };
        Ok(Report {
            detail,
            counts,
            ..Report::default()
        })
    })
    .hint("`cargo xtask docs` repeats this; a block marked ```sh test is run, other ```sh blocks only name commands")
}
