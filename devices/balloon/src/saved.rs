//! The device as it is saved. Which pages are inflated is no part of it: the guest knows, and its memory has them as they are.

use serde::{Deserialize, Serialize};
use state::Schema;
use virtio::DeviceError;

use crate::protocol::ConfigSpace;

/// How large the balloon is to be and is, in pages of 4 KiB, and which features were offered: the driver has accepted no others.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BalloonState {
    pub(crate) num_pages: u32,
    pub(crate) actual: u32,
    pub(crate) features: u64,
}

impl Schema for BalloonState {
    const KIND: &'static str = "balloon";
    const VERSION: u32 = 1;
}

impl BalloonState {
    pub(crate) fn of(config: ConfigSpace, features: u64) -> Self {
        Self {
            num_pages: config.num_pages,
            actual: config.actual,
            features,
        }
    }

    /// What it says of the configuration space, for a device that offers these features.
    pub(crate) fn config_for(&self, features: u64) -> Result<ConfigSpace, DeviceError> {
        if self.features != features {
            return Err(DeviceError::Unlike(format!(
                "it was a balloon with the features {:#x}, and this one has {features:#x}",
                self.features
            )));
        }
        Ok(ConfigSpace {
            num_pages: self.num_pages,
            actual: self.actual,
        })
    }
}
