//! A vCPU's whole state, saved in one VM and restored in another, goes on where it was: real KVM, a guest of five bytes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use engine::state::{GeneralRegisters, Segment, SystemRegisters, gpr};
use engine::{BootState, CpuModel, Engine, Exit, Presence, Vcpu, Vm};
use engine_kvm::KvmEngine;
use vm_memory::{Bytes, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress, MmapRegion};

use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "vcpu-state",
    limit: Duration::from_secs(60),
    host,
    guest: None,
};

/// `again: inc ax; out 0x10, ax; jmp again`, in real mode.
const CODE: [u8; 5] = [0x40, 0xe7, 0x10, 0xeb, 0xfb];
pub(super) const CODE_AT: u64 = 0x1000;
const PORT: u16 = 0x10;
pub(super) const MEMORY: usize = 1 << 20;

/// CR0.ET, which is always set.
const CR0_ET: u64 = 1 << 4;

pub(super) fn memory() -> Result<Arc<GuestRegionMmap<()>>> {
    let region = GuestRegionMmap::new(MmapRegion::new(MEMORY)?, GuestAddress(0)).context("a region at 0")?;
    Ok(Arc::new(region))
}

pub(super) fn machine(engine: &KvmEngine, region: &Arc<GuestRegionMmap<()>>) -> Result<(Arc<dyn Vm>, Box<dyn Vcpu>)> {
    let vm = engine.create_vm(CpuModel::Host)?;
    vm.reserve_ioapic_pins(24)?;
    vm.map_ram(0, Arc::clone(region), Presence::AtOnce)?;
    let vcpu = vm.create_vcpu(0, 1)?;
    Ok((vm, vcpu))
}

/// Real mode with flat segments of 64 KiB.
pub(super) fn real_mode() -> BootState {
    let segment = |rights| Segment {
        limit: 0xffff,
        rights,
        ..Segment::default()
    };
    let (code, data) = (segment(0x9b), segment(0x93));
    BootState {
        general: GeneralRegisters {
            rip: CODE_AT,
            rflags: 2,
            ..GeneralRegisters::default()
        },
        system: SystemRegisters {
            segments: [code, data, data, data, data, data],
            tr: segment(0x8b),
            ldtr: segment(0x82),
            cr: [CR0_ET, 0, 0, 0, 0],
            ..SystemRegisters::default()
        },
    }
}

/// Runs to the guest's next output and gives it.
fn next_output(vcpu: &mut dyn Vcpu) -> Result<u16> {
    loop {
        match vcpu.run()? {
            Exit::PortWrite { port: PORT, data, .. } => return Ok(u16::from_le_bytes(data.try_into()?)),
            Exit::Interrupted => (),
            other => bail!("the guest came out with {other:?}"),
        }
    }
}

fn host(_: &Host) -> Result<()> {
    let engine = KvmEngine::open()?;
    let region = memory()?;
    region.write_slice(&CODE, MemoryRegionAddress(CODE_AT))?;
    let (vm, mut vcpu) = machine(&engine, &region)?;
    vcpu.set_boot_state(&real_mode())?;
    for expected in 1..=5 {
        ensure!(
            next_output(vcpu.as_mut())? == expected,
            "the guest cannot count to {expected}"
        );
    }
    let (state, shared) = (vcpu.save()?, vm.save()?);
    ensure!(state.msrs.len() > 20, "only {} MSRs were saved", state.msrs.len());
    let first = state.cpuid.iter().filter(|leaf| leaf.function == 0).count();
    ensure!(first == 1, "CPUID's leaf 0 was saved {first} times");
    let json = serde_json::to_vec(&state)?;

    // Into another VM, through bytes, with a copy of the memory.
    let copy = memory()?;
    let mut bytes = vec![0; usize::try_from(region.len())?];
    region.read_slice(&mut bytes, MemoryRegionAddress(0))?;
    copy.write_slice(&bytes, MemoryRegionAddress(0))?;
    let (other_vm, mut other) = machine(&engine, &copy)?;
    other_vm.restore(&shared)?;
    other.restore(&serde_json::from_slice(&json)?)?;
    for expected in 6..=9 {
        let got = next_output(other.as_mut())?;
        ensure!(got == expected, "the copy goes on with {got} instead of {expected}");
    }
    // The original is not disturbed by having been saved.
    ensure!(next_output(vcpu.as_mut())? == 6, "the original went on elsewhere");

    let clock = other_vm.save()?.clock.nanoseconds;
    ensure!(
        clock >= shared.clock.nanoseconds,
        "the clock went back: {clock} after {}",
        shared.clock.nanoseconds
    );
    dirty_log(vm.as_ref(), vcpu.as_mut(), &region)?;
    string_input(vcpu.as_mut(), &region)
}

