//! A sandbox that goes from class to class while it runs: shared CPUs, CPUs of the host to itself, CPUs that Linux gives up, and back.
//! What runs in it goes on, connections too, and where a class cannot be had it stays what it was.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::bare::{Module, in_lab, online, wait_online};
use super::clones_connections as connections;
use super::limits::start;
use super::network::World;
use crate::basalt::expect_refusal;
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "class-moves",
    limit: Duration::from_secs(400),
    host,
    guest: None,
};

/// Counts in memory, and tells where it is by a file in memory.
const COUNTER: &str = "n=0; while :; do n=$((n + 1)); echo $n > /dev/shm/count; sleep 0.2; done";

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let world = World::new()?;
    let _server = world.serve(&["[::]:7000"])?;
    let daemon = Daemon::with_templates(host)?;
    let all = online()?;
    let plain = start(host, &daemon, "plain", &[], &["sleep", "1000"])?;
    let shown_all = daemon.run(&["move", "--class", "bare", &plain])?;
    expect_refusal(&shown_all, 1, &["--cpu-model common"])?;
    let same = daemon.run(&["move", "--class", "standard", "plain"])?;
    expect_refusal(&same, 1, &["it is of that class"])?;
    daemon.ok(&["rm", "--force", "plain"])?;

    let options = ["--cpu-model", "common"];
    start(host, &daemon, "mover", &options, &["sh", "-c", COUNTER])?;
    connections::begin(&daemon, "mover")?;
    let mut last = Told::of(&daemon)?;
    // Without the module it goes on as it was.
    let without = daemon.run(&["move", "--class", "bare", "mover"])?;
    expect_refusal(&without, 1, &["goes on as it was", "modprobe basalt"])?;
    last = last.goes_on(&daemon, "standard")?;
    let module = Module::load(host)?;
    for class in ["bare", "standard", "dedicated", "bare", "dedicated"] {
        daemon.ok(&["move", "--class", class, "mover"])?;
        last = last.goes_on(&daemon, class).with_context(|| format!("as {class}"))?;
        connections::go_on(&daemon, "mover").with_context(|| format!("as {class}"))?;
        match class {
            "bare" => ensure!(online()? != all, "it is bare, and Linux has all CPUs"),
            _ => wait_online(&all)?,
        }
    }
    // A snapshot of one that owns its CPUs is one as any other; a clone of it takes CPUs of its own.
    daemon.ok(&["move", "--class", "bare", "mover"])?;
    daemon.ok(&["snapshot", "create", "mover", "kept"])?;
    last.goes_on(&daemon, "bare")?;
    daemon.ok(&["rollback", "mover", "kept"])?;
    last.goes_on(&daemon, "bare").context("put back")?;
    daemon.ok(&["rm", "--force", "mover"])?;
    wait_online(&all)?;
    daemon.ok(&["clone", "--name", "mover", "kept"])?;
    ensure!(online()? != all, "a clone of a bare sandbox shares the host's CPUs");
    Told::of(&daemon)?.goes_on(&daemon, "bare").context("a clone")?;
    daemon.ok(&["rm", "--force", "mover"])?;
    daemon.ok(&["snapshot", "rm", "kept"])?;
    wait_online(&all)?;
    killed(host, &daemon, &all)?;
    daemon.end()?;
    module.unload()
}

/// A VMM that is killed after a move leaves a sandbox that has exited, and the host its CPUs.
fn killed(host: &Host, daemon: &Daemon<'_>, all: &str) -> Result<()> {
    start(
        host,
        daemon,
        "mover",
        &["--cpu-model", "common"],
        &["sh", "-c", COUNTER],
    )?;
    daemon.ok(&["move", "--class", "bare", "mover"])?;
    daemon.ok(&["kill", "--signal", "KILL", "mover"])?;
    wait_online(all)?;
    // It starts as what it was last.
    daemon.ok(&["start", "mover"])?;
    ensure!(online()? != all, "it was started again as another class");
    daemon.ok(&["rm", "--force", "mover"])?;
    wait_online(all)
}

/// What a guest says of itself.
struct Told {
    count: u64,
    uptime: f64,
}

impl Told {
    fn of(daemon: &Daemon<'_>) -> Result<Self> {
        let text = daemon.ok(&["exec", "mover", "--", "cat", "/dev/shm/count", "/proc/uptime"])?;
        let mut lines = text.lines();
        let mut line = || lines.next().with_context(|| format!("the guest says {text:?}"));
        Ok(Self {
            count: line()?.trim().parse().context("a count")?,
            uptime: line()?
                .split(' ')
                .next()
                .unwrap_or_default()
                .parse()
                .context("an uptime")?,
        })
    }

    /// The same guest, later, as this class.
    fn goes_on(&self, daemon: &Daemon<'_>, class: &str) -> Result<Self> {
        let inspected: Value = serde_json::from_str(&daemon.ok(&["inspect", "mover"])?)?;
        let is = inspected.pointer("/0/config/resources/class").and_then(Value::as_str);
        ensure!(is.unwrap_or("standard") == class, "it is of the class {is:?}");
        let mut now = Self::of(daemon)?;
        for _ in 0..100 {
            if now.count > self.count + 3 {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
            now = Self::of(daemon)?;
        }
        ensure!(now.count > self.count + 3, "it counts no more: {}", now.count);
        // Its clock stands while it is moved, and goes on where it was.
        let passed = now.uptime - self.uptime;
        ensure!((0.0..60.0).contains(&passed), "{passed} s have passed for it");
        Ok(now)
    }
}
