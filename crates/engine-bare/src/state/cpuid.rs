//! What CPUID answers in a guest that owns its CPUs: what the host's processor says, less what such a guest has no use of or is not
//! given the registers for, with the topology of this VM and the paravirtual clock's announcement. Which id each vCPU's APIC has
//! the module fills in.

use std::arch::x86_64::__cpuid_count;

use engine::CpuidEntry;

use crate::module::uapi::{CPUID_INDEX, Cpuid, CpuidLeaf, MAX_CPUID};

/// Leaves of which ECX matters, as far as they are passed on.
const INDEXED: [u32; 3] = [0x7, 0xb, 0xd];

/// CPUID.0BH, extended topology.
const EXTENDED_TOPOLOGY: u32 = 0xb;

/// The last leaves that are passed on.
const LAST: [(u32, u32); 2] = [(0, cpu::OWNED_LAST_BASIC), (0x8000_0000, cpu::OWNED_LAST_EXTENDED)];

/// The signature by which Linux knows that its clock is there, and what it may use of it (Linux,
/// Documentation/virt/kvm/x86/cpuid.rst): the clock by its newer registers (3), ids of more than 8 bits in messages (15), and that the
/// clock never goes back between vCPUs (24).
const SIGNATURE: [u8; 12] = *b"KVMKVMKVM\0\0\0";
const OFFERED: u32 = 1 << 3 | 1 << 15 | 1 << 24;

/// What this host's processor offers a guest that owns it, as one of one.
pub(crate) fn offered() -> Vec<CpuidEntry> {
    let mut leaves = Vec::new();
    for (first, most) in LAST {
        let last = __cpuid_count(first, 0).eax.min(most);
        for function in first..=last.max(first) {
            let indexed = INDEXED.contains(&function);
            let last_index = match function {
                0xd => 63,
                0xb => 1,
                _ => 0,
            };
            for index in 0..=last_index {
                let is = __cpuid_count(function, index);
                let leaf = CpuidEntry {
                    function,
                    index,
                    indexed,
                    registers: [is.eax, is.ebx, is.ecx, is.edx],
                };
                leaves.extend(cpu::owned(&leaf));
            }
        }
    }
    leaves.extend(hypervisor());
    leaves
}

fn hypervisor() -> [CpuidEntry; 2] {
    let (words, _) = SIGNATURE.as_chunks::<4>();
    let word = |index: usize| words.get(index).map_or(0, |word| u32::from_le_bytes(*word));
    let leaf = |function, registers| CpuidEntry {
        function,
        registers,
        ..CpuidEntry::default()
    };
    [
        leaf(0x4000_0000, [0x4000_0001, word(0), word(1), word(2)]),
        leaf(0x4000_0001, [OFFERED, 0, 0, 0]),
    ]
}

/// The leaves of a VM of so many vCPUs. The ids themselves the module fills in.
pub(crate) fn for_vm(shown: &[CpuidEntry], count: u32) -> Vec<CpuidEntry> {
    let mut shown = shown.to_vec();
    if !shown.iter().any(|leaf| leaf.function == EXTENDED_TOPOLOGY) {
        // The module has it whatever the processor is.
        shown.push(CpuidEntry {
            function: EXTENDED_TOPOLOGY,
            ..CpuidEntry::default()
        });
    }
    cpu::topology(&shown, 0, count)
}

/// The same, but for what the module fills in by itself: as vCPU `id` of `count` sees it.
pub(crate) fn as_seen(leaves: &[CpuidEntry], id: u32) -> Vec<CpuidEntry> {
    let mut leaves = leaves.to_vec();
    for leaf in &mut leaves {
        match leaf.function {
            0x1 => leaf.registers[1] = leaf.registers[1] & 0x00ff_ffff | id << 24,
            0xb | 0x1f => leaf.registers[3] = id,
            0x8000_001e => leaf.registers[0] = id,
            _ => (),
        }
    }
    leaves
}

/// The same for the module; as many as it can take.
pub(crate) fn to_module(leaves: &[CpuidEntry]) -> Cpuid {
    let mut cpuid = Cpuid::default();
    for (to, from) in cpuid.entries.iter_mut().zip(leaves) {
        *to = CpuidLeaf {
            function: from.function,
            index: from.index,
            flags: if from.indexed { CPUID_INDEX } else { 0 },
            registers: from.registers,
            ..CpuidLeaf::default()
        };
    }
    cpuid.count = u32::try_from(leaves.len().min(MAX_CPUID)).unwrap_or(0);
    cpuid
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CPUID.1:ECX.
    const VMX: u32 = 1 << 5;
    const X2APIC: u32 = 1 << 21;
    /// CPUID.1:EDX: more than one logical processor in the package.
    const HTT: u32 = 1 << 28;

    fn leaf(leaves: &[CpuidEntry], function: u32, index: u32) -> [u32; 4] {
        let mut found = leaves
            .iter()
            .filter(|leaf| leaf.function == function && leaf.index == index);
        let registers = found.next().unwrap().registers;
        assert!(found.next().is_none(), "leaf {function:#x} twice");
        registers
    }

    #[test]
    fn what_a_guest_is_not_given_it_is_not_shown() {
        let offered = offered();
        let [_, _, ecx, _] = leaf(&offered, 1, 0);
        assert_eq!((ecx & X2APIC, ecx & VMX), (X2APIC, 0));
        let [eax, ebx, ecx, edx] = leaf(&offered, 0x4000_0000, 0);
        assert_eq!(
            (eax, [ebx, ecx, edx].map(u32::to_le_bytes).concat()),
            (0x4000_0001, SIGNATURE.to_vec())
        );
        for (first, last) in LAST {
            assert!(leaf(&offered, first, 0)[0] <= last);
        }
    }

    #[test]
    fn the_topology_is_the_vms() {
        let vm = for_vm(&offered(), 3);
        assert_eq!(leaf(&vm, 1, 0)[1] >> 16 & 0xff, 3);
        assert_eq!(leaf(&vm, 1, 0)[3] & HTT, HTT);
        assert_eq!(leaf(&vm, 0xb, 0), [0, 1, 0x100, 0]);
        assert_eq!(leaf(&vm, 0xb, 1), [2, 3, 0x201, 0], "ids up to 2 have two bits");
        let one = for_vm(&offered(), 1);
        assert_eq!(leaf(&one, 1, 0)[3] & HTT, 0);
        assert_eq!(leaf(&one, 0xb, 1)[0], 0);
    }

    #[test]
    fn the_module_is_told_all_of_it() {
        let vm = for_vm(&offered(), 2);
        let cpuid = to_module(&vm);
        assert_eq!(cpuid.count as usize, vm.len());
        assert!(vm.len() < MAX_CPUID);
        let topology = cpuid.entries[vm.len() - 1];
        assert_eq!(
            (topology.function, topology.index, topology.flags),
            (0xb, 1, CPUID_INDEX)
        );
    }
}
