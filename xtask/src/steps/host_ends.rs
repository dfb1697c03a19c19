//! The step `host-ends`: the lab's host ends while a guest runs on a CPU that Linux has given up, which nobody in it can look at. It has to go
//! down in order, CPU by CPU, and to reset. It has a lab of its own, beside the one in which cases run.
//!
//! Reads the lab's console, and the emulator's process: it ends where the machine would reset (`-no-reboot`).

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::sandbox::{Lab, emulator, host_is_lost, lab_command_in, only_with_a_lab, take_down};
use super::tests::CASES_IN_LAB;
use crate::context::Context;
use crate::runner::{Report, Step, Task};

/// A guest's boot and the host's end, on a busy machine.
const LIMIT: Duration = Duration::from_secs(4 * 60);

/// From the host's last word to the end of the emulator.
const RESET: Duration = Duration::from_secs(60);

/// What basalt.ko says of each CPU that it has had.
const LEFT: &str = "has left its guest, as the host ends";

/// How the host ends, and what the console says in this order.
const WAYS: [(&str, &[&str]); 3] = [
    ("reboot", &[LEFT, "reboot: Restarting system"]),
    ("panic", &["Kernel panic - not syncing", LEFT, "Rebooting in 1 seconds"]),
    (
        "kexec",
        &[
            LEFT,
            "kexec_core: Starting new kernel",
            "Linux version",
            // With the CPU that a guest had.
            "Brought up 1 node, 2 CPUs",
            "Kernel panic - not syncing: VFS",
        ],
    ),
];

/// All of them.
pub(crate) fn host_ends() -> Step {
    Step::new("host-ends", |context, task| {
        let ended = WAYS.into_iter().try_for_each(|(way, wanted)| {
            for verb in ["up", "sync"] {
                task.run_within(&mut lab_command_in(context, Lab::Ended, &[verb]), LIMIT)?;
            }
            one(context, task, way, wanted)
        });
        let down = take_down(context, task, Lab::Ended);
        ended.and(down).map(|()| Report::default())
    })
    .plan(only_with_a_lab)
    .hint("`cargo xtask test --only host-ends` repeats it")
}

fn one(context: &Context, task: &mut Task, way: &str, wanted: &[&str]) -> Result<()> {
    let emulator = emulator(context, task, Lab::Ended)?;
    let mut ending = lab_command_in(context, Lab::Ended, &["exec", "--", CASES_IN_LAB, "end", way]);
    let ended = task.finish_within(&mut ending, LIMIT)?;
    if !host_is_lost(&ended) {
        bail!("the host did not end by {way}: {}", ended.err.join("\n"));
    }
    let deadline = Instant::now() + RESET;
    while Path::new(&format!("/proc/{emulator}")).exists() {
        if Instant::now() > deadline {
            bail!("the host did not reset after its end by {way}");
        }
        thread::sleep(Duration::from_millis(100));
    }
    let console = task
        .run_within(&mut lab_command_in(context, Lab::Ended, &["logs"]), LIMIT)?
        .out
        .join("\n");
    in_order(&console, wanted).map_err(|missing| anyhow::anyhow!("after {way} the console does not say {missing:?}"))
}

/// Each behind the one before; which is not.
fn in_order<'w>(text: &str, wanted: &[&'w str]) -> Result<(), &'w str> {
    let mut rest = text;
    for word in wanted {
        rest = rest.split_once(word).ok_or(*word)?.1;
    }
    Ok(())
}

#[cfg(test)]
mod self_tests {
    use super::*;

    #[test]
    fn words_have_to_come_in_their_order() {
        assert_eq!(in_order("a b c", &["a", "c"]), Ok(()));
        assert_eq!(in_order("a b c", &["c", "a"]), Err("a"));
        assert_eq!(in_order("a", &["a", "a"]), Err("a"), "each once more");
    }
}
