//! What of the host hangs on a PCI function: disks that are mounted, swapped to or part of something, interfaces that are up or carry others.
//! Finds and names it; whether it matters is `checks`' affair. Sees the mounts and routes of this process's namespaces; what others have
//! mounted shows by the kernel's own claim on the block device.

use std::path::{Path, PathBuf};

use base::PciAddress;

use super::checks::Objection;
use super::error::DeviceError;
use super::files::Sysfs;

/// `IFF_UP` (Linux, include/uapi/linux/if.h).
const UP: u64 = 1;

/// A block device, or a partition of one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    name: String,
    /// Major and minor number, as mountinfo has them.
    number: String,
}

/// A line of mountinfo (proc(5)).
#[derive(Debug)]
struct Mount {
    number: String,
    point: String,
    source: String,
}

/// All that would lose its disk or interface with this function; `store` is a directory of the caller's own.
pub(super) fn find(sysfs: &Sysfs, address: PciAddress, store: Option<&Path>) -> Result<Vec<Objection>, DeviceError> {
    let mut found = blocks(sysfs, address, store)?;
    found.extend(interfaces(sysfs, address)?);
    Ok(found)
}

fn blocks(sysfs: &Sysfs, address: PciAddress, store: Option<&Path>) -> Result<Vec<Objection>, DeviceError> {
    let blocks = blocks_below(sysfs, address)?;
    let mounts = mounts(sysfs)?;
    let swaps = sysfs.text(&sysfs.proc("swaps"))?.unwrap_or_default();
    let swaps: Vec<&str> = swaps
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    let holding_store = store.and_then(|store| mount_of(&mounts, store));
    let mut found = Vec::new();
    for block in &blocks {
        let before = found.len();
        let device = format!("/dev/{}", block.name);
        let is_it = |mount: &&Mount| mount.number == block.number || mount.source == device;
        if let (Some(store), Some(_)) = (store, holding_store.filter(is_it)) {
            found.push(Objection::Store {
                block: block.name.clone(),
                store: store.to_owned(),
            });
        } else if let Some(mount) = mounts.iter().find(is_it) {
            found.push(Objection::Mounted {
                block: block.name.clone(),
                at: mount.point.clone(),
            });
        }
        if swaps.contains(&device.as_str()) {
            found.push(Objection::Swap(block.name.clone()));
        }
        for holder in holders(sysfs, &block.name)? {
            found.push(Objection::Held {
                block: block.name.clone(),
                holder,
            });
        }
        // File systems over several disks, bcache, mounts of other namespaces.
        if found.len() == before && sysfs.is_claimed(&sysfs.dev(&block.name))? {
            found.push(Objection::Claimed(block.name.clone()));
        }
    }
    // The claim on a partition is one on the whole disk, too.
    let told: Vec<String> = found.iter().filter_map(|one| one.block().map(str::to_owned)).collect();
    found.retain(|one| match one {
        Objection::Claimed(block) => !told
            .iter()
            .any(|other| other != block && other.starts_with(block.as_str())),
        _ => true,
    });
    Ok(found)
}

/// The block devices whose disks are reached by this function.
fn blocks_below(sysfs: &Sysfs, address: PciAddress) -> Result<Vec<Block>, DeviceError> {
    let heads = nvme_heads(sysfs, address)?;
    let mut found = Vec::new();
    for name in sysfs.list(&sysfs.sys("class/block"))? {
        let path = sysfs.sys(&format!("class/block/{name}"));
        let Some(to) = sysfs.link(&path)? else { continue };
        let is_head = heads.iter().any(|head| has_part(&to, head));
        if is_head || has_part(&to, &address.to_string()) {
            let number = sysfs.text(&path.join("dev"))?.unwrap_or_default();
            found.push(Block { name, number });
        }
    }
    Ok(found)
}

/// With several paths to an NVMe namespace, its block device is the subsystem's, which is below no function (Linux,
/// Documentation/ABI, `/sys/class/nvme-subsystem`).
fn nvme_heads(sysfs: &Sysfs, address: PciAddress) -> Result<Vec<String>, DeviceError> {
    let controllers = below(sysfs, "nvme", address)?;
    let mut heads = Vec::new();
    for subsystem in sysfs.list(&sysfs.sys("class/nvme-subsystem"))? {
        let names = sysfs.list(&sysfs.sys(&format!("class/nvme-subsystem/{subsystem}")))?;
        if names.iter().any(|name| controllers.contains(name)) {
            let namespaces = names.into_iter().filter(|name| is_namespace(name));
            heads.extend(namespaces);
        }
    }
    Ok(heads)
}

