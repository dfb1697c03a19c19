//! The step `lab-killed`: what people see whose lab dies, or stands still, under their command. It has a lab of its own, beside the one in which
//! cases run.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use super::sandbox::{Lab, SANDBOX_LIMIT, another_host, answer_in, emulator, only_with_a_lab, take_down};
use crate::context::Context;
use crate::runner::{Report, Step, Task};

/// The emulator dies under a running sandbox: the run ends with a sentence, and the next one starts a lab by itself. One
/// that stands still under a command ends the command, and is started afresh when that is wished.
pub(crate) fn lab_killed() -> Step {
    Step::new("lab-killed", |context, task| {
        another_host(context, task, Lab::Ended)?;
        let ended = killed(context, task).and_then(|()| stands_still(context, task));
        let down = take_down(context, task, Lab::Ended);
        ended.and(down).map(|()| Report::default())
    })
    .plan(only_with_a_lab)
    .hint("`cargo xtask test --only lab-killed` repeats it")
}

fn killed(context: &Context, task: &mut Task) -> Result<()> {
    let emulator = emulator(context, task, Lab::Ended)?;
    let mut killing = Command::new("bash");
    killing.args(["-c", KILL_IN_MID_RUN, "bash"]);
    killing.arg(context.release().join("basalt")).arg(emulator.to_string());
    let ended = task.finish_within(&mut Lab::Ended.of(context, killing), SANDBOX_LIMIT)?;
    let told = ended.err.join("\n");
    if ended.status.code() != Some(125) || !told.contains("the lab does not answer any more") {
        bail!(
            "a run whose lab was killed ended with {} and said {told:?}",
            ended.status
        );
    }
    answer_in(context, task, Lab::Ended)?;
    must_be_gone(emulator)
}

fn stands_still(context: &Context, task: &mut Task) -> Result<()> {
    let emulator = emulator(context, task, Lab::Ended)?;
    let mut stopping = Command::new("bash");
    stopping
        .args(["-c", STOP_IN_MID_RUN, "bash"])
        .arg(context.release().join("basalt-lab"))
        .arg(emulator.to_string())
        .env("BASALT_LAB_PATIENCE", "5");
    let ended = task.finish_within(&mut Lab::Ended.of(context, stopping), SANDBOX_LIMIT)?;
    let told = ended.err.join("\n");
    if ended.status.code() != Some(125) || !told.contains("the lab stands still") {
        bail!(
            "a command whose lab stood still ended with {} and said {told:?}",
            ended.status
        );
    }
    another_host(context, task, Lab::Ended)?;
    must_be_gone(emulator)
}

fn must_be_gone(emulator: u64) -> Result<()> {
    if Path::new(&format!("/proc/{emulator}")).exists() {
        bail!("the emulator, process {emulator}, is still there");
    }
    Ok(())
}

/// $1 is `basalt`, $2 the emulator's process, which dies as soon as the sandbox's command runs.
const KILL_IN_MID_RUN: &str = "\"$1\" run --rm python -- sh -c 'echo runs; exec sleep 600' |
    { read -r line && kill -9 \"$2\"; cat >&2; }; exit \"${PIPESTATUS[0]}\"";

/// $1 is `basalt-lab`, $2 the emulator's process, which stops as soon as the command runs.
const STOP_IN_MID_RUN: &str = "\"$1\" exec -- sh -c 'echo runs; exec sleep 600' |
    { read -r line && kill -STOP \"$2\"; cat >&2; }; exit \"${PIPESTATUS[0]}\"";
