//! When sandboxes get the devices that they are started with, and the memory that they do not boot with: by every policy a device reaches all
//! that its guest has, commands wait for what they are to wait for, and memory becomes more and less while a sandbox is there, over a
//! snapshot, a clone and a daemon that was killed. The host's IOMMU sees no fault.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::bare::{in_lab, run};
use super::device_attach::{expect_state, prove, prove_all};
use super::nvme_disk::{Disk, tell};
use crate::basalt::{expect_code, expect_refusal};
use crate::daemon::{Daemon, wait_for};
use crate::kernel_log::{expect_no_dma_fault, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-start",
    limit: Duration::from_secs(400),
    host,
    guest: None,
};

/// The same without a device, of sandboxes that go on from a template.
pub(crate) const OF_TEMPLATE: Case = Case {
    name: "memory-template",
    limit: Duration::from_secs(400),
    host: of_one_template,
    guest: None,
};

const MIB: u64 = 1 << 20;

/// What a guest's kernel keeps for itself, at most: tables of its memory, and itself.
const KERNEL: u64 = 96 * MIB;

/// What is mapped of a guest that boots with 256 MiB and is to have 1050: whole pieces of what is plugged.
const MAPPED: u64 = 1152 * MIB;

/// Says when there is a disk, if ever.
const DISK: [&str; 3] = ["test", "-b", "/dev/nvme0n1"];

fn host(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    memory_that_comes_and_goes(&daemon)?;
    if in_lab()? {
        with_a_device(&daemon)?;
    }
    daemon.end()
}

fn with_a_device(daemon: &Daemon<'_>) -> Result<()> {
    run("modprobe", &["vfio-pci"])?;
    let address = Disk::find()?.address().to_owned();
    let mut log = kernel_log()?;
    daemon.ok(&["device", "bind", &address])?;
    wrong_policies(daemon, &address)?;
    eager(daemon, &address)?;
    late(daemon, &address)?;
    asynchronous(daemon, &address)?;
    ballooned(daemon, &address)?;
    expect_state(daemon, &address, "ready")?;
    daemon.ok(&["device", "unbind", &address])?;
    expect_no_dma_fault(&mut log)?;
    Ok(())
}

fn wrong_policies(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let image = daemon.image();
    for (words, said) in [
        (vec!["--device-start", "late"], "--device ADDRESS"),
        (vec!["--device", address, "--device-start", "soon"], "async"),
        (
            vec!["--device", address, "--device-start", "lazy", "--class", "bare"],
            "--class bare",
        ),
        (
            vec!["--device", address, "--boot-memory", "2g", "--memory", "1g"],
            "--boot-memory",
        ),
    ] {
        let refused = daemon.run(&[&["run"], &words[..], &[image, "--", "true"]].concat())?;
        ensure!(!refused.status.success(), "{words:?} was not refused");
        let told = String::from_utf8_lossy(&refused.stderr);
        ensure!(told.contains(said), "{words:?}: {told}");
    }
    Ok(())
}

/// All is mapped, and the device there, before the guest's first instruction.
fn eager(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let words = [
        "run",
        "--boot",
        "--memory",
        "256m",
        "--device",
        address,
        "--device-start",
        "eager",
    ];
    expect_code(&daemon.run(&[&words[..], &[daemon.image(), "--"], &DISK].concat())?, 0)?;
    Ok(())
}

/// The command is there before the device.
fn late(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let began = Instant::now();
    daemon.ok(&[
        "run",
        "-d",
        "--name",
        "late",
        "--memory",
        "768m",
        "--device",
        address,
        "--device-start",
        "late",
        daemon.image(),
        "--",
        "sleep",
        "10000",
    ])?;
    let started = began.elapsed();
    wait_for("the device to come", || {
        let run = daemon.run(&[&["exec", "late"], &DISK[..]].concat())?;
        Ok(run.status.success())
    })?;
    tell(&format!(
        "late, 768 MiB: started within {started:?}, the device {:?}",
        began.elapsed()
    ));
    prove_all(daemon, "late", "7")?;
    daemon.ok(&["rm", "--force", "late"])?;
    expect_state(daemon, address, "ready")
}

