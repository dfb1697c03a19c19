//! Opening VFIO's files: what has the right to does it, and passes the descriptors on.

pub mod binding;
pub mod checks;
pub mod dma_faults;
mod error;
mod files;
mod in_use;
pub mod inventory;
mod names;
pub mod nodes;
pub mod simulated;
pub mod users;
pub mod vfs;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use base::PciAddress;

pub use error::DeviceError;
pub use files::{DeviceNumber, Files, Sysfs};

use crate::{Group, VfioError, failed, iommufd, uapi};

const FILES: &str = "/dev/vfio";

/// An empty container, for [`crate::Type1::new`].
///
/// # Errors
/// This process may not open VFIO's files, or the kernel has another version of it.
pub fn open_container() -> Result<OwnedFd, VfioError> {
    let container = OwnedFd::from(open(&Path::new(FILES).join("vfio"))?);
    // SAFETY: the request takes nothing.
    let version = unsafe { uapi::call::<u8>(&container, uapi::GET_API_VERSION, std::ptr::null_mut()) };
    match version.map_err(failed("VFIO_GET_API_VERSION"))? {
        uapi::API_VERSION => Ok(container),
        _ => Err(VfioError::Other("this kernel has another version of VFIO")),
    }
}

/// The group of a function that vfio-pci drives, for [`crate::Group::from_fd`].
///
/// # Errors
/// There is no such function, it is not vfio-pci's or has no IOMMU, the host uses another of its group, or somebody has the group.
pub fn open_group(sysfs: &Sysfs, address: PciAddress) -> Result<OwnedFd, VfioError> {
    let group = group_of(sysfs, address)?;
    let path = Path::new(FILES).join(group.number.to_string());
    let file = open(&path).map_err(|error| busy(error, address, group.number))?;
    let file = Group::from_fd(file.into());
    match file.is_viable()? {
        true => Ok(file.into()),
        false => Err(not_viable(address, &group)),
    }
}

/// Where iommufd is.
const IOMMUFD: &str = "/dev/iommu";

/// Whether this host's kernel gives a function by a file of its own, for iommufd ([`open_iommufd`], [`open_function`]), which no container is
/// needed for (Linux 6.6, as it is built).
///
/// # Errors
/// sysfs cannot be read.
pub fn has_own_file(sysfs: &Sysfs, address: PciAddress) -> Result<bool, DeviceError> {
    Ok(Path::new(IOMMUFD).exists() && own_file(sysfs, address)?.is_some())
}

/// iommufd, for [`crate::Iommufd::new`]: memory that is mapped there counts as locked by the process that maps it.
///
/// # Errors
/// This kernel has none or it is not loaded, or this process may not open it.
pub fn open_iommufd() -> Result<OwnedFd, VfioError> {
    let iommufd = OwnedFd::from(open(Path::new(IOMMUFD))?);
    iommufd::count_by_process(&iommufd)?;
    Ok(iommufd)
}

/// The file of a function that vfio-pci drives, for [`crate::Iommufd::attach`].
///
/// # Errors
/// There is no such function, it is not vfio-pci's or has no IOMMU or no file of its own, or the host uses another of its group.
pub fn open_function(sysfs: &Sysfs, address: PciAddress) -> Result<OwnedFd, VfioError> {
    let group = group_of(sysfs, address)?;
    if group.others(address).any(inventory::Member::is_in_hosts_use) {
        return Err(not_viable(address, &group));
    }
    let name = own_file(sysfs, address)?.ok_or(VfioError::NoOwnFile(address))?;
    Ok(open(&Path::new(FILES).join("devices").join(name))?.into())
}

