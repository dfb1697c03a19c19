//! Rate limits of both directions, shared by the device's queue pairs.

use std::sync::Arc;

use ::device::{CreateError, Limit};
use vmm_api::devices::{NetLimits, RateLimit};

/// Both directions, seen from the guest.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) receive: Option<Arc<Limit>>,
    pub(crate) transmit: Option<Arc<Limit>>,
}

impl Limits {
    /// # Errors
    /// A rate of nothing, which would be a link that is down.
    pub(crate) fn new(limits: &NetLimits) -> Result<Self, CreateError> {
        let limit = |rate: &RateLimit, direction| Limit::new(rate.bytes_per_second, rate.packets_per_second, direction);
        Ok(Self {
            receive: limit(&limits.receive, "receive")?,
            transmit: limit(&limits.transmit, "transmit")?,
        })
    }
}
