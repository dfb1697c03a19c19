//! A guest of a few instructions, on a CPU of its own: its memory, its tables, and what it says.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use engine::state::{Table, gpr};
use engine::{BootState, CpuModel, Engine, Exit, Kick, Presence, Vcpu, Vm};
use engine_bare::BareEngine;
use reservation::Device;
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MemoryRegionAddress, MmapRegion};

use super::super::bare::CPU;
use super::code;
use crate::long_mode;

/// Where things are in a guest's memory.
const MEMORY: usize = 2 << 20;
const TABLES: u64 = 0x1000;
const DIRECTORIES: u64 = 0x3000;
const GDT: u64 = 0x7000;
const IDT: u64 = 0x8000;
const HANDLER: u64 = 0x9000;
const CODE: u64 = 0xa000;
const STACK: u64 = 0xf000;
/// How many interrupts its handler has had.
const COUNT: u64 = 0xd000;
/// What both guests see.
const WINDOW: u64 = 4 << 20;

/// What its code says: that it is done, and what it was answered.
const DONE: u16 = 0x10;
const ANSWERED: u16 = 0x11;

/// The server's number, which nobody else knows.
pub(super) const SECRET: u64 = 0x5ec2_e700_0000_1234;

/// What the window has, by its offsets in guests.S.
pub(super) struct Window(Arc<GuestRegionMmap<()>>);

impl Window {
    pub(super) fn new() -> Result<Self> {
        let region = GuestRegionMmap::new(MmapRegion::new(MEMORY)?, GuestAddress(WINDOW)).context("a region")?;
        Ok(Self(Arc::new(region)))
    }

    /// What the server is to do at the next call.
    pub(super) fn order(&self, what: u64) -> Result<()> {
        Ok(self
            .0
            .store(what, MemoryRegionAddress(0), std::sync::atomic::Ordering::SeqCst)?)
    }

    pub(super) fn calls(&self) -> Result<u64> {
        self.word(24)
    }

    /// Where one of several guests tells something, in the guest's memory, and what it has told.
    pub(super) fn place(&self, of: u64) -> Result<(u64, u64)> {
        Ok((WINDOW + 64 + of * 8, self.word(64 + of * 8)?))
    }

    pub(super) fn outcome(&self) -> Result<u64> {
        self.word(32)
    }

    fn word(&self, at: u64) -> Result<u64> {
        Ok(self
            .0
            .load(MemoryRegionAddress(at), std::sync::atomic::Ordering::SeqCst)?)
    }
}

/// What a guest has come to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    Done,
    /// One of `BASALT_ENTERED_*`.
    Answered(u8),
    Called,
}

/// A guest, with its CPU as long as it has not been frozen.
pub(super) struct Guest {
    // Dropped in this order.
    pub(super) vcpu: Box<dyn Vcpu>,
    pub(super) vm: Arc<dyn Vm>,
    memory: Arc<GuestRegionMmap<()>>,
}

impl Guest {
    pub(super) fn new(device: &Device, cpu: u32, window: &Window) -> Result<Self> {
        let engine = BareEngine::from_fd(device.reserve(&[cpu])?.into())?;
        let vm = engine.create_vm(CpuModel::Host)?;
        let memory = GuestRegionMmap::new(MmapRegion::new(MEMORY)?, GuestAddress(0)).context("a region at 0")?;
        let memory = Arc::new(memory);
        vm.map_ram(0, Arc::clone(&memory), Presence::AtOnce)?;
        vm.map_ram(1, Arc::clone(&window.0), Presence::AtOnce)?;
        let vcpu = vm.create_vcpu(0, 1)?;
        let guest = Self { vcpu, vm, memory };
        guest.prepare()?;
        Ok(guest)
    }

    fn write_words(&self, words: impl IntoIterator<Item = u64>, at: u64) -> Result<()> {
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok(self.memory.write_slice(&bytes, MemoryRegionAddress(at))?)
    }

