//! Opening VFIO's files: what has the right to does it, and passes the descriptors on.

pub mod binding;
pub mod checks;
mod error;
mod files;
mod in_use;
pub mod inventory;
mod names;
pub mod simulated;
pub mod vfs;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

pub use error::DeviceError;
pub use files::{Files, Sysfs};

use crate::{Group, VfioError, failed, sysfs, uapi};

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

/// The group of a function that vfio-pci drives, by its name such as `0000:00:04.0`, for [`crate::Group::from_fd`].
///
/// # Errors
/// There is none of that name, it is not vfio-pci's or has no IOMMU, the host uses another of its group, or somebody has the group.
pub fn open_group(name: &str) -> Result<OwnedFd, VfioError> {
    let sysfs = sysfs::Sysfs::default();
    let group = sysfs.group(name)?;
    sysfs.check_driver(name)?;
    let file = open(&Path::new(FILES).join(&group)).map_err(|error| busy(error, name, &group))?;
    let file = Group::from_fd(file.into());
    match file.is_viable()? {
        true => Ok(file.into()),
        false => Err(not_viable(&group, &sysfs.used(name)?)),
    }
}

fn open(path: &Path) -> Result<File, VfioError> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map_err(|source| sysfs::at(path, source))
}

/// The kernel opens a group once.
fn busy(error: VfioError, name: &str, group: &str) -> VfioError {
    match error {
        VfioError::File { source, .. } if source.kind() == io::ErrorKind::ResourceBusy => VfioError::InUse {
            function: name.to_owned(),
            group: group.to_owned(),
        },
        other => other,
    }
}

fn not_viable(group: &str, used: &[(String, String)]) -> VfioError {
    let others = used.iter().map(|(name, driver)| format!("{name} (driver {driver})"));
    let others = match used {
        [] => "a function that it does not name".to_owned(),
        _ => others.collect::<Vec<_>>().join(", "),
    };
    VfioError::Group {
        group: group.to_owned(),
        others,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use rustix::io::Errno;

    #[test]
    fn what_the_kernel_refuses_is_told_with_its_cause() {
        let file = |errno: Errno| sysfs::at(Path::new("/dev/vfio/6"), errno.into());
        let told = busy(file(Errno::BUSY), "0000:00:04.0", "6").to_string();
        assert!(
            told.contains("0000:00:04.0 is in use") && told.contains("group 6"),
            "{told}"
        );
        let told = busy(file(Errno::ACCESS), "0000:00:04.0", "6").to_string();
        assert!(told.starts_with("/dev/vfio/6: Permission denied"), "{told}");
    }

    #[test]
    fn a_group_that_the_host_uses_is_told_with_its_other_functions() {
        let used = [("0000:00:1f.3".to_owned(), "i801_smbus".to_owned())];
        let told = not_viable("6", &used).to_string();
        assert!(
            told.contains("group 6") && told.contains("0000:00:1f.3 (driver i801_smbus)"),
            "{told}"
        );
        assert!(not_viable("6", &[]).to_string().contains("does not name"));
    }
}
