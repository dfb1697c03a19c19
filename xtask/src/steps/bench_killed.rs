//! The step `bench-killed`: a run of `basalt-bench` is killed while it has a guest, a daemon, a kernel module and a function of the host's;
//! nothing of these may be left. It has a lab of its own, of four processors, which guests that own some need.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use super::sandbox::{Lab, lab_command_in, only_with_a_lab, take_down};
use crate::context::Context;
use crate::runner::{Report, Step, Task};

/// An image of 400 MB goes to the lab, and a guest that owns processors comes after those that do not.
const LIMIT: Duration = Duration::from_secs(20 * 60);

pub(crate) fn bench_killed() -> Step {
    Step::new("bench-killed", |context, task| {
        take_down(context, task, Lab::Ended)?;
        let killed = killed(context, task);
        let down = take_down(context, task, Lab::Ended);
        killed.and_then(|report| down.map(|()| report))
    })
    .plan(only_with_a_lab)
    .check()
    .hint("`cargo xtask long --only bench-killed` repeats it")
}

fn killed(context: &Context, task: &mut Task) -> Result<Report> {
    task.run_within(&mut lab_command_in(context, Lab::Ended, &["up", "--cpus", "4"]), LIMIT)?;
    let mut image = Command::new(context.release().join("basalt"));
    image.args(["run", "--rm", "load", "--", "true"]);
    task.run_within(&mut Lab::Ended.of(context, image), LIMIT)?;
    task.run_within(&mut lab_command_in(context, Lab::Ended, &["sync"]), LIMIT)?;
    let words = ["exec", "--", "bash", "-c", KILL];
    let ended = task.finish_within(&mut lab_command_in(context, Lab::Ended, &words), LIMIT)?;
    if !ended.status.success() {
        bail!("a run was to be killed, and to leave nothing: {}", ended.out.join("\n"));
    }
    Ok(Report {
        detail: ended.out.last().cloned().unwrap_or_default(),
        ..Report::default()
    })
}

/// Of the part `device-disk`, whose last guest owns its processors. What is left has a line each.
const KILL: &str = r#"
scratch=/mnt/xfs/basalt-bench
disk=$(basename "$(dirname "$(grep -l 0x010802 /sys/bus/pci/devices/*/class)")")
driver() { basename "$(readlink "/sys/bus/pci/devices/$disk/driver")"; }
left() {
    pgrep -ax basalt-vmm
    pgrep -ax basalt-bench
    pgrep -af -- "--state $scratch"
    grep '^basalt ' /proc/modules
    [ "$(driver)" = nvme ] || echo "$disk has the driver $(driver)"
    grep -o "$scratch-[^ ]*" /proc/mounts
    ls -d $scratch-* 2>/dev/null
}
ready() { pgrep -x basalt-vmm && grep '^basalt ' /proc/modules && [ "$(driver)" = vfio-pci ]; }
/opt/basalt/bin/basalt-bench device-disk --runs 1 > /tmp/bench.log 2>&1 &
bench=$!
until ready > /dev/null; do
    kill -0 $bench || { cat /tmp/bench.log; echo "it ended before it had a guest, a module and a function"; exit 1; }
    sleep 0.2
done
had=$(left | wc -l)
kill -9 $bench
began=$(date +%s)
until [ -z "$(left)" ]; do
    [ $(($(date +%s) - began)) -lt 60 ] || { left; exit 1; }
    sleep 0.2
done
echo "of $had nothing is left after $(($(date +%s) - began)) s"
"#;
