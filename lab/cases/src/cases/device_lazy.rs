//! A sandbox whose guest has an IOMMU: a disk reaches what the guest's driver maps for it. It is a clone of a template, and its memory stays
//! the template's but for what its guest writes to and what is in flight; with `late` all of it becomes its own. What is written from memory all
//! over the guest is read back and compared, also by the host, and the host's IOMMU sees no fault.

use std::fs;

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;
use serde_json::Value;

use super::bare::{in_lab, run};
use super::device_attach::expect_state;
use super::nvme_disk::{Disk, tell};
use crate::basalt::{expect_code, expect_refusal};
use crate::daemon::{Daemon, wait_for};
use crate::kernel_log::{expect_no_dma_fault, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-lazy",
    limit: std::time::Duration::from_secs(600),
    host,
    guest: None,
};

const MIB: u64 = 1 << 20;

/// What each sandbox here has.
const MEMORY: (&str, u64) = ("512m", 512 * MIB);

/// In the guest: finds what the host has written to the disk, and writes what the host looks for.
const EXCHANGE: &str = "
import mmap, os
disk = os.open('/dev/nvme0n1', os.O_RDWR | os.O_DIRECT)
page = mmap.mmap(-1, 4096)
assert os.preadv(disk, [page], 0) == 4096
assert page[:] == b'h' * 4096, page[:16]
page[:] = b'g' * 4096
assert os.pwritev(disk, [page], 1 << 20) == 4096
print('exchanged')
";

/// In the guest: writes from pages that lie anywhere in its memory, past the page cache, and reads them back to others. Each page is mapped by a
/// request of its own to the IOMMU, which is slow on an emulated host, so that there are few.
const PROVE: &str = "
import mmap, os, random, sys
MIB, PAGE, PIECES = 1 << 20, 4096, 4
disk = os.open('/dev/nvme0n1', os.O_RDWR | os.O_DIRECT)
random.seed(int(sys.argv[1]))
ours, back = mmap.mmap(-1, 64 * MIB), mmap.mmap(-1, 8 * PAGE)
places = random.sample(range(0, 64 * MIB, 8 * PAGE), PIECES)
for number, place in enumerate(places):
    piece = memoryview(ours)[place:place + 8 * PAGE]
    piece[:] = random.randbytes(8 * PAGE)
    assert os.pwritev(disk, [piece], 64 * MIB + number * 8 * PAGE) == 8 * PAGE
for number, place in enumerate(places):
    assert os.preadv(disk, [back], 64 * MIB + number * 8 * PAGE) == 8 * PAGE
    assert back[:] == ours[place:place + 8 * PAGE], place
print('verified')
";

/// In the guest: what stands behind its IOMMU, and how that is unmapped.
const GROUP: &str = "cat /sys/bus/pci/devices/*/iommu_group/type; ls /sys/class/iommu/*/devices | wc -l";

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let disk = Disk::find()?;
    disk.prepare()?;
    let address = disk.address().to_owned();
    drop(disk);
    let daemon = Daemon::with_templates(host)?;
    run("modprobe", &["vfio-pci"])?;
    let mut log = kernel_log()?;
    daemon.ok(&["device", "bind", &address])?;
    has_template(&daemon)?;
    lazy(&daemon, &address)?;
    comes_later(&daemon, &address)?;
    late(&daemon, &address)?;
    daemon.ok(&["device", "unbind", &address])?;
    Disk::find()?.look_back()?;
    expect_no_dma_fault(&mut log)?;
    daemon.end()
}

/// The flags of all of them.
fn words<'a>(name: &'a str, start: &'a str) -> Vec<&'a str> {
    vec![
        "run",
        "-d",
        "--name",
        name,
        "--memory",
        MEMORY.0,
        "--device-start",
        start,
    ]
}

fn begin(daemon: &Daemon<'_>, name: &str, start: &str, device: &[&str]) -> Result<()> {
    let command = [daemon.image(), "--", "sleep", "10000"];
    daemon.ok(&[&words(name, start)[..], device, &command].concat())?;
    Ok(())
}

/// A machine with an IOMMU is another one than those without: the first that has one boots.
fn has_template(daemon: &Daemon<'_>) -> Result<()> {
    wait_for("a template of a machine with an IOMMU", || {
        begin(daemon, "seed", "lazy", &[])?;
        let template = shown(daemon, "seed")?["template"].clone();
        daemon.ok(&["rm", "--force", "seed"])?;
        Ok(template.is_string())
    })
}

fn lazy(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    begin(daemon, "lazy", "lazy", &["--device", address])?;
    ensure!(
        shown(daemon, "lazy")?["template"].is_string(),
        "it has booted a kernel of its own"
    );
    let said = daemon.ok(&["exec", "lazy", "sh", "-c", GROUP])?;
    ensure!(
        said.split_whitespace().eq(["DMA", "1"]),
        "behind the guest's IOMMU: {said}"
    );
    exchange(daemon, "lazy")?;
    let own = own(daemon)?;
    let state = shown(daemon, "lazy")?["memory_state"].clone();
    let mapped = state["dma_mapped"]
        .as_u64()
        .with_context(|| format!("it has {state}"))?;
    let pinned = pinned(daemon)?;
    tell(&format!(
        "lazy: {} MiB of {} are its own, {} KiB are mapped, {} KiB locked",
        own / MIB,
        MEMORY.0,
        mapped >> 10,
        pinned >> 10
    ));
    ensure!(own < MEMORY.1 / 4, "{own} bytes of a clone are its own");
    ensure!(
        (1..32 * MIB).contains(&mapped) && pinned < 48 * MIB,
        "{mapped} bytes are mapped, {pinned} locked"
    );
    prove(daemon, "lazy", "21")?;
    let after = shown(daemon, "lazy")?["memory_state"]["dma_mapped"].as_u64();
    ensure!(
        after.is_some_and(|after| after < mapped + 8 * MIB),
        "{after:?} bytes stay mapped behind its requests, {mapped} before"
    );
    // What its machine begins with is nothing again.
    daemon.ok(&["stop", "--time", "1s", "lazy"])?;
    expect_state(daemon, address, "ready")?;
    daemon.ok(&["start", "lazy"])?;
    prove(daemon, "lazy", "22")?;
    daemon.ok(&["rm", "--force", "lazy"])?;
    expect_state(daemon, address, "ready")
}

