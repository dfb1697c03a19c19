//! What a node counts of its own work: starts, why they failed, and how long each of their parts took. What is true at
//! the moment of asking is not counted here but looked up (`collect`), and told by `endpoint`.

mod collect;
mod endpoint;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use observe::exposition::{Exposition, Histogram, Kind, Labelled};
use observe::{Counter, Span};

use crate::Error;
use crate::trace::{PHASES, SERVICE, STARTS};

pub use endpoint::Endpoint;

/// Milliseconds; emulated hosts need the upper half.
const BOUNDS: &[u64] = &[
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000,
];

/// For how long a VMM that has not answered is not asked.
const SILENCE: Duration = Duration::from_secs(60);

/// Counts, from the daemon's start on.
#[derive(Debug)]
pub(crate) struct Metrics {
    starts: Counter,
    failures: Labelled,
    operations: Labelled,
    duration: Histogram,
    phases: BTreeMap<&'static str, Histogram>,
    /// Of the endpoint.
    scrapes: Counter,
    refused: Counter,
    /// VMMs that did not answer, by their sandboxes, and when.
    silent: Mutex<BTreeMap<String, Instant>>,
    images: collect::Images,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            starts: Counter::default(),
            failures: Labelled::default(),
            operations: Labelled::default(),
            duration: Histogram::new(BOUNDS),
            phases: PHASES.into_iter().map(|name| (name, Histogram::new(BOUNDS))).collect(),
            scrapes: Counter::default(),
            refused: Counter::default(),
            silent: Mutex::default(),
            images: Mutex::default(),
        }
    }
}

impl Metrics {
    /// An operation is over; it was made of these.
    pub(crate) fn operation(&self, name: &'static str, spans: &[Span]) {
        self.operations.increment(name);
        let took = |span: &Span| Duration::from_nanos(span.end_ns.saturating_sub(span.start_ns));
        // The last one is the operation itself.
        if let Some(whole) = spans
            .last()
            .filter(|span| span.error.is_none() && STARTS.contains(&name))
        {
            self.duration.observe(took(whole));
        }
        for span in spans.iter().filter(|span| span.service == SERVICE) {
            if let Some(phase) = self.phases.get(span.name.as_str()) {
                phase.observe(took(span));
            }
        }
    }

    /// A start has come to its end, good or bad.
    pub(crate) fn started<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        match &result {
            Ok(_) => self.starts.increment(),
            Err(error) => self.failures.increment(error.reason()),
        }
        result
    }

    /// Whether this sandbox's VMM is worth asking.
    fn answers(&self, id: &str) -> bool {
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        silent.retain(|_, since| since.elapsed() < SILENCE);
        !silent.contains_key(id)
    }

    /// It did not answer.
    fn is_silent(&self, id: &str) {
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        silent.insert(id.to_owned(), Instant::now());
    }

    fn write(&self, text: &mut Exposition) {
        text.family(
            "basalt_sandbox_starts_total",
            Kind::Counter,
            "Sandboxes that came to run.",
        )
        .number(&[], self.starts.value());
        let help = "Sandboxes that did not come to run, by reason.";
        let mut family = text.family("basalt_sandbox_start_failures_total", Kind::Counter, help);
        for (reason, count) in self.failures.values() {
            family.number(&[("reason", reason)], count);
        }
        let help = "Operations that were asked for, by kind.";
        let mut family = text.family("basalt_operations_total", Kind::Counter, help);
        for (operation, count) in self.operations.values() {
            family.number(&[("operation", operation)], count);
        }
        let help = "From the request for a sandbox to its command, of those that came to run.";
        text.family("basalt_sandbox_start_duration_seconds", Kind::Histogram, help)
            .histogram(&[], &self.duration);
        let help = "The parts of a start.";
        let mut family = text.family("basalt_sandbox_start_phase_duration_seconds", Kind::Histogram, help);
        for (phase, histogram) in &self.phases {
            family.histogram(&[("phase", phase)], histogram);
        }
        text.family(
            "basalt_scrapes_total",
            Kind::Counter,
            "Times that these metrics were told.",
        )
        .number(&[], self.scrapes.value());
        let help = "Connections to the metrics' endpoint that were closed because too many were open.";
        text.family("basalt_scrapes_refused_total", Kind::Counter, help)
            .number(&[], self.refused.value());
    }
}
