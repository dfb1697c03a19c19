//! Rate limiters of both directions, shared by the device's queue pairs.

use std::sync::Arc;

use ::device::{CreateError, RateLimiter};
use vmm_api::devices::{NetLimits, RateLimit};

/// Both directions, seen from the guest.
#[derive(Clone, Debug)]
pub(crate) struct RateLimiters {
    pub(crate) receive: Option<Arc<RateLimiter>>,
    pub(crate) transmit: Option<Arc<RateLimiter>>,
}

impl RateLimiters {
    /// # Errors
    /// A rate of nothing, which would be a link that is down.
    pub(crate) fn new(limits: &NetLimits) -> Result<Self, CreateError> {
        let limit =
            |rate: &RateLimit, direction| RateLimiter::new(rate.bytes_per_second, rate.packets_per_second, direction);
        Ok(Self {
            receive: limit(&limits.receive, "receive")?,
            transmit: limit(&limits.transmit, "transmit")?,
        })
    }
}
