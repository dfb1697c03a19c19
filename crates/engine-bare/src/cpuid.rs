//! What CPUID answers in a guest that owns its CPUs: what the host's processor says, less what such a guest has no use of or is not
//! given the registers for, with the topology of this VM and the paravirtual clock's announcement. Which id each vCPU's APIC has
//! the module fills in.

use std::arch::x86_64::__cpuid_count;

use engine::CpuidEntry;

use crate::uapi::{CPUID_INDEX, Cpuid, CpuidLeaf, MAX_CPUID};

/// Leaves of which ECX matters, as far as they are passed on.
const INDEXED: [u32; 3] = [0x7, 0xb, 0xd];

/// The last basic leaf that is passed on: that of XSAVE.
const LAST_BASIC: u32 = 0xd;
/// The last extended leaf: the address widths.
const LAST_EXTENDED: u32 = 0x8000_0008;

/// CPUID.1:ECX: VMX, SMX, TM2, PDCM, DCA, which go by registers that are not given. MONITOR stays: by MWAIT a vCPU waits for a write
/// by another, which so needs no interrupt to wake it, and no exit.
const WITHOUT_1_ECX: u32 = 1 << 5 | 1 << 6 | 1 << 8 | 1 << 15 | 1 << 18;
/// CPUID.1:EDX: MCE, MCA, DS, ACPI, TM, PBE.
const WITHOUT_1_EDX: u32 = 1 << 7 | 1 << 14 | 1 << 21 | 1 << 22 | 1 << 29 | 1 << 31;
/// CPUID.1:ECX: x2APIC, and a hypervisor.
const WITH_1_ECX: u32 = 1 << 21 | 1 << 31;
/// CPUID.1:EDX: more than one logical processor in the package.
const HTT: u32 = 1 << 28;
/// CPUID.7:EBX: TSC_ADJUST, SGX, RDT-M, RDT-A, PT.
const WITHOUT_7_EBX: u32 = 1 << 1 | 1 << 2 | 1 << 12 | 1 << 15 | 1 << 25;
/// CPUID.7:ECX: WAITPKG, CET's shadow stacks, LA57, bus lock detection.
const WITHOUT_7_ECX: u32 = 1 << 5 | 1 << 7 | 1 << 16 | 1 << 24;
/// CPUID.7:EDX: those of which there are registers (speculation's controls among them), and CET.
const KEPT_7_EDX: u32 = 1 << 2 | 1 << 3 | 1 << 4 | 1 << 8 | 1 << 14;
/// CPUID.(0xD,1):EAX: XSAVES, whose register is not given, and extended feature disable.
const WITHOUT_D_1_EAX: u32 = 1 << 3 | 1 << 4;
/// CPUID.8000_0001:ECX: SVM, extended APIC space, OSVW, IBS, SKINIT, WDT, LWP, NodeId, topology extensions, counters, MWAITX.
const WITHOUT_EXT_ECX: u32 = 1 << 2
    | 1 << 3
    | 1 << 9
    | 1 << 10
    | 1 << 12
    | 1 << 13
    | 1 << 15
    | 1 << 19
    | 1 << 22
    | 1 << 23
    | 1 << 24
    | 1 << 27
    | 1 << 28
    | 1 << 29;
/// CPUID.8000_0001:EDX: MCE, MCA.
const WITHOUT_EXT_EDX: u32 = 1 << 7 | 1 << 14;
/// CPUID.8000_0001:ECX: the core count is legacy-multi-processor style.
const CMP_LEGACY: u32 = 1 << 1;
/// CPUID.8000_0007:EDX: the TSC's rate never changes.
const INVARIANT_TSC: u32 = 1 << 8;
/// CPUID.8000_0008:EBX: CLZERO, WBNOINVD.
const KEPT_8_EBX: u32 = 1 | 1 << 9;

/// The signature by which Linux knows that its clock is there, and what it may use of it (Linux,
/// Documentation/virt/kvm/x86/cpuid.rst): the clock by its newer registers (3), ids of more than 8 bits in messages (15), and that the
/// clock never goes back between vCPUs (24).
const SIGNATURE: [u8; 12] = *b"KVMKVMKVM\0\0\0";
const OFFERED: u32 = 1 << 3 | 1 << 15 | 1 << 24;

/// What this host's processor offers a guest that owns it, as one of one.
pub(crate) fn offered() -> Vec<CpuidEntry> {
    let mut leaves = Vec::new();
    for (first, most) in [(0, LAST_BASIC), (0x8000_0000, LAST_EXTENDED)] {
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
                leaves.extend(pass_on(leaf));
            }
        }
    }
    leaves.extend(hypervisor());
    leaves
}

