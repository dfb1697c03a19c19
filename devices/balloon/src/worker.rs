//! The one thread of the device: a request of each queue, then the others' turn, until there are none; then it waits for a kick or its stop.
//! Nothing is under way between two requests, each of which is bounded.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::{Epoll, EventFd, Interest, StopSignal};
use memory::GuestRam;
use virtio::{ActiveQueue, QueueInterrupt, RingError};

use crate::device::THREAD;
use crate::giving::Giving;
use crate::protocol::{INFLATE, REPORTING};

/// Epoll tokens.
const KICK: u64 = 0;
const STOP: u64 = 1;

/// What the thread waits for.
pub(crate) struct Watch {
    epoll: Epoll,
    kicks: Vec<Arc<EventFd>>,
}

impl Watch {
    /// Prepares the wait, where its failure can still be told.
    pub(crate) fn of(queues: &[ActiveQueue]) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let kicks: Vec<_> = queues.iter().map(|queue| Arc::clone(&queue.kick)).collect();
        kicks
            .iter()
            .try_for_each(|kick| epoll.add(kick.as_ref(), KICK, Interest::READ))?;
        Ok(Self { epoll, kicks })
    }

    /// Rings that contradict themselves are left alone: only a reset makes them whole again.
    fn forget_kicks(&self) {
        for kick in &self.kicks {
            if let Err(error) = self.epoll.remove(kick.as_ref()) {
                log::debug!("{THREAD}: {error}");
            }
        }
    }
}

/// What the thread owns.
pub(crate) struct Server {
    /// By rising number.
    pub(crate) queues: Vec<ActiveQueue>,
    pub(crate) memory: Arc<GuestRam>,
    pub(crate) interrupt: Arc<dyn QueueInterrupt>,
    pub(crate) giving: Giving,
}

impl Server {
    /// Serves requests until it is stopped.
    pub(crate) fn run(mut self: Box<Self>, watch: &Watch, stop: &StopSignal) -> Box<Self> {
        if let Err(error) = self.serve(watch, stop) {
            log::error!("{THREAD}: it cannot wait: {error}");
        }
        self
    }

    fn serve(&mut self, watch: &Watch, stop: &StopSignal) -> io::Result<()> {
        watch.epoll.add(stop.fd(), STOP, Interest::READ)?;
        let (mut ready, mut is_broken) = (Vec::new(), false);
        loop {
            let more = match is_broken {
                true => false,
                false => self.turn().unwrap_or_else(|error| {
                    if self.giving.metrics.log_limit.allow() {
                        log::warn!("{THREAD}: {error}");
                    }
                    is_broken = true;
                    watch.forget_kicks();
                    false
                }),
            };
            watch.epoll.wait(&mut ready, more.then_some(Duration::ZERO))?;
            if ready.iter().any(|ready| ready.token == STOP) {
                return Ok(());
            }
            for kick in &watch.kicks {
                kick.consume();
            }
        }
    }

    /// Serves one request of each queue. Tells whether there are more.
    fn turn(&mut self) -> Result<bool, RingError> {
        let memory = Arc::clone(&self.memory);
        let mut more = false;
        for queue in &mut self.queues {
            queue.disable_kicks(&memory)?;
            if let Some(available) = queue.take(&memory)? {
                let head = match available.check() {
                    Ok(chain) => {
                        self.giving.metrics.request(queue.index);
                        match queue.index {
                            INFLATE => self.giving.inflate(&memory, &chain),
                            REPORTING => self.giving.report(&memory, &chain),
                            // What is deflated is there when it is touched.
                            _ => (),
                        }
                        chain.head()
                    }
                    Err(bad) => {
                        self.giving.metrics.refused_chains.increment();
                        bad.head
                    }
                };
                // Not a byte was written to what is free, by the word of the device.
                queue.complete(&memory, head, 0)?;
                queue.notify(&memory, self.interrupt.as_ref())?;
            }
            more |= queue.enable_kicks(&memory)?;
        }
        Ok(more)
    }
}
