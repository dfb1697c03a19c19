//! The loop of a thread that serves one queue and has nothing under way between two rounds: a round, a wait for the
//! driver's kick, the next round, until it is stopped. What a round does the device knows.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::{Epoll, EventFd, Interest, StopSignal};
use observe::LogLimit;

use crate::buffers::RingError;
use crate::device::ActiveQueue;

/// Epoll tokens.
const KICK: u64 = 0;
const STOP: u64 = 1;

/// Waits for one queue's kicks.
#[derive(Debug)]
pub struct QueueLoop {
    kick: Arc<EventFd>,
    epoll: Epoll,
}

impl QueueLoop {
    /// Prepares the wait, where its failure can still be told.
    ///
    /// # Errors
    /// The kernel has no descriptor left.
    pub fn of(queue: &ActiveQueue) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        epoll.add(queue.kick.as_ref(), KICK, Interest::READ)?;
        Ok(Self {
            kick: Arc::clone(&queue.kick),
            epoll,
        })
    }

    /// Does rounds until `stop`, which is looked at after each: a round tells whether there is more to do, and has to be
    /// bounded. A ring that contradicts itself is left alone, because only a reset makes it whole again; `who` warns of
    /// it as often as `log_limit` allows.
    pub fn serve(
        &self,
        who: &str,
        stop: &StopSignal,
        log_limit: &LogLimit,
        mut round: impl FnMut() -> Result<bool, RingError>,
    ) {
        if let Err(error) = self.epoll.add(stop.fd(), STOP, Interest::READ) {
            log::error!("{who}: it cannot wait for its stop: {error}");
            return;
        }
        let mut ready = Vec::new();
        loop {
            let more = round().unwrap_or_else(|error| {
                if log_limit.allow() {
                    log::warn!("{who}: {error}");
                }
                if let Err(error) = self.epoll.remove(self.kick.as_ref()) {
                    log::debug!("{who}: {error}");
                }
                false
            });
            if let Err(error) = self.epoll.wait(&mut ready, more.then_some(Duration::ZERO)) {
                log::error!("{who}: it cannot wait: {error}");
                return;
            }
            if ready.iter().any(|ready| ready.token == STOP) {
                return;
            }
            self.kick.consume();
        }
    }
}