/// The command has the device, and memory follows; with `--memory-ready` it has both.
fn asynchronous(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let memory = ["--memory", "1050m", "--boot-memory", "256m", "--device", address];
    let ready = [
        &["run", "--memory-ready"],
        &memory[..],
        &[daemon.image(), "--", "cat", "/proc/meminfo"],
    ]
    .concat();
    let seen = total(&daemon.ok(&ready)?)?;
    ensure!(
        seen >= 1050 * MIB - KERNEL,
        "a command that waits for its memory sees {seen} bytes"
    );
    let began = Instant::now();
    let words = [
        &["run", "-d", "--name", "grows"],
        &memory[..],
        &[daemon.image(), "--", "sleep", "10000"],
    ];
    daemon.ok(&words.concat())?;
    let started = began.elapsed();
    is_of_a_template(daemon, "grows")?;
    expect_code(&daemon.run(&[&["exec", "grows"], &DISK[..]].concat())?, 0)?;
    // The daemon that follows it goes on with what is under way.
    daemon.kill()?;
    has_all(daemon, "grows", 1050 * MIB)?;
    tell(&format!(
        "async, 1050 MiB: started within {started:?}, all memory {:?}",
        began.elapsed()
    ));
    let state = memory_state(daemon, "grows")?;
    ensure!(
        state["dma_mapped"] == state["dma_total"] && state["dma_total"] == MAPPED && state["plug_misses"] == 0,
        "not all is mapped, or a plug has waited: {state}"
    );
    prove_all(daemon, "grows", "8")?;
    daemon.ok(&["update", "grows", "--memory", "256m"])?;
    prove(daemon, "grows", "9")?;
    daemon.ok(&["update", "grows", "--memory", "1g"])?;
    has_all(daemon, "grows", 1024 * MIB)?;
    prove(daemon, "grows", "10")?;
    daemon.ok(&["stop", "--time", "1s", "grows"])?;
    daemon.ok(&["start", "grows"])?;
    expect_code(&daemon.run(&[&["exec", "grows"], &DISK[..]].concat())?, 0)?;
    has_all(daemon, "grows", 1024 * MIB)?;
    daemon.ok(&["rm", "--force", "grows"])?;
    Ok(())
}

/// The guest has all its memory from the start; what is not mapped is in its balloon when the device comes, and leaves it as it is mapped.
fn ballooned(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    let began = Instant::now();
    let words = [
        &[
            "run",
            "-d",
            "--name",
            "full",
            "--memory",
            "768m",
            "--boot-memory",
            "256m",
        ][..],
        &["--device", address, "--device-start", "async-balloon"],
        &[daemon.image(), "--", "sleep", "10000"],
    ];
    daemon.ok(&words.concat())?;
    let started = began.elapsed();
    expect_code(&daemon.run(&[&["exec", "full"], &DISK[..]].concat())?, 0)?;
    prove_all(daemon, "full", "11")?;
    wait_for("all of the guest's memory to be mapped, and out of its balloon", || {
        let (state, counters) = (
            memory_state(daemon, "full")?,
            daemon.ok(&["exec", "full", "cat", "/proc/vmstat"])?,
        );
        let count = |name: &str| -> Option<u64> {
            counters
                .lines()
                .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
        };
        let (inflated, deflated) = (count("balloon_inflate "), count("balloon_deflate "));
        ensure!(
            state["fell_back"] != true,
            "the guest has not filled its balloon: {state}"
        );
        // Pages of 4 KiB: all but what it boots with were in it.
        ensure!(inflated >= Some(512 << 8), "{inflated:?} pages were in the balloon");
        Ok(deflated == inflated && state["dma_mapped"] == 768 * MIB)
    })?;
    tell(&format!(
        "async-balloon, 768 MiB: started within {started:?}, all memory {:?}",
        began.elapsed()
    ));
    let seen = total(&daemon.ok(&["exec", "full", "cat", "/proc/meminfo"])?)?;
    ensure!(seen >= 768 * MIB - KERNEL, "the guest has {seen} bytes");
    prove(daemon, "full", "12")?;
    daemon.ok(&["rm", "--force", "full"])?;
    Ok(())
}

fn memory_that_comes_and_goes(daemon: &Daemon<'_>) -> Result<()> {
    let image = daemon.image();
    daemon.ok(&[
        "run",
        "-d",
        "--name",
        "web",
        "--memory",
        "256m",
        "--max-memory",
        "512m",
        image,
        "--",
        "sleep",
        "10000",
    ])?;
    expect_refusal(
        &daemon.run(&["update", "web", "--memory", "1g"])?,
        1,
        &["256 MiB to 512 MiB"],
    )?;
    daemon.ok(&["update", "web", "--memory", "512m"])?;
    has_all(daemon, "web", 512 * MIB)?;
    // A clone has what the guest had, and a region of its own.
    daemon.ok(&["snapshot", "create", "web", "large"])?;
    daemon.ok(&["clone", "--name", "copy", "large"])?;
    has_all(daemon, "copy", 512 * MIB)?;
    daemon.ok(&["update", "copy", "--memory", "384m"])?;
    daemon.kill()?;
    let seen = total(&daemon.ok(&["exec", "web", "cat", "/proc/meminfo"])?)?;
    ensure!(seen >= 512 * MIB - KERNEL, "the snapshot's sandbox has {seen} bytes");
    daemon.ok(&["rm", "--force", "copy"])?;
    daemon.ok(&["snapshot", "rm", "large"])?;
    daemon.ok(&["rm", "--force", "web"])?;
    Ok(())
}

