//! Tests in JavaScript, run by the Node that a recipe has brought. Knows no test.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::context::Context;
use crate::runner::{Counts, Task};

/// A directory of the target's called `name`, beside whose files Node finds the modules of a recipe.
pub(super) fn directory(context: &Context, name: &str, recipe: &Path) -> Result<PathBuf> {
    let directory = context.target().join(name);
    std::fs::create_dir_all(&directory)?;
    let modules = directory.join("node_modules");
    match std::fs::remove_file(&modules) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => symlink(recipe.join("node_modules"), &modules)?,
    }
    Ok(directory)
}

/// Runs files of tests of `from`, one after the other, in this directory, by the Node that `command` begins with.
pub(super) fn run(
    task: &mut Task,
    mut command: Command,
    (from, directory): (&Path, &Path),
    names: &[&str],
    limit: Duration,
) -> Result<Counts> {
    for name in names {
        std::fs::copy(from.join(name), directory.join(name))?;
    }
    command
        .args([
            "--test",
            "--test-reporter=tap",
            "--test-timeout=240000",
            "--test-concurrency=1",
        ])
        .args(names)
        .current_dir(directory);
    let finished = task.finish_within(&mut command, limit)?;
    let number = |what: &str| {
        let line = finished.out.iter().rev().find_map(|line| line.strip_prefix(what));
        line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let counts = Counts {
        passed: number("# pass "),
        failed: number("# fail "),
        skipped: number("# skipped "),
    };
    ensure!(
        finished.status.success() && counts.passed > 0,
        "{}: {} failed",
        names.join(", "),
        counts.failed
    );
    Ok(counts)
}
