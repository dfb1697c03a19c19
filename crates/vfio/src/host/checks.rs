//! Whether a PCI function can be given to guests: all that speaks against it, each with what to do. Changes nothing.
//!
//! How it is seen that the IOMMU remaps interrupts: the kernel tells of it in no attribute, and its log is not there for ever. In
//! /proc/interrupts the chips of remapped interrupts have names that begin with `IR-` (Linux, arch/x86/kernel/apic/msi.c,
//! drivers/iommu/*/irq_remapping.c). Without remapping a guest could send the host any interrupt, and VFIO refuses unless
//! `allow_unsafe_interrupts` says otherwise.

use std::path::{Path, PathBuf};

use base::PciAddress;

use super::error::DeviceError;
use super::files::Sysfs;
use super::in_use;
use super::inventory::{Member, PciFunction, VFIO_PCI};

/// What the asker takes upon himself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// A directory of the caller's own, whose disk is not given away.
    pub store: Option<PathBuf>,
    /// Also if other functions of its group are the host's still, if its interface is up, or if it is the firmware's display.
    pub force: bool,
    /// Also if it cannot be reset: the next guest finds what the one before has left in it.
    pub allow_no_reset: bool,
}

/// What speaks against giving a function away.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Objection {
    /// The driver is missing.
    #[error(
        "the driver vfio-pci is not there: load it (`modprobe vfio-pci`; at each boot by /etc/modules-load.d/vfio.conf)"
    )]
    NoDriver,
    /// It is behind no IOMMU.
    #[error(
        "it is in no IOMMU group, so that nothing would keep it from the host's memory: turn the IOMMU on, in the firmware (VT-d, AMD-Vi) \
         and on the kernel's command line (intel_iommu=on, amd_iommu=on), and start the host again"
    )]
    NoIommu,
    /// Guests could send interrupts as they like.
    #[error(
        "the host's IOMMU does not remap interrupts, so that a guest could send the host any: turn interrupt remapping on (in the firmware; no \
         intremap=off on the kernel's command line), or, for trusted guests only, allow it (`echo 1 > \
         /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts`)"
    )]
    NoRemapping,
    /// It is a bridge.
    #[error("it is a bridge, which stays the host's: bind what is behind it")]
    Bridge,
    /// It has virtual functions.
    #[error(
        "it has {0} virtual functions, which would go with its driver: remove them first (`basalt device vfs {1} 0`)"
    )]
    HasVfs(u32, PciAddress),
    /// The IOMMU cannot tell it from what the host uses.
    #[error(
        "the IOMMU cannot tell it from {} (group {group}: nothing between them has ACS), so that all of them go to one sandbox: bind each \
         (`basalt device bind ADDRESS --force`), put the card into another slot, or leave it",
        members_of(members)
    )]
    SharedGroup {
        /// The group's number.
        group: u32,
        /// What is in the host's use.
        members: Vec<Member>,
    },
    /// It cannot be reset.
    #[error(
        "the kernel knows no way to reset it, so that the next guest would find what the one before has left in it: bind it with \
         --allow-no-reset where that does no harm"
    )]
    NoReset,
    /// A file system on it is mounted.
    #[error("its disk {block} is mounted on {at}: `umount {at}`")]
    Mounted {
        /// The block device.
        block: String,
        /// Where.
        at: String,
    },
    /// Basalt's files are on it.
    #[error("Basalt's own files ({}) are on its disk {block}: move them to another (`basaltd --state`)", store.display())]
    Store {
        /// The block device.
        block: String,
        /// Which files.
        store: PathBuf,
    },
    /// The host swaps to it.
    #[error("the host swaps to its disk {0}: `swapoff /dev/{0}`")]
    Swap(String),
    /// It is part of something.
    #[error(
        "its disk {block} is part of {holder}: `lsblk /dev/{block}` shows what is made of it; take that apart first (vgchange -an, mdadm --stop, dmsetup remove, umount)"
    )]
    Held {
        /// The block device.
        block: String,
        /// What is made of it.
        holder: String,
    },
    /// Somebody has it to himself.
    #[error(
        "its disk {0} is in use, by a mount of another namespace or a program: `fuser -vm /dev/{0}`, `grep {0} /proc/*/mountinfo`"
    )]
    Claimed(String),
    /// The host's way out.
    #[error("the host's default route leads over its interface {0}: give the host another way first (`ip route`)")]
    DefaultRoute(String),
    /// Other interfaces are on top of it.
    #[error(
        "its interface {interface} carries {above}: take it out first (`ip link set {interface} nomaster`, `ip link del`)"
    )]
    Carries {
        /// The interface.
        interface: String,
        /// What is on it.
        above: String,
    },
    /// It is up.
    #[error("its interface {0} is up: `ip link set {0} down`, or bind it with --force")]
    Up(String),
    /// The host's console may be on it.
    #[error("it is the display of the host's firmware, on which its console may be: bind it with --force")]
    Display,
}

