//! The zero page: what the kernel is told of its machine before it has found anything (boot.rst; `struct boot_params`
//! in the kernel's `arch/x86/include/uapi/asm/bootparam.h`).

use memory::Ram;
use memory::layout;
use vm_memory::{Bytes, GuestAddress};

use crate::kernel::Kernel;
use crate::{BootError, Initramfs, low};

/// Offsets within the page.
mod at {
    pub(super) const ACPI_RSDP: usize = 0x70;
    pub(super) const EXT_RAMDISK_IMAGE: usize = 0xc0;
    pub(super) const EXT_CMD_LINE_PTR: usize = 0xc8;
    pub(super) const E820_ENTRIES: usize = 0x1e8;
    pub(super) const SETUP_HEADER: usize = 0x1f1;
    pub(super) const BOOT_FLAG: usize = 0x1fe;
    pub(super) const HEADER: usize = 0x202;
    pub(super) const TYPE_OF_LOADER: usize = 0x210;
    pub(super) const RAMDISK_IMAGE: usize = 0x218;
    pub(super) const RAMDISK_SIZE: usize = 0x21c;
    pub(super) const CMD_LINE_PTR: usize = 0x228;
    pub(super) const KERNEL_ALIGNMENT: usize = 0x230;
    pub(super) const CMDLINE_SIZE: usize = 0x238;
    pub(super) const E820_TABLE: usize = 0x2d0;
}

/// `struct boot_e820_entry` is packed: address, size, type.
const E820_ENTRY: usize = 20;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// A loader without a number of its own (boot.rst, `type_of_loader`).
const UNDEFINED_LOADER: u8 = 0xff;

/// The page under construction.
struct Page([u8; 4096]);

impl Page {
    fn put(&mut self, offset: usize, bytes: &[u8]) {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn put_u32(&mut self, offset: usize, value: u64) {
        // Everything that the kernel takes as 32 bits alone is less than 4 GiB.
        self.put(offset, &u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes());
    }

    /// An address, in two halves.
    fn put_split(&mut self, low: usize, high: usize, value: u64) {
        let (lower, upper) = (value & 0xffff_ffff, value >> 32);
        self.put_u32(low, lower);
        self.put_u32(high, upper);
    }
}

/// Writes it.
pub(crate) fn write(
    ram: &Ram,
    kernel: &Kernel,
    initramfs: Option<Initramfs>,
    cmdline: usize,
    rsdp: u64,
) -> Result<(), BootError> {
    let mut page = Page([0; 4096]);
    match &kernel.setup_header {
        Some(header) => page.put(at::SETUP_HEADER, header),
        None => {
            page.put(at::BOOT_FLAG, &0xaa55_u16.to_le_bytes());
            page.put(at::HEADER, b"HdrS");
            page.put_u32(at::KERNEL_ALIGNMENT, 0x20_0000);
        }
    }
    page.put(at::TYPE_OF_LOADER, &[UNDEFINED_LOADER]);
    let start = ram.start();
    page.put_split(at::CMD_LINE_PTR, at::EXT_CMD_LINE_PTR, start + low::CMDLINE);
    page.put_u32(at::CMDLINE_SIZE, cmdline as u64);
    if let Some(initramfs) = initramfs {
        page.put_split(at::RAMDISK_IMAGE, at::EXT_RAMDISK_IMAGE, initramfs.start);
        page.put_u32(at::RAMDISK_SIZE, initramfs.length);
    }
    page.put(at::ACPI_RSDP, &rsdp.to_le_bytes());
    let map = e820(ram);
    page.put(at::E820_ENTRIES, &[u8::try_from(map.len()).unwrap_or(u8::MAX)]);
    for (index, (start, length, kind)) in map.into_iter().enumerate() {
        let offset = at::E820_TABLE + index * E820_ENTRY;
        page.put(offset, &start.to_le_bytes());
        page.put(offset + 8, &length.to_le_bytes());
        page.put(offset + 16, &kind.to_le_bytes());
    }
    ram.guest().write_slice(&page.0, GuestAddress(start + low::ZERO_PAGE))?;
    Ok(())
}

/// The memory map: RAM without the range between 640 KiB and 1 MiB behind its start, and ECAM as reserved, without which Linux does
/// not trust the MCFG table. Where nobody translates there is no ECAM, and what is low is RAM too.
fn e820(ram: &Ram) -> Vec<(u64, u64, u32)> {
    let begin = ram.start();
    let mut map = vec![
        (begin, low::END, E820_RAM),
        (begin + low::ACPI, low::HIGH - low::ACPI, E820_RESERVED),
    ];
    if ram.identity_layout().is_none() {
        map.push((layout::ECAM.start, layout::ECAM.length, E820_RESERVED));
    }
    for range in ram.ranges() {
        let first = range.start == begin;
        let start = range.start + if first { low::HIGH } else { 0 };
        map.push((start, range.start + range.length - start, E820_RAM));
    }
    map.sort_unstable();
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;

    #[test]
    fn the_map_is_sorted_disjoint_and_holds_all_ram_but_the_hole() {
        for size in [ByteSize::mib(64), ByteSize::gib(6)] {
            let Ok(ram) = Ram::allocate(size) else {
                panic!("address space")
            };
            let map = e820(&ram);
            for pair in map.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
            }
            let usable: u64 = map
                .iter()
                .filter(|entry| entry.2 == E820_RAM)
                .map(|entry| entry.1)
                .sum();
            assert_eq!(usable, size.bytes() - (low::HIGH - low::END));
        }
    }

    #[test]
    fn memory_that_nobody_translates_is_told_where_it_is() {
        let start = 5 << 30;
        let ram = crate::tests::placed(start);
        let expected = [
            (0x2_0000, 0x8000, E820_RAM),
            (start, low::END, E820_RAM),
            (start + low::ACPI, low::HIGH - low::ACPI, E820_RESERVED),
            (start + low::HIGH, (63 << 20), E820_RAM),
        ];
        assert_eq!(e820(&ram), expected);
        let kernel = Kernel {
            entry: 0,
            end: 0,
            setup_header: None,
        };
        let initramfs = Initramfs {
            start: start + 0x300_0000,
            length: 0x1234,
        };
        write(&ram, &kernel, Some(initramfs), 17, start + 0xe_0000).unwrap();
        let read = |offset: u64| -> u32 {
            let at = GuestAddress(start + low::ZERO_PAGE + offset);
            ram.guest().read_obj(at).unwrap()
        };
        assert_eq!((read(0x218), read(0xc0)), (0x4300_0000, 1));
        assert_eq!((read(0x228), read(0xc8)), (0x4002_0000, 1));
        assert_eq!((read(0x70), read(0x74)), (0x400e_0000, 1));
    }

    #[test]
    fn fields_are_where_the_protocol_has_them() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        let kernel = Kernel {
            entry: 0x100_0000,
            end: 0x200_0000,
            setup_header: None,
        };
        let initramfs = Initramfs {
            start: 0x300_0000,
            length: 0x1234,
        };
        write(&ram, &kernel, Some(initramfs), 17, 0xe_0000).unwrap();
        let read = |offset: u64| {
            ram.guest()
                .read_obj::<u32>(GuestAddress(low::ZERO_PAGE + offset))
                .unwrap()
        };
        assert_eq!(read(0x202), u32::from_le_bytes(*b"HdrS"));
        assert_eq!((read(0x218), read(0x21c)), (0x300_0000, 0x1234));
        assert_eq!((read(0x228), read(0x238)), (0x2_0000, 17));
        assert_eq!(read(0x70), 0xe_0000);
        assert_eq!(read(0x1e8) & 0xff, 4);
    }
}
