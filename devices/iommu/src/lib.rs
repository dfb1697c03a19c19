//! virtio-iommu (virtio 1.3, 5.13): a guest's driver maps for each function of the host's what of the guest's memory that may reach. Knows no
//! transport and no machine, and not what a mapping is for the host: that is a [`device::EndpointDma`].
//!
//! ```text
//!  guest ── ATTACH, DETACH, MAP, UNMAP, PROBE ──▶ worker.rs ──▶ requests.rs ──▶ domains.rs ──▶ EndpointDma, one a function
//!                                                 one thread    protocol.rs
//! ```
//! A function that is attached to no domain reaches nothing: bypassing the device is not offered, nor is mapping registers of functions
//! (`VIRTIO_IOMMU_F_MMIO`). Faults are not told: the host does not tell whoever has a function of them. Sections cited are those of virtio 1.3.

mod device;
mod domains;
mod metrics;
mod protocol;
mod requests;
mod saved;
mod worker;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use ::device::{CreateError, DeviceContext, Endpoints, IommuModule, parse_config};
use virtio::VirtioDevice;
use vmm_api::DeviceSpec;
use vmm_api::devices::{DeviceConfig, IommuConfig};

use crate::device::Iommu;
use crate::domains::Domains;
use crate::metrics::Metrics;

/// This kind of device.
pub static MODULE: Module = Module;

/// Makes virtio-iommu devices.
#[derive(Debug)]
pub struct Module;

impl IommuModule for Module {
    fn kind(&self) -> &'static str {
        IommuConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        context: &DeviceContext<'_>,
        endpoints: Endpoints,
    ) -> Result<Box<dyn VirtioDevice>, CreateError> {
        let IommuConfig {} = parse_config(spec)?;
        let metrics = Arc::new(Metrics::new(context.metrics, context.id));
        Ok(Box::new(Iommu::new(Domains::new(endpoints, metrics))))
    }
}
