//! The step `code-interpreter`: the template that docs/how-to/code-interpreter.md builds, in the lab, and the SDKs of E2B's code interpreter,
//! unmodified, by names. An emulated processor takes minutes for what a real one does in seconds, so `cargo xtask long` has it alone.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::names::Told;
use super::{CLIENTS, Gateway, LAB, add, in_lab, node, node_tests, pytest};
use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Step, Task};
use crate::steps::sandbox::{basalt, only_with_a_lab};

/// The image.
pub(crate) const IMAGE: Recipe = Recipe {
    name: "image-code-interpreter",
    dir: "images/code-interpreter",
};
/// What it is called where it is imported.
pub(crate) const TAG: &str = "code-interpreter";

/// A boot, and a server that imports what `--preload` names.
const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);

/// As in the how-to page, but for the memory: the lab's host has no more for several.
const BUILD: [&str; 16] = [
    "template",
    "build",
    "--from",
    TAG,
    "--name",
    "code-interpreter-v1",
    "--memory",
    "640m",
    "--disk",
    "4g",
    "--run",
    "code-interpreter --log /tmp/code-interpreter.log --preload numpy,pandas,matplotlib.pyplot,e2b_charts",
    "--ready",
    "curl -fsS http://localhost:49999/health",
    "--timeout",
    "25m",
];

/// The step.
pub(crate) fn code_interpreter() -> Step {
    Step::new("code-interpreter", |context, task| {
        let counts = in_lab(context, task, |task| {
            build_template(context, task)?;
            let gateway = Gateway::start(context, task)?;
            let clients = CLIENTS.path(context)?;
            let directory = node_tests::directory(context, "code-interpreter", &clients)?;
            let told = Told::new(&gateway, context, task, &directory)?;
            let python = told.command(&clients.join("python/bin/python"));
            let counts = pytest(context, task, python, &["test_code_interpreter.py"])?;
            let javascript = told.command(&clients.join("node"));
            let more = node(context, task, (javascript, &directory), &["code_interpreter.test.mjs"])?;
            Ok(add(counts, more))
        })?;
        Ok(counts.into())
    })
    .plan(only_with_a_lab)
    .check()
    .hint("`cargo xtask long --only code-interpreter` repeats it")
}

fn build_template(context: &Context, task: &mut Task) -> Result<()> {
    let made = task.run_within(&mut LAB.of(context, basalt(context, &BUILD)), BUILD_LIMIT);
    made.map(drop).context("the template was not built")
}
