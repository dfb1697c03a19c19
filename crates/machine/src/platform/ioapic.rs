//! The I/O APIC (Intel 82093AA): each pin is an interrupt source that is routed to whatever its redirection entry says. No data path of a
//! device that this process is uses it.
//!
//! ```text
//!  serial port, events ── edges ──────────────────────────────────▶ pins 4, 5 ──▶ messages
//!  functions of the host's ── lines ──▶ asserted if any of them is ─▶ pins of slots ──▶ messages of levels
//!         ▲                                                                               │
//!         └── each that is asserted is released, and its driver asked again ◀── end of interrupt
//! ```
//! Pins of slots ([`SLOT_PINS`]) are levels where the guest programs them so and the engine tells of ends; the others are edges, whatever
//! the guest programs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::EventFd;
use bus::BusDevice;
use engine::{Interrupt, MsiMessage, Vm};
use memory::layout;
use serde::{Deserialize, Serialize};

use super::SLOT_PINS;
use super::pin::{LEVEL, MASKED, Pin, WRITABLE};

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

/// A message's data (Intel SDM 3A, 11.11.2): a level, which is asserted.
const DATA_LEVEL: u32 = 1 << 15 | 1 << 14;

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

/// What asserts a pin beside others.
struct Line {
    number: u64,
    pin: usize,
    is_asserted: bool,
    /// Signalled when an interrupt of its pin was ended while it was asserted.
    ended: EventFd,
}

struct State {
    select: u8,
    id: u32,
    pins: [Pin; PINS as usize],
    lines: Vec<Line>,
}

impl State {
    fn is_asserted(&self, pin: usize) -> bool {
        self.lines.iter().any(|line| line.pin == pin && line.is_asserted)
    }
}

/// The I/O APIC.
pub struct IoApic {
    // Held for the time of a few system calls, none of which waits for a guest.
    state: Mutex<State>,
    sources: Vec<Arc<dyn Interrupt>>,
    /// Which pins can be levels.
    can_be_level: [bool; PINS as usize],
}

/// The message that a redirection entry stands for (Intel SDM 3A, 11.11): destination and its mode go into the
/// address, vector, delivery mode and trigger mode into the data.
fn message(entry: u64, is_level: bool) -> Option<MsiMessage> {
    if entry & MASKED != 0 {
        return None;
    }
    let destination = entry >> 56;
    let logical = entry >> 11 & 1;
    let data = u32::try_from(entry & 0x7ff).unwrap_or(0);
    Some(MsiMessage {
        address: layout::LOCAL_APIC | destination << 12 | logical << 2,
        data: if is_level { data | DATA_LEVEL } else { data },
    })
}

