//! The one thread of the device: waits for kicks and descriptors, then moves what can be moved.
//!
//! ```text
//!      ┌──────────▶ round: the guest's output, then its input
//!      │                 ▼
//!      │            wait: at once if there is more, else for a kick, a descriptor, the end of patience, the stop signal
//!      └── events ◀──────┤
//!                        └── stop ──▶ the state goes back to the device, no buffer is held
//! ```
//! A buffer that the host has taken in part is put back into the ring and remembered by the number of bytes taken. Only
//! when the thread stops is the rest of it copied: the ring may be another one when it starts again.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{Epoll, Interest, StopSignal};
use memory::GuestRam;
use virtio::virtio_queue::QueueOwnedT;
use virtio::{ActiveQueue, Chain, QueueInterrupt, RingError};

use vm_memory::VolatileSlice;

use crate::input::Input;
use crate::metrics::Metrics;
use crate::output::{Fate, Output};

const STOP: u64 = 0;
const KICK: u64 = 1;
const INPUT: u64 = 2;
const OUTPUT: u64 = 3;

/// The most bytes in one write. A guest can offer all of its memory at once; others want their turn.
const PIECE: usize = 64 << 10;

/// The most writes, and the most reads, before events are looked at.
const TURNS: usize = 64;

/// What the device keeps between activations.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) input: Input,
    pub(crate) output: Output,
    /// How many bytes of the next buffer have been written already.
    pub(crate) done: usize,
    /// The rest of the buffer that was being written when the thread stopped.
    pub(crate) rest: Vec<u8>,
    pub(crate) metrics: Metrics,
}

/// Everything that the thread owns.
pub(crate) struct Running {
    pub(crate) port: Port,
    pub(crate) memory: Arc<GuestRam>,
    pub(crate) interrupt: Arc<dyn QueueInterrupt>,
    pub(crate) receive: ActiveQueue,
    pub(crate) transmit: ActiveQueue,
    pub(crate) watch: Watch,
}

/// Why the thread cannot go on.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("{0}")]
    Ring(#[from] RingError),
    #[error("{0}")]
    Host(#[from] io::Error),
}

/// The epoll set and what is in it for now.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: Epoll,
    input: bool,
    output: bool,
}

impl Watch {
    /// An empty set.
    ///
    /// # Errors
    /// Those of epoll_create1(2).
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new()?,
            input: false,
            output: false,
        })
    }

    /// Waits for what the port waits for. True when there is something that need not be waited for.
    fn update(&mut self, port: &mut Port, has_buffers: bool) -> io::Result<bool> {
        let mut at_once = false;
        let input = port.input.awaited().filter(|_| has_buffers);
        match (input, self.input) {
            (Some(fd), false) => match self.epoll.add(fd, INPUT, Interest::READ) {
                Ok(()) => self.input = true,
                // A file: reading it never blocks.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    port.input.set_ready();
                    at_once = true;
                }
                Err(error) => return Err(error),
            },
            (None, true) => {
                // When it was closed it has left the set already.
                if let Some(fd) = port.input.fd() {
                    self.epoll.remove(fd)?;
                }
                self.input = false;
            }
            _ => (),
        }
        match (port.output.awaited(), self.output) {
            (Some(fd), false) => match self.epoll.add(fd, OUTPUT, Interest::WRITE) {
                Ok(()) => self.output = true,
                // Would block and cannot be waited for: no descriptor that we know.
                Err(error) => port.output.close(&error),
            },
            (None, true) => {
                if let Some(fd) = port.output.fd() {
                    self.epoll.remove(fd)?;
                }
                self.output = false;
            }
            _ => (),
        }
        Ok(at_once)
    }
}

/// The thread's body.
pub(crate) fn run(mut running: Box<Running>, stop: &StopSignal) -> Box<Running> {
    if let Err(fault) = running.serve(stop) {
        // The next ring is another one: the buffer that was written in part is not in it.
        running.port.done = 0;
        if running.port.metrics.log_limit.allow() {
            log::warn!("the console is not served until the driver resets it: {fault}");
        }
    }
    running
}

impl Running {
    fn serve(&mut self, stop: &StopSignal) -> Result<(), Fault> {
        let epoll = &self.watch.epoll;
        epoll.add(stop.fd(), STOP, Interest::READ)?;
        epoll.add(&*self.receive.kick, KICK, Interest::READ)?;
        epoll.add(&*self.transmit.kick, KICK, Interest::READ)?;
        self.port.output.resume(Instant::now());
        let mut ready = Vec::new();
        loop {
            let more_output = self.send()?;
            let (more_input, has_buffers) = self.receive()?;
            self.transmit.notify(&self.memory, &*self.interrupt)?;
            self.receive.notify(&self.memory, &*self.interrupt)?;
            let more = self.watch.update(&mut self.port, has_buffers)? || more_output || more_input;
            let timeout = if more {
                Some(Duration::ZERO)
            } else {
                let deadline = self.port.output.deadline();
                deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
            };
            self.watch.epoll.wait(&mut ready, timeout)?;
            for event in &ready {
                match event.token {
                    STOP => return self.keep_rest(),
                    INPUT => self.port.input.set_ready(),
                    OUTPUT => self.port.output.writable(),
                    _ => {
                        self.transmit.kick.consume();
                        self.receive.kick.consume();
                    }
                }
            }
            self.port.output.expire(Instant::now());
        }
    }

