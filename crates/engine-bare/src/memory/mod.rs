//! A guest's memory as its engine reads and writes it: by guest physical address, over all regions.

pub(crate) mod lazy;
pub(crate) mod reserved;

use std::sync::{Arc, PoisonError, RwLock};

use vm_memory::{Address, Bytes, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

/// Its regions, by slot.
#[derive(Default)]
pub(crate) struct GuestMemory(RwLock<Vec<(u32, Arc<GuestRegionMmap<()>>)>>);

impl GuestMemory {
    /// Adds one, which lives as long as this.
    pub(crate) fn add(&self, slot: u32, region: Arc<GuestRegionMmap<()>>) {
        self.0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push((slot, region));
    }

    /// Reads bytes that lie in one region; `None` where there is no memory.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
        let length = bytes.len();
        self.with(address, length, |region, offset| region.read_slice(bytes, offset).ok())
    }

    /// Writes them.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Option<()> {
        self.with(address, bytes.len(), |region, offset| {
            region.write_slice(bytes, offset).ok()
        })
    }

    /// Reads eight bytes, the lowest first.
    pub(crate) fn read_u64(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    fn with<T>(
        &self,
        address: u64,
        length: usize,
        work: impl FnOnce(&GuestRegionMmap<()>, MemoryRegionAddress) -> Option<T>,
    ) -> Option<T> {
        let regions = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let end = address.checked_add(u64::try_from(length).ok()?)?;
        let (_, region) = regions.iter().find(|(_, region)| {
            let start = region.start_addr().raw_value();
            start <= address && end <= start.saturating_add(region.len())
        })?;
        work(region, MemoryRegionAddress(address - region.start_addr().raw_value()))
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use vm_memory::{GuestAddress, MmapRegion};

    use super::*;

    /// 64 KiB from 0 on, with these words in them.
    pub(crate) fn memory_with(words: &[(u64, u64)]) -> GuestMemory {
        let memory = GuestMemory::default();
        let region = GuestRegionMmap::new(MmapRegion::new(64 << 10).unwrap(), GuestAddress(0)).unwrap();
        memory.add(0, Arc::new(region));
        for (address, word) in words {
            memory.write(*address, &word.to_le_bytes()).unwrap();
        }
        memory
    }
}

#[cfg(test)]
mod tests {
    use super::testing::memory_with;

    #[test]
    fn what_is_not_whole_in_memory_is_not_read() {
        let memory = memory_with(&[(0x1000, 7)]);
        assert_eq!(memory.read_u64(0x1000), Some(7));
        assert_eq!(memory.read_u64(0xfff8), Some(0));
        for address in [0xfff9, 0x1_0000, u64::MAX] {
            assert_eq!(memory.read_u64(address), None, "{address:#x}");
            assert_eq!(memory.write(address, &[0; 8]), None);
        }
    }
}
