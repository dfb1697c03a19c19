//! The device as its transport sees it. A pause and a reset are the same to it: input and output outlive both.

use base::Worker;
use virtio::{Activation, ActiveQueue, DeviceError, VirtioDevice};

use crate::worker::{self, Port, Running, Watch};

/// The device id (5.3.1).
const DEVICE_TYPE: u16 = 3;

/// Port 0 (5.3.2).
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;

/// A Linux driver fills the whole receive queue with pages; people do not type faster than sixteen hold.
const QUEUE_SIZES: [u16; 2] = [16, 64];

/// A console with one port.
#[derive(Debug)]
pub struct Console {
    state: State,
}

enum State {
    Idle(Port),
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

impl Console {
    /// A device for `port`.
    pub(crate) fn new(port: Port) -> Self {
        Self {
            state: State::Idle(port),
        }
    }
}

fn take_queue(queues: &mut Vec<ActiveQueue>, index: u16) -> Result<ActiveQueue, DeviceError> {
    let place = queues.iter().position(|queue| queue.index == index);
    place
        .map(|place| queues.remove(place))
        .ok_or(DeviceError::MissingQueue(index))
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
        let State::Idle(port) = std::mem::replace(&mut self.state, State::Lost) else {
            let lost = "it was activated twice, or has lost its thread";
            return Err(DeviceError::Host(std::io::Error::other(lost)));
        };
        let running = Running {
            port,
            memory: activation.memory,
            interrupt: activation.interrupt,
            receive,
            transmit,
            watch,
        };
        self.state = State::Working(Worker::spawn("console", Box::new(running), worker::run)?);
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
            log::error!("the console's thread panicked; the device stays dead");
            return Vec::new();
        };
        let Running {
            port,
            receive,
            transmit,
            ..
        } = *running;
        self.state = State::Idle(port);
        vec![receive, transmit]
    }
}