/// A sandbox without a device gets one, gives it back, is saved, and its clone gets it.
fn comes_later(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    begin(daemon, "web", "lazy", &[])?;
    for seed in ["23", "24"] {
        let said = daemon.ok(&["device", "attach", "web", address])?;
        ensure!(said.contains("nvme0n1"), "`attach` says {said}");
        prove(daemon, "web", seed)?;
        expect_refusal(
            &daemon.run(&["snapshot", "create", "web"])?,
            1,
            &["--detach-devices", address],
        )?;
        daemon.ok(&["device", "detach", "web", address])?;
        expect_code(&daemon.run(&["exec", "web", "test", "-e", "/dev/nvme0n1"])?, 1)?;
        let pinned = pinned(daemon)?;
        ensure!(pinned < 4 * MIB, "{pinned} bytes stay locked behind the device");
    }
    daemon.ok(&["snapshot", "create", "web", "without"])?;
    daemon.ok(&["rollback", "web", "without"])?;
    daemon.ok(&["device", "attach", "web", address])?;
    prove(daemon, "web", "25")?;
    // As when it is pulled out.
    daemon.ok(&["device", "detach", "--force", "web", address])?;
    daemon.ok(&["clone", "--name", "copy", "without"])?;
    daemon.ok(&["rm", "--force", "web"])?;
    daemon.ok(&["device", "attach", "copy", address])?;
    prove(daemon, "copy", "26")?;
    daemon.ok(&["rm", "--force", "copy"])?;
    daemon.ok(&["snapshot", "rm", "without"])?;
    expect_state(daemon, address, "ready")
}

/// The control: a device that reaches all memory makes all of a clone's its own.
fn late(daemon: &Daemon<'_>, address: &str) -> Result<()> {
    begin(daemon, "late", "late", &["--device", address])?;
    wait_for("the device to come", || {
        let run = daemon.run(&["exec", "late", "test", "-b", "/dev/nvme0n1"])?;
        Ok(run.status.success())
    })?;
    let own = own(daemon)?;
    tell(&format!("late: {} MiB of {} are its own", own / MIB, MEMORY.0));
    ensure!(own > MEMORY.1 / 4 * 3, "{own} bytes alone are its own");
    daemon.ok(&["rm", "--force", "late"])?;
    expect_state(daemon, address, "ready")
}

fn prove(daemon: &Daemon<'_>, sandbox: &str, seed: &str) -> Result<()> {
    let said = daemon.ok(&["exec", sandbox, "python3", "-c", PROVE, seed])?;
    ensure!(said.trim() == "verified", "{sandbox} says {said}");
    Ok(())
}

fn exchange(daemon: &Daemon<'_>, sandbox: &str) -> Result<()> {
    let said = daemon.ok(&["exec", sandbox, "python3", "-c", EXCHANGE])?;
    ensure!(said.trim() == "exchanged", "{sandbox} says {said}");
    Ok(())
}

fn shown(daemon: &Daemon<'_>, sandbox: &str) -> Result<Value> {
    let shown: Value = serde_json::from_str(&daemon.ok(&["--json", "inspect", sandbox])?)?;
    match shown {
        Value::Array(mut all) => all.pop().context("nothing is shown"),
        one => Ok(one),
    }
}

/// The one VMM that there is.
fn vmm(daemon: &Daemon<'_>) -> Result<Pid> {
    let vmms = daemon.processes("basalt-vmm")?;
    let [vmm] = vmms.as_slice() else {
        anyhow::bail!("{} VMMs run", vmms.len())
    };
    Ok(*vmm)
}

/// Numbers of kB of a file of its process, in bytes; of one that it does not have, 0.
fn sizes<const N: usize>(daemon: &Daemon<'_>, file: &str, names: [&str; N]) -> Result<[u64; N]> {
    let text = fs::read_to_string(format!("/proc/{}/{file}", vmm(daemon)?.as_raw_nonzero()))?;
    let size = |name| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        number
            .and_then(|number| number.parse::<u64>().ok())
            .map_or(0, |kib| kib << 10)
    };
    Ok(names.map(size))
}

/// How much memory the VMM has that it shares with nobody.
fn own(daemon: &Daemon<'_>) -> Result<u64> {
    let [own] = sizes(daemon, "smaps_rollup", ["Anonymous:"])?;
    ensure!(own > 0, "the VMM has no memory");
    Ok(own)
}

/// How much it has locked: a container counts the one, iommufd the other.
fn pinned(daemon: &Daemon<'_>) -> Result<u64> {
    let [locked, pinned] = sizes(daemon, "status", ["VmLck:", "VmPin:"])?;
    Ok(locked.max(pinned))
}
