//! Sandboxes that own their CPUs come, pause, go on and go, over and over: stopped, or robbed of their VMM by `kill -9`. After each the host
//! has its CPUs, and nothing of the sandbox is left; after all of them the host has its memory and the daemon its descriptors. How
//! often, `BASALT_ROUNDS` says.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::bare::{Module, in_lab, online, wait_online};
use super::dedicated::{kill_vmm, vmm_of};
use super::limits::start;
use crate::daemon::{Daemon, wait_for};
use crate::kernel_log::{complaints, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "class-bare-rounds",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

/// Rounds, unless `BASALT_ROUNDS` says otherwise: one of each end.
const ROUNDS: usize = 2;

/// The two that are not counted: what is made once is made by them.
const FIRST: usize = 2;

/// Half of a sandbox's memory: one that is not given back is more.
const MEMORY_KIB: u64 = 64 << 10;

const NAME: &str = "round";

/// There as long as somebody owns a CPU (docs/dedicated.md).
const JOURNAL: &str = "/run/basalt-cpus/journal.json";

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let wanted = std::env::var("BASALT_ROUNDS").ok();
    let rounds = wanted.map_or(Ok(ROUNDS), |text| text.parse().context("BASALT_ROUNDS"))?;
    let daemon = Daemon::new(host)?;
    let module = Module::load(host)?;
    let all = online()?;
    let mut log = kernel_log()?;
    for number in 0..FIRST {
        round(host, &daemon, &all, number)?;
    }
    let before = Held::now(&daemon)?;
    let began = Instant::now();
    for number in 0..rounds {
        round(host, &daemon, &all, number).with_context(|| format!("round {number}"))?;
        log::info!(
            "{} rounds in {:?}: {:?}",
            number + 1,
            began.elapsed(),
            Held::now(&daemon)?
        );
    }
    // Threads that served connections, and what RCU frees, may take a moment.
    let mut after = Held::now(&daemon)?;
    let given_back = wait_for("what was held before", || {
        after = Held::now(&daemon)?;
        Ok(after.is_as(&before))
    });
    given_back.with_context(|| format!("{after:?} is held, before the rounds it was {before:?}"))?;
    daemon.end()?;
    module.unload()?;
    let complaints = complaints(&mut log)?;
    ensure!(complaints.is_empty(), "the host's kernel says: {complaints:?}");
    Ok(())
}

/// What would be less and less, or more and more, if something stayed.
#[derive(Debug)]
struct Held {
    available_kib: u64,
    descriptors: usize,
}

impl Held {
    fn now(daemon: &Daemon<'_>) -> Result<Self> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
        let words = line.and_then(|line| line.split_whitespace().next());
        Ok(Self {
            available_kib: words.context("no MemAvailable")?.parse()?,
            descriptors: daemon.descriptors()?,
        })
    }

    fn is_as(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors && self.available_kib + MEMORY_KIB >= before.available_kib
    }
}

/// One life.
fn round(host: &Host, daemon: &Daemon<'_>, all: &str, number: usize) -> Result<()> {
    let command = ["sh", "-c", "while :; do :; done"];
    let id = start(host, daemon, NAME, &["--class", "bare"], &command)?;
    ensure!(online()? != all, "it runs, and Linux has all CPUs");
    for verb in ["pause", "unpause"] {
        daemon.ok(&[verb, NAME])?;
    }
    daemon.ok(&["exec", NAME, "--", "true"])?;
    if number.is_multiple_of(2) {
        // Its shell ends by SIGTERM.
        daemon.ok(&["stop", NAME])?;
    } else {
        kill_vmm(vmm_of(daemon, NAME)?)?;
    }
    wait_online(all)?;
    wait_for("nobody to own a CPU", || Ok(!Path::new(JOURNAL).exists()))?;
    daemon.ok(&["rm", "--force", NAME])?;
    daemon
        .expect_no_strangers(&[])
        .with_context(|| format!("of sandbox {id}"))
}
