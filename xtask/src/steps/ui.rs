//! The step `ui`: the gateway's page in a browser, against a gateway whose node has no machines (crates/gateway/examples/fake_gateway.rs). Runs
//! what is in tests/ui. Knows no part of the page.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::e2b_api::FAKE_GATEWAY;
use super::node_tests;
use crate::context::Context;
use crate::recipe::Recipe;
use crate::runner::{Counts, Step, Task};

/// What drives the browser.
pub(crate) const CLIENT: Recipe = Recipe {
    name: "ui-client",
    dir: "tests/ui/client",
};

/// The test.
const TEST: &str = "page.test.mjs";

/// Where the browser is that the step `browser` installs.
const BROWSER: &str = "/usr/bin/chromium";

/// It takes 40 s where nothing else runs.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// The step.
pub(crate) fn ui() -> Step {
    Step::new("ui", |context, task| {
        let counts = run(context, task)?;
        Ok(counts.into())
    })
    .hint("`cargo xtask test --only ui` repeats it; UI_SHOTS=DIRECTORY keeps pictures of the page")
}

fn run(context: &Context, task: &mut Task) -> Result<Counts> {
    let client = CLIENT.path(context)?;
    let directory = node_tests::directory(context, "ui", &client)?;
    let mut node = Command::new(client.join("node"));
    node.env("UI_SERVE", context.target().join(FAKE_GATEWAY))
        .env("UI_BROWSER", BROWSER);
    let places = (&*context.root.join("tests/ui"), &*directory);
    node_tests::run(task, node, places, &[TEST], LIMIT)
}
