//! Pause stops everything, resume lets everything go on: a counter stands still in between, and nothing is lost.

use std::io::Write;
use std::time::Duration;

use anyhow::{Result, ensure};
use vmm_api::VmState;

use crate::vm::{self, Builder};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "pause",
    limit: Duration::from_secs(240),
    host,
    guest: Some(guest),
};

const ROUNDS: usize = 4;

fn host(host: &Host) -> Result<()> {
    let mut machine = Builder::new(host)?.cpus(2).start()?;
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    let mut half = vm::start_guest_half(agent, CASE.name);
    half.wait_for("tick 3\n")?;
    for _ in 0..ROUNDS {
        machine.vmm.client.pause()?;
        ensure!(
            machine.vmm.client.info()?.state == VmState::Paused,
            "the VM does not say that it is paused"
        );
        let error = machine
            .vmm
            .client
            .pause()
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        ensure!(error.contains("needs a VM that is running"), "a second pause: {error}");
        half.drain(Duration::from_millis(200))?;
        let before = half.collected().len();
        half.drain(Duration::from_millis(500))?;
        ensure!(
            half.collected().len() == before,
            "the guest went on while it was paused"
        );
        machine.vmm.client.resume()?;
        let ticks = half.collected().matches("tick").count();
        half.wait_for(&format!("tick {}\n", ticks + 2))?;
    }
    // Every tick was written once and in order, whatever was in flight at the pauses.
    let text = half.collected().to_owned();
    for (index, line) in text.lines().enumerate() {
        ensure!(line == format!("tick {index}"), "line {index} is `{line}`");
    }
    Ok(())
}

fn guest(_: &[String]) -> Result<()> {
    let mut out = std::io::stdout();
    for tick in 0.. {
        writeln!(out, "tick {tick}")?;
        out.flush()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
