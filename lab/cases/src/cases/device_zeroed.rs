//! A daemon that zeroes memory ahead: a sandbox with a device plugs that memory in huge pages, its device reaches all of it, a snapshot, a
//! clone and a rollback have what was in it, and what is zeroed for the next one has nothing of it. The host's IOMMU sees no fault.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::bare::{in_lab, run};
use super::dedicated::vmm_of;
use super::device_attach::{expect_state, prove_all};
use super::limits::{number, read, usage};
use super::nvme_disk::{Disk, tell};
use crate::basalt::expect_code;
use crate::daemon::{Daemon, wait_for};
use crate::kernel_log::{expect_no_dma_fault, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-zeroed",
    limit: std::time::Duration::from_secs(300),
    host,
    guest: None,
};

/// What is zeroed ahead, and what a sandbox plugs.
const ZEROED: u64 = 512 << 20;
const PIECE: u64 = 128 << 20;

/// Fills memory of a guest's, and says what is there.
const FILL: &str = "dd if=/dev/urandom of=/fill/x bs=1M count=64 2>/dev/null && sha256sum < /fill/x";
const LOOK: &str = "sha256sum < /fill/x";

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    run("modprobe", &["vfio-pci"])?;
    let address = Disk::find()?.address().to_owned();
    let daemon = Daemon::with_templates(host)?;
    let started = daemon
        .command(&["daemon"])
        .env("BASALT_ZEROED_MEMORY", "512m")
        .output()?;
    expect_code(&started, 0)?;
    is_ready(&daemon, 0)?;
    let mut log = kernel_log()?;
    daemon.ok(&["device", "bind", &address])?;
    one_that_gets_it(&daemon, &address)?;
    daemon.ok(&["rm", "--force", "web"])?;
    expect_state(&daemon, &address, "ready")?;
    is_ready(&daemon, ZEROED)?;
    // What the sandbox had is gone from there.
    let charged = charged_to_pieces(&daemon)?;
    ensure!(charged == ZEROED, "{charged} bytes are charged to what is ready");
    all_is_zeroes(&daemon)?;
    daemon.ok(&["device", "unbind", &address])?;
    expect_no_dma_fault(&mut log)?;
    daemon.end()
}

fn one_that_gets_it(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let words = [
        "run",
        "-d",
        "--name",
        "web",
        "--memory",
        "768m",
        "--boot-memory",
        "256m",
        "--memory-ready",
    ];
    let rest = [
        "--tmpfs",
        "/fill:size=400m",
        "--device",
        address,
        daemon.image(),
        "--",
        "sleep",
        "10000",
    ];
    daemon.ok(&[&words[..], &rest].concat())?;
    let told = zeroed(daemon)?;
    ensure!(told["handed_out"] == ZEROED, "{told}");
    let vmm = vmm_of(daemon, "web")?;
    let (shared, huge) = (
        of_shared_memory(vmm, "Rss:")?,
        of_shared_memory(vmm, "ShmemPmdMapped:")?,
    );
    tell(&format!(
        "the VMM has {} MiB that came zeroed, {} in huge pages",
        shared >> 20,
        huge >> 20
    ));
    ensure!(huge == ZEROED, "{huge} bytes are in huge pages");
    prove_all(daemon, "web", "7")?;
    counts(daemon, ZEROED, ZEROED)?;
    let content = daemon.ok(&["exec", "web", "sh", "-c", FILL])?;
    daemon.ok(&["snapshot", "create", "--detach-devices", "web", "full"])?;
    counts(daemon, 0, 0)?;
    ensure!(
        daemon.ok(&["exec", "web", "sh", "-c", LOOK])? == content,
        "it lost what it had"
    );
    daemon.ok(&["clone", "--name", "twin", "full"])?;
    ensure!(
        daemon.ok(&["exec", "twin", "sh", "-c", LOOK])? == content,
        "its clone has something else"
    );
    daemon.ok(&["rm", "--force", "twin"])?;
    prove_all(daemon, "web", "8")?;
    let other = daemon.ok(&["exec", "web", "sh", "-c", FILL])?;
    ensure!(other != content, "it has the same twice");
    daemon.ok(&["rollback", "--detach-devices", "web", "full"])?;
    ensure!(
        daemon.ok(&["exec", "web", "sh", "-c", LOOK])? == content,
        "the rollback has not brought back what was there"
    );
    prove_all(daemon, "web", "9")
}

