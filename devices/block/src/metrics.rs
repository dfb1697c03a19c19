//! What a disk counts.

use observe::{Counter, LogLimit, Registry};

/// The counters of one disk, shared by its queues.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) reads: Counter,
    pub(crate) writes: Counter,
    pub(crate) flushes: Counter,
    pub(crate) discards: Counter,
    pub(crate) write_zeroes: Counter,
    pub(crate) others: Counter,
    pub(crate) bytes_read: Counter,
    pub(crate) bytes_written: Counter,
    pub(crate) errors: Counter,
    pub(crate) refused: Counter,
    /// Requests that a rate limit made wait.
    pub(crate) throttled: Counter,
    /// Requests that were kept because the host has no space left.
    pub(crate) no_space: Counter,
    /// For log lines that a guest can cause.
    pub(crate) log_limit: LogLimit,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry, id: &str) -> Self {
        let requests = |kind| registry.counter("block_requests_total", &[("device", id), ("kind", kind)]);
        let bytes = |direction| registry.counter("block_bytes_total", &[("device", id), ("direction", direction)]);
        Self {
            reads: requests("read"),
            writes: requests("write"),
            flushes: requests("flush"),
            discards: requests("discard"),
            write_zeroes: requests("write-zeroes"),
            others: requests("other"),
            bytes_read: bytes("read"),
            bytes_written: bytes("write"),
            errors: registry.counter("block_errors_total", &[("device", id)]),
            refused: registry.counter("block_refused_chains_total", &[("device", id)]),
            throttled: registry.counter("block_throttled_total", &[("device", id)]),
            no_space: registry.counter("block_no_space_total", &[("device", id)]),
            log_limit: LogLimit::new(4),
        }
    }
}
