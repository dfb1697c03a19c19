//! The step `host-ends`: the lab's host ends while a guest runs on a CPU that Linux has given up, which nobody in it can look at. It has to go
//! down in order, CPU by CPU, and to reset. Before that such a CPU hangs, which the host has to outlive. It has a lab of its own, beside the one
//! in which cases run.
//!
//! Reads the lab's console, and the emulator's process: it ends where the machine would reset (`-no-reboot`).

use std::path::Path;
use std::process::Command;
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
        let ended = hung(context, task).and_then(|()| {
            WAYS.into_iter().try_for_each(|(way, wanted)| {
                up(context, task)?;
                one(context, task, way, wanted)
            })
        });
        let down = take_down(context, task, Lab::Ended);
        ended.and(down).map(|()| Report::default())
    })
    .plan(only_with_a_lab)
    .hint("`cargo xtask test --only host-ends` repeats it")
}

fn up(context: &Context, task: &mut Task) -> Result<()> {
    for verb in ["up", "sync"] {
        task.run_within(&mut lab_command_in(context, Lab::Ended, &[verb]), LIMIT)?;
    }
    Ok(())
}

/// What the program in the lab says where the emulator had all CPUs wait for the one that hung, so that nothing was shown.
const STOOD_STILL: &str = "the host stood still as long as its CPU did";

/// So often it may be that way.
const TRIES: usize = 3;

/// A CPU that hangs, in a lab of its own each time: its module stays until the host's end.
fn hung(context: &Context, task: &mut Task) -> Result<()> {
    for again in (0..TRIES).rev() {
        up(context, task)?;
        let hung = hang(context, task);
        let down = take_down(context, task, Lab::Ended);
        match hung {
            Err(error) if again > 0 && error.to_string().contains(STOOD_STILL) => {
                task.say(&format!("once more: {error}"))?;
                down?;
            }
            hung => return hung.and(down),
        }
    }
    Ok(())
}

/// A guest's CPU hangs, by a thread of the emulator's that stands still; what the host has to make of it the program in it looks at.
fn hang(context: &Context, task: &mut Task) -> Result<()> {
    let mut command = Command::new("bash");
    let program = context.release().join("basalt-lab");
    command.args(["-c", HANG, "bash"]).arg(program).arg(CASES_IN_LAB);
    let ended = task.finish_within(&mut Lab::Ended.of(context, command), LIMIT)?;
    if !ended.status.success() {
        bail!("a guest's CPU was to hang: {}", ended.err.join("\n"));
    }
    Ok(())
}

/// $1 is `basalt-lab`, $2 the program in the lab; when that says `runs`, the CPU that it gives a guest hangs for some seconds more than it takes,
/// and it is told when it does.
const HANG: &str = "coproc lab { \"$1\" exec -- \"$2\" end hang; }
    pid=$lab_PID
    exec {to}>&${lab[1]} {from}<&${lab[0]}
    hang() { \"$1\" freeze 1 30 || echo failed; }
    while read -r line; do echo \"$line\"; [ \"$line\" != runs ] || hang \"$1\" >&$to & done <&$from
    wait $pid";

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
