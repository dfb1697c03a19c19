//! What a VM has counted, and how it stands, as those who ask for it are told. Knows no request.

use engine::Counts;
use machine::GrowthInfo;
use observe::Registry;
use vmm_api::{Balloon, HotplugMemory, Mark, MetricSample};

/// Of an engine that counts exits itself, those that it answers without us among them.
const ENGINE_EXITS: &str = "engine_exits_total";
const ENGINE_REFUSED: &str = "engine_refused_total";

/// What is plugged of a VM's hot-pluggable memory, and what is to be: bytes that go up and down.
const PLUGGED: &str = "mem_plugged_bytes";
const REQUESTED: &str = "mem_requested_bytes";

/// Requests to plug memory while there were functions of the host's: mapped before, or waited for.
const PLUG_HITS: &str = "mem_plug_hits_total";
const PLUG_MISSES: &str = "mem_plug_misses_total";

/// What a guest is asked to do without, and does: bytes that go up and down.
const BALLOON_TARGET: &str = "balloon_target_bytes";
const BALLOON_INFLATED: &str = "balloon_inflated_bytes";

/// Every counter.
pub(crate) fn all(
    registry: &Registry,
    counts: Counts,
    growth: Option<&GrowthInfo>,
    balloon: Option<Balloon>,
) -> Vec<MetricSample> {
    let exits = counts.exits.into_iter().map(|(reason, value)| MetricSample {
        name: ENGINE_EXITS.to_owned(),
        labels: vec![("reason".to_owned(), reason.to_owned())],
        value,
    });
    let refused = counts.refused.map(|value| (ENGINE_REFUSED, value));
    let plugged = growth.map(|GrowthInfo { sizes, counts, .. }| {
        [
            (PLUGGED, sizes.plugged),
            (REQUESTED, sizes.requested),
            (PLUG_HITS, counts.hits),
            (PLUG_MISSES, counts.misses),
        ]
    });
    let balloon = balloon.map(|balloon| [(BALLOON_TARGET, balloon.target), (BALLOON_INFLATED, balloon.inflated)]);
    let sizes = plugged.into_iter().flatten().chain(balloon.into_iter().flatten());
    let without_labels = refused.into_iter().chain(sizes);
    let without_labels = without_labels.map(|(name, value)| MetricSample {
        name: name.to_owned(),
        labels: Vec::new(),
        value,
    });
    let samples = registry.samples().into_iter().map(|sample| MetricSample {
        name: sample.name.to_owned(),
        labels: (sample.labels.into_iter())
            .map(|(key, value)| (key.to_owned(), value))
            .collect(),
        value: sample.value,
    });
    samples.chain(exits).chain(without_labels).collect()
}

pub(crate) fn hotplug_memory(growth: &GrowthInfo) -> HotplugMemory {
    HotplugMemory {
        region: growth.sizes.region,
        block: growth.sizes.block,
        requested: growth.sizes.requested,
        plugged: growth.sizes.plugged,
        target: growth.target,
    }
}

pub(crate) fn mark(mark: observe::marks::Mark) -> Mark {
    Mark {
        name: mark.name.to_owned(),
        at_ns: mark.at_ns,
    }
}