/// `stats` has so much of a sandbox's memory that came zeroed, and its own cgroup may have so much less than `stats` has as its limit.
fn counts(daemon: &Daemon<'_>, zeroed: u64, less: u64) -> Result<()> {
    let usage = usage(daemon, "web")?;
    let (memory, limit) = (number(&usage, "/memory")?, number(&usage, "/memory_limit")?);
    let found = daemon.find("web")?.context("there is no `web`")?;
    let id = found["id"].as_str().context("it has no id")?;
    let of_cgroup = |name| -> Result<u64> { Ok(read(daemon, id, name)?.trim().parse()?) };
    let (own, most) = (of_cgroup("memory.current")?, of_cgroup("memory.max")?);
    tell(&format!(
        "web has {} MiB of {} MiB by `stats`, and its cgroup {} MiB of {} MiB",
        memory >> 20,
        limit >> 20,
        own >> 20,
        most >> 20
    ));
    let told = usage["memory_state"]["zeroed"].as_u64().unwrap_or(0);
    ensure!(told == zeroed && memory >= zeroed, "{usage}");
    ensure!(most + less == limit, "memory.max is {most}: {usage}");
    Ok(())
}

/// Bytes of pieces that are there, whoever has them.
fn charged_to_pieces(daemon: &Daemon<'_>) -> Result<u64> {
    let stat = read(daemon, "zeroed-memory", "memory.stat")?;
    let shared = stat.lines().find_map(|line| line.strip_prefix("shmem "));
    Ok(shared.context(stat.clone())?.parse()?)
}

fn zeroed(daemon: &Daemon<'_>) -> Result<Value> {
    let told: Value = serde_json::from_str(&daemon.ok(&["--json", "daemon"])?)?;
    Ok(told["zeroed_memory"].clone())
}

/// Waits until all of it is, when so much was given away.
fn is_ready(daemon: &Daemon<'_>, handed_out: u64) -> Result<()> {
    let mut told = Value::Null;
    let waited = wait_for("memory to be zeroed", || {
        std::thread::sleep(std::time::Duration::from_millis(500));
        told = zeroed(daemon)?;
        Ok(told["ready"] == ZEROED)
    });
    waited.with_context(|| told.to_string())?;
    ensure!(told["handed_out"] == handed_out, "{told}");
    Ok(())
}

/// What a process has mapped of files on tmpfs in pieces of their size, by a line of proc_pid_smaps(5).
fn of_shared_memory(process: u64, name: &str) -> Result<u64> {
    let smaps = fs::read_to_string(format!("/proc/{process}/smaps"))?;
    let (mut sum, mut is_piece) = (0, false);
    for line in smaps.lines() {
        if line.contains("-") && line.contains(" rw-s ") {
            let (start, rest) = line.split_once('-').context("a range")?;
            let end = rest.split(' ').next().unwrap_or_default();
            let size = u64::from_str_radix(end, 16)? - u64::from_str_radix(start, 16)?;
            is_piece = size % PIECE == 0;
        } else if line.contains("-p ") || line.contains(" r--s ") {
            is_piece = false;
        } else if let Some(rest) = line.strip_prefix(name).filter(|_| is_piece) {
            let kib = rest.trim().trim_end_matches("kB").trim();
            sum += kib.parse::<u64>()? << 10;
        }
    }
    Ok(sum)
}

/// What is ready for the next one, as the daemon has it open.
fn all_is_zeroes(daemon: &Daemon<'_>) -> Result<()> {
    let told: Value = serde_json::from_str(&daemon.ok(&["--json", "daemon"])?)?;
    let open = Path::new("/proc").join(told["pid"].to_string()).join("fd");
    let (mut pieces, mut part) = (0, vec![0; 1 << 20]);
    for entry in fs::read_dir(&open)? {
        let path = entry?.path();
        if !fs::metadata(&path).is_ok_and(|found| found.is_file() && found.len() == PIECE) {
            continue;
        }
        pieces += 1;
        let mut file = File::open(&path)?;
        while let count @ 1.. = file.read(&mut part)? {
            let read = part.get(..count).unwrap_or_default();
            ensure!(read.iter().all(|byte| *byte == 0), "{} is not zeroed", path.display());
        }
    }
    ensure!(pieces == ZEROED / PIECE, "the daemon has {pieces} pieces open");
    Ok(())
}
