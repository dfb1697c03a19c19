//! Every PCI function of the host, as sysfs tells of it (Linux, Documentation/ABI/testing/sysfs-bus-pci, sysfs-kernel-iommu_groups). Only
//! looks: what is in use, and by whom, is `in_use`'s affair, and what may be done is `checks`'.

use std::path::PathBuf;

use base::PciAddress;

use super::error::DeviceError;
use super::files::Sysfs;
use super::names::{Names, Wanted};

/// The driver that gives functions to whoever has its files.
pub const VFIO_PCI: &str = "vfio-pci";

/// Drivers that leave DMA of a function's group to whoever has the group: they set `driver_managed_dma` (Linux, include/linux/pci.h).
const MANAGED: [&str; 2] = ["pci-stub", "pcieport"];

/// The base class of bridges (PCI Code and ID Assignment 1.11, 1.7).
const BRIDGE: u8 = 0x06;

/// Lines of `resource` that are BARs; behind them are the ROM and the BARs of virtual functions.
const BARS: usize = 6;

/// `IORESOURCE_IO`, `_MEM`, `_PREFETCH` and `_MEM_64` (Linux, include/linux/ioport.h).
const IO: u64 = 0x100;
const MEMORY: u64 = 0x200;
const PREFETCH: u64 = 0x2000;
const WIDE: u64 = 0x10_0000;

/// A PCI function of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciFunction {
    /// Where it is.
    pub address: PciAddress,
    /// What it is by numbers and, where the host knows them, names.
    pub identity: Identity,
    /// The driver that has it.
    pub driver: Option<String>,
    /// The only driver that it may come to, where somebody has said so.
    pub driver_override: Option<String>,
    /// What the IOMMU cannot tell apart from it; `None` where it is behind no IOMMU.
    pub group: Option<Group>,
    /// The NUMA node that it is near to, where the host says.
    pub numa_node: Option<u32>,
    /// In which ways the kernel can reset it, the first it uses first (`flr`, `pm`, `bus`, ...).
    pub reset_methods: Vec<String>,
    /// The virtual functions that it can make, where it can.
    pub sriov: Option<SrIov>,
    /// The function that has made it, if it is a virtual one.
    pub physical: Option<PciAddress>,
    /// The BARs that it has.
    pub bars: Vec<Bar>,
    /// The firmware's display: the host's console may be on it.
    pub is_boot_display: bool,
}

/// What a function is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Base class, subclass and programming interface, 8 bits each.
    pub class: u32,
    /// The name of the subclass, or of the base class.
    pub class_name: Option<String>,
    /// Its vendor's number.
    pub vendor: u16,
    /// Its vendor's name.
    pub vendor_name: Option<String>,
    /// Its number among its vendor's.
    pub device: u16,
    /// Its name.
    pub device_name: Option<String>,
}

impl Identity {
    /// The base class.
    pub fn base_class(&self) -> u8 {
        self.class.to_be_bytes()[1]
    }

    /// The subclass.
    pub fn subclass(&self) -> u8 {
        self.class.to_be_bytes()[2]
    }

    /// It is a bridge, which belongs to the host whoever has what is behind it.
    pub fn is_bridge(&self) -> bool {
        self.base_class() == BRIDGE
    }
}

/// What an IOMMU tells apart: all of it has one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number.
    pub number: u32,
    /// How its functions' DMA is translated while they are the host's.
    pub kind: GroupKind,
    /// All of its functions, the one that was asked about too.
    pub members: Vec<Member>,
}

/// How DMA of a group is translated while it is the host's (its file `type`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// What is unmapped cannot be reached from then on.
    Dma,
    /// What is unmapped can be reached for a moment still.
    DmaFq,
    /// Not at all.
    Identity,
    /// As its user says, or something that this version does not know.
    Other(String),
}

impl GroupKind {
    fn of(text: &str) -> Self {
        match text {
            "DMA" => Self::Dma,
            "DMA-FQ" => Self::DmaFq,
            "identity" => Self::Identity,
            other => Self::Other(other.to_owned()),
        }
    }

    /// The kernel's word for it.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Dma => "DMA",
            Self::DmaFq => "DMA-FQ",
            Self::Identity => "identity",
            Self::Other(other) => other,
        }
    }
}

/// A device of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name, a PCI function's address but on hosts that have other buses.
    pub name: String,
    /// Its driver.
    pub driver: Option<String>,
}

impl Member {
    /// Its driver has the host use it, so that nobody else can have its group.
    pub fn is_in_hosts_use(&self) -> bool {
        let driver = self.driver.as_deref();
        driver.is_some_and(|driver| !is_vfio(driver) && !MANAGED.contains(&driver))
    }

