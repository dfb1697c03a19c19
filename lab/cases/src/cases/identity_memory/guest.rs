//! A guest of a few instructions whose memory is not translated, and those instructions. Knows no case.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::long_mode;
use anyhow::{Context, Result};
use engine::{CpuModel, Engine, Exit, IdentityMemory, Presence, Vcpu, Vm};
use engine_bare::BareEngine;
use vm_memory::{Address, Bytes, GuestMemoryRegion, MemoryRegionAddress};

/// Of each guest here.
pub(super) const SIZE: u64 = 16 << 20;
pub(super) const MIB: u64 = 1 << 20;

/// Where things are, from the beginning of its memory on.
const TABLES: u64 = 0x1000;
const GDT: u64 = 0x3000;
const CODE: u64 = 0x4000;
pub(super) const VALUE: u64 = 0x1_0000;
pub(super) const ANSWER: u64 = 0x1_0008;
pub(super) const OTHERS: u64 = 0x1_0010;
pub(super) const TYPES: u64 = 0x1_0018;

/// And below 1 MiB, where the second vCPU begins: its values.
pub(super) const LOW_VALUE: u64 = 0x100;
pub(super) const LOW_ANSWER: u64 = 0x102;

/// What its code says.
pub(super) const DONE: u16 = 0x10;
pub(super) const STARTED: u16 = 0x11;
/// `out 0x10, al`.
pub(super) const SAY: [u8; 2] = [0xe6, 0x10];
/// `cli; hlt; jmp` back.
pub(super) const STAY: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfd];

/// `IA32_PAT`, as after power on, and with write-combining in place of the fifth type.
pub(super) const PAT: u32 = 0x277;
pub(super) const PAT_AT_FIRST: u64 = 0x0007_0406_0007_0406;
pub(super) const PAT_CHANGED: u64 = 0x0007_0401_0007_0406;

/// How long a guest may take that does next to nothing.
pub(super) const SOON: Duration = Duration::from_secs(10);

/// A guest with one or two vCPUs.
pub(super) struct Guest {
    // Dropped in this order.
    pub(super) vcpus: Vec<Box<dyn Vcpu>>,
    pub(super) vm: Arc<dyn Vm>,
    pub(super) placed: IdentityMemory,
}

impl Guest {
    pub(super) fn new(engine: &BareEngine, vcpus: u32) -> Result<Self> {
        let (vm, placed) = engine.create_identity_vm(CpuModel::Host, SIZE)?;
        for (slot, region) in (0..).zip([&placed.low, &placed.main]) {
            vm.map_ram(slot, Arc::clone(region), Presence::AtOnce)?;
        }
        let made = (0..vcpus).map(|id| vm.create_vcpu(id, vcpus));
        let vcpus = made.collect::<engine::Result<_>>()?;
        Ok(Self { vcpus, vm, placed })
    }

    pub(super) fn start(&self) -> u64 {
        self.placed.main.start_addr().raw_value()
    }

    pub(super) fn write(&self, bytes: &[u8], at: u64) -> Result<()> {
        Ok(self.placed.main.write_slice(bytes, MemoryRegionAddress(at))?)
    }

    pub(super) fn write_words(&self, words: impl IntoIterator<Item = u64>, at: u64) -> Result<()> {
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        self.write(&bytes, at)
    }

    pub(super) fn word(&self, at: u64) -> Result<u64> {
        Ok(self.placed.main.read_obj(MemoryRegionAddress(at))?)
    }

    /// Has the first vCPU execute this in 64-bit mode, with the first 512 GiB where they are, until it says that it is done.
    pub(super) fn runs(&mut self, code: &[u8]) -> Result<()> {
        let start = self.start();
        self.write_words([(start + TABLES + 0x1000) | 3], TABLES)?;
        self.write_words((0..512).map(|index| index << 30 | 0x83), TABLES + 0x1000)?;
        self.write_words([0, 0x00af_9b00_0000_ffff], GDT)?;
        self.write(&[code, &SAY, &STAY].concat(), CODE)?;
        let boot = long_mode::at(start + CODE, start + GDT, start + TABLES);
        let vcpu = self.vcpus.first_mut().context("a vCPU")?;
        vcpu.set_boot_state(&boot)?;
        until(vcpu.as_mut(), DONE)
    }
}

/// Runs a vCPU until it writes to the port, and not for ever.
pub(super) fn until(vcpu: &mut dyn Vcpu, wanted: u16) -> Result<()> {
    vcpu.kicker().adopt_current_thread();
    let kick = vcpu.kicker();
    let (done, is_done) = channel::<()>();
    let caller = thread::spawn(move || {
        if is_done.recv_timeout(SOON) == Err(RecvTimeoutError::Timeout) {
            kick.kick();
        }
    });
    let result = match vcpu.run()? {
        Exit::PortWrite { port, .. } if port == wanted => Ok(()),
        Exit::Interrupted => Err(anyhow::anyhow!("no word from the guest in {SOON:?}")),
        other => Err(anyhow::anyhow!("the guest came out with {other:?}")),
    };
    drop(done);
    caller
        .join()
        .map_err(|_| anyhow::anyhow!("whoever calls has panicked"))?;
    result
}

/// `mov rax, [address]`, and the other way round.
pub(super) fn load(address: u64) -> Vec<u8> {
    [&[0x48, 0xa1], address.to_le_bytes().as_slice()].concat()
}

pub(super) fn store(address: u64) -> Vec<u8> {
    [&[0x48, 0xa3], address.to_le_bytes().as_slice()].concat()
}

/// `mov ecx, index; mov edx, ...; mov eax, ...; wrmsr`.
pub(super) fn write_msr(index: u32, value: u64) -> Vec<u8> {
    let (low, high) = (value & u64::from(u32::MAX), value >> 32);
    let mut code = vec![0xb9];
    code.extend(index.to_le_bytes());
    for (opcode, half) in [(0xba, high), (0xb8, low)] {
        code.push(opcode);
        code.extend(half.to_le_bytes().iter().take(4));
    }
    code.extend([0x0f, 0x30]);
    code
}

/// `mov ecx, index; rdmsr; shl rdx, 32; or rax, rdx`.
pub(super) fn read_msr(index: u32) -> Vec<u8> {
    let mut code = vec![0xb9];
    code.extend(index.to_le_bytes());
    code.extend([0x0f, 0x32, 0x48, 0xc1, 0xe2, 32, 0x48, 0x09, 0xd0]);
    code
}
