//! Whether a host can go on showing what a guest was shown elsewhere. Looks at what a guest could use, not at what only
//! describes: caches, family and name may differ.

use crate::features::REGISTERS;
use crate::{CpuidEntry, EAX, EBX, EDX, register, vendor};

/// What KVM offers guests beside the processor's own: CPUID.4000_0001:EAX.
const KVM_FEATURES: u32 = 0x4000_0001;

/// What a guest was shown and a host does not offer, in words that follow "lacks"; nothing if there is nothing.
pub fn missing(shown: &[CpuidEntry], offered: &[CpuidEntry]) -> Option<String> {
    let (theirs, ours) = (vendor(shown), vendor(offered));
    if theirs != ours {
        return Some(format!(
            "the vendor {} (it is of {})",
            theirs.escape_ascii(),
            ours.escape_ascii()
        ));
    }
    let mut lacks = Vec::new();
    for set in &REGISTERS {
        let [there, here] = [shown, offered].map(|leaves| register(leaves, set.function, set.index, set.register));
        set.add_names(there & !(here | set.own), &mut lacks);
    }
    let [there, here] = [shown, offered].map(|leaves| register(leaves, KVM_FEATURES, 0, EAX));
    if there & !here != 0 {
        lacks.push(format!("KVM's features {:#x}", there & !here));
    }
    lacks.extend(states(shown, offered));
    let [there, here] = [shown, offered].map(|leaves| register(leaves, 0x8000_0008, 0, EAX) & 0xff);
    if there > here {
        lacks.push(format!("physical addresses of {there} bits (it has {here})"));
    }
    (!lacks.is_empty()).then(|| lacks.join(", "))
}

/// The states of XCR0 and IA32_XSS must be there, and lie in the XSAVE area where they lay.
fn states(shown: &[CpuidEntry], offered: &[CpuidEntry]) -> Vec<String> {
    let mut lacks = Vec::new();
    for (index, low, name) in [(0, EAX, "XCR0"), (1, crate::ECX, "IA32_XSS")] {
        for (at, first) in [(low, 0), (EDX, 32)] {
            let [there, here] = [shown, offered].map(|leaves| register(leaves, 0xd, index, at));
            let names = (0..32_u32).filter(|bit| there & !here & (1 << bit) != 0);
            lacks.extend(names.map(|bit| format!("the state {} of {name}", first + bit)));
        }
    }
    let area = shown.iter().filter(|leaf| leaf.function == 0xd && leaf.index >= 2);
    let moved = area.filter(|leaf| {
        let there = register(shown, 0xd, 0, EAX) & 1_u32.checked_shl(leaf.index).unwrap_or(0) != 0;
        there
            && [EAX, EBX]
                .iter()
                .any(|at| leaf.registers[*at] != register(offered, 0xd, leaf.index, *at))
    });
    lacks.extend(moved.map(|leaf| format!("the same place for the XSAVE state {}", leaf.index)));
    lacks
}
