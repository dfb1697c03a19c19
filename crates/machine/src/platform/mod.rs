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
pub use ioapic::{IoApic, PINS};
pub use power::{Power, PowerRequest};
pub use serial::SerialPort;

use boot::Ports;

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