    /// Its address.
    pub fn address(&self) -> Option<PciAddress> {
        self.name.parse().ok()
    }
}

/// vfio-pci, or a variant of it for some device (Linux, drivers/vfio/pci/*).
pub(super) fn is_vfio(driver: &str) -> bool {
    driver.ends_with(VFIO_PCI) || driver.ends_with("vfio_pci")
}

impl Group {
    /// None of it is in the host's use: somebody can have it.
    pub fn is_viable(&self) -> bool {
        !self.members.iter().any(Member::is_in_hosts_use)
    }

    /// All of it but this function.
    pub fn others(&self, than: PciAddress) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |member| member.address() != Some(than))
    }
}

/// Virtual functions of a physical one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrIov {
    /// How many it can make.
    pub total: u32,
    /// How many there are.
    pub used: u32,
}

/// Registers of a function, or memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Which, 0 to 5.
    pub index: u8,
    /// Bytes.
    pub size: u64,
    /// Ports in place of memory.
    pub is_ports: bool,
    /// Reading it has no effect.
    pub is_prefetchable: bool,
    /// It may be above 4 GiB.
    pub is_wide: bool,
}

/// All functions of the host, in the order of its buses, with their names.
///
/// # Errors
/// sysfs cannot be read.
pub fn list(sysfs: &Sysfs) -> Result<Vec<PciFunction>, DeviceError> {
    let names = sysfs.list(&sysfs.sys("bus/pci/devices"))?;
    let mut functions = Vec::new();
    for address in names.iter().filter_map(|name| name.parse().ok()) {
        // One may go meanwhile.
        functions.extend(look(sysfs, address)?);
    }
    functions.sort_by_key(|function| function.address);
    name(sysfs, &mut functions)?;
    Ok(functions)
}

/// One of them, with its names.
///
/// # Errors
/// There is no such function, or sysfs cannot be read.
pub fn find(sysfs: &Sysfs, address: PciAddress) -> Result<PciFunction, DeviceError> {
    let mut found = [look(sysfs, address)?.ok_or(DeviceError::NotFound(address))?];
    name(sysfs, &mut found)?;
    let [found] = found;
    Ok(found)
}

fn name(sysfs: &Sysfs, functions: &mut [PciFunction]) -> Result<(), DeviceError> {
    let identities = || functions.iter().map(|function| &function.identity);
    let wanted = Wanted {
        devices: identities().map(|it| (it.vendor, it.device)).collect(),
        classes: identities().map(|it| (it.base_class(), it.subclass())).collect(),
    };
    let names = Names::find(sysfs, &wanted)?;
    for function in functions {
        let identity = &mut function.identity;
        identity.class_name = names.class(identity.base_class(), identity.subclass());
        identity.vendor_name = names.vendor(identity.vendor);
        identity.device_name = names.device(identity.vendor, identity.device);
    }
    Ok(())
}

/// Without names; nothing where there is no such function.
pub(super) fn look(sysfs: &Sysfs, address: PciAddress) -> Result<Option<PciFunction>, DeviceError> {
    let text = |name: &str| sysfs.text(&sysfs.function(address, name));
    let Some(class) = text("class")? else { return Ok(None) };
    let number = |text: Option<String>| text.as_deref().and_then(hexadecimal).unwrap_or_default();
    let small = |text: Option<String>| u16::try_from(number(text)).unwrap_or_default();
    let identity = Identity {
        class: u32::try_from(number(Some(class))).unwrap_or_default(),
        vendor: small(text("vendor")?),
        device: small(text("device")?),
        ..Identity::default()
    };
    let physical = sysfs.link_name(&sysfs.function(address, "physfn"))?;
    Ok(Some(PciFunction {
        address,
        identity,
        driver: driver(sysfs, address)?,
        driver_override: driver_override(sysfs, address)?,
        group: group(sysfs, address)?,
        // -1: the host does not say.
        numa_node: text("numa_node")?.and_then(|node| node.parse().ok()),
        reset_methods: reset_methods(sysfs, address)?,
        sriov: sriov(sysfs, address)?,
        physical: physical.and_then(|name| name.parse().ok()),
        bars: text("resource")?.map(|text| bars(&text)).unwrap_or_default(),
        is_boot_display: text("boot_vga")?.as_deref() == Some("1"),
    }))
}

/// The driver that has a function.
pub(super) fn driver(sysfs: &Sysfs, address: PciAddress) -> Result<Option<String>, DeviceError> {
    sysfs.link_name(&sysfs.function(address, "driver"))
}

