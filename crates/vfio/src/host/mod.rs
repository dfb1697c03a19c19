//! Taking a function: what has the right to open VFIO's files does it, and passes the two descriptors on.

pub mod binding;
pub mod checks;
mod error;
mod files;
mod in_use;
pub mod inventory;
mod names;
pub mod simulated;
pub mod vfs;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

pub use error::DeviceError;
pub use files::{Files, Sysfs};

use crate::uapi::{self, GroupStatus};
use crate::{Container, Function, VfioError, failed};

const DEVICES: &str = "/sys/bus/pci/devices";
const DRIVER: &str = "vfio-pci";
const FILES: &str = "/dev/vfio";

/// Takes a function that vfio-pci drives, by its name such as `0000:00:04.0`, for a container of its own.
///
/// # Errors
/// There is none of that name, it is not vfio-pci's or has no IOMMU, or somebody has it. Without interrupt remapping the host refuses
/// unless vfio_iommu_type1 is told `allow_unsafe_interrupts=1`.
pub fn take(name: &str) -> Result<(Container, Function), VfioError> {
    let directory = Path::new(DEVICES).join(name);
    let group = group(name, &directory)?;
    check_driver(name, &directory)?;
    let container = open(&Path::new(FILES).join("vfio"))?;
    // SAFETY: the request takes nothing.
    let version = unsafe { uapi::call::<u8>(&container, uapi::GET_API_VERSION, std::ptr::null_mut()) };
    if version.map_err(failed("VFIO_GET_API_VERSION"))? != uapi::API_VERSION {
        return Err(VfioError::Other("this kernel has another version of VFIO"));
    }
    let file = open(&Path::new(FILES).join(&group))?;
    let mut status = GroupStatus {
        argsz: uapi::size_of::<GroupStatus>(),
        ..GroupStatus::default()
    };
    // SAFETY: the request writes no more than the structure, whose size is in it.
    unsafe { uapi::call(&file, uapi::GROUP_GET_STATUS, &raw mut status) }.map_err(failed("VFIO_GROUP_GET_STATUS"))?;
    if status.flags & uapi::GROUP_FLAGS_VIABLE == 0 {
        return Err(VfioError::Group(group));
    }
    let mut number = container.as_raw_fd();
    // SAFETY: the request reads a descriptor's number.
    unsafe { uapi::call(&file, uapi::GROUP_SET_CONTAINER, &raw mut number) }
        .map_err(failed("VFIO_GROUP_SET_CONTAINER"))?;
    let kind = std::ptr::without_provenance_mut::<u8>(uapi::TYPE1V2);
    // SAFETY: the request takes a number.
    unsafe { uapi::call(&container, uapi::SET_IOMMU, kind) }.map_err(failed("VFIO_SET_IOMMU"))?;
    let mut text = name.as_bytes().to_vec();
    text.push(0);
    // SAFETY: the request reads text that ends with a zero.
    let fd = unsafe { uapi::call(&file, uapi::GROUP_GET_DEVICE_FD, text.as_mut_ptr()) }
        .map_err(failed("VFIO_GROUP_GET_DEVICE_FD"))?;
    // SAFETY: the request has answered with a descriptor that was made for us.
    let function = Function::from_fd(unsafe { OwnedFd::from_raw_fd(fd) })?;
    // The function keeps the group.
    Ok((Container::from_fd(container.into()), function))
}

fn open(path: &Path) -> Result<File, VfioError> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map_err(|source| at(path, source))
}

fn at(path: &Path, source: io::Error) -> VfioError {
    VfioError::File {
        path: path.display().to_string(),
        source,
    }
}

/// The last part of a link's destination.
fn link(path: PathBuf) -> Result<Option<String>, VfioError> {
    match fs::read_link(&path) {
        Ok(to) => Ok(to.file_name().map(|name| name.to_string_lossy().into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at(&path, error)),
    }
}

fn group(name: &str, directory: &Path) -> Result<String, VfioError> {
    // A name that is none would lead elsewhere.
    if !name
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
    {
        return Err(VfioError::Other("a PCI function's name is like 0000:00:04.0"));
    }
    fs::metadata(directory).map_err(|error| at(directory, error))?;
    link(directory.join("iommu_group"))?.ok_or_else(|| VfioError::NoIommu(name.to_owned()))
}

fn check_driver(name: &str, directory: &Path) -> Result<(), VfioError> {
    match link(directory.join("driver"))? {
        Some(driver) if driver == DRIVER => Ok(()),
        other => Err(VfioError::OtherDriver {
            function: name.to_owned(),
            driver: other.unwrap_or_else(|| "nobody".into()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere_else() {
        for name in ["../../../etc", "0000:00:04.0/..", "nvme0"] {
            assert!(matches!(take(name), Err(VfioError::Other(_))), "{name}");
        }
        let error = take("ffff:ff:1f.7").unwrap_err().to_string();
        assert!(error.contains("/sys/bus/pci/devices/ffff:ff:1f.7"), "{error}");
    }
}
