//! A device around a device that watches what it does with its queues.

use std::sync::{Arc, Mutex, PoisonError};

use virtio_queue::QueueT;

use crate::device::{Activation, ActiveQueue, DeviceError, VirtioDevice};

/// What was seen so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Log(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
struct Seen {
    lent: Option<Vec<u16>>,
    stops: usize,
    faults: Vec<String>,
}

impl Log {
    /// The first fault, if any.
    pub(super) fn verdict(&self) -> Result<(), String> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match seen.faults.first() {
            Some(fault) => Err(fault.clone()),
            None => Ok(()),
        }
    }

    /// How often queues came back.
    pub(super) fn stops(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).stops
    }

    fn started(&self, queues: Vec<u16>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).lent = Some(queues);
    }

    fn stopped(&self, queues: &[ActiveQueue]) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.stops += 1;
        let back: Vec<u16> = queues.iter().map(|queue| queue.index).collect();
        let lent = seen.lent.take().unwrap_or_default();
        if back != lent {
            seen.faults
                .push(format!("it was lent queues {lent:?} and gave back {back:?}"));
        }
        for queue in queues {
            let (taken, used) = (queue.queue.next_avail(), queue.queue.next_used());
            if taken != used {
                let index = queue.index;
                seen.faults.push(format!(
                    "queue {index}: {taken} buffers were taken and {used} used when it stopped"
                ));
            }
        }
    }
}

pub(super) struct Observer {
    device: Box<dyn VirtioDevice>,
    log: Log,
}

impl Observer {
    pub(super) fn new(device: Box<dyn VirtioDevice>) -> (Self, Log) {
        let log = Log::default();
        let observer = Self {
            device,
            log: log.clone(),
        };
        (observer, log)
    }
}

impl VirtioDevice for Observer {
    fn device_type(&self) -> u16 {
        self.device.device_type()
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.device.queue_sizes()
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.device.read_config(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.device.write_config(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let queues = activation.queues.iter().map(|queue| queue.index).collect();
        self.device.activate(activation)?;
        self.log.started(queues);
        Ok(())
    }

    fn discard(&mut self) {
        self.device.discard();
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let queues = self.device.deactivate();
        self.log.stopped(&queues);
        queues
    }

    fn reset(&mut self) {
        self.device.reset();
    }

    fn save(&self) -> Result<state::Saved, DeviceError> {
        self.device.save()
    }

    fn restore(&mut self, saved: &state::Saved) -> Result<(), DeviceError> {
        self.device.restore(saved)
    }
}
