//! The first sandbox of a kind boots a kernel, the next ones are cloned of it: they run what they are asked to, as whom, where
//! and within which limits they are asked to, and no two of them are the same machine.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::network::{WORLD4, World};
use crate::basalt::expect_code;
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "templates",
    limit: Duration::from_secs(600),
    host,
    guest: None,
};

/// What must differ from one machine to the other: a line each.
const IDENTITY: &str = "cat /proc/sys/kernel/random/boot_id /etc/machine-id; hostname; \
                        head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n'; echo; \
                        python3 -c 'import os; print(os.getrandom(32).hex())'";

/// How many are cloned one after the other.
const CLONES: usize = 5;

fn host(host: &Host) -> Result<()> {
    let world = World::new()?;
    let _server = world.serve(&["[::]:7000"])?;
    let daemon = Daemon::new(host)?;
    let image = host.digest.as_str();
    let run = |options: &[&str], command: &[&str]| {
        let words = [&["run", "--memory", "128m"], options, &[image, "--"], command].concat();
        daemon.run(&words)
    };
    let first = run(&["-d", "--name", "first"], &["sleep", "10000"])?;
    expect_code(&first, 0)?;
    let template = daemon.wait_for_templates(1)?.remove(0);
    let of = template_of(&daemon, "first")?;
    ensure!(of.is_none(), "the first sandbox was cloned of {of:?}");

    let mut said = vec![daemon.ok(&["exec", "first", "sh", "-c", IDENTITY])?];
    for _ in 0..CLONES {
        let output = run(&["--trace"], &["sh", "-c", IDENTITY])?;
        expect_code(&output, 0)?;
        said.push(String::from_utf8(output.stdout)?);
        let trace = String::from_utf8_lossy(&output.stderr);
        ensure!(
            trace.contains("VM restored") && !trace.contains("guest boots"),
            "it was no clone: {trace}"
        );
    }
    differ(&said)?;

    // What is asked for counts, not what the first one was asked for.
    let options = [
        "--env",
        "A=1",
        "--workdir",
        "/tmp",
        "--user",
        "65534",
        "--pids-limit",
        "33",
        "--hostname",
        "other",
    ];
    let script = "echo $A; pwd; id -u; hostname; echo err >&2; exit 7";
    let output = run(
        &[&["-d", "--name", "asked"], options.as_slice()].concat(),
        &["sleep", "10000"],
    )?;
    expect_code(&output, 0)?;
    let limit = daemon.ok(&["exec", "--user", "0", "asked", "cat", "/sys/fs/cgroup/basalt/pids.max"])?;
    ensure!(limit == "33\n", "its processes' limit is {limit:?}");
    let output = run(&options, &["sh", "-c", script])?;
    ensure!(output.status.code() == Some(7), "it ended as {:?}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(text == "1\n/tmp\n65534\nother\n", "it says {text:?}");
    ensure!(
        output.stderr == b"err\n",
        "it complains {:?}",
        String::from_utf8_lossy(&output.stderr)
    );
    let output = run(&[], &["no-such-program"])?;
    ensure!(
        output.status.code() == Some(127),
        "a missing program ends as {:?}",
        output.status
    );

    let of = template_of(&daemon, "asked")?;
    ensure!(of.as_ref() == Some(&template), "it was cloned of {of:?}");

    // Disk and network are its own.
    daemon.ok(&[
        "exec",
        "--user",
        "0",
        "asked",
        "sh",
        "-c",
        "echo mine > /etc/mine && sync",
    ])?;
    let seen = daemon.run(&["exec", "first", "test", "-e", "/etc/mine"])?;
    ensure!(seen.status.code() == Some(1), "another sandbox has its file");
    let outwards = "import socket, sys\ns = socket.create_connection((sys.argv[1], 7000), 20)\nprint('connected')\n";
    let connected = daemon.ok(&["exec", "asked", "python3", "-c", outwards, WORLD4])?;
    ensure!(connected == "connected\n", "it reaches the world as {connected:?}");
    // Started again it boots, with what it has written and who it was.
    let id = daemon.ok(&["exec", "asked", "cat", "/etc/machine-id"])?;
    daemon.ok(&["kill", "asked"])?;
    daemon.ok(&["start", "asked"])?;
    let after = daemon.ok(&["exec", "asked", "cat", "/etc/machine-id", "/etc/mine"])?;
    ensure!(
        after == format!("{id}mine\n"),
        "after a restart it says {after:?}, before {id:?}"
    );
    let of = template_of(&daemon, "asked")?;
    ensure!(of.is_none(), "after a restart it is a clone of {of:?}");

    // A clone of a clone, and what was cut short is no use to anybody.
    expect_code(&run(&["-d", "--name", "second"], &["sleep", "10000"])?, 0)?;
    daemon.ok(&["snapshot", "create", "second", "kept"])?;
    daemon.ok(&["clone", "--name", "third", "kept"])?;
    daemon.ok(&["exec", "third", "true"])?;
    let state = daemon.state.join("templates").join(&template).join("state");
    std::fs::OpenOptions::new().write(true).open(&state)?.set_len(100)?;
    expect_code(&run(&["-d", "--name", "booted"], &["sleep", "10000"])?, 0)?;
    let of = template_of(&daemon, "booted")?;
    ensure!(of.is_none(), "it was cloned of a damaged template, {of:?}");
    daemon.wait_for_templates(1)?;
    for name in ["first", "asked", "second", "third", "booted"] {
        daemon.ok(&["exec", name, "true"])?;
        daemon.ok(&["rm", "--force", name])?;
    }
    daemon.end()
}

fn inspect(daemon: &Daemon<'_>, name: &str) -> Result<Value> {
    let mut found: Vec<Value> = serde_json::from_str(&daemon.ok(&["--json", "inspect", name])?)?;
    found.pop().context("nothing is known of it")
}

fn template_of(daemon: &Daemon<'_>, name: &str) -> Result<Option<String>> {
    Ok(inspect(daemon, name)?["template"].as_str().map(str::to_owned))
}

/// No line is said twice.
fn differ(said: &[String]) -> Result<()> {
    let all: Vec<&str> = said.iter().flat_map(|said| said.lines()).collect();
    ensure!(all.len() == 5 * said.len(), "not everybody says five lines: {said:?}");
    let different: BTreeSet<_> = all.iter().collect();
    ensure!(all.len() == different.len(), "something is said twice: {said:?}");
    Ok(())
}
