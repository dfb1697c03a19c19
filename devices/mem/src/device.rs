//! The device: what the driver sees of it, and its thread, which carries one request out after the other. A request takes as long as the
//! host needs to make memory ready or to take it back, and so does the pause of a device that is at it.

use std::io::Write;
use std::sync::Arc;

use base::StopSignal;
use memory::GuestRam;
use state::Saved;
use virtio::{
    Activation, ActiveQueue, Chain, DeviceError, DeviceWorker, QueueInterrupt, QueueLoop, RingError, VirtioDevice,
    take_queue,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_MEM;

use crate::metrics::Metrics;
use crate::plugging::Plugging;
use crate::protocol::{RESPONSE_BYTES, Request, VIRTIO_MEM_F_ACPI_PXM, VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE};
use crate::saved::MemState;
use crate::sizes::SharedSizes;

/// The guest-request queue (5.15.2); Linux has one request in flight at a time.
const QUEUE_SIZES: [u16; 1] = [64];

/// Of the thread.
const THREAD: &str = "mem";

/// A virtio-mem device.
pub(crate) struct Mem {
    sizes: Arc<SharedSizes>,
    metrics: Arc<Metrics>,
    worker: DeviceWorker<Plugging, Server>,
}

impl Mem {
    pub(crate) fn new(plugging: Plugging, metrics: Metrics) -> Self {
        Self {
            sizes: Arc::clone(&plugging.sizes),
            metrics: Arc::new(metrics),
            worker: DeviceWorker::Idle(plugging),
        }
    }
}

impl VirtioDevice for Mem {
    fn device_type(&self) -> u16 {
        u16::try_from(VIRTIO_ID_MEM).unwrap_or(u16::MAX)
    }

    /// `VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE` is offered, as a block that is not plugged may hold anything and cost the host memory when it is
    /// read, and not demanded: without it the driver may read such blocks, and can.
    fn features(&self) -> u64 {
        let has_node = u64::from(self.sizes.region().node_id.is_some());
        1 << VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE | has_node << VIRTIO_MEM_F_ACPI_PXM
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.sizes.config().read(offset, data);
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        let queue = take_queue(&mut activation.queues, 0)?;
        let queue_loop = QueueLoop::of(&queue)?;
        let (memory, interrupt) = (activation.memory, Arc::clone(&activation.interrupt));
        let metrics = Arc::clone(&self.metrics);
        let prepare = |plugging| Server {
            queue,
            memory,
            interrupt,
            metrics,
            plugging,
        };
        self.worker
            .start(THREAD, prepare, move |server, stop| server.run(&queue_loop, stop))?;
        self.sizes.attach(activation.interrupt);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.sizes.detach();
        let Some(server) = self.worker.stop(THREAD) else {
            return Vec::new();
        };
        self.worker.set_idle(server.plugging);
        vec![server.queue]
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        match &self.worker {
            DeviceWorker::Idle(plugging) => Ok(Saved::of(&plugging.save())?),
            DeviceWorker::Running(_) | DeviceWorker::Lost => Err(DeviceError::Lost),
        }
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let saved: MemState = saved.read("mem")?;
        match &mut self.worker {
            DeviceWorker::Idle(plugging) => plugging.restore(saved),
            DeviceWorker::Running(_) | DeviceWorker::Lost => Err(DeviceError::Lost),
        }
    }
}

/// What the thread owns.
struct Server {
    queue: ActiveQueue,
    memory: Arc<GuestRam>,
    interrupt: Arc<dyn QueueInterrupt>,
    metrics: Arc<Metrics>,
    plugging: Plugging,
}

impl Server {
    /// Serves requests until it is stopped. Nothing is under way between two of them.
    fn run(mut self: Box<Self>, queue_loop: &QueueLoop, stop: &StopSignal) -> Box<Self> {
        let metrics = Arc::clone(&self.metrics);
        queue_loop.serve(THREAD, stop, &metrics.log_limit, || self.serve());
        self
    }

    /// Serves one request, so that a stop waits for no more than that. Tells whether there are more.
    fn serve(&mut self) -> Result<bool, RingError> {
        let memory = Arc::clone(&self.memory);
        self.queue.disable_kicks(&memory)?;
        if let Some(available) = self.queue.take(&memory)? {
            let (head, written) = match available.check() {
                Ok(chain) => (chain.head(), self.answer(&memory, &chain)),
                Err(bad) => (bad.head, None),
            };
            if written.is_none() {
                self.metrics.refused.increment();
            }
            self.queue.complete(&memory, head, written.unwrap_or(0))?;
            self.queue.notify(&memory, self.interrupt.as_ref())?;
        }
        self.queue.enable_kicks_unless_polling(&memory)
    }

    /// Carries a request out and writes the answer; `None`, and nothing done, if the chain has no room for either.
    fn answer(&mut self, memory: &GuestRam, chain: &Chain<'_>) -> Option<u32> {
        let request = Request::read(&mut chain.reader())?;
        if chain.writable_bytes() < RESPONSE_BYTES {
            return None;
        }
        let response = self.plugging.answer(memory, &request, &self.metrics.log_limit);
        self.metrics.count(&request, response);
        let mut writer = chain.writer();
        // There is room.
        writer.write_all(&response.bytes()).ok()?;
        u32::try_from(writer.position()).ok()
    }
}
