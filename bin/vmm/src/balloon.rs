//! The balloon of a VM, if it has one: what its requests say, and what is told of it. Knows no device.

use std::sync::Arc;

use base::ByteSize;
use device::ResizeBalloon;
use machine::Machine;
use vmm_api::devices::BalloonConfig;
use vmm_api::{ApiError, ErrorKind};

use crate::refusal::refuse;

/// Who changes its size.
#[derive(Clone, Default)]
pub(crate) struct Balloon(pub(crate) Option<Arc<dyn ResizeBalloon>>);

impl Balloon {
    fn its(&self) -> Result<&Arc<dyn ResizeBalloon>, ApiError> {
        self.0.as_ref().ok_or_else(|| {
            let message = "the VM has no balloon: make one with a device of kind `balloon`";
            refuse(ErrorKind::WrongState, message)
        })
    }

    /// Whether a guest of so much memory can be asked to do without a part of it.
    pub(crate) fn check(&self, size: ByteSize, memory: ByteSize) -> Result<(), ApiError> {
        self.its()?;
        let asked = BalloonConfig {
            target: size,
            ..BalloonConfig::default()
        };
        asked.check(memory).map_err(|error| refuse(ErrorKind::Invalid, error))
    }

    /// Requests it.
    pub(crate) fn resize(&self, size: ByteSize, memory: ByteSize) -> Result<(), ApiError> {
        self.check(size, memory)?;
        let requested = self.its()?.request(size.bytes());
        requested.map_err(|error| refuse(ErrorKind::Invalid, error))
    }

    /// How it stands, and what of it is mapped for functions of the host's.
    pub(crate) fn info(&self, machine: Option<&Machine>) -> Option<vmm_api::Balloon> {
        let info = self.0.as_ref()?.info();
        let deflation = machine.and_then(Machine::deflation).unwrap_or_default();
        Some(vmm_api::Balloon {
            target: info.target,
            inflated: info.inflated,
            reported: info.reported,
            discarded: info.discarded,
            messages: deflation.counts.messages,
            fell_back: deflation.fell_back,
        })
    }
}
