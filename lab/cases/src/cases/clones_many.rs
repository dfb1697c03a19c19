//! Many clones of one snapshot, some at a time: none of them says what another has said, by its names, by its kernel's
//! generator, or by a process that was running when the snapshot was taken. Few, unless `BASALT_CLONES` says how many.

use std::collections::HashMap;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "clones-many",
    limit: Duration::from_secs(900),
    host,
    guest: None,
};

/// A thousand take an hour of the lab beside other work, and `--patience 6`.
const FEW: usize = 6;

/// At the same time.
const TOGETHER: usize = 3;

/// Runs when the snapshot is taken, and draws as soon as it is told to.
const RUNNING: &str = "import os, time\nopen('/tmp/ready', 'w').close()\nwhile not os.path.exists('/tmp/go'):\n \
                       time.sleep(0.2)\nwith open('/tmp/new', 'w') as f:\n f.write(os.getrandom(32).hex() + chr(10))\n\
                       os.rename('/tmp/new', '/tmp/said')\ntime.sleep(100000)\n";

/// What must differ from clone to clone: a line each, named.
const SAID: &str = "touch /tmp/go; d() { od -An -v -tx1 | tr -d ' \\n'; echo; }; \
                    echo boot_id $(cat /proc/sys/kernel/random/boot_id); echo machine_id $(cat /etc/machine-id); \
                    echo hostname $(hostname); echo urandom $(head -c 32 /dev/urandom | d); \
                    echo uuid $(cat /proc/sys/kernel/random/uuid); \
                    while [ ! -e /tmp/said ]; do sleep 0.05; done; echo running $(cat /tmp/said)";

const NAMES: [&str; 6] = ["boot_id", "machine_id", "hostname", "urandom", "uuid", "running"];

fn host(host: &Host) -> Result<()> {
    let wanted = std::env::var("BASALT_CLONES").ok().and_then(|text| text.parse().ok());
    let count: usize = wanted.unwrap_or(FEW);
    let daemon = Daemon::with_templates(host)?;
    let image = host.digest.as_str();
    daemon.ok(&[
        "run", "-d", "--name", "origin", "--memory", "128m", image, "--", "python3", "-c", RUNNING,
    ])?;
    wait_for("the process", || {
        Ok(daemon.ok(&["exec", "origin", "test", "-e", "/tmp/ready"]).is_ok())
    })?;
    daemon.ok(&["snapshot", "create", "origin", "kept"])?;
    let mut said: HashMap<String, String> = HashMap::new();
    let began = Instant::now();
    hear(&daemon, "origin", &mut said)?;
    daemon.ok(&["rm", "--force", "origin"])?;
    let names: Vec<String> = (0..count).map(|number| format!("clone-{number}")).collect();
    for some in names.chunks(TOGETHER) {
        for name in some {
            daemon.ok(&["clone", "--name", name, "kept"])?;
        }
        for name in some {
            hear(&daemon, name, &mut said)?;
        }
        let remove: Vec<&str> = ["rm", "--force"]
            .into_iter()
            .chain(some.iter().map(String::as_str))
            .collect();
        daemon.ok(&remove)?;
    }
    ensure!(
        said.len() == (count + 1) * NAMES.len(),
        "{} things were said",
        said.len()
    );
    writeln!(
        std::io::stdout(),
        "{count} clones have said {} different things in {:?}",
        said.len(),
        began.elapsed()
    )?;
    daemon.ok(&["snapshot", "rm", "kept"])?;
    daemon.end()
}

/// Has one say all that must be its own.
fn hear(daemon: &Daemon<'_>, name: &str, said: &mut HashMap<String, String>) -> Result<()> {
    let text = daemon.ok(&["exec", name, "sh", "-c", SAID])?;
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    let names: Vec<&str> = lines.iter().map(|(what, _)| *what).collect();
    ensure!(names == NAMES, "{name} says {text:?}");
    for (what, value) in lines {
        ensure!(value.len() >= 6, "{name} says {what} {value:?}");
        if let Some(other) = said.insert(value.to_owned(), format!("{name}'s {what}")) {
            bail!("{name}'s {what} is {value}, and so is {other}");
        }
    }
    Ok(())
}