impl IoApic {
    /// All pins masked.
    pub fn new(vm: &dyn Vm) -> Arc<Self> {
        let sources: Vec<_> = (0..PINS).map(|_| vm.create_interrupt()).collect();
        let mut can_be_level = [false; PINS as usize];
        for ((number, source), can) in (0..).zip(&sources).zip(&mut can_be_level) {
            *can = SLOT_PINS.contains(&number) && source.report_ends(number, None).is_ok();
        }
        let state = State {
            select: 0,
            id: 0,
            pins: [Pin::new(); PINS as usize],
            lines: Vec::new(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            sources,
            can_be_level,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The source behind pin `index`, if there is such a pin.
    pub fn pin(&self, index: u32) -> Option<Arc<dyn Interrupt>> {
        self.sources.get(usize::try_from(index).ok()?).cloned()
    }

    /// Whether its pins of slots can be levels.
    pub fn has_levels(&self) -> bool {
        self.can_be_level.contains(&true)
    }

    /// Adds a line to a pin, not asserted. What asserts it is told by `ended` that it was released by the end of an interrupt.
    pub fn connect(&self, number: u64, pin: u32, ended: EventFd) {
        let pin = usize::try_from(pin).unwrap_or(usize::MAX);
        self.state().lines.push(Line {
            number,
            pin,
            is_asserted: false,
            ended,
        });
    }

    /// Takes a line away.
    pub fn disconnect(&self, number: u64) {
        let mut state = self.state();
        if let Some(index) = state.lines.iter().position(|line| line.number == number) {
            let line = state.lines.swap_remove(index);
            self.follow_lines(&mut state, line.pin);
        }
    }

    /// Asserts a line, or releases it; nothing of one that was taken away.
    pub fn assert(&self, number: u64, asserted: bool) {
        let mut state = self.state();
        if let Some(line) = state.lines.iter_mut().find(|line| line.number == number) {
            line.is_asserted = asserted;
            let pin = line.pin;
            self.follow_lines(&mut state, pin);
        }
    }

    /// A local APIC has ended an interrupt of this vector.
    pub fn end(&self, vector: u8) {
        let mut state = self.state();
        for index in 0..state.pins.len() {
            if !state.pins[index].end(vector) {
                continue;
            }
            for line in state.lines.iter_mut().filter(|line| line.pin == index) {
                if std::mem::take(&mut line.is_asserted) {
                    line.ended.signal();
                }
            }
            self.follow_lines(&mut state, index);
        }
    }

    /// A pin is asserted while one of its lines is.
    fn follow_lines(&self, state: &mut State, index: usize) {
        let asserted = state.is_asserted(index);
        if let Some(pin) = state.pins.get_mut(index)
            && pin.set(asserted)
        {
            self.sources[index].trigger();
        }
    }

    /// All of it but who asserts what: a machine that has such lines is not saved.
    pub fn save(&self) -> IoApicState {
        let state = self.state();
        let mut pending = [false; PINS as usize];
        for (pending, source) in pending.iter_mut().zip(&self.sources) {
            *pending = source.is_pending();
        }
        IoApicState {
            select: state.select,
            id: state.id,
            entries: state.pins.map(|pin| pin.entry() & WRITABLE),
            pending,
        }
    }

    /// Takes over what [`IoApic::save`] gave, into one that nobody has used.
    pub fn restore(&self, saved: &IoApicState) {
        let mut state = self.state();
        state.select = saved.select;
        state.id = saved.id;
        for (index, source) in self.sources.iter().enumerate() {
            if saved.pending[index] {
                source.trigger();
            }
            self.program(&mut state, index, saved.entries[index]);
        }
    }

    fn read_register(state: &State) -> u32 {
        match state.select {
            IOAPICID | IOAPICARB => state.id,
            IOAPICVER => VERSION,
            index => {
                let half = usize::from(index.wrapping_sub(IOREDTBL));
                let entry = state.pins.get(half / 2).map_or(u64::MAX, Pin::entry);
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
                let Some(entry) = state.pins.get(half / 2).map(Pin::entry) else {
                    return;
                };
                let value = u64::from(value);
                let merged = if half.is_multiple_of(2) {
                    entry & !0xffff_ffff | value
                } else {
                    entry & 0xffff_ffff | value << 32
                };
                self.program(state, half / 2, merged);
            }
        }
    }

    /// The entry of a pin is to be this one. While a level is masked its ends come out: one may be under way.
    fn program(&self, state: &mut State, index: usize, entry: u64) {
        let source = &self.sources[index];
        let is_due = state.pins[index].write(entry);
        let can_be_level = self.can_be_level[index];
        let is_level = can_be_level && entry & LEVEL != 0;
        let message = message(entry, is_level);
        if can_be_level && (message.is_some() || !is_level) {
            let ends = message.filter(|_| is_level);
            if let Err(error) = source.report_ends(u32::try_from(index).unwrap_or(u32::MAX), ends) {
                log::error!(
                    "interrupts of the I/O APIC's pin {index} come once, as nobody tells of their end: {error}"
                );
            }
        }
        source.route(message);
        if is_due {
            source.trigger();
        }
    }
}

impl BusDevice for IoApic {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.state();
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
        let mut state = self.state();
        match offset {
            IOREGSEL => state.select = bytes[0],
            IOWIN => self.write_register(&mut state, u32::from_le_bytes(bytes)),
            _ => (),
        }
    }
}

#[cfg(test)]
mod level_tests;

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
        assert_eq!(saved.entries, [WRITABLE; PINS as usize]);
        assert_eq!(saved.id, 0x0f00_0000);
    }

    #[test]
    fn an_entry_becomes_the_message_of_the_manual() {
        assert_eq!(message(MASKED, false), None);
        // Vector 0x31, lowest priority, logical destination 3.
        let entry = 0x0300_0000_0000_0931;
        assert_eq!(
            message(entry, false),
            Some(MsiMessage {
                address: 0xfee0_3004,
                data: 0x131
            })
        );
        assert_eq!(message(entry, true).map(|message| message.data), Some(0xc131));
    }
}
