//! One input pin of the I/O APIC, with its redirection entry (Intel 82093AA, 3.2.4): when a level is delivered. Data only; knows neither who
//! asserts the pin nor where its interrupts go.

/// Redirection entry: what software may write; delivery status (12) and remote IRR (14) are read-only.
pub(super) const WRITABLE: u64 = 0xff00_0000_0001_afff;
pub(super) const VECTOR: u64 = 0xff;
const REMOTE_IRR: u64 = 1 << 14;
pub(super) const LEVEL: u64 = 1 << 15;
pub(super) const MASKED: u64 = 1 << 16;

/// A pin and its entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pin {
    entry: u64,
    is_asserted: bool,
}

impl Pin {
    /// Masked, and not asserted.
    pub(super) const fn new() -> Self {
        Self {
            entry: MASKED,
            is_asserted: false,
        }
    }

    /// The entry as software reads it.
    pub(super) fn entry(&self) -> u64 {
        self.entry
    }

    /// Software writes the entry; whether an interrupt is to be delivered. Remote IRR means nothing of an edge, and is gone when the pin
    /// becomes one: so Linux ends an interrupt by itself.
    pub(super) fn write(&mut self, value: u64) -> bool {
        let kept = if value & LEVEL == 0 { 0 } else { self.entry & REMOTE_IRR };
        self.entry = value & WRITABLE | kept;
        self.deliver()
    }

    /// It is asserted, or not any more; whether an interrupt is to be delivered. An edge on a masked pin is ignored.
    pub(super) fn set(&mut self, asserted: bool) -> bool {
        let rises = asserted && !self.is_asserted;
        self.is_asserted = asserted;
        match self.entry & LEVEL {
            0 => rises && self.entry & MASKED == 0,
            _ => self.deliver(),
        }
    }

    /// A local APIC has ended an interrupt of this vector; whether it was this pin's. What is to be delivered next is told by [`Pin::set`].
    pub(super) fn end(&mut self, vector: u8) -> bool {
        let is_ours = self.entry & REMOTE_IRR != 0 && self.entry & VECTOR == u64::from(vector);
        if is_ours {
            self.entry &= !REMOTE_IRR;
        }
        is_ours
    }

    /// A level is delivered once until a local APIC has ended it (3.2.4, bit 14).
    fn deliver(&mut self) -> bool {
        let is_due = self.is_asserted && self.entry & LEVEL != 0 && self.entry & (MASKED | REMOTE_IRR) == 0;
        if is_due {
            self.entry |= REMOTE_IRR;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_delivered_once_until_it_is_ended() {
        let mut pin = Pin::new();
        assert!(!pin.set(true), "it is masked");
        assert!(pin.write(LEVEL | 0x31));
        assert_eq!(pin.entry(), LEVEL | REMOTE_IRR | 0x31);
        assert!(!pin.set(false) && !pin.set(true));
        assert!(!pin.end(0x32) && pin.end(0x31) && !pin.end(0x31));
        assert!(pin.set(true), "it is asserted still");
        // Masked and unmasked meanwhile: not before its end.
        assert!(!pin.write(LEVEL | MASKED | 0x31) && !pin.write(LEVEL | 0x31));
        assert!(!pin.write(LEVEL | MASKED | 0x31) && pin.end(0x31) && !pin.set(true));
        assert!(pin.write(LEVEL | 0x31));
        // What software writes to a bit that it may not write is nothing.
        assert!(!pin.write(LEVEL | 0x31) && pin.end(0x31));
        assert!(!pin.set(false));
        assert!(!pin.write(LEVEL | REMOTE_IRR | 0x31));
        assert_eq!(pin.entry(), LEVEL | 0x31);
    }

    #[test]
    fn an_edge_ends_what_a_level_has_begun() {
        let mut pin = Pin::new();
        assert!(!pin.write(LEVEL | 0x31) && pin.set(true));
        assert!(!pin.write(MASKED | 0x31));
        assert_eq!(pin.entry(), MASKED | 0x31);
        assert!(pin.write(LEVEL | 0x31), "its level is still there");
        assert!(!pin.write(0x31) && !pin.set(true) && !pin.set(false) && pin.set(true));
        assert_eq!(pin.entry(), 0x31, "an edge has no remote IRR");
        assert!(!pin.end(0x31));
        assert!(!pin.set(false) && !pin.write(MASKED | 0x31) && !pin.set(true));
    }
}
