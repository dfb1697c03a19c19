//! The guest's packets: from its transmit queue into the TAP.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::device::RateLimiter;
use memory::GuestRam;
use virtio::{ActiveQueue, Chain, QueueInterrupt, RingError};

use crate::config::{HEADER, LARGEST};
use crate::metrics::Metrics;
use crate::tap::{IOV_MAX, IoVecs, Tap};
use crate::worker::{Pass, TURNS};

/// A transmit queue.
pub(crate) struct Transmit {
    pub(crate) queue: ActiveQueue,
    pub(crate) limit: Option<Arc<RateLimiter>>,
    /// Its ring contradicts itself: it is left alone until the next reset.
    pub(crate) broken: bool,
}

impl Transmit {
    /// Sends what is there, a bounded number of packets.
    pub(crate) fn pass<'m>(
        &mut self,
        memory: &'m GuestRam,
        tap: &Tap,
        vectors: &mut IoVecs<'m>,
        interrupt: &dyn QueueInterrupt,
        metrics: &Metrics,
    ) -> Result<Pass, RingError> {
        let (mut taken, mut wait) = (false, None);
        self.queue.disable_kicks(memory)?;
        for _ in 0..TURNS {
            wait = self.wait();
            if wait.is_some() {
                break;
            }
            let Some(available) = self.queue.take(memory)? else {
                break;
            };
            taken = true;
            let head = match available.check() {
                Ok(chain) => {
                    self.send(&chain, tap, vectors, metrics);
                    chain.head()
                }
                Err(bad) => {
                    metrics.refused.increment();
                    bad.head
                }
            };
            self.queue.complete(memory, head, 0)?;
        }
        if taken {
            self.queue.notify(memory, interrupt)?;
        }
        if let Some(wait) = wait {
            // Kicks would tell nothing new.
            metrics.throttled.increment();
            return Ok(Pass::After(wait));
        }
        Ok(if self.queue.enable_kicks_unless_polling(memory)? {
            Pass::More
        } else {
            Pass::Idle
        })
    }

    fn wait(&self) -> Option<Duration> {
        self.limit.as_ref()?.wait(Instant::now())
    }

    fn send<'m>(&self, chain: &Chain<'m>, tap: &Tap, vectors: &mut IoVecs<'m>, metrics: &Metrics) {
        let length = chain.readable_bytes();
        vectors.clear();
        vectors.extend(chain.readable());
        // The header is the kernel's to check. What is no packet at all is not worth a call.
        if length <= HEADER || length > LARGEST || vectors.len() > IOV_MAX {
            metrics.refused.increment();
            return;
        }
        let frame = length - HEADER;
        if let Some(limit) = &self.limit {
            limit.spend(frame);
        }
        match tap.write(vectors) {
            Ok(_) => {
                metrics.transmit.packets.increment();
                metrics.transmit.bytes.add(frame as u64);
            }
            // The link is down, the header contradicts the frame, or memory is short: a packet is lost, as on any link.
            Err(error) => {
                metrics.transmit.dropped.increment();
                if metrics.log_limit.allow() {
                    log::debug!("net: a packet of {frame} bytes was not taken: {error}");
                }
            }
        }
    }
}
