//! Port and MMIO dispatch: which device answers at an address. Knows no device.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

/// Something that answers at a range of ports or addresses. Guests call it from every vCPU at once.
pub trait BusDevice: Send + Sync {
    /// Fills `data` (1 to 8 bytes) from `offset` within the device's range.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Takes `data` (1 to 8 bytes) at `offset` within the device's range.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Why a range cannot be given to a device.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BusError {
    /// The range is empty or wraps around.
    #[error("the range of {length} at {start:#x} is empty or wraps around")]
    Range {
        /// First address.
        start: u64,
        /// Its length.
        length: u64,
    },
    /// Another device has part of it.
    #[error("the range of {length} at {start:#x} overlaps another device's")]
    Overlap {
        /// First address.
        start: u64,
        /// Its length.
        length: u64,
    },
}

struct Entry {
    length: u64,
    device: Arc<dyn BusDevice>,
}

/// An address space of devices. Reads of empty addresses give all ones, as an undriven bus does; writes are dropped.
#[derive(Default)]
pub struct Bus {
    // Read on each exit of each vCPU, written while the machine is built: a reader-writer lock whose readers never
    // wait in practice. The device's own locks are taken after it has been released.
    entries: RwLock<BTreeMap<u64, Entry>>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets `device` answer at `start` for `length` addresses.
    ///
    /// # Errors
    /// The range is not free.
    pub fn insert(&self, start: u64, length: u64, device: Arc<dyn BusDevice>) -> Result<(), BusError> {
        let end = start
            .checked_add(length)
            .filter(|_| length > 0)
            .ok_or(BusError::Range { start, length })?;
        let mut entries = self.entries.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let overlaps = entries
            .range(..end)
            .next_back()
            .is_some_and(|(at, entry)| at + entry.length > start);
        if overlaps {
            return Err(BusError::Overlap { start, length });
        }
        entries.insert(start, Entry { length, device });
        Ok(())
    }

    /// Takes all devices away. The caller sees to it that nobody accesses any.
    pub fn clear(&self) {
        let mut entries = self.entries.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        entries.clear();
    }

    /// Reads; tells whether a device answered.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        if let Some((offset, device)) = self.find(address, data.len()) {
            device.read(offset, data);
            return true;
        }
        data.fill(0xff);
        false
    }

    /// Writes; tells whether a device took it.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        if let Some((offset, device)) = self.find(address, data.len()) {
            device.write(offset, data);
            return true;
        }
        false
    }

    fn find(&self, address: u64, length: usize) -> Option<(u64, Arc<dyn BusDevice>)> {
        let entries = self.entries.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (start, entry) = entries.range(..=address).next_back()?;
        let offset = address - start;
        let end = offset.checked_add(length as u64)?;
        (end <= entry.length).then(|| (offset, Arc::clone(&entry.device)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset).unwrap());
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    #[test]
    fn devices_see_offsets_and_empty_addresses_read_ones() {
        let bus = Bus::new();
        let device = Arc::new(Recorder::default());
        bus.insert(0x100, 0x10, device.clone()).unwrap();
        let mut data = [0; 2];
        assert!(bus.read(0x104, &mut data));
        assert_eq!(data, [4, 4]);
        assert!(!bus.read(0x110, &mut data));
        assert_eq!(data, [0xff, 0xff]);
        assert!(!bus.read(0x10f, &mut data), "an access across the end is nobody's");
        assert!(bus.write(0x10f, &[9]));
        assert!(!bus.write(u64::MAX, &[1, 2]));
        assert_eq!(*device.0.lock().unwrap(), [(15, vec![9])]);
    }

    #[test]
    fn overlaps_are_refused() {
        let bus = Bus::new();
        let device = Arc::new(Recorder::default());
        bus.insert(0x100, 0x10, device.clone()).unwrap();
        for (start, length) in [(0x100, 1), (0xff, 2), (0x10f, 1), (0, 0x1000)] {
            assert_eq!(
                bus.insert(start, length, device.clone()),
                Err(BusError::Overlap { start, length })
            );
        }
        assert_eq!(
            bus.insert(5, 0, device.clone()),
            Err(BusError::Range { start: 5, length: 0 })
        );
        assert!(bus.insert(u64::MAX, 2, device.clone()).is_err());
        bus.insert(0x110, 1, device.clone()).unwrap();
        bus.insert(0xff, 1, device).unwrap();
    }
}
