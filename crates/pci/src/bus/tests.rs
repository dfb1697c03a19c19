//! The bus by its ports, its configuration space in memory and its windows, with functions that are probes.

use std::sync::Weak;

use super::*;
use crate::config::{Bar, BarKind};

/// A function whose BARs read their own number and offset.
struct Probe(Mutex<ConfigSpace>);

impl Probe {
    fn new(bars: &[Bar]) -> Arc<Self> {
        let mut space = ConfigSpace::new(&Identity {
            vendor: 0x1af4,
            device: 0x1044,
            ..Identity::default()
        });
        for bar in bars {
            space.add_bar(*bar).unwrap();
        }
        Arc::new(Self(Mutex::new(space)))
    }
}

impl PciFunction for Probe {
    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.0.lock().unwrap().read(offset, data);
    }
    fn config_write(&self, offset: usize, data: &[u8]) {
        self.0.lock().unwrap().write(offset, data);
    }
    fn memory_ranges(&self) -> MemoryRanges {
        self.0.lock().unwrap().memory_ranges()
    }
    fn port_ranges(&self) -> MemoryRanges {
        self.0.lock().unwrap().port_ranges()
    }
    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        data.fill(u8::try_from(bar * 16 + usize::try_from(offset).unwrap()).unwrap());
    }
    fn bar_write(&self, _: usize, _: u64, _: &[u8]) {}
}

const LOW: Window = Window {
    start: 0xc000_0000,
    length: 0x10_0000,
};
const HIGH: Window = Window {
    start: 0x40_0000_0000,
    length: 0x10_0000,
};

const PORTS: Window = Window {
    start: 0xc000,
    length: 0x4000,
};

fn bus() -> Arc<PciBus> {
    let bus = PciBus::new(Windows {
        low: LOW,
        high: HIGH,
        ports: Some(PORTS),
    });
    let probe = Probe::new(&[
        Bar {
            index: 0,
            kind: BarKind::Memory32,
            size: 0x1000,
        },
        Bar {
            index: 4,
            kind: BarKind::Memory64 { prefetchable: false },
            size: 0x2000,
        },
    ]);
    assert_eq!(bus.add(probe), Ok(1));
    bus
}

fn read32(device: &Arc<dyn BusDevice>, offset: u64) -> u32 {
    let mut data = [0; 4];
    device.read(offset, &mut data);
    u32::from_le_bytes(data)
}

#[test]
fn ports_and_memory_are_spaces_of_their_own() {
    let bus = PciBus::new(Windows {
        low: LOW,
        high: HIGH,
        ports: Some(PORTS),
    });
    let ports_bar = |index| Bar {
        index,
        kind: BarKind::Ports,
        size: 0x100,
    };
    let memory_bar = Bar {
        index: 2,
        kind: BarKind::Memory64 { prefetchable: true },
        size: 0x1000,
    };
    bus.add(Probe::new(&[ports_bar(0), memory_bar])).unwrap();
    bus.add(Probe::new(&[ports_bar(1)])).unwrap();
    let (config, ports, high) = (bus.ports(), bus.window(WindowKind::Ports), bus.window(WindowKind::High));
    let select = |slot: u32, register: u32| config.write(0, &(1 << 31 | slot << 11 | register).to_le_bytes());
    select(1, 0x10);
    assert_eq!(read32(&config, 4), 0xc001);
    select(2, 0x14);
    assert_eq!(read32(&config, 4), 0xc101);
    // Nothing decodes before it is told to, and each space by its own bit.
    assert_eq!(read32(&ports, 0), u32::MAX);
    select(1, 4);
    config.write(4, &0b01_u16.to_le_bytes());
    assert_eq!((read32(&ports, 4), read32(&high, 4)), (0x0404_0404, u32::MAX));
    config.write(4, &0b10_u16.to_le_bytes());
    assert_eq!((read32(&ports, 4), read32(&high, 4)), (u32::MAX, 0x2424_2424));
    // One that has no such BAR cannot be told.
    let other = self::bus();
    let config = other.ports();
    config.write(0, &0x8000_0804_u32.to_le_bytes());
    config.write(4, &0b11_u16.to_le_bytes());
    assert_eq!(read32(&config, 4) & 0xffff, 0b10);
    let large = Bar {
        size: 0x200,
        ..ports_bar(0)
    };
    assert!(ConfigSpace::new(&Identity::default()).add_bar(large).is_err());
}

