//! The paravirtual clock that Linux knows from KVM (Linux, Documentation/virt/kvm/x86/msr.rst): where a guest asks for it, a scale by
//! which it makes nanoseconds of its TSC, written once. All vCPUs' TSCs are one, so nothing of it ever changes.

use std::arch::x86_64::_rdtsc;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::memory::GuestMemory;

/// `MSR_KVM_WALL_CLOCK_NEW` and `MSR_KVM_SYSTEM_TIME_NEW`.
pub(crate) const WALL_CLOCK: u32 = 0x4b56_4d00;
pub(crate) const SYSTEM_TIME: u32 = 0x4b56_4d01;

/// Of the system time's register: the rest is an address.
const ENABLED: u64 = 1;

/// Of the flags: it never goes back between vCPUs.
const STABLE: u8 = 1;

/// Even: nobody is writing it.
const VERSION: u32 = 2;

/// Since when a guest's time counts, and how fast.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    began: u64,
    multiplier: u32,
    shift: i8,
}

impl Clock {
    /// One that begins now, on TSCs of so many kHz (not 0).
    pub(crate) fn begin(tsc_khz: u32) -> Self {
        // SAFETY: reading the TSC changes nothing; Linux leaves it to user space.
        let began = unsafe { _rdtsc() };
        let (multiplier, shift) = scale(tsc_khz);
        Self {
            began,
            multiplier,
            shift,
        }
    }

    /// `struct pvclock_vcpu_time_info`.
    fn time_info(&self) -> [u8; 32] {
        let mut info = [0; 32];
        info[0..4].copy_from_slice(&VERSION.to_le_bytes());
        info[8..16].copy_from_slice(&self.began.to_le_bytes());
        // 16 to 23: nanoseconds at that moment, none.
        info[24..28].copy_from_slice(&self.multiplier.to_le_bytes());
        info[28] = self.shift.cast_unsigned();
        info[29] = STABLE;
        info
    }

    /// A guest has written `value` to the system time's register. What it asks for outside of its memory it does not get.
    pub(crate) fn write_system_time(&self, memory: &GuestMemory, value: u64) {
        if value & ENABLED != 0 && memory.write(value & !ENABLED, &self.time_info()).is_none() {
            log::debug!("the guest wants its clock where it has no memory");
        }
    }

    /// The same for the wall clock's: `struct pvclock_wall_clock`, the time of day at which the system time was 0.
    pub(crate) fn write_wall_clock(&self, memory: &GuestMemory, address: u64) {
        // SAFETY: as above.
        let ticks = unsafe { _rdtsc() }.wrapping_sub(self.began);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let began = now.saturating_sub(std::time::Duration::from_nanos(self.nanoseconds(ticks)));
        let mut info = [0; 12];
        info[0..4].copy_from_slice(&VERSION.to_le_bytes());
        info[4..8].copy_from_slice(&u32::try_from(began.as_secs()).unwrap_or(u32::MAX).to_le_bytes());
        info[8..12].copy_from_slice(&began.subsec_nanos().to_le_bytes());
        if memory.write(address, &info).is_none() {
            log::debug!("the guest wants its wall clock where it has no memory");
        }
    }

    /// As guests reckon it.
    fn nanoseconds(&self, ticks: u64) -> u64 {
        let shifted = match self.shift {
            shift if shift < 0 => ticks >> shift.unsigned_abs(),
            shift => ticks << shift,
        };
        u64::try_from((u128::from(shifted) * u128::from(self.multiplier)) >> 32).unwrap_or(u64::MAX)
    }
}

/// Nanoseconds of a tick as a factor of 32 bits below the point, its uppermost set, and a shift before it.
fn scale(khz: u32) -> (u32, i8) {
    let mut factor = (1_000_000_u128 << 32) / u128::from(khz.max(1));
    let mut shift = 0;
    while factor >= 1 << 32 {
        factor >>= 1;
        shift += 1;
    }
    while factor < 1 << 31 {
        factor <<= 1;
        shift -= 1;
    }
    (u32::try_from(factor).unwrap_or(u32::MAX), shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::memory_with;

    #[test]
    fn a_second_of_ticks_is_a_second() {
        for khz in [500_000, 1_000_000, 2_445_427, 5_000_000] {
            let (multiplier, shift) = scale(khz);
            let clock = Clock {
                began: 0,
                multiplier,
                shift,
            };
            let nanoseconds = clock.nanoseconds(u64::from(khz) * 1000);
            assert!(nanoseconds.abs_diff(1_000_000_000) < 10, "{khz} kHz: {nanoseconds}");
        }
    }

    #[test]
    fn it_is_written_where_it_is_asked_for() {
        let memory = memory_with(&[]);
        let clock = Clock::begin(1_000_000);
        clock.write_system_time(&memory, 0x1000);
        assert_eq!(memory.read_u64(0x1000), Some(0), "not asked for");
        clock.write_system_time(&memory, 0x1001);
        assert_eq!(memory.read_u64(0x1000), Some(u64::from(VERSION)));
        assert_eq!(memory.read_u64(0x1008), Some(clock.began));
        let last = memory.read_u64(0x1018).unwrap();
        assert_eq!((last & 0xffff_ffff, last >> 40 & 0xff), (1 << 31, u64::from(STABLE)));
        clock.write_system_time(&memory, u64::MAX);
        clock.write_wall_clock(&memory, 0x2000);
        let seconds = memory.read_u64(0x2000).unwrap() >> 32;
        assert!(seconds > 1_600_000_000, "{seconds}");
    }
}
