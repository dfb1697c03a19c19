//! What a network device counts.

use observe::{Counter, LogLimit, Registry};

/// One direction, seen from the guest.
#[derive(Debug)]
pub(crate) struct Direction {
    pub(crate) packets: Counter,
    pub(crate) bytes: Counter,
    /// Packets that one side sent and the other did not get.
    pub(crate) dropped: Counter,
}

/// The counters of one device, shared by its pairs.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) receive: Direction,
    pub(crate) transmit: Direction,
    /// Packets that were read into memory of our own, as the guest had less room than the largest one needs.
    pub(crate) copied: Counter,
    /// Chains that do not hold up.
    pub(crate) refused: Counter,
    /// Times that a rate limit made a queue wait.
    pub(crate) throttled: Counter,
    /// Control commands that were refused (`VIRTIO_NET_ERR`).
    pub(crate) refused_commands: Counter,
    /// For log lines that a guest can cause.
    pub(crate) log_limit: LogLimit,
}

impl Direction {
    fn new(registry: &Registry, id: &str, direction: &str) -> Self {
        let labels = [("device", id), ("direction", direction)];
        Self {
            packets: registry.counter("net_packets_total", &labels),
            bytes: registry.counter("net_bytes_total", &labels),
            dropped: registry.counter("net_dropped_packets_total", &labels),
        }
    }
}

impl Metrics {
    pub(crate) fn new(registry: &Registry, id: &str) -> Self {
        Self {
            receive: Direction::new(registry, id, "receive"),
            transmit: Direction::new(registry, id, "transmit"),
            copied: registry.counter("net_copied_packets_total", &[("device", id)]),
            refused: registry.counter("net_refused_chains_total", &[("device", id)]),
            throttled: registry.counter("net_throttled_total", &[("device", id)]),
            refused_commands: registry.counter("net_refused_commands_total", &[("device", id)]),
            log_limit: LogLimit::new(4),
        }
    }
}