#[test]
fn both_ways_reach_the_same_registers() {
    let bus = bus();
    let (ports, ecam) = (bus.ports(), bus.ecam());
    ports.write(0, &0x8000_0800_u32.to_le_bytes());
    assert_eq!(read32(&ports, 0), 0x8000_0800);
    assert_eq!(read32(&ports, 4), 0x1044_1af4);
    assert_eq!(read32(&ecam, 1 << 15), 0x1044_1af4);
    assert_eq!(read32(&ecam, 0), 0x0008_1b36);
    assert_eq!(read32(&ecam, (1 << 15) | 0x10), 0xc000_0000);
    assert_eq!(read32(&ecam, (1 << 15) | 0x20), 0x0000_0004);
    assert_eq!(read32(&ecam, (1 << 15) | 0x24), 0x40);
    let mut two = [0; 2];
    ports.read(6, &mut two);
    assert_eq!(two, [0x44, 0x10]);
}

#[test]
fn nobody_answers_elsewhere() {
    let bus = bus();
    let (ports, ecam) = (bus.ports(), bus.ecam());
    for address in [0x0000_0800_u32, 0x8000_1000, 0x8001_0800, 0x8000_0900] {
        ports.write(0, &address.to_le_bytes());
        assert_eq!(read32(&ports, 4), u32::MAX, "{address:#x}");
        ports.write(4, &[0; 4]);
    }
    for offset in [2_u64 << 15, (1 << 15) | 0x1000, (1 << 15) | 0x100, (1 << 15) | 0xfe] {
        assert_eq!(read32(&ecam, offset), u32::MAX, "{offset:#x}");
        ecam.write(offset, &[0; 4]);
    }
    ports.write(0, &[1, 2]);
    ports.write(3, &[1]);
    let mut eight = [0; 8];
    ports.read(0, &mut eight);
    assert_eq!(eight, [0xff; 8]);
}

#[test]
fn a_moved_bar_is_found_where_it_went() {
    let bus = bus();
    let (ecam, low, high) = (bus.ecam(), bus.window(WindowKind::Low), bus.window(WindowKind::High));
    let config = 1 << 15;
    assert_eq!(read32(&low, 2), u32::MAX, "decoding is off");
    ecam.write(config | 4, &[2]);
    assert_eq!(read32(&low, 2), 0x0202_0202);
    assert_eq!(read32(&high, 3), 0x4343_4343);
    ecam.write(config | 0x10, &(0xc000_8000_u32).to_le_bytes());
    assert_eq!(read32(&low, 2), u32::MAX);
    assert_eq!(read32(&low, 0x8002), 0x0202_0202);
    assert_eq!(read32(&low, 0x8ffe), u32::MAX, "an access across the end is nobody's");
    ecam.write(config | 4, &[0]);
    assert_eq!(read32(&low, 0x8002), u32::MAX);
}

#[test]
fn a_restored_bus_finds_what_its_functions_decode() {
    let original = bus();
    original.ports().write(0, &0x8000_0810_u32.to_le_bytes());
    original.ecam().write(4, &[4]);
    let saved = original.save();
    let copy = bus();
    // As a restored function has it: decoding, and the bus has not been asked.
    let function = copy.function(1).unwrap();
    function.config_write(4, &[2]);
    assert_eq!(read32(&copy.window(WindowKind::Low), 2), u32::MAX);
    copy.restore(&saved).unwrap();
    assert_eq!(copy.save(), saved);
    assert_eq!(read32(&copy.window(WindowKind::Low), 2), 0x0202_0202);
    assert_eq!(read32(&copy.ports(), 4), 0xc000_0000);
    let mut other = saved;
    other.host_bridge[0] ^= 1;
    assert_eq!(copy.restore(&other), Err(PciError::OtherFunction(0)));
}

