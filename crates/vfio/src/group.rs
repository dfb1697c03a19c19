//! An IOMMU group: functions that the IOMMU cannot tell apart, and that are given away together. Knows no guest.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

use crate::uapi::{self, GroupStatus};
use crate::{Function, VfioError, failed};

/// A group that was opened. The kernel opens a group once: as long as this or one of its functions is there, nobody else can.
#[derive(Debug)]
pub struct Group(OwnedFd);

impl Group {
    /// One that [`crate::host::open_group`] has opened, as it was passed on.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Whether the host uses none of its functions.
    ///
    /// # Errors
    /// The descriptor is no group.
    pub fn is_viable(&self) -> Result<bool, VfioError> {
        let mut status = GroupStatus {
            argsz: uapi::size_of::<GroupStatus>(),
            ..GroupStatus::default()
        };
        // SAFETY: the request writes no more than the structure, whose size is in it.
        unsafe { uapi::call(&self.0, uapi::GROUP_GET_STATUS, &raw mut status) }
            .map_err(failed("VFIO_GROUP_GET_STATUS"))?;
        Ok(status.flags & uapi::GROUP_FLAGS_VIABLE != 0)
    }

    /// Has its functions reach what is mapped in a container. The first group of a container brings it its IOMMU.
    ///
    /// # Errors
    /// The group is in a container, or behind another IOMMU than those that are in this one.
    pub(crate) fn join(&self, container: BorrowedFd<'_>) -> Result<(), VfioError> {
        let mut number = container.as_raw_fd();
        // SAFETY: the request reads a descriptor's number.
        unsafe { uapi::call(&self.0, uapi::GROUP_SET_CONTAINER, &raw mut number) }
            .map_err(refused("VFIO_GROUP_SET_CONTAINER"))?;
        Ok(())
    }

    /// One of its functions, by its name such as `0000:00:04.0`. The group is in a container.
    ///
    /// # Errors
    /// It is none of this group, or it is not vfio-pci's.
    pub fn take(&self, name: &str) -> Result<Function, VfioError> {
        let mut text = name.as_bytes().to_vec();
        text.push(0);
        // SAFETY: the request reads text that ends with a zero.
        let fd = unsafe { uapi::call(&self.0, uapi::GROUP_GET_DEVICE_FD, text.as_mut_ptr()) }
            .map_err(failed("VFIO_GROUP_GET_DEVICE_FD"))?;
        // SAFETY: the request has answered with a descriptor that was made for us.
        Function::from_fd(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Group> for OwnedFd {
    fn from(group: Group) -> Self {
        group.0
    }
}

/// Without interrupt remapping the IOMMU is refused with EPERM.
pub(crate) fn refused(call: &'static str) -> impl Fn(io::Error) -> VfioError {
    move |error| match Errno::from_io_error(&error) {
        Some(Errno::PERM) => VfioError::NoRemapping("vfio_iommu_type1"),
        _ => failed(call)(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_refuses_is_told_with_its_cause() {
        let told = refused("VFIO_SET_IOMMU")(Errno::PERM.into()).to_string();
        assert!(told.contains("allow_unsafe_interrupts"), "{told}");
        let told = refused("VFIO_SET_IOMMU")(Errno::NODEV.into()).to_string();
        assert!(told.starts_with("VFIO_SET_IOMMU failed"), "{told}");
    }

    #[test]
    fn a_file_is_no_group() {
        let group = Group::from_fd(std::fs::File::open("/dev/null").unwrap().into());
        assert!(matches!(group.is_viable(), Err(VfioError::Call { .. })));
        assert!(matches!(group.take("0000:00:04.0"), Err(VfioError::Call { .. })));
    }
}
