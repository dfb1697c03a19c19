//! One PCI function: its regions and its interrupts.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::uapi::{self, DeviceInfo, IrqSet, RegionInfo};
use crate::{Mapping, VfioError, failed};

/// A function that this process has.
#[derive(Debug)]
pub struct Function(OwnedFd);

/// Registers of a function: a BAR, or configuration space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Bytes; zero where there is none.
    pub size: u64,
    /// Where it begins in the descriptor.
    offset: u64,
    /// It can be read and written.
    usable: bool,
    /// And mapped.
    mappable: bool,
}

impl Function {
    /// One that [`crate::host::take`] has taken, as it was passed on.
    ///
    /// # Errors
    /// The descriptor is no PCI function's.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, VfioError> {
        let mut info = DeviceInfo {
            argsz: uapi::size_of::<DeviceInfo>(),
            ..DeviceInfo::default()
        };
        // SAFETY: the request writes no more than the structure, whose size is in it.
        unsafe { uapi::call(&fd, uapi::DEVICE_GET_INFO, &raw mut info) }.map_err(failed("VFIO_DEVICE_GET_INFO"))?;
        match info.flags & uapi::DEVICE_FLAGS_PCI {
            0 => Err(VfioError::Other("the device that was given is no PCI function")),
            _ => Ok(Self(fd)),
        }
    }

    /// The region of BAR `index`, or [`crate::CONFIG_REGION`].
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn region(&self, index: u32) -> Result<Region, VfioError> {
        let mut info = RegionInfo {
            argsz: uapi::size_of::<RegionInfo>(),
            index,
            ..RegionInfo::default()
        };
        // SAFETY: the request writes no more than the structure, whose size is in it.
        unsafe { uapi::call(&self.0, uapi::DEVICE_GET_REGION_INFO, &raw mut info) }
            .map_err(failed("VFIO_DEVICE_GET_REGION_INFO"))?;
        let both = uapi::REGION_FLAG_READ | uapi::REGION_FLAG_WRITE;
        Ok(Region {
            size: info.size,
            offset: info.offset,
            usable: info.flags & both == both,
            mappable: info.flags & uapi::REGION_FLAG_MMAP != 0,
        })
    }

    /// Reads registers; the kernel does it as one access where it can.
    ///
    /// # Errors
    /// The access is not within the region, or the function does not answer.
    pub fn read(&self, region: &Region, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let at = place(region, offset, data.len())?;
        match rustix::io::pread(&self.0, &mut *data, at)? {
            read if read == data.len() => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Writes registers.
    ///
    /// # Errors
    /// As [`Function::read`].
    pub fn write(&self, region: &Region, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = place(region, offset, data.len())?;
        match rustix::io::pwrite(&self.0, data, at)? {
            written if written == data.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Maps whole pages of a region; `None` where the host does not let it.
    ///
    /// # Errors
    /// The host has no room.
    pub fn map(&self, region: &Region, offset: u64, length: u64) -> io::Result<Option<Mapping>> {
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidInput)?;
        let at = place(region, offset, length)?;
        if !region.mappable {
            return Ok(None);
        }
        Mapping::new(&self.0, at, length).map(Some)
    }

    /// Turns MSI-X on, so that each vector signals its event fd, or off, without any.
    ///
    /// # Errors
    /// More than there are, or the host has no vectors left.
    pub fn set_interrupts(&self, events: &[BorrowedFd<'_>]) -> Result<(), VfioError> {
        let header = std::mem::size_of::<IrqSet>() / size_of::<u32>();
        let count = u32::try_from(events.len()).unwrap_or(u32::MAX);
        let mut words = vec![0_u32; header];
        words.extend(events.iter().map(|event| event.as_raw_fd().cast_unsigned()));
        let bytes = u32::try_from(words.len() * size_of::<u32>()).unwrap_or(u32::MAX);
        let flags = match events {
            [] => uapi::NO_TRIGGERS,
            _ => uapi::TRIGGERS,
        };
        // As in `IrqSet`.
        words[..header].copy_from_slice(&[bytes, flags, uapi::MSIX, 0, count]);
        // SAFETY: the request reads no more than the buffer, whose size is in its first word.
        unsafe { uapi::call(&self.0, uapi::DEVICE_SET_IRQS, words.as_mut_ptr()) }
            .map_err(failed("VFIO_DEVICE_SET_IRQS"))?;
        Ok(())
    }
}

fn place(region: &Region, offset: u64, length: usize) -> io::Result<u64> {
    let end = u64::try_from(length).ok().and_then(|length| offset.checked_add(length));
    match end {
        Some(end) if region.usable && end <= region.size => Ok(region.offset + offset),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

impl AsFd for Function {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Function> for OwnedFd {
    fn from(function: Function) -> Self {
        function.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_access_leaves_its_region() {
        let region = Region {
            size: 0x100,
            offset: 0x7_0000,
            usable: true,
            mappable: false,
        };
        assert_eq!(place(&region, 0xfc, 4).unwrap(), 0x7_00fc);
        for offset in [0xfd, 0x100, u64::MAX] {
            assert!(place(&region, offset, 4).is_err(), "{offset:#x}");
        }
        assert!(place(&Region::default(), 0, 0).is_err(), "there is none");
    }

    #[test]
    fn a_file_is_no_function() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert!(matches!(Function::from_fd(file.into()), Err(VfioError::Call { .. })));
    }
}
