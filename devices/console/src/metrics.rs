//! What the device counts.

use observe::{Counter, LogLimit, Registry};

/// One device's counters.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// Bytes that the guest was given.
    pub(crate) input: Counter,
    /// Bytes of the guest's that were written.
    pub(crate) output: Counter,
    /// Bytes of the guest's that nobody got.
    pub(crate) dropped: Counter,
    /// For log lines that a guest can cause.
    pub(crate) log_limit: LogLimit,
}

impl Metrics {
    /// Registers the counters of device `id`.
    pub(crate) fn register(registry: &Registry, id: &str) -> Self {
        let bytes = |direction| registry.counter("console_bytes_total", &[("device", id), ("direction", direction)]);
        Self {
            input: bytes("input"),
            output: bytes("output"),
            dropped: registry.counter("console_dropped_bytes_total", &[("device", id)]),
            log_limit: LogLimit::new(2),
        }
    }
}
