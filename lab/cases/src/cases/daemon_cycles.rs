//! Many sandboxes made, run and removed, four at a time, as those do who run code for others: none fails, nothing is left.

use std::time::Duration;

use anyhow::{Result, bail, ensure};

use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "daemon-cycles",
    limit: Duration::from_secs(1200),
    host: cycles,
    guest: None,
};

/// At the same time.
const AT_ONCE: usize = 4;

/// How many, unless `BASALT_CYCLES` says otherwise. The 100 take minutes.
const CYCLES: usize = 12;

fn cycles(host: &Host) -> Result<()> {
    let wanted = std::env::var("BASALT_CYCLES").ok().and_then(|text| text.parse().ok());
    let cycles: usize = wanted.unwrap_or(CYCLES);
    let daemon = Daemon::new(host)?;
    let failures = std::thread::scope(|scope| {
        let worker = |worker: usize| {
            let daemon = &daemon;
            move || -> Result<()> {
                for number in (worker..cycles).step_by(AT_ONCE) {
                    let script = format!("echo {number}; touch /written");
                    let words = [
                        "run",
                        "--memory",
                        "128m",
                        host.digest.as_str(),
                        "--",
                        "sh",
                        "-c",
                        script.as_str(),
                    ];
                    let printed = daemon.ok(&words)?;
                    ensure!(printed == format!("{number}\n"), "cycle {number} printed {printed:?}");
                }
                Ok(())
            }
        };
        let workers: Vec<_> = (0..AT_ONCE).map(|number| scope.spawn(worker(number))).collect();
        let results = workers.into_iter().map(|worker| worker.join());
        results
            .filter_map(|result| match result {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(format!("{error:#}")),
                Err(_) => Some("a worker panicked".to_owned()),
            })
            .collect::<Vec<_>>()
    });
    if !failures.is_empty() {
        bail!("{}", failures.join("\n"));
    }
    ensure!(daemon.list()?.is_empty(), "a sandbox stays");
    daemon.expect_no_strangers(&[])?;
    daemon.end()
}
