//! The loop that serves one queue, whatever carries out its requests.
//!
//! One pass takes everything that is available, starts it together, waits once, and answers everything that is done with
//! one look at whether the driver wants an interrupt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::StopSignal;
use memory::GuestRam;
use virtio::virtio_queue::QueueT;
use virtio::{ActiveQueue, Available, QueueInterrupt, RingError};

use crate::backend::Backend;
use crate::device::NoSpace;
use crate::disk::Disk;
use crate::metrics::Metrics;
use crate::request::{CompletionQueue, Io, parse};
use crate::threads::{self, PoolWaiting};
use crate::throttle::{RateLimiters, Throttle};
use crate::uring::{Ring, RingBackend};
use crate::waiting::Waiting;

/// What a queue's worker owns, and gives back.
pub(crate) struct Server {
    pub(crate) queue: ActiveQueue,
    pub(crate) ring: Option<Ring>,
    pub(crate) memory: Arc<GuestRam>,
    pub(crate) interrupt: Arc<dyn QueueInterrupt>,
    pub(crate) disk: Arc<Disk>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) limits: RateLimiters,
    pub(crate) no_space: NoSpace,
    /// Whether what waits for a rate limiter when this stops is not done any more.
    pub(crate) discards: Arc<AtomicBool>,
    /// Writes are on stable storage before they are answered.
    pub(crate) durable: bool,
}

impl Server {
    /// Serves by io_uring until stopped; returns with nothing under way.
    pub(crate) fn run_uring(mut self, ring: Ring, waiting: Waiting, stop: &StopSignal) -> Self {
        let (memory, disk, completions) = (
            Arc::clone(&self.memory),
            Arc::clone(&self.disk),
            CompletionQueue::default(),
        );
        if let Err(error) = waiting.watch_stop(stop.fd()) {
            log::error!("block: it cannot wait for its stop: {error}");
            self.ring = Some(ring);
            return self;
        }
        let mut backend = RingBackend::new(ring, disk.file(), waiting);
        self.serve(&mut backend, &memory, &completions);
        self.ring = backend.into_ring();
        self
    }

    /// Serves by so many threads until stopped; returns with nothing under way.
    pub(crate) fn run_threads(mut self, waiting: PoolWaiting, threads: usize, stop: &StopSignal) -> Self {
        let (memory, disk, completions) = (
            Arc::clone(&self.memory),
            Arc::clone(&self.disk),
            CompletionQueue::default(),
        );
        threads::with_pool(&disk, waiting, threads, stop, |backend| {
            self.serve(backend, &memory, &completions);
        });
        self
    }

