//! Guest physical memory: where it lies, what backs it, and checked access to it. Knows no device.

pub mod layout;

use std::sync::Arc;

use base::ByteSize;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

/// Guest memory as devices and loaders see it: every access is checked against its regions.
///
/// One name for the type, so that a dirty bitmap can come in at one place.
pub type GuestRam = GuestMemoryMmap<()>;

/// What second-stage page tables map at once, and what guest memory is aligned to.
pub const HUGE_PAGE: usize = 2 << 20;

/// Why guest memory could not be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host has no address space or memory for it.
    #[error("{size} of guest memory cannot be mapped: ask for less, or free memory on the host ({source})")]
    Map {
        /// How much was asked for.
        size: ByteSize,
        /// Why.
        source: vm_memory::mmap::MmapRegionError,
    },
    /// The regions do not form an address space; a bug.
    #[error("the memory layout of {0} is inconsistent")]
    Layout(ByteSize),
}

/// All RAM of one VM.
#[derive(Clone, Debug)]
pub struct Ram {
    guest: Arc<GuestRam>,
    regions: Vec<Arc<GuestRegionMmap<()>>>,
}

impl Ram {
    /// Maps `size` of zeroed memory, in the regions that [`layout::ram`] gives.
    ///
    /// The mappings are private and anonymous, begin on a 2 MiB boundary and ask for transparent huge pages: a guest's
    /// first touch of a 2 MiB range then costs one second-stage fault instead of 512.
    ///
    /// # Errors
    /// The host cannot map that much.
    pub fn allocate(size: ByteSize) -> Result<Self, MemoryError> {
        let mut regions = Vec::new();
        for range in layout::ram(size) {
            let length = usize::try_from(range.length).map_err(|_| MemoryError::Layout(size))?;
            let mapping = aligned(length).map_err(|source| MemoryError::Map { size, source })?;
            huge_pages(&mapping);
            let region = GuestRegionMmap::new(mapping, GuestAddress(range.start)).ok_or(MemoryError::Layout(size))?;
            regions.push(Arc::new(region));
        }
        let guest = GuestRam::from_arc_regions(regions.clone()).map_err(|_| MemoryError::Layout(size))?;
        Ok(Self {
            guest: Arc::new(guest),
            regions,
        })
    }

    /// The checked view for loaders and devices.
    pub fn guest(&self) -> &Arc<GuestRam> {
        &self.guest
    }

    /// The regions, lowest address first; each becomes a slot of the engine.
    pub fn regions(&self) -> &[Arc<GuestRegionMmap<()>>] {
        &self.regions
    }

    /// The number of bytes.
    pub fn size(&self) -> ByteSize {
        ByteSize(self.regions.iter().map(|region| region.len()).sum())
    }
}

/// A mapping whose address is a multiple of [`HUGE_PAGE`], as its guest physical address is: only then can KVM map the
/// guest's huge pages as such.
///
/// Linux gives anonymous mappings such addresses by itself only from 6.7 on. It puts a mapping right below the last one
/// if there is no hole above: one of the excess's size is put in between until the next is right. Where that does not
/// come about the guest is slower, not wrong.
fn aligned(length: usize) -> Result<MmapRegion<()>, vm_memory::mmap::MmapRegionError> {
    const ATTEMPTS: usize = 8;
    let mut between = Vec::new();
    for _ in 0..ATTEMPTS {
        let mapping = MmapRegion::new(length)?;
        let excess = mapping.as_ptr().addr() % HUGE_PAGE;
        if excess == 0 {
            return Ok(mapping);
        }
        drop(mapping);
        between.push(MmapRegion::<()>::new(excess)?);
    }
    log::debug!("guest memory is not aligned to huge pages");
    MmapRegion::new(length)
}

#[allow(unsafe_code, reason = "madvise takes a raw address")]
fn huge_pages(mapping: &MmapRegion<()>) {
    // SAFETY: 1. the range is one whole mapping that `mapping` owns and keeps; 2. MADV_HUGEPAGE changes how pages
    // are backed, never what they hold.
    let result = unsafe {
        rustix::mm::madvise(
            mapping.as_ptr().cast(),
            mapping.size(),
            rustix::mm::Advice::LinuxHugepage,
        )
    };
    if let Err(error) = result {
        // A kernel without transparent huge pages: slower, not wrong.
        log::debug!("no huge pages for guest memory: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn memory_is_zero_and_checked() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        assert_eq!(ram.size(), ByteSize::mib(64));
        assert_eq!(ram.guest().read_obj::<u64>(GuestAddress(0x1000)).unwrap(), 0);
        assert!(ram.guest().write_obj(1_u64, GuestAddress((64 << 20) - 4)).is_err());
    }
}
