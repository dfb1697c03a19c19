//! `kill -9` of the VMM or of `basalt` in mid-run: a clear word where somebody is left to say it, and nothing stays.
//! (That nothing stays is what the runner's look at the kernel before and after each case finds out.)

use std::io::Read;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
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
    Ok((child, newest("basalt-vmm")?))
}

/// The process of this name that was started last.
fn newest(name: &str) -> Result<Pid> {
    let mut found = None;
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|text| text.parse::<i32>().ok()) else {
            continue;
        };
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if comm.trim_end() == name {
            found = found.max(Some(pid));
        }
    }
    found
        .and_then(Pid::from_raw)
        .with_context(|| format!("there is no process {name}"))
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
