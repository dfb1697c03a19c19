//! What a guest is shown that owns its CPUs, whose registers are the processor's own: less than all, as some it has no use of or is
//! not given. And of that what a guest can be shown in any class, so that it can go from one to the other.

use crate::CpuidEntry;

/// The last basic leaf that is passed on: that of XSAVE.
pub const OWNED_LAST_BASIC: u32 = 0xd;
/// The last extended leaf: the address widths.
pub const OWNED_LAST_EXTENDED: u32 = 0x8000_0008;

/// CPUID.1:ECX: VMX, SMX, TM2, PDCM, DCA, which go by registers that are not given. MONITOR stays: by MWAIT a vCPU waits for a write
/// by another, which so needs no interrupt to wake it, and no exit.
const WITHOUT_1_ECX: u32 = 1 << 5 | 1 << 6 | 1 << 8 | 1 << 15 | 1 << 18;
/// CPUID.1:EDX: MCE, MCA, DS, ACPI, TM, PBE.
const WITHOUT_1_EDX: u32 = 1 << 7 | 1 << 14 | 1 << 21 | 1 << 22 | 1 << 29 | 1 << 31;
/// CPUID.1:ECX: x2APIC, and a hypervisor.
const WITH_1_ECX: u32 = 1 << 21 | 1 << 31;
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
/// CPUID.8000_0007:EDX: the TSC's rate never changes.
const INVARIANT_TSC: u32 = 1 << 8;
/// CPUID.8000_0008:EBX: CLZERO, WBNOINVD.
const KEPT_8_EBX: u32 = 1 | 1 << 9;
/// CPUID.1:ECX: MONITOR, which KVM does not show.
const MONITOR: u32 = 1 << 3;
/// What KVM offers beside the processor (Linux, Documentation/virt/kvm/x86/cpuid.rst), of which guests of every class have: the clock by
/// its newer registers (3), which never goes back between vCPUs (24).
const COMMON_KVM: u32 = 1 << 3 | 1 << 24;

/// One leaf of a processor as a guest that owns it may see it, if it may.
pub fn owned(leaf: &CpuidEntry) -> Option<CpuidEntry> {
    let [eax, ebx, ecx, edx] = leaf.registers;
    let registers = match (leaf.function, leaf.index) {
        (0x0, _) => [eax.min(OWNED_LAST_BASIC), ebx, ecx, edx],
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
        (0x8000_0000, _) => [eax.min(OWNED_LAST_EXTENDED), ebx, ecx, edx],
        (0x8000_0001, _) => [eax, ebx, ecx & !WITHOUT_EXT_ECX, edx & !WITHOUT_EXT_EDX],
        (0x8000_0002..=0x8000_0006, _) => leaf.registers,
        (0x8000_0007, _) => [0, 0, 0, edx & INVARIANT_TSC],
        (0x8000_0008, _) => [eax, ebx & KEPT_8_EBX, 0, 0],
        _ => return None,
    };
    Some(CpuidEntry { registers, ..*leaf })
}

/// One leaf of what an engine offers, as every class can show it.
pub(crate) fn common(leaf: &CpuidEntry) -> Option<CpuidEntry> {
    let [eax, ebx, ecx, edx] = leaf.registers;
    let registers = match leaf.function {
        0x5 => return None,
        0x4000_0000 => [0x4000_0001, ebx, ecx, edx],
        0x4000_0001 => [eax & COMMON_KVM, 0, 0, 0],
        _ => {
            let mut shown = owned(leaf)?;
            if shown.function == 0x1 {
                shown.registers[crate::ECX] &= !MONITOR;
            }
            return Some(shown);
        }
    };
    Some(CpuidEntry { registers, ..*leaf })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, registers: [u32; 4]) -> CpuidEntry {
        CpuidEntry {
            function,
            registers,
            ..CpuidEntry::default()
        }
    }

    #[test]
    fn an_owner_is_shown_less_than_there_is_and_every_class_less_than_that() {
        let features = leaf(1, [7, 8, u32::MAX, u32::MAX]);
        let [_, _, shown, _] = owned(&features).unwrap().registers;
        assert_eq!(
            (shown & 1 << 5, shown & MONITOR, shown & 1 << 31),
            (0, MONITOR, 1 << 31)
        );
        let [eax, _, everywhere, _] = common(&features).unwrap().registers;
        assert_eq!((eax, everywhere), (7, shown & !MONITOR));
        let [_, _, svm, _] = owned(&leaf(0x8000_0001, [0, 0, 4, 0])).unwrap().registers;
        assert_eq!(svm, 0);
        assert_eq!(owned(&leaf(0x10, [1; 4])), None);
        assert_eq!(common(&leaf(5, [1; 4])), None);
    }

    #[test]
    fn a_guest_waits_as_the_host_could() {
        let shown = |registers| [1, 5].map(|function| owned(&leaf(function, registers)).unwrap().registers);
        let [features, monitor] = shown([0x40, 0x40, 1 << 3, 0x11]);
        assert_eq!(features[2] & 1 << 3, 1 << 3, "MONITOR");
        assert_eq!(monitor, [0x40, 0x40, 0, 0]);
        assert_eq!(shown([0; 4])[0][2] & 1 << 3, 0);
    }

    #[test]
    fn of_kvm_only_the_clock_is_common() {
        assert_eq!(
            common(&leaf(0x4000_0001, [u32::MAX, 1, 2, 3])).unwrap().registers,
            [COMMON_KVM, 0, 0, 0]
        );
        assert_eq!(
            common(&leaf(0x4000_0000, [0x4000_0005, 1, 2, 3])).unwrap().registers,
            [0x4000_0001, 1, 2, 3]
        );
    }
}