/// The only driver that it may come to.
pub(super) fn driver_override(sysfs: &Sysfs, address: PciAddress) -> Result<Option<String>, DeviceError> {
    let text = sysfs.text(&sysfs.function(address, "driver_override"))?;
    Ok(text.filter(|text| !text.is_empty() && text != "(null)"))
}

fn group(sysfs: &Sysfs, address: PciAddress) -> Result<Option<Group>, DeviceError> {
    let name = sysfs.link_name(&sysfs.function(address, "iommu_group"))?;
    let Some(number) = name.and_then(|name| name.parse().ok()) else {
        return Ok(None);
    };
    let kind = sysfs.text(&directory(sysfs, number).join("type"))?.unwrap_or_default();
    Ok(Some(Group {
        number,
        kind: GroupKind::of(&kind),
        members: members(sysfs, number)?,
    }))
}

fn directory(sysfs: &Sysfs, group: u32) -> PathBuf {
    sysfs.sys(&format!("kernel/iommu_groups/{group}"))
}

/// All of a group, of which nothing is there where there is no such group.
pub(super) fn members(sysfs: &Sysfs, group: u32) -> Result<Vec<Member>, DeviceError> {
    let devices = directory(sysfs, group).join("devices");
    let mut members = Vec::new();
    for name in sysfs.list(&devices)? {
        let driver = sysfs.link_name(&devices.join(&name).join("driver"))?;
        members.push(Member { name, driver });
    }
    Ok(members)
}

fn reset_methods(sysfs: &Sysfs, address: PciAddress) -> Result<Vec<String>, DeviceError> {
    let methods = sysfs.text(&sysfs.function(address, "reset_method"))?;
    let words = methods.unwrap_or_default();
    Ok(words.split_whitespace().map(str::to_owned).collect())
}

pub(super) fn sriov(sysfs: &Sysfs, address: PciAddress) -> Result<Option<SrIov>, DeviceError> {
    let count = |name| -> Result<Option<u32>, DeviceError> {
        let text = sysfs.text(&sysfs.function(address, name))?;
        Ok(text.and_then(|text| text.parse().ok()))
    };
    let (total, used) = (count("sriov_totalvfs")?, count("sriov_numvfs")?);
    Ok(total.filter(|total| *total > 0).map(|total| SrIov {
        total,
        used: used.unwrap_or_default(),
    }))
}

/// The virtual functions that a physical one has now, by their numbers.
///
/// # Errors
/// sysfs cannot be read.
pub fn virtual_functions(sysfs: &Sysfs, physical: PciAddress) -> Result<Vec<PciAddress>, DeviceError> {
    let mut found = Vec::new();
    for name in sysfs.list(&sysfs.function(physical, ""))? {
        let Some(number) = name
            .strip_prefix("virtfn")
            .and_then(|number| number.parse::<u32>().ok())
        else {
            continue;
        };
        let address = sysfs.link_name(&sysfs.function(physical, &name))?;
        found.extend(address.and_then(|address| Some((number, address.parse().ok()?))));
    }
    found.sort();
    Ok(found.into_iter().map(|(_, address)| address).collect())
}

