//! The model-specific registers that the module leaves to user space: what they say and keep. Those that do something outside of
//! themselves are told to whoever asks. What is unknown faults, as on a processor.

use std::collections::BTreeMap;

use engine::{EngineError, Msr};

use crate::state::{clock, saved};

/// `IA32_APIC_BASE`: where the APIC was, that it is on, that it is an x2APIC, and that this is the first processor.
const APIC_BASE: u32 = 0x1b;
const BASE: u64 = 0xfee0_0000;
const X2APIC: u64 = 1 << 10;
const ENABLED: u64 = 1 << 11;
const FIRST: u64 = 1 << 8;

/// `IA32_TIME_STAMP_COUNTER` and `TSC_AUX`, which the module has.
pub(crate) const TSC: u32 = 0x10;
pub(crate) const TSC_AUX: u32 = 0xc000_0103;

/// The x2APIC's interrupt command register (AMD64 APM 2, 16.13).
const ICR: u32 = 0x830;

/// `IA32_MTRRCAP`: eight variable ranges, fixed ones, write-combining.
const MTRR_CAP: u32 = 0xfe;
const MTRR_CAP_VALUE: u64 = 0x508;

/// `IA32_MTRR_DEF_TYPE`.
const MTRR_DEF_TYPE: u32 = 0x2ff;

/// Registers that keep what is written, with what they have at first. The processor's own caching rules hold whatever the MTRRs
/// here say: a guest's memory is write-back, and what is none causes an exit.
const KEPT: [(u32, u64); 7] = [
    // On, write-back.
    (MTRR_DEF_TYPE, 0xc06),
    // IA32_MISC_ENABLE: fast strings.
    (0x1a0, 1),
    // HWCR, with the TSC at its own rate.
    (0xc001_0015, 1 << 24),
    // DE_CFG: LFENCE serializes.
    (0xc001_1029, 2),
    // IA32_FEATURE_CONTROL: locked.
    (0x3a, 1),
    // IA32_PLATFORM_ID, IA32_DEBUGCTL.
    (0x17, 0),
    (0x1d9, 0),
];

/// Registers that are zero and stay so: machine checks, AMD's system configuration, TOP_MEM and TOP_MEM2, NB_CFG, the workarounds'
/// list, IA32_XSS.
const ZERO: [u32; 13] = [
    0x179,
    0x17a,
    0x17b,
    0xc001_0010,
    0xc001_001a,
    0xc001_001d,
    0xc001_001f,
    0xc001_0055,
    0xc001_0140,
    0xc001_0141,
    0xc001_1022,
    0xc001_1023,
    0xda0,
];

/// `MSR_PATCH_LEVEL`: which microcode.
const PATCH_LEVEL: u32 = 0x8b;
const PATCH_LEVEL_VALUE: u64 = 0x0100_0065;

fn is_mtrr(index: u32) -> bool {
    matches!(index, 0x200..=0x20f | 0x250 | 0x258 | 0x259 | 0x268..=0x26f)
}

/// What somebody else has to do about a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing.
    None,
    /// The interrupt command register was written.
    Command(u64),
    /// The clock's page is wanted.
    SystemTime(u64),
    /// The wall clock's is.
    WallClock(u64),
}

/// One vCPU's.
#[derive(Clone, Debug)]
pub(crate) struct Msrs {
    first: bool,
    kept: BTreeMap<u32, u64>,
}

impl Msrs {
    /// Those of the first vCPU, or of another.
    pub(crate) fn new(first: bool) -> Self {
        Self {
            first,
            kept: BTreeMap::from(KEPT),
        }
    }

    /// What a register says; `None` for a fault.
    pub(crate) fn read(&self, index: u32) -> Option<u64> {
        match index {
            APIC_BASE => Some(self.apic_base()),
            MTRR_CAP => Some(MTRR_CAP_VALUE),
            PATCH_LEVEL => Some(PATCH_LEVEL_VALUE),
            _ if ZERO.contains(&index) => Some(0),
            _ if is_mtrr(index) || is_clock(index) => Some(self.kept.get(&index).copied().unwrap_or(0)),
            _ => self.kept.get(&index).copied(),
        }
    }

    /// Writes one; `None` for a fault.
    pub(crate) fn write(&mut self, index: u32, value: u64) -> Option<Effect> {
        match index {
            ICR => Some(Effect::Command(value)),
            // Its mode is what it is.
            APIC_BASE => (value == self.apic_base()).then_some(Effect::None),
            PATCH_LEVEL => Some(Effect::None),
            _ if ZERO.contains(&index) => Some(Effect::None),
            clock::SYSTEM_TIME => {
                self.kept.insert(index, value);
                Some(Effect::SystemTime(value))
            }
            clock::WALL_CLOCK => {
                self.kept.insert(index, value);
                Some(Effect::WallClock(value))
            }
            _ if is_mtrr(index) || self.kept.contains_key(&index) => {
                self.kept.insert(index, value);
                Some(Effect::None)
            }
            _ => None,
        }
    }