/// `nvme0n1`, and not the controller `nvme0`.
fn is_namespace(name: &str) -> bool {
    name.strip_prefix("nvme").is_some_and(|rest| rest.contains('n'))
}

/// Devices of a class that are below this function.
fn below(sysfs: &Sysfs, class: &str, address: PciAddress) -> Result<Vec<String>, DeviceError> {
    let directory = sysfs.sys(&format!("class/{class}"));
    let mut found = Vec::new();
    for name in sysfs.list(&directory)? {
        let to = sysfs.link(&directory.join(&name))?;
        if to.is_some_and(|to| has_part(&to, &address.to_string())) {
            found.push(name);
        }
    }
    Ok(found)
}

fn has_part(path: &Path, part: &str) -> bool {
    path.components().any(|component| component.as_os_str() == part)
}

/// What is made of a block device: a RAID, a volume group, an encrypted disk; and file systems over several.
fn holders(sysfs: &Sysfs, block: &str) -> Result<Vec<String>, DeviceError> {
    let mut found = Vec::new();
    for holder in sysfs.list(&sysfs.sys(&format!("class/block/{block}/holders")))? {
        let name = sysfs.text(&sysfs.sys(&format!("class/block/{holder}/dm/name")))?;
        found.push(name.unwrap_or(holder));
    }
    for filesystem in sysfs.list(&sysfs.sys("fs/btrfs"))? {
        let devices = sysfs.list(&sysfs.sys(&format!("fs/btrfs/{filesystem}/devices")))?;
        if devices.iter().any(|device| device == block) {
            found.push(format!("btrfs {filesystem}"));
        }
    }
    Ok(found)
}

fn mounts(sysfs: &Sysfs) -> Result<Vec<Mount>, DeviceError> {
    let text = sysfs.text(&sysfs.proc("self/mountinfo"))?.unwrap_or_default();
    let mount = |line: &str| {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ');
        Some(Mount {
            number: place.nth(2)?.to_owned(),
            point: unescape(place.nth(1)?),
            source: unescape(kind.split(' ').nth(1)?),
        })
    };
    Ok(text.lines().filter_map(mount).collect())
}

/// Blanks, tabs, line ends and backslashes are written as `\040` and the like.
fn unescape(text: &str) -> String {
    let pairs = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    pairs
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// The last mount above a path, which is the one that is seen.
fn mount_of<'m>(mounts: &'m [Mount], path: &Path) -> Option<&'m Mount> {
    let above = |mount: &&Mount| path.starts_with(&mount.point);
    let mounts = mounts.iter().filter(above);
    mounts.max_by_key(|mount| PathBuf::from(&mount.point).components().count())
}

fn interfaces(sysfs: &Sysfs, address: PciAddress) -> Result<Vec<Objection>, DeviceError> {
    let routes = default_routes(sysfs)?;
    let mut found = Vec::new();
    for name in below(sysfs, "net", address)? {
        let directory = sysfs.sys(&format!("class/net/{name}"));
        let mut above: Vec<String> = sysfs.link_name(&directory.join("master"))?.into_iter().collect();
        let uppers = sysfs.list(&directory)?;
        let uppers = uppers.iter().filter_map(|name| name.strip_prefix("upper_"));
        above.extend(
            uppers
                .filter(|name| Some(*name) != above.first().map(String::as_str))
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        );
        let flags = sysfs.text(&directory.join("flags"))?.unwrap_or_default();
        let flags = u64::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap_or_default();
        if routes.contains(&name) {
            found.push(Objection::DefaultRoute(name));
        } else if !above.is_empty() {
            found.push(Objection::Carries {
                interface: name,
                above: above.join(", "),
            });
        } else if flags & UP != 0 {
            found.push(Objection::Up(name));
        }
    }
    Ok(found)
}

