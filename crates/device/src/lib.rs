//! How a device is described, created and lives. Knows no concrete device and no machine.
#![allow(
    unsafe_code,
    reason = "functions of the host's are told of a guest's memory; the block says what that relies on"
)]

mod dma;
mod free_pages;
mod memory_blocks;
mod persistent_memory;
mod rate_limiter;
mod space;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use base::EventFd;
use engine::Vm;
use observe::Registry;
use pci::PciFunction;
use serde::de::DeserializeOwned;
use virtio::VirtioDevice;
use vmm_api::{DeviceSpec, FdRef};

pub use dma::{
    Ahead, BalloonedDma, DeflateCounts, DmaMemory, DmaSpace, DmaSpaces, EndpointDma, EndpointError, Endpoints,
    GuestDma, KnownBy, MAX_MAPPINGS, MapCounts, MapTuning, PlugCounts, PluggableDma, Reach, Taken,
};
pub use free_pages::{Balloon, BalloonInfo, BalloonModule, Discard, FreePages, GuestPages, ResizeBalloon};
pub use memory_blocks::{HotplugRegion, MemoryBlocks, MemoryModule, PluggableMemory, PluggableSizes, ResizeMemory};
pub use persistent_memory::{PersistentMemory, PmemModule};
pub use rate_limiter::RateLimiter;
pub use space::{SpaceAlarm, is_no_space};
pub use vfio::{DmaAccess, MSI_WINDOW};

/// The descriptors that came with a request. Each is taken at most once.
#[derive(Debug, Default)]
pub struct FdTable(Vec<Option<OwnedFd>>);

impl FdTable {
    /// A table in the order of arrival.
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }

    /// Takes one out.
    ///
    /// # Errors
    /// It never came or was taken.
    pub fn take(&mut self, reference: FdRef) -> Result<OwnedFd, CreateError> {
        let slot = usize::try_from(reference.0)
            .ok()
            .and_then(|index| self.0.get_mut(index));
        slot.and_then(Option::take).ok_or(CreateError::MissingFd(reference.0))
    }

    /// One that has not been taken.
    pub fn peek(&self, reference: FdRef) -> Option<BorrowedFd<'_>> {
        let index = usize::try_from(reference.0).ok()?;
        self.0.get(index)?.as_ref().map(AsFd::as_fd)
    }

    /// Takes one out if it is referred to at all.
    ///
    /// # Errors
    /// As [`FdTable::take`].
    pub fn take_optional(&mut self, reference: Option<FdRef>) -> Result<Option<OwnedFd>, CreateError> {
        reference.map(|reference| self.take(reference)).transpose()
    }

    /// How many nobody has taken.
    pub fn left_over(&self) -> usize {
        self.0.iter().flatten().count()
    }
}

/// Why a device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The configuration does not fit the kind.
    #[error("the configuration is not understood: {0}")]
    Config(String),
    /// A value is out of range.
    #[error("{0}")]
    Value(String),
    /// A descriptor did not come along.
    #[error("file descriptor {0} did not come with the request, or is used twice")]
    MissingFd(u32),
    /// The host refused a resource.
    #[error("{what}: {source}")]
    Host {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
}

/// What the machine offers a device that is being made.
#[derive(Debug)]
pub struct DeviceContext<'a> {
    /// The device's name within the VM; the label of its metrics.
    pub id: &'a str,
    /// Where it registers its metrics.
    pub metrics: &'a Registry,
    /// Where it tells that the host has no space left for what the guest writes.
    pub no_space: &'a SpaceAlarm,
}

/// One kind of device. Its crate exports one value of this.
pub trait DeviceModule: Sync {
    /// The kind's name in [`DeviceSpec::kind`].
    fn kind(&self) -> &'static str;

    /// Makes a device. It takes its descriptors out of `fds` and starts no thread before it is activated.
    ///
    /// # Errors
    /// The configuration or the descriptors do not fit.
    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        context: &DeviceContext<'_>,
    ) -> Result<Box<dyn VirtioDevice>, CreateError>;
}