    /// All that is not as at first, and what says how memory is cached, as other engines have that otherwise at first.
    pub(crate) fn changed(&self) -> Vec<Msr> {
        let at_first = |index: u32, value: u64| KEPT.contains(&(index, value)) && index != MTRR_DEF_TYPE;
        let kept = self.kept.iter().map(|(index, value)| (*index, *value));
        kept.filter(|(index, value)| !at_first(*index, *value))
            .map(|(index, value)| Msr { index, value })
            .collect()
    }

    /// Those of a vCPU that was saved, but for what the module has.
    ///
    /// # Errors
    /// One has a value that this vCPU could not have.
    pub(crate) fn of(first: bool, saved: &[Msr]) -> Result<Self, EngineError> {
        let mut msrs = Self::new(first);
        let mut unknown = Vec::new();
        for &Msr { index, value } in saved {
            let is_own = is_mtrr(index) || is_clock(index) || KEPT.iter().any(|(kept, _)| *kept == index);
            if is_own {
                msrs.kept.insert(index, value);
            } else if value != 0 && !is_known(index) {
                unknown.push(format!("{index:#x} ({value:#x})"));
            }
        }
        if unknown.is_empty() {
            return Ok(msrs);
        }
        Err(EngineError::State(format!(
            "a vCPU that owns its CPU has not all of its registers: {}",
            unknown.join(", ")
        )))
    }

    /// `IA32_APIC_BASE`.
    pub(crate) fn apic_base(&self) -> u64 {
        BASE | X2APIC | ENABLED | if self.first { FIRST } else { 0 }
    }
}

/// Registers of KVM's whose values no guest depends on here: the module has them, or they say what is so anyway (what this one has
/// besides, microcode, the clock's by their old numbers, Hyper-V's), or are KVM's own.
fn is_known(index: u32) -> bool {
    // EFER, the clock's by their old numbers, SMBASE, PLATFORM_INFO (that CPUID may be made to fault, which Linux looks for on Intel's
    // processors alone), KVM's polling, the ratio of TSCs.
    const OF_KVM: [u32; 7] = [0xc000_0080, 0x11, 0x12, 0x9e, 0xce, 0x4b56_4d05, 0xc000_0104];
    matches!(index, TSC | TSC_AUX)
        || saved::is_in_state(index)
        || OF_KVM.contains(&index)
        || ZERO.contains(&index)
        || matches!(index, APIC_BASE | MTRR_CAP | PATCH_LEVEL | 0x4000_0000..=0x4000_01ff)
}

fn is_clock(index: u32) -> bool {
    matches!(index, clock::SYSTEM_TIME | clock::WALL_CLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_say_what_they_are_and_keep_what_is_written() {
        let mut msrs = Msrs::new(true);
        assert_eq!(msrs.read(APIC_BASE), Some(0xfee0_0d00));
        assert_eq!(Msrs::new(false).read(APIC_BASE), Some(0xfee0_0c00));
        assert_eq!(msrs.write(0x200, 6), Some(Effect::None));
        assert_eq!((msrs.read(0x200), msrs.read(0x201)), (Some(6), Some(0)));
        assert_eq!(msrs.write(0xc001_0010, 7), Some(Effect::None));
        assert_eq!(msrs.read(0xc001_0010), Some(0));
        assert_eq!(msrs.read(0x2ff), Some(0xc06));
    }

    #[test]
    fn what_reaches_further_is_told() {
        let mut msrs = Msrs::new(true);
        assert_eq!(msrs.write(ICR, 5 << 8), Some(Effect::Command(5 << 8)));
        assert_eq!(msrs.write(clock::SYSTEM_TIME, 0x1001), Some(Effect::SystemTime(0x1001)));
        assert_eq!(msrs.read(clock::SYSTEM_TIME), Some(0x1001));
        assert_eq!(msrs.write(clock::WALL_CLOCK, 0x1000), Some(Effect::WallClock(0x1000)));
    }

    #[test]
    fn what_was_saved_is_there_again() {
        let mut msrs = Msrs::new(false);
        assert_eq!(
            msrs.changed(),
            [Msr {
                index: MTRR_DEF_TYPE,
                value: 0xc06
            }]
        );
        msrs.write(0x200, 6);
        msrs.write(clock::SYSTEM_TIME, 0x1001);
        let again = Msrs::of(false, &msrs.changed()).unwrap();
        assert_eq!(
            (again.read(0x200), again.read(clock::SYSTEM_TIME)),
            (Some(6), Some(0x1001))
        );
        let refused = |index| Msrs::of(false, &[Msr { index, value: 1 }]).err();
        assert!(refused(0x4b56_4d02).unwrap().to_string().contains("0x4b564d02"));
        assert!(refused(TSC).is_none() && refused(0x4000_0020).is_none());
    }

    #[test]
    fn what_is_unknown_or_would_change_the_apic_faults() {
        let mut msrs = Msrs::new(true);
        assert_eq!((msrs.read(0x1234_5678), msrs.write(0x1234_5678, 1)), (None, None));
        assert_eq!(msrs.write(APIC_BASE, 0), None, "an APIC that is off");
        assert_eq!(msrs.write(0x4b56_4d02, 1), None, "what is not offered");
    }
}
