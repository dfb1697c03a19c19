//! virtio-mem (5.15): a region of guest memory of which blocks are plugged and unplugged while the guest runs. Knows no transport and no
//! machine, and not what plugging means for the host: that is a [`device::MemoryBlocks`].
//!
//! ```text
//!  whoever resizes ── request ──▶ sizes.rs ── configuration change ──▶ guest
//!  guest ── PLUG, UNPLUG ──▶ device.rs ──▶ plugging.rs ──▶ MemoryBlocks
//!                         one thread         bitmap.rs
//! ```
//! A device reset changes no block (5.15.5.2): the guest keeps what it has plugged until it gives it up. Sections cited are those of virtio
//! 1.2.

mod bitmap;
mod device;
mod metrics;
mod plugging;
mod protocol;
mod saved;
mod sizes;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use ::device::{CreateError, DeviceContext, HotplugRegion, MemoryBlocks, MemoryModule, PluggableMemory, parse_config};
use base::ByteSize;
use vmm_api::DeviceSpec;
use vmm_api::devices::{DeviceConfig, MemConfig};

use crate::device::Mem;
use crate::metrics::Metrics;
use crate::plugging::Plugging;
use crate::sizes::{Region, SharedSizes};

/// This kind of device.
pub static MODULE: MemModule = MemModule;

/// Makes virtio-mem devices.
#[derive(Debug)]
pub struct MemModule;

impl MemoryModule for MemModule {
    fn kind(&self) -> &'static str {
        MemConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        context: &DeviceContext<'_>,
        region: HotplugRegion,
        blocks: Box<dyn MemoryBlocks>,
    ) -> Result<PluggableMemory, CreateError> {
        let config: MemConfig = parse_config(spec)?;
        config.check().map_err(|error| CreateError::Value(error.to_string()))?;
        let HotplugRegion { addresses, memory } = region;
        if memory.length != config.max_size().bytes() {
            return Err(CreateError::Value(format!(
                "at most {} of memory are to be plugged, and the machine has {}: give it the device that it was saved with",
                config.max_size(),
                ByteSize(memory.length)
            )));
        }
        let start = addresses.start;
        let region = Region {
            addr: start,
            size: addresses.length,
            max: memory.length,
            block_size: config.block_size.bytes(),
            node_id: config.node_id,
        };
        if !start.is_multiple_of(region.block_size) || start.checked_add(region.size).is_none() {
            return Err(CreateError::Value(format!(
                "hot-pluggable memory cannot begin at {start:#x}: begin at a multiple of {}",
                config.block_size
            )));
        }
        let sizes = Arc::new(SharedSizes::new(region, config.requested_size.bytes()));
        let plugging = Plugging::new(Arc::clone(&sizes), blocks);
        let metrics = Metrics::new(context.metrics, context.id);
        Ok(PluggableMemory {
            device: Box::new(Mem::new(plugging, metrics)),
            resize: sizes,
        })
    }
}
