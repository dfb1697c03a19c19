//! The generic event device's register (ACPI 6.5, 5.6.9): which events are pending. Reading clears.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use bus::BusDevice;
use engine::Interrupt;

/// What can happen to a running machine from outside; the bits are those that the DSDT's `_EVT` tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Event {
    /// The power button was pressed.
    PowerButton = 1,
    /// The generation ID has changed.
    NewGeneration = 2,
    /// A function has come to the PCI bus, or left it. Nothing to a guest that was not told of that bit ([`boot::Board::acpi_hotplug`]).
    BusChanged = 4,
}

/// The register and its interrupt line.
pub struct EventDevice {
    pending: AtomicU8,
    line: Arc<dyn Interrupt>,
}

impl EventDevice {
    /// Nothing pending.
    pub fn new(line: Arc<dyn Interrupt>) -> Arc<Self> {
        Arc::new(Self {
            pending: AtomicU8::new(0),
            line,
        })
    }

    /// What is pending.
    pub fn save(&self) -> u8 {
        self.pending.load(Ordering::SeqCst)
    }

    /// Takes over what was pending; its interrupt has been sent, or waits at the I/O APIC.
    pub fn restore(&self, pending: u8) {
        self.pending.store(pending, Ordering::SeqCst);
    }

    /// Tells the guest.
    pub fn raise(&self, event: Event) {
        self.pending.fetch_or(event as u8, Ordering::SeqCst);
        self.line.trigger();
    }
}

impl BusDevice for EventDevice {
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(0);
        if let [value, ..] = data {
            *value = self.pending.swap(0, Ordering::SeqCst);
        }
    }

    fn write(&self, _: u64, _: &[u8]) {}
}
