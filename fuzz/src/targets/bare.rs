//! What the VMM reads of a guest that owns its CPUs: the instruction that it is at, found by its own page tables.
//!
//! Knows the processor's formats only as much as small seeds need.

use std::sync::Arc;

use engine_bare::untrusted::{self, Tables};
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MemoryRegionAddress, MmapRegion};

use crate::run::{Target, outcome};

/// The longest instruction (AMD64 APM 3, 1.1).
const LONGEST: usize = 15;

/// A byte that says how wide code is, and an instruction.
pub(crate) fn instructions() -> Target {
    let seeds: [&[u8]; 8] = [
        // mov eax, [rdi]; mov [rsp + r12 * 8 + 0x100], r9; movzx ecx, byte [rax + rcx * 1 + 0x100]; movsxd rcx, dword [rax]
        &[2, 0x8b, 0x07],
        &[2, 0x4e, 0x89, 0x8c, 0xe4, 0, 1, 0, 0],
        &[2, 0x0f, 0xb6, 0x8c, 0x08, 0, 1, 0, 0],
        &[2, 0x48, 0x63, 0x08],
        // mov dword [rip + 4], 1; mov eax, [moffs]; mov [rax], ah, with a prefix
        &[2, 0xc7, 0x05, 4, 0, 0, 0, 1, 0, 0, 0],
        &[2, 0xa1, 0, 0, 0, 0xe0, 0, 0, 0, 0],
        &[1, 0x67, 0x88, 0x27],
        // mov ax, [0x1234]
        &[0, 0x8b, 0x06, 0x34, 0x12],
    ];
    Target {
        name: "bare-instructions",
        seeds: seeds.map(<[u8]>::to_vec).into(),
        parse: decode,
    }
}

fn decode(input: &[u8]) -> u64 {
    let Some((width, bytes)) = input.split_first() else {
        return outcome("nothing");
    };
    let bits = [16, 32, 64][usize::from(width % 3)];
    let Some(found) = untrusted::instruction(bytes, bits) else {
        return outcome("unknown");
    };
    assert!(found.length <= LONGEST.min(bytes.len()), "{found:?}");
    assert!(matches!(found.size, 1 | 2 | 4 | 8), "{found:?}");
    // It is told by its own bytes, all of them.
    let (own, _) = bytes.split_at(found.length);
    assert_eq!(untrusted::instruction(own, bits), Some(found));
    assert_eq!(untrusted::instruction(&own[..own.len() - 1], bits), None);
    let kind = if found.stores { 's' } else { 'l' };
    outcome(format!("{kind}{} {}", "x".repeat(found.length), "x".repeat(found.size)))
}

/// All of guest memory.
const MEMORY: usize = 64 << 10;

/// Bytes of one word of memory in the input: where, and what.
const WORD: usize = 10;

/// CR0, CR3, CR4, EFER and a linear address, and words of memory.
pub(crate) fn page_tables() -> Target {
    const PG: u64 = 1 << 31;
    const PAE: u64 = 1 << 5;
    const LA57: u64 = 1 << 12;
    const LMA: u64 = 1 << 10;
    const LARGE: u64 = 1 << 7;
    // Present and writable.
    const RW: u64 = 3;
    let seed = |registers: [u64; 5], words: &[(u16, u64)]| {
        let mut bytes = registers.map(u64::to_le_bytes).concat();
        for (address, word) in words {
            bytes.extend(address.to_le_bytes());
            bytes.extend(word.to_le_bytes());
        }
        bytes
    };
    let tables = [
        (0x1000, 0x2000 | RW),
        (0x2000, 0x3000 | RW),
        (0x3000, 0x4000 | RW),
        (0x4000, 0x8000 | RW),
        (0x4008, 0x6000 | RW),
    ];
    let five = [&[(0x9000, 0x1000 | RW)], &tables[..]].concat();
    let large = [(0x1000, 0x2000 | RW), (0x2000, 0x3000 | RW), (0x3000, LARGE | RW)];
    Target {
        name: "bare-page-tables",
        seeds: vec![
            // No paging; four levels, over two pages and to the end of one; five; a large page; three levels; beyond memory.
            seed([0, 0, 0, 0, 0x1234], &[]),
            seed([PG, 0x1000, PAE, LMA, 0xffc], &tables),
            seed([PG, 0x1000, PAE, LMA, 0x1ffc], &tables),
            seed([PG, 0x9000, PAE | LA57, LMA, 0x123], &five),
            seed([PG, 0x1000, PAE, LMA, 0x5123], &large),
            seed([PG, 0x1020, PAE, 0, 0x1234], &[(0x1020, 0x2001), (0x2000, LARGE | RW)]),
            seed([PG, 0x000f_ffff_ffff_f000, PAE, LMA, u64::MAX], &[]),
        ],
        parse: walk,
    }
}

fn walk(input: &[u8]) -> u64 {
    let (numbers, words) = input.split_at(input.len().min(5 * 8));
    let (numbers, _) = numbers.as_chunks();
    let &[cr0, cr3, cr4, efer, linear] = numbers else {
        return outcome("nothing");
    };
    let [cr0, cr3, cr4, efer, linear] = [cr0, cr3, cr4, efer, linear].map(u64::from_le_bytes);
    let memory = MmapRegion::new(MEMORY).expect("64 KiB");
    let memory = Arc::new(GuestRegionMmap::new(memory, GuestAddress(0)).expect("a region at 0"));
    for word in words.chunks_exact(WORD) {
        let address = u64::from(u16::from_le_bytes([word[0], word[1]])) & !7;
        memory
            .write_slice(&word[2..], MemoryRegionAddress(address))
            .expect("a word within memory");
    }
    let tables = Tables { cr0, cr3, cr4, efer };
    let (physical, bytes) = untrusted::page_walk(Arc::clone(&memory), tables, linear);
    assert!(bytes.len() <= LONGEST);
    assert!(physical.is_none_or(|physical| physical >> 52 == 0), "{physical:x?}");
    if let Some(first) = bytes.first() {
        let place = MemoryRegionAddress(physical.expect("what was read lies somewhere"));
        assert_eq!(memory.read_obj::<u8>(place).ok().as_ref(), Some(first));
    }
    // Paging, its kinds, and where it led.
    let kind = [cr0 >> 31 & 1, cr4 >> 5 & 1, cr4 >> 12 & 1, efer >> 10 & 1].map(|bit| if bit == 0 { '-' } else { '+' });
    let page = physical.map(|physical| "x".repeat(usize::try_from(physical >> 12).unwrap_or(usize::MAX).min(20)));
    outcome(format!("{kind:?} {page:?} {}", "x".repeat(bytes.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_known() {
        for seed in instructions().seeds {
            assert_ne!(decode(&seed), outcome("unknown"), "{seed:x?}");
        }
        let ends: std::collections::BTreeSet<_> = page_tables().seeds.iter().map(|seed| walk(seed)).collect();
        assert_eq!(ends.len(), page_tables().seeds.len());
    }
}
