//! What VFIO's files below /dev stand for (Linux, Documentation/driver-api/vfio.rst): whoever names one means the functions that it gives away.
//! Opens none of them.

use base::PciAddress;

use super::error::DeviceError;
use super::files::Sysfs;
use super::inventory::{self, Member};

/// A file of VFIO's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VfioNode {
    /// `/dev/vfio/vfio` or `/dev/iommu`: an address space, which is of no function.
    Space,
    /// `/dev/vfio/NUMBER`: an IOMMU group.
    Group(u32),
    /// `/dev/vfio/devices/NAME`: one function.
    Device(String),
}

impl VfioNode {
    /// What a path is; nothing where it is none of VFIO's. Groups without an IOMMU (`noiommu-NUMBER`) are none: no sandbox can have them.
    pub fn of(path: &str) -> Option<Self> {
        if matches!(path, "/dev/vfio/vfio" | "/dev/iommu") {
            return Some(Self::Space);
        }
        let below = path.strip_prefix("/dev/vfio/")?;
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match below.strip_prefix("devices/") {
            Some(name) => {
                let number = name.strip_prefix("vfio")?;
                is_number(number).then(|| Self::Device(name.to_owned()))
            }
            None => is_number(below).then(|| below.parse().ok().map(Self::Group)).flatten(),
        }
    }

    /// The functions that it gives away: of a group all that vfio-pci has, in their order. Bridges are never any.
    ///
    /// # Errors
    /// sysfs cannot be read, or there is no such file: [`DeviceError::NoNode`]; or vfio-pci has nothing of it: [`DeviceError::EmptyNode`].
    pub fn functions(&self, sysfs: &Sysfs) -> Result<Vec<PciAddress>, DeviceError> {
        match self {
            Self::Space => Ok(Vec::new()),
            Self::Group(number) => of_group(sysfs, *number),
            Self::Device(name) => {
                let device = sysfs.link_name(&sysfs.sys(&format!("class/vfio-dev/{name}/device")))?;
                let address = device.and_then(|device| device.parse().ok());
                let address = address.ok_or_else(|| DeviceError::NoNode(format!("/dev/vfio/devices/{name}")))?;
                Ok(vec![address])
            }
        }
    }
}

fn of_group(sysfs: &Sysfs, number: u32) -> Result<Vec<PciAddress>, DeviceError> {
    let file = || format!("/dev/vfio/{number}");
    let members = inventory::members(sysfs, number)?;
    if members.is_empty() {
        return Err(DeviceError::NoNode(file()));
    }
    let (mut given, mut others) = (Vec::new(), Vec::new());
    for member in &members {
        let Some(address) = member.address() else { continue };
        let is_bridge = inventory::look(sysfs, address)?.is_none_or(|function| function.identity.is_bridge());
        match member {
            _ if is_bridge => (),
            Member {
                driver: Some(driver), ..
            } if inventory::is_vfio(driver) => given.push(address),
            _ => others.push(address.to_string()),
        }
    }
    given.sort();
    match given.is_empty() {
        true => Err(DeviceError::EmptyNode {
            file: file(),
            others: others.join(" "),
        }),
        false => Ok(given),
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulated::Kernel;
    use super::*;

    #[test]
    fn paths_are_vfios_or_not() {
        for (path, wanted) in [
            ("/dev/vfio/vfio", Some(VfioNode::Space)),
            ("/dev/iommu", Some(VfioNode::Space)),
            ("/dev/vfio/12", Some(VfioNode::Group(12))),
            ("/dev/vfio/devices/vfio3", Some(VfioNode::Device("vfio3".into()))),
            ("/dev/vfio/noiommu-1", None),
            ("/dev/vfio/devices/noiommu-vfio1", None),
            ("/dev/vfio/devices/../vfio3", None),
            ("/dev/vfio/devices/vfio", None),
            ("/dev/vfio/", None),
            ("/dev/vfio/+1", None),
            ("/dev/vfio/99999999999", None),
            ("/dev/nvidia0", None),
        ] {
            assert_eq!(VfioNode::of(path), wanted, "{path}");
        }
    }

    fn bind(kernel: &Kernel, address: &str) {
        let below = format!("/sys/bus/pci/devices/{address}");
        kernel.link(&format!("{below}/driver"), "/sys/bus/pci/drivers/vfio-pci");
    }

    #[test]
    fn a_group_is_what_vfio_pci_has_of_it_and_a_device_is_one_function() {
        let kernel = Kernel::typical();
        let sysfs = kernel.sysfs();
        let functions = |node: &str| VfioNode::of(node).unwrap().functions(&sysfs);
        assert_eq!(functions("/dev/vfio/vfio").unwrap(), []);
        let said = functions("/dev/vfio/6").unwrap_err().to_string();
        // The bridge in it is not named.
        assert!(
            said.contains("0000:00:1f.2 0000:00:1f.3") && !said.contains("1f.0"),
            "{said}"
        );
        let said = functions("/dev/vfio/77").unwrap_err().to_string();
        assert!(said.contains("/dev/vfio/77"), "{said}");
        for address in ["0000:00:1f.3", "0000:00:1f.2"] {
            bind(&kernel, address);
        }
        let all: Vec<_> = functions("/dev/vfio/6")
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(all, ["0000:00:1f.2", "0000:00:1f.3"]);
        functions("/dev/vfio/devices/vfio0").unwrap_err();
        kernel.link(
            "/sys/class/vfio-dev/vfio0/device",
            "/sys/devices/pci0000:00/0000:01:00.0",
        );
        assert_eq!(
            functions("/dev/vfio/devices/vfio0").unwrap()[0].to_string(),
            "0000:01:00.0"
        );
    }
}
