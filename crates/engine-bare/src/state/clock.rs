//! The paravirtual clock that Linux knows from KVM (Linux, Documentation/virt/kvm/x86/msr.rst): where a guest asks for it, a scale by
//! which it makes nanoseconds of its TSC, written once, and again when it goes on where another was. All vCPUs' TSCs are one, so
//! nothing of it ever changes in between.

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

/// Of the wall clock: even, nobody is writing it.
const VERSION: u32 = 2;

/// What a guest's time was at a moment, and how fast it counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// The moment, by the host's TSC.
    began: u64,
    /// Nanoseconds then.
    nanoseconds: u64,
    /// What the guest's TSC says more than the host's.
    offset: u64,
    multiplier: u32,
    shift: i8,
}

fn host_tsc() -> u64 {
    // SAFETY: reading the TSC changes nothing; Linux leaves it to user space.
    unsafe { _rdtsc() }
}

impl Clock {
    /// One that begins now, on TSCs of so many kHz (not 0).
    pub(crate) fn begin(tsc_khz: u32) -> Self {
        let (multiplier, shift) = scale(tsc_khz);
        Self {
            began: host_tsc(),
            nanoseconds: 0,
            offset: 0,
            multiplier,
            shift,
        }
    }

    /// One that goes on from `nanoseconds` now, and at `tsc`, if that is another's.
    pub(crate) fn from(self, nanoseconds: u64, tsc: Option<u64>) -> Self {
        let began = host_tsc();
        Self {
            began,
            nanoseconds,
            offset: tsc.map_or(self.offset, |tsc| tsc.wrapping_sub(began)),
            ..self
        }
    }

    /// What the guest's time is now.
    pub(crate) fn now(&self) -> u64 {
        self.nanoseconds + self.after(host_tsc().wrapping_sub(self.began))
    }

    /// What its TSC says now.
    pub(crate) fn tsc(&self) -> u64 {
        host_tsc().wrapping_add(self.offset)
    }

    /// What that says more than the host's.
    pub(crate) fn tsc_offset(&self) -> u64 {
        self.offset
    }

    /// `struct pvclock_vcpu_time_info`.
    fn time_info(&self, version: u32) -> [u8; 32] {
        let mut info = [0; 32];
        info[0..4].copy_from_slice(&version.to_le_bytes());
        info[8..16].copy_from_slice(&self.began.wrapping_add(self.offset).to_le_bytes());
        info[16..24].copy_from_slice(&self.nanoseconds.to_le_bytes());
        info[24..28].copy_from_slice(&self.multiplier.to_le_bytes());
        info[28] = self.shift.cast_unsigned();
        info[29] = STABLE;
        info
    }

    /// A guest has written `value` to the system time's register. What it asks for outside of its memory it does not get.
    pub(crate) fn write_system_time(&self, memory: &GuestMemory, value: u64) {
        if value & ENABLED == 0 {
            return;
        }
        let address = value & !ENABLED;
        // Another one than before, and even: nobody is writing it.
        let before = memory.read_u64(address).unwrap_or(0);
        let version = u32::try_from((before & 0xffff_fffe).wrapping_add(2) & 0xffff_ffff).unwrap_or(0);
        if memory.write(address, &self.time_info(version)).is_none() {
            log::debug!("the guest wants its clock where it has no memory");
        }
    }

    /// The same for the wall clock's: `struct pvclock_wall_clock`, the time of day at which the system time was 0.
    pub(crate) fn write_wall_clock(&self, memory: &GuestMemory, address: u64) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let began = now.saturating_sub(std::time::Duration::from_nanos(self.now()));
        let mut info = [0; 12];
        info[0..4].copy_from_slice(&VERSION.to_le_bytes());
        info[4..8].copy_from_slice(&u32::try_from(began.as_secs()).unwrap_or(u32::MAX).to_le_bytes());
        info[8..12].copy_from_slice(&began.subsec_nanos().to_le_bytes());
        if memory.write(address, &info).is_none() {
            log::debug!("the guest wants its wall clock where it has no memory");
        }
    }

    /// As guests reckon it.
    fn after(&self, ticks: u64) -> u64 {
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
                nanoseconds: 0,
                offset: 0,
                multiplier,
                shift,
            };
            let nanoseconds = clock.after(u64::from(khz) * 1000);
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
        let later = clock.from(5_000_000_000, Some(1 << 40));
        later.write_system_time(&memory, 0x1001);
        assert_eq!(memory.read_u64(0x1000), Some(u64::from(VERSION) + 2), "it has changed");
        assert_eq!(memory.read_u64(0x1008), Some(1 << 40));
        assert_eq!(memory.read_u64(0x1010), Some(5_000_000_000));
        assert!(later.now() >= 5_000_000_000 && later.tsc() >= 1 << 40);
        clock.write_system_time(&memory, u64::MAX);
        clock.write_wall_clock(&memory, 0x2000);
        let seconds = memory.read_u64(0x2000).unwrap() >> 32;
        assert!(seconds > 1_600_000_000, "{seconds}");
    }
}
