//! Many sandboxes made, run and removed, several at a time, as those do who run code for others: none fails, nothing is
//! left. Few of them, two at a time, unless `BASALT_CYCLES` says how many: then four at a time. A hundred take most of the
//! case's time.

use std::time::Duration;

use anyhow::{Result, bail, ensure};

use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "daemon-cycles",
    limit: Duration::from_secs(300),
    host: cycles,
    guest: None,
};

/// How many, and how many at the same time.
const CYCLES: (usize, usize) = (8, 2);

/// At the same time where `BASALT_CYCLES` says how many.
const MANY_AT_ONCE: usize = 4;

fn cycles(host: &Host) -> Result<()> {
    let wanted = std::env::var("BASALT_CYCLES").ok().and_then(|text| text.parse().ok());
    let (cycles, at_once) = wanted.map_or(CYCLES, |cycles| (cycles, MANY_AT_ONCE));
    let daemon = Daemon::new(host)?;
    let failures = std::thread::scope(|scope| {
        let worker = |worker: usize| {
            let daemon = &daemon;
            move || -> Result<()> {
                for number in (worker..cycles).step_by(at_once) {
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
        let workers: Vec<_> = (0..at_once).map(|number| scope.spawn(worker(number))).collect();
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
