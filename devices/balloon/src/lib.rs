//! virtio-balloon, the traditional one (5.5): a guest gives memory back that it has no use for, because it is asked to (inflate, deflate) or
//! by itself (free page reporting). Knows no transport and no machine, and not what giving back means for the host: that is a
//! [`device::FreePages`].
//!
//! ```text
//!  whoever resizes ── request ──▶ target.rs ── configuration change ──▶ guest
//!  guest ── inflate, deflate, report ──▶ worker.rs ──▶ giving.rs ──▶ FreePages
//!                                        one thread    pages.rs
//! ```
//! What is given back may be used again at any time, told or untold: it is there when it is touched. So there is nothing to do for a deflated
//! page, and no record of which pages are inflated; but for functions of the host's (`dma`), which reach no page that is: then the driver has to
//! tell first, and is answered when they do. Not there: statistics, free page hints, page poisoning. Sections cited are those of virtio
//! 1.2.

mod device;
mod giving;
mod metrics;
mod pages;
mod protocol;
mod saved;
mod target;
mod worker;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use ::device::{BalloonModule, CreateError, DeviceContext, FreePages, parse_config};
use vmm_api::DeviceSpec;
use vmm_api::devices::{BalloonConfig, DeviceConfig};

use crate::device::Balloon;
use crate::giving::Giving;
use crate::metrics::Metrics;
use crate::protocol::{
    VIRTIO_BALLOON_F_DEFLATE_ON_OOM, VIRTIO_BALLOON_F_MUST_TELL_HOST, VIRTIO_BALLOON_F_PAGE_REPORTING, pages_of,
};
use crate::target::Target;

/// This kind of device.
pub static MODULE: Module = Module;

/// Makes virtio-balloon devices.
#[derive(Debug)]
pub struct Module;

impl BalloonModule for Module {
    fn kind(&self) -> &'static str {
        BalloonConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        context: &DeviceContext<'_>,
        pages: Box<dyn FreePages>,
    ) -> Result<::device::Balloon, CreateError> {
        let config: BalloonConfig = parse_config(spec)?;
        let tells = config.dma.is_some();
        let features = u64::from(config.deflate_on_oom && !tells) << VIRTIO_BALLOON_F_DEFLATE_ON_OOM
            | u64::from(tells) << VIRTIO_BALLOON_F_MUST_TELL_HOST
            | u64::from(config.free_page_reporting) << VIRTIO_BALLOON_F_PAGE_REPORTING;
        let metrics = Arc::new(Metrics::new(context.metrics, context.id));
        let target = Arc::new(Target::new(pages_of(config.target.bytes())?, Arc::clone(&metrics)));
        let giving = Giving::new(pages, metrics);
        Ok(::device::Balloon {
            device: Box::new(Balloon::new(features, Arc::clone(&target), giving)),
            resize: target,
        })
    }
}
