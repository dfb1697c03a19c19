//! What the device counts. How large the balloon is is told by whoever asks for its size.

use observe::{Counter, LogLimit, Registry};

/// Kinds of requests, by their labels, in the order of their queues.
const KINDS: [&str; 3] = ["inflate", "deflate", "report"];

/// Why pages that were given back have stayed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kept {
    /// Somebody else reaches them.
    Pinned,
    /// Their memory is not plugged.
    Unplugged,
    /// There were too many in one request.
    Limit,
    /// The host has refused.
    Host,
}

/// In the order of [`Kept`].
const REASONS: [&str; 4] = ["pinned", "unplugged", "limit", "host"];

/// The counters of one device.
#[derive(Debug)]
pub(crate) struct Metrics {
    requests: [Counter; 3],
    pub(crate) reported: Counter,
    pub(crate) discarded: Counter,
    kept: [Counter; 4],
    /// Ranges that were no whole pages of guest memory.
    pub(crate) refused_ranges: Counter,
    pub(crate) refused_chains: Counter,
    /// For log lines that a guest can cause.
    pub(crate) log_limit: LogLimit,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry, id: &str) -> Self {
        let counter = |name| registry.counter(name, &[("device", id)]);
        let request = |kind| registry.counter("balloon_requests_total", &[("device", id), ("kind", kind)]);
        let kept = |why| registry.counter("balloon_kept_bytes_total", &[("device", id), ("reason", why)]);
        Self {
            requests: KINDS.map(request),
            reported: counter("balloon_reported_bytes_total"),
            discarded: counter("balloon_discarded_bytes_total"),
            kept: REASONS.map(kept),
            refused_ranges: counter("balloon_refused_ranges_total"),
            refused_chains: counter("balloon_refused_chains_total"),
            log_limit: LogLimit::new(2),
        }
    }

    /// A request came by this queue.
    pub(crate) fn request(&self, queue: u16) {
        if let Some(counter) = self.requests.get(usize::from(queue)) {
            counter.increment();
        }
    }

    pub(crate) fn kept(&self, why: Kept, bytes: u64) {
        if let Some(counter) = self.kept.get(why as usize) {
            counter.add(bytes);
        }
    }
}
