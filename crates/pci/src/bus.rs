//! Bus 0 with its host bridge at 00:00.0: who is there, how guests reach it, which addresses are whose.
//!
//! Two locks. `functions` is written while the machine is built and read on each access. `decode` holds what the BARs
//! decode; it is written when a guest moves one. Order: `decode` before a function's own lock, never the other way
//! round; no lock of the bus is held while a function serves an access.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use bus::BusDevice;
use serde::{Deserialize, Serialize};
use state::Schema;

use crate::config::{ConfigSpace, Identity, SIZE, register};
use crate::decode::Decode;
use crate::window::{Free, Window, WindowKind, Windows};
use crate::{BAR_COUNT, MemoryRanges, PciError, PciFunction};

/// Device numbers of a bus.
const SLOTS: usize = 32;

/// `CONFIG_ADDRESS` bit 31: `CONFIG_DATA` reaches configuration space (3.2.2.3.2).
const CONFIG_ENABLE: u32 = 1 << 31;

/// Offset of `CONFIG_DATA` from `CONFIG_ADDRESS`.
const CONFIG_DATA: u64 = 4;

/// The host bridge: the id that is used for PCI host bridges without registers of their own.
const HOST_BRIDGE: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0008,
    revision: 0,
    class: [0x06, 0x00, 0x00],
    subsystem_vendor: 0,
    subsystem: 0,
};

struct HostBridge(Mutex<ConfigSpace>);

impl PciFunction for HostBridge {
    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).read(offset, data);
    }
    fn config_write(&self, offset: usize, data: &[u8]) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write(offset, data);
    }
    fn memory_ranges(&self) -> MemoryRanges {
        [None; BAR_COUNT]
    }
    fn bar_read(&self, _: usize, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }
    fn bar_write(&self, _: usize, _: u64, _: &[u8]) {}
}

/// What is saved of the bus itself; functions are saved by whoever owns them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciState {
    /// `CONFIG_ADDRESS`.
    pub config_address: u32,
    /// The host bridge's configuration space.
    pub host_bridge: Vec<u8>,
}

impl Schema for PciState {
    const KIND: &'static str = "pci";
    const VERSION: u32 = 1;
}

/// Bus 0.
pub struct PciBus {
    windows: Windows,
    bridge: Arc<HostBridge>,
    functions: RwLock<Vec<Arc<dyn PciFunction>>>,
    decode: RwLock<Decode>,
    free: Mutex<Free>,
    config_address: AtomicU32,
}

impl PciBus {
    /// A bus with nothing but its host bridge.
    pub fn new(windows: Windows) -> Arc<Self> {
        let bridge = Arc::new(HostBridge(Mutex::new(ConfigSpace::new(&HOST_BRIDGE))));
        Arc::new(Self {
            windows,
            functions: RwLock::new(vec![Arc::<HostBridge>::clone(&bridge)]),
            bridge,
            decode: RwLock::default(),
            free: Mutex::new(Free::new(&windows)),
            config_address: AtomicU32::new(0),
        })
    }

    /// Puts a function into the next free slot, function 0, and assigns its BARs. Memory decoding stays off, as
    /// drivers turn it on. Returns the slot.
    ///
    /// # Errors
    /// The bus or a window is full.
    pub fn add(&self, function: Arc<dyn PciFunction>) -> Result<usize, PciError> {
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        let slot = functions.len();
        if slot >= SLOTS {
            return Err(PciError::BusFull);
        }
        self.assign_bars(function.as_ref())?;
        functions.push(function);
        Ok(slot)
    }

    /// Serves the ports from [`crate::CONFIG_PORTS`] on.
    pub fn ports(self: &Arc<Self>) -> Arc<dyn BusDevice> {
        Arc::new(Ports(Arc::clone(self)))
    }

    /// Serves the 1 MiB of configuration space by memory of bus 0 (PCI Express 5.0, 7.2.2).
    pub fn ecam(self: &Arc<Self>) -> Arc<dyn BusDevice> {
        Arc::new(Ecam(Arc::clone(self)))
    }

    /// Serves a window; the range it is put at on the machine's bus is [`PciBus::window_range`].
    pub fn window(self: &Arc<Self>, kind: WindowKind) -> Arc<dyn BusDevice> {
        Arc::new(WindowDevice {
            bus: Arc::clone(self),
            start: self.window_range(kind).start,
            is_ports: kind == WindowKind::Ports,
        })
    }

    /// The addresses of a window.
    pub fn window_range(&self, kind: WindowKind) -> Window {
        self.windows.get(kind)
    }

    /// The bus's own state.
    pub fn save(&self) -> PciState {
        let bridge = self.bridge.0.lock().unwrap_or_else(PoisonError::into_inner);
        PciState {
            config_address: self.config_address.load(Ordering::Relaxed),
            host_bridge: bridge.save(),
        }
    }

    /// Takes over what [`PciBus::save`] gave, after the functions were restored: what they decode is looked up anew.
    ///
    /// # Errors
    /// It is the state of another bus.
    pub fn restore(&self, saved: &PciState) -> Result<(), PciError> {
        let mut bridge = self.bridge.0.lock().unwrap_or_else(PoisonError::into_inner);
        bridge.restore(&saved.host_bridge)?;
        drop(bridge);
        self.config_address.store(saved.config_address, Ordering::Relaxed);
        let functions = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        let mut decode = self.decode.write().unwrap_or_else(PoisonError::into_inner);
        for (slot, function) in functions.iter().enumerate() {
            decode.update(slot, function.as_ref());
        }
        Ok(())
    }

