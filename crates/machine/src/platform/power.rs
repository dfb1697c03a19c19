//! Sleep control, sleep status and reset registers (ACPI 6.5, 4.8.3.6 and 4.8.3.7).

use boot::SLEEP_TYPE_S5;
use bus::BusDevice;

use super::PORTS;

/// Sleep control register: SLP_TYP in bits 2 to 4, SLP_EN in bit 5.
const SLP_TYP_SHIFT: u8 = 2;
const SLP_TYP_MASK: u8 = 7;
const SLP_EN: u8 = 1 << 5;

/// What the guest asks for by writing to a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRequest {
    /// Power off.
    Off,
    /// Reset.
    Reset,
}

/// The three registers: sleep control, sleep status, reset.
pub struct Power<F> {
    report: F,
}

impl<F: Fn(PowerRequest) + Send + Sync> Power<F> {
    /// `report` is called on a vCPU's thread for each request.
    pub fn new(report: F) -> Self {
        Self { report }
    }

    fn request(port: u16, value: u8) -> Option<PowerRequest> {
        if port == PORTS.sleep_control {
            let sleeps = value & SLP_EN != 0 && value >> SLP_TYP_SHIFT & SLP_TYP_MASK == SLEEP_TYPE_S5;
            sleeps.then_some(PowerRequest::Off)
        } else {
            (port == PORTS.reset && value == PORTS.reset_value).then_some(PowerRequest::Reset)
        }
    }
}

impl<F: Fn(PowerRequest) + Send + Sync> BusDevice for Power<F> {
    /// All registers read as zero: no wake event is ever pending.
    fn read(&self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let port = u16::try_from(offset)
            .ok()
            .and_then(|offset| PORTS.sleep_control.checked_add(offset));
        if let (Some(port), [value]) = (port, data)
            && let Some(request) = Self::request(port, *value)
        {
            (self.report)(request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn only_the_whole_sequence_counts() {
        let seen = Mutex::new(Vec::new());
        let power = Power::new(|request| seen.lock().unwrap().push(request));
        power.write(0, &[SLEEP_TYPE_S5 << 2]); // no SLP_EN
        power.write(0, &[SLP_EN]); // S0
        power.write(0, &[0x34, 0]); // two bytes
        power.write(1, &[0x34]); // status
        power.write(2, &[0]);
        assert!(seen.lock().unwrap().is_empty());
        power.write(0, &[SLEEP_TYPE_S5 << 2 | SLP_EN]);
        power.write(2, &[1]);
        assert_eq!(*seen.lock().unwrap(), [PowerRequest::Off, PowerRequest::Reset]);
    }
}
