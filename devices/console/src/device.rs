//! The device as its transport sees it. A pause and a reset are the same to it: input and output outlive both.

use serde::{Deserialize, Serialize};
use state::{Saved, Schema};
use virtio::{Activation, ActiveQueue, DeviceError, DeviceWorker, VirtioDevice, take_queue};

use crate::worker::{self, Port, Running, Watch};

/// The device id (5.3.1).
const DEVICE_TYPE: u16 = 3;

/// Port 0 (5.3.2).
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;

/// A Linux driver fills the whole receive queue with pages; people do not type faster than sixteen hold.
const QUEUE_SIZES: [u16; 2] = [16, 64];

/// What is saved: all else waits in the rings or on the host.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ConsoleState {
    /// What was left of a buffer that the host had taken in part.
    pub(crate) rest: Vec<u8>,
}

impl Schema for ConsoleState {
    const KIND: &'static str = "console";
    const VERSION: u32 = 1;
}

/// A console with one port.
#[derive(Debug)]
pub struct Console {
    worker: DeviceWorker<Port, Running>,
}

impl Console {
    /// A device for `port`.
    pub(crate) fn new(port: Port) -> Self {
        Self {
            worker: DeviceWorker::Idle(port),
        }
    }
}

impl VirtioDevice for Console {
    fn device_type(&self) -> u16 {
        DEVICE_TYPE
    }

    fn features(&self) -> u64 {
        // Neither a size, nor more ports, nor emergency writes (5.3.3).
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, _offset: usize, _data: &mut [u8]) {}

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let mut queues = activation.queues;
        let receive = take_queue(&mut queues, RECEIVE)?;
        let transmit = take_queue(&mut queues, TRANSMIT)?;
        let watch = Watch::new()?;
        let prepare = |port| Running {
            port,
            memory: activation.memory,
            interrupt: activation.interrupt,
            receive,
            transmit,
            watch,
        };
        self.worker.start("console", prepare, worker::run)
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let Some(running) = self.worker.stop("console") else {
            return Vec::new();
        };
        let Running {
            port,
            receive,
            transmit,
            ..
        } = *running;
        self.worker.set_idle(port);
        vec![receive, transmit]
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        let DeviceWorker::Idle(port) = &self.worker else {
            return Err(DeviceError::Lost);
        };
        let rest = port.rest.clone();
        Ok(Saved::of(&ConsoleState { rest })?)
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let DeviceWorker::Idle(port) = &mut self.worker else {
            return Err(DeviceError::Lost);
        };
        let ConsoleState { rest } = saved.read("console")?;
        port.rest = rest;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_what_the_golden_file_says() {
        let rest = b"left over".to_vec();
        state::golden::check(env!("CARGO_MANIFEST_DIR"), &ConsoleState { rest });
    }
}
