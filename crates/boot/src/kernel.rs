//! Reading kernels and initramfs into guest memory.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use base::ByteSize;
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use memory::layout::Range;
use memory::{GuestRam, Ram};
use vm_memory::{Address, ByteValued, Bytes, GuestAddress};

use crate::{BootError, Initramfs, low};

/// Where in a bzImage its 64-bit entry lies (boot.rst, "64-bit Boot Protocol").
const BZIMAGE_ENTRY_64: u64 = 0x200;

/// Where one is loaded in memory that begins elsewhere than at 0, counted from there: what Linux prefers unless it was configured
/// otherwise.
const BZIMAGE_PREFERRED: u64 = 16 << 20;

/// `xloadflags`, XLF_KERNEL_64: there is such an entry (boot.rst, "The real-mode kernel header").
const XLF_KERNEL_64: u16 = 1 << 0;

/// A loaded kernel.
pub(crate) struct Kernel {
    /// Where vCPU 0 begins.
    pub(crate) entry: u64,
    /// The first address behind it, and behind what it unpacks itself into.
    pub(crate) end: u64,
    /// The setup header as the image has it, for a bzImage.
    pub(crate) setup_header: Option<Vec<u8>>,
}

/// Loads a vmlinux or bzImage; which one it is, its first bytes tell.
pub(crate) fn load(ram: &Ram, file: &mut File) -> Result<Kernel, BootError> {
    let guest: &GuestRam = ram.guest();
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
    // Elsewhere than at 0: a vmlinux by as much, a bzImage at the address that it would go to by itself.
    let moved = (ram.start() != 0).then_some(ram.start());
    let kernel = if magic == *b"\x7fELF" {
        let loaded = Elf::load(guest, moved.map(GuestAddress), file, high)
            .map_err(|error| BootError::Kernel(error.to_string()))?;
        Kernel {
            entry: loaded.kernel_load.raw_value(),
            end: loaded.kernel_end,
            setup_header: None,
        }
    } else {
        let loaded = BzImage::load(
            guest,
            moved.map(|start| GuestAddress(start + BZIMAGE_PREFERRED)),
            file,
            high,
        )
        .map_err(|error| BootError::Kernel(error.to_string()))?;
        let Some(header) = loaded
            .setup_header
            .filter(|header| header.xloadflags & XLF_KERNEL_64 != 0)
        else {
            return Err(BootError::Kernel("it has no 64-bit entry".into()));
        };
        // Loaded low, it goes to its preferred address before it unpacks itself (boot.rst, `pref_address`); above that it stays.
        let place = match moved {
            Some(_) => loaded.kernel_load.raw_value(),
            None => header.pref_address,
        };
        let unpacked = place.saturating_add(u64::from(header.init_size));
        Kernel {
            entry: loaded.kernel_load.raw_value() + BZIMAGE_ENTRY_64,
            end: loaded.kernel_end.max(unpacked),
            setup_header: Some(header.as_slice().to_vec()),
        }
    };
    // It would unpack itself, or clear its bss, where there is no memory, and die without a word.
    let top = ram.first_end();
    if kernel.end > top {
        return Err(BootError::KernelTooLarge {
            needed: ByteSize(kernel.end - ram.start()),
            memory: ByteSize(top - ram.start()),
        });
    }
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
    let start = ram.first_end().checked_sub(length).ok_or_else(too_small)? & !0xfff;
    if start < kernel_end {
        return Err(too_small());
    }
    let count = usize::try_from(length).map_err(|_| too_small())?;
    ram.guest().read_exact_volatile_from(GuestAddress(start), file, count)?;
    Ok(Range { start, length })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A bzImage of nothing but a header: protocol 2.15, loaded at 1 MiB, unpacks itself into 16 MiB from 16 MiB on.
    fn bzimage(xloadflags: u16) -> File {
        let mut image = vec![0; 8192];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x1f1, &[1]);
        put(0x202, b"HdrS");
        put(0x206, &0x20f_u16.to_le_bytes());
        put(0x211, &[1]);
        put(0x214, &0x10_0000_u32.to_le_bytes());
        put(0x236, &xloadflags.to_le_bytes());
        put(0x258, &0x100_0000_u64.to_le_bytes());
        put(0x260, &0x100_0000_u32.to_le_bytes());
        let mut file = base::memfd::sized("bzimage", 8192).unwrap();
        file.write_all(&image).unwrap();
        file
    }

    #[test]
    fn an_initramfs_stays_clear_of_what_a_kernel_unpacks_itself_into() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        let kernel = load(&ram, &mut bzimage(XLF_KERNEL_64)).unwrap();
        assert_eq!((kernel.entry, kernel.end), (0x10_0200, 32 << 20));
        let initramfs = |mib: u64| {
            let mut file = base::memfd::sized("initramfs", mib << 20).unwrap();
            load_initramfs(&ram, &mut file, kernel.end)
        };
        assert_eq!(initramfs(32).unwrap().start, 32 << 20);
        assert!(matches!(initramfs(33), Err(BootError::TooSmall { .. })));
    }

    #[test]
    fn a_kernel_without_a_64_bit_entry_is_refused() {
        let ram = Ram::allocate(ByteSize::mib(32)).unwrap();
        assert!(matches!(load(&ram, &mut bzimage(0)), Err(BootError::Kernel(_))));
    }

    /// A vmlinux of one segment: 4 bytes in the file, and from `address` on so many in memory.
    fn vmlinux(address: u64, memory: u64) -> File {
        let mut image = vec![0; 4096];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        // ELF64, little-endian, an executable for x86-64; one program header behind the header (System V ABI).
        put(0, b"\x7fELF\x02\x01\x01");
        put(16, &[2, 0, 62, 0, 1]);
        put(24, &address.to_le_bytes());
        put(32, &64_u64.to_le_bytes());
        put(52, &[64, 0, 56, 0, 1, 0]);
        put(64, &[1, 0, 0, 0, 5]);
        put(72, &0x200_u64.to_le_bytes());
        put(88, &address.to_le_bytes());
        put(96, &4_u64.to_le_bytes());
        put(104, &memory.to_le_bytes());
        let mut file = base::memfd::sized("vmlinux", 4096).unwrap();
        file.write_all(&image).unwrap();
        file
    }

    #[test]
    fn a_kernel_that_would_outgrow_the_guest_is_refused_without_an_initramfs_too() {
        // What the bzImage unpacks itself into ends at 32 MiB.
        let ram = |mib| Ram::allocate(ByteSize::mib(mib)).unwrap();
        assert_eq!(load(&ram(32), &mut bzimage(XLF_KERNEL_64)).unwrap().end, 32 << 20);
        let error = load(&ram(31), &mut bzimage(XLF_KERNEL_64)).err().unwrap().to_string();
        assert!(error.contains("32 MiB") && error.contains("31 MiB"), "{error}");
        // The bss of the vmlinux is nowhere in the file.
        assert_eq!(load(&ram(32), &mut vmlinux(16 << 20, 16 << 20)).unwrap().end, 32 << 20);
        assert!(matches!(
            load(&ram(32), &mut vmlinux(16 << 20, (16 << 20) + 1)),
            Err(BootError::KernelTooLarge { .. })
        ));
    }
}
