//! What CPUID answers in a guest: what KVM supports, with the topology of this VM.

use engine::{EngineError, Result};
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
pub(crate) fn for_vcpu(supported: &CpuId, id: u32, count: u32) -> Result<CpuId> {
    let mut cpuid = supported.clone();
    let leaves = supported.as_slice();
    let amd = leaves.iter().any(|leaf| leaf.function == 0 && AMD.contains(&leaf.ebx));
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            0x1 => feature_information(entry, id, count),
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

/// A hash over all leaves (64-bit FNV-1a), which tells one processor's offer from another's.
pub(crate) fn hash(cpuid: &CpuId) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x100_0000_01b3;
    let words = cpuid
        .as_slice()
        .iter()
        .flat_map(|leaf| [leaf.function, leaf.index, leaf.eax, leaf.ebx, leaf.ecx, leaf.edx]);
    words
        .flat_map(u32::to_le_bytes)
        .fold(BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
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
        let cpuid = for_vcpu(&supported(*b"Auth"), 5, 6).unwrap();
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
            let cpuid = for_vcpu(&supported, 5, 6).unwrap();
            let levels = [0, 1].map(|index| leaf(&cpuid, 0xb, index));
            let registers = levels.map(|level| (level.edx, level.eax, level.ebx, level.ecx, level.flags));
            assert_eq!(registers, [(5, 0, 1, 0x100, 1), (5, 3, 6, 0x201, 1)]);
            assert_eq!(cpuid.as_slice().iter().filter(|leaf| leaf.function == 0xb).count(), 2);
        }
    }

    #[test]
    fn a_single_vcpu_is_not_hyperthreaded() {
        let cpuid = for_vcpu(&supported(*b"Auth"), 0, 1).unwrap();
        assert_eq!(leaf(&cpuid, 1, 0).edx & HTT, 0);
        assert_eq!(leaf(&cpuid, 0xb, 1).eax, 0);
        assert_eq!(leaf(&cpuid, 0x8000_0001, 0).ecx, 0);
    }

    #[test]
    fn the_hash_tells_offers_apart() {
        let one = for_vcpu(&supported(*b"Auth"), 0, 1).unwrap();
        assert_eq!(hash(&one), hash(&one.clone()));
        let mut other = one.clone();
        other.as_mut_slice()[1].edx ^= 1;
        assert_ne!(hash(&one), hash(&other));
    }

    #[test]
    fn registers_that_only_amd_has_stay_clear_elsewhere() {
        let cpuid = for_vcpu(&supported(*b"Genu"), 1, 4).unwrap();
        assert_eq!(leaf(&cpuid, 0x8000_0001, 0).ecx, 0);
        assert_eq!(leaf(&cpuid, 0x8000_0008, 0).ecx, 0);
    }
}
