//! The device as its transport sees it; its thread is in `worker.rs`.

use std::sync::Arc;

use state::Saved;
use virtio::{Activation, ActiveQueue, DeviceError, DeviceWorker, VirtioDevice, take_queue};
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use crate::giving::Giving;
use crate::protocol::{
    DEFLATE, INFLATE, QUEUE_SIZES, REPORTING, VIRTIO_BALLOON_F_MUST_TELL_HOST, VIRTIO_BALLOON_F_PAGE_REPORTING,
};
use crate::saved::BalloonState;
use crate::target::Target;
use crate::worker::{Server, Watch};

/// Of the thread.
pub(crate) const THREAD: &str = "balloon";

/// A virtio-balloon device.
pub(crate) struct Balloon {
    features: u64,
    target: Arc<Target>,
    worker: DeviceWorker<Giving, Server>,
}

impl Balloon {
    pub(crate) fn new(features: u64, target: Arc<Target>, giving: Giving) -> Self {
        Self {
            features,
            target,
            worker: DeviceWorker::Idle(giving),
        }
    }
}

impl VirtioDevice for Balloon {
    fn device_type(&self) -> u16 {
        u16::try_from(VIRTIO_ID_BALLOON).unwrap_or(u16::MAX)
    }

    /// `VIRTIO_BALLOON_F_MUST_TELL_HOST` is offered for functions of the host's alone, as a page is there when it is touched, told or not. Not so
    /// `VIRTIO_BALLOON_F_PAGE_POISON`, as what a page holds next may be a snapshot's: a Linux that poisons free pages reports none then.
    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        match self.features >> VIRTIO_BALLOON_F_PAGE_REPORTING & 1 {
            0 => &QUEUE_SIZES[..usize::from(REPORTING)],
            _ => &QUEUE_SIZES,
        }
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.target.config().read(offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.target.write(offset, data);
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        let inflate = take_queue(&mut activation.queues, INFLATE)?;
        let deflate = take_queue(&mut activation.queues, DEFLATE)?;
        // Only of a driver that has accepted it.
        let report = take_queue(&mut activation.queues, REPORTING).ok();
        let queues: Vec<_> = [inflate, deflate].into_iter().chain(report).collect();
        let watch = Watch::of(&queues)?;
        let (memory, interrupt) = (activation.memory, Arc::clone(&activation.interrupt));
        let tells = activation.features >> VIRTIO_BALLOON_F_MUST_TELL_HOST & 1 == 1;
        let prepare = |mut giving: Giving| {
            giving.begin(tells);
            Server {
                queues,
                memory,
                interrupt,
                giving,
                again: None,
            }
        };
        self.worker
            .start(THREAD, prepare, move |server, stop| server.run(&watch, stop))?;
        self.target.attach(activation.interrupt);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.target.detach();
        let Some(server) = self.worker.stop(THREAD) else {
            return Vec::new();
        };
        self.worker.set_idle(server.giving);
        server.queues
    }

    /// What was in the balloon is the next driver's, or a kernel's that has none: it is mapped before this returns, unless the host refuses,
    /// which the next driver waits for. Whoever resets it may be a vCPU's thread, which must not map memory: one like the device's own does.
    fn reset(&mut self) {
        let DeviceWorker::Idle(giving) = &mut self.worker else {
            return;
        };
        giving.forget();
        if giving.is_settled() {
            return;
        }
        let settle = |giving: &mut Giving| while !giving.is_settled() && giving.settle() {};
        if let Err(error) = self.worker.work(THREAD, settle) {
            log::error!("{THREAD}: what was in it is not mapped before it has a driver again: {error}");
        }
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        match &self.worker {
            DeviceWorker::Idle(_) => Ok(Saved::of(&BalloonState::of(self.target.config(), self.features))?),
            DeviceWorker::Running(_) | DeviceWorker::Lost => Err(DeviceError::Lost),
        }
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let saved: BalloonState = saved.read("balloon")?;
        self.target.set_config(saved.config_for(self.features)?);
        Ok(())
    }
}
