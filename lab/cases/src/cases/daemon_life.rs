//! Sandboxes with a life of their own: every verb once, on a daemon of the case's own.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::basalt::{expect_code, expect_refusal};
use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const LIFE: Case = Case {
    name: "daemon-life",
    limit: Duration::from_secs(300),
    host: life,
    guest: None,
};

pub(crate) const ADOPTION: Case = Case {
    name: "daemon-adoption",
    limit: Duration::from_secs(300),
    host: adoption,
    guest: None,
};

const SCRIPT: &str = "echo hello; echo trouble >&2; trap 'echo bye; exit 4' TERM; touch /kept; \
                      while :; do sleep 0.1; done";

fn life(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let image = host.digest.as_str();
    let run = [
        "run", "-d", "--name", "web", "--memory", "128m", image, "--", "sh", "-c", SCRIPT,
    ];
    let id = daemon.ok(&run)?.trim().to_owned();
    expect_refusal(&daemon.run(&run)?, 125, &["`web` is taken by sandbox", &id])?;
    let listed = daemon.ok(&["ps"])?;
    ensure!(listed.contains(&id) && listed.contains("running"), "ps shows {listed}");

    can_open_many_files(&daemon)?;

    // Several commands at once, and the sandbox's own environment and directory.
    let mut sleeper = daemon.start(&["exec", "web", "sleep", "10000"])?;
    expect_code(&daemon.run(&["exec", "web", "sh", "-c", "exit 5"])?, 5)?;
    expect_code(&daemon.run(&["exec", "web", "no-such-program"])?, 127)?;
    let host_name = daemon.ok(&[
        "exec",
        "-w",
        "/usr",
        "-e",
        "A=b",
        &id,
        "sh",
        "-c",
        "cat /etc/hostname; pwd; echo $A",
    ])?;
    ensure!(host_name == format!("{id}\n/usr\nb\n"), "exec printed {host_name:?}");

    let logs = daemon.run(&["logs", "web"])?;
    ensure!(
        logs.stdout == b"hello\n" && logs.stderr == b"trouble\n",
        "logs are {logs:?}"
    );
    let stats: serde_json::Value = serde_json::from_str(&daemon.ok(&["--json", "stats", "--no-stream", "web"])?)?;
    let usage = &stats[0]["usage"];
    ensure!(
        usage["memory"].as_u64() > Some(10 << 20) && usage["cpu_usec"].as_u64() > Some(0),
        "stats are {usage}"
    );

    daemon.ok(&["pause", "web"])?;
    expect_refusal(
        &daemon.run(&["exec", "web", "true"])?,
        125,
        &["web is paused", "basalt unpause"],
    )?;
    daemon.ok(&["unpause", "web"])?;
    expect_code(&daemon.run(&["exec", "web", "true"])?, 0)?;

    expect_refusal(&daemon.run(&["rm", "web"])?, 1, &["web is running", "--force"])?;
    daemon.ok(&["stop", "--time", "30s", "web"])?;
    ensure!(sleeper.wait()?.code() != Some(0), "a command outlived its sandbox");
    expect_refusal(
        &daemon.run(&["exec", "web", "true"])?,
        125,
        &["web is exited", "basalt start"],
    )?;
    ensure!(daemon.ok(&["wait", "web"])? == "4\n", "its command's exit code is lost");
    let logs = daemon.run(&["logs", "web"])?;
    ensure!(logs.stdout == b"hello\nbye\n", "logs are {logs:?}");

    // What it has written is still there; its log goes on.
    daemon.ok(&["start", "web"])?;
    expect_code(&daemon.run(&["exec", "web", "test", "-e", "/kept"])?, 0)?;
    daemon.ok(&["kill", "web"])?;
    ensure!(daemon.ok(&["wait", "web"])? == "137\n", "a killed one's exit code");
    daemon.ok(&["rm", "web"])?;
    expect_refusal(&daemon.run(&["inspect", "web"])?, 1, &["no sandbox `web`", "basalt ps"])?;

    // One that ends by itself and goes by itself.
    daemon.ok(&[
        "run",
        "-d",
        "--rm",
        "--memory",
        "128m",
        image,
        "--",
        "sh",
        "-c",
        "sleep 0.5",
    ])?;
    wait_for("a sandbox to remove itself", || Ok(daemon.list()?.is_empty()))?;
    daemon.end()
}