    /// The first four GiB mapped as they are, and one handler for all interrupts.
    fn prepare(&self) -> Result<()> {
        self.write_words([(TABLES + 0x1000) | 7], TABLES)?;
        self.write_words((0..4).map(|index| (DIRECTORIES + index * 0x1000) | 7), TABLES + 0x1000)?;
        self.write_words((0..2048).map(|index| (index << 21) | 0x87), DIRECTORIES)?;
        self.write_words([0, 0x00af_9b00_0000_ffff], GDT)?;
        for vector in 32..256 {
            self.write_words([HANDLER | 8 << 16 | 0x8e << 40, 0], IDT + vector * 16)?;
        }
        Ok(self.memory.write_slice(code::handler(), MemoryRegionAddress(HANDLER))?)
    }

    /// Puts it at the beginning of this code, with these registers besides those that all of it expects. A server has no handlers: a
    /// fault of it is a triple fault.
    pub(super) fn begin(&mut self, code: &[u8], registers: &[(usize, u64)], handlers: bool) -> Result<()> {
        self.memory.write_slice(code, MemoryRegionAddress(CODE))?;
        let mut state: BootState = long_mode::at(CODE, GDT, TABLES);
        state.general.gpr[gpr::RSP] = STACK;
        state.general.gpr[gpr::RBX] = WINDOW;
        state.general.gpr[14] = SECRET;
        for (number, value) in registers {
            state.general.gpr[*number] = *value;
        }
        // OSFXSR and OSXMMEXCPT beside PAE.
        state.system.cr[3] = 0x620;
        state.system.idt = Table {
            base: IDT,
            limit: if handlers { 0xfff } else { 0 },
        };
        Ok(self.vcpu.set_boot_state(&state)?)
    }

    /// Runs it until it says something.
    pub(super) fn said(&mut self) -> Result<Said> {
        loop {
            return Ok(match self.vcpu.run()? {
                Exit::PortWrite { port: DONE, .. } => Said::Done,
                Exit::PortWrite {
                    port: ANSWERED, data, ..
                } => Said::Answered(*data.first().context("a write of no bytes")?),
                Exit::PortWrite { .. } => continue,
                Exit::Interrupted => Said::Called,
                other => bail!("the guest came out with {other:?}"),
            });
        }
    }

    /// Its server of this number is entered once; what the guest was answered.
    pub(super) fn enters(&mut self, index: u64, takes_interrupts: bool) -> Result<u8> {
        let registers = [(10, index), (9, u64::from(takes_interrupts))];
        self.begin(code::once(), &registers, true)?;
        match self.said()? {
            Said::Answered(status) => Ok(status),
            other => bail!("a guest that enters a server once said {other:?}"),
        }
    }

    pub(super) fn interrupts(&self) -> Result<u32> {
        Ok(self
            .memory
            .load(MemoryRegionAddress(COUNT), std::sync::atomic::Ordering::SeqCst)?)
    }

    /// How often it has come out, by reasons.
    pub(super) fn exits(&self) -> Vec<(&'static str, u64)> {
        self.vm.counts().exits
    }

    pub(super) fn refused(&self) -> u64 {
        self.vm.counts().refused.unwrap_or(0)
    }
}

/// A guest that serves, frozen: its CPU is Linux's again.
pub(super) fn serve(device: &Device, window: &Window, budget: Duration) -> Result<(Guest, std::os::fd::OwnedFd)> {
    let mut server = Guest::new(device, CPU, window)?;
    server.begin(code::server(), &[], false)?;
    let early = server.vcpu.freeze(budget);
    ensure!(early.is_err(), "a guest that has not said that it waits was frozen");
    ensure!(matches!(server.vcpu.run()?, Exit::Waiting), "the server does not wait");
    for wrong in [Duration::ZERO, Duration::from_secs(3600)] {
        ensure!(
            server.vcpu.freeze(wrong).is_err(),
            "a server was frozen with a budget of {wrong:?}"
        );
    }
    let link = server.vcpu.freeze(budget)?;
    ensure!(server.vcpu.freeze(budget).is_err(), "a server was frozen twice");
    Ok((server, link))
}

/// Calls somebody after a while, unless it is dropped before.
pub(super) fn later(kick: Arc<dyn Kick>, pause: Duration) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        std::thread::sleep(pause);
        kick.kick();
    })
}
