//! The kernel file: vmlinux or bzImage, given by whoever starts a VM.
//!
//! Loads into real guest memory; knows of the formats only as much as small seeds need.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};

use base::ByteSize;
use boot::{Board, Ports, Source};
use memory::Ram;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::run::{Target, outcome};

/// Both formats.
pub(crate) fn image() -> Target {
    Target {
        name: "kernel-image",
        seeds: vec![elf(), bzimage()],
        parse: load,
    }
}

/// An ELF-64 executable with one loadable segment (ELF gABI, chapters 4 and 5).
fn elf() -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    for half in [2_u16, 62] {
        bytes.extend(half.to_le_bytes());
    }
    bytes.extend(1_u32.to_le_bytes());
    // Entry, program headers, section headers.
    for word in [0x100_0000_u64, 64, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 1, 0, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    // PT_LOAD, readable and executable: offset, virtual and physical address, sizes, alignment.
    bytes.extend([1_u32, 5].map(u32::to_le_bytes).concat());
    for word in [0_u64, 0x100_0000, 0x100_0000, 0x90, 0x2000, 0x1000] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.resize(0x90, 0x90);
    bytes
}

/// A boot sector with the setup header of protocol 2.15 (Linux, Documentation/arch/x86/boot.rst).
fn bzimage() -> Vec<u8> {
    let mut bytes = vec![0; 0x1000];
    bytes[0x1f1] = 1;
    bytes[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    bytes[0x201] = 0x66;
    bytes[0x202..0x206].copy_from_slice(b"HdrS");
    bytes[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    bytes[0x211] = 1;
    bytes[0x214..0x218].copy_from_slice(&0x10_0000_u32.to_le_bytes());
    bytes[0x236] = 1;
    bytes[0x258..0x260].copy_from_slice(&0x100_0000_u64.to_le_bytes());
    bytes
}

fn load(input: &[u8]) -> u64 {
    match attempt(input) {
        Ok(end) => end,
        // Of this machine, not of the parser.
        Err(error) => panic!("cannot even try: {error}"),
    }
}

fn attempt(input: &[u8]) -> anyhow::Result<u64> {
    let mut kernel = File::from(memfd_create("kernel", MemfdFlags::CLOEXEC)?);
    kernel.write_all(input)?;
    kernel.seek(SeekFrom::Start(0))?;
    let size = ByteSize::mib(64);
    let ram = Ram::allocate(size)?;
    let ports = Ports {
        sleep_control: 0x600,
        reset: 0x610,
        reset_value: 1,
        events: 0x620,
        events_pin: 5,
        serial: 0x3f8,
        serial_pin: 4,
        slot_pins: [1, 3, 6, 7],
    };
    let board = Board {
        acpi_hotplug: true,
        apic_ids: vec![0],
        root: boot::Root::Memory {
            window_64: memory::layout::pci_window_64(size),
        },
        ports,
        hotplug_node: 0,
        iommu: None,
    };
    let source = Source {
        kernel: &mut kernel,
        initramfs: None,
        cmdline: "console=ttyS0",
    };
    Ok(boot::load(&ram, source, &board).map_or_else(outcome, |_| outcome("loaded")))
}
