//! The device as it is saved. A machine that has a function of the host's is not saved, and without one there is no domain: what is left is what
//! its driver was told.

use serde::{Deserialize, Serialize};
use state::Schema;
use virtio::DeviceError;

use crate::protocol::{INPUT_RANGE, PAGE, PROBE_SIZE};

/// What its driver has read of the configuration space.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IommuState {
    pub(crate) page_size_mask: u64,
    pub(crate) input_start: u64,
    pub(crate) input_end: u64,
    pub(crate) probe_size: u64,
}

impl Schema for IommuState {
    const KIND: &'static str = "iommu";
    const VERSION: u32 = 1;
}

impl IommuState {
    /// That of this device.
    pub(crate) fn here() -> Self {
        Self {
            page_size_mask: PAGE,
            input_start: *INPUT_RANGE.start(),
            input_end: *INPUT_RANGE.end(),
            probe_size: PROBE_SIZE as u64,
        }
    }

    /// Checks that a driver can go on with this device.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        match *self == Self::here() {
            true => Ok(()),
            false => Err(DeviceError::Unlike(format!("it was an IOMMU like {self:?}"))),
        }
    }
}
