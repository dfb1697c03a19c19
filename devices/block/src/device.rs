//! The device: what the driver sees of it, and its workers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ::device::SpaceAlarm;
use base::{StopSignal, Worker};
use serde::{Deserialize, Serialize};
use state::{Saved, Schema};
use virtio::{Activation, ActiveQueue, DeviceError, VirtioDevice};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use crate::config::{self, ConfigSpace, QUEUE_SIZE};
use crate::disk::{Disk, SERIAL_BYTES};
use crate::metrics::Metrics;
use crate::server::Server;
use crate::threads::{PoolWaiting, threads_per_queue};
use crate::throttle::RateLimiters;
use crate::uring::{self, Ring};

/// How requests reach the file.
pub(crate) enum Engine {
    /// Threads, made at each activation.
    Threads,
    /// One ring a queue, made once; lent to its worker while there is one.
    Uring(Vec<Option<Ring>>),
}

/// The alarm of the VM, and which disk raises it.
#[derive(Clone, Debug)]
pub(crate) struct NoSpace {
    alarm: SpaceAlarm,
    id: String,
}

impl NoSpace {
    pub(crate) fn new(alarm: &SpaceAlarm, id: &str) -> Self {
        Self {
            alarm: alarm.clone(),
            id: id.to_owned(),
        }
    }

    pub(crate) fn raise(&self) {
        self.alarm.raise(&self.id);
    }
}

/// What is saved: nothing is under way while the device is paused, and the rest is configuration.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlockState {
    /// What the guest knows the disk by.
    pub(crate) serial: [u8; SERIAL_BYTES],
}

impl Schema for BlockState {
    const KIND: &'static str = "block";
    const VERSION: u32 = 1;
}

/// A virtio-block device.
pub(crate) struct Block {
    disk: Arc<Disk>,
    engine: Engine,
    limits: RateLimiters,
    no_space: NoSpace,
    /// Requests that wait for a rate limiter when the workers stop are not done any more.
    discards: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
    features: u64,
    config: ConfigSpace,
    queue_sizes: Vec<u16>,
    workers: Vec<Worker<Server>>,
}

impl Block {
    pub(crate) fn new(
        disk: Disk,
        engine: Engine,
        queues: u16,
        (limits, no_space): (RateLimiters, NoSpace),
        metrics: Metrics,
    ) -> Self {
        Self {
            features: config::features(&disk, queues),
            config: ConfigSpace::new(&disk, queues),
            disk: Arc::new(disk),
            engine,
            limits,
            no_space,
            discards: Arc::default(),
            metrics: Arc::new(metrics),
            queue_sizes: vec![QUEUE_SIZE; usize::from(queues)],
            workers: Vec::new(),
        }
    }

    fn start(&mut self, server: Server) -> io::Result<Worker<Server>> {
        let index = usize::from(server.queue.index);
        let name = format!("block-q{index}");
        match &mut self.engine {
            Engine::Threads => {
                let waiting = PoolWaiting::new(&server.queue.kick)?;
                let threads = threads_per_queue(self.queue_sizes.len());
                Worker::spawn(&name, server, move |server, stop: &StopSignal| {
                    server.run_threads(waiting, threads, stop)
                })
            }
            Engine::Uring(rings) => {
                let lost = || io::Error::other("the queue's io_uring was lost with its worker");
                let slot = rings.get_mut(index).ok_or_else(lost)?;
                let waiting = uring::waiting(slot.as_ref().ok_or_else(lost)?, &server.queue.kick)?;
                let ring = slot.take().ok_or_else(lost)?;
                Worker::spawn(&name, server, move |server, stop| server.run_uring(ring, waiting, stop))
            }
        }
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u16 {
        u16::try_from(VIRTIO_ID_BLOCK).unwrap_or(u16::MAX)
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        if activation.queues.first().is_none_or(|queue| queue.index != 0) {
            return Err(DeviceError::MissingQueue(0));
        }
        self.discards.store(false, Ordering::Release);
        let has_flush = activation.features & (1 << VIRTIO_BLK_F_FLUSH) != 0;
        for queue in activation.queues {
            let server = Server {
                queue,
                ring: None,
                memory: Arc::clone(&activation.memory),
                interrupt: Arc::clone(&activation.interrupt),
                disk: Arc::clone(&self.disk),
                metrics: Arc::clone(&self.metrics),
                limits: self.limits.clone(),
                no_space: self.no_space.clone(),
                discards: Arc::clone(&self.discards),
                durable: !has_flush,
            };
            match self.start(server) {
                Ok(worker) => self.workers.push(worker),
                Err(error) => {
                    // The rings of those that run come back.
                    drop(self.deactivate());
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    fn discard(&mut self) {
        self.discards.store(true, Ordering::Release);
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let mut queues = Vec::new();
        for worker in std::mem::take(&mut self.workers) {
            let Some(server) = worker.stop() else {
                log::error!("block: a queue was lost with its worker");
                continue;
            };
            if let Engine::Uring(rings) = &mut self.engine
                && let Some(slot) = rings.get_mut(usize::from(server.queue.index))
            {
                *slot = server.ring;
            }
            queues.push(server.queue);
        }
        queues
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        let serial = *self.disk.serial();
        Ok(Saved::of(&BlockState { serial })?)
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let BlockState { serial } = saved.read("block")?;
        if serial != *self.disk.serial() {
            return Err(DeviceError::Unlike("the disk had another serial number".to_owned()));
        }
        Ok(())
    }
}
