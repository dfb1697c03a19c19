//! What the device counts.

use observe::{Counter, Registry};

/// One device's counters.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// Connections that were established, from either side.
    pub(crate) opened: Counter,
    /// Connections that were asked for and not established.
    pub(crate) refused: Counter,
    /// Bytes handed to the guest.
    pub(crate) to_guest: Counter,
    /// Bytes taken from the guest.
    pub(crate) from_guest: Counter,
    /// RST packets sent.
    pub(crate) resets: Counter,
    /// Packets and buffers of the guest's that are not what the specification allows.
    pub(crate) malformed: Counter,
}

impl Metrics {
    /// Registers the counters of device `id`.
    pub(crate) fn register(registry: &Registry, id: &str) -> Self {
        let counter = |name| registry.counter(name, &[("device", id)]);
        let bytes = |direction| registry.counter("vsock_bytes_total", &[("device", id), ("direction", direction)]);
        Self {
            opened: counter("vsock_connections_opened_total"),
            refused: counter("vsock_connections_refused_total"),
            to_guest: bytes("to-guest"),
            from_guest: bytes("from-guest"),
            resets: counter("vsock_resets_sent_total"),
            malformed: counter("vsock_malformed_total"),
        }
    }
}
