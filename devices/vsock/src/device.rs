//! The device as its transport sees it.
//!
//! ```text
//!  Idle(switch) ── activate ──▶ Working(thread) ── deactivate ──▶ Idle(switch)
//! ```
//! The transport deactivates for a pause and for a reset alike. Connections outlive both; the next activation tells
//! which it was: after a pause the queues come back exactly as they were given, and all goes on. Other queues belong to
//! a driver that starts anew, and what the one before it had opened is closed. (Queues that come back untouched after a
//! reset have never carried a packet, so there was nothing to close.)

use std::sync::Arc;

use observe::RateLimit;
use virtio::virtio_queue::QueueState;
use virtio::{Activation, ActiveQueue, DeviceError, VirtioDevice};

use base::Worker;

use crate::ring::Ring;
use crate::switch::Switch;
use crate::worker::{self, Running};

/// The device id (5.10.1).
const DEVICE_TYPE: u16 = 19;

/// `VIRTIO_VSOCK_F_STREAM` (5.10.3).
const F_STREAM: u64 = 1 << 0;

/// 5.10.2.
const RX: u16 = 0;
const TX: u16 = 1;

/// A Linux driver fills the whole receive queue with buffers of 4 KiB: 128 cost the guest half a megabyte. Of the event
/// queue it uses eight; the device has no events to send.
const QUEUE_SIZES: [u16; 3] = [128, 128, 16];

/// A vsock device.
#[derive(Debug)]
pub struct Vsock {
    cid: u32,
    state: State,
    /// The queues as they were given back.
    given: Vec<QueueState>,
    /// The event queue, which the device does not use.
    event: Vec<ActiveQueue>,
    /// Of rings that make no sense.
    complaints: Arc<RateLimit>,
}

enum State {
    Idle(Box<Switch>),
    Working(Worker<Box<Running>>),
    /// The thread could not be started, and what it was to own is gone.
    Lost,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Idle(_) => "Idle",
            Self::Working(_) => "Working",
            Self::Lost => "Lost",
        })
    }
}

impl Vsock {
    /// A device for the guest `cid`.
    pub(crate) fn new(cid: u32, switch: Switch) -> Self {
        Self {
            cid,
            state: State::Idle(Box::new(switch)),
            given: Vec::new(),
            event: Vec::new(),
            complaints: Arc::new(RateLimit::new(2)),
        }
    }
}

fn take_queue(queues: &mut Vec<ActiveQueue>, index: u16) -> Result<ActiveQueue, DeviceError> {
    let place = queues.iter().position(|queue| queue.index == index);
    place
        .map(|place| queues.remove(place))
        .ok_or(DeviceError::MissingQueue(index))
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u16 {
        DEVICE_TYPE
    }

    fn features(&self) -> u64 {
        F_STREAM
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        // 5.10.4: guest_cid, le64, and nothing else.
        let config = u64::from(self.cid).to_le_bytes();
        for (byte, value) in data.iter_mut().zip(config.iter().skip(offset)) {
            *byte = *value;
        }
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let mut queues = activation.queues;
        let states: Vec<QueueState> = queues.iter().map(|queue| queue.queue.state()).collect();
        let rx = Ring::new(take_queue(&mut queues, RX)?, Arc::clone(&self.complaints));
        let tx = Ring::new(take_queue(&mut queues, TX)?, Arc::clone(&self.complaints));
        let State::Idle(mut switch) = std::mem::replace(&mut self.state, State::Lost) else {
            let lost = "it was activated twice, or has lost its thread";
            return Err(DeviceError::Host(std::io::Error::other(lost)));
        };
        if states != self.given {
            switch.driver_reset();
        }
        let running = Running {
            switch: *switch,
            memory: activation.memory,
            interrupt: activation.interrupt,
            rx,
            tx,
        };
        self.event = queues;
        self.state = State::Working(Worker::spawn("vsock", Box::new(running), worker::run)?);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let worker = match std::mem::replace(&mut self.state, State::Lost) {
            State::Working(worker) => worker,
            other => {
                self.state = other;
                return Vec::new();
            }
        };
        let Some(running) = worker.stop() else {
            log::error!("the vsock thread panicked; the device stays dead");
            return Vec::new();
        };
        let Running { switch, rx, tx, .. } = *running;
        self.state = State::Idle(Box::new(switch));
        let mut queues = vec![rx.active, tx.active];
        queues.append(&mut self.event);
        self.given = queues.iter().map(|queue| queue.queue.state()).collect();
        queues
    }
}
