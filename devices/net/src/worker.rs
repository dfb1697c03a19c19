//! A queue pair and its thread.
//!
//! ```text
//!      ┌──────▶ round: control, transmit, receive
//!      │             ▼
//!      │        wait: at once if there is more, else for a kick, the TAP, the end of a rate limit's pause, the stop
//!      └─ event ─────┤
//!                    └─ stop ──▶ buffers that were taken go back into the ring, the queues to the device
//! ```

use std::sync::Arc;
use std::time::Duration;

use base::{Epoll, Interest, StopSignal};
use memory::GuestRam;
use virtio::{ActiveQueue, QueueInterrupt, RingError};

use crate::control::Control;
use crate::device::Pairs;
use crate::metrics::Metrics;
use crate::receive::{Receive, Room};
use crate::tap::IoVecs;
use crate::transmit::Transmit;

/// The most packets in one direction before the other one, and the stop, have their turn.
pub(crate) const TURNS: usize = 64;

/// Epoll tokens.
const STOP: u64 = 0;
const KICK: u64 = 1;
const TAP: u64 = 2;

/// What is left of one direction after its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// There is more.
    More,
    /// An event will tell when there is more.
    Idle,
    /// There may be more, but not before this time has passed.
    After(Duration),
}

impl Pass {
    /// What both leave.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::More, _) | (_, Self::More) => Self::More,
            (Self::After(one), Self::After(two)) => Self::After(one.min(two)),
            (Self::After(wait), Self::Idle) | (Self::Idle, Self::After(wait)) => Self::After(wait),
            (Self::Idle, Self::Idle) => Self::Idle,
        }
    }

    fn timeout(self) -> Option<Duration> {
        match self {
            Self::More => Some(Duration::ZERO),
            Self::Idle => None,
            Self::After(wait) => Some(wait),
        }
    }
}

/// Everything that a pair's thread owns.
pub(crate) struct Pair {
    pub(crate) index: usize,
    pub(crate) pairs: Arc<Pairs>,
    pub(crate) receive: Receive,
    pub(crate) transmit: Transmit,
    /// The first pair serves the control queue too.
    pub(crate) control: Option<Control>,
    pub(crate) memory: Arc<GuestRam>,
    pub(crate) interrupt: Arc<dyn QueueInterrupt>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Pair {
    /// What the thread waits on. Edges: event fds need not be read back, and a TAP whose packets nobody can take yet does
    /// not wake again and again.
    pub(crate) fn watch(&self) -> std::io::Result<Epoll> {
        let epoll = Epoll::new()?;
        epoll.add(self.pairs.tap(self.index), TAP, Interest::READ_EDGE)?;
        epoll.add(self.pairs.changed(self.index), TAP, Interest::READ_EDGE)?;
        epoll.add(&*self.receive.queue.kick, KICK, Interest::READ_EDGE)?;
        epoll.add(&*self.transmit.queue.kick, KICK, Interest::READ_EDGE)?;
        if let Some(control) = &self.control {
            epoll.add(&*control.queue.kick, KICK, Interest::READ_EDGE)?;
        }
        Ok(epoll)
    }

    /// The thread's body.
    pub(crate) fn run(mut self, epoll: &Epoll, stop: &StopSignal) -> Self {
        if let Err(error) = epoll.add(stop.fd(), STOP, Interest::READ) {
            log::error!("net: it cannot wait for its stop: {error}");
            return self;
        }
        let memory = Arc::clone(&self.memory);
        let (mut room, mut vectors) = (Room::default(), IoVecs::default());
        let mut ready = Vec::new();
        loop {
            let left = self.round(&memory, &mut room, &mut vectors);
            if let Err(error) = epoll.wait(&mut ready, left.timeout()) {
                log::error!("net: it cannot wait: {error}");
                break;
            }
            if ready.iter().any(|ready| ready.token == STOP) {
                break;
            }
            self.receive.ready |= ready.iter().any(|ready| ready.token == TAP);
        }
        self.receive.put_back(room, &self.metrics);
        self
    }

    /// One turn for everything.
    fn round<'m>(&mut self, memory: &'m GuestRam, room: &mut Room<'m>, vectors: &mut IoVecs<'m>) -> Pass {
        let (pairs, metrics, interrupt) = (&self.pairs, &*self.metrics, &*self.interrupt);
        let tap = pairs.tap(self.index);
        let mut left = Pass::Idle;
        let mut faults = Vec::new();
        if let Some(control) = self.control.as_mut().filter(|control| !control.broken) {
            match control.serve(memory, interrupt, metrics) {
                Ok(pass) => left = left.and(pass),
                Err(error) => {
                    control.broken = true;
                    faults.push((control.queue.index, error));
                }
            }
        }
        if !self.transmit.broken {
            match self.transmit.pass(memory, tap, vectors, interrupt, metrics) {
                Ok(pass) => left = left.and(pass),
                Err(error) => {
                    self.transmit.broken = true;
                    faults.push((self.transmit.queue.index, error));
                }
            }
        }
        if !self.receive.broken && pairs.is_in_use(self.index) {
            match self.receive.pass(memory, tap, room, interrupt, metrics) {
                Ok(pass) => left = left.and(pass),
                Err(error) => {
                    self.receive.broken = true;
                    faults.push((self.receive.queue.index, error));
                }
            }
        }
        for (queue, error) in faults {
            self.warn(queue, &error);
        }
        left
    }

    /// A ring that contradicts itself is left alone: only a reset makes it whole again.
    fn warn(&self, queue: u16, error: &RingError) {
        if self.metrics.log_limit.allow() {
            log::warn!("net: queue {queue} is left alone until a reset: {error}");
        }
    }

    /// The queues, by rising number.
    pub(crate) fn into_queues(self) -> impl Iterator<Item = ActiveQueue> {
        let control = self.control.map(|control| control.queue);
        [self.receive.queue, self.transmit.queue].into_iter().chain(control)
    }
}
