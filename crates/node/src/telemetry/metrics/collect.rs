//! What is true of node and sandboxes now: from the kernel's cgroups, from the VMMs' own counters, from the daemon's
//! process. A VMM may be hostile: of its counters only known names pass, with few labels of few characters.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use host::cgroup::Usage;
use node_api::{Promised, Resource, Sandbox, State};
use observe::exposition::{Exposition, Family, Kind};
use vmm_api::MetricSample;

use crate::node::Node;
use crate::saved::memory_files::own_bytes;

/// After this no further VMM is asked; those that are left then are told as missing.
const LIMIT: Duration = Duration::from_secs(5);

/// How often the image store is looked through.
const IMAGES_AGE: Duration = Duration::from_secs(30);

/// Series of one VMM.
const MAX_SERIES: usize = 256;
/// Length of a label's value.
const MAX_LABEL: usize = 32;

/// What VMMs count, and what that is, in the order of docs/vmm.md. A name that is not here is not told.
const VMM: [(&str, &str); 32] = [
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
    ("net_packets_total", "Packets of network interfaces."),
    ("net_bytes_total", "Bytes of network interfaces."),
    (
        "net_dropped_packets_total",
        "Packets of network interfaces that were dropped.",
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
const LABELS: [&str; 5] = ["device", "direction", "kind", "reason", "size"];

/// Labels, and their values.
type Labels = Vec<(&'static str, String)>;

/// Writes a sandbox's samples of one family, with the labels that tell which sandbox.
type Write<'w> = &'w dyn Fn(&mut Family<'_>, &[(&str, &str)], &One);

/// A sandbox that has a VM.
struct One {
    sandbox: Sandbox,
    usage: Option<Usage>,
    disk: u64,
    vmm: BTreeMap<&'static str, BTreeMap<Labels, u64>>,
}

/// The image store, looked through now and then.
pub(super) type Images = std::sync::Mutex<Option<(Instant, (u64, u64))>>;

impl Node {
    /// Everything, as Prometheus reads it.
    pub(super) fn exposition(&self) -> String {
        self.metrics.scrapes.increment();
        let mut text = Exposition::default();
        let version = env!("CARGO_PKG_VERSION");
        text.family("basalt_build_info", Kind::Gauge, "The daemon's version.")
            .number(&[("version", version)], 1);
        self.write_states(&mut text);
        self.metrics.write(&mut text);
        self.write_images(&mut text);
        write_promised(&mut text, &self.budget.promised());
        if let Some(exporter) = &self.config.spans {
            text.family(
                "basalt_spans_exported_total",
                Kind::Counter,
                "Spans that the collector has taken.",
            )
            .number(&[], exporter.exported());
            text.family("basalt_spans_dropped_total", Kind::Counter, "Spans that were dropped.")
                .number(&[], exporter.dropped());
        }
        write_process(&mut text);
        let (sandboxes, missing) = self.look_at_all();
        let help = "Sandboxes whose VMM did not answer in time: their basalt_vmm series are missing.";
        text.family("basalt_scrape_missing_sandboxes", Kind::Gauge, help)
            .number(&[], missing);
        write_sandboxes(&mut text, &sandboxes);
        text.finish()
    }

    fn write_states(&self, text: &mut Exposition) {
        const STATES: [State; 7] = [
            State::Creating,
            State::Starting,
            State::Running,
            State::Paused,
            State::Stopping,
            State::Exited,
            State::Removing,
        ];
        let all = self.list();
        let mut family = text.family("basalt_sandboxes", Kind::Gauge, "Sandboxes, by state.");
        for state in STATES {
            let count = all.iter().filter(|sandbox| sandbox.state == state).count();
            family.number(&[("state", &state.to_string())], count.try_into().unwrap_or(u64::MAX));
        }
    }

    fn write_images(&self, text: &mut Exposition) {
        let mut known = self
            .metrics
            .images
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if known.is_none_or(|(when, _)| when.elapsed() > IMAGES_AGE) {
            // A store that cannot be read is told as missing series.
            *known = self
                .images
                .footprint(&std::collections::BTreeSet::new())
                .inspect_err(|error| log::info!("the image store's size is not known: {error}"))
                .ok()
                .map(|footprint| (Instant::now(), (footprint.images, footprint.downloads)));
        }
        if let Some((_, (images, downloads))) = *known {
            text.family(
                "basalt_image_store_bytes",
                Kind::Gauge,
                "Bytes of all images, each layer once.",
            )
            .number(&[], images);
            let help = "Bytes of downloads that are interrupted or running.";
            text.family("basalt_image_downloads_bytes", Kind::Gauge, help)
                .number(&[], downloads);
        }
    }

    /// All that have a VM, and how many VMMs did not answer.
    fn look_at_all(&self) -> (Vec<One>, u64) {
        let end = Instant::now() + LIMIT;
        let entries: Vec<_> = self.entries().values().cloned().collect();
        let (mut all, mut missing) = (Vec::new(), 0);
        let with_vm = entries.into_iter().filter(|entry| entry.state().has_vm()).collect();
        for (entry, worth_asking) in self.metrics.in_turn(with_vm, |entry| &entry.id) {
            let usage = self
                .cgroup(&entry)
                .ok()
                .flatten()
                .and_then(|cgroup| cgroup.usage().ok());
            let asked = match entry.vm() {
                Some(vm) if worth_asking && Instant::now() < end => vm.metrics_now(),
                _ => None,
            };
            let vmm = match asked {
                Some(Ok(samples)) => {
                    self.metrics.is_silent(&entry.id, false);
                    known(samples)
                }
                Some(Err(error)) => {
                    log::info!("the VMM of sandbox {} tells no metrics: {error}", entry.id);
                    self.metrics.is_silent(&entry.id, true);
                    missing += 1;
                    BTreeMap::new()
                }
                // Somebody else talks to it just now, it was silent of late, or time is over.
                None => {
                    missing += 1;
                    BTreeMap::new()
                }
            };
            all.push(One {
                usage,
                vmm,
                disk: own_bytes(&self.sandbox_paths(&entry).directory),
                sandbox: entry.stored().sandbox,
            });
        }
        (all, missing)
    }
}

/// What sandboxes are promised of the host, and how much can be.
fn write_promised(text: &mut Exposition, all: &[Promised]) {
    for one in all {
        let (promised, limit, of) = match one.resource {
            Resource::Memory => (
                "basalt_memory_promised_bytes",
                "basalt_memory_promisable_bytes",
                "memory",
            ),
            Resource::Disk => (
                "basalt_disk_promised_bytes",
                "basalt_disk_promisable_bytes",
                "disk space",
            ),
            Resource::Descriptors => (
                "basalt_descriptors_promised",
                "basalt_descriptors_promisable",
                "the daemon's descriptors",
            ),
        };
        let help = format!("What sandboxes are promised of {of}.");
        text.family(promised, Kind::Gauge, &help).number(&[], one.promised);
        let help = format!("What can be promised of {of}.");
        text.family(limit, Kind::Gauge, &help).number(&[], one.total);
    }
}

/// What passes of a VMM's counters.
fn known(samples: Vec<MetricSample>) -> BTreeMap<&'static str, BTreeMap<Labels, u64>> {
    let mut all: BTreeMap<&'static str, BTreeMap<Labels, u64>> = BTreeMap::new();
    let mut series = 0;
    for sample in samples {
        let Some((name, _)) = VMM.iter().find(|(name, _)| *name == sample.name) else {
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

/// One family, with the samples of all that have some.
fn each(text: &mut Exposition, all: &[One], (name, kind, help): (&str, Kind, &str), write: Write<'_>) {
    let mut family = text.family(name, kind, help);
    for one in all {
        write(&mut family, &[("sandbox", &one.sandbox.id)], one);
    }
}

type Value = fn(&Usage) -> Option<u64>;

/// What a cgroup has in whole numbers; a host may lack a controller.
const NUMBERS: [(&str, Kind, &str, Value); 10] = [
    (
        "basalt_sandbox_memory_bytes",
        Kind::Gauge,
        "All memory that is charged to it.",
        |usage| Some(usage.memory?.current),
    ),
    (
        "basalt_sandbox_memory_peak_bytes",
        Kind::Gauge,
        "The most that ever was.",
        |usage| usage.memory?.peak,
    ),
    (
        "basalt_sandbox_memory_anonymous_bytes",
        Kind::Gauge,
        "Its anonymous memory.",
        |usage| Some(usage.memory?.anon),
    ),
    (
        "basalt_sandbox_memory_file_bytes",
        Kind::Gauge,
        "Its page cache.",
        |usage| Some(usage.memory?.file),
    ),
    (
        "basalt_sandbox_oom_kills_total",
        Kind::Counter,
        "Times that it was killed for memory.",
        |usage| Some(usage.memory?.oom_kills),
    ),
    (
        "basalt_sandbox_threads",
        Kind::Gauge,
        "Processes and threads on the host.",
        |usage| usage.pids,
    ),
    (
        "basalt_sandbox_io_read_bytes_total",
        Kind::Counter,
        "Bytes read from the host's disks.",
        |usage| Some(usage.io?.read_bytes),
    ),
    (
        "basalt_sandbox_io_written_bytes_total",
        Kind::Counter,
        "Bytes written to them.",
        |usage| Some(usage.io?.written_bytes),
    ),
    (
        "basalt_sandbox_io_reads_total",
        Kind::Counter,
        "Reads from them.",
        |usage| Some(usage.io?.reads),
    ),
    (
        "basalt_sandbox_io_writes_total",
        Kind::Counter,
        "Writes to them.",
        |usage| Some(usage.io?.writes),
    ),
];

fn write_sandboxes(text: &mut Exposition, all: &[One]) {
    let mut family = text.family(
        "basalt_sandbox_info",
        Kind::Gauge,
        "Names of the sandboxes that have a VM.",
    );
    for one in all {
        let sandbox = &one.sandbox;
        let labels = [
            ("sandbox", sandbox.id.as_str()),
            ("name", &sandbox.name),
            ("image", &sandbox.config.image),
        ];
        family.number(&labels, 1);
    }
    let help = "Memory that the guest was given.";
    let guest = ("basalt_sandbox_guest_memory_bytes", Kind::Gauge, help);
    each(text, all, guest, &|family, labels, one| {
        family.number(labels, one.sandbox.config.resources.memory.bytes());
    });
    let help = "The most memory that may be charged to it.";
    let limit = ("basalt_sandbox_memory_limit_bytes", Kind::Gauge, help);
    each(text, all, limit, &|family, labels, one| {
        if one.usage.as_ref().is_some_and(|usage| usage.memory.is_some()) {
            family.number(labels, crate::resources::limits::memory_max(&one.sandbox.config));
        }
    });
    let disk = (
        "basalt_sandbox_disk_bytes",
        Kind::Gauge,
        "Bytes of disk and logs on the host.",
    );
    each(text, all, disk, &|family, labels, one| family.number(labels, one.disk));
    let cpu = ("basalt_sandbox_cpu_seconds_total", Kind::Counter, "Processor time.");
    each(text, all, cpu, &|family, labels, one| {
        if let Some(usage) = &one.usage {
            family.microseconds(labels, usage.cpu_usec);
        }
    });
    let help = "Time that it was held back by its limit.";
    let throttled = ("basalt_sandbox_cpu_throttled_seconds_total", Kind::Counter, help);
    each(text, all, throttled, &|family, labels, one| {
        if let Some(value) = one.usage.as_ref().and_then(|usage| usage.cpu_throttled_usec) {
            family.microseconds(labels, value);
        }
    });
    for (name, kind, help, value) in NUMBERS {
        each(text, all, (name, kind, help), &|family, labels, one| {
            if let Some(value) = one.usage.as_ref().and_then(value) {
                family.number(labels, value);
            }
        });
    }
    for (name, help) in VMM {
        let kind = if name.ends_with("_total") {
            Kind::Counter
        } else {
            Kind::Gauge
        };
        each(
            text,
            all,
            (&format!("basalt_vmm_{name}"), kind, help),
            &|family, labels, one| {
                for (more, value) in one.vmm.get(name).into_iter().flatten() {
                    let more = more.iter().map(|(name, value)| (*name, value.as_str()));
                    family.number(&labels.iter().copied().chain(more).collect::<Vec<_>>(), *value);
                }
            },
        );
    }
}

/// The daemon itself, by the names that Prometheus' client libraries use.
fn write_process(text: &mut Exposition) {
    let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
    let (stat, status) = (read("stat"), read("status"));
    let field = |number: usize| -> Option<u64> {
        // proc(5): field 3 is the first behind the name.
        let (_, rest) = stat.rsplit_once(')')?;
        rest.split_ascii_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
    };
    // USER_HZ is part of Linux' interface (proc(5)), and 100 on x86-64.
    let ticks = 100;
    if let (Some(user), Some(system)) = (field(14), field(15)) {
        text.family(
            "process_cpu_seconds_total",
            Kind::Counter,
            "Processor time of the daemon.",
        )
        .microseconds(&[], (user + system).saturating_mul(1_000_000) / ticks);
    }
    if let Some(start) = field(22) {
        let boot = fs::read_to_string("/proc/stat").unwrap_or_default();
        let boot = boot
            .lines()
            .find_map(|line| line.strip_prefix("btime ")?.trim().parse::<u64>().ok());
        if let Some(boot) = boot {
            text.family(
                "process_start_time_seconds",
                Kind::Gauge,
                "When the daemon was started, since 1970.",
            )
            .number(&[], boot + start / ticks);
        }
    }
    let resident = status.lines().find_map(|line| {
        line.strip_prefix("VmRSS:")?
            .trim()
            .strip_suffix(" kB")?
            .parse::<u64>()
            .ok()
    });
    if let Some(resident) = resident {
        text.family("process_resident_memory_bytes", Kind::Gauge, "Memory of the daemon.")
            .number(&[], resident << 10);
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        text.family("process_open_fds", Kind::Gauge, "Open files of the daemon.")
            .number(&[], u64::try_from(open.count()).unwrap_or(u64::MAX));
    }
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
    fn the_limit_of_memory_is_that_of_what_is_charged() {
        let mut sandbox = crate::testing::stored("id", "name").sandbox;
        sandbox.config.resources.memory = base::ByteSize::mib(128);
        let told = |memory| {
            let usage = Usage {
                memory,
                ..Usage::default()
            };
            let one = One {
                sandbox: sandbox.clone(),
                usage: Some(usage),
                disk: 0,
                vmm: BTreeMap::new(),
            };
            let mut text = Exposition::default();
            write_sandboxes(&mut text, &[one]);
            text.finish()
        };
        let text = told(Some(host::cgroup::MemoryUsage::default()));
        let (guest, limit) = (128 << 20, (128 + 1 + 128) << 20);
        assert!(
            text.contains(&format!(
                "basalt_sandbox_guest_memory_bytes{{sandbox=\"id\"}} {guest}\n"
            )),
            "{text}"
        );
        assert!(
            text.contains(&format!(
                "basalt_sandbox_memory_limit_bytes{{sandbox=\"id\"}} {limit}\n"
            )),
            "{text}"
        );
        assert!(!told(None).contains("memory_limit_bytes{"), "nothing limits it");
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
        assert_eq!(VMM.map(|(name, _)| name).as_slice(), written);
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
