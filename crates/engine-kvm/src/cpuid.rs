//! What CPUID answers in a guest: what KVM supports, with the topology of this VM.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

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

/// The leaves of vCPU `id` of `count`: one package, one thread a core.
pub(crate) fn for_vcpu(supported: &CpuId, id: u32, count: u32) -> CpuId {
    let mut cpuid = supported.clone();
    let mut extended_topology = None;
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            0x1 => feature_information(entry, id, count),
            // Intel, deterministic cache parameters: each cache is one core's own; one package of `count` cores.
            0x4 => {
                entry.eax &= 0x3fff;
                entry.eax |= (count.next_power_of_two() - 1).min(63) << 26;
            }
            0xb | 0x1f => {
                extended_topology = Some(entry.function);
                topology(entry, id, count);
            }
            0x8000_0001 => {
                entry.ecx &= !CMP_LEGACY;
                if count > 1 {
                    entry.ecx |= CMP_LEGACY;
                }
            }
            // AMD, sizes: NC in bits 0 to 7, ApicIdSize in 12 to 15.
            0x8000_0008 => entry.ecx = (count - 1) | (bits(count) << 12),
            // AMD, extended APIC id; core id; one node.
            0x8000_001e => {
                entry.eax = id;
                entry.ebx = id;
                entry.ecx = 0;
            }
            _ => (),
        }
    }
    if extended_topology.is_none() {
        log::debug!("this host's KVM offers no extended topology leaf; guests see the legacy one only");
    }
    cpuid
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

/// Extended topology (Intel SDM 2A, CPUID leaf 0BH): level 0 is the thread, level 1 the core.
fn topology(entry: &mut kvm_cpuid_entry2, id: u32, count: u32) {
    let (shift, processors, level) = match entry.index {
        0 => (0, 1, 1),
        1 => (bits(count), count, 2),
        _ => (0, 0, 0),
    };
    entry.eax = shift;
    entry.ebx = processors;
    entry.ecx = (entry.index & 0xff) | (level << 8);
    entry.edx = id;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supported() -> CpuId {
        let entry = |function, index| kvm_cpuid_entry2 {
            function,
            index,
            ..kvm_cpuid_entry2::default()
        };
        CpuId::from_entries(&[
            entry(1, 0),
            entry(0xb, 0),
            entry(0xb, 1),
            entry(0x8000_0008, 0),
            entry(0x8000_001e, 0),
        ])
        .unwrap()
    }

    #[test]
    fn each_vcpu_reads_its_own_id_in_every_leaf_that_has_one() {
        let cpuid = for_vcpu(&supported(), 5, 6);
        let leaves = cpuid.as_slice();
        assert_eq!(leaves[0].ebx >> 24, 5);
        assert_eq!((leaves[0].ebx >> 16) & 0xff, 6);
        assert_eq!(
            leaves[0].ecx & (HYPERVISOR | TSC_DEADLINE | X2APIC),
            HYPERVISOR | TSC_DEADLINE | X2APIC
        );
        assert_eq!(
            (leaves[1].edx, leaves[1].eax, leaves[1].ebx, leaves[1].ecx),
            (5, 0, 1, 0x100)
        );
        assert_eq!(
            (leaves[2].edx, leaves[2].eax, leaves[2].ebx, leaves[2].ecx),
            (5, 3, 6, 0x201)
        );
        assert_eq!(leaves[3].ecx, 5 | (3 << 12));
        assert_eq!(leaves[4].eax, 5);
    }

    #[test]
    fn a_single_vcpu_is_not_hyperthreaded() {
        let cpuid = for_vcpu(&supported(), 0, 1);
        assert_eq!(cpuid.as_slice()[0].edx & HTT, 0);
        assert_eq!(cpuid.as_slice()[2].eax, 0);
    }
}