    /// Finds out each BAR's size as any software does, by writing ones (6.2.5.1), and gives it an address.
    fn assign_bars(&self, function: &dyn PciFunction) -> Result<(), PciError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bar = 0;
        while bar < BAR_COUNT {
            let offset = register::BASE_ADDRESS + 4 * bar;
            let mut sized = [0; 8];
            function.config_write(offset, &[0xff; 4]);
            function.config_read(offset, &mut sized[..4]);
            let is_ports = sized[0] & 1 != 0;
            let is_64_bit = !is_ports && sized[0] & 0b110 == 0b100;
            if is_64_bit {
                function.config_write(offset + 4, &[0xff; 4]);
                function.config_read(offset + 4, &mut sized[4..]);
            } else {
                sized[4..].fill(0xff);
            }
            let size = (u64::from_le_bytes(sized) & !0xf).wrapping_neg();
            if is_64_bit {
                let address = free.take(WindowKind::High, size)?;
                function.config_write(offset, &address.to_le_bytes());
            } else if sized[..4] != [0; 4] {
                let kind = if is_ports { WindowKind::Ports } else { WindowKind::Low };
                let address = free.take(kind, size)?;
                function.config_write(offset, &address.to_le_bytes()[..4]);
            }
            bar += if is_64_bit { 2 } else { 1 };
        }
        Ok(())
    }

    fn function(&self, slot: usize) -> Option<Arc<dyn PciFunction>> {
        let functions = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        functions.get(slot).cloned()
    }

    fn config_read(&self, target: Target, data: &mut [u8]) {
        match self.function(target.slot).filter(|_| target.fits(data.len())) {
            Some(function) => function.config_read(target.offset, data),
            None => data.fill(0xff),
        }
    }

    fn config_write(&self, target: Target, data: &[u8]) {
        let Some(function) = self.function(target.slot).filter(|_| target.fits(data.len())) else {
            return;
        };
        function.config_write(target.offset, data);
        if ConfigSpace::moves_memory(target.offset, data.len()) {
            // Read again under the lock: of two vCPUs that write at once, the later update sees both writes.
            let mut decode = self.decode.write().unwrap_or_else(PoisonError::into_inner);
            decode.update(target.slot, function.as_ref());
        }
    }

    fn find(&self, is_ports: bool, address: u64, length: usize) -> Option<(Arc<dyn PciFunction>, usize, u64)> {
        let decode = self.decode.read().unwrap_or_else(PoisonError::into_inner);
        let map = if is_ports { &decode.ports } else { &decode.memory };
        let hit = map.find(address, length)?;
        drop(decode);
        Some((self.function(hit.slot)?, hit.bar, hit.offset))
    }
}

/// A register in some function's configuration space. Only function 0 of each device exists.
#[derive(Clone, Copy, Debug)]
struct Target {
    slot: usize,
    offset: usize,
}

impl Target {
    /// `CONFIG_ADDRESS`: enable (31), bus (23-16), device (15-11), function (10-8), register (7-2).
    fn from_config_address(address: u32, byte: usize) -> Option<Self> {
        let bus_and_function = address & 0x00ff_0700;
        (address & CONFIG_ENABLE != 0 && bus_and_function == 0).then_some(Self {
            slot: (address >> 11) as usize & 0x1f,
            offset: (address & 0xfc) as usize + byte,
        })
    }

    /// ECAM: device (19-15), function (14-12), register (11-0).
    fn from_ecam_offset(offset: u64) -> Option<Self> {
        let offset = usize::try_from(offset).ok()?;
        (offset & 0x7000 == 0).then_some(Self {
            slot: offset >> 15,
            offset: offset & 0xfff,
        })
    }

    /// Whether all of the access is in the 256 bytes that a conventional function has.
    fn fits(self, length: usize) -> bool {
        self.offset.saturating_add(length) <= SIZE
    }
}

struct Ports(Arc<PciBus>);

impl Ports {
    fn target(&self, offset: u64) -> Option<Target> {
        let byte = usize::try_from(offset.checked_sub(CONFIG_DATA)?).ok()?;
        Target::from_config_address(self.0.config_address.load(Ordering::Relaxed), byte)
    }
}

impl BusDevice for Ports {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.0.config_address.load(Ordering::Relaxed).to_le_bytes());
        } else if let Some(target) = self.target(offset) {
            self.0.config_read(target, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // Only a full 32-bit write reaches CONFIG_ADDRESS (3.2.2.3.2).
        if let (0, Ok(address)) = (offset, <[u8; 4]>::try_from(data)) {
            self.0
                .config_address
                .store(u32::from_le_bytes(address), Ordering::Relaxed);
        } else if let Some(target) = self.target(offset) {
            self.0.config_write(target, data);
        }
    }
}

struct Ecam(Arc<PciBus>);

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match Target::from_ecam_offset(offset) {
            Some(target) => self.0.config_read(target, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(target) = Target::from_ecam_offset(offset) {
            self.0.config_write(target, data);
        }
    }
}

struct WindowDevice {
    bus: Arc<PciBus>,
    start: u64,
    is_ports: bool,
}

impl WindowDevice {
    fn find(&self, offset: u64, length: usize) -> Option<(Arc<dyn PciFunction>, usize, u64)> {
        self.bus.find(self.is_ports, self.start.wrapping_add(offset), length)
    }
}

impl BusDevice for WindowDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.find(offset, data.len()) {
            Some((function, bar, offset)) => function.bar_read(bar, offset, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some((function, bar, offset)) = self.find(offset, data.len()) {
            function.bar_write(bar, offset, data);
        }
    }
}

#[cfg(test)]
mod tests {
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
}
