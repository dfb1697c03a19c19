//! The device as its transport sees it. Input, output and a buffer that was written in part outlive a pause; a reset is
//! known by queues that are not those that were given back.

use base::Worker;
use virtio::virtio_queue::QueueState;
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
    /// The queues as they were given back.
    given: Vec<QueueState>,
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
            given: Vec::new(),
        }
    }
}

fn states(queues: &[ActiveQueue]) -> Vec<QueueState> {
    queues.iter().map(|queue| queue.queue.state()).collect()
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
        let begins_anew = states(&queues) != self.given;
        let receive = take_queue(&mut queues, RECEIVE)?;
        let transmit = take_queue(&mut queues, TRANSMIT)?;
        let watch = Watch::new()?;
        let State::Idle(mut port) = std::mem::replace(&mut self.state, State::Lost) else {
            let lost = "it was activated twice, or has lost its thread";
            return Err(DeviceError::Host(std::io::Error::other(lost)));
        };
        if begins_anew {
            port.done = 0;
        }
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
        let queues = vec![receive, transmit];
        self.given = states(&queues);
        queues
    }
}
