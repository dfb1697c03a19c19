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
/// CPUID.1:EDX, more than one logical processor in the package.
const HTT: u32 = 1 << 28;
/// CPUID.8000_0001:ECX, AMD's core count is legacy-multi-processor style.
const CMP_LEGACY: u32 = 1 << 1;

/// Extended topology and its second version; both have the same two levels here.
const TOPOLOGY: [u32; 2] = [0xb, 0x1f];
/// CPUID.0:EBX of processors that follow AMD's manual: `AuthenticAMD` and `HygonGenuine`.
const AMD: [u32; 2] = [u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"Hygo")];

/// The leaves of vCPU `id` of `count`: one package, one thread a core.
pub(crate) fn for_vcpu(supported: &CpuId, model: CpuModel, id: u32, count: u32) -> Result<CpuId> {
    let mut cpuid = supported.clone();
    let leaves = supported.as_slice();
    let amd = leaves.iter().any(|leaf| leaf.function == 0 && AMD.contains(&leaf.ebx));
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            0x1 => {
                feature_information(entry, id, count);
                // What counts for a guest that can become one that owns its CPUs is its processor's own timer.
                if model == CpuModel::Common {
                    entry.ecx &= !TSC_DEADLINE;
                }
            }
            // Intel, deterministic cache parameters: each cache is one core's own; one package of `count` cores.
            0x4 => {
                entry.eax &= 0x3fff;
                entry.eax |= (count.next_power_of_two() - 1).min(63) << 26;
            }
            // Reserved on Intel, where Linux takes it for a reason not to look at the topology.
            0x8000_0001 if amd => {
                entry.ecx &= !CMP_LEGACY;
                if count > 1 {
                    entry.ecx |= CMP_LEGACY;
                }
            }
            // AMD, sizes: NC in bits 0 to 7, ApicIdSize in 12 to 15.
            0x8000_0008 if amd => entry.ecx = (count - 1) | (bits(count) << 12),
            // AMD, extended APIC id; core id; one node.
            0x8000_001e => {
                entry.eax = id;
                entry.ebx = id;
                entry.ecx = 0;
            }
            _ => (),
        }
    }
    // KVM lists the host's levels (before Linux 6.2) or none but an empty first (since): neither are the guest's.
    cpuid.retain(|entry| !TOPOLOGY.contains(&entry.function));
    let offered = TOPOLOGY.map(|function| leaves.iter().any(|leaf| leaf.function == function).then_some(function));
    for function in offered.into_iter().flatten() {
        for index in 0..2 {
            cpuid
                .push(topology(function, index, id, count))
                .map_err(|error| EngineError::State(format!("too many CPUID leaves: {error:?}")))?;
        }
    }
    if offered == [None; 2] {
        log::debug!("this host's KVM offers no extended topology leaf; guests see the legacy one only");
    }
    Ok(cpuid)
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

/// How many bits an APIC id has when there are `count` of them.
fn bits(count: u32) -> u32 {
    count.next_power_of_two().trailing_zeros()
}

fn feature_information(entry: &mut kvm_cpuid_entry2, id: u32, count: u32) {
    entry.ecx |= HYPERVISOR | TSC_DEADLINE | X2APIC;
    entry.ebx = (entry.ebx & 0x0000_ffff) | ((id & 0xff) << 24) | (count.min(255) << 16);
    entry.edx &= !HTT;
    if count > 1 {
        entry.edx |= HTT;
    }
}

/// Extended topology (Intel SDM 2A, CPUID leaf 0BH): level 0 is the thread, level 1 the core. KVM itself answers that
/// there is no further level, given that there is a level 1.
fn topology(function: u32, index: u32, id: u32, count: u32) -> kvm_cpuid_entry2 {
    let (shift, processors, level) = if index == 0 { (0, 1, 1) } else { (bits(count), count, 2) };
    kvm_cpuid_entry2 {
        function,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: processors,
        ecx: index | (level << 8),
        edx: id,
        ..kvm_cpuid_entry2::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What KVM gives since Linux 6.2: of the extended topology one empty level only.
    fn supported(vendor: [u8; 4]) -> CpuId {
        let entry = |function| kvm_cpuid_entry2 {
            function,
            ..kvm_cpuid_entry2::default()
        };
        let mut first = entry(0);
        first.ebx = u32::from_le_bytes(vendor);
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
        let cpuid = for_vcpu(&supported(*b"Auth"), CpuModel::Host, 5, 6).unwrap();
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
        let mut host = supported(*b"Genu");
        for index in 1..4 {
            host.push(kvm_cpuid_entry2 {
                eax: 7,
                ..topology(0xb, index, 99, 128)
            })
            .unwrap();
        }
        for supported in [supported(*b"Genu"), host] {
            let cpuid = for_vcpu(&supported, CpuModel::Host, 5, 6).unwrap();
            let levels = [0, 1].map(|index| leaf(&cpuid, 0xb, index));
            let registers = levels.map(|level| (level.edx, level.eax, level.ebx, level.ecx, level.flags));
            assert_eq!(registers, [(5, 0, 1, 0x100, 1), (5, 3, 6, 0x201, 1)]);
            assert_eq!(cpuid.as_slice().iter().filter(|leaf| leaf.function == 0xb).count(), 2);
        }
    }

    #[test]
    fn a_single_vcpu_is_not_hyperthreaded() {
        let cpuid = for_vcpu(&supported(*b"Auth"), CpuModel::Host, 0, 1).unwrap();
        assert_eq!(leaf(&cpuid, 1, 0).edx & HTT, 0);
        assert_eq!(leaf(&cpuid, 0xb, 1).eax, 0);
        assert_eq!(leaf(&cpuid, 0x8000_0001, 0).ecx, 0);
    }

    #[test]
    fn leaves_there_and_back() {
        let cpuid = for_vcpu(&supported(*b"Auth"), CpuModel::Host, 1, 2).unwrap();
        let again = to_kvm(&entries(&cpuid)).unwrap();
        assert_eq!(again.as_slice(), cpuid.as_slice());
        let error = for_model(&cpuid, CpuModel::V2).unwrap_err().to_string();
        assert!(error.contains("choose host"), "{error}");
        assert_eq!(for_model(&cpuid, CpuModel::Host).unwrap().as_slice(), cpuid.as_slice());
    }

    #[test]
    fn entries_that_kvm_has_not_filled_in_are_no_leaves() {
        let mut cpuid = for_vcpu(&supported(*b"Auth"), CpuModel::Host, 1, 2).unwrap();
        let leaves = entries(&cpuid);
        for _ in 0..3 {
            cpuid.push(kvm_cpuid_entry2::default()).unwrap();
        }
        assert_eq!(got(&cpuid), leaves);
    }

    #[test]
    fn registers_that_only_amd_has_stay_clear_elsewhere() {
        let cpuid = for_vcpu(&supported(*b"Genu"), CpuModel::Host, 1, 4).unwrap();
        assert_eq!(leaf(&cpuid, 0x8000_0001, 0).ecx, 0);
        assert_eq!(leaf(&cpuid, 0x8000_0008, 0).ecx, 0);
    }
}
