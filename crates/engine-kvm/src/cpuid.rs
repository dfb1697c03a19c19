//! What CPUID answers in a guest: what KVM supports, as far as its CPU model has it, with the topology of this VM.

use engine::{CpuModel, CpuidEntry, EngineError, Result};
use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// CPUID.1:ECX, hypervisor present.
const HYPERVISOR: u32 = 1 << 31;
/// CPUID.1:ECX, TSC-deadline timer. KVM emulates it always but leaves the bit to user space, as it was once not
/// emulated with every interrupt controller.
const TSC_DEADLINE: u32 = 1 << 24;
/// CPUID.1:ECX, x2APIC.
const X2APIC: u32 = 1 << 21;
/// The leaves of vCPU `id` of `count`.
pub(crate) fn for_vcpu(supported: &CpuId, model: CpuModel, id: u32, count: u32) -> Result<CpuId> {
    let leaves = cpu::topology(&of_machine(supported, model), id, count);
    if !leaves.iter().any(|leaf| leaf.function == 0xb) {
        log::debug!("this host's KVM offers no extended topology leaf; guests see the legacy one only");
    }
    to_kvm(&leaves)
}

/// The hash of what a host offers as it was until topology was the guest's own in all leaves.
pub(crate) fn former_hash(supported: &CpuId) -> u64 {
    cpu::former_hash(&of_machine(supported, CpuModel::Host))
}

/// What KVM supports, with what this machine has on every host.
fn of_machine(supported: &CpuId, model: CpuModel) -> Vec<CpuidEntry> {
    let mut leaves = entries(supported);
    for leaf in leaves.iter_mut().filter(|leaf| leaf.function == 0x1) {
        let [_, _, ecx, _] = &mut leaf.registers;
        *ecx |= HYPERVISOR | TSC_DEADLINE | X2APIC;
        // What counts for a guest that can become one that owns its CPUs is its processor's own timer.
        if model == CpuModel::Common {
            *ecx &= !TSC_DEADLINE;
        }
    }
    leaves
}

/// What a VM of `model` starts from, of what KVM supports here.
pub(crate) fn for_model(supported: &CpuId, model: CpuModel) -> Result<CpuId> {
    let shown = cpu::present(model, &entries(supported)).map_err(|error| EngineError::Unusable(error.to_string()))?;
    to_kvm(&shown)
}

/// The leaves as an engine's user knows them.
pub(crate) fn entries(cpuid: &CpuId) -> Vec<CpuidEntry> {
    let entry = |from: &kvm_cpuid_entry2| CpuidEntry {
        function: from.function,
        index: from.index,
        indexed: from.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0,
        registers: [from.eax, from.ebx, from.ecx, from.edx],
    };
    cpuid.as_slice().iter().map(entry).collect()
}

/// The same of what `KVM_GET_CPUID2` has filled in: kernels do not say how many of the entries that is, so those behind are left out.
pub(crate) fn got(cpuid: &CpuId) -> Vec<CpuidEntry> {
    let mut entries = entries(cpuid);
    let used = entries.iter().rposition(|entry| *entry != CpuidEntry::default());
    entries.truncate(used.map_or(0, |last| last + 1));
    entries
}

