//! The processor state of the 64-bit boot protocol: long mode, flat segments, a GiB or two mapped one to one.

use engine::BootState;
use engine::state::{GeneralRegisters, Segment, SystemRegisters, Table, gpr};
use memory::Ram;
use vm_memory::{Bytes, GuestAddress};

use crate::{BootError, low};

/// Selectors that boot.rst fixes: `__BOOT_CS` and `__BOOT_DS`.
const BOOT_CS: u16 = 0x10;
const BOOT_DS: u16 = 0x18;
const BOOT_TSS: u16 = 0x20;

/// Segment descriptors (Intel SDM 3A, 3.4.5), as the table holds them.
const GDT: [u64; 5] = [
    0,
    0,
    0x00af_9b00_0000_ffff, // 64-bit code, execute/read, accessed, present
    0x00cf_9300_0000_ffff, // data, read/write, accessed, present
    0x008f_8b00_0000_ffff, // 64-bit TSS, busy
];

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

const PAGE_PRESENT_WRITABLE: u64 = 0x3;
const PAGE_LARGE: u64 = 1 << 7;

/// What one page directory maps, and one entry of it.
const GIB: u64 = 1 << 30;
const LARGE_PAGE: u64 = 2 << 20;

/// The entry of a table of this level, 0 being page tables, for an address.
const fn index(address: u64, level: u32) -> u64 {
    address >> (12 + 9 * level) & 511
}

/// Writes descriptor and page tables: the GiB in which memory begins is mapped, and the next one where it begins in the middle.
pub(crate) fn write_tables(ram: &Ram) -> Result<(), BootError> {
    let (guest, start) = (ram.guest(), ram.start());
    for (entry, address) in GDT.iter().zip((start + low::GDT..).step_by(8)) {
        guest.write_obj(*entry, GuestAddress(address))?;
    }
    let first = start - start % GIB;
    let wanted = if first == start { 1 } else { 2 };
    let mut pdpt = start;
    for (number, base) in (0..wanted).zip((first..).step_by(1 << 30)) {
        // The second GiB has a PDPT of its own only where that is another.
        if number == 0 || index(base, 2) == 0 {
            pdpt = start + low::PDPTS[number];
            let entry = start + low::PML4 + 8 * index(base, 3);
            guest.write_obj(pdpt | PAGE_PRESENT_WRITABLE, GuestAddress(entry))?;
        }
        let place = start + low::PAGE_DIRECTORIES[number];
        guest.write_obj(place | PAGE_PRESENT_WRITABLE, GuestAddress(pdpt + 8 * index(base, 2)))?;
        let mut directory = [0; 4096];
        for (entry, page) in directory.as_chunks_mut::<8>().0.iter_mut().zip(0_u64..) {
            *entry = ((base + page * LARGE_PAGE) | PAGE_PRESENT_WRITABLE | PAGE_LARGE).to_le_bytes();
        }
        guest.write_slice(&directory, GuestAddress(place))?;
    }
    Ok(())
}

/// The state of vCPU 0 at its first instruction, in memory that begins at `start`.
pub(crate) fn boot_state(start: u64, entry: u64) -> BootState {
    let mut general = GeneralRegisters {
        rip: entry,
        rflags: 2,
        ..GeneralRegisters::default()
    };
    general.gpr[gpr::RSI] = start + low::ZERO_PAGE;
    let flat = |selector, rights| Segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        rights,
    };
    // Rights: type, S, P; then L and G for code, D/B and G for data.
    let code = flat(BOOT_CS, 0xa9b);
    let data = flat(BOOT_DS, 0xc93);
    let system = SystemRegisters {
        segments: [code, data, data, data, data, data],
        tr: Segment {
            base: 0,
            limit: 0xf_ffff,
            selector: BOOT_TSS,
            rights: 0x88b,
        },
        ldtr: Segment {
            rights: Segment::UNUSABLE | 0x82,
            ..Segment::default()
        },
        gdt: Table {
            base: start + low::GDT,
            limit: 39,
        },
        idt: Table::default(),
        cr: [CR0_PE | CR0_ET | CR0_PG, 0, start + low::PML4, CR4_PAE, 0],
        efer: EFER_LME | EFER_LMA,
        apic_base: 0,
    };
    BootState { general, system }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;
    use memory::Ram;

    #[test]
    fn the_first_gib_is_mapped_one_to_one() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        assert_mapped(&ram, &[0, 0x7000, 0x100_0000, 0x3fff_ffff]);
    }

    #[test]
    fn memory_that_begins_elsewhere_is_mapped_where_it_is() {
        for start in [
            4 << 30,
            (5 << 30) - (32 << 20),
            (512 << 30) + (6 << 20),
            (1 << 39) - (64 << 20),
        ] {
            let ram = crate::tests::placed(start);
            assert_mapped(&ram, &[start, start + 0x7000, start + (32 << 20) - 1]);
        }
        // Into the next GiB, and into the next 512.
        for next in [5 << 30, 1 << 39] {
            let ram = crate::tests::placed(next - (32 << 20));
            assert_mapped(&ram, &[next - 1, next, next + (16 << 20)]);
        }
    }

    fn assert_mapped(ram: &Ram, addresses: &[u64]) {
        write_tables(ram).unwrap();
        let read = |address: u64| ram.guest().read_obj::<u64>(GuestAddress(address)).unwrap();
        let state = boot_state(ram.start(), 0x100_0000);
        for &address in addresses {
            let pdpt = read(state.system.cr[2] + (address >> 39 & 511) * 8) & !0xfff;
            let directory = read(pdpt + (address >> 30 & 511) * 8) & !0xfff;
            let entry = read(directory + (address >> 21 & 511) * 8);
            assert_eq!(entry & 0x83, 0x83, "{address:#x}");
            assert_eq!((entry & !0x1f_ffff) + (address & 0x1f_ffff), address);
        }
    }

    #[test]
    fn segments_and_descriptors_agree() {
        let state = boot_state(0, 0);
        let code = state.system.segments[0];
        let descriptor = GDT[usize::from(code.selector / 8)];
        assert_eq!(u64::from(code.rights & 0xff), descriptor >> 40 & 0xff);
        assert_eq!(u64::from(code.rights >> 8 & 0xf), descriptor >> 52 & 0xf);
        assert_eq!(state.general.gpr[gpr::RSI], 0x7000);
    }
}
