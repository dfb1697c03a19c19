//! What giving sandboxes devices of the host's needs, as lines of `basalt doctor`. A host without an IOMMU is as good as any other for all else.

use base::ByteSize;
use host::Check;
use vfio::host::Sysfs;
use vfio::host::checks::{Readiness, Remapping, readiness};

const IOMMU: &str = "iommu";

/// What the kernel shows; of a host without an IOMMU that alone.
pub(crate) fn checks(sysfs: &Sysfs) -> Vec<Check> {
    match readiness(sysfs) {
        Ok(ready) => lines(&ready, rustix::process::geteuid().is_root()),
        Err(error) => vec![Check::warn(IOMMU, format!("unknown: {error}"), "mount /sys and /proc")],
    }
}

fn lines(ready: &Readiness, is_root: bool) -> Vec<Check> {
    if ready.groups == 0 {
        let found = "off, so that sandboxes can have no devices of this host's; nothing else needs it (VT-d or AMD-Vi in the firmware, \
                     intel_iommu=on or amd_iommu=on on the kernel's command line)";
        return vec![Check::ok(IOMMU, found)];
    }
    let found = format!("{}: {} groups", ready.iommus.join(", "), ready.groups);
    vec![
        Check::ok(IOMMU, found),
        remapping(ready),
        driver(ready),
        locked_memory(ready, is_root),
    ]
}

fn remapping(ready: &Readiness) -> Check {
    const NAME: &str = "interrupt-remapping";
    match (ready.remapping, ready.unsafe_interrupts) {
        (Remapping::On, _) => Check::ok(NAME, "on"),
        (Remapping::Unknown, _) => Check::ok(
            NAME,
            "not to be seen in /proc/interrupts; VFIO refuses devices where it is off",
        ),
        (Remapping::Off, false) => Check::warn(
            NAME,
            "off, so that no device can be bound",
            "turn it on in the firmware, and leave intremap=off out of the kernel's command line",
        ),
        (Remapping::Off, true) => Check::warn(
            NAME,
            "off, and allowed to be (allow_unsafe_interrupts): a guest with a device can send this host any interrupt",
            "give devices to trusted guests only",
        ),
    }
}

fn driver(ready: &Readiness) -> Check {
    const NAME: &str = "vfio";
    match ready.has_driver {
        true => Check::ok(NAME, "vfio-pci is loaded"),
        false => Check::warn(
            NAME,
            "vfio-pci is not loaded, so that no device can be bound",
            "modprobe vfio-pci; at each boot: echo vfio-pci > /etc/modules-load.d/vfio.conf",
        ),
    }
}

/// All memory of a guest with a device is locked.
fn locked_memory(ready: &Readiness, is_root: bool) -> Check {
    const NAME: &str = "locked-memory";
    match ready.locked_memory {
        None => Check::ok(NAME, "no limit"),
        Some(limit) if is_root => Check::ok(NAME, format!("{}, which a daemon of root's raises", ByteSize(limit))),
        Some(limit) => Check::warn(
            NAME,
            format!(
                "at most {} for this user: a guest with a device has all of its memory locked",
                ByteSize(limit)
            ),
            "have root run the daemon",
        ),
    }
}

#[cfg(test)]
mod tests {
    use host::Status;

    use super::*;

    fn ready() -> Readiness {
        Readiness {
            iommus: vec!["dmar0".into()],
            groups: 7,
            remapping: Remapping::On,
            unsafe_interrupts: false,
            has_driver: true,
            locked_memory: None,
        }
    }

    fn bad(ready: &Readiness, is_root: bool) -> Vec<&'static str> {
        let all = lines(ready, is_root);
        assert!(
            all.iter()
                .all(|check| (check.status == Status::Ok) == check.next.is_none())
        );
        all.into_iter()
            .filter(|check| check.status != Status::Ok)
            .map(|check| check.name)
            .collect()
    }

    #[test]
    fn a_host_that_has_all_is_fine_and_one_without_an_iommu_too() {
        assert_eq!(bad(&ready(), false), [""; 0]);
        let off = Readiness { groups: 0, ..ready() };
        let lines = lines(&off, false);
        assert!(lines.len() == 1 && lines[0].found.starts_with("off"), "{lines:?}");
    }

    #[test]
    fn what_is_missing_is_told_with_the_next_step() {
        let lacking = Readiness {
            remapping: Remapping::Off,
            has_driver: false,
            locked_memory: Some(8 << 20),
            ..ready()
        };
        assert_eq!(bad(&lacking, false), ["interrupt-remapping", "vfio", "locked-memory"]);
        assert_eq!(bad(&lacking, true), ["interrupt-remapping", "vfio"]);
        let allowed = Readiness {
            unsafe_interrupts: true,
            ..lacking
        };
        assert!(lines(&allowed, true)[1].found.contains("allow_unsafe_interrupts"));
    }

    #[test]
    fn this_host_is_looked_at_without_harm() {
        let checks = checks(&Sysfs::of_host());
        assert_eq!(checks[0].name, IOMMU);
        assert_ne!(checks[0].status, Status::Fail);
    }
}
