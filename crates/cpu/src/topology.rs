//! The topology that a guest is shown: one package, a core for each vCPU, one thread a core. Caches of the first two levels are a
//! core's own, all others are the package's. Nothing of it is the host's, so a guest that is saved goes on where there are more
//! processors or fewer. Knows no engine.

use crate::{CpuidEntry, EAX, EBX, ECX, EDX, Vendor};

/// CPUID.1:EDX, more than one logical processor in the package.
const HTT: u32 = 1 << 28;
/// CPUID.8000_0001:ECX, AMD's core count is legacy-multi-processor style.
const CMP_LEGACY: u32 = 1 << 1;

/// Extended topology and its second version; both have the same two levels here.
const EXTENDED: [u32; 2] = [0xb, 0x1f];

/// Cache parameters, EAX (Intel SDM 2A, leaf 04H; AMD APM 3, E.4.15): the level in bits 5 to 7, how many logical processors share the
/// cache in 14 to 25, and, on Intel alone, how many cores the package has in 26 to 31; each less one.
const CACHE_LEVEL: u32 = 0b111 << 5;
const CACHE_SHARED: u32 = 0xfff << 14;
const CACHE_CORES: u32 = 0x3f << 26;

/// A type of 0 is that of no cache: the end of the list.
const CACHE_TYPE: u32 = 0x1f;

/// The leaves of vCPU `id` of `count`, of those that a guest is shown. Leaves of the extended topology are filled in where there are any,
/// however many levels the host has.
#[must_use]
pub fn topology(shown: &[CpuidEntry], id: u32, count: u32) -> Vec<CpuidEntry> {
    let count = count.max(1);
    let amd = Vendor::of(shown) == Vendor::Amd;
    let mut leaves: Vec<CpuidEntry> = shown.to_vec();
    for leaf in &mut leaves {
        let registers = &mut leaf.registers;
        match leaf.function {
            0x1 => {
                registers[EBX] = registers[EBX] & 0xffff | (id & 0xff) << 24 | count.min(255) << 16;
                registers[EDX] = registers[EDX] & !HTT | if count > 1 { HTT } else { 0 };
            }
            0x4 => {
                registers[EAX] = cache(registers[EAX], count);
                registers[EAX] |= cores(registers[EAX], count);
            }
            0x8000_001d => registers[EAX] = cache(registers[EAX], count),
            // Reserved on Intel, where Linux takes it for a reason not to look at the topology.
            0x8000_0001 if amd => {
                registers[ECX] = registers[ECX] & !CMP_LEGACY | if count > 1 { CMP_LEGACY } else { 0 };
            }
            // AMD, sizes: NC in bits 0 to 7, ApicIdSize in 12 to 15.
            0x8000_0008 if amd => registers[ECX] = (count - 1) | bits(count) << 12,
            // AMD, extended APIC id; core id, of one thread; one node.
            0x8000_001e => [registers[EAX], registers[EBX], registers[ECX]] = [id, id, 0],
            _ => (),
        }
    }
    // KVM lists the host's levels (before Linux 6.2) or none but an empty first (since): neither are the guest's.
    leaves.retain(|leaf| !EXTENDED.contains(&leaf.function));
    for function in EXTENDED {
        if shown.iter().any(|leaf| leaf.function == function) {
            leaves.extend([0, 1].map(|index| level(function, index, id, count)));
        }
    }
    leaves
}

/// The hash of leaves of a single vCPU as it was until the caches were the guest's own: that of a snapshot of then. `offered` is what
/// the host offers.
pub fn former_hash(offered: &[CpuidEntry]) -> u64 {
    let mut leaves = topology(offered, 0, 1);
    for leaf in &mut leaves {
        let was = |function: u32| {
            let mut same = offered
                .iter()
                .filter(|was| was.function == function && was.index == leaf.index);
            same.next().map_or(0, |was| was.registers[EAX])
        };
        match leaf.function {
            0x4 => leaf.registers[EAX] = was(0x4) & !(CACHE_SHARED | CACHE_CORES),
            0x8000_001d => leaf.registers[EAX] = was(0x8000_001d),
            _ => (),
        }
    }
    crate::hash(&leaves)
}

