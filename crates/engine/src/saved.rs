//! What every engine does alike with a saved vCPU before that goes on: sizes that must be right, components that must go, clocks that
//! must count as they did. Knows no engine's own types.

use crate::{EngineError, Result, VcpuState};

/// Bytes of an XSAVE area without dynamically enabled features (AMX), which guests are not offered.
pub const XSAVE_BYTES: usize = 4096;
/// `XSTATE_BV`, which components the area holds: the first eight bytes of its header (Intel SDM 1, 13.4.2).
const XSTATE_BV: usize = 512;

/// Bytes of a local APIC's registers as they lie in its page (Intel SDM 3A, 11.4.1).
pub const APIC_BYTES: usize = 1024;

/// MSRs that KVM gives each vCPU with the host's values unless it is told otherwise, and that guests with a CPU model have as zero:
/// `IA32_ARCH_CAPABILITIES` and `IA32_PERF_CAPABILITIES`, which faults the processor has not, and what its counters can do.
pub const MSRS_OF_HOST: [u32; 2] = [0x10a, 0x345];

/// As far as a TSC may be off, in millionths: as far as KVM lets it before it scales (its module's parameter `tsc_tolerance_ppm`).
const TSC_TOLERANCE_PPM: u64 = 250;
/// As far as an APIC's timer may be off, in percent: processors' are far apart, and one's was measured in a moment.
const TIMER_TOLERANCE: u64 = 5;

impl VcpuState {
    /// The XSAVE area, without components that the host had and the guest was never shown: here there may be none of them.
    ///
    /// # Errors
    /// It has another size.
    pub fn xsave_area(&self) -> Result<[u8; XSAVE_BYTES]> {
        let mut area: [u8; XSAVE_BYTES] = self.xsave.as_slice().try_into().map_err(|_| {
            EngineError::State(format!(
                "the XSAVE area has {} bytes, this engine's has {XSAVE_BYTES}",
                self.xsave.len()
            ))
        })?;
        let shown = cpu::xfeatures(&self.cpuid).to_le_bytes();
        for (byte, shown) in area.iter_mut().skip(XSTATE_BV).zip(shown) {
            *byte &= shown;
        }
        Ok(area)
    }

    /// The local APIC's registers.
    ///
    /// # Errors
    /// They have another size.
    pub fn apic_registers(&self) -> Result<&[u8; APIC_BYTES]> {
        self.lapic.as_slice().try_into().map_err(|_| {
            EngineError::State(format!(
                "the local APIC has {} bytes of registers, not {APIC_BYTES}",
                self.lapic.len()
            ))
        })
    }
}

/// Whether a guest that has measured its TSC once and for all takes one of `here` kHz for it.
pub fn same_tsc_rate(saved: u32, here: u32) -> bool {
    is_near(saved, here, (1_000_000, TSC_TOLERANCE_PPM))
}

/// The same of its local APIC's timer.
pub fn same_timer_rate(saved: u32, here: u32) -> bool {
    is_near(saved, here, (100, TIMER_TOLERANCE))
}

fn is_near(saved: u32, here: u32, (of, tolerance): (u64, u64)) -> bool {
    here != 0 && u64::from(saved.abs_diff(here)) * of <= u64::from(here) * tolerance
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuidEntry;

    #[test]
    fn an_area_or_a_page_of_another_size_is_refused() {
        let mut state = VcpuState {
            xsave: vec![1; XSAVE_BYTES],
            lapic: vec![2; APIC_BYTES],
            ..VcpuState::default()
        };
        assert_eq!(state.apic_registers().unwrap(), &[2; APIC_BYTES]);
        assert!(state.xsave_area().is_ok());
        state.xsave.truncate(5);
        state.lapic.truncate(6);
        assert!(state.xsave_area().unwrap_err().to_string().contains("has 5 bytes"));
        assert!(state.apic_registers().unwrap_err().to_string().contains("has 6 bytes"));
    }

    #[test]
    fn components_that_the_guest_was_not_shown_go() {
        let leaf = |index, registers| CpuidEntry {
            function: 0xd,
            index,
            indexed: true,
            registers,
        };
        let state = VcpuState {
            xsave: vec![0xff; XSAVE_BYTES],
            cpuid: vec![leaf(0, [7, 0, 0, 1])],
            ..VcpuState::default()
        };
        let area = state.xsave_area().unwrap();
        assert_eq!(&area[XSTATE_BV..][..8], [7, 0, 0, 0, 1, 0, 0, 0]);
        assert!(
            area[..XSTATE_BV]
                .iter()
                .chain(&area[XSTATE_BV + 8..])
                .all(|byte| *byte == 0xff)
        );
    }

    #[test]
    fn clocks_may_be_off_as_far_as_a_guest_does_not_notice() {
        for near in [2_000_000, 2_000_500, 1_999_500] {
            assert!(same_tsc_rate(near, 2_000_000));
        }
        for far in [2_000_501, 1_999_499, 0, u32::MAX] {
            assert!(!same_tsc_rate(far, 2_000_000));
        }
        assert!(same_timer_rate(1_030_000, 1_000_000) && same_timer_rate(950_000, 1_000_000));
        for far in [0, 100_000, 900_000, 1_050_001, u32::MAX] {
            assert!(!same_timer_rate(far, 1_000_000));
        }
        assert!(
            !same_timer_rate(0, 0) && !same_tsc_rate(0, 0),
            "a clock of the host's that stands"
        );
    }
}
