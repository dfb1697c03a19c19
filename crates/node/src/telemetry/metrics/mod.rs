//! What a node counts of its own work: starts, why they failed, and how long each of their parts took. What is true at
//! the moment of asking is not counted here but looked up (`collect`), and told by `endpoint`.

mod accelerator;
mod collect;
mod endpoint;
mod process;
mod vmm;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use observe::exposition::{Exposition, Histogram, Kind, Labelled};
use observe::{Counter, Span};

use crate::Error;
use crate::telemetry::trace::{PHASES, SERVICE, STARTS};

pub(crate) use collect::MetricSources;
pub use endpoint::Endpoint;
pub(crate) use endpoint::{Observed, judge as judge_scrape};
pub(crate) use vmm::judge as judge_counters;

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
    /// VMMs that did not answer when they were asked last, by their sandboxes, and when that was.
    silent: Mutex<BTreeMap<String, Instant>>,
    /// The same of servers of accelerators.
    silent_accelerators: accelerator::Silent,
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
            silent_accelerators: accelerator::Silent::default(),
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

    /// Those that have never been silent first, then those whose silence is the oldest: VMMs that do not answer must not keep
    /// the others from being asked. And whether each is worth asking now.
    fn in_turn<T>(&self, all: Vec<T>, id: impl Fn(&T) -> &str) -> Vec<(T, bool)> {
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        silent.retain(|known, _| all.iter().any(|one| id(one) == known));
        let mut ordered: Vec<_> = all
            .into_iter()
            .map(|one| (silent.get(id(&one)).copied(), one))
            .collect();
        ordered.sort_by_key(|(since, _)| *since);
        let worth = |since: Option<Instant>| since.is_none_or(|since| since.elapsed() >= SILENCE);
        ordered.into_iter().map(|(since, one)| (one, worth(since))).collect()
    }

    /// It did not answer, or did.
    fn is_silent(&self, id: &str, is: bool) {
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        if is {
            silent.insert(id.to_owned(), Instant::now());
        } else {
            silent.remove(id);
        }
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
        text.family("basalt_scrapes_total", Kind::Counter, "Scrapes of these metrics.")
            .number(&[], self.scrapes.value());
        let help = "Connections to the metrics' endpoint that were closed because too many were open.";
        text.family("basalt_scrapes_refused_total", Kind::Counter, help)
            .number(&[], self.refused.value());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_silent_comes_last_and_not_within_a_minute() {
        let metrics = Metrics::default();
        metrics.is_silent("a", true);
        metrics.is_silent("b", true);
        metrics.is_silent("gone", true);
        let turn = || metrics.in_turn(vec!["a", "b", "c"], |id| id);
        assert_eq!(turn(), [("c", true), ("a", false), ("b", false)]);
        assert_eq!(metrics.silent.lock().unwrap().len(), 2);
        // A minute later.
        for since in metrics.silent.lock().unwrap().values_mut() {
            *since = since.checked_sub(SILENCE).unwrap();
        }
        assert_eq!(turn(), [("c", true), ("a", true), ("b", true)]);
        metrics.is_silent("a", false);
        assert_eq!(turn(), [("a", true), ("c", true), ("b", true)]);
    }
}
