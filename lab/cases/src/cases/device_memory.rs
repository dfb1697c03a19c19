//! A guest that grows and shrinks while it has a disk of the host's, which reaches all that it has and nothing else.
//!
//! Memory is mapped ahead of the guest, so that plugging finds it there. From all over its memory the guest writes to the disk and reads
//! back, before and after it has shrunk; what it gives back is unpinned. The host's IOMMU sees no fault. Then the case unmaps a piece of the
//! guest's memory behind the VMM's back: the fault is there, and what the guest reads is wrong. So both would have been seen.

use std::fs;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base::ByteSize;
use vmm_api::devices::{MEM_MIN_BLOCK, MemConfig, ZEROED_PIECE};
use vmm_api::{Functions, HotplugMemory};

use super::bare::{in_lab, run};
use super::nvme_disk::{self, Agent, Disk, Given, tell};
use crate::daemon::wait_for;
use crate::function_files::Hand;
use crate::kernel_log::{complaints, expect_no_dma_fault, is_dma_fault, kernel_log};
use crate::vm::{self, Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "device-memory",
    limit: Duration::from_secs(400),
    host,
    guest: Some(super::nvme_disk::prove),
};

const BOOT: ByteSize = ByteSize::mib(256);
const REGION: ByteSize = ByteSize::mib(512);

/// The unit in which memory is mapped.
const CHUNK: u64 = 128 << 20;

/// What the guest has plugged before it has the disk.
const BEFORE: ByteSize = ByteSize(CHUNK);

/// Kernel memory that cannot be moved may stay in some blocks.
const STAYS: u64 = CHUNK;

/// Linux takes 16 MiB a GiB to describe memory, programs and the kernel have the rest.
const USED: u64 = 192 << 20;

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    run("modprobe", &["vfio-pci"])?;
    let disk = Disk::find()?.give()?;
    let mut log = kernel_log()?;
    let mut guest = Guest::boot(host)?;
    guest.ask_for(BEFORE)?;
    guest.comes_to("plug without a disk", |sizes, _| sizes.plugged == BEFORE.bytes())?;
    guest.has_zeroed_memory()?;
    guest.attach(&disk)?;
    let told = guest.functions()?;
    ensure!(
        told.mapped == BOOT.bytes() + BEFORE.bytes() && told.total == told.mapped,
        "what the guest had is mapped: {told:?}"
    );
    guest.grows_and_is_all_there()?;
    guest.shrinks()?;
    guest.grows_and_is_all_there()?;
    expect_no_dma_fault(&mut log)?;
    guest.is_found_out_if_not_mapped(&mut || complaints(&mut log))?;
    guest.lets_go()?;
    drop(disk.take_back()?);
    Ok(())
}

struct Guest {
    machine: Vm,
    agent: Agent,
    /// The case's own hand on the disk's files.
    hand: Option<Hand>,
}

impl Guest {
    fn boot(host: &Host) -> Result<Self> {
        let mut builder = Builder::new(host)?.memory(BOOT).pinned();
        let config = MemConfig {
            region_size: REGION,
            max_size: None,
            requested_size: ByteSize(0),
            block_size: MEM_MIN_BLOCK,
            node_id: None,
        };
        builder.device("memory", &config)?;
        let machine = builder.start()?;
        let mut agent = machine.agent()?;
        vm::install(&mut agent)?;
        Ok(Self {
            machine,
            agent,
            hand: None,
        })
    }

    /// A part of what it will plug comes zeroed: the disk is to reach that as all else.
    fn has_zeroed_memory(&mut self) -> Result<()> {
        let piece = |_| base::memfd::sized("zeroed", ZEROED_PIECE.bytes());
        let files = [piece(0)?, piece(1)?];
        let files = files.each_ref().map(AsFd::as_fd);
        self.machine.vmm.client.add_zeroed_memory(&files)?;
        let taken = self.functions()?.zeroed_memory;
        ensure!(taken == Some(2 * ZEROED_PIECE.bytes()), "{taken:?} were taken");
        Ok(())
    }

    fn attach(&mut self, disk: &Given) -> Result<()> {
        self.hand = Some(nvme_disk::attach(&mut self.machine, &mut self.agent, disk)?);
        Ok(())
    }

    fn ask_for(&mut self, size: ByteSize) -> Result<()> {
        Ok(self.machine.vmm.client.resize_memory(size)?)
    }

    fn functions(&mut self) -> Result<Functions> {
        Ok(self.machine.vmm.client.functions()?)
    }

    fn sizes(&mut self) -> Result<HotplugMemory> {
        let info = self.machine.vmm.client.info()?;
        info.hotplug_memory.context("a VM without hot-pluggable memory")
    }

