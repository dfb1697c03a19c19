//! Devices of the board itself, not on PCI: I/O APIC, serial port, power and reset, generic events.
//!
//! ```text
//!  0x3f8  serial port, pin 4        0x600  sleep control, 0x601 sleep status
//!  0xcf8  PCI configuration         0x602  reset
//!                                   0x604  pending events, pin 5
//!                                          slots of PCI, pins 1, 3, 6 and 7
//! 0xc000  PCI devices, 16 KiB, where no access to memory comes out
//! ```

mod events;
mod generation;
mod ioapic;
mod pin;
mod power;
mod serial;

pub use events::{Event, EventDevice};
pub(crate) use generation::write_new as write_new_generation;
pub use ioapic::{IoApic, IoApicState, PINS};
pub use power::{Power, PowerRequest};
pub use serial::{SerialPort, SerialRegisters};

use boot::Ports;
use memory::layout::Range;
use serde::{Deserialize, Serialize};
use state::{Schema, StateError};

/// Where the platform devices are. Free of all legacy devices' ports but the serial port's own.
pub const PORTS: Ports = Ports {
    sleep_control: 0x600,
    reset: 0x602,
    reset_value: 1,
    events: 0x604,
    events_pin: 5,
    serial: 0x3f8,
    serial_pin: 4,
    slot_pins: SLOT_PINS,
};

/// Pins of the I/O APIC that INTA# of slots leads to, one slot after the other: those that nothing else has, but for 0, which some guests take
/// for none, and 2, which is another one's in machines that have an interrupt controller of the first PCs.
pub const SLOT_PINS: [u32; 4] = [1, 3, 6, 7];

/// Ports of PCI devices, where those have any.
pub(crate) const BAR_PORTS: Range = Range {
    start: 0xc000,
    length: 0x4000,
};

/// The board's own devices as they are saved. Power and reset have no state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlatformState {
    /// The I/O APIC.
    pub ioapic: IoApicState,
    /// The serial port.
    pub serial: SerialRegisters,
    /// Pending events.
    pub events: u8,
    /// Where in memory the guest was told that the generation ID is; none in a machine that was made without one.
    #[serde(default)]
    pub generation: Option<u64>,
}

impl Schema for PlatformState {
    const KIND: &'static str = "platform";
    const VERSION: u32 = 2;

    fn load(version: u32, payload: &[u8]) -> Result<Self, StateError> {
        match version {
            // The first had no generation ID, and what is not there is none.
            1 | Self::VERSION => serde_json::from_slice(payload).map_err(|source| StateError::Payload {
                kind: Self::KIND,
                source,
            }),
            found => Err(StateError::Version {
                kind: Self::KIND.to_owned(),
                found,
                known: Self::VERSION,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> PlatformState {
        let mut state = PlatformState {
            events: 1,
            generation: Some(0xf_f000),
            ..PlatformState::default()
        };
        state.ioapic.select = 0x18;
        state.ioapic.entries[4] = 0x0300_0000_0000_0931;
        state.ioapic.pending[5] = true;
        state.serial.divisor = [1, 0];
        state.serial.received = b"x".to_vec();
        state
    }

    #[test]
    fn the_state_is_what_the_golden_file_says() {
        state::golden::check(env!("CARGO_MANIFEST_DIR"), &sample());
    }

    #[test]
    fn the_first_version_had_no_generation_id() {
        let old: PlatformState = state::golden::load(env!("CARGO_MANIFEST_DIR"), 1);
        let expected = PlatformState {
            generation: None,
            ..sample()
        };
        assert_eq!(old, expected);
        let newer = PlatformState::load(3, b"{}").unwrap_err().to_string();
        assert!(newer.contains('3'), "{newer}");
    }
}
