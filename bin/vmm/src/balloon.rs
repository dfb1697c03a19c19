//! The balloon of a VM, if it has one: what its requests say, and what is told of it. Knows no device.

use std::sync::Arc;

use base::ByteSize;
use device::ResizeBalloon;
use vmm_api::devices::BalloonConfig;
use vmm_api::{ApiError, ErrorKind};

use crate::refusal::refuse;

/// Who changes its size.
#[derive(Clone, Default)]
pub(crate) struct Balloon(pub(crate) Option<Arc<dyn ResizeBalloon>>);

impl Balloon {
    /// Requests that a guest of so much memory does without a part of it.
    pub(crate) fn resize(&self, size: ByteSize, memory: ByteSize) -> Result<(), ApiError> {
        let balloon = self.0.as_ref().ok_or_else(|| {
            let message = "the VM has no balloon: make one with a device of kind `balloon`";
            refuse(ErrorKind::WrongState, message)
        })?;
        let asked = BalloonConfig {
            target: size,
            ..BalloonConfig::default()
        };
        asked.check(memory).map_err(|error| refuse(ErrorKind::Invalid, error))?;
        let requested = balloon.request(size.bytes());
        requested.map_err(|error| refuse(ErrorKind::Invalid, error))
    }

    pub(crate) fn info(&self) -> Option<vmm_api::Balloon> {
        let info = self.0.as_ref()?.info();
        Some(vmm_api::Balloon {
            target: info.target,
            inflated: info.inflated,
            reported: info.reported,
            discarded: info.discarded,
        })
    }
}
