//! Reading kernels and initramfs into guest memory.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use base::ByteSize;
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use memory::layout::{self, Range};
use memory::{GuestRam, Ram};
use vm_memory::{Address, ByteValued, Bytes, GuestAddress};

use crate::{BootError, Initramfs, low};

/// Where in a bzImage its 64-bit entry lies (boot.rst, "64-bit Boot Protocol").
const BZIMAGE_ENTRY_64: u64 = 0x200;

/// A loaded kernel.
pub(crate) struct Kernel {
    /// Where vCPU 0 begins.
    pub(crate) entry: u64,
    /// The first address behind it.
    pub(crate) end: u64,
    /// The setup header as the image has it, for a bzImage.
    pub(crate) setup_header: Option<Vec<u8>>,
}

/// Loads a vmlinux or bzImage; which one it is, its first bytes tell.
pub(crate) fn load(guest: &GuestRam, file: &mut File) -> Result<Kernel, BootError> {
    let unreadable = |source| BootError::Read { what: "kernel", source };
    let mut magic = [0; 4];
    file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    match file.read_exact(&mut magic) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            return Err(BootError::Kernel("it has less than 4 bytes".into()));
        }
        other => other.map_err(unreadable)?,
    }
    file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let high = Some(GuestAddress(low::HIGH));
    let kernel = if magic == *b"\x7fELF" {
        let loaded = Elf::load(guest, None, file, high).map_err(|error| BootError::Kernel(error.to_string()))?;
        Kernel {
            entry: loaded.kernel_load.raw_value(),
            end: loaded.kernel_end,
            setup_header: None,
        }
    } else {
        let loaded = BzImage::load(guest, None, file, high).map_err(|error| BootError::Kernel(error.to_string()))?;
        let header = loaded.setup_header.map(|header| header.as_slice().to_vec());
        let entry = loaded.kernel_load.raw_value() + BZIMAGE_ENTRY_64;
        Kernel {
            entry,
            end: loaded.kernel_end,
            setup_header: header,
        }
    };
    Ok(kernel)
}

/// Puts the initramfs at the top of low memory, on a page boundary, where the kernel does not unpack itself over it.
pub(crate) fn load_initramfs(ram: &Ram, file: &mut File, kernel_end: u64) -> Result<Initramfs, BootError> {
    let unreadable = |source| BootError::Read {
        what: "initramfs",
        source,
    };
    let length = file.seek(SeekFrom::End(0)).map_err(unreadable)?;
    file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let too_small = || BootError::TooSmall {
        initramfs: ByteSize(length),
        memory: ram.size(),
    };
    let top = layout::ram(ram.size())
        .first()
        .map_or(0, |range| range.start + range.length);
    let start = top.checked_sub(length).ok_or_else(too_small)? & !0xfff;
    if start < kernel_end {
        return Err(too_small());
    }
    let count = usize::try_from(length).map_err(|_| too_small())?;
    ram.guest().read_exact_volatile_from(GuestAddress(start), file, count)?;
    Ok(Range { start, length })
}
