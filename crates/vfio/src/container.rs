//! Whose memory functions reach.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::uapi::{self, DmaMap};
use crate::{VfioError, failed};

/// A container with an IOMMU: what is mapped here is all that its functions reach.
#[derive(Debug)]
pub struct Container(OwnedFd);

impl Container {
    /// One that [`crate::host::take`] has made, as it was passed on.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Lets the functions read and write memory of this process: `length` bytes from `address` on, which they see at `guest`. The
    /// kernel pins it, and counts it as locked.
    ///
    /// # Errors
    /// The addresses are no multiples of a page, the limit of locked memory is too small, or something is mapped there.
    ///
    /// # Safety
    /// The memory is mapped for as long as there are copies of this descriptor or of one of its functions, and whoever uses it expects
    /// that it changes.
    pub unsafe fn map(&self, guest: u64, address: u64, length: u64) -> Result<(), VfioError> {
        let mut map = DmaMap {
            argsz: uapi::size_of::<DmaMap>(),
            flags: uapi::DMA_READ_WRITE,
            address,
            iova: guest,
            size: length,
        };
        // SAFETY: the request reads this structure; the rest is the caller's.
        unsafe { uapi::call(&self.0, uapi::IOMMU_MAP_DMA, &raw mut map) }.map_err(failed("VFIO_IOMMU_MAP_DMA"))?;
        Ok(())
    }
}

impl AsFd for Container {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Container> for OwnedFd {
    fn from(container: Container) -> Self {
        container.0
    }
}
