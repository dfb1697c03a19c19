//! What the device counts. How much is mapped is told by whoever has the functions.

use std::fmt;

use observe::{Counter, LogLimit, Registry};

/// Kinds of requests, by their labels, in the order of their types.
const KINDS: [&str; 5] = ["attach", "detach", "map", "unmap", "probe"];

/// The counters of one device.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// In the order of [`crate::protocol::Request::place`].
    pub(crate) requests: [Counter; 5],
    /// Those of them whose status was not "ok".
    pub(crate) refused_requests: Counter,
    /// Chains that are no requests.
    pub(crate) refused_chains: Counter,
    /// For log lines that a guest can cause.
    pub(crate) log_limit: LogLimit,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry, id: &str) -> Self {
        let counter = |name| registry.counter(name, &[("device", id)]);
        let request = |kind| registry.counter("iommu_requests_total", &[("device", id), ("kind", kind)]);
        Self {
            requests: KINDS.map(request),
            refused_requests: counter("iommu_refused_requests_total"),
            refused_chains: counter("iommu_refused_chains_total"),
            log_limit: LogLimit::new(2),
        }
    }

    /// Says what the guest is only told the kind of.
    pub(crate) fn warn(&self, error: &dyn fmt::Display) {
        if self.log_limit.allow() {
            log::warn!("iommu: {error}");
        }
    }
}