    /// Copies what is left of a buffer that was written in part, and gives the buffer back.
    fn keep_rest(&mut self) -> Result<(), Fault> {
        let done = std::mem::take(&mut self.port.done);
        if done == 0 {
            return Ok(());
        }
        let Some(available) = self.transmit.take(&self.memory)? else {
            return Ok(());
        };
        let head = match available.check() {
            Ok(chain) => {
                self.port.keep_rest(&chain, done);
                chain.head()
            }
            Err(bad) => bad.head,
        };
        self.transmit.complete(&self.memory, head, 0)?;
        Ok(self.transmit.notify(&self.memory, &*self.interrupt)?)
    }

    /// Moves the guest's output. True when there is more that need not wait.
    fn send(&mut self) -> Result<bool, Fault> {
        if !self.port.write_rest() {
            return Ok(false);
        }
        self.transmit.disable_kicks(&self.memory)?;
        for _ in 0..TURNS {
            let Some(available) = self.transmit.take(&self.memory)? else {
                if self.transmit.enable_kicks(&self.memory)? {
                    continue;
                }
                return Ok(false);
            };
            let head = match available.check() {
                Ok(chain) => match self.port.write(&chain) {
                    Progress::Finished => chain.head(),
                    Progress::Partly => {
                        self.transmit.queue.go_to_previous_position();
                        continue;
                    }
                    Progress::Waiting => {
                        self.transmit.queue.go_to_previous_position();
                        return Ok(false);
                    }
                },
                Err(bad) => bad.head,
            };
            self.port.done = 0;
            self.transmit.complete(&self.memory, head, 0)?;
        }
        Ok(true)
    }

    /// Moves the guest's input. Tells whether there is more that need not wait, and whether the guest has a buffer.
    fn receive(&mut self) -> Result<(bool, bool), Fault> {
        for _ in 0..TURNS {
            if !self.port.input.is_ready() {
                // Of no interest once the input has ended.
                let has_buffers = !self.port.input.is_closed() && self.receive.enable_kicks(&self.memory)?;
                return Ok((false, has_buffers));
            }
            let Some(available) = self.receive.take(&self.memory)? else {
                if self.receive.enable_kicks(&self.memory)? {
                    continue;
                }
                return Ok((false, false));
            };
            let (head, count) = match available.check() {
                Err(bad) => (bad.head, 0),
                Ok(chain) => match chain.writer().chunk() {
                    None => (chain.head(), 0),
                    Some(mut room) => match self.port.input.read(&mut room) {
                        0 => {
                            self.receive.queue.go_to_previous_position();
                            continue;
                        }
                        count => (chain.head(), count),
                    },
                },
            };
            self.port.metrics.input.add(count as u64);
            let written = u32::try_from(count).unwrap_or(u32::MAX);
            self.receive.complete(&self.memory, head, written)?;
        }
        Ok((true, true))
    }
}

/// How far a buffer of the guest's has come.
enum Progress {
    Finished,
    Partly,
    Waiting,
}

impl Port {
    /// What little a console prints at once is kept; of more, the rest is dropped.
    fn keep_rest(&mut self, chain: &Chain<'_>, done: usize) {
        let mut cursor = chain.reader();
        cursor.skip(done);
        let left = cursor.remaining();
        let mut rest = vec![0; left.min(PIECE)];
        let count = cursor.read(&mut rest).unwrap_or(0);
        rest.truncate(count);
        self.metrics.dropped.add((left - count) as u64);
        self.rest = rest;
    }

    /// Writes what was kept. False when it has to wait.
    fn write_rest(&mut self) -> bool {
        while !self.rest.is_empty() {
            let slice = VolatileSlice::from(&mut self.rest[..]);
            match self.output.write(&slice, Instant::now()) {
                Fate::Written(count) => {
                    self.metrics.output.add(count as u64);
                    self.rest.drain(..count);
                }
                Fate::Dropped => {
                    self.metrics.dropped.add(self.rest.len() as u64);
                    self.rest.clear();
                }
                Fate::Waiting => return false,
            }
        }
        self.rest = Vec::new();
        true
    }

    /// Writes the next piece of a buffer.
    fn write(&mut self, chain: &Chain<'_>) -> Progress {
        let mut cursor = chain.reader();
        cursor.skip(self.done);
        let left = cursor.remaining();
        let Some(chunk) = cursor.chunk() else {
            return Progress::Finished;
        };
        let piece = chunk.subslice(0, chunk.len().min(PIECE)).unwrap_or(chunk);
        match self.output.write(&piece, Instant::now()) {
            Fate::Written(count) => {
                self.metrics.output.add(count as u64);
                self.done += count;
                if count == left {
                    Progress::Finished
                } else {
                    Progress::Partly
                }
            }
            Fate::Dropped => {
                self.metrics.dropped.add(left as u64);
                Progress::Finished
            }
            Fate::Waiting => Progress::Waiting,
        }
    }
}
