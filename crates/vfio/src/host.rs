//! Taking functions: what has the right to open VFIO's files does it, and passes the descriptors on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;

use crate::sysfs::{self, Sysfs};
use crate::uapi::{self, GroupStatus};
use crate::{Function, VfioError, failed};

const FILES: &str = "/dev/vfio";

/// A container in the making: functions that are taken for it reach the same memory.
///
/// The kernel opens a group once. As long as this value is there, further functions of its groups can be taken; afterwards none can be
/// until all functions of the group that were taken are closed.
#[derive(Debug)]
pub struct Container {
    container: OwnedFd,
    groups: BTreeMap<String, File>,
    taken: BTreeSet<String>,
    /// It has its IOMMU, which it gets with its first group.
    has_iommu: bool,
    sysfs: Sysfs,
}

impl Container {
    /// An empty one.
    ///
    /// # Errors
    /// This process may not open VFIO's files, or the kernel has another version of it.
    pub fn open() -> Result<Self, VfioError> {
        let container = OwnedFd::from(open(&Path::new(FILES).join("vfio"))?);
        // SAFETY: the request takes nothing.
        let version = unsafe { uapi::call::<u8>(&container, uapi::GET_API_VERSION, std::ptr::null_mut()) };
        if version.map_err(failed("VFIO_GET_API_VERSION"))? != uapi::API_VERSION {
            return Err(VfioError::Other("this kernel has another version of VFIO"));
        }
        Ok(Self::new(container, false))
    }

    /// One that has functions already, such as a running VM's: more can be taken for it, of other groups.
    pub fn of_functions(container: OwnedFd) -> Self {
        Self::new(container, true)
    }

    fn new(container: OwnedFd, has_iommu: bool) -> Self {
        Self {
            container,
            groups: BTreeMap::new(),
            taken: BTreeSet::new(),
            has_iommu,
            sysfs: Sysfs::default(),
        }
    }

    /// Takes a function that vfio-pci drives, by its name such as `0000:00:04.0`.
    ///
    /// # Errors
    /// There is none of that name, it is not vfio-pci's or has no IOMMU, the host uses another of its group, or somebody has one. Without
    /// interrupt remapping the host refuses unless it trusts all guests.
    pub fn take(&mut self, name: &str) -> Result<Function, VfioError> {
        let group = self.sysfs.group(name)?;
        if self.taken.contains(name) {
            return Err(VfioError::Other("a PCI function was named twice: name each once"));
        }
        self.sysfs.check_driver(name)?;
        if !self.groups.contains_key(&group) {
            let file = self.join(name, &group)?;
            self.groups.insert(group.clone(), file);
        }
        let mut text = name.as_bytes().to_vec();
        text.push(0);
        // SAFETY: the request reads text that ends with a zero.
        let fd = unsafe { uapi::call(&self.groups[&group], uapi::GROUP_GET_DEVICE_FD, text.as_mut_ptr()) }
            .map_err(failed("VFIO_GROUP_GET_DEVICE_FD"))?;
        // SAFETY: the request has answered with a descriptor that was made for us.
        let function = Function::from_fd(unsafe { OwnedFd::from_raw_fd(fd) })?;
        self.taken.insert(name.to_owned());
        Ok(function)
    }

    /// A copy of the descriptor of a function's group, for an engine that wants to know of the function (KVM's VFIO device). The group is
    /// open as long as there is one.
    ///
    /// # Errors
    /// No function of this group was taken, or the process has no descriptors left.
    pub fn group(&self, name: &str) -> Result<OwnedFd, VfioError> {
        let file = self.groups.get(&self.sysfs.group(name)?);
        let file = file.ok_or(VfioError::Other(
            "no function of this IOMMU group was taken: take it first",
        ))?;
        file.as_fd().try_clone_to_owned().map_err(failed("dup"))
    }

    /// The container's descriptor, for [`crate::Type1`]. Functions keep their groups.
    pub fn into_fd(self) -> OwnedFd {
        self.container
    }

    /// Opens a function's group and has it join.
    fn join(&mut self, name: &str, group: &str) -> Result<File, VfioError> {
        let file = open(&Path::new(FILES).join(group)).map_err(|error| busy(error, name, group))?;
        let mut status = GroupStatus {
            argsz: uapi::size_of::<GroupStatus>(),
            ..GroupStatus::default()
        };
        // SAFETY: the request writes no more than the structure, whose size is in it.
        unsafe { uapi::call(&file, uapi::GROUP_GET_STATUS, &raw mut status) }
            .map_err(failed("VFIO_GROUP_GET_STATUS"))?;
        if status.flags & uapi::GROUP_FLAGS_VIABLE == 0 {
            return Err(not_viable(group, &self.sysfs.used(name)?));
        }
        let mut number = self.container.as_fd().as_raw_fd();
        // SAFETY: the request reads a descriptor's number.
        unsafe { uapi::call(&file, uapi::GROUP_SET_CONTAINER, &raw mut number) }
            .map_err(|error| refused(error, name, "VFIO_GROUP_SET_CONTAINER"))?;
        if !self.has_iommu {
            let kind = std::ptr::without_provenance_mut::<u8>(uapi::TYPE1V2);
            // SAFETY: the request takes a number.
            unsafe { uapi::call(&self.container, uapi::SET_IOMMU, kind) }
                .map_err(|error| refused(error, name, "VFIO_SET_IOMMU"))?;
            self.has_iommu = true;
        }
        Ok(file)
    }
}

/// Takes one function for a container of its own.
///
/// # Errors
/// As [`Container::open`] and [`Container::take`].
pub fn take(name: &str) -> Result<(OwnedFd, Function), VfioError> {
    let mut container = Container::open()?;
    let function = container.take(name)?;
    Ok((container.into_fd(), function))
}

/// Takes functions for one container, in their order: all or none.
///
/// # Errors
/// As [`Container::open`] and [`Container::take`].
pub fn take_together<S: AsRef<str>>(names: &[S]) -> Result<(OwnedFd, Vec<Function>), VfioError> {
    let mut container = Container::open()?;
    let functions: Result<_, _> = names.iter().map(|name| container.take(name.as_ref())).collect();
    Ok((container.into_fd(), functions?))
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

/// Without interrupt remapping the IOMMU is refused with EPERM.
fn refused(error: io::Error, name: &str, call: &'static str) -> VfioError {
    match Errno::from_io_error(&error) {
        Some(Errno::PERM) => VfioError::NoRemapping(name.to_owned()),
        _ => failed(call)(error),
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
        let told = refused(Errno::PERM.into(), "0000:00:04.0", "VFIO_SET_IOMMU").to_string();
        assert!(told.contains("allow_unsafe_interrupts"), "{told}");
        let told = refused(Errno::NODEV.into(), "0000:00:04.0", "VFIO_SET_IOMMU").to_string();
        assert!(told.starts_with("VFIO_SET_IOMMU failed"), "{told}");
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
