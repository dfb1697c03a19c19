//! From what a host offers to what a guest of a model is shown. Features are masked; what else tells one host's processor from
//! another's is constant, left out, or, where a guest needs the host's own, left as it is.

use crate::features::{REGISTERS, states};
use crate::owned::common;
use crate::{CpuError, CpuModel, CpuidEntry, EAX, EBX, ECX, EDX, Vendor, register};

/// The last basic leaf: that of XSAVE. The topology of leaf 0xb is below it.
const LAST_BASIC: u32 = 0xd;
/// The last extended leaf: on AMD that of the topology, elsewhere that of the address widths.
const LAST_EXTENDED: [u32; 2] = [0x8000_001e, 0x8000_0008];

/// Family, model and stepping. A guest's kernel guesses by them which faults its processor has: these have most of those that have
/// a name, so that a guest guards itself against what another host of its vendor may have, though not against what later
/// families alone have (docs/vmm.md). AMD: family 0x17, model 0x31 (Zen 2).
const AMD_SIGNATURE: u32 = 0x0083_0f10;
/// Intel: family 6, model 0x55, stepping 7 (Cascade Lake).
const INTEL_SIGNATURE: u32 = 0x0005_0657;

/// CPUID.1:EBX, the size of a cache line for CLFLUSH in units of 8 bytes. The rest is this VM's topology.
const CLFLUSH_LINE: u32 = 8 << 8;

/// Bits of linear addresses with four levels of page tables, in the place of CPUID.8000_0008:EAX.
const LINEAR_BITS: u32 = 48 << 8;

/// What all features of an XSAVE area need before any state's own (Intel SDM 1, 13.4): legacy area and header.
const XSAVE_LEAST: u32 = 512 + 64;

/// What a guest of `model` is shown by a host that offers `offered`: the leaves of a vCPU but for topology, which whoever knows how
/// many there are fills in.
///
/// # Errors
/// The host has less than the model.
pub fn present(model: CpuModel, offered: &[CpuidEntry]) -> Result<Vec<CpuidEntry>, CpuError> {
    match model {
        CpuModel::Host => return Ok(offered.to_vec()),
        CpuModel::Common => return Ok(offered.iter().filter_map(common).collect()),
        CpuModel::V2 | CpuModel::V3 | CpuModel::V4 => (),
    }
    let vendor = Vendor::of(offered);
    let mut lacks = Vec::new();
    for set in &REGISTERS {
        let here = register(offered, set.function, set.index, set.register);
        set.add_names(set.required(model, vendor) & !(here | set.own), &mut lacks);
    }
    let here = register(offered, 0xd, 0, EAX);
    if states(model) & !here != 0 {
        lacks.push(format!("the XSAVE states {:#x}", states(model) & !here));
    }
    if !lacks.is_empty() {
        let lacks = lacks.join(", ");
        return Err(CpuError::Model { model, lacks });
    }
    let shown = offered.iter().filter_map(|leaf| {
        let registers = show(leaf, model, vendor, offered)?;
        Some(CpuidEntry { registers, ..*leaf })
    });
    Ok(shown.collect())
}

/// The states that a guest can have in its XSAVE area by what it is shown; x87 and SSE are there without XSAVE, too.
pub fn xfeatures(shown: &[CpuidEntry]) -> u64 {
    let [low, high] = [EAX, EDX].map(|at| u64::from(register(shown, 0xd, 0, at)));
    low | high << 32 | 0b11
}

/// One leaf, or nothing of it.
fn show(leaf: &CpuidEntry, model: CpuModel, vendor: Vendor, offered: &[CpuidEntry]) -> Option<[u32; 4]> {
    let [eax, ebx, ecx, edx] = leaf.registers;
    let features = |at: usize| {
        let mut sets = REGISTERS
            .iter()
            .filter(|set| (set.function, set.index, set.register) == (leaf.function, leaf.index, at));
        let shown = sets
            .next()
            .map_or(0, |set| set.required(model, vendor) | set.optional());
        leaf.registers[at] & shown
    };
    let signature = match vendor {
        Vendor::Amd => AMD_SIGNATURE,
        Vendor::Intel => INTEL_SIGNATURE,
    };
    let amd = vendor == Vendor::Amd;
    Some(match (leaf.function, leaf.index) {
        (0x0, _) => [eax.min(LAST_BASIC), ebx, ecx, edx],
        (0x1, _) => [signature, CLFLUSH_LINE, features(ECX), features(EDX)],
        // Caches are the host's, and what it is started on is as good as any other for a guest that goes elsewhere. Topology; and
        // what KVM itself offers, which is no processor's.
        (0x2 | 0x4 | 0xb | 0x8000_0005 | 0x8000_0006 | 0x8000_001d, _) => leaf.registers,
        (0x4000_0000..=0x4000_00ff, _) => leaf.registers,
        (0x8000_001e, _) if amd => leaf.registers,
        (0x6, _) => [features(EAX), 0, 0, 0],
        (0x7, 0) => [0, features(EBX), features(ECX), features(EDX)],
        (0xd, index) => xsave(leaf, index, (states(model), features(EAX)), offered)?,
        (0x8000_0000, _) => [eax.min(LAST_EXTENDED[usize::from(!amd)]), ebx, ecx, edx],
        (0x8000_0001, _) => [if amd { signature } else { 0 }, 0, features(ECX), features(EDX)],
        (0x8000_0002..=0x8000_0004, _) => brand(model, leaf.function),
        (0x8000_0007, _) => [0, 0, 0, features(EDX)],
        (0x8000_0008, _) => [eax & 0xff | LINEAR_BITS, features(EBX), ecx, 0],
        _ => return None,
    })
}

/// A part of leaf 0xd. The sizes are those of all that the guest could switch on; what is on at a time is KVM's to tell.
fn xsave(leaf: &CpuidEntry, index: u32, (states, features): (u32, u32), offered: &[CpuidEntry]) -> Option<[u32; 4]> {
    let has = |state: u32| state >= 2 && states & 1_u32.checked_shl(state).unwrap_or(0) != 0;
    match index {
        _ if states == 0 => None,
        0 => {
            let ends = (2..32).filter(|state| has(*state)).map(|state| {
                let [size, offset] = [EAX, EBX].map(|at| register(offered, 0xd, state, at));
                offset.saturating_add(size)
            });
            let size = ends.fold(XSAVE_LEAST, u32::max);
            Some([states, size, size, 0])
        }
        1 => Some([features, 0, 0, 0]),
        _ => has(index).then_some(leaf.registers),
    }
}

/// A third of the processor's name, which has 48 bytes.
fn brand(model: CpuModel, function: u32) -> [u32; 4] {
    let mut name = [0; 48];
    let text = format!("Basalt {model}");
    name[..text.len()].copy_from_slice(text.as_bytes());
    let third = usize::try_from(function - 0x8000_0002).unwrap_or(0) * 16;
    std::array::from_fn(|word| {
        let at = third + 4 * word;
        u32::from_le_bytes([name[at], name[at + 1], name[at + 2], name[at + 3]])
    })
}