/// One leaf as a guest may see it, if it may.
fn pass_on(leaf: CpuidEntry) -> Option<CpuidEntry> {
    let [eax, ebx, ecx, edx] = leaf.registers;
    let registers = match (leaf.function, leaf.index) {
        (0x0, _) => [eax.min(LAST_BASIC), ebx, ecx, edx],
        (0x1, _) => [eax, ebx, (ecx & !WITHOUT_1_ECX) | WITH_1_ECX, edx & !WITHOUT_1_EDX],
        (0x2, _) => leaf.registers,
        // The sizes of what is watched; no extensions, so that Linux waits by the plainest hint (prefer_mwait_c1_over_halt()).
        (0x5, _) => [eax & 0xffff, ebx & 0xffff, 0, 0],
        // Of the thermal and power leaf: the APIC's timer never stops.
        (0x6, _) => [eax & 1 << 2, 0, 0, 0],
        (0x7, 0) => [0, ebx & !WITHOUT_7_EBX, ecx & !WITHOUT_7_ECX, edx & KEPT_7_EDX],
        (0xb, _) => leaf.registers,
        (0xd, 1) => [eax & !WITHOUT_D_1_EAX, 0, 0, 0],
        (0xd, _) if leaf.index == 0 || eax != 0 => leaf.registers,
        (0x8000_0000, _) => [eax.min(LAST_EXTENDED), ebx, ecx, edx],
        (0x8000_0001, _) => [eax, ebx, ecx & !WITHOUT_EXT_ECX, edx & !WITHOUT_EXT_EDX],
        (0x8000_0002..=0x8000_0006, _) => leaf.registers,
        (0x8000_0007, _) => [0, 0, 0, edx & INVARIANT_TSC],
        (0x8000_0008, _) => [eax, ebx & KEPT_8_EBX, 0, 0],
        _ => return None,
    };
    Some(CpuidEntry { registers, ..leaf })
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

/// The leaves of a VM whose vCPUs have these APIC ids: one package, one thread a core. The ids themselves the module fills in.
pub(crate) fn for_vm(shown: &[CpuidEntry], apic_ids: &[u32]) -> Vec<CpuidEntry> {
    let count = u32::try_from(apic_ids.len()).unwrap_or(1).max(1);
    let largest = apic_ids.iter().copied().max().unwrap_or(0);
    let bits = 32 - largest.leading_zeros();
    let several = count > 1;
    let mut leaves: Vec<_> = shown.iter().filter(|leaf| leaf.function != 0xb).copied().collect();
    for leaf in &mut leaves {
        let [_, ebx, ecx, edx] = &mut leaf.registers;
        match leaf.function {
            0x1 => {
                *ebx = (*ebx & 0x0000_ffff) | count.min(255) << 16;
                *edx = (*edx & !HTT) | if several { HTT } else { 0 };
            }
            0x8000_0001 => *ecx = (*ecx & !CMP_LEGACY) | if several { CMP_LEGACY } else { 0 },
            0x8000_0008 => *ecx = (count - 1) | bits << 12,
            _ => (),
        }
    }
    // Intel SDM 2A, leaf 0BH: a thread of a core, and a core of the package.
    for (index, shift, processors, level) in [(0, 0, 1, 1), (1, bits, count, 2)] {
        leaves.push(CpuidEntry {
            function: 0xb,
            index,
            indexed: true,
            registers: [shift, processors, index | level << 8, 0],
        });
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
        assert_eq!(ecx & WITH_1_ECX, WITH_1_ECX);
        assert_eq!(ecx & WITHOUT_1_ECX, 0);
        let [eax, ebx, ecx, edx] = leaf(&offered, 0x4000_0000, 0);
        assert_eq!(
            (eax, [ebx, ecx, edx].map(u32::to_le_bytes).concat()),
            (0x4000_0001, SIGNATURE.to_vec())
        );
        assert!(leaf(&offered, 0, 0)[0] <= LAST_BASIC);
        assert!(leaf(&offered, 0x8000_0000, 0)[0] <= LAST_EXTENDED);
    }

    #[test]
    fn a_guest_waits_as_the_host_could() {
        let shown = |registers| {
            let leaf = |function| CpuidEntry {
                function,
                registers,
                ..CpuidEntry::default()
            };
            [1, 5].map(|function| pass_on(leaf(function)).unwrap().registers)
        };
        let [features, monitor] = shown([0x40, 0x40, 1 << 3, 0x11]);
        assert_eq!(features[2] & 1 << 3, 1 << 3, "MONITOR");
        assert_eq!(monitor, [0x40, 0x40, 0, 0]);
        assert_eq!(shown([0; 4])[0][2] & 1 << 3, 0);
    }

    #[test]
    fn the_topology_is_the_vms() {
        let vm = for_vm(&offered(), &[2, 5, 3]);
        assert_eq!(leaf(&vm, 1, 0)[1] >> 16 & 0xff, 3);
        assert_eq!(leaf(&vm, 1, 0)[3] & HTT, HTT);
        assert_eq!(leaf(&vm, 0xb, 0), [0, 1, 0x100, 0]);
        assert_eq!(leaf(&vm, 0xb, 1), [3, 3, 0x201, 0], "ids up to 5 have three bits");
        let one = for_vm(&offered(), &[0]);
        assert_eq!(leaf(&one, 1, 0)[3] & HTT, 0);
        assert_eq!(leaf(&one, 0xb, 1)[0], 0);
    }

    #[test]
    fn the_module_is_told_all_of_it() {
        let vm = for_vm(&offered(), &[0, 1]);
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