/// A line each: where it begins, where it ends, what it is.
fn bars(text: &str) -> Vec<Bar> {
    let bar = |(index, line): (usize, &str)| {
        let mut words = line.split_whitespace().map(hexadecimal);
        let (start, end, flags) = (words.next()??, words.next()??, words.next()??);
        let is_there = flags & (IO | MEMORY) != 0 && end >= start;
        is_there.then(|| Bar {
            index: u8::try_from(index).unwrap_or_default(),
            size: (end - start).saturating_add(1),
            is_ports: flags & IO != 0,
            is_prefetchable: flags & PREFETCH != 0,
            is_wide: flags & WIDE != 0,
        })
    };
    text.lines().take(BARS).enumerate().filter_map(bar).collect()
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::simulated::Kernel;

    #[test]
    fn a_function_is_as_sysfs_tells() {
        let kernel = Kernel::typical();
        let nvme = find(&kernel.sysfs(), "0000:01:00.0".parse().unwrap()).unwrap();
        assert_eq!((nvme.identity.base_class(), nvme.identity.subclass()), (1, 8));
        assert_eq!(
            nvme.identity.class_name.as_deref(),
            Some("Non-Volatile memory controller")
        );
        assert_eq!((nvme.identity.vendor, nvme.identity.device), (0x1b36, 0x0010));
        assert_eq!(
            nvme.identity.device_name.as_deref(),
            Some("QEMU NVM Express Controller")
        );
        assert_eq!(
            (nvme.driver.as_deref(), nvme.driver_override.as_deref()),
            (Some("nvme"), None)
        );
        assert_eq!(
            (nvme.numa_node, nvme.reset_methods.join(",")),
            (Some(0), "flr,bus".into())
        );
        let group = nvme.group.unwrap();
        assert_eq!((group.number, &group.kind), (1, &GroupKind::DmaFq));
        assert!(!group.is_viable() && group.others(nvme.address).next().is_none());
        let bar = Bar {
            index: 0,
            size: 0x4000,
            is_ports: false,
            is_prefetchable: false,
            is_wide: true,
        };
        assert_eq!(nvme.bars, [bar]);
        let error = find(&kernel.sysfs(), "0000:7f:00.0".parse().unwrap()).unwrap_err();
        assert!(
            matches!(error, DeviceError::NotFound(_)) && error.to_string().contains("0000:7f:00.0"),
            "{error}"
        );
    }

    #[test]
    fn all_are_listed_in_order_with_their_groups_and_virtual_functions() {
        let kernel = Kernel::typical();
        let sysfs = kernel.sysfs();
        let all = list(&sysfs).unwrap();
        let addresses: Vec<_> = all.iter().map(|function| function.address.to_string()).collect();
        assert_eq!(
            addresses,
            [
                "0000:00:02.0",
                "0000:00:1c.0",
                "0000:00:1f.0",
                "0000:00:1f.2",
                "0000:00:1f.3",
                "0000:01:00.0",
                "0000:02:00.0"
            ]
        );
        let sata = all.iter().find(|function| function.address.function() == 2).unwrap();
        let group = sata.group.as_ref().unwrap();
        let others: Vec<_> = group.others(sata.address).map(|member| member.name.as_str()).collect();
        assert_eq!(others, ["0000:00:1f.0", "0000:00:1f.3"]);
        let bridge = &all[1];
        assert!(bridge.identity.is_bridge() && bridge.group.as_ref().unwrap().is_viable());
        let nic: PciAddress = "0000:02:00.0".parse().unwrap();
        assert_eq!(sriov(&sysfs, nic).unwrap(), Some(SrIov { total: 7, used: 0 }));
        sysfs.write(&sysfs.function(nic, "sriov_numvfs"), "2").unwrap();
        assert_eq!(sriov(&sysfs, nic).unwrap().unwrap().used, 2);
        let vfs = virtual_functions(&sysfs, nic).unwrap();
        assert_eq!(vfs, ["0000:02:10.0", "0000:02:10.1"].map(|text| text.parse().unwrap()));
    }

    #[test]
    fn a_host_without_iommu_names_or_nodes_has_functions_still() {
        let kernel = Kernel::typical();
        kernel.remove("usr/share/misc/pci.ids");
        kernel.remove("sys/bus/pci/devices/0000:01:00.0/iommu_group");
        kernel.set("sys/bus/pci/devices/0000:01:00.0/numa_node", "-1\n");
        kernel.remove("sys/bus/pci/devices/0000:01:00.0/reset_method");
        let nvme = find(&kernel.sysfs(), "01:00.0".parse().unwrap()).unwrap();
        assert_eq!((nvme.group, nvme.numa_node), (None, None));
        assert!(nvme.reset_methods.is_empty() && nvme.identity.vendor_name.is_none());
    }

    #[test]
    fn bars_are_told_from_what_is_none() {
        let text = "\
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x000000000000c040 0x000000000000c05f 0x0000000000040101
0x0000380000000000 0x000038000000ffff 0x000000000014220c
nonsense
0x10 0x0f 0x200
0x00000000fe000000 0x00000000fe000fff 0x0000000000040200
0x00000000fe800000 0x00000000fe83ffff 0x0000000000046200
";
        let found = bars(text);
        let shown: Vec<_> = found
            .iter()
            .map(|bar| (bar.index, bar.size, bar.is_ports, bar.is_prefetchable, bar.is_wide))
            .collect();
        assert_eq!(
            shown,
            [
                (1, 0x20, true, false, false),
                (2, 0x1_0000, false, true, true),
                (5, 0x1000, false, false, false)
            ]
        );
    }

    #[test]
    fn drivers_that_leave_dma_alone_are_not_the_hosts_use() {
        let used = |driver: Option<&str>| {
            Member {
                name: "0000:00:00.0".into(),
                driver: driver.map(str::to_owned),
            }
            .is_in_hosts_use()
        };
        for driver in [
            None,
            Some("vfio-pci"),
            Some("mlx5_vfio_pci"),
            Some("pci-stub"),
            Some("pcieport"),
        ] {
            assert!(!used(driver), "{driver:?}");
        }
        assert!(used(Some("nvme")) && used(Some("vfio-pci-not")));
    }
}