/// The interrupt pin of a function's slot (INTA#; PCI 3.0, 2.2.6), as a line to the guest's interrupt controller: a level, which a driver of the
/// host's tells by events (VFIO's INTx). What the function signals asserts it, until the guest has ended the interrupt; then the driver is
/// asked, and says again if the function still wants something.
pub trait InterruptPin: Send + Sync {
    /// Each signal asserts the line, while that is on.
    fn asserts(&self) -> &EventFd;

    /// Signalled when the guest has ended an interrupt of the line, which is not asserted any more then.
    fn ended(&self) -> &EventFd;

    /// Turns it on or off. It is not asserted afterwards, and what has been signalled before is forgotten.
    fn switch(&self, on: bool);
}

/// A function of the host's PCI bus that the guest is to have: put on the guest's bus when there is a VM, and its memory is mapped.
pub trait HostFunction: Send {
    /// What it reaches of memory, as all functions of the VM do.
    fn space(&self) -> Arc<DmaSpace>;

    /// Gives it interrupts of the VM's; the pin is off, and none is given where the VM has no levels. What it keeps until it is closed is that by
    /// which its space has what it is to reach.
    ///
    /// # Errors
    /// The host or the engine refuses, or it interrupts by its pin alone and has none.
    fn plug(
        self: Box<Self>,
        vm: &Arc<dyn Vm>,
        pin: Option<Arc<dyn InterruptPin>>,
        reach: Reach,
    ) -> Result<Arc<dyn PciFunction>, CreateError>;
}

/// One kind of devices by which a guest says what functions of the host's reach of its memory. Its crate exports one value of this.
pub trait IommuModule: Sync {
    /// The kind's name in [`DeviceSpec::kind`].
    fn kind(&self) -> &'static str;

    /// Makes a device, for functions that come and go among `endpoints`. It starts no thread before it is activated.
    ///
    /// # Errors
    /// The configuration makes no sense.
    fn create(
        &self,
        spec: &DeviceSpec,
        context: &DeviceContext<'_>,
        endpoints: Endpoints,
    ) -> Result<Box<dyn VirtioDevice>, CreateError>;
}

/// One kind of such functions. Its crate exports one value of this.
pub trait FunctionModule: Sync {
    /// The kind's name in [`DeviceSpec::kind`].
    fn kind(&self) -> &'static str;

    /// Takes its descriptors out of `fds`, and the VM's address space from `spaces`.
    ///
    /// # Errors
    /// The configuration or the descriptors do not fit.
    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        spaces: &mut DmaSpaces,
    ) -> Result<Box<dyn HostFunction>, CreateError>;
}

/// Reads a device's own configuration out of its spec.
///
/// # Errors
/// A field is missing, unknown or of the wrong type; the message names it.
pub fn parse_config<C: DeserializeOwned>(spec: &DeviceSpec) -> Result<C, CreateError> {
    serde_json::from_value(spec.config.clone()).map_err(|error| CreateError::Config(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_taken_once() {
        let fd = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let mut table = FdTable::new(vec![fd]);
        assert_eq!(table.left_over(), 1);
        assert!(table.peek(FdRef(0)).is_some() && table.peek(FdRef(1)).is_none());
        table.take(FdRef(0)).unwrap();
        assert!(matches!(table.take(FdRef(0)), Err(CreateError::MissingFd(0))));
        assert!(matches!(table.take(FdRef(1)), Err(CreateError::MissingFd(1))));
        assert!(table.take_optional(None).unwrap().is_none());
    }

    #[test]
    fn unknown_fields_are_named() {
        let spec = DeviceSpec {
            id: "r".into(),
            kind: "rng".into(),
            config: serde_json::json!({"speed": 9}),
        };
        let error = parse_config::<vmm_api::devices::RngConfig>(&spec).unwrap_err();
        assert!(error.to_string().contains("speed"), "{error}");
    }
}
