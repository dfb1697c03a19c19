//! How long the host stands still: on each CPU that stays Linux's a process that only the kernel can hold up (SCHED_FIFO) sleeps a
//! millisecond over and over, and notes the longest time between two looks at the clock. Knows nothing of what goes on meanwhile.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::machine::{end_with_us, now_ns};
use crate::trace::milliseconds;

/// The word that has this program watch the clock until its standard input ends.
pub(crate) const WATCH: &str = "watch-the-clock";

/// So long sleeps who watches.
const PAUSE: Duration = Duration::from_millis(1);

/// Above everything that does not ask for a priority, below the kernel's own threads that stop CPUs.
const PRIORITY: &str = "50";

/// Who watches, one on each CPU.
pub(crate) struct Watch(Vec<Child>);

impl Watch {
    pub(crate) fn begin(cpus: &[u32]) -> Result<Self> {
        let program = std::env::current_exe()?;
        let mut watch = Self(Vec::new());
        for cpu in cpus {
            let mut command = Command::new("chrt");
            command
                .args(["--fifo", PRIORITY, "taskset", "--cpu-list", &cpu.to_string()])
                .arg(&program)
                .arg(WATCH)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            end_with_us(&mut command);
            watch.0.push(command.spawn().context("chrt cannot be started")?);
        }
        Ok(watch)
    }

    /// The longest time between two looks that any of them has seen, in milliseconds.
    pub(crate) fn end(mut self) -> Result<f64> {
        let mut longest: f64 = 0.0;
        for mut child in std::mem::take(&mut self.0) {
            drop(child.stdin.take());
            let output = child.wait_with_output()?;
            let told = String::from_utf8_lossy(&output.stdout);
            ensure!(output.status.success(), "who watches the clock: {}", output.status);
            let gap = parse(&told).with_context(|| format!("who watches the clock says {told:?}"))?;
            longest = longest.max(gap);
        }
        ensure!(longest > 0.0, "nobody has watched the clock");
        Ok(longest)
    }
}

impl Drop for Watch {
    /// After a failure, whose words are worth more than ours.
    fn drop(&mut self) {
        for child in &mut self.0 {
            drop(child.kill().and_then(|()| child.wait()));
        }
    }
}

/// Nanoseconds as milliseconds.
fn parse(told: &str) -> Option<f64> {
    Some(milliseconds(told.trim().parse().ok()?))
}

/// The process that watches.
#[expect(clippy::print_stdout, reason = "what this process is for")]
pub(crate) fn watch() -> Result<()> {
    static ENDED: AtomicBool = AtomicBool::new(false);
    thread::spawn(|| {
        drop(std::io::stdin().read_to_end(&mut Vec::new()));
        ENDED.store(true, Ordering::Relaxed);
    });
    let (mut longest, mut before) = (0, now_ns());
    while !ENDED.load(Ordering::Relaxed) {
        thread::sleep(PAUSE);
        let now = now_ns();
        longest = longest.max(now - before);
        before = now;
    }
    println!("{longest}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_watcher_says_is_understood() {
        assert_eq!(parse("2500000\n"), Some(2.5));
        assert_eq!(parse(""), None);
    }
}
