//! How large the balloon is to be and is, shared by the device and whoever asks for another size. The lock is held for moments only.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::device::{BalloonInfo, CreateError, ResizeBalloon};
use virtio::{ConfigInterrupt, QueueInterrupt};

use crate::metrics::Metrics;
use crate::protocol::{ConfigSpace, PAGE, pages_of};

struct State {
    config: ConfigSpace,
    interrupt: ConfigInterrupt,
}

/// Both sizes.
pub(crate) struct Target {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
}

impl Target {
    pub(crate) fn new(num_pages: u32, metrics: Arc<Metrics>) -> Self {
        let config = ConfigSpace { num_pages, actual: 0 };
        let state = State {
            config,
            interrupt: ConfigInterrupt::default(),
        };
        Self {
            state: Mutex::new(state),
            metrics,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Plain numbers: nothing leaves them half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn config(&self) -> ConfigSpace {
        self.lock().config
    }

    pub(crate) fn set_config(&self, config: ConfigSpace) {
        self.lock().config = config;
    }

    /// The driver writes to the configuration space.
    pub(crate) fn write(&self, offset: usize, data: &[u8]) {
        self.lock().config.write(offset, data);
    }

    /// The device has a driver again, which is told of what has changed meanwhile.
    pub(crate) fn attach(&self, interrupt: Arc<dyn QueueInterrupt>) {
        self.lock().interrupt.attach(interrupt);
    }

    /// The device has none for now.
    pub(crate) fn detach(&self) {
        self.lock().interrupt.detach();
    }
}

impl ResizeBalloon for Target {
    fn info(&self) -> BalloonInfo {
        let ConfigSpace { num_pages, actual } = self.config();
        BalloonInfo {
            target: u64::from(num_pages) * PAGE,
            inflated: u64::from(actual) * PAGE,
            reported: self.metrics.reported.value(),
            discarded: self.metrics.discarded.value(),
        }
    }

    fn request(&self, bytes: u64) -> Result<(), CreateError> {
        let num_pages = pages_of(bytes)?;
        let mut state = self.lock();
        state.config.num_pages = num_pages;
        state.interrupt.changed();
        Ok(())
    }
}
