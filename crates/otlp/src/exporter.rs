//! The thread that posts spans, and the handle of those who have some. The queue between them is bounded; what does not
//! fit is dropped and counted, as is what the collector does not take.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use observe::span::now_ns;
use observe::{Counter, LogLimit, Span};
use rustix::time::{ClockId, clock_gettime};

use crate::{Endpoint, Error, document};

/// Recordings that may wait.
const QUEUE: usize = 256;

/// Spans of one request, and how long the first of them waits for others.
const BATCH: usize = 512;
const BATCH_TIME: Duration = Duration::from_secs(1);

/// How long a collector may take for one request.
const POST_LIMIT: Duration = Duration::from_secs(3);

enum Message {
    Spans(Vec<Span>),
    /// Everything before this is to be posted now; answered when it is.
    Flush(SyncSender<()>),
}

/// Where spans are handed in; clones hand them to the same thread.
#[derive(Clone, Debug)]
pub struct Exporter {
    queue: SyncSender<Message>,
    exported: Counter,
    dropped: Counter,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Spans(_) => "Spans",
            Self::Flush(_) => "Flush",
        })
    }
}

impl Exporter {
    /// For the collector that the environment names, if it names one.
    ///
    /// # Errors
    /// What it says cannot be followed, or there is no thread to be had.
    pub fn from_environment(version: &'static str) -> Result<Option<Self>, Error> {
        Endpoint::from_environment()?
            .map(|endpoint| Self::start(endpoint, version))
            .transpose()
    }

    /// Starts the thread; it ends when the last handle is gone.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(endpoint: Endpoint, version: &'static str) -> Result<Self, Error> {
        let (queue, messages) = sync_channel(QUEUE);
        let exporter = Self {
            queue,
            exported: Counter::default(),
            dropped: Counter::default(),
        };
        let worker = Worker {
            endpoint,
            version,
            exported: exporter.exported.clone(),
            dropped: exporter.dropped.clone(),
            log_limit: LogLimit::new(1),
        };
        std::thread::Builder::new()
            .name("spans".into())
            .stack_size(256 << 10)
            .spawn(move || worker.run(&messages))?;
        Ok(exporter)
    }

    /// Hands spans over; drops them where too many wait.
    pub fn export(&self, spans: Vec<Span>) {
        match self.queue.try_send(Message::Spans(spans)) {
            Ok(()) => (),
            Err(TrySendError::Full(message) | TrySendError::Disconnected(message)) => {
                if let Message::Spans(spans) = message {
                    self.dropped.add(count(&spans));
                }
            }
        }
    }

    /// Waits until what was handed over so far is posted or dropped; false when that takes longer than `limit`.
    pub fn flush(&self, limit: Duration) -> bool {
        let (done, waits) = sync_channel(1);
        let deadline = Instant::now() + limit;
        let mut message = Message::Flush(done);
        loop {
            match self.queue.try_send(message) {
                Ok(()) => break,
                Err(TrySendError::Disconnected(_)) => return false,
                Err(TrySendError::Full(back)) => {
                    if Instant::now() >= deadline {
                        return false;
                    }
                    message = back;
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        waits
            .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            .is_ok()
    }

    /// How many spans the collector has taken.
    pub fn exported(&self) -> u64 {
        self.exported.value()
    }

    /// How many were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped.value()
    }
}

fn count(spans: &[Span]) -> u64 {
    u64::try_from(spans.len()).unwrap_or(u64::MAX)
}

struct Worker {
    endpoint: Endpoint,
    version: &'static str,
    exported: Counter,
    dropped: Counter,
    log_limit: LogLimit,
}

impl Worker {
    fn run(&self, messages: &Receiver<Message>) {
        let mut batch: Vec<Span> = Vec::new();
        let mut due: Option<Instant> = None;
        loop {
            let message = match due {
                None => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => messages.recv_timeout(due.saturating_duration_since(Instant::now())),
            };
            let flushed = match message {
                Ok(Message::Spans(spans)) => {
                    due.get_or_insert(Instant::now() + BATCH_TIME);
                    batch.extend(spans);
                    if batch.len() < BATCH {
                        continue;
                    }
                    None
                }
                Ok(Message::Flush(done)) => Some(done),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => {
                    self.post(&batch);
                    return;
                }
            };
            self.post(&batch);
            batch.clear();
            due = None;
            if let Some(done) = flushed {
                // Who asked may have stopped waiting.
                let _ = done.send(());
            }
        }
    }

    fn post(&self, spans: &[Span]) {
        if spans.is_empty() {
            return;
        }
        let body = document(spans, self.version, epoch_ns()).to_string();
        match self.endpoint.post(body.as_bytes(), POST_LIMIT) {
            Ok(()) => self.exported.add(count(spans)),
            Err(error) => {
                self.dropped.add(count(spans));
                if self.log_limit.allow() {
                    log::info!(
                        "{} spans are dropped, the collector does not take them: {error}",
                        spans.len()
                    );
                }
            }
        }
    }
}

/// The time since 1970 at which CLOCK_MONOTONIC was zero, as of now.
fn epoch_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let now = seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0);
    now.saturating_sub(now_ns())
}