    fn comes_to(&mut self, what: &str, enough: impl Fn(HotplugMemory, &Functions) -> bool) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(90);
        loop {
            let (sizes, told) = (self.sizes()?, self.functions()?);
            if enough(sizes, &told) {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "the guest does not {what}: {sizes:?}, {told:?}; its console:\n{}",
                self.machine.console()?
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// All is plugged, was mapped before, and the disk reaches it.
    fn grows_and_is_all_there(&mut self) -> Result<()> {
        let before = self.functions()?;
        self.ask_for(REGION)?;
        self.comes_to("grow", |sizes, _| sizes.plugged == REGION.bytes())?;
        let told = self.functions()?;
        let all = BOOT.bytes() + REGION.bytes();
        ensure!(
            (told.mapped, told.total, &told.error) == (all, all, &None),
            "not all is mapped: {told:?}"
        );
        ensure!(told.plug_misses == 0, "a plug waited for memory: {told:?}");
        ensure!(told.plug_hits > before.plug_hits, "nothing was plugged: {told:?}");
        let calls = told.map_calls - before.map_calls;
        ensure!(calls <= all / CHUNK + 8, "{calls} requests mapped {all} bytes");
        let proved = self.prove()?;
        ensure!(
            proved >= all - USED,
            "of {all} bytes the guest has written from {proved} alone"
        );
        tell(&format!(
            "{} MiB by DMA and back, {} plugs, none of which waited, {calls} requests to map",
            proved >> 20,
            told.plug_hits - before.plug_hits
        ));
        Ok(())
    }

    fn prove(&mut self) -> Result<u64> {
        let said = vm::guest_half(&mut self.agent, CASE.name, &[])?;
        said.trim().parse().with_context(|| format!("the guest says {said:?}"))
    }

    /// What is given back is unmapped, and the host's.
    fn shrinks(&mut self) -> Result<()> {
        self.ask_for(ByteSize(0))?;
        self.comes_to("shrink", |sizes, told| {
            sizes.plugged <= STAYS && told.mapped <= BOOT.bytes() + STAYS
        })?;
        let pinned = pinned(&self.machine)?;
        ensure!(
            pinned <= BOOT.bytes() + STAYS + (16 << 20),
            "{pinned} bytes are locked, and the guest has given back what it had plugged"
        );
        Ok(())
    }

    /// A piece in which the guest's programs have their memory, unmapped by somebody else.
    fn is_found_out_if_not_mapped(&mut self, said: &mut dyn FnMut() -> Result<Vec<String>>) -> Result<()> {
        let hand = self.hand.take().context("a hand on the disk")?;
        // The last of the region: pages above 4 GiB, which programs have first.
        let start = (4 << 30) + REGION.bytes() - CHUNK;
        let unmapped = hand.unmap(start, CHUNK)?;
        ensure!(unmapped == CHUNK, "{unmapped:#x} bytes were mapped at {start:#x}");
        // A request that ends with an error has a driver reset its disk and try again, which may take longer than we wait.
        let proved = self.prove();
        let error = match proved {
            Ok(bytes) => bail!("{bytes} bytes are right, and {CHUNK:#x} were not mapped"),
            Err(error) => format!("{error:#}"),
        };
        let mut faults = Vec::new();
        wait_for("a fault of the IOMMU", || {
            faults.extend(said()?);
            Ok(faults.iter().any(|line| is_dma_fault(line)))
        })?;
        let first = faults.iter().find(|line| is_dma_fault(line));
        tell(&format!(
            "with {} MiB unmapped: {error}; {}",
            CHUNK >> 20,
            first.map_or("", String::as_str)
        ));
        Ok(())
    }

    /// With the disk everything is unpinned. The guest is not asked: its disk has failed.
    fn lets_go(mut self) -> Result<()> {
        self.machine.vmm.client.detach("disk")?;
        wait_for("the guest's memory to be unmapped", || {
            let told = self.functions()?;
            Ok(told.functions.is_empty() && !told.busy)
        })?;
        let pinned = pinned(&self.machine)?;
        ensure!(pinned < 16 << 20, "{pinned} bytes are locked after the last function");
        self.machine.vmm.client.stop()?;
        self.machine.vmm.wait_status(Duration::from_secs(20))?;
        Ok(())
    }
}

/// What the VMM has locked, in bytes.
fn pinned(machine: &Vm) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", machine.vmm.pid()))?;
    let field = |name| {
        let line = status.lines().find(|line| line.starts_with(name));
        let number = line.and_then(|line| line.split_whitespace().nth(1));
        anyhow::Ok(number.context(name)?.parse::<u64>()? << 10)
    };
    // A container counts the one, iommufd the other, and both where there is a limit.
    Ok(field("VmLck:")?.max(field("VmPin:")?))
}