/// The same for KVM.
pub(crate) fn to_kvm(entries: &[CpuidEntry]) -> Result<CpuId> {
    let entry = |from: &CpuidEntry| {
        let [eax, ebx, ecx, edx] = from.registers;
        kvm_cpuid_entry2 {
            function: from.function,
            index: from.index,
            flags: if from.indexed {
                KVM_CPUID_FLAG_SIGNIFCANT_INDEX
            } else {
                0
            },
            eax,
            ebx,
            ecx,
            edx,
            padding: [0; 3],
        }
    };
    let entries: Vec<_> = entries.iter().map(entry).collect();
    CpuId::from_entries(&entries).map_err(|error| EngineError::State(format!("too many CPUID leaves: {error:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CPUID.1:EDX, more than one logical processor in the package; CPUID.8000_0001:ECX, multi-processor style.
    const HTT: u32 = 1 << 28;
    const CMP_LEGACY: u32 = 1 << 1;

    /// What KVM gives since Linux 6.2: of the extended topology one empty level only.
    fn supported(vendor: &[u8; 12]) -> CpuId {
        let entry = |function| kvm_cpuid_entry2 {
            function,
            ..kvm_cpuid_entry2::default()
        };
        let mut first = entry(0);
        let (letters, _) = vendor.as_chunks::<4>();
        [first.ebx, first.edx, first.ecx] = [0, 1, 2].map(|word: usize| u32::from_le_bytes(letters[word]));
        let others = [1, 0xb, 0x8000_0001, 0x8000_0008, 0x8000_001e].map(entry);
        CpuId::from_entries(&[&[first], &others[..]].concat()).unwrap()
    }

    fn leaf(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        let mut found = cpuid
            .as_slice()
            .iter()
            .filter(|e| e.function == function && e.index == index);
        let leaf = *found.next().unwrap();
        assert!(found.next().is_none(), "leaf {function:#x} twice");
        leaf
    }

    #[test]
    fn each_vcpu_reads_its_own_id_in_every_leaf_that_has_one() {
        let cpuid = for_vcpu(&supported(b"AuthenticAMD"), CpuModel::Host, 5, 6).unwrap();
        let features = leaf(&cpuid, 1, 0);
        assert_eq!((features.ebx >> 24, (features.ebx >> 16) & 0xff), (5, 6));
        let always = HYPERVISOR | TSC_DEADLINE | X2APIC;
        assert_eq!(features.ecx & always, always);
        assert_eq!(leaf(&cpuid, 0x8000_0001, 0).ecx, CMP_LEGACY);
        assert_eq!(leaf(&cpuid, 0x8000_0008, 0).ecx, 5 | (3 << 12));
        assert_eq!(leaf(&cpuid, 0x8000_001e, 0).eax, 5);
    }

    #[test]
    fn both_levels_are_there_whatever_the_host_lists() {
        let mut host = supported(b"GenuineIntel");
        for index in 1..4 {
            host.push(kvm_cpuid_entry2 {
                function: 0xb,
                index,
                flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                eax: 7,
                ebx: 128,
                edx: 99,
                ..kvm_cpuid_entry2::default()
            })
            .unwrap();
        }
        for supported in [supported(b"GenuineIntel"), host] {
            let cpuid = for_vcpu(&supported, CpuModel::Host, 5, 6).unwrap();
            let levels = [0, 1].map(|index| leaf(&cpuid, 0xb, index));
            let registers = levels.map(|level| (level.edx, level.eax, level.ebx, level.ecx, level.flags));
            assert_eq!(registers, [(5, 0, 1, 0x100, 1), (5, 3, 6, 0x201, 1)]);
            assert_eq!(cpuid.as_slice().iter().filter(|leaf| leaf.function == 0xb).count(), 2);
        }
    }

    #[test]
    fn a_single_vcpu_is_not_hyperthreaded() {
        let cpuid = for_vcpu(&supported(b"AuthenticAMD"), CpuModel::Host, 0, 1).unwrap();
        assert_eq!(leaf(&cpuid, 1, 0).edx & HTT, 0);
        assert_eq!(leaf(&cpuid, 0xb, 1).eax, 0);
        assert_eq!(leaf(&cpuid, 0x8000_0001, 0).ecx, 0);
    }

    #[test]
    fn leaves_there_and_back() {
        let cpuid = for_vcpu(&supported(b"AuthenticAMD"), CpuModel::Host, 1, 2).unwrap();
        let again = to_kvm(&entries(&cpuid)).unwrap();
        assert_eq!(again.as_slice(), cpuid.as_slice());
        let error = for_model(&cpuid, CpuModel::V2).unwrap_err().to_string();
        assert!(error.contains("choose host"), "{error}");
        assert_eq!(for_model(&cpuid, CpuModel::Host).unwrap().as_slice(), cpuid.as_slice());
    }

    #[test]
    fn entries_that_kvm_has_not_filled_in_are_no_leaves() {
        let mut cpuid = for_vcpu(&supported(b"AuthenticAMD"), CpuModel::Host, 1, 2).unwrap();
        let leaves = entries(&cpuid);
        for _ in 0..3 {
            cpuid.push(kvm_cpuid_entry2::default()).unwrap();
        }
        assert_eq!(got(&cpuid), leaves);
    }

    #[test]
    fn registers_that_only_amd_has_stay_clear_elsewhere() {
        let cpuid = for_vcpu(&supported(b"GenuineIntel"), CpuModel::Host, 1, 4).unwrap();
        assert_eq!(leaf(&cpuid, 0x8000_0001, 0).ecx, 0);
        assert_eq!(leaf(&cpuid, 0x8000_0008, 0).ecx, 0);
    }
}