impl Objection {
    /// The asker can have his way.
    fn is_waived(&self, terms: &Terms) -> bool {
        match self {
            Self::SharedGroup { .. } | Self::Up(_) | Self::Display => terms.force,
            Self::NoReset => terms.allow_no_reset,
            _ => false,
        }
    }

    /// The block device that it is about.
    pub(super) fn block(&self) -> Option<&str> {
        match self {
            Self::Mounted { block, .. } | Self::Store { block, .. } | Self::Held { block, .. } => Some(block),
            Self::Swap(block) | Self::Claimed(block) => Some(block),
            _ => None,
        }
    }
}

fn members_of(members: &[Member]) -> String {
    let driver = |member: &Member| member.driver.clone().unwrap_or_default();
    let all: Vec<_> = members
        .iter()
        .map(|member| format!("{} ({})", member.name, driver(member)))
        .collect();
    all.join(", ")
}

/// All that speaks against giving this function away, on these terms.
///
/// # Errors
/// The kernel's files cannot be read.
pub fn objections(sysfs: &Sysfs, function: &PciFunction, terms: &Terms) -> Result<Vec<Objection>, DeviceError> {
    let mut found = Vec::new();
    if !has_driver(sysfs)? {
        found.push(Objection::NoDriver);
    }
    if function.identity.is_bridge() {
        found.push(Objection::Bridge);
    }
    match &function.group {
        None => found.push(Objection::NoIommu),
        Some(group) => {
            let others = group.others(function.address).filter(|member| member.is_in_hosts_use());
            let members: Vec<Member> = others.cloned().collect();
            if !members.is_empty() {
                found.push(Objection::SharedGroup {
                    group: group.number,
                    members,
                });
            }
            if remapping(sysfs)? == Remapping::Off && !unsafe_interrupts(sysfs)? {
                found.push(Objection::NoRemapping);
            }
        }
    }
    if let Some(sriov) = function.sriov.filter(|sriov| sriov.used > 0) {
        found.push(Objection::HasVfs(sriov.used, function.address));
    }
    if function.reset_methods.is_empty() {
        found.push(Objection::NoReset);
    }
    if function.is_boot_display {
        found.push(Objection::Display);
    }
    found.extend(in_use::find(sysfs, function.address, terms.store.as_deref())?);
    found.retain(|objection| !objection.is_waived(terms));
    Ok(found)
}

/// Fails with all that speaks against giving this function away.
///
/// # Errors
/// [`DeviceError::Refused`], or the kernel's files cannot be read.
pub fn check(sysfs: &Sysfs, function: &PciFunction, terms: &Terms) -> Result<(), DeviceError> {
    let objections = objections(sysfs, function, terms)?;
    match objections.is_empty() {
        true => Ok(()),
        false => Err(DeviceError::Refused {
            address: function.address,
            objections,
        }),
    }
}

/// Fails with all of the host that would lose its disk or interface with this function, whatever else speaks against it.
///
/// # Errors
/// [`DeviceError::Refused`], or the kernel's files cannot be read.
pub fn check_unused(sysfs: &Sysfs, address: PciAddress, terms: &Terms) -> Result<(), DeviceError> {
    let mut objections = in_use::find(sysfs, address, terms.store.as_deref())?;
    objections.retain(|objection| !objection.is_waived(terms));
    match objections.is_empty() {
        true => Ok(()),
        false => Err(DeviceError::Refused { address, objections }),
    }
}

