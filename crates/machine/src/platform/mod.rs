//! Devices of the board itself, not on PCI: I/O APIC, serial port, power and reset, generic events.
//!
//! ```text
//!  0x3f8  serial port, pin 4        0x600  sleep control, 0x601 sleep status
//!  0xcf8  PCI configuration         0x602  reset
//!                                   0x604  pending events, pin 5
//! ```

mod events;
mod ioapic;
mod power;
mod serial;

pub use events::{Event, EventDevice};
pub use ioapic::{IoApic, IoApicState, PINS};
pub use power::{Power, PowerRequest};
pub use serial::{SerialPort, SerialRegisters};

use boot::Ports;
use serde::{Deserialize, Serialize};
use state::Schema;

/// Where the platform devices are. Free of all legacy devices' ports but the serial port's own.
pub const PORTS: Ports = Ports {
    sleep_control: 0x600,
    reset: 0x602,
    reset_value: 1,
    events: 0x604,
    events_pin: 5,
    serial: 0x3f8,
    serial_pin: 4,
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
}

impl Schema for PlatformState {
    const KIND: &'static str = "platform";
    const VERSION: u32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_what_the_golden_file_says() {
        let mut state = PlatformState {
            events: 1,
            ..PlatformState::default()
        };
        state.ioapic.select = 0x18;
        state.ioapic.entries[4] = 0x0300_0000_0000_0931;
        state.ioapic.pending[5] = true;
        state.serial.divisor = [1, 0];
        state.serial.received = b"x".to_vec();
        state::golden::check(env!("CARGO_MANIFEST_DIR"), &state);
    }
}