/// `rep insb` comes out as accesses of one byte, several in an exit, and what each gave is where the guest wanted it.
fn string_input(vcpu: &mut dyn Vcpu, region: &GuestRegionMmap<()>) -> Result<()> {
    const COUNT: u8 = 20;
    const TO: u64 = 0x6000;
    // `rep insb; out 0x10, ax`.
    region.write_slice(&[0xf3, 0x6c, 0xe7, 0x10], MemoryRegionAddress(CODE_AT))?;
    let mut boot = real_mode();
    boot.general.gpr[gpr::RCX] = u64::from(COUNT);
    boot.general.gpr[gpr::RDX] = u64::from(PORT);
    boot.general.gpr[gpr::RDI] = TO;
    vcpu.set_boot_state(&boot)?;
    let (mut given, mut most) = (0, 0);
    loop {
        match vcpu.run()? {
            Exit::PortRead {
                port: PORT,
                width,
                data,
            } => {
                ensure!(width == 1, "an access of one byte came as one of {width}");
                most = most.max(data.len());
                for byte in data.iter_mut() {
                    given += 1;
                    *byte = given;
                }
            }
            Exit::PortWrite {
                port: PORT,
                width,
                data,
            } => {
                ensure!((width, data.len()) == (2, 2), "`out` came as {width} of {}", data.len());
                break;
            }
            Exit::Interrupted => (),
            other => bail!("the guest came out with {other:?}"),
        }
    }
    ensure!(given == COUNT, "the guest read {given} bytes instead of {COUNT}");
    ensure!(
        most > 1,
        "this KVM never tells of several accesses at once; the check is void"
    );
    let mut bytes = vec![0; usize::from(COUNT)];
    region.read_slice(&mut bytes, MemoryRegionAddress(TO))?;
    ensure!(bytes.iter().copied().eq(1..=COUNT), "the guest read {bytes:?}");
    Ok(())
}

/// The log names the page that the guest wrote, and no other.
fn dirty_log(vm: &dyn Vm, vcpu: &mut dyn Vcpu, region: &GuestRegionMmap<()>) -> Result<()> {
    // `mov [0x5000], ax` in place of `inc ax` and before a new `out`; the processor sees it at the next turn.
    let code = [0xa3, 0x00, 0x50, 0xe7, 0x10, 0xeb, 0xf9];
    region.write_slice(&code, MemoryRegionAddress(CODE_AT))?;
    let mut boot = real_mode();
    boot.general.gpr[0] = 0x1234;
    vcpu.set_boot_state(&boot)?;
    vm.set_dirty_tracking(0, true)?;
    vm.dirty_log(0)?;
    ensure!(next_output(vcpu)? == 0x1234, "the rewritten guest says something else");
    let log = vm.dirty_log(0)?;
    let dirty: Vec<_> = (0..log.len() * 64)
        .filter(|page| log[page / 64] >> (page % 64) & 1 == 1)
        .collect();
    ensure!(dirty == [5], "dirty pages: {dirty:?}");
    let written: u16 = region.read_obj(MemoryRegionAddress(0x5000))?;
    ensure!(written == 0x1234, "the guest wrote {written:#x}");
    Ok(())
}