/// Cache parameters in a package of `count` cores, without their number.
fn cache(eax: u32, count: u32) -> u32 {
    let shared = match (eax & CACHE_LEVEL) >> 5 {
        0..=2 => 1,
        _ => count,
    };
    match eax & CACHE_TYPE {
        0 => eax,
        _ => eax & !(CACHE_SHARED | CACHE_CORES) | (shared.next_power_of_two() - 1).min(0xfff) << 14,
    }
}

/// What Intel's leaf of a cache says of the package besides.
fn cores(eax: u32, count: u32) -> u32 {
    match eax & CACHE_TYPE {
        0 => 0,
        _ => (count.next_power_of_two() - 1).min(63) << 26,
    }
}

/// How many bits an APIC id has when there are `count` of them.
fn bits(count: u32) -> u32 {
    count.next_power_of_two().trailing_zeros()
}

/// Extended topology (Intel SDM 2A, CPUID leaf 0BH): level 0 is the thread, level 1 the core. KVM itself answers that there is no
/// further level, given that there is a level 1.
fn level(function: u32, index: u32, id: u32, count: u32) -> CpuidEntry {
    let (shift, processors, level) = if index == 0 { (0, 1, 1) } else { (bits(count), count, 2) };
    CpuidEntry {
        function,
        index,
        indexed: true,
        registers: [shift, processors, index | level << 8, id],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{hash, register};

    const COUNTS: [u32; 6] = [1, 2, 3, 4, 8, 64];

    fn leaf(function: u32, index: u32, registers: [u32; 4]) -> CpuidEntry {
        CpuidEntry {
            function,
            index,
            indexed: index > 0,
            registers,
        }
    }

    /// A cache of a type and a level in a host where `sharing` processors share it and the package has `cores`.
    fn host_cache(function: u32, index: u32, (kind, level): (u32, u32), [sharing, cores]: [u32; 2]) -> CpuidEntry {
        let eax = kind | level << 5 | 1 << 8 | (sharing - 1) << 14 | (cores - 1) << 26;
        leaf(function, index, [eax, 0x01c0_003f, 0x3f, 0])
    }

    /// A host with so many processors, four of which share an L3 cache, if there are as many; two are a core's threads.
    fn host(vendor: &[u8; 12], processors: u32) -> Vec<CpuidEntry> {
        let word = |at: usize| u32::from_le_bytes(vendor[at..at + 4].try_into().unwrap());
        let caches = [(1, 1), (2, 1), (3, 2), (3, 3), (0, 0)];
        let amd = vendor == b"AuthenticAMD";
        let mut leaves = vec![
            leaf(0, 0, [0x20, word(0), word(8), word(4)]),
            leaf(1, 0, [0x00a0_0f11, processors << 16 | 9 << 24 | 0x800, 0, HTT]),
            leaf(0xb, 0, [1, 2, 0x100, 9]),
            leaf(0xb, 1, [7, processors, 0x201, 9]),
            leaf(0xb, 2, [0, 0, 2, 9]),
            leaf(0x8000_0001, 0, [0, 0, if amd { CMP_LEGACY } else { 0 }, 0]),
            leaf(
                0x8000_0008,
                0,
                [0x3030, 0, if amd { 7 << 12 | (processors - 1) } else { 0 }, 0],
            ),
        ];
        for (index, (kind, level)) in (0..).zip(caches) {
            let sharing = if level == 3 { processors.min(8) } else { 2 };
            leaves.push(match (amd, kind) {
                (true, 0) => leaf(0x8000_001d, index, [0; 4]),
                (false, 0) => leaf(0x4, index, [0; 4]),
                (true, _) => host_cache(0x8000_001d, index, (kind, level), [sharing, 1]),
                (false, _) => host_cache(0x4, index, (kind, level), [sharing, processors.min(64)]),
            });
        }
        if amd {
            leaves.push(leaf(0x8000_001e, 0, [9, 0x104, 0x301, 0]));
        }
        leaves
    }

    /// How many processors share each cache, and how many cores the leaf says that there are.
    fn caches(leaves: &[CpuidEntry], function: u32) -> Vec<(u32, u32)> {
        let of_function = leaves.iter().filter(|leaf| leaf.function == function);
        let caches = of_function
            .map(|leaf| leaf.registers[EAX])
            .filter(|eax| eax & CACHE_TYPE != 0);
        caches.map(|eax| (1 + (eax >> 14 & 0xfff), 1 + (eax >> 26))).collect()
    }

    #[test]
    fn an_amd_guest_has_its_own_topology_on_hosts_of_any_size() {
        for count in COUNTS {
            let id = count - 1;
            let round = count.next_power_of_two();
            let shown = [2, 4, 64, 128].map(|processors| topology(&host(b"AuthenticAMD", processors), id, count));
            assert!(shown.iter().all(|other| *other == shown[0]), "{count}");
            let shown = &shown[0];
            assert_eq!(
                caches(shown, 0x8000_001d),
                [(1, 1), (1, 1), (1, 1), (round, 1)],
                "{count}"
            );
            assert_eq!(register(shown, 0x8000_001d, 4, EAX), 0, "the end of the list");
            // What a cache is like stays the host's.
            assert_eq!(register(shown, 0x8000_001d, 3, EAX) & 0x3fff, 3 | 3 << 5 | 1 << 8);
            assert_eq!(register(shown, 0x8000_001d, 3, EBX), 0x01c0_003f);
            let sizes = register(shown, 0x8000_0008, 0, ECX);
            assert_eq!((sizes & 0xff, sizes >> 12), (count - 1, round.ilog2()));
            assert_eq!(register(shown, 0x8000_0008, 0, EAX), 0x3030);
            let node = [EAX, EBX, ECX].map(|at| register(shown, 0x8000_001e, 0, at));
            assert_eq!(node, [id, id, 0]);
            let several = u32::from(count > 1);
            assert_eq!(register(shown, 0x8000_0001, 0, ECX), several * CMP_LEGACY);
            assert_eq!(register(shown, 1, 0, EDX), several * HTT);
            assert_eq!(register(shown, 1, 0, EBX), 0x800 | count << 16 | id << 24);
        }
    }

    #[test]
    fn an_intel_guest_has_its_own_topology_on_hosts_of_any_size() {
        for count in COUNTS {
            let id = count / 2;
            let round = count.next_power_of_two();
            let shown = [2, 4, 64, 128].map(|processors| topology(&host(b"GenuineIntel", processors), id, count));
            assert_eq!(shown[0], shown[1], "{count}");
            assert_eq!(shown[0], shown[3], "{count}");
            let shown = &shown[0];
            assert_eq!(
                caches(shown, 0x4),
                [(1, round), (1, round), (1, round), (round, round)],
                "{count}"
            );
            assert_eq!(register(shown, 0x4, 4, EAX), 0, "the end of the list");
            let levels = [0, 1].map(|index| [EAX, EBX, ECX, EDX].map(|at| register(shown, 0xb, index, at)));
            assert_eq!(levels, [[0, 1, 0x100, id], [round.ilog2(), count, 0x201, id]]);
            assert_eq!(shown.iter().filter(|leaf| leaf.function == 0xb).count(), 2);
            assert!(shown.iter().all(|leaf| leaf.function != 0x1f), "not offered");
            for function in [0x8000_0001, 0x8000_0008] {
                assert_eq!(register(shown, function, 0, ECX), 0, "only AMD has it");
            }
        }
    }

    #[test]
    fn hosts_of_one_kind_have_one_hash_and_that_of_former_snapshots_is_known() {
        for vendor in [b"AuthenticAMD", b"GenuineIntel"] {
            let hosts = [2, 4].map(|processors| host(vendor, processors));
            let now = hosts.each_ref().map(|host| hash(&topology(host, 0, 1)));
            assert_eq!(now[0], now[1]);
        }
        // As it was: of the caches only Intel's were the guest's.
        let amd = host(b"AuthenticAMD", 4);
        let mut was = topology(&amd, 0, 1);
        for leaf in was.iter_mut().filter(|leaf| leaf.function == 0x8000_001d) {
            leaf.registers = amd
                .iter()
                .find(|host| (host.function, host.index) == (0x8000_001d, leaf.index))
                .unwrap()
                .registers;
        }
        assert_eq!(former_hash(&amd), hash(&was));
        assert_ne!(former_hash(&amd), hash(&topology(&amd, 0, 1)));
        let intel = host(b"GenuineIntel", 4);
        assert_eq!(former_hash(&intel), hash(&topology(&intel, 0, 1)));
    }
}
