//! The device as its transport sees it; its thread is in `worker.rs`.

use state::Saved;
use virtio::{Activation, ActiveQueue, DeviceError, DeviceWorker, QueueLoop, VirtioDevice, take_queue};
use virtio_bindings::virtio_ids::VIRTIO_ID_IOMMU;

use crate::domains::Domains;
use crate::protocol::{
    EVENTS, QUEUE_SIZES, REQUESTS, VIRTIO_IOMMU_F_INPUT_RANGE, VIRTIO_IOMMU_F_MAP_UNMAP, VIRTIO_IOMMU_F_PROBE,
    config_space,
};
use crate::saved::IommuState;
use crate::worker::{Server, THREAD};

/// A virtio-iommu device.
pub(crate) struct Iommu {
    worker: DeviceWorker<Domains, Server>,
}

impl Iommu {
    pub(crate) fn new(domains: Domains) -> Self {
        Self {
            worker: DeviceWorker::Idle(domains),
        }
    }
}

impl VirtioDevice for Iommu {
    fn device_type(&self) -> u16 {
        u16::try_from(VIRTIO_ID_IOMMU).unwrap_or(u16::MAX)
    }

    /// Neither `VIRTIO_IOMMU_F_BYPASS` nor `VIRTIO_IOMMU_F_BYPASS_CONFIG` is offered: what is attached to no domain reaches nothing.
    fn features(&self) -> u64 {
        1 << VIRTIO_IOMMU_F_INPUT_RANGE | 1 << VIRTIO_IOMMU_F_MAP_UNMAP | 1 << VIRTIO_IOMMU_F_PROBE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let space = config_space();
        let rest = space.get(offset..).unwrap_or_default();
        for (byte, value) in data.iter_mut().zip(rest) {
            *byte = *value;
        }
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        let queue = take_queue(&mut activation.queues, REQUESTS)?;
        let events = take_queue(&mut activation.queues, EVENTS).ok();
        let queue_loop = QueueLoop::of(&queue)?;
        let (memory, interrupt) = (activation.memory, activation.interrupt);
        let prepare = |domains| Server {
            queue,
            events,
            memory,
            interrupt,
            domains,
        };
        let run = move |server: Box<Server>, stop: &_| server.run(&queue_loop, stop);
        self.worker.start(THREAD, prepare, run)
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(server) = self.worker.stop(THREAD) else {
            return Vec::new();
        };
        self.worker.set_idle(server.domains);
        std::iter::once(server.queue).chain(server.events).collect()
    }

    /// All endpoints are detached (5.13.5.2). Whoever resets it may be a vCPU's thread, which must not unmap memory: one like the device's own
    /// does that, and is waited for.
    fn reset(&mut self) {
        match &self.worker {
            DeviceWorker::Idle(domains) if !domains.is_empty() => (),
            _ => return,
        }
        if let Err(error) = self.worker.work(THREAD, Domains::clear) {
            log::error!("{THREAD}: what its driver has mapped stays so until the next reset: {error}");
        }
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        match &self.worker {
            DeviceWorker::Idle(domains) if domains.is_empty() => Ok(Saved::of(&IommuState::here())?),
            DeviceWorker::Idle(_) => Err(DeviceError::Refused(
                "a function of the host's is attached to it: detach that first".into(),
            )),
            DeviceWorker::Running(_) | DeviceWorker::Lost => Err(DeviceError::Lost),
        }
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let saved: IommuState = saved.read("iommu")?;
        saved.check()
    }
}
