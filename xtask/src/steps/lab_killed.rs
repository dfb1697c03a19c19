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
    let emulator = under_a_command(
        context,
        task,
        KILL_IN_MID_RUN,
        "basalt",
        "the lab does not answer any more",
    )?;
    answer_in(context, task, Lab::Ended)?;
    must_be_gone(emulator)
}

fn stands_still(context: &Context, task: &mut Task) -> Result<()> {
    let emulator = under_a_command(context, task, STOP_IN_MID_RUN, "basalt-lab", "the lab stands still")?;
    another_host(context, task, Lab::Ended)?;
    must_be_gone(emulator)
}

/// Has a script do something to the emulator under a command of this program's, which has to end with these words; the emulator's process.
fn under_a_command(context: &Context, task: &mut Task, script: &str, program: &str, wanted: &str) -> Result<u64> {
    let emulator = emulator(context, task, Lab::Ended)?;
    let mut command = Command::new("bash");
    command
        .args(["-c", script, "bash"])
        .arg(context.release().join(program))
        .arg(emulator.to_string())
        .env("BASALT_LAB_PATIENCE", "5");
    let ended = task.finish_within(&mut Lab::Ended.of(context, command), SANDBOX_LIMIT)?;
    let told = ended.err.join("\n");
    if ended.status.code() != Some(125) || !told.contains(wanted) {
        bail!(
            "a command of {program} was to end with {wanted:?}, and ended with {} and said {told:?}",
            ended.status
        );
    }
    Ok(emulator)
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
