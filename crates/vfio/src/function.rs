//! One PCI function: its regions, its interrupts, its reset.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::interrupts::{self, IntxMask, Irq, IrqInfo};
use crate::uapi::{self, DeviceInfo, IrqQuery};
use crate::{Mapping, Region, VfioError, failed, info};

/// A PCI function that this process has: [`Function`], or [`crate::fake::FakeDevice`] in tests.
pub trait Device: Send + Sync {
    /// The region of BAR `index`, or [`crate::CONFIG_REGION`].
    ///
    /// # Errors
    /// The kernel does not tell.
    fn region(&self, index: u32) -> Result<Region, VfioError>;

    /// Reads registers; the kernel does it as one access where it can.
    ///
    /// # Errors
    /// The access is not within the region, or the function does not answer.
    fn read(&self, region: &Region, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes registers.
    ///
    /// # Errors
    /// As [`Device::read`].
    fn write(&self, region: &Region, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Maps whole pages of a region; `None` where the host does not let it.
    ///
    /// # Errors
    /// The host has no room.
    fn map(&self, region: &Region, offset: u64, length: u64) -> io::Result<Option<Mapping>>;

    /// What interrupts of one kind it has.
    ///
    /// # Errors
    /// The kernel does not tell.
    fn irq_info(&self, irq: Irq) -> Result<IrqInfo, VfioError>;

    /// Turns interrupts of one kind on, so that each signals its event, or off, without any. INTx is masked when it comes, until
    /// [`Device::mask_intx`] unmasks it. Of INTx, MSI and MSI-X one kind is on at a time.
    ///
    /// # Errors
    /// More than there are, or the host has fewer left: [`VfioError::Vectors`] tells how many. Nothing has changed then, but that they are
    /// off if they were on.
    fn set_interrupts(&self, irq: Irq, events: &[BorrowedFd<'_>]) -> Result<(), VfioError>;

    /// Masks or unmasks INTx, which is on.
    ///
    /// # Errors
    /// It is not on.
    fn mask_intx(&self, mask: IntxMask<'_>) -> Result<(), VfioError>;

    /// Whether it can be reset without others (`VFIO_DEVICE_FLAGS_RESET`).
    fn can_reset(&self) -> bool;

    /// Resets it. The kernel puts back what stood in its configuration space, the command register too.
    ///
    /// # Errors
    /// It cannot be, or did not come back in time.
    fn reset(&self) -> Result<(), VfioError>;
}

/// A function of the host's.
#[derive(Debug)]
pub struct Function {
    device: OwnedFd,
    resettable: bool,
}

impl Function {
    /// One that [`crate::host`] has taken, as it was passed on.
    ///
    /// # Errors
    /// The descriptor is no PCI function's.
    pub fn from_fd(device: OwnedFd) -> Result<Self, VfioError> {
        let mut info = DeviceInfo {
            argsz: uapi::size_of::<DeviceInfo>(),
            ..DeviceInfo::default()
        };
        // SAFETY: the request writes no more than the structure, whose size is in it.
        unsafe { uapi::call(&device, uapi::DEVICE_GET_INFO, &raw mut info) }.map_err(failed("VFIO_DEVICE_GET_INFO"))?;
        match info.flags & uapi::DEVICE_FLAGS_PCI {
            0 => Err(VfioError::Other("the device that was given is no PCI function")),
            _ => Ok(Self {
                device,
                resettable: info.flags & uapi::DEVICE_FLAGS_RESET != 0,
            }),
        }
    }

    /// A request about interrupts, as [`interrupts`] has written it. The kernel answers a positive number where it has fewer.
    fn set_irqs(&self, mut words: Vec<u32>) -> Result<i32, VfioError> {
        // SAFETY: the request reads no more than the buffer, whose size is in its first word.
        unsafe { uapi::call(&self.device, uapi::DEVICE_SET_IRQS, words.as_mut_ptr()) }
            .map_err(failed("VFIO_DEVICE_SET_IRQS"))
    }
}

impl Device for Function {
    fn region(&self, index: u32) -> Result<Region, VfioError> {
        let mut head = [0; uapi::REGION_INFO_WORDS];
        head[2] = index;
        let (request, call) = (uapi::DEVICE_GET_REGION_INFO, "VFIO_DEVICE_GET_REGION_INFO");
        info::ask(&self.device, request, call, &head).map(|answer| Region::parse(&answer))
    }

    fn read(&self, region: &Region, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let at = region
            .place(offset, data.len() as u64)
            .ok_or(io::ErrorKind::InvalidInput)?;
        match rustix::io::pread(&self.device, &mut *data, at)? {
            read if read == data.len() => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn write(&self, region: &Region, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = region
            .place(offset, data.len() as u64)
            .ok_or(io::ErrorKind::InvalidInput)?;
        match rustix::io::pwrite(&self.device, data, at)? {
            written if written == data.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn map(&self, region: &Region, offset: u64, length: u64) -> io::Result<Option<Mapping>> {
        let at = region.place(offset, length).ok_or(io::ErrorKind::InvalidInput)?;
        if !region.can_map(offset, length) {
            return Ok(None);
        }
        let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidInput)?;
        Mapping::new(&self.device, at, length).map(Some)
    }

    fn irq_info(&self, irq: Irq) -> Result<IrqInfo, VfioError> {
        let mut info = IrqQuery {
            argsz: uapi::size_of::<IrqQuery>(),
            index: irq as u32,
            ..IrqQuery::default()
        };
        // SAFETY: the request writes no more than the structure, whose size is in it.
        match unsafe { uapi::call(&self.device, uapi::DEVICE_GET_IRQ_INFO, &raw mut info) } {
            Ok(_) => Ok(IrqInfo::new(info.flags, info.count)),
            // So the kernel says that a function which is not PCI Express reports no errors.
            Err(error) if irq == Irq::Err && Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                Ok(IrqInfo::default())
            }
            Err(error) => Err(failed("VFIO_DEVICE_GET_IRQ_INFO")(error)),
        }
    }

    fn set_interrupts(&self, irq: Irq, events: &[BorrowedFd<'_>]) -> Result<(), VfioError> {
        match self.set_irqs(interrupts::triggers(irq, events))? {
            0 => Ok(()),
            available => Err(VfioError::Vectors {
                asked: events.len(),
                available: available.unsigned_abs(),
            }),
        }
    }

    fn mask_intx(&self, mask: IntxMask<'_>) -> Result<(), VfioError> {
        self.set_irqs(interrupts::masking(mask)).map(drop)
    }

    fn can_reset(&self) -> bool {
        self.resettable
    }

    fn reset(&self) -> Result<(), VfioError> {
        // SAFETY: the request takes nothing.
        unsafe { uapi::call::<u8>(&self.device, uapi::DEVICE_RESET, std::ptr::null_mut()) }
            .map_err(failed("VFIO_DEVICE_RESET"))?;
        Ok(())
    }
}

impl AsFd for Function {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl From<Function> for OwnedFd {
    fn from(function: Function) -> Self {
        function.device
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_no_function() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert!(matches!(Function::from_fd(file.into()), Err(VfioError::Call { .. })));
    }
}
