//! Requests of a guest, each of which waits for the host's disk. Knows no memory but that of requests.

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;

use base::StopSignal;
use memory::GuestRam;
use observe::LogLimit;
use virtio::{ActiveQueue, Chain, QueueInterrupt, QueueLoop, RingError};

use crate::{Metrics, QUEUE_SIZES};

/// `VIRTIO_PMEM_REQ_TYPE_FLUSH`, and what is answered (5.19.6).
const FLUSH: u32 = 0;
const OK: u32 = 0;
const EIO: u32 = 1;

/// What the worker owns.
pub(crate) struct Server {
    pub(crate) queue: ActiveQueue,
    pub(crate) memory: Arc<GuestRam>,
    pub(crate) interrupt: Arc<dyn QueueInterrupt>,
    pub(crate) file: Option<Arc<File>>,
    pub(crate) metrics: Metrics,
    pub(crate) log_limit: Arc<LogLimit>,
}

impl Server {
    /// Serves requests until it is stopped. Nothing is under way between two requests.
    pub(crate) fn run(mut self, queue_loop: &QueueLoop, stop: &StopSignal) -> Self {
        let log_limit = Arc::clone(&self.log_limit);
        queue_loop.serve("pmem", stop, &log_limit, || self.serve());
        self
    }

    /// At most as many requests as the ring has entries, so that a guest that never stops asking cannot keep the worker from being stopped.
    /// All that have come by then need the disk once. Tells whether there are more.
    fn serve(&mut self) -> Result<bool, RingError> {
        let memory = Arc::clone(&self.memory);
        self.queue.disable_kicks(&memory)?;
        for _ in 0..QUEUE_SIZES[0] {
            let Some(available) = self.queue.take(&memory)? else {
                break;
            };
            match available.check() {
                Ok(chain) => {
                    let written = self.answer(&chain);
                    self.queue.complete(&memory, chain.head(), written)?;
                }
                Err(bad) => {
                    self.metrics.refused.increment();
                    self.queue.complete(&memory, bad.head, 0)?;
                }
            }
        }
        self.queue.notify(&memory, self.interrupt.as_ref())?;
        self.queue.enable_kicks_unless_polling(&memory)
    }

    /// How many bytes the answer has.
    fn answer(&self, chain: &Chain<'_>) -> u32 {
        let mut kind = [0; 4];
        let is_flush = matches!(chain.reader().read(&mut kind), Ok(4)) && u32::from_le_bytes(kind) == FLUSH;
        let status = match is_flush.then(|| self.flush()) {
            Some(Ok(())) => OK,
            Some(Err(error)) => {
                if self.log_limit.allow() {
                    log::warn!("pmem: what the guest wrote cannot be brought to the disk: {error}");
                }
                EIO
            }
            None => {
                self.metrics.refused.increment();
                EIO
            }
        };
        let mut writer = chain.writer();
        match writer.write_all(&status.to_le_bytes()) {
            Ok(()) => 4,
            // There is no place for it.
            Err(_) => 0,
        }
    }

    /// All of the file, as the request names no part of it.
    fn flush(&self) -> io::Result<()> {
        self.metrics.flushes.increment();
        match &self.file {
            Some(file) => Ok(rustix::fs::fdatasync(file)?),
            None => Ok(()),
        }
    }
}