/// What boots with as much as one before has no kernel of its own, however much it is to have: it is a clone of a template, whose region of
/// memory is larger than what any of them can plug. So are its snapshots whole: what it has plugged is in none of the template's files.
fn of_one_template(host: &Host) -> Result<()> {
    let owned = Daemon::with_templates(host)?;
    let daemon = &owned;
    let run = |name: &str, memory: &str| {
        let words = [
            "run",
            "-d",
            "--memory-ready",
            "--boot-memory",
            "256m",
            "--tmpfs",
            "/t:size=600m",
            "--name",
            name,
        ];
        let command = ["--memory", memory, daemon.image(), "--", "sleep", "10000"];
        daemon.ok(&[&words[..], &command].concat()).map(drop)
    };
    wait_for("a template with memory that can be plugged", || {
        run("seed", "512m")?;
        let template = shown(daemon, "seed")?["template"].clone();
        daemon.ok(&["rm", "--force", "seed"])?;
        Ok(template.is_string())
    })?;
    for (name, memory, bytes) in [("half", "384m", 384 * MIB), ("more", "1g", 1024 * MIB)] {
        let began = Instant::now();
        run(name, memory)?;
        let ready = began.elapsed();
        is_of_a_template(daemon, name)?;
        let seen = total(&daemon.ok(&["exec", name, "cat", "/proc/meminfo"])?)?;
        ensure!(
            seen >= bytes - KERNEL,
            "a clone of a template with {bytes} bytes has {seen}"
        );
        tell(&format!("of a template, {memory}: all memory there within {ready:?}"));
    }
    // It uses all that it has plugged, and finds it again in its snapshot.
    let fill = "head -c 16000000 /dev/urandom > /t/0; for i in $(seq 24); do cp /t/0 /t/$i || exit 1; done; cksum /t/0";
    let look = "for i in $(seq 24); do cmp /t/0 /t/$i || exit 1; done; cksum /t/0";
    let sum = daemon.ok(&["exec", "more", "sh", "-c", fill])?;
    daemon.ok(&["snapshot", "create", "more", "full"])?;
    daemon.ok(&["exec", "more", "sh", "-c", "rm /t/*"])?;
    daemon.ok(&["clone", "--name", "copy", "full"])?;
    has_all(daemon, "copy", 1024 * MIB)?;
    daemon.ok(&["rollback", "more", "full"])?;
    for name in ["copy", "more"] {
        let again = daemon.ok(&["exec", name, "sh", "-c", look])?;
        ensure!(again == sum, "{name} has {again} where there was {sum}");
    }
    daemon.ok(&["exec", "more", "sh", "-c", "rm /t/*"])?;
    daemon.ok(&["update", "more", "--memory", "256m"])?;
    daemon.kill()?;
    daemon.ok(&["exec", "more", "true"])?;
    for name in ["half", "more", "copy"] {
        daemon.ok(&["rm", "--force", name])?;
    }
    daemon.ok(&["snapshot", "rm", "full"])?;
    owned.end()
}

fn is_of_a_template(daemon: &Daemon<'_>, sandbox: &str) -> Result<()> {
    let template = &shown(daemon, sandbox)?["template"];
    ensure!(template.is_string(), "{sandbox} has booted a kernel: {template}");
    Ok(())
}

/// Waits until a guest has so much memory.
pub(super) fn has_all(daemon: &Daemon<'_>, sandbox: &str, bytes: u64) -> Result<()> {
    wait_for("a guest to have all of its memory", || {
        let state = memory_state(daemon, sandbox)?;
        // A VMM that is asked by another now tells nothing.
        if state.is_null() {
            return Ok(false);
        }
        ensure!(state["target"] == bytes, "{sandbox} is to have something else: {state}");
        Ok(state["present"] == bytes)
    })?;
    // What is plugged last is online a moment later.
    wait_for("a guest to use all of its memory", || {
        Ok(total(&daemon.ok(&["exec", sandbox, "cat", "/proc/meminfo"])?)? >= bytes - KERNEL)
    })
}

fn memory_state(daemon: &Daemon<'_>, sandbox: &str) -> Result<Value> {
    Ok(shown(daemon, sandbox)?["memory_state"].clone())
}

pub(super) fn shown(daemon: &Daemon<'_>, sandbox: &str) -> Result<Value> {
    let shown: Value = serde_json::from_str(&daemon.ok(&["--json", "inspect", sandbox])?)?;
    match shown {
        Value::Array(mut all) => all.pop().context("nothing is shown"),
        one => Ok(one),
    }
}

/// Bytes, of what the guest's kernel says.
fn total(meminfo: &str) -> Result<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number
        .with_context(|| format!("no MemTotal in {meminfo}"))?
        .parse::<u64>()?
        << 10)
}
