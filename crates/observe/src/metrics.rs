//! Counters that components own and a registry that finds them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A number that only grows, shared by its component and the registry.
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<AtomicU64>);

impl Counter {
    /// Adds one.
    pub fn increment(&self) {
        self.add(1);
    }

    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The value now.
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One counter's name, labels and value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The name, such as `vcpu_exits_total`.
    pub name: &'static str,
    /// Label names and values.
    pub labels: Vec<(&'static str, String)>,
    /// The value when it was read.
    pub value: u64,
}

#[derive(Debug)]
struct Entry {
    name: &'static str,
    labels: Vec<(&'static str, String)>,
    counter: Counter,
}

/// Every counter of a process.
#[derive(Clone, Debug, Default)]
pub struct Registry(Arc<Mutex<Vec<Entry>>>);

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// A new counter under `name`, told apart from others of that name by its labels.
    pub fn counter(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        let counter = Counter::default();
        let labels = labels.iter().map(|&(key, value)| (key, value.to_owned())).collect();
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.push(Entry {
            name,
            labels,
            counter: counter.clone(),
        });
        counter
    }

    /// Drops all counters with such a label, whose components are gone, and takes over those of the ones in their place.
    pub fn replace(&self, label: &str, others: &Self) {
        let others = std::mem::take(&mut *others.0.lock().unwrap_or_else(PoisonError::into_inner));
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| entry.labels.iter().all(|(key, _)| *key != label));
        entries.extend(others);
    }

    /// Reads every counter, in the order of registration.
    pub fn samples(&self) -> Vec<Sample> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries
            .iter()
            .map(|entry| Sample {
                name: entry.name,
                labels: entry.labels.clone(),
                value: entry.counter.value(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_what_is_gone_make_room_for_those_in_its_place() {
        let (registry, others) = (Registry::new(), Registry::new());
        registry.counter("exits", &[("vcpu", "0")]).add(1);
        registry.counter("bytes", &[("device", "root")]).add(2);
        let new = others.counter("bytes", &[("device", "root")]);
        registry.replace("device", &others);
        new.add(3);
        let values: Vec<_> = registry
            .samples()
            .iter()
            .map(|sample| (sample.name, sample.value))
            .collect();
        assert_eq!(values, [("exits", 1), ("bytes", 3)]);
    }

    #[test]
    fn what_a_component_counts_is_read_through_the_registry() {
        let registry = Registry::new();
        let reads = registry.counter("requests_total", &[("kind", "read")]);
        registry.counter("requests_total", &[("kind", "write")]);
        reads.increment();
        reads.add(2);
        let samples = registry.samples();
        assert_eq!(samples.iter().map(|s| s.value).collect::<Vec<_>>(), [3, 0]);
        assert_eq!(samples[0].labels, [("kind", "read".to_owned())]);
    }
}