/// The interfaces of default routes, of both address families.
fn default_routes(sysfs: &Sysfs) -> Result<Vec<String>, DeviceError> {
    let mut found = Vec::new();
    // Interface, destination, gateway, flags, reference count, use, metric, mask.
    let text = sysfs.text(&sysfs.proc("net/route"))?.unwrap_or_default();
    for line in text.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [interface, "00000000", _, _, _, _, _, "00000000", ..] = words[..] {
            found.push(interface.to_owned());
        }
    }
    // Destination, its prefix's length, ..., interface. What cannot be reached is the loopback's, which is no function's.
    let text = sysfs.text(&sysfs.proc("net/ipv6_route"))?.unwrap_or_default();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [destination, "00", .., interface] = words[..]
            && destination.bytes().all(|byte| byte == b'0')
        {
            found.push(interface.to_owned());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::simulated::Kernel;

    const NVME: &str = "0000:01:00.0";
    const NIC: &str = "0000:02:00.0";

    /// A kernel whose NVMe disk has one partition.
    fn with_disk() -> Kernel {
        let kernel = Kernel::typical();
        let below = "sys/devices/pci0000:00/0000:00:1c.0/0000:01:00.0/nvme/nvme0";
        kernel.set(&format!("{below}/nvme0n1/dev"), "259:0\n");
        kernel.set(&format!("{below}/nvme0n1/nvme0n1p1/dev"), "259:1\n");
        kernel.link("sys/class/block/nvme0n1", &format!("{below}/nvme0n1"));
        kernel.link("sys/class/block/nvme0n1p1", &format!("{below}/nvme0n1/nvme0n1p1"));
        kernel.link("sys/class/nvme/nvme0", below);
        // Another disk, which is nobody's business.
        kernel.set("sys/devices/virtual/block/vda/dev", "254:0\n");
        kernel.link("sys/class/block/vda", "sys/devices/virtual/block/vda");
        kernel
    }

    fn found(kernel: &Kernel, address: &str, store: Option<&Path>) -> Vec<Objection> {
        find(&kernel.sysfs(), address.parse().unwrap(), store).unwrap()
    }

    fn mount(kernel: &Kernel, line: &str) {
        kernel.set(
            "proc/self/mountinfo",
            &format!("22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n{line}\n"),
        );
    }

    #[test]
    fn a_disk_that_nobody_uses_is_free() {
        let kernel = with_disk();
        kernel.claim("dev/vda");
        mount(&kernel, "");
        assert_eq!(found(&kernel, NVME, Some("/var/lib/basalt".as_ref())), []);
    }

    #[test]
    fn a_mounted_partition_is_named_with_its_place() {
        let kernel = with_disk();
        kernel.claim("dev/nvme0n1p1");
        kernel.claim("dev/nvme0n1");
        mount(&kernel, "30 22 259:1 / /mnt/with\\040blank rw - ext4 /dev/nvme0n1p1 rw");
        let mounted = |block: &str, at: &str| Objection::Mounted {
            block: block.into(),
            at: at.into(),
        };
        assert_eq!(found(&kernel, NVME, None), [mounted("nvme0n1p1", "/mnt/with blank")]);
        // The bridge before it has the same disk behind it.
        assert_eq!(found(&kernel, "0000:00:1c.0", None).len(), 1);
        assert_eq!(found(&kernel, NIC, None), []);
        // btrfs has numbers of its own.
        mount(&kernel, "30 22 0:47 / /data rw - btrfs /dev/nvme0n1p1 rw");
        assert_eq!(found(&kernel, NVME, None), [mounted("nvme0n1p1", "/data")]);
    }

    #[test]
    fn a_disk_with_the_callers_own_files_is_told_as_that() {
        let kernel = with_disk();
        mount(&kernel, "30 22 259:1 / /var/lib rw - ext4 /dev/nvme0n1p1 rw");
        let store = Path::new("/var/lib/basalt");
        let wanted = Objection::Store {
            block: "nvme0n1p1".into(),
            store: store.into(),
        };
        assert_eq!(found(&kernel, NVME, Some(store)), [wanted]);
        let elsewhere = found(&kernel, NVME, Some("/var/library".as_ref()));
        assert!(matches!(&elsewhere[..], [Objection::Mounted { .. }]), "{elsewhere:?}");
    }

    #[test]
    fn swap_holders_and_other_claims_are_told() {
        let kernel = with_disk();
        let header = "Filename\tType\tSize\tUsed\tPriority\n";
        kernel.set("proc/swaps", &format!("{header}/dev/nvme0n1p1  partition  100 0 -2\n"));
        assert_eq!(found(&kernel, NVME, None), [Objection::Swap("nvme0n1p1".into())]);
        kernel.set("proc/swaps", header);
        kernel.directory("sys/class/block/nvme0n1p1/holders/dm-3");
        kernel.set("sys/class/block/dm-3/dm/name", "vg-root\n");
        let held = |holder: &str| Objection::Held {
            block: "nvme0n1p1".into(),
            holder: holder.into(),
        };
        assert_eq!(found(&kernel, NVME, None), [held("vg-root")]);
        kernel.remove("sys/class/block/nvme0n1p1/holders");
        kernel.directory("sys/fs/btrfs/6c1f/devices/nvme0n1p1");
        assert_eq!(found(&kernel, NVME, None), [held("btrfs 6c1f")]);
        kernel.remove("sys/fs/btrfs");
        kernel.claim("dev/nvme0n1");
        assert_eq!(found(&kernel, NVME, None), [Objection::Claimed("nvme0n1".into())]);
        kernel.claim("dev/nvme0n1p1");
        assert_eq!(found(&kernel, NVME, None), [Objection::Claimed("nvme0n1p1".into())]);
    }

    #[test]
    fn a_namespace_with_several_paths_is_found_below_its_subsystem() {
        let kernel = with_disk();
        for name in ["nvme0n1", "nvme0n1p1"] {
            kernel.remove(&format!("sys/class/block/{name}"));
        }
        let head = "sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1";
        kernel.set(&format!("{head}/dev"), "259:5\n");
        kernel.link("sys/class/block/nvme0n1", head);
        kernel.directory("sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme0");
        kernel.link(
            "sys/class/nvme-subsystem/nvme-subsys0",
            "sys/devices/virtual/nvme-subsystem/nvme-subsys0",
        );
        mount(&kernel, "30 22 259:5 / /srv rw - ext4 /dev/nvme0n1 rw");
        let found = found(&kernel, NVME, None);
        assert!(
            matches!(&found[..], [Objection::Mounted { at, .. }] if at == "/srv"),
            "{found:?}"
        );
    }

    #[test]
    fn an_interface_is_told_by_the_most_that_hangs_on_it() {
        let kernel = Kernel::typical();
        let below = "sys/devices/pci0000:00/0000:02:00.0/net/eth0";
        kernel.set(&format!("{below}/flags"), "0x1002\n");
        kernel.link("sys/class/net/eth0", below);
        assert_eq!(found(&kernel, NIC, None), []);
        kernel.set(&format!("{below}/flags"), "0x1003\n");
        assert_eq!(found(&kernel, NIC, None), [Objection::Up("eth0".into())]);
        kernel.link(&format!("{below}/master"), "sys/devices/virtual/net/bond0");
        kernel.link(&format!("{below}/upper_bond0"), "sys/devices/virtual/net/bond0");
        kernel.link(&format!("{below}/upper_eth0.7"), "sys/devices/virtual/net/eth0.7");
        let carries = Objection::Carries {
            interface: "eth0".into(),
            above: "bond0, eth0.7".into(),
        };
        assert_eq!(found(&kernel, NIC, None), [carries]);
        let header = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";
        let line = "eth0\t00000000\t0102000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        kernel.set("proc/net/route", &format!("{header}{line}"));
        assert_eq!(found(&kernel, NIC, None), [Objection::DefaultRoute("eth0".into())]);
        // Not a default route: half of the addresses.
        kernel.set(
            "proc/net/route",
            &format!("{header}{}", line.replace("00000000\t0\t0\t0", "00000080\t0\t0\t0")),
        );
        let zero = "0".repeat(32);
        let sixth = format!("{zero} 00 {zero} 00 {zero} 00000400 00000001 00000000 00000003");
        kernel.set("proc/net/ipv6_route", &format!("{sixth} lo\n"));
        assert!(matches!(&found(&kernel, NIC, None)[..], [Objection::Carries { .. }]));
        kernel.set("proc/net/ipv6_route", &format!("{sixth} eth0\n"));
        assert_eq!(found(&kernel, NIC, None), [Objection::DefaultRoute("eth0".into())]);
    }
}
