//! A guest of KVM's that has a disk of the host's: interrupts and registers reach each other without the VMM.
//!
//! The lab's NVMe disk goes from the host to a guest with the host's own kernel, which has a driver for it, as in the case `bare-nvme`,
//! but under the class `standard`; at its second
//! time when the guest has booted, twice, with a detach in between: its kernel finds all of that by ACPI. Under load the guest gets an interrupt a request, and no vCPU comes out to the VMM for the disk's
//! registers. Registers that go for a moment fail nobody. A disk that was taken from a guest and is told to go on reaches no memory: the
//! host's IOMMU faults. When the VMM is killed under load, the disk is the host's again.

use std::fs::File;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use engine::{Exit, HostRange, Vcpu};
use engine_kvm::KvmEngine;
use rustix::fs::MemfdFlags;
use vm_memory::{Bytes, FileOffset, MemoryRegionAddress, MmapRegion};

use super::bare::in_lab;
use super::nvme_disk::{Disk, Given, Guest, guest, interrupts, tell};
use super::vcpu_state::{CODE_AT, MEMORY, machine, memory, real_mode};
use crate::vm::{Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "kvm-nvme",
    limit: Duration::from_secs(400),
    host,
    guest: Some(guest),
};

/// More than what is beside the load: how it is started, and what it says. Each request rings two doorbells.
const BESIDES: u64 = 200;

fn host(host: &Host) -> Result<()> {
    registers_that_go()?;
    if !in_lab()? {
        return Ok(());
    }
    let disk = Disk::find()?;
    disk.prepare()?;
    let given = disk.give()?;
    for vcpus in 1..=2 {
        loaded(host, &given, vcpus)?;
    }
    given.take_back()?.look_back()
}

fn loaded(host: &Host, disk: &Given, vcpus: u32) -> Result<()> {
    let builder = Builder::new(host)?.cpus(vcpus);
    let mut guest = match vcpus {
        1 => Guest::boot(CASE.name, host, builder, disk)?,
        _ => Guest::boot_and_attach(CASE.name, host, builder, disk)?,
    };
    let before = Seen::of(&mut guest.machine)?;
    let said = guest.load()?;
    let after = Seen::of(&mut guest.machine)?;
    let registers = after.registers - before.registers;
    tell(&format!(
        "{vcpus} vCPUs: {} requests, {} interrupts of the disk in the guest, {} in the host, {registers} exits of registers",
        said.requests,
        said.taken,
        after.host - before.host,
    ));
    ensure!(
        registers < BESIDES,
        "{} requests have had {registers} exits of registers",
        said.requests
    );
    // Back at once, they are the guest's as before: what it does not touch meanwhile nobody takes.
    guest.take_registers_away()?;
    guest.load()?;
    let back = Seen::of(&mut guest.machine)?.registers - after.registers;
    ensure!(back < BESIDES, "registers that were away cause {back} exits");
    guest.not_saved()?;
    match vcpus {
        1 => guest.faults_once_detached(),
        _ => guest.kill(),
    }
}

/// What the host sees of a guest's disk.
struct Seen {
    /// Interrupts that came to the host.
    host: u64,
    /// Exits to the VMM that were about registers of devices on the guest's PCI bus.
    registers: u64,
}

impl Seen {
    fn of(machine: &mut Vm) -> Result<Self> {
        let samples = machine.vmm.client.metrics()?;
        let registers = samples.iter().filter(|sample| {
            let reason = sample.labels.iter().find(|(key, _)| key == "reason");
            sample.name == "vcpu_exits_total" && reason.is_some_and(|(_, reason)| reason == "pci-bar")
        });
        Ok(Self {
            host: interrupts("vfio-msix")?,
            registers: registers.map(|sample| sample.value).sum(),
        })
    }
}

/// `again: mov al, [0]; out 0x10, al; jmp again`, with DS behind the memory.
const CODE: [u8; 7] = [0xa0, 0, 0, 0xe6, 0x10, 0xeb, 0xf9];
const AT: u64 = MEMORY as u64;
const DS: usize = 1;

/// KVM itself, whose `KVM_RUN` fails for a guest that touches what has gone from this process: the guest exits instead, and has its
/// registers again when others are given.
fn registers_that_go() -> Result<()> {
    let pages = Pages::new()?;
    let other = Pages::new()?;
    let engine = KvmEngine::open()?;
    let region = memory()?;
    region.write_slice(&CODE, MemoryRegionAddress(CODE_AT))?;
    let (vm, mut vcpu) = machine(&engine, &region)?;
    #[expect(unsafe_code, reason = "the engine is given what a device's registers would be")]
    // SAFETY: the pages are mapped for longer than the VM lives, and nobody else uses them.
    let give = |at, pages: &Pages| unsafe { vm.map_registers(at, pages.range(), true) };
    give(AT, &pages)?;
    let mut boot = real_mode();
    boot.system.segments[DS].base = AT;
    vcpu.set_boot_state(&boot)?;
    ensure!(
        next(vcpu.as_mut())? == Out::Port(0),
        "the guest does not reach registers"
    );
    pages.file.set_len(0)?;
    for expected in [Out::Read(AT), Out::Port(0xee)] {
        let out = next(vcpu.as_mut())?;
        ensure!(out == expected, "registers that are gone: {out:?}");
    }
    pages.file.set_len(PAGE)?;
    give(AT + PAGE, &other)?;
    // It may be about to be told of the one that was not there.
    next(vcpu.as_mut())?;
    let out = next(vcpu.as_mut())?;
    ensure!(out == Out::Port(0), "registers that came back: {out:?}");
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum Out {
    Port(u8),
    Read(u64),
}

fn next(vcpu: &mut dyn Vcpu) -> Result<Out> {
    loop {
        match vcpu.run()? {
            Exit::Interrupted => (),
            Exit::PortWrite { data, .. } => return Ok(Out::Port(data.first().copied().unwrap_or(0))),
            Exit::MmioRead { address, data } => {
                data.fill(0xee);
                return Ok(Out::Read(address));
            }
            other => bail!("the guest came out with {other:?}"),
        }
    }
}

const PAGE: u64 = 4096;

/// A page of a file: without the file's bytes there is nothing behind its mapping, as behind one of VFIO's while a device is reset.
struct Pages {
    file: File,
    region: MmapRegion,
}

impl Pages {
    fn new() -> Result<Self> {
        let file = File::from(rustix::fs::memfd_create("registers", MemfdFlags::CLOEXEC)?);
        file.set_len(PAGE)?;
        let region = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), usize::try_from(PAGE)?)?;
        Ok(Self { file, region })
    }

    fn range(&self) -> HostRange {
        HostRange {
            address: self.region.as_ptr() as u64,
            length: PAGE,
        }
    }
}