/// The daemon has raised its soft limit of open files, which it has from us, to the hard one.
fn can_open_many_files(daemon: &Daemon<'_>) -> Result<()> {
    let limits = |of: &str| -> Result<(String, String)> {
        let text = std::fs::read_to_string(format!("/proc/{of}/limits"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("Max open files"));
        let mut words = line.unwrap_or_default().split_whitespace().map(str::to_owned);
        words.next().zip(words.next()).context("no limit of open files")
    };
    let (soft, hard) = limits("self")?;
    ensure!(
        soft != hard,
        "its parent's limits of {hard} are equal, which shows nothing"
    );
    let processes = daemon.processes("basaltd")?;
    ensure!(!processes.is_empty(), "no daemon runs");
    for process in processes {
        let found = limits(&process.as_raw_nonzero().to_string())?;
        ensure!(
            found == (hard.clone(), hard.clone()),
            "the daemon's limits are {found:?}"
        );
    }
    Ok(())
}

fn adoption(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let image = host.digest.as_str();
    let count = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done";
    let ends = "until test -e /go; do sleep 0.1; done; sleep 2; echo last words; exit 9";
    let first = daemon.ok(&[
        "run", "-d", "--name", "counts", "--memory", "128m", image, "--", "sh", "-c", count,
    ])?;
    let second = daemon.ok(&[
        "run", "-d", "--name", "ends", "--memory", "128m", image, "--", "sh", "-c", ends,
    ])?;
    let third = daemon.idle("dies")?;
    let mut attached = daemon.start(&["run", "--memory", "128m", image, "--", "sh", "-c", "sleep 8; echo on"])?;
    let running = || -> Result<usize> {
        Ok(daemon
            .list()?
            .iter()
            .filter(|found| found["state"] == "running")
            .count())
    };
    wait_for("four sandboxes", || Ok(running()? == 4))?;
    // The attached one's client needs a moment to start its command.
    std::thread::sleep(Duration::from_secs(1));
    daemon.ok(&["exec", "ends", "touch", "/go"])?;
    daemon.kill()?;
    // While no daemon runs: one goes on counting, one ends by itself, the VMM of one is killed.
    for pid in daemon.processes("basalt-vmm")? {
        let cgroup = std::fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_nonzero()))?;
        if cgroup.contains(third.trim()) {
            crate::daemon::kill(pid)?;
        }
    }
    std::thread::sleep(Duration::from_secs(5));

    let state = |name: &str| -> Result<String> {
        let found = daemon.find(name)?.with_context(|| format!("{name} is gone"))?;
        Ok(found["state"].as_str().unwrap_or_default().to_owned())
    };
    ensure!(
        state("counts")? == "running",
        "the one that counts is {}",
        state("counts")?
    );
    let lines = |text: &str| {
        text.lines()
            .filter_map(|line| line.parse::<u64>().ok())
            .collect::<Vec<_>>()
    };
    let numbers = lines(&daemon.ok(&["logs", "counts"])?);
    ensure!(
        numbers.len() > 20 && numbers.iter().zip(1..).all(|(found, wanted)| *found == wanted),
        "its log has a hole: {numbers:?}"
    );
    expect_code(&daemon.run(&["exec", "counts", "true"])?, 0)?;
    wait_for("the end that nobody saw", || Ok(state("ends")? == "exited"))?;
    ensure!(daemon.ok(&["wait", "ends"])? == "9\n", "its exit code is lost");
    ensure!(
        daemon.ok(&["logs", "ends"])? == "last words\n",
        "its last words are lost"
    );
    let dead = daemon.find("dies")?.context("gone")?;
    ensure!(
        dead["state"] == "exited" && dead["ended"]["failed"].is_string(),
        "the one whose VMM was killed is {dead}"
    );
    // A client that is attached speaks with the guest past the daemon.
    let output = attached.wait_with_output_and_text()?;
    ensure!(output == "on\n", "an attached command printed {output:?}");
    wait_for("its sandbox to go", || Ok(daemon.list()?.len() == 3))?;
    daemon.expect_no_strangers(&[first.trim(), second.trim(), third.trim()])?;
    daemon.end()
}

trait Text {
    fn wait_with_output_and_text(&mut self) -> Result<String>;
}

impl Text for std::process::Child {
    fn wait_with_output_and_text(&mut self) -> Result<String> {
        let mut text = String::new();
        std::io::Read::read_to_string(self.stdout.as_mut().context("no output")?, &mut text)?;
        self.wait()?;
        Ok(text)
    }
}
