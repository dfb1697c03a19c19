//! Prometheus' text exposition format 0.0.4, and the two kinds of metrics that need more than a number: histograms, and
//! families of counters told apart by a label. Knows the format's grammar, not what is measured.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What an HTTP answer with such a text calls it.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The kind of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; its name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts in buckets.
    Histogram,
}

/// A text that is being written: families one after the other, each with all of its samples.
#[derive(Debug, Default)]
pub struct Exposition(String);

/// A family, for its samples.
#[derive(Debug)]
pub struct Family<'e> {
    text: &'e mut String,
    name: &'e str,
}

impl Exposition {
    /// Begins a family.
    pub fn family<'e>(&'e mut self, name: &'e str, kind: Kind, help: &str) -> Family<'e> {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        self.0
            .push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        Family {
            text: &mut self.0,
            name,
        }
    }

    /// The whole text.
    pub fn finish(self) -> String {
        self.0
    }
}

impl Family<'_> {
    /// A sample of a whole number.
    pub fn number(&mut self, labels: &[(&str, &str)], value: u64) {
        self.line("", labels, &value.to_string());
    }

    /// A sample of so many microseconds, in seconds.
    pub fn microseconds(&mut self, labels: &[(&str, &str)], value: u64) {
        self.line("", labels, &format!("{}.{:06}", value / 1_000_000, value % 1_000_000));
    }

    /// A histogram of durations, in seconds.
    pub fn histogram(&mut self, labels: &[(&str, &str)], histogram: &Histogram) {
        let counts: Vec<u64> = histogram
            .counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect();
        let mut sum = 0;
        for (bound, count) in histogram.bounds.iter().copied().map(Some).chain([None]).zip(counts) {
            sum += count;
            let bound = bound.map_or("+Inf".to_owned(), |bound| seconds(bound * 1_000_000));
            let mut with_bound = labels.to_vec();
            with_bound.push(("le", &bound));
            self.line("_bucket", &with_bound, &sum.to_string());
        }
        self.line("_sum", labels, &seconds(histogram.nanoseconds.load(Ordering::Relaxed)));
        self.line("_count", labels, &sum.to_string());
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], value: &str) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        for (index, (name, value)) in labels.iter().enumerate() {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let before = if index == 0 { '{' } else { ',' };
            // A String takes whatever is written to it.
            let _ = write!(self.text, "{before}{name}=\"{value}\"");
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        self.text.push(' ');
        self.text.push_str(value);
        self.text.push('\n');
    }
}

/// Nanoseconds as seconds, with the digits that say something.
fn seconds(nanoseconds: u64) -> String {
    let text = format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// How many durations lay below each of some bounds.
#[derive(Debug)]
pub struct Histogram {
    /// Milliseconds, ascending.
    bounds: &'static [u64],
    counts: Vec<AtomicU64>,
    nanoseconds: AtomicU64,
}

impl Histogram {
    /// An empty one.
    pub fn new(bounds_ms: &'static [u64]) -> Self {
        Self {
            bounds: bounds_ms,
            counts: (0..=bounds_ms.len()).map(|_| AtomicU64::new(0)).collect(),
            nanoseconds: AtomicU64::new(0),
        }
    }

    /// Counts one.
    pub fn observe(&self, duration: Duration) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let above = |bound: &&u64| nanoseconds > bound.saturating_mul(1_000_000);
        let bucket = self.bounds.iter().take_while(above).count();
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

/// Counters told apart by one label, whose values the program itself names: there are as many as its source has.
#[derive(Debug, Default)]
pub struct Labelled(Mutex<BTreeMap<&'static str, u64>>);

impl Labelled {
    /// Adds one to the counter of `label`.
    pub fn increment(&self, label: &'static str) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(label).or_default() += 1;
    }

    /// All of them.
    pub fn values(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_help_type_and_samples() {
        let mut text = Exposition::default();
        let mut family = text.family("x_total", Kind::Counter, "Things.\nTwo \\ lines.");
        family.number(&[], 3);
        family.microseconds(&[("a", "q\"\\\n"), ("b", "")], 1_500_000);
        assert_eq!(
            text.finish(),
            "# HELP x_total Things.\\nTwo \\\\ lines.\n# TYPE x_total counter\nx_total 3\nx_total{a=\"q\\\"\\\\\\n\",b=\"\"} 1.500000\n"
        );
    }

    #[test]
    fn buckets_are_cumulative_and_a_bound_belongs_to_its_bucket() {
        let histogram = Histogram::new(&[10, 500]);
        for milliseconds in [1, 10, 11, 700] {
            histogram.observe(Duration::from_millis(milliseconds));
        }
        let mut text = Exposition::default();
        text.family("d", Kind::Histogram, "x")
            .histogram(&[("p", "q")], &histogram);
        assert_eq!(
            text.finish(),
            "# HELP d x\n# TYPE d histogram\nd_bucket{p=\"q\",le=\"0.01\"} 2\nd_bucket{p=\"q\",le=\"0.5\"} 3\n\
             d_bucket{p=\"q\",le=\"+Inf\"} 4\nd_sum{p=\"q\"} 0.722\nd_count{p=\"q\"} 4\n"
        );
    }

    #[test]
    fn each_label_has_its_counter() {
        let counters = Labelled::default();
        counters.increment("a");
        counters.increment("b");
        counters.increment("a");
        assert_eq!(counters.values(), BTreeMap::from([("a", 2), ("b", 1)]));
    }
}
