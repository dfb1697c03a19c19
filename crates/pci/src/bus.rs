//! Bus 0 with its host bridge at 00:00.0: who is there, how guests reach it, which addresses are whose.
//!
//! Two locks. `functions` is written when a function comes or goes and read on each access. `decode` holds what the BARs
//! decode; it is written when a guest moves one. Order: `functions`, `decode`, a function's own lock; no lock of the bus
//! is held while a function serves an access.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use bus::BusDevice;
use serde::{Deserialize, Serialize};
use state::Schema;

use crate::config::{ConfigSpace, Identity, register};
use crate::decode::Decode;
use crate::window::{Assigned, Free, Window, WindowKind, Windows};
use crate::{BAR_COUNT, MemoryRanges, PciError, PciFunction};

/// Device numbers of a bus.
pub const SLOTS: usize = 32;

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

/// A device number that is taken.
struct Slot {
    function: Arc<dyn PciFunction>,
    bars: Vec<Assigned>,
}

/// Bus 0.
pub struct PciBus {
    windows: Windows,
    bridge: Arc<HostBridge>,
    functions: RwLock<[Option<Slot>; SLOTS]>,
    decode: RwLock<Decode>,
    free: Mutex<Free>,
    config_address: AtomicU32,
}

impl PciBus {
    /// A bus with nothing but its host bridge.
    pub fn new(windows: Windows) -> Arc<Self> {
        let bridge = Arc::new(HostBridge(Mutex::new(ConfigSpace::new(&HOST_BRIDGE))));
        let mut functions = [const { None }; SLOTS];
        functions[0] = Some(Slot {
            function: Arc::<HostBridge>::clone(&bridge) as Arc<dyn PciFunction>,
            bars: Vec::new(),
        });
        Arc::new(Self {
            windows,
            functions: RwLock::new(functions),
            bridge,
            decode: RwLock::default(),
            free: Mutex::new(Free::new(&windows)),
            config_address: AtomicU32::new(0),
        })
    }

    /// Puts a function into the first free slot, function 0, and assigns its BARs. Memory decoding stays off, as
    /// drivers turn it on. Returns the slot. A guest that runs finds it when it looks.
    ///
    /// # Errors
    /// The bus or a window is full.
    pub fn add(&self, function: Arc<dyn PciFunction>) -> Result<usize, PciError> {
        self.add_after(function, |_| ())
    }

    /// As [`PciBus::add`]; `before` is told the slot before the guest can find the function there.
    ///
    /// # Errors
    /// As there; `before` was not called then.
    pub fn add_after(&self, function: Arc<dyn PciFunction>, before: impl FnOnce(usize)) -> Result<usize, PciError> {
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        let slot = functions.iter().position(Option::is_none).ok_or(PciError::BusFull)?;
        let bars = self.assign_bars(function.as_ref())?;
        before(slot);
        functions[slot] = Some(Slot { function, bars });
        Ok(slot)
    }

    /// Takes a function off the bus, whether or not the guest has let go of it: nobody answers in its slot and at its BARs from here on,
    /// and accesses that are under way are the last. `None` where there is none, and for the host bridge.
    pub fn remove(&self, slot: usize) -> Option<Arc<dyn PciFunction>> {
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        let Slot { function, bars } = functions.get_mut(slot).filter(|_| slot != 0)?.take()?;
        let mut decode = self.decode.write().unwrap_or_else(PoisonError::into_inner);
        decode.clear(slot);
        drop(decode);
        self.give_back(bars);
        Some(function)
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
        for (slot, found) in functions.iter().enumerate() {
            if let Some(found) = found {
                decode.update(slot, found.function.as_ref());
            }
        }
        Ok(())
    }

    /// Gives each BAR an address; all of them or none.
    fn assign_bars(&self, function: &dyn PciFunction) -> Result<Vec<Assigned>, PciError> {
        let mut bars = Vec::new();
        match self.assign_each(function, &mut bars) {
            Ok(()) => Ok(bars),
            Err(error) => {
                self.give_back(bars);
                Err(error)
            }
        }
    }

    fn give_back(&self, bars: Vec<Assigned>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        bars.into_iter().for_each(|bar| free.give_back(bar));
    }

    /// Finds out each BAR's size as any software does, by writing ones (6.2.5.1), and gives it an address.
    fn assign_each(&self, function: &dyn PciFunction, bars: &mut Vec<Assigned>) -> Result<(), PciError> {
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
            let kind = match (is_64_bit, is_ports) {
                (true, _) => WindowKind::High,
                (false, true) => WindowKind::Ports,
                (false, false) => WindowKind::Low,
            };
            if is_64_bit || sized[..4] != [0; 4] {
                let assigned = free.take(kind, size)?;
                bars.push(assigned);
                let width = if is_64_bit { 8 } else { 4 };
                function.config_write(offset, &assigned.address.to_le_bytes()[..width]);
            }
            bar += if is_64_bit { 2 } else { 1 };
        }
        Ok(())
    }

    fn function(&self, slot: usize) -> Option<Arc<dyn PciFunction>> {
        let functions = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        let found = functions.get(slot)?.as_ref()?;
        Some(Arc::clone(&found.function))
    }

    fn config_read(&self, target: Target, data: &mut [u8]) {
        let fits = |function: &Arc<dyn PciFunction>| target.fits(data.len(), function.config_size());
        match self.function(target.slot).filter(fits) {
            Some(function) => function.config_read(target.offset, data),
            None => data.fill(0xff),
        }
    }

    fn config_write(&self, target: Target, data: &[u8]) {
        let fits = |function: &Arc<dyn PciFunction>| target.fits(data.len(), function.config_size());
        let Some(function) = self.function(target.slot).filter(fits) else {
            return;
        };
        function.config_write(target.offset, data);
        if function.moves_memory(target.offset, data.len()) {
            // Read again under the lock: of two vCPUs that write at once, the later update sees both writes. It may be gone by now.
            let functions = self.functions.read().unwrap_or_else(PoisonError::into_inner);
            let still = functions[target.slot].as_ref();
            if still.is_some_and(|slot| Arc::ptr_eq(&slot.function, &function)) {
                let mut decode = self.decode.write().unwrap_or_else(PoisonError::into_inner);
                decode.update(target.slot, function.as_ref());
            }
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

    /// Whether all of the access is in what the function has.
    fn fits(self, length: usize, size: usize) -> bool {
        self.offset.saturating_add(length) <= size
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
mod tests;
