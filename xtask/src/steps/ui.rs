//! The step `ui`: the gateway's page in a browser, against a gateway whose node has no machines (crates/gateway/examples/serve.rs). Runs
//! what is in tests/ui. Knows no part of the page.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::build::cargo;
use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Counts, Report, Step, Task};

/// What drives the browser.
pub(crate) const CLIENT: Recipe = Recipe {
    name: "ui-client",
    dir: "tests/ui/client",
};

/// The test.
const TEST: &str = "page.test.mjs";

/// Where the browser is that the step `browser` installs.
const BROWSER: &str = "/usr/bin/chromium";

/// Linking the example, where everything else is compiled.
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
/// It takes 40 s where nothing else runs.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// The step.
pub(crate) fn ui() -> Step {
    Step::new("ui", |context, task| {
        let counts = run(context, task)?;
        Ok(Report {
            detail: counts.to_string(),
            counts,
            ..Report::default()
        })
    })
    .hint("`cargo xtask test --only ui` repeats it; UI_SHOTS=DIRECTORY keeps pictures of the page")
}

fn run(context: &Context, task: &mut Task) -> Result<Counts> {
    let mut build = cargo(context, &["build", "--package", "basalt-gateway", "--example", "serve"]);
    if context.ci {
        build.arg("--locked");
    }
    task.run_within(&mut build, BUILD_LIMIT)?;
    let client = CLIENT.path(context)?;
    let directory = context.target().join("ui");
    place(context, &client, &directory)?;
    let mut test = Command::new(client.join("node"));
    test.args(["--test", "--test-reporter=tap", "--test-timeout=240000", TEST])
        .env("UI_SERVE", context.target().join("debug/examples/serve"))
        .env("UI_BROWSER", BROWSER)
        .current_dir(directory);
    let finished = task.finish_within(&mut test, LIMIT)?;
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
        "{} of the page's tests failed",
        counts.failed
    );
    Ok(counts)
}

/// Modules are looked for beside the file.
fn place(context: &Context, client: &Path, directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    let modules = directory.join("node_modules");
    match std::fs::remove_file(&modules) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => symlink(client.join("node_modules"), &modules)?,
    }
    std::fs::copy(context.root.join("tests/ui").join(TEST), directory.join(TEST))?;
    Ok(())
}
