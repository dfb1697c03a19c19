//! Guests that own their CPUs: the engine of a reservation of basalt.ko. The rest of this program has it as any other engine (ARCHITECTURE.md,
//! "Guests that own their CPUs").

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use engine::Engine;
use engine_bare::BareEngine;
use vmm_api::{ApiError, ErrorKind};

use crate::refusal::refuse;

/// The engine of CPUs that Linux has given up, whose guests' devices busy-poll for as long as this, or as the engine thinks.
pub(crate) fn engine(reservation: OwnedFd, busy_poll_us: Option<u32>) -> Result<Arc<dyn Engine>, ApiError> {
    let engine = BareEngine::from_fd(reservation).map_err(|error| refuse(ErrorKind::Host, error))?;
    Ok(match busy_poll_us {
        Some(microseconds) => Arc::new(engine.busy_polling(Duration::from_micros(microseconds.into()))),
        None => Arc::new(engine),
    })
}
