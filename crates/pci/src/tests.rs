//! A bus with a function that has extended configuration space, beside one that has none.

use std::sync::{Arc, Mutex};

use bus::BusDevice;

use crate::{BAR_COUNT, MemoryRange, MemoryRanges, PciBus, PciFunction, Window, WindowKind, Windows};

const LOW: Window = Window {
    start: 0xc000_0000,
    length: 0x10_0000,
};

fn read32(device: &Arc<dyn BusDevice>, offset: u64) -> u32 {
    let mut data = [0; 4];
    device.read(offset, &mut data);
    u32::from_le_bytes(data)
}

/// A function that answers zeroes.
struct Conventional;

impl PciFunction for Conventional {
    fn config_read(&self, _: usize, data: &mut [u8]) {
        data.fill(0);
    }
    fn config_write(&self, _: usize, _: &[u8]) {}
    fn memory_ranges(&self) -> MemoryRanges {
        [None; BAR_COUNT]
    }
    fn bar_read(&self, _: usize, _: u64, _: &mut [u8]) {}
    fn bar_write(&self, _: usize, _: u64, _: &[u8]) {}
}

/// A function with extended configuration space, which a write to there moves.
struct Express(Mutex<Vec<u8>>);

impl PciFunction for Express {
    fn config_size(&self) -> usize {
        4096
    }
    fn config_read(&self, offset: usize, data: &mut [u8]) {
        data.copy_from_slice(&self.0.lock().unwrap()[offset..offset + data.len()]);
    }
    fn config_write(&self, offset: usize, data: &[u8]) {
        // It has no BARs that anybody could set.
        if offset >= 0x100 {
            self.0.lock().unwrap()[offset..offset + data.len()].copy_from_slice(data);
        }
    }
    fn moves_memory(&self, offset: usize, _: usize) -> bool {
        offset == 0xffc
    }
    fn memory_ranges(&self) -> MemoryRanges {
        let bytes = self.0.lock().unwrap();
        let mut ranges = [None; BAR_COUNT];
        ranges[0] = MemoryRange::new(LOW.start + u64::from(bytes[0xffc]) * 0x1000, 0x1000);
        ranges
    }
    fn bar_read(&self, _: usize, _: u64, data: &mut [u8]) {
        data.fill(0x77);
    }
    fn bar_write(&self, _: usize, _: u64, _: &[u8]) {}
}

#[test]
fn extended_configuration_space_is_reached_by_memory_and_may_move_bars() {
    let bus = PciBus::new(Windows {
        low: LOW,
        high: LOW,
        ports: None,
    });
    bus.add(Arc::new(Conventional)).unwrap();
    bus.add(Arc::new(Express(Mutex::new(vec![0; 4096])))).unwrap();
    let (ecam, low) = (bus.ecam(), bus.window(WindowKind::Low));
    let at = |slot: u64, offset: u64| slot << 15 | offset;
    ecam.write(at(2, 0xffc), &[8, 0, 0, 0]);
    assert_eq!(
        (read32(&ecam, at(2, 0xffc)), read32(&ecam, at(2, 0x1000))),
        (8, u32::MAX)
    );
    assert_eq!(
        read32(&ecam, at(1, 0x100)),
        u32::MAX,
        "a conventional function has none"
    );
    assert_eq!((read32(&low, 0x8000), read32(&low, 0x9000)), (0x7777_7777, u32::MAX));
    ecam.write(at(2, 0xff8), &[0; 4]);
    ecam.write(at(2, 0xffc), &[9, 0, 0, 0]);
    assert_eq!((read32(&low, 0x8000), read32(&low, 0x9000)), (u32::MAX, 0x7777_7777));
}