#[test]
fn the_state_is_what_the_golden_file_says() {
    let state = PciState {
        config_address: 0x8000_0810,
        host_bridge: vec![0x36, 0x1b, 8, 0],
    };
    state::golden::check(env!("CARGO_MANIFEST_DIR"), &state);
}

#[test]
fn a_function_that_left_answers_nobody_and_its_place_is_free() {
    let bus = bus();
    let (ecam, low) = (bus.ecam(), bus.window(WindowKind::Low));
    let config = 1 << 15;
    ecam.write(config | 4, &[2]);
    assert_eq!(read32(&low, 2), 0x0202_0202);
    assert!(bus.remove(0).is_none() && bus.remove(2).is_none() && bus.remove(SLOTS).is_none());
    let gone = bus.remove(1).unwrap();
    assert_eq!((read32(&low, 2), read32(&ecam, config)), (u32::MAX, u32::MAX));
    assert!(bus.remove(1).is_none());
    drop(gone);
    let next = Probe::new(&[Bar {
        index: 0,
        kind: BarKind::Memory32,
        size: 0x1000,
    }]);
    assert_eq!(bus.add(next), Ok(1));
    assert_eq!(read32(&low, 2), u32::MAX, "it does not decode yet");
    assert_eq!(
        read32(&ecam, config | 0x10),
        0xc000_0000,
        "the address is given out again"
    );
    ecam.write(config | 4, &[2]);
    assert_eq!(read32(&low, 2), 0x0202_0202);
}

/// Leaves the bus while its guest writes to it.
struct Leaving {
    probe: Arc<Probe>,
    bus: Weak<PciBus>,
}

impl PciFunction for Leaving {
    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.probe.config_read(offset, data);
    }
    fn config_write(&self, offset: usize, data: &[u8]) {
        self.probe.config_write(offset, data);
        if ConfigSpace::moves_memory(offset, data.len()) && offset == register::COMMAND {
            self.bus.upgrade().unwrap().remove(2).unwrap();
        }
    }
    fn memory_ranges(&self) -> MemoryRanges {
        self.probe.memory_ranges()
    }
    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        self.probe.bar_read(bar, offset, data);
    }
    fn bar_write(&self, _: usize, _: u64, _: &[u8]) {}
}

#[test]
fn a_write_that_was_under_way_is_not_of_who_comes_next() {
    let bus = bus();
    let bars = [Bar {
        index: 0,
        kind: BarKind::Memory32,
        size: 0x1000,
    }];
    let leaving = Leaving {
        probe: Probe::new(&bars),
        bus: Arc::downgrade(&bus),
    };
    assert_eq!(bus.add(Arc::new(leaving)), Ok(2));
    bus.ecam().write((2 << 15) | 4, &[2]);
    assert_eq!(bus.add(Probe::new(&bars)), Ok(2));
    assert_eq!(
        read32(&bus.window(WindowKind::Low), 0x1000),
        u32::MAX,
        "it decodes what another did"
    );
}

#[test]
fn what_was_assigned_before_a_window_was_full_comes_back() {
    let bus = PciBus::new(Windows {
        low: LOW,
        high: HIGH,
        ports: None,
    });
    let bar = |index, size| Bar {
        index,
        kind: BarKind::Memory32,
        size,
    };
    for _ in 0..3 {
        assert!(bus.add(Probe::new(&[bar(0, 0x8_0000), bar(1, 0x10_0000)])).is_err());
    }
    assert_eq!(bus.add(Probe::new(&[bar(0, 0x10_0000)])), Ok(1));
}

#[test]
fn a_full_bus_and_a_full_window_are_told() {
    let bus = bus();
    for slot in 2..SLOTS {
        assert_eq!(bus.add(Probe::new(&[])), Ok(slot));
    }
    assert_eq!(bus.add(Probe::new(&[])), Err(PciError::BusFull));
    let bus = PciBus::new(Windows {
        low: LOW,
        high: HIGH,
        ports: None,
    });
    let large = Bar {
        index: 0,
        kind: BarKind::Memory32,
        size: 0x20_0000,
    };
    let full = PciError::WindowFull {
        size: 0x20_0000,
        window: LOW.start,
    };
    assert_eq!(bus.add(Probe::new(&[large])), Err(full));
}
