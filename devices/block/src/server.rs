//! The loop that serves one queue, whatever carries out its requests.
//!
//! One pass takes everything that is available, starts it together, waits once, and answers everything that is done with
//! one look at whether the driver wants an interrupt.

use std::sync::Arc;
use std::time::Duration;

use base::StopSignal;
use memory::GuestRam;
use virtio::virtio_queue::QueueT;
use virtio::{ActiveQueue, Available, QueueInterrupt, RingError};

use crate::backend::Backend;
use crate::device::NoSpace;
use crate::disk::Disk;
use crate::limit::{Limits, Pace};
use crate::metrics::Metrics;
use crate::request::{Io, Sink, parse};
use crate::threads::{self, PoolWaiting};
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
    pub(crate) limits: Limits,
    pub(crate) no_space: NoSpace,
    /// Writes are on stable storage before they are answered.
    pub(crate) durable: bool,
}

impl Server {
    /// Serves by io_uring until stopped; returns with nothing under way.
    pub(crate) fn run_uring(mut self, ring: Ring, waiting: Waiting, stop: &StopSignal) -> Self {
        let (memory, disk, sink) = (Arc::clone(&self.memory), Arc::clone(&self.disk), Sink::default());
        if let Err(error) = waiting.watch_stop(stop.fd()) {
            log::error!("block: it cannot wait for its stop: {error}");
            self.ring = Some(ring);
            return self;
        }
        let mut backend = RingBackend::new(ring, disk.file(), waiting);
        self.serve(&mut backend, &memory, &sink);
        self.ring = backend.into_ring();
        self
    }

    /// Serves by so many threads until stopped; returns with nothing under way.
    pub(crate) fn run_threads(mut self, waiting: PoolWaiting, threads: usize, stop: &StopSignal) -> Self {
        let (memory, disk, sink) = (Arc::clone(&self.memory), Arc::clone(&self.disk), Sink::default());
        threads::with_pool(&disk, waiting, threads, stop, |backend| {
            self.serve(backend, &memory, &sink);
        });
        self
    }

    fn serve<'m>(&mut self, backend: &mut impl Backend<'m>, memory: &'m GuestRam, sink: &'m Sink) {
        let most = usize::from(self.queue.queue.size());
        let (mut done, mut answers) = (Vec::new(), Vec::new());
        let mut pace = Pace::new(&self.limits);
        // Counts what the pace holds back, too, and what there is no space for: a ring's worth is all that there ever is.
        let mut under_way = self.begin_held(&mut pace, memory, sink);
        let mut kept: Vec<Io<'m>> = Vec::new();
        let mut stopping = false;
        let mut broken = false;
        loop {
            let mut more = false;
            if !stopping && !broken {
                let taken = self.take(&mut pace, memory, sink, most - under_way);
                under_way += taken.started;
                more = taken.more;
                broken |= self.is_broken(taken.error);
            }
            let pause = pace.release(stopping, &self.metrics, |io| backend.submit(io));
            let answered = self.answer(memory, sink, &mut answers);
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
            let answered = self.answer(memory, sink, &mut answers);
            broken |= self.is_broken(answered.err());
        }
    }

    /// Begins what an earlier worker has kept; how many requests that are.
    fn begin_held<'m>(&mut self, pace: &mut Pace<'m>, memory: &'m GuestRam, sink: &'m Sink) -> usize {
        let mut begun = 0;
        for available in self.queue.take_held(memory) {
            begun += usize::from(self.begin(available, pace, sink));
        }
        begun
    }

    /// Keeps a request for which there is no space; until then it is under way.
    fn keep<'m>(&self, io: Io<'m>, kept: &mut Vec<Io<'m>>) {
        self.metrics.no_space.increment();
        if self.metrics.complaints.allow() {
            log::warn!(
                "block: no space left on the host: {:?} at {:#x} waits until there is some",
                io.operation,
                io.offset
            );
        }
        kept.push(io);
        self.no_space.raise();
    }

    /// Hands a request to the pace; false for one that is answered already.
    fn begin<'m>(&self, available: Available<'m>, pace: &mut Pace<'m>, sink: &'m Sink) -> bool {
        match available.check() {
            Ok(chain) => {
                let io = parse(&chain, &self.disk, self.durable, sink, &self.metrics);
                let begun = io.is_some();
                io.into_iter().for_each(|io| pace.hold(io));
                begun
            }
            Err(bad) => {
                self.metrics.refused.increment();
                sink.put(bad.head, 0);
                false
            }
        }
    }

    /// Hands everything that is available to the pace, `room` requests at most.
    fn take<'m>(&mut self, pace: &mut Pace<'m>, memory: &'m GuestRam, sink: &'m Sink, room: usize) -> Taken {
        let mut taken = Taken::default();
        if room == 0 {
            return taken;
        }
        let result = self.take_into(pace, memory, sink, room, &mut taken.started);
        match result {
            Ok(more) => taken.more = more,
            Err(error) => taken.error = Some(error),
        }
        taken
    }

    fn take_into<'m>(
        &mut self,
        pace: &mut Pace<'m>,
        memory: &'m GuestRam,
        sink: &'m Sink,
        room: usize,
        started: &mut usize,
    ) -> Result<bool, RingError> {
        self.queue.disable_kicks(memory)?;
        // Counts what is answered at once too: a pass is bounded whatever the driver does.
        for _ in 0..room {
            let Some(available) = self.queue.take(memory)? else {
                break;
            };
            *started += usize::from(self.begin(available, pace, sink));
        }
        if *started == room {
            // Full: the next look is when something is done, not when the driver kicks.
            return Ok(false);
        }
        self.queue.enable_kicks_unless_polling(memory)
    }

    /// Gives back what was answered, and tells the driver once.
    fn answer(&mut self, memory: &GuestRam, sink: &Sink, answers: &mut Vec<(u16, u32)>) -> Result<(), RingError> {
        sink.take(answers);
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
            && self.metrics.complaints.allow()
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
