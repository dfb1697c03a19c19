//! What the device counts. How much is plugged is told by whoever asks for its size.

use observe::{Counter, LogLimit, Registry};

use crate::protocol::{Request, Response};

/// Kinds of requests, and of answers, by their labels.
const KINDS: [&str; 5] = ["plug", "unplug", "unplug-all", "state", "other"];
const ANSWERS: [&str; 4] = ["ack", "nack", "busy", "error"];

/// The counters of one device.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// By kind, then by answer.
    requests: Vec<Counter>,
    pub(crate) refused: Counter,
    /// For log lines that a guest can cause.
    pub(crate) log_limit: LogLimit,
}

impl Metrics {
    pub(crate) fn new(registry: &Registry, id: &str) -> Self {
        let pairs = KINDS
            .iter()
            .flat_map(|kind| ANSWERS.iter().map(move |answer| (*kind, *answer)));
        let requests = pairs.map(|(kind, answer)| {
            registry.counter(
                "mem_requests_total",
                &[("device", id), ("kind", kind), ("answer", answer)],
            )
        });
        Self {
            requests: requests.collect(),
            refused: registry.counter("mem_refused_chains_total", &[("device", id)]),
            log_limit: LogLimit::new(2),
        }
    }

    /// A request was answered.
    pub(crate) fn count(&self, request: &Request, response: Response) {
        let kind = match request {
            Request::Plug(_) => 0,
            Request::Unplug(_) => 1,
            Request::UnplugAll => 2,
            Request::State(_) => 3,
            Request::Unknown => 4,
        };
        let answer = match response {
            Response::Ack(_) => 0,
            Response::Nack => 1,
            Response::Busy => 2,
            Response::Error => 3,
        };
        if let Some(counter) = self.requests.get(kind * ANSWERS.len() + answer) {
            counter.increment();
        }
    }
}
