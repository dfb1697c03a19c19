//! Kernel and initramfs loading, ACPI tables, command line and initial registers, as functions into guest memory.
//!
//! 64-bit direct boot as the kernel's `Documentation/arch/x86/boot.rst` describes it, of vmlinux and bzImage alike:
//! no firmware, no real mode. This crate does not know who runs the guest.

mod acpi;
mod kernel;
mod registers;
mod zero_page;

use std::fs::File;

use base::ByteSize;
use engine::BootState;
use memory::Ram;
use memory::layout::Range;
use vm_memory::{Bytes, GuestAddress};

pub use acpi::{Board, GuestIommu, Ports, Root, SLEEP_TYPE_S5};

/// Where the VM generation ID lies in memory that begins at 0: 16 bytes in a reserved page of their own, as its specification wants
/// it. The tables name this address; what is there is written by whoever runs the guest.
pub const GENERATION_ID: u64 = low::HIGH - 0x1000;

/// Where things lie in the first MiB of the guest's memory, wherever that begins. The kernel treats what the e820 map leaves out as
/// not there.
mod low {
    /// Global descriptor table.
    pub(crate) const GDT: u64 = 0x500;
    /// The zero page (`struct boot_params`).
    pub(crate) const ZERO_PAGE: u64 = 0x7000;
    /// Page tables of the boot: PML4, two page directories, and a PDPT for each.
    pub(crate) const PML4: u64 = 0x9000;
    pub(crate) const PDPTS: [u64; 2] = [0xa000, 0xc000];
    pub(crate) const PAGE_DIRECTORIES: [u64; 2] = [0xb000, 0xd000];
    /// The command line.
    pub(crate) const CMDLINE: u64 = 0x2_0000;
    /// Where usable low memory ends.
    pub(crate) const END: u64 = 0x9_fc00;
    /// ACPI tables: the range that is searched for the RSDP (ACPI 6.5, 5.2.5.1). The last page is the generation ID's.
    pub(crate) const ACPI: u64 = 0xe_0000;
    /// Where memory goes on.
    pub(crate) const HIGH: u64 = 0x10_0000;
}

/// Why a guest could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The file is no kernel that can be booted.
    #[error("the kernel cannot be loaded ({0}): give a whole x86-64 vmlinux or bzImage")]
    Kernel(String),
    /// The file could not be read.
    #[error("the {what} cannot be read: {source}")]
    Read {
        /// `kernel` or `initramfs`.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The kernel, with what it needs to unpack itself, does not fit.
    #[error("the kernel needs memory up to {needed}, and the guest has {memory} in one piece: give the guest more")]
    KernelTooLarge {
        /// Where it ends.
        needed: ByteSize,
        /// Where memory ends, or the hole in it begins.
        memory: ByteSize,
    },
    /// Kernel and initramfs do not fit.
    #[error("the initramfs of {initramfs} does not fit beside the kernel in {memory} of memory: give the guest more")]
    TooSmall {
        /// Its size.
        initramfs: ByteSize,
        /// The guest's memory.
        memory: ByteSize,
    },
    /// The tables do not fit below 1 MiB.
    #[error("the ACPI tables take {0} bytes, more than the {1} there are")]
    Tables(usize, u64),
    /// Guest memory refused an address; a bug.
    #[error("guest memory cannot be written: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// What is booted.
#[derive(Debug)]
pub struct Source<'a> {
    /// vmlinux or bzImage, at offset 0.
    pub kernel: &'a mut File,
    /// Anything the kernel unpacks.
    pub initramfs: Option<&'a mut File>,
    /// The command line, without a zero byte, at most 2047 bytes.
    pub cmdline: &'a str,
}

/// Puts everything into guest memory and tells how vCPU 0 begins.
///
/// # Errors
/// The kernel is not one, or something does not fit.
pub fn load(ram: &Ram, source: Source<'_>, board: &Board) -> Result<BootState, BootError> {
    let guest = ram.guest();
    let kernel = kernel::load(ram, source.kernel)?;
    let initramfs = source
        .initramfs
        .map(|file| kernel::load_initramfs(ram, file, kernel.end))
        .transpose()?;
    let cmdline = ram.start() + low::CMDLINE;
    guest.write_slice(source.cmdline.as_bytes(), GuestAddress(cmdline))?;
    guest.write_obj(0_u8, GuestAddress(cmdline + source.cmdline.len() as u64))?;
    let rsdp = acpi::write(ram, board)?;
    zero_page::write(ram, &kernel, initramfs, source.cmdline.len(), rsdp)?;
    registers::write_tables(ram)?;
    Ok(registers::boot_state(ram.start(), kernel.entry))
}

/// Where the initramfs lies.
pub(crate) type Initramfs = Range;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base::ByteSize;
    use memory::Ram;
    use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

    /// 64 MiB that nobody translates.
    pub(crate) fn placed(start: u64) -> Ram {
        let region = |start, length| {
            let mapping = MmapRegion::new(length).unwrap();
            Arc::new(GuestRegionMmap::new(mapping, GuestAddress(start)).unwrap())
        };
        Ram::identity(region(0x2_0000, 0x8000), region(start, 66 << 20), ByteSize::mib(64)).unwrap()
    }
}
