//! The guest kernel's command line: the one place where it is written, each word with its reason.

use log::LevelFilter;
use node_api::{Idle, Resources};

/// Words that every guest gets.
const WORDS: &[&str] = &[
    // The virtio console.
    "console=hvc0",
    // A panic ends the VM at once: -1 resets without waiting, and the VMM takes a reset as the end.
    "panic=-1",
    // A reset by triple fault needs no device and no firmware.
    "reboot=t",
    // The host's entropy comes with virtio-rng and with the agent's preparation; do not wait for jitter.
    "random.trust_cpu=on",
    // virtio needs no bounce buffers; Linux would set 64 MiB aside for them in guests above 3 GiB.
    "swiotlb=noforce",
    // The clock is kvmclock. A watchdog that compares the TSC with it takes a restore, which sets one shortly after the other,
    // for a TSC that drifts, and each clone would start a thread to find that out.
    "tsc=nowatchdog",
    // There is no PIT and no HPET whose interrupt could be checked.
    "no_timer_check",
];

/// Words for a guest whose console somebody reads: all messages, and the serial port until the virtio console exists.
/// Not for every guest, because a kernel writes a kilobyte there before it reads `quiet`, an exit for each character.
const TALKATIVE: &[&str] = &["earlycon=uart8250,io,0x3f8", "loglevel=7"];

/// The word for a guest whose processors poll when they have nothing to do.
const POLLS: &str = "idle=poll";

/// The word for one that is shown MWAIT, and is to halt nevertheless.
const HALTS: &str = "idle=nomwait";

/// The word for one with an IOMMU: what its drivers unmap is unmapped at once, and not many of it together some time later, until when devices
/// would reach it, and its pages would be pinned.
const UNMAPS_AT_ONCE: &str = "iommu.strict=1";

/// The command line for a guest of this kind; as [`command_line`].
pub(crate) fn command_line_for(verbosity: LevelFilter, resources: &Resources) -> String {
    let idle = match resources.idle {
        Idle::Halt if resources.class.is_bare() => Some(HALTS),
        Idle::Halt | Idle::Wait => None,
        Idle::Poll => Some(POLLS),
    };
    let iommu = resources.guest_iommu.then_some(UNMAPS_AT_ONCE);
    let own = idle.into_iter().chain(iommu);
    std::iter::once(command_line(verbosity))
        .chain(own.map(str::to_owned))
        .collect::<Vec<_>>()
        .join(" ")
}

/// The command line for a guest; its kernel is talkative only where somebody wants to read it.
pub fn command_line(verbosity: LevelFilter) -> String {
    let mut words = WORDS.to_vec();
    let quiet: &[&str] = &["quiet"];
    words.extend(if verbosity >= LevelFilter::Debug {
        TALKATIVE
    } else {
        quiet
    });
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use node_api::Class;

    use super::*;

    #[test]
    fn it_fits_and_is_quiet_unless_asked() {
        let quiet = command_line(LevelFilter::Warn);
        assert!(quiet.len() <= vmm_api::config::MAX_CMDLINE);
        assert!(quiet.split(' ').any(|word| word == "quiet"));
        let told = |class, idle| {
            let resources = Resources {
                class,
                idle,
                ..crate::testing::stored("aaaaaaaaaaaa", "web").sandbox.config.resources
            };
            command_line_for(LevelFilter::Warn, &resources)
        };
        assert_eq!(told(Class::Dedicated, Idle::Halt), quiet);
        assert!(told(Class::Dedicated, Idle::Poll).ends_with(" idle=poll"));
        assert_eq!(told(Class::Bare, Idle::Wait), quiet);
        assert!(told(Class::Bare, Idle::Halt).ends_with(" idle=nomwait"));
        let mut resources = crate::testing::stored("aaaaaaaaaaaa", "web").sandbox.config.resources;
        resources.guest_iommu = true;
        assert!(command_line_for(LevelFilter::Warn, &resources).ends_with(" iommu.strict=1"));
        assert!(!quiet.contains("iommu"));
        assert!(!command_line(LevelFilter::Debug).contains("quiet"));
    }
}
