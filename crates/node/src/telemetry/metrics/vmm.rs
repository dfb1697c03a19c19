//! VMMs' own counters. A VMM may be hostile: of its counters only known names pass, with few labels of few characters.

use std::collections::BTreeMap;

use vmm_api::MetricSample;

/// Series of one VMM.
const MAX_SERIES: usize = 256;
/// Length of a label's value.
const MAX_LABEL: usize = 32;

/// What VMMs count, and what that is, in the order of docs/vmm.md. A name that is not here is not told.
pub(super) const COUNTERS: [(&str, &str); 50] = [
    ("vcpu_exits_total", "Exits of vCPUs to the VMM."),
    ("engine_exits_total", "Exits of guests that own their CPUs."),
    (
        "engine_refused_total",
        "What guests that own their CPUs have tried and none may.",
    ),
    (
        "memory_huge_bytes",
        "Guest memory in huge pages that the host had set aside.",
    ),
    ("virtio_activations_total", "Times that a driver has set a device up."),
    ("virtio_resets_total", "Times that a driver has reset a device."),
    ("virtio_config_errors_total", "What drivers set up wrongly."),
    (
        "virtio_notify_exits_total",
        "Doorbells that were rung before their device's thread listened.",
    ),
    (
        "balloon_requests_total",
        "Requests to inflate and deflate balloons, and reports of free pages.",
    ),
    (
        "balloon_reported_bytes_total",
        "Guest memory that was reported as free.",
    ),
    (
        "balloon_discarded_bytes_total",
        "Guest memory that was given back to the host: reported as free, or inflated.",
    ),
    (
        "balloon_kept_bytes_total",
        "Guest memory that was given back and has stayed.",
    ),
    (
        "balloon_refused_ranges_total",
        "Ranges of such memory that are no whole pages of it.",
    ),
    (
        "balloon_refused_chains_total",
        "Descriptor chains of balloons that do not hold up.",
    ),
    ("balloon_target_bytes", "Memory that the guest is to do without."),
    ("balloon_inflated_bytes", "Memory that the guest does without."),
    ("iommu_requests_total", "Requests to guests' IOMMUs."),
    (
        "iommu_refused_requests_total",
        "Requests to guests' IOMMUs whose answer was an error.",
    ),
    (
        "iommu_refused_chains_total",
        "Descriptor chains of guests' IOMMUs that are no requests.",
    ),
    ("block_requests_total", "Requests of block devices."),
    ("block_bytes_total", "Bytes of block devices."),
    ("block_errors_total", "Requests of block devices that failed."),
    (
        "block_refused_chains_total",
        "Descriptor chains of block devices that do not hold up.",
    ),
    ("block_throttled_total", "Times that a rate made block requests wait."),
    (
        "block_no_space_total",
        "Requests of block devices that were kept because the host had no space left.",
    ),
    ("console_bytes_total", "Bytes of the console."),
    ("console_dropped_bytes_total", "Bytes of the console that were dropped."),
    ("fs_requests_total", "Requests of shared directories."),
    (
        "fs_refused_chains_total",
        "Descriptor chains of shared directories that do not hold up.",
    ),
    (
        "fs_bytes_total",
        "Bytes of requests of shared directories and of replies.",
    ),
    ("mem_requests_total", "Requests to plug and unplug memory."),
    (
        "mem_refused_chains_total",
        "Descriptor chains of such requests that do not hold up.",
    ),
    ("mem_plugged_bytes", "Hot-pluggable memory that the guest has plugged."),
    (
        "mem_requested_bytes",
        "Hot-pluggable memory that the guest is to have plugged.",
    ),
    ("net_packets_total", "Packets of network interfaces."),
    ("net_bytes_total", "Bytes of network interfaces."),
    (
        "net_dropped_packets_total",
        "Packets of network interfaces that were dropped.",
    ),
    (
        "net_copied_packets_total",
        "Packets that came while a guest had less room than the largest one needs.",
    ),
    (
        "net_refused_chains_total",
        "Descriptor chains of network interfaces that do not hold up.",
    ),
    (
        "net_refused_commands_total",
        "Commands to network interfaces that were refused.",
    ),
    (
        "net_throttled_total",
        "Times that a network interface waited for its limit.",
    ),
    (
        "pmem_flushes_total",
        "Requests to bring a file that is memory to the host's disk.",
    ),
    (
        "pmem_refused_chains_total",
        "Descriptor chains of files that are memory that do not hold up, and requests of other kinds.",
    ),
    ("rng_bytes_total", "Random bytes for the guest."),
    (
        "rng_refused_chains_total",
        "Descriptor chains of entropy devices that do not hold up.",
    ),
    ("vsock_connections_opened_total", "Connections over vsock."),
    (
        "vsock_connections_refused_total",
        "Connections over vsock that were refused.",
    ),
    ("vsock_bytes_total", "Bytes over vsock."),
    (
        "vsock_resets_sent_total",
        "Resets of vsock connections sent to the guest.",
    ),
    ("vsock_malformed_total", "Packets over vsock that do not hold up."),
];

