//! Throttling of a disk: requests wait here until the rate limiter of their direction lets them through. Knows neither the ring
//! nor how requests are carried out.
//!
//! Each direction is first in, first out, and one does not wait for the other. What waits when the machine is paused is let through as
//! a debt. What waits when a driver resets its device is not done at all, or a guest would have as much as it likes by resetting it
//! again and again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::device::{CreateError, RateLimiter};
use vmm_api::devices::{BlockLimits, BlockRate};

use crate::metrics::Metrics;
use crate::request::{Io, Operation};

/// Both directions; shared by the disk's queues.
#[derive(Clone, Debug)]
pub(crate) struct RateLimiters {
    read: Option<Arc<RateLimiter>>,
    write: Option<Arc<RateLimiter>>,
}

impl RateLimiters {
    /// # Errors
    /// A rate of nothing.
    pub(crate) fn new(limits: &BlockLimits) -> Result<Self, CreateError> {
        let limit = |rate: &BlockRate, direction| {
            RateLimiter::new(rate.bytes_per_second, rate.operations_per_second, direction)
        };
        Ok(Self {
            read: limit(&limits.read, "read")?,
            write: limit(&limits.write, "write")?,
        })
    }
}

/// The requests of one direction that were taken from the ring and not begun.
struct Direction<'m> {
    limiter: Option<Arc<RateLimiter>>,
    queued: VecDeque<Io<'m>>,
    /// The first one has been made to wait, and was counted.
    counted: bool,
}

impl<'m> Direction<'m> {
    fn new(limiter: Option<&Arc<RateLimiter>>) -> Self {
        Self {
            limiter: limiter.cloned(),
            queued: VecDeque::new(),
            counted: false,
        }
    }

    /// Lets through what may pass; how long the rest has to wait.
    fn release(&mut self, all: bool, metrics: &Metrics, submit: &mut impl FnMut(Io<'m>)) -> Option<Duration> {
        while let Some(io) = self.queued.pop_front() {
            if let Some(limiter) = &self.limiter {
                let wait = limiter.wait(Instant::now()).filter(|_| !all);
                if wait.is_some() {
                    if !std::mem::replace(&mut self.counted, true) {
                        metrics.throttled.increment();
                    }
                    self.queued.push_front(io);
                    return wait;
                }
                self.counted = false;
                limiter.spend(io.buffers.length());
            }
            submit(io);
        }
        None
    }
}

/// What is throttled of one queue's requests.
pub(crate) struct Throttle<'m> {
    read: Direction<'m>,
    write: Direction<'m>,
}

impl<'m> Throttle<'m> {
    pub(crate) fn new(limits: &RateLimiters) -> Self {
        Self {
            read: Direction::new(limits.read.as_ref()),
            write: Direction::new(limits.write.as_ref()),
        }
    }

    /// Takes a request that comes next in its direction.
    pub(crate) fn enqueue(&mut self, io: Io<'m>) {
        match io.operation {
            Operation::Read => self.read.queued.push_back(io),
            Operation::Write { .. } | Operation::Flush | Operation::Discard { .. } | Operation::Zero { .. } => {
                self.write.queued.push_back(io);
            }
        }
    }

    /// Drops what waits, which answers it with an I/O error; how many requests that were.
    pub(crate) fn discard(&mut self) -> usize {
        [&mut self.read, &mut self.write]
            .into_iter()
            .map(|direction| direction.queued.drain(..).count())
            .sum()
    }

    /// Lets through what may pass, or `all`; says when to ask again, if anything has to wait.
    pub(crate) fn release(&mut self, all: bool, metrics: &Metrics, mut submit: impl FnMut(Io<'m>)) -> Option<Duration> {
        let read = self.read.release(all, metrics, &mut submit);
        let write = self.write.release(all, metrics, &mut submit);
        match (read, write) {
            (Some(read), Some(write)) => Some(read.min(write)),
            (one, other) => one.or(other),
        }
    }
}