fn has_driver(sysfs: &Sysfs) -> Result<bool, DeviceError> {
    sysfs.has_directory(&sysfs.sys(&format!("bus/pci/drivers/{VFIO_PCI}")))
}

/// Whether interrupts go through the IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remapping {
    /// They do.
    On,
    /// They do not.
    Off,
    /// There are none of the kinds that would tell.
    Unknown,
}

/// Whether interrupts go through the IOMMU, as /proc/interrupts shows.
///
/// # Errors
/// It cannot be read.
pub fn remapping(sysfs: &Sysfs) -> Result<Remapping, DeviceError> {
    let text = sysfs.text(&sysfs.proc("interrupts"))?.unwrap_or_default();
    let mut words = text.split_whitespace();
    let mut told = Remapping::Unknown;
    let chip = words.try_for_each(|word| {
        if word.starts_with("IR-") {
            return Err(Remapping::On);
        }
        if word == "IO-APIC" || word.starts_with("PCI-MSI") {
            told = Remapping::Off;
        }
        Ok(())
    });
    Ok(chip.err().unwrap_or(told))
}

/// Somebody has allowed VFIO to do without.
fn unsafe_interrupts(sysfs: &Sysfs) -> Result<bool, DeviceError> {
    for module in ["vfio_iommu_type1", "iommufd"] {
        let path = sysfs.sys(&format!("module/{module}/parameters/allow_unsafe_interrupts"));
        if sysfs.text(&path)?.is_some_and(|text| text == "Y" || text == "1") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What passing functions on needs of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// The IOMMUs, by the kernel's names; none where it is off.
    pub iommus: Vec<String>,
    /// How many groups they make.
    pub groups: usize,
    /// Whether interrupts are remapped.
    pub remapping: Remapping,
    /// VFIO has been allowed to do without that.
    pub unsafe_interrupts: bool,
    /// vfio-pci is loaded.
    pub has_driver: bool,
    /// This process's limit of locked memory in bytes, as VMMs start with it; `None` for none.
    pub locked_memory: Option<u64>,
}

/// Looks at what passing functions on needs.
///
/// # Errors
/// The kernel's files cannot be read.
pub fn readiness(sysfs: &Sysfs) -> Result<Readiness, DeviceError> {
    Ok(Readiness {
        iommus: sysfs.list(&sysfs.sys("class/iommu"))?,
        groups: sysfs.list(&sysfs.sys("kernel/iommu_groups"))?.len(),
        remapping: remapping(sysfs)?,
        unsafe_interrupts: unsafe_interrupts(sysfs)?,
        has_driver: has_driver(sysfs)?,
        locked_memory: locked_memory(sysfs, Path::new("self/limits"))?,
    })
}

/// `Max locked memory  SOFT  HARD  bytes`; the hard limit, as whoever starts a VMM may raise it so far.
fn locked_memory(sysfs: &Sysfs, path: &Path) -> Result<Option<u64>, DeviceError> {
    let text = sysfs.text(&sysfs.proc(&path.to_string_lossy()))?.unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    Ok(line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::inventory::find;
    use crate::host::simulated::Kernel;

    fn told(kernel: &Kernel, address: &str, terms: &Terms) -> Vec<Objection> {
        let function = find(&kernel.sysfs(), address.parse().unwrap()).unwrap();
        objections(&kernel.sysfs(), &function, terms).unwrap()
    }

    const FORCE: Terms = Terms {
        store: None,
        force: true,
        allow_no_reset: false,
    };

    #[test]
    fn nothing_speaks_against_a_disk_that_nobody_uses() {
        assert_eq!(told(&Kernel::typical(), "0000:01:00.0", &Terms::default()), []);
    }

    #[test]
    fn a_host_that_lacks_something_is_told_what() {
        let kernel = Kernel::typical();
        kernel.remove("sys/bus/pci/drivers/vfio-pci");
        kernel.set(
            "proc/interrupts",
            " 9: 0 IO-APIC 9-fasteoi acpi\n24: 7 PCI-MSI 520192-edge nvme0q0\n",
        );
        let address = "0000:01:00.0";
        assert_eq!(
            told(&kernel, address, &FORCE),
            [Objection::NoDriver, Objection::NoRemapping]
        );
        kernel.set("sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts", "Y\n");
        assert_eq!(told(&kernel, address, &FORCE), [Objection::NoDriver]);
        kernel.remove("sys/bus/pci/devices/0000:01:00.0/iommu_group");
        assert_eq!(
            told(&kernel, address, &FORCE),
            [Objection::NoDriver, Objection::NoIommu]
        );
    }

    #[test]
    fn members_of_the_group_that_the_host_uses_are_named_and_force_is_enough() {
        let kernel = Kernel::typical();
        let address = "0000:00:1f.2";
        let [objection] = &told(&kernel, address, &Terms::default())[..] else {
            panic!()
        };
        let text = objection.to_string();
        assert!(
            text.contains("0000:00:1f.3 (i801_smbus)") && text.contains("--force"),
            "{text}"
        );
        assert!(!text.contains("1f.0"), "it has no driver: {text}");
        assert_eq!(told(&kernel, address, &FORCE), []);
    }

    #[test]
    fn what_cannot_be_reset_is_a_bridge_a_display_or_has_virtual_functions_is_told() {
        let kernel = Kernel::typical();
        let display = told(&kernel, "0000:00:02.0", &Terms::default());
        assert_eq!(display, [Objection::NoReset, Objection::Display]);
        assert_eq!(told(&kernel, "0000:00:02.0", &FORCE), [Objection::NoReset]);
        let terms = Terms {
            allow_no_reset: true,
            ..FORCE
        };
        assert_eq!(told(&kernel, "0000:00:02.0", &terms), []);
        assert_eq!(told(&kernel, "0000:00:1c.0", &terms), [Objection::Bridge]);
        kernel.set("sys/bus/pci/devices/0000:02:00.0/sriov_numvfs", "3\n");
        let address = "0000:02:00.0".parse().unwrap();
        assert_eq!(told(&kernel, "0000:02:00.0", &terms), [Objection::HasVfs(3, address)]);
    }

    #[test]
    fn what_is_in_use_is_never_forced() {
        let kernel = Kernel::typical();
        let below = "sys/devices/pci0000:00/0000:02:00.0/net/eth0";
        kernel.set(&format!("{below}/flags"), "0x1003\n");
        kernel.link("sys/class/net/eth0", below);
        assert_eq!(
            told(&kernel, "0000:02:00.0", &Terms::default()),
            [Objection::Up("eth0".into())]
        );
        assert_eq!(told(&kernel, "0000:02:00.0", &FORCE), []);
        kernel.directory(&format!("{below}/upper_br0"));
        assert_eq!(told(&kernel, "0000:02:00.0", &FORCE).len(), 1);
        let function = find(&kernel.sysfs(), "0000:02:00.0".parse().unwrap()).unwrap();
        let error = check(&kernel.sysfs(), &function, &FORCE).unwrap_err().to_string();
        assert!(
            error.contains("0000:02:00.0") && error.contains("carries br0"),
            "{error}"
        );
    }

    #[test]
    fn readiness_is_what_the_kernel_shows() {
        let kernel = Kernel::typical();
        kernel.directory("sys/class/iommu/dmar0");
        kernel.set(
            "proc/self/limits",
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         8388608              16777216             bytes     \n",
        );
        let ready = readiness(&kernel.sysfs()).unwrap();
        assert_eq!((ready.iommus, ready.groups), (vec!["dmar0".to_owned()], 5));
        assert_eq!((ready.remapping, ready.locked_memory), (Remapping::On, Some(16 << 20)));
        assert!(ready.has_driver && !ready.unsafe_interrupts);
        kernel.set("proc/self/limits", "Max locked memory  unlimited  unlimited  bytes\n");
        kernel.set("proc/interrupts", "0: 1 XT-PIC timer\n");
        let ready = readiness(&kernel.sysfs()).unwrap();
        assert_eq!((ready.remapping, ready.locked_memory), (Remapping::Unknown, None));
    }
}
