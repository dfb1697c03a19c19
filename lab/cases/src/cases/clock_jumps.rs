//! The host's clock jumps by a day, forward and back, under a daemon that waits: grace periods and time limits are as long as
//! they were, logs are in the order in which they were written, no age is nonsense, and guests follow. Only in the lab: elsewhere the
//! clock is that of a machine which others use, too.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use rustix::time::{ClockId, Timespec, clock_settime};
use serde_json::Value;

use crate::basalt::expect_code;
use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "clock-jumps",
    limit: Duration::from_secs(240),
    host,
    guest: None,
};

const DAY: i64 = 86_400;

/// Needs a while to end once it was asked to, and says when it has begun to.
const SLOW: &str = "trap 'echo asked; sleep 3; echo done; exit 4' TERM; echo ready; while :; do sleep 0.1; done";

/// The host whose clock is nobody else's (`lab/host/recipe.sh`).
const LAB: &str = "basalt-lab";

/// The host's clock, put right again when this is dropped.
struct Clock {
    real: SystemTime,
    steady: Instant,
}

impl Clock {
    fn new() -> Self {
        Self {
            real: SystemTime::now(),
            steady: Instant::now(),
        }
    }

    /// Moves it so far from what is right.
    fn jump(&self, seconds: i64) -> Result<()> {
        let right = (self.real + self.steady.elapsed()).duration_since(UNIX_EPOCH)?;
        let time = Timespec {
            tv_sec: i64::try_from(right.as_secs())? + seconds,
            tv_nsec: right.subsec_nanos().into(),
        };
        clock_settime(ClockId::Realtime, time).context("clock_settime")
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        if let Err(error) = self.jump(0) {
            eprintln!("the clock stays wrong: {error:#}");
        }
    }
}

fn host(host: &Host) -> Result<()> {
    if std::fs::read_to_string("/etc/hostname")?.trim() != LAB {
        eprintln!("this host is not the lab: its clock is left alone, and nothing was tested");
        return Ok(());
    }
    let clock = Clock::new();
    let daemon = Daemon::with_templates(host)?;
    daemon.idle("other")?;
    for seconds in [DAY, -DAY] {
        let way = if seconds > 0 { "forward" } else { "back" };
        waits(host, &daemon, &clock, seconds).context(way)?;
        clock.jump(0)?;
    }
    daemon.ok(&["rm", "--force", "other"])?;
    time_limit(host, &daemon, &clock)?;
    drop(clock);
    daemon.end()
}

/// A sandbox that is being stopped while the clock jumps has its whole grace period, and no more.
fn waits(host: &Host, daemon: &Daemon<'_>, clock: &Clock, seconds: i64) -> Result<()> {
    let image = host.digest.as_str();
    daemon.ok(&[
        "run", "-d", "--name", "slow", "--memory", "128m", image, "--", "sh", "-c", SLOW,
    ])?;
    wait_for("the sandbox to be ready", || {
        Ok(daemon.ok(&["logs", "slow"])?.contains("ready"))
    })?;
    let mut waiting = daemon.start(&["wait", "slow"])?;
    let mut stopping = daemon.start(&["stop", "--time", "60s", "slow"])?;
    wait_for("the sandbox to be asked", || {
        Ok(daemon.ok(&["logs", "slow"])?.contains("asked"))
    })?;
    clock.jump(seconds)?;
    wait_for("a guest to follow the host's clock", || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let inside: u64 = daemon.ok(&["exec", "other", "date", "+%s"])?.trim().parse()?;
        Ok(inside.abs_diff(now) < 60)
    })?;
    ensure!(stopping.wait()?.success(), "stop failed");
    ensure!(waiting.wait()?.success(), "wait failed");
    ensure!(daemon.ok(&["wait", "slow"])? == "4\n", "it did not end by itself");
    let logs = daemon.ok(&["logs", "slow"])?;
    ensure!(logs == "ready\nasked\ndone\n", "the log is {logs:?}");
    let stamped = daemon.ok(&["logs", "--timestamps", "slow"])?;
    ensure!(stamped.lines().count() == 3, "the log with times is {stamped:?}");

    let listed = daemon.ok(&["ps", "--all"])?;
    let age = listed
        .lines()
        .find(|line| line.contains(" slow "))
        .context("no such sandbox")?;
    let sound = if seconds > 0 {
        age.contains("24 h ago")
    } else {
        age.contains(" 0 s ago")
    };
    ensure!(sound, "ps shows {age:?}");
    let sandbox = daemon.find("slow")?.context("it is gone")?;
    let time = |key: &str| sandbox[key].as_u64().with_context(|| format!("no {key}: {sandbox}"));
    ensure!(
        (time("ended_ns")? > time("started_ns")?) == (seconds > 0),
        "times are {sandbox}"
    );

    // It can be started again, by a daemon that starts now, too.
    daemon.kill()?;
    daemon.ok(&["start", "slow"])?;
    expect_code(&daemon.run(&["exec", "slow", "true"])?, 0)?;
    daemon.ok(&["rm", "--force", "slow"])?;
    Ok(())
}

/// `--timeout` is the client's, the order of sandboxes the daemon's.
fn time_limit(host: &Host, daemon: &Daemon<'_>, clock: &Clock) -> Result<()> {
    let image = host.digest.as_str();
    daemon.idle("before")?;
    let script = "echo ready; exec sleep 1000";
    let mut limited = daemon.start(&[
        "run",
        "--timeout",
        "6s",
        "--name",
        "limited",
        "--memory",
        "128m",
        image,
        "--",
        "sh",
        "-c",
        script,
    ])?;
    // There may be no sandbox yet, nor a log.
    let logged = || Ok(daemon.run(&["logs", "limited"])?.stdout.starts_with(b"ready"));
    wait_for("the sandbox to be ready", logged)?;
    let begun = Instant::now();
    clock.jump(-DAY)?;
    let status = limited.wait()?;
    let took = begun.elapsed();
    ensure!(status.code() == Some(124), "it ended with {status}");
    if took > Duration::from_secs(40) {
        bail!("a limit of 6 s took {took:?}");
    }
    daemon.idle("after")?;
    let names: Vec<Value> = daemon.list()?.iter().map(|sandbox| sandbox["name"].clone()).collect();
    ensure!(names.len() == 2, "sandboxes are {names:?}");
    Ok(())
}