    fn serve<'m>(&mut self, backend: &mut impl Backend<'m>, memory: &'m GuestRam, completions: &'m CompletionQueue) {
        let most = usize::from(self.queue.queue.size());
        let (mut done, mut answers) = (Vec::new(), Vec::new());
        let mut throttle = Throttle::new(&self.limits);
        // Counts what is throttled, too, and what there is no space for: a ring's worth is all that there ever is.
        let mut under_way = self.begin_held(&mut throttle, memory, completions);
        let mut kept: Vec<Io<'m>> = Vec::new();
        let mut stopping = false;
        let mut broken = false;
        loop {
            let mut more = false;
            if !stopping && !broken {
                let taken = self.take(&mut throttle, memory, completions, most - under_way);
                under_way += taken.started;
                more = taken.more;
                broken |= self.is_broken(taken.error);
            }
            if stopping && self.discards.load(Ordering::Acquire) {
                under_way -= throttle.discard();
            }
            let pause = throttle.release(stopping, &self.metrics, |io| backend.submit(io));
            let answered = self.answer(memory, completions, &mut answers);
            broken |= self.is_broken(answered.err());
            if stopping && under_way == kept.len() {
                self.queue.held = kept.into_iter().map(Io::keep).collect();
                return;
            }
            stopping |= backend.wait(if more { Some(Duration::ZERO) } else { pause }, &mut done);
            for (io, result) in done.drain(..) {
                if io.lacks_space(&result) {
                    self.keep(io, &mut kept);
                    continue;
                }
                match io.finish(result, &self.metrics) {
                    Some(rest) => backend.submit(rest),
                    None => under_way -= 1,
                }
            }
            let answered = self.answer(memory, completions, &mut answers);
            broken |= self.is_broken(answered.err());
        }
    }

    /// Begins what an earlier worker has kept; how many requests that are.
    fn begin_held<'m>(
        &mut self,
        throttle: &mut Throttle<'m>,
        memory: &'m GuestRam,
        completions: &'m CompletionQueue,
    ) -> usize {
        let mut begun = 0;
        for available in self.queue.take_held(memory) {
            begun += usize::from(self.begin(available, throttle, completions));
        }
        begun
    }

    /// Keeps a request for which there is no space; until then it is under way.
    fn keep<'m>(&self, io: Io<'m>, kept: &mut Vec<Io<'m>>) {
        self.metrics.no_space.increment();
        if self.metrics.log_limit.allow() {
            log::warn!(
                "block: no space left on the host: {:?} at {:#x} waits until there is some",
                io.operation,
                io.offset
            );
        }
        kept.push(io);
        self.no_space.raise();
    }

    /// Hands a request to the throttle; false for one that is answered already.
    fn begin<'m>(
        &self,
        available: Available<'m>,
        throttle: &mut Throttle<'m>,
        completions: &'m CompletionQueue,
    ) -> bool {
        match available.check() {
            Ok(chain) => {
                let io = parse(&chain, &self.disk, self.durable, completions, &self.metrics);
                let begun = io.is_some();
                io.into_iter().for_each(|io| throttle.enqueue(io));
                begun
            }
            Err(bad) => {
                self.metrics.refused.increment();
                completions.put(bad.head, 0);
                false
            }
        }
    }

    /// Hands everything that is available to the throttle, `room` requests at most.
    fn take<'m>(
        &mut self,
        throttle: &mut Throttle<'m>,
        memory: &'m GuestRam,
        completions: &'m CompletionQueue,
        room: usize,
    ) -> Taken {
        let mut taken = Taken::default();
        if room == 0 {
            return taken;
        }
        let result = self.take_into(throttle, memory, completions, room, &mut taken.started);
        match result {
            Ok(more) => taken.more = more,
            Err(error) => taken.error = Some(error),
        }
        taken
    }

    fn take_into<'m>(
        &mut self,
        throttle: &mut Throttle<'m>,
        memory: &'m GuestRam,
        completions: &'m CompletionQueue,
        room: usize,
        started: &mut usize,
    ) -> Result<bool, RingError> {
        self.queue.disable_kicks(memory)?;
        // Counts what is answered at once too: a pass is bounded whatever the driver does.
        for _ in 0..room {
            let Some(available) = self.queue.take(memory)? else {
                break;
            };
            *started += usize::from(self.begin(available, throttle, completions));
        }
        if *started == room {
            // Full: the next look is when something is done, not when the driver kicks.
            return Ok(false);
        }
        self.queue.enable_kicks_unless_polling(memory)
    }

    /// Gives back what was answered, and tells the driver once.
    fn answer(
        &mut self,
        memory: &GuestRam,
        completions: &CompletionQueue,
        answers: &mut Vec<(u16, u32)>,
    ) -> Result<(), RingError> {
        completions.take(answers);
        if answers.is_empty() {
            return Ok(());
        }
        for (head, written) in answers.drain(..) {
            self.queue.complete(memory, head, written)?;
        }
        self.queue.notify(memory, self.interrupt.as_ref())
    }

    fn is_broken(&self, error: Option<RingError>) -> bool {
        if let Some(error) = &error
            && self.metrics.log_limit.allow()
        {
            log::warn!("block: queue {} is left alone until a reset: {error}", self.queue.index);
        }
        error.is_some()
    }
}

/// What one look at the ring brought.
#[derive(Default)]
struct Taken {
    started: usize,
    more: bool,
    error: Option<RingError>,
}
