//! Checks of the sources: format, lints, tidy, and the commands that the documentation shows. Dependencies are in [`super::deny`].
//!
//! Each is one test in the sum. Knows the tools' command lines; the rules are in clippy.toml and layers.toml.

use std::process::Command;
use std::time::Duration;

use super::build::cargo;
use crate::runner::{Counts, Report, Step};
use crate::{docs as documents, tidy as rules};

/// In the background clippy takes as long as what it runs beside.
const LIMIT: Duration = Duration::from_secs(60 * 60);

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
