//! The I/O APIC (Intel 82093AA), edge-triggered only: each pin is an interrupt source that is routed to whatever its
//! redirection entry says. No data path uses it.

use std::sync::{Arc, Mutex, PoisonError};

use bus::BusDevice;
use engine::{Interrupt, MsiMessage, Vm};
use memory::layout;
use serde::{Deserialize, Serialize};

/// Input pins. The original has 24, but a guest sets up each of them by several exits, and here two are used.
pub const PINS: u8 = 8;

/// Version register: version 0x11 in bits 0-7, the highest entry in bits 16-23 (3.2.2).
const VERSION: u32 = 0x11 | ((PINS as u32 - 1) << 16);

/// Offsets of the two registers that are in memory (3.1).
const IOREGSEL: u64 = 0x00;
const IOWIN: u64 = 0x10;

/// Indexes behind them (3.2).
const IOAPICID: u8 = 0x00;
const IOAPICVER: u8 = 0x01;
const IOAPICARB: u8 = 0x02;
const IOREDTBL: u8 = 0x10;

/// Redirection entry (3.2.4): what software may write; delivery status (12) and remote IRR (14) are read-only.
const ENTRY_WRITABLE: u64 = 0xff00_0000_0001_afff;
const ENTRY_MASKED: u64 = 1 << 16;

/// The I/O APIC as it is saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoApicState {
    /// IOREGSEL.
    pub select: u8,
    /// IOAPICID.
    pub id: u32,
    /// The redirection table.
    pub entries: [u64; PINS as usize],
    /// Which pins were triggered while they were masked.
    pub pending: [bool; PINS as usize],
}

struct State {
    select: u8,
    id: u32,
    entries: [u64; PINS as usize],
}

/// The I/O APIC.
pub struct IoApic {
    state: Mutex<State>,
    pins: Vec<Arc<dyn Interrupt>>,
}

/// The message that a redirection entry stands for (Intel SDM 3A, 11.11): destination and its mode go into the
/// address, vector and delivery mode into the data.
fn message(entry: u64) -> Option<MsiMessage> {
    if entry & ENTRY_MASKED != 0 {
        return None;
    }
    let destination = entry >> 56;
    let logical = entry >> 11 & 1;
    let data = u32::try_from(entry & 0x7ff).unwrap_or(0);
    Some(MsiMessage {
        address: layout::LOCAL_APIC | destination << 12 | logical << 2,
        data,
    })
}

impl IoApic {
    /// All pins masked.
    pub fn new(vm: &dyn Vm) -> Arc<Self> {
        let pins = (0..PINS).map(|_| vm.create_interrupt()).collect();
        let state = State {
            select: 0,
            id: 0,
            entries: [ENTRY_MASKED; PINS as usize],
        };
        Arc::new(Self {
            state: Mutex::new(state),
            pins,
        })
    }

    /// The source behind pin `index`, if there is such a pin.
    pub fn pin(&self, index: u32) -> Option<Arc<dyn Interrupt>> {
        self.pins.get(usize::try_from(index).ok()?).cloned()
    }

    /// All of it.
    pub fn save(&self) -> IoApicState {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pending = [false; PINS as usize];
        for (pending, pin) in pending.iter_mut().zip(&self.pins) {
            *pending = pin.is_pending();
        }
        IoApicState {
            select: state.select,
            id: state.id,
            entries: state.entries,
            pending,
        }
    }

    /// Takes over what [`IoApic::save`] gave, into one that nobody has used.
    pub fn restore(&self, saved: &IoApicState) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.select = saved.select;
        state.id = saved.id;
        for (index, pin) in self.pins.iter().enumerate() {
            state.entries[index] = saved.entries[index] & ENTRY_WRITABLE;
            if saved.pending[index] {
                pin.trigger();
            }
            pin.route(message(state.entries[index]));
        }
    }

    fn read_register(state: &State) -> u32 {
        match state.select {
            IOAPICID | IOAPICARB => state.id,
            IOAPICVER => VERSION,
            index => {
                let half = usize::from(index.wrapping_sub(IOREDTBL));
                let entry = state.entries.get(half / 2).copied().unwrap_or(u64::MAX);
                let shifted = if half.is_multiple_of(2) { entry } else { entry >> 32 };
                u32::try_from(shifted & 0xffff_ffff).unwrap_or(0)
            }
        }
    }

    fn write_register(&self, state: &mut State, value: u32) {
        match state.select {
            IOAPICID => state.id = value & 0x0f00_0000,
            IOAPICVER | IOAPICARB => (),
            index => {
                let half = usize::from(index.wrapping_sub(IOREDTBL));
                let Some(entry) = state.entries.get_mut(half / 2) else {
                    return;
                };
                let value = u64::from(value);
                let merged = if half.is_multiple_of(2) {
                    *entry & !0xffff_ffff | value
                } else {
                    *entry & 0xffff_ffff | value << 32
                };
                *entry = merged & ENTRY_WRITABLE;
                if let Some(pin) = self.pins.get(half / 2) {
                    pin.route(message(*entry));
                }
            }
        }
    }
}

impl BusDevice for IoApic {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let value = match offset {
            IOREGSEL => u32::from(state.select),
            IOWIN => Self::read_register(&state),
            _ => 0,
        };
        data.fill(0);
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 4];
        for (to, from) in bytes.iter_mut().zip(data) {
            *to = *from;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match offset {
            IOREGSEL => state.select = bytes[0],
            IOWIN => self.write_register(&mut state, u32::from_le_bytes(bytes)),
            _ => (),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtio::conformance::fakes::FakeVm;

    #[test]
    fn any_access_of_any_width_is_answered() {
        let apic = IoApic::new(&FakeVm::default());
        for select in 0..=u8::MAX {
            for offset in (0..0x20).chain([u64::MAX]) {
                for width in 1..=8 {
                    apic.write(IOREGSEL, &[select]);
                    apic.write(offset, &[0xff; 8][..width]);
                    let mut data = [0x5a; 8];
                    apic.read(offset, &mut data[..width]);
                    assert_eq!(data[width.min(4)..width], [0; 4][..width.saturating_sub(4)]);
                    assert_eq!(data[width..], [0x5a; 8][width..], "beyond what was asked for");
                }
            }
        }
        let saved = apic.save();
        assert_eq!(saved.entries, [ENTRY_WRITABLE; PINS as usize]);
        assert_eq!(saved.id, 0x0f00_0000);
    }

    #[test]
    fn an_entry_becomes_the_message_of_the_manual() {
        assert_eq!(message(ENTRY_MASKED), None);
        // Vector 0x31, lowest priority, logical destination 3.
        let entry = 0x0300_0000_0000_0931;
        assert_eq!(
            message(entry),
            Some(MsiMessage {
                address: 0xfee0_3004,
                data: 0x131
            })
        );
    }
}
