//! `kill -9` of the VMM or of `basalt` in mid-run: a clear word where somebody is left to say it, and nothing stays.
//! (That nothing stays is what the runner's look at the kernel before and after each case finds out.)

use std::io::Read;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal};

use crate::basalt::command;
use crate::{Case, Host};

pub(crate) const VMM: Case = Case {
    name: "kill-vmm",
    limit: Duration::from_secs(240),
    host: kill_vmm,
    guest: None,
};

pub(crate) const CLI: Case = Case {
    name: "kill-basalt",
    limit: Duration::from_secs(240),
    host: kill_cli,
    guest: None,
};

/// A sandbox that says that it is there and then waits; and its VMM's process.
fn start(host: &Host) -> Result<(Child, Pid)> {
    let mut child = command(
        host,
        &[
            "run",
            host.digest.as_str(),
            "--",
            "sh",
            "-c",
            "echo up; exec sleep 1000",
        ],
    )
    .stdin(Stdio::null())
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()?;
    let mut up = [0; 3];
    child.stdout.as_mut().context("no output")?.read_exact(&mut up)?;
    let vmm = child_of(child.id(), "basalt-vmm")?;
    Ok((child, vmm))
}

fn child_of(parent: u32, name: &str) -> Result<Pid> {
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|text| text.parse().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
            continue;
        };
        // pid (comm) state ppid ...
        let Some((head, tail)) = stat.rsplit_once(')') else {
            continue;
        };
        let its_parent = tail.split_whitespace().nth(1).and_then(|text| text.parse().ok());
        if its_parent == Some(parent) && head.ends_with(&format!("({name}")) {
            return Pid::from_raw(pid).context("process 0");
        }
    }
    bail!("process {parent} has no child called {name}")
}

fn kill_vmm(host: &Host) -> Result<()> {
    let (mut child, vmm) = start(host)?;
    rustix::process::kill_process(vmm, Signal::KILL)?;
    let began = Instant::now();
    let mut message = String::new();
    child
        .stderr
        .as_mut()
        .context("no standard error")?
        .read_to_string(&mut message)?;
    let status = child.wait()?;
    ensure!(status.code() == Some(125), "basalt ended with {status}: {message}");
    ensure!(message.contains("VMM"), "the message does not name the VMM: {message}");
    ensure!(
        began.elapsed() < Duration::from_secs(20),
        "it took {:?} to notice",
        began.elapsed()
    );
    Ok(())
}

fn kill_cli(host: &Host) -> Result<()> {
    let (mut child, vmm) = start(host)?;
    child.kill()?;
    child.wait()?;
    let deadline = Instant::now() + Duration::from_secs(20);
    while rustix::process::test_kill_process(vmm).is_ok() {
        ensure!(Instant::now() < deadline, "the VMM outlives the basalt that started it");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
