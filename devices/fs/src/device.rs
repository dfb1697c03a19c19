//! The device: what the driver sees of it, and its workers.

use std::sync::Arc;

use base::Worker;
use fuse::Answer;
use observe::RateLimit;
use virtio::{Activation, ActiveQueue, DeviceError, Rounds, VirtioDevice};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;

use crate::worker::Serving;
use crate::{Metrics, TAG};

/// The queue of requests that must not wait behind others (5.11.2), and the one of all others. Linux takes as many pages
/// a request as the queue has entries, less four.
const QUEUE_SIZES: [u16; 2] = [128, 256];

/// `num_request_queues` (5.11.4), behind the tag.
const REQUEST_QUEUES: u32 = 1;

/// A virtio-fs device.
pub(crate) struct Fs {
    config: [u8; TAG + 4],
    server: Arc<dyn Answer>,
    metrics: Metrics,
    // Outlives activations, or a guest could have a line with each reset.
    complaints: Arc<RateLimit>,
    workers: Vec<Worker<Serving>>,
}

impl Fs {
    pub(crate) fn new(tag: [u8; TAG], server: Arc<dyn Answer>, metrics: Metrics, complaints: Arc<RateLimit>) -> Self {
        let mut config = [0; TAG + 4];
        config[..TAG].copy_from_slice(&tag);
        config[TAG..].copy_from_slice(&REQUEST_QUEUES.to_le_bytes());
        Self {
            config,
            server,
            metrics,
            complaints,
            workers: Vec::new(),
        }
    }

    fn start(&mut self, activation: Activation) -> Result<(), DeviceError> {
        for queue in 0..QUEUE_SIZES.len() {
            if !activation.queues.iter().any(|other| usize::from(other.index) == queue) {
                return Err(DeviceError::MissingQueue(u16::try_from(queue).unwrap_or(u16::MAX)));
            }
        }
        for queue in activation.queues {
            let name = format!("fs-q{}", queue.index);
            let rounds = Rounds::of(&queue)?;
            let serving = Serving {
                queue,
                memory: Arc::clone(&activation.memory),
                interrupt: Arc::clone(&activation.interrupt),
                server: Arc::clone(&self.server),
                metrics: self.metrics.clone(),
                complaints: Arc::clone(&self.complaints),
            };
            let worker = Worker::spawn(&name, serving, move |serving, stop| serving.run(&rounds, stop))?;
            self.workers.push(worker);
        }
        Ok(())
    }
}

impl VirtioDevice for Fs {
    fn device_type(&self) -> u16 {
        u16::try_from(VIRTIO_ID_FS).unwrap_or(u16::MAX)
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let end = offset.saturating_add(data.len()).min(self.config.len());
        if let Some(source) = self.config.get(offset..end) {
            data[..source.len()].copy_from_slice(source);
        }
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let started = self.start(activation);
        if started.is_err() {
            drop(self.deactivate());
        }
        started
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let mut queues = Vec::new();
        for worker in std::mem::take(&mut self.workers) {
            match worker.stop() {
                Some(serving) => queues.push(serving.queue),
                None => log::error!("fs: a queue was lost with its worker"),
            }
        }
        queues
    }
}
