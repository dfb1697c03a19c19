//! The device as its transport sees it.
//!
//! ```text
//!  Idle(switch) ── activate ──▶ Working(thread) ── deactivate ──▶ Idle(switch)
//! ```
//! The transport deactivates for a pause and for a reset alike. Connections outlive both; the next activation tells
//! which it was: after a pause the queues come back exactly as they were given, and all goes on. Other queues belong to
//! a driver that starts anew, and what the one before it had opened is closed. (Queues that come back untouched after a
//! reset have never carried a packet, so there was nothing to close.)
//!
//! Connections are not saved: their host's ends belong to the process that ends. Whoever is restored has none, and tells
//! its driver so (`events.rs`).

use std::sync::Arc;

use observe::LogLimit;
use serde::{Deserialize, Serialize};
use state::{Saved, Schema, StateError};
use virtio::virtio_queue::QueueState;
use virtio::{Activation, ActiveQueue, DeviceError, DeviceWorker, VirtioDevice, take_queue};

use crate::events::{Events, Stage};
use crate::host::FIRST_PORT;
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
const EVENT: u16 = 2;

/// A Linux driver fills the whole receive queue with buffers of 4 KiB: 128 cost the guest half a megabyte. Of the event
/// queue it uses eight.
const QUEUE_SIZES: [u16; 3] = [128, 128, 16];

/// What is saved: whom the guest takes itself for is configuration, and connections end.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VsockState {
    /// The next port of the host's that nobody has had. A guest's program may hold on to a connection that has ended, and its
    /// kernel then refuses another one with the same ports.
    next_port: u32,
}

impl Schema for VsockState {
    const KIND: &'static str = "vsock";
    const VERSION: u32 = 2;

    fn load(version: u32, payload: &[u8]) -> Result<Self, StateError> {
        match version {
            // Version 1 said nothing.
            1 => Ok(Self { next_port: FIRST_PORT }),
            Self::VERSION => serde_json::from_slice(payload).map_err(|source| StateError::Payload {
                kind: Self::KIND,
                source,
            }),
            _ => Err(StateError::Version {
                kind: Self::KIND.to_owned(),
                found: version,
                known: Self::VERSION,
            }),
        }
    }
}

/// A vsock device.
#[derive(Debug)]
pub struct Vsock {
    cid: u32,
    worker: DeviceWorker<Box<Switch>, Running>,
    /// The queues as they were given back.
    given: Vec<QueueState>,
    /// Queues beside the three that there are: none.
    others: Vec<ActiveQueue>,
    /// What the driver is to hear of a restore.
    stage: Stage,
    /// Restored and not activated yet.
    restored: bool,
    /// Of rings that make no sense.
    log_limit: Arc<LogLimit>,
}

impl Vsock {
    /// A device for the guest `cid`.
    pub(crate) fn new(cid: u32, switch: Switch) -> Self {
        Self {
            cid,
            worker: DeviceWorker::Idle(Box::new(switch)),
            given: Vec::new(),
            others: Vec::new(),
            stage: Stage::Quiet,
            restored: false,
            log_limit: Arc::new(LogLimit::new(2)),
        }
    }
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
        let rx = Ring::new(take_queue(&mut queues, RX)?, Arc::clone(&self.log_limit));
        let tx = Ring::new(take_queue(&mut queues, TX)?, Arc::clone(&self.log_limit));
        let event = take_queue(&mut queues, EVENT).ok();
        let goes_on = states == self.given;
        if !goes_on && !std::mem::take(&mut self.restored) {
            // A driver that starts anew knows of no connection.
            self.stage = Stage::Quiet;
        }
        let events = Events {
            ring: event.map(|queue| Ring::new(queue, Arc::clone(&self.log_limit))),
            stage: self.stage,
        };
        self.others = queues;
        let prepare = |mut switch: Box<Switch>| {
            if !goes_on {
                switch.driver_reset();
            }
            Running {
                switch: *switch,
                memory: activation.memory,
                interrupt: activation.interrupt,
                rx,
                tx,
                events,
            }
        };
        self.worker.start("vsock", prepare, worker::run)
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(running) = self.worker.stop("vsock") else {
            return Vec::new();
        };
        let Running {
            switch, rx, tx, events, ..
        } = *running;
        self.stage = events.stage;
        self.worker.set_idle(Box::new(switch));
        let mut queues = vec![rx.active, tx.active];
        queues.extend(events.ring.map(|ring| ring.active));
        queues.append(&mut self.others);
        self.given = queues.iter().map(|queue| queue.queue.state()).collect();
        queues
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        let DeviceWorker::Idle(switch) = &self.worker else {
            return Err(DeviceError::Lost);
        };
        Ok(Saved::of(&VsockState {
            next_port: switch.host.next_port(),
        })?)
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let VsockState { next_port } = saved.read("vsock")?;
        let DeviceWorker::Idle(switch) = &mut self.worker else {
            return Err(DeviceError::Lost);
        };
        if !switch.host.set_next_port(next_port) {
            return Err(DeviceError::Unlike(format!("its next port is {next_port}")));
        }
        self.stage = Stage::Due;
        self.restored = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_what_the_golden_file_says() {
        let here = env!("CARGO_MANIFEST_DIR");
        let next_port = FIRST_PORT + 12;
        state::golden::check(here, &VsockState { next_port });
        let first: VsockState = state::golden::load(here, 1);
        assert_eq!(first.next_port, FIRST_PORT);
        assert!(VsockState::load(3, b"{}").is_err());
    }
}
