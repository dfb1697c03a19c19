//! The processor state of the 64-bit boot protocol: long mode, flat segments, the first GiB mapped one to one.

use engine::BootState;
use engine::state::{GeneralRegisters, Segment, SystemRegisters, Table, gpr};
use memory::GuestRam;
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

/// Writes descriptor and page tables.
pub(crate) fn write_tables(guest: &GuestRam) -> Result<(), BootError> {
    for (entry, address) in GDT.iter().zip((low::GDT..).step_by(8)) {
        guest.write_obj(*entry, GuestAddress(address))?;
    }
    guest.write_obj(low::PDPT | PAGE_PRESENT_WRITABLE, GuestAddress(low::PML4))?;
    guest.write_obj(low::PAGE_DIRECTORY | PAGE_PRESENT_WRITABLE, GuestAddress(low::PDPT))?;
    let mut directory = [0; 4096];
    for (index, entry) in directory.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *entry = ((index as u64) << 21 | PAGE_PRESENT_WRITABLE | PAGE_LARGE).to_le_bytes();
    }
    guest.write_slice(&directory, GuestAddress(low::PAGE_DIRECTORY))?;
    Ok(())
}

/// The state of vCPU 0 at its first instruction.
pub(crate) fn boot_state(entry: u64) -> BootState {
    let mut general = GeneralRegisters {
        rip: entry,
        rflags: 2,
        ..GeneralRegisters::default()
    };
    general.gpr[gpr::RSI] = low::ZERO_PAGE;
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
            rights: 0x1_0082,
            ..Segment::default()
        },
        gdt: Table {
            base: low::GDT,
            limit: 39,
        },
        idt: Table::default(),
        cr: [CR0_PE | CR0_ET | CR0_PG, 0, low::PML4, CR4_PAE, 0],
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
        write_tables(ram.guest()).unwrap();
        let read = |address: u64| ram.guest().read_obj::<u64>(GuestAddress(address)).unwrap();
        let state = boot_state(0x100_0000);
        for address in [0_u64, 0x7000, 0x100_0000, 0x3fff_ffff] {
            let pdpt = read(state.system.cr[2] + (address >> 39 & 511) * 8) & !0xfff;
            let directory = read(pdpt + (address >> 30 & 511) * 8) & !0xfff;
            let entry = read(directory + (address >> 21 & 511) * 8);
            assert_eq!(entry & 0x83, 0x83);
            assert_eq!((entry & !0x1f_ffff) + (address & 0x1f_ffff), address);
        }
    }

    #[test]
    fn segments_and_descriptors_agree() {
        let state = boot_state(0);
        let code = state.system.segments[0];
        let descriptor = GDT[usize::from(code.selector / 8)];
        assert_eq!(u64::from(code.rights & 0xff), descriptor >> 40 & 0xff);
        assert_eq!(u64::from(code.rights >> 8 & 0xf), descriptor >> 52 & 0xf);
        assert_eq!(state.general.gpr[gpr::RSI], 0x7000);
    }
}
