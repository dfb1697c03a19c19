//! One queue's thread: requests out of chains, replies into them.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::StopSignal;
use fuse::{Answer, MAX_REQUEST, Reply};
use memory::GuestRam;
use observe::LogLimit;
use virtio::{ActiveQueue, Chain, QueueInterrupt, QueueLoop, RingError};

use crate::Metrics;

/// How many requests are served before the worker looks whether it is to stop: each may wait for a disk.
const PASS: usize = 16;

/// What a worker owns.
pub(crate) struct Serving {
    pub(crate) queue: ActiveQueue,
    pub(crate) memory: Arc<GuestRam>,
    pub(crate) interrupt: Arc<dyn QueueInterrupt>,
    pub(crate) server: Arc<dyn Answer>,
    pub(crate) metrics: Metrics,
    pub(crate) log_limit: Arc<LogLimit>,
    /// Set by the first request. Whoever reads it has stopped this worker.
    pub(crate) asked: Arc<AtomicBool>,
}

/// Where requests and replies lie while they are served.
struct Buffers {
    request: Box<[u8]>,
    reply: Reply,
}

impl Serving {
    /// Serves requests until it is stopped. Nothing is under way between two requests, so there is nothing to drain.
    pub(crate) fn run(mut self, queue_loop: &QueueLoop, stop: &StopSignal) -> Self {
        let mut buffers = Buffers {
            // Pages that no request touches take no memory.
            request: vec![0; MAX_REQUEST].into_boxed_slice(),
            reply: Reply::default(),
        };
        let log_limit = Arc::clone(&self.log_limit);
        queue_loop.serve("fs", stop, &log_limit, || self.serve(&mut buffers));
        self
    }

    /// Serves one pass. Tells whether there are more.
    fn serve(&mut self, buffers: &mut Buffers) -> Result<bool, RingError> {
        let memory = Arc::clone(&self.memory);
        self.queue.disable_kicks(&memory)?;
        for _ in 0..PASS {
            let Some(available) = self.queue.take(&memory)? else {
                return self.queue.enable_kicks_unless_polling(&memory);
            };
            match available.check() {
                Ok(chain) => {
                    let written = self.answer(&chain, buffers);
                    self.queue.complete(&memory, chain.head(), written)?;
                }
                Err(bad) => {
                    self.metrics.refused.increment();
                    self.queue.complete(&memory, bad.head, 0)?;
                }
            }
            // At once: the next request may take long.
            self.queue.notify(&memory, self.interrupt.as_ref())?;
        }
        Ok(true)
    }

    /// Returns how many bytes the guest got.
    fn answer(&self, chain: &Chain<'_>, buffers: &mut Buffers) -> u32 {
        let Some(request) = buffers.request.get_mut(..chain.readable_bytes()) else {
            self.metrics.refused.increment();
            return 0;
        };
        self.asked.store(true, Ordering::Relaxed);
        self.metrics.requests.increment();
        self.metrics.from_guest.add(request.len() as u64);
        let mut writer = chain.writer();
        let copied = chain.reader().read_exact(request).and_then(|()| {
            self.server.answer(request, chain.writable_bytes(), &mut buffers.reply);
            writer.write_all(buffers.reply.as_bytes())
        });
        // Both lengths are the chain's own.
        debug_assert!(copied.is_ok());
        let written = writer.position();
        self.metrics.to_guest.add(written as u64);
        u32::try_from(written).unwrap_or(u32::MAX)
    }
}
