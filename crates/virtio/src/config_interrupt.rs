//! Configuration change interrupts (virtio 1.2, 2.3) of a device that its own side changes: sent now, or when there is a driver again.

use std::sync::Arc;

use crate::QueueInterrupt;

/// The way to a driver, while there is one. Whoever changes the configuration has it under the same lock.
#[derive(Default)]
pub struct ConfigInterrupt {
    driver: Option<Arc<dyn QueueInterrupt>>,
    /// The configuration has changed while there was no driver.
    pending: bool,
}

impl ConfigInterrupt {
    /// The device is active: the driver is told of what has changed meanwhile.
    pub fn attach(&mut self, driver: Arc<dyn QueueInterrupt>) {
        if std::mem::take(&mut self.pending) {
            driver.signal_config();
        }
        self.driver = Some(driver);
    }

    /// The device is not active for now.
    pub fn detach(&mut self) {
        self.driver = None;
    }

    /// The configuration has changed.
    pub fn changed(&mut self) {
        match &self.driver {
            Some(driver) => driver.signal_config(),
            None => self.pending = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Default)]
    struct Driver(AtomicU32);

    impl QueueInterrupt for Driver {
        fn signal_queue(&self, _: u16) {}

        fn signal_config(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_driver_is_told_once_of_what_has_changed_without_it() {
        let driver = Arc::new(Driver::default());
        let told = || driver.0.load(Ordering::Relaxed);
        let mut interrupt = ConfigInterrupt::default();
        interrupt.attach(Arc::clone(&driver) as Arc<dyn QueueInterrupt>);
        assert_eq!(told(), 0, "nothing has changed");
        interrupt.changed();
        assert_eq!(told(), 1);
        interrupt.detach();
        interrupt.changed();
        interrupt.changed();
        assert_eq!(told(), 1);
        interrupt.attach(Arc::clone(&driver) as Arc<dyn QueueInterrupt>);
        interrupt.detach();
        interrupt.attach(Arc::clone(&driver) as Arc<dyn QueueInterrupt>);
        assert_eq!(told(), 2);
    }
}