/// The labels that pass; others are added up.
const LABELS: [&str; 6] = ["answer", "device", "direction", "kind", "reason", "size"];

/// Labels, and their values.
type Labels = Vec<(&'static str, String)>;

/// What one VMM has counted, by name and labels.
pub(super) type Counts = BTreeMap<&'static str, BTreeMap<Labels, u64>>;

/// What passes of a VMM's counters.
pub(super) fn known(samples: Vec<MetricSample>) -> Counts {
    let mut all = Counts::new();
    let mut series = 0;
    for sample in samples {
        let Some((name, _)) = COUNTERS.iter().find(|(name, _)| *name == sample.name) else {
            continue;
        };
        let plain = |value: &str| {
            let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
            !value.is_empty() && value.len() <= MAX_LABEL && value.bytes().all(good)
        };
        let mut labels = Labels::new();
        for label in LABELS {
            let value = sample
                .labels
                .iter()
                .find(|(other, value)| other == label && plain(value));
            labels.extend(value.map(|(_, value)| (label, value.clone())));
        }
        let values = all.entry(name).or_default();
        if let Some(value) = values.get_mut(&labels) {
            *value = sample.value.saturating_add(*value);
        } else if series < MAX_SERIES {
            series += 1;
            values.insert(labels, sample.value);
        }
    }
    all
}

/// What passes of a VMM's counters, one sample each.
pub(crate) fn judge(samples: Vec<MetricSample>) -> Vec<MetricSample> {
    let all = known(samples).into_iter().flat_map(|(name, values)| {
        values.into_iter().map(move |(labels, value)| MetricSample {
            name: name.to_owned(),
            labels: labels
                .into_iter()
                .map(|(label, value)| (label.to_owned(), value))
                .collect(),
            value,
        })
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(name: &str, labels: &[(&str, &str)], value: u64) -> MetricSample {
        MetricSample {
            name: name.to_owned(),
            labels: labels
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            value,
        }
    }

    #[test]
    fn the_counters_are_those_of_the_vmms_document() {
        let document = include_str!("../../../../../docs/vmm.md");
        let (_, metrics) = document.split_once("\n## Metrics\n").unwrap();
        let rows = metrics.lines().skip_while(|line| !line.starts_with("|---"));
        let written: Vec<&str> = rows
            .take_while(|line| line.starts_with('|'))
            .filter_map(|row| row.split('|').nth(1))
            .flat_map(|cell| cell.split('`').skip(1).step_by(2))
            .collect();
        assert_eq!(COUNTERS.map(|(name, _)| name).as_slice(), written);
    }

    #[test]
    fn a_hostile_vmm_cannot_make_up_series() {
        let mut samples = vec![
            sample("vcpu_exits_total", &[("vcpu", "0"), ("reason", "io")], 3),
            sample("vcpu_exits_total", &[("vcpu", "1"), ("reason", "io")], u64::MAX),
            sample("made_up_total", &[], 1),
            sample(
                "block_bytes_total",
                &[("device", "a\"}\nx 1"), ("direction", "read")],
                5,
            ),
            sample("rng_bytes_total", &[("device", &"x".repeat(33))], 7),
        ];
        samples.extend((0..1000).map(|number| sample("net_bytes_total", &[("device", &format!("d{number}"))], 1)));
        let known = known(samples);
        let exits = &known["vcpu_exits_total"];
        assert_eq!(exits.len(), 1);
        assert_eq!(exits[&vec![("reason", "io".to_owned())]], u64::MAX);
        assert_eq!(known["block_bytes_total"][&vec![("direction", "read".to_owned())]], 5);
        assert_eq!(known["rng_bytes_total"][&Vec::new()], 7);
        assert!(!known.keys().any(|name| name.contains("made")));
        assert_eq!(known.values().map(BTreeMap::len).sum::<usize>(), MAX_SERIES);
    }
}
