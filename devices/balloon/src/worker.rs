//! The one thread of the device: a request of each queue, then the others' turn, until there are none; then it waits for a kick or its stop.
//! Nothing is under way between two requests, each of which is bounded.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{Epoll, EventFd, Interest, StopSignal};
use memory::GuestRam;
use virtio::{ActiveQueue, Available, QueueInterrupt, RingError};

use crate::device::THREAD;
use crate::giving::Giving;
use crate::protocol::{INFLATE, REPORTING};

/// Epoll tokens.
const KICK: u64 = 0;
const STOP: u64 = 1;

/// Between two attempts at what the host refuses.
pub(crate) const AGAIN: Duration = Duration::from_millis(20);

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
    /// When what the host has refused is tried again.
    pub(crate) again: Option<Instant>,
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
                false if !self.giving.is_settled() => self.settle(),
                false => self.turn().unwrap_or_else(|error| {
                    if self.giving.metrics.log_limit.allow() {
                        log::warn!("{THREAD}: {error}");
                    }
                    is_broken = true;
                    watch.forget_kicks();
                    false
                }),
            };
            let patience = match (more, is_broken) {
                (true, _) => Some(Duration::ZERO),
                (false, false) => self.again.map(|again| again.saturating_duration_since(Instant::now())),
                (false, true) => None,
            };
            watch.epoll.wait(&mut ready, patience)?;
            if ready.iter().any(|ready| ready.token == STOP) {
                return Ok(());
            }
            for kick in &watch.kicks {
                kick.consume();
            }
        }
    }

    /// Whether it is time for what the host has refused, if there is any.
    fn is_due(&self) -> bool {
        self.again.is_none_or(|again| again <= Instant::now())
    }

    /// Makes a part ready of what a driver of before has left. Tells whether there is more to do at once.
    fn settle(&mut self) -> bool {
        if !self.is_due() {
            return false;
        }
        let could_be = self.giving.settle();
        self.again = (!could_be).then(|| Instant::now() + AGAIN);
        could_be
    }

    /// Serves one request of each queue. Tells whether there are more.
    fn turn(&mut self) -> Result<bool, RingError> {
        let memory = Arc::clone(&self.memory);
        let is_due = self.is_due();
        let mut more = false;
        for queue in &mut self.queues {
            if !queue.held.is_empty() && !is_due {
                continue;
            }
            queue.disable_kicks(&memory)?;
            // What was not answered is asked for again, and nothing else of its queue before.
            let next = match queue.take_held(&memory).into_iter().next() {
                Some(held) => Some(held),
                None => queue.take(&memory)?,
            };
            if let Some(available) = next {
                let (head, is_done) = serve_one(&mut self.giving, queue.index, &memory, available);
                if !is_done {
                    queue.held.push(head);
                    self.again = Some(Instant::now() + AGAIN);
                    continue;
                }
                // Not a byte was written to what is free, by the word of the device.
                queue.complete(&memory, head, 0)?;
                queue.notify(&memory, self.interrupt.as_ref())?;
            }
            more |= queue.enable_kicks(&memory)?;
        }
        if self.queues.iter().all(|queue| queue.held.is_empty()) {
            self.again = None;
        }
        Ok(more)
    }
}

/// Does what a chain asks for; its head, and whether it may be answered.
fn serve_one(giving: &mut Giving, queue: u16, memory: &GuestRam, available: Available<'_>) -> (u16, bool) {
    let chain = match available.check() {
        Ok(chain) => chain,
        Err(bad) => {
            giving.metrics.refused_chains.increment();
            return (bad.head, true);
        }
    };
    let is_done = match queue {
        INFLATE => {
            giving.inflate(memory, &chain);
            true
        }
        REPORTING => {
            giving.report(memory, &chain);
            true
        }
        _ => giving.deflate(&chain),
    };
    if is_done {
        giving.metrics.request(queue);
    }
    (chain.head(), is_done)
}