/// The name of a function's own file, if the kernel makes one.
fn own_file(sysfs: &Sysfs, address: PciAddress) -> Result<Option<String>, DeviceError> {
    let directory = sysfs.sys(&format!("bus/pci/devices/{address}/vfio-dev"));
    for name in sysfs.list(&directory)? {
        // Every kernel has the directory. One that makes no such files names no number of one.
        if sysfs.text(&directory.join(&name).join("dev"))?.is_some() {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// The group of one that vfio-pci, or a variant of it, drives.
fn group_of(sysfs: &Sysfs, address: PciAddress) -> Result<inventory::Group, VfioError> {
    let function = inventory::look(sysfs, address)?.ok_or(DeviceError::NotFound(address))?;
    match function.driver {
        Some(driver) if inventory::is_vfio(&driver) => function.group.ok_or(VfioError::NoIommu(address)),
        driver => Err(VfioError::OtherDriver {
            function: address,
            driver: driver.unwrap_or_else(|| "nobody".into()),
        }),
    }
}

fn open(path: &Path) -> Result<File, VfioError> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map_err(|source| VfioError::File {
        path: path.display().to_string(),
        source,
    })
}

/// The kernel opens a group once.
fn busy(error: VfioError, function: PciAddress, group: u32) -> VfioError {
    match error {
        VfioError::File { source, .. } if source.kind() == io::ErrorKind::ResourceBusy => {
            VfioError::InUse { function, group }
        }
        other => other,
    }
}

fn not_viable(address: PciAddress, group: &inventory::Group) -> VfioError {
    let used = group.others(address).filter(|member| member.is_in_hosts_use());
    let used = used.map(|member| {
        format!(
            "{} (driver {})",
            member.name,
            member.driver.as_deref().unwrap_or_default()
        )
    });
    let used: Vec<_> = used.collect();
    VfioError::Group {
        group: group.number,
        others: match used.is_empty() {
            true => "a function that it does not name".to_owned(),
            false => used.join(", "),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use rustix::io::Errno;

    use super::binding::{BindingRecord, Goal, carry_out};
    use super::simulated::Kernel;

    fn bound(kernel: &Kernel, name: &str) -> PciAddress {
        let (sysfs, address) = (kernel.sysfs(), name.parse().unwrap());
        let record = BindingRecord::take(&sysfs, address).unwrap();
        carry_out(&sysfs, &record, Goal::Bound, |_| Ok::<(), DeviceError>(())).unwrap();
        address
    }

    #[test]
    fn a_group_that_is_open_is_told_with_its_function() {
        let address: PciAddress = "0000:00:04.0".parse().unwrap();
        let file = |errno: Errno| VfioError::File {
            path: "/dev/vfio/6".into(),
            source: errno.into(),
        };
        let told = busy(file(Errno::BUSY), address, 6).to_string();
        assert!(
            told.contains("0000:00:04.0 is in use") && told.contains("group 6"),
            "{told}"
        );
        let told = busy(file(Errno::ACCESS), address, 6).to_string();
        assert!(told.starts_with("/dev/vfio/6: Permission denied"), "{told}");
    }

    #[test]
    fn only_what_vfio_drives_has_a_group_to_open() {
        let kernel = Kernel::typical();
        let told = |name: &str| {
            group_of(&kernel.sysfs(), name.parse().unwrap())
                .unwrap_err()
                .to_string()
        };
        let refused = told("0000:01:00.0");
        assert!(
            refused.contains("0000:01:00.0 is nvme's") && refused.contains("basalt device bind 0000:01:00.0"),
            "{refused}"
        );
        assert!(told("ffff:ff:1f.7").contains("no PCI function ffff:ff:1f.7"));
        let address = bound(&kernel, "0000:01:00.0");
        assert_eq!(group_of(&kernel.sysfs(), address).unwrap().number, 1);
    }

    #[test]
    fn a_group_that_the_host_uses_is_told_with_its_other_functions() {
        let kernel = Kernel::typical();
        let address = bound(&kernel, "0000:00:1f.2");
        let group = group_of(&kernel.sysfs(), address).unwrap();
        let told = not_viable(address, &group).to_string();
        assert!(told.contains("0000:00:1f.3 (driver "), "{told}");
        bound(&kernel, "0000:00:1f.3");
        let told = not_viable(address, &group_of(&kernel.sysfs(), address).unwrap()).to_string();
        assert!(told.contains("does not name"), "{told}");
    }
}
