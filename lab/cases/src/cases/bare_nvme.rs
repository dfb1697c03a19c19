//! A guest that owns its CPUs and has a disk of the host's: the disk's interrupts reach the guest's CPUs, and nobody else.
//!
//! The lab's NVMe disk goes from the host to a guest with the host's own kernel, which has a driver for it. Under load, no interrupt of
//! the disk is seen by the host, or makes a vCPU leave its guest; when the host moves its interrupts, by taking a CPU offline, they stay
//! the guest's. When the VMM is killed under load, CPUs and disk are the host's again. It is the same with interrupts remapped by the
//! IOMMU and without (`basalt-lab up --kernel-args intremap=off`).

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reservation::Device;

use super::bare::{CPU, Module, in_lab, online, wait_online};
use super::nvme_disk::{Disk, Given, Guest, guest, interrupts, tell};
use crate::vm::{Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "bare-nvme",
    limit: Duration::from_secs(400),
    host,
    guest: Some(guest),
};

const INTERRUPTS: &str = "/proc/interrupts";

/// More than the doorbells of what tells the host, and far fewer than requests, each of which rings two.
const BESIDES: u64 = 200;

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let all = online()?;
    let disk = Disk::find()?;
    disk.prepare()?;
    let given = disk.give()?;
    let device = Device::open(Device::PATH)?;
    let cpus = u32::try_from(std::thread::available_parallelism()?.get())?;
    for vcpus in 1..cpus.min(3) {
        loaded(host, &device, &given, vcpus).with_context(|| format!("with {vcpus} vCPUs"))?;
        wait_online(&all)?;
    }
    drop(device);
    given.take_back()?.look_back()?;
    module.unload()
}

fn loaded(host: &Host, device: &Device, disk: &Given, vcpus: u32) -> Result<()> {
    let reservation = device.reserve(&(CPU..CPU + vcpus).collect::<Vec<_>>())?;
    let reservation = reservation.as_fd().try_clone_to_owned()?;
    let builder = Builder::new(host)?.cpus(vcpus).reservation(reservation)?;
    let mut guest = Guest::boot(CASE.name, host, builder, disk)?;
    let before = Seen::of(&mut guest.machine)?;
    let said = guest.load()?;
    let after = Seen::of(&mut guest.machine)?;
    tell(&format!(
        "{vcpus} vCPUs: {} requests, {} interrupts of the disk in the guest, {} in the host, exits {:?}",
        said.requests,
        said.taken,
        after.host - before.host,
        after.since(&before)
    ));
    ensure!(
        after.host == before.host,
        "the host has got {} interrupts of a disk that is the guest's",
        after.host - before.host
    );
    // Neither interrupts and their ends nor the disk's doorbells are exits.
    for reason in ["other", "hypercall", "msr"] {
        ensure!(
            after.exits(reason) == before.exits(reason),
            "vCPUs have left their guest while its disk interrupted it: {:?}",
            after.since(&before)
        );
    }
    stays()?;
    let registers = after.exits("memory") - before.exits("memory");
    ensure!(
        registers < BESIDES,
        "{} requests have had {registers} exits of registers",
        said.requests
    );
    let nmis = after.exits("nmi") - before.exits("nmi");
    ensure!(nmis <= registers, "vCPUs were called out of their guest {nmis} times");
    moved(&mut guest, vcpus)?;
    taken_away(&mut guest, said.requests)?;
    guest.not_saved()?;
    guest.kill()
}

/// Nobody moves the disk's interrupts by hand.
fn stays() -> Result<()> {
    let text = fs::read_to_string(INTERRUPTS)?;
    let numbers = text.lines().filter(|line| line.contains("vfio-msix"));
    // Of those that its driver uses; the first two are for commands and for reading and writing.
    for line in numbers.take(2) {
        let number = line.split(':').next().unwrap_or(line).trim();
        let moved = fs::write(format!("/proc/irq/{number}/smp_affinity_list"), "0");
        ensure!(
            moved.is_err(),
            "the host has moved a disk's interrupt that is a guest's: {line}"
        );
    }
    Ok(())
}

/// The host takes the CPU offline that has the disk's interrupts by its own account: they come to it for a moment, and then not any more.
fn moved(guest: &mut Guest<'_>, vcpus: u32) -> Result<()> {
    let cpus = u32::try_from(fs::read_dir("/sys/devices/system/cpu")?.count())?;
    let free = CPU + vcpus;
    let switch = PathBuf::from(format!("/sys/devices/system/cpu/cpu{free}/online"));
    if cpus <= free || !switch.exists() {
        return Ok(());
    }
    let before = Seen::of(&mut guest.machine)?;
    fs::write(&switch, "0")?;
    guest.load()?;
    let moved = Seen::of(&mut guest.machine)?;
    fs::write(&switch, "1")?;
    guest.load()?;
    let after = Seen::of(&mut guest.machine)?;
    tell(&format!(
        "{} interrupts in the host when CPU {free} went offline, {} when it came back",
        moved.host - before.host,
        after.host - moved.host
    ));
    // One that comes by way of the host has all of them pointed again.
    ensure!(after.host - before.host < 20, "the disk's interrupts stayed the host's");
    Ok(())
}

/// The disk's registers go for a moment, as when a driver resets it: the guest has them no more, exits there and is served.
fn taken_away(guest: &mut Guest<'_>, requests: u64) -> Result<()> {
    guest.take_registers_away()?;
    let before = Seen::of(&mut guest.machine)?;
    guest.load()?;
    let after = Seen::of(&mut guest.machine)?;
    let registers = after.exits("memory") - before.exits("memory");
    tell(&format!("{registers} exits of registers that were taken away"));
    ensure!(
        registers >= requests && after.host == before.host,
        "the guest still has registers that were taken away: {:?}",
        after.since(&before)
    );
    Ok(())
}

/// What the host sees of a guest's interrupts.
struct Seen {
    /// Those of the disk that came to the host.
    host: u64,
    exits: BTreeMap<String, u64>,
}

impl Seen {
    fn of(machine: &mut Vm) -> Result<Self> {
        let exits = machine.vmm.client.metrics()?.into_iter();
        let exits = exits.filter(|sample| sample.name == "engine_exits_total");
        Ok(Self {
            host: interrupts("vfio-msix")?,
            exits: exits
                .map(|sample| {
                    let reason = sample.labels.iter().find(|(key, _)| key == "reason");
                    (
                        reason.map(|(_, reason)| reason.clone()).unwrap_or_default(),
                        sample.value,
                    )
                })
                .collect(),
        })
    }

    fn exits(&self, reason: &str) -> u64 {
        self.exits.get(reason).copied().unwrap_or(0)
    }

    fn since(&self, before: &Self) -> BTreeMap<&str, u64> {
        let counts = self
            .exits
            .keys()
            .map(|reason| (reason.as_str(), self.exits(reason) - before.exits(reason)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}
