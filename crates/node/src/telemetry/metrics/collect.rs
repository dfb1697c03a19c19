//! What is true of node and sandboxes now: from the kernel's cgroups, from the VMMs' own counters, from the daemon's
//! process.

use std::time::{Duration, Instant};

use host::cgroup::{Root, Usage};
use image::Store;
use node_api::{AcceleratorStats, MemoryState, Promised, Resource, Sandbox, State};
use observe::exposition::{Exposition, Family, Kind};
use otlp::Exporter;

use crate::resources::budget::Budget;
use crate::resources::devices::Devices;
use crate::resources::memory_state;
use crate::resources::zeroed_memory::ZeroedMemory;
use crate::sandbox::registry::Sandboxes;
use crate::saved::memory_files::own_bytes;
use crate::store::paths::Paths;
use crate::telemetry::metrics::vmm::{self, Counts};
use crate::telemetry::metrics::{Metrics, accelerator, process};

/// After this no further VMM is asked; those that are left then are told as missing.
const LIMIT: Duration = Duration::from_secs(5);

/// How often the image store is looked through.
const IMAGES_AGE: Duration = Duration::from_secs(30);

/// Writes a sandbox's samples of one family, with the labels that tell which sandbox.
type Write<'w> = &'w dyn Fn(&mut Family<'_>, &[(&str, &str)], &One);

/// A sandbox that has a VM.
struct One {
    sandbox: Sandbox,
    /// With what came zeroed, which is charged to another cgroup: so many bytes.
    usage: Option<Usage>,
    zeroed: u64,
    disk: u64,
    /// Of one whose memory is plugged, or which has devices.
    memory: Option<MemoryState>,
    /// What its accelerator's server tells, if it has one and that answers.
    accelerator: Option<AcceleratorStats>,
    vmm: Counts,
}

/// The image store, looked through now and then.
pub(super) type Images = std::sync::Mutex<Option<(Instant, (u64, u64))>>;

/// Where what is told is looked up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetricSources<'s> {
    pub(crate) metrics: &'s Metrics,
    pub(crate) sandboxes: &'s Sandboxes,
    pub(crate) budget: &'s Budget,
    pub(crate) zeroed: &'s ZeroedMemory,
    pub(crate) devices: &'s Devices,
    pub(crate) sees_dma_faults: bool,
    pub(crate) images: &'s Store,
    pub(crate) paths: &'s Paths,
    pub(crate) cgroups: Option<&'s Root>,
    pub(crate) exporter: Option<&'s Exporter>,
}

impl MetricSources<'_> {
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
        write_zeroed(&mut text, self.zeroed);
        if let Some(exporter) = self.exporter {
            text.family(
                "basalt_spans_exported_total",
                Kind::Counter,
                "Spans that the collector has taken.",
            )
            .number(&[], exporter.exported());
            text.family("basalt_spans_dropped_total", Kind::Counter, "Spans that were dropped.")
                .number(&[], exporter.dropped());
        }
        process::write(&mut text);
        let (sandboxes, missing) = self.look_at_all();
        let help = "Sandboxes whose VMM did not answer in time: their basalt_vmm series are missing.";
        text.family("basalt_scrape_missing_sandboxes", Kind::Gauge, help)
            .number(&[], missing);
        write_sandboxes(&mut text, &sandboxes);
        let told = (sandboxes.iter()).filter_map(|one| Some((one.sandbox.id.as_str(), one.accelerator.as_ref()?)));
        accelerator::write(&mut text, &told.collect::<Vec<_>>());
        text.finish()
    }

    fn write_states(&self, text: &mut Exposition) {
        let all = self.sandboxes.list();
        let mut family = text.family("basalt_sandboxes", Kind::Gauge, "Sandboxes, by state.");
        for state in State::ALL {
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
        let entries: Vec<_> = self.sandboxes.entries().values().cloned().collect();
        let (mut all, mut missing) = (Vec::new(), 0);
        let with_vm = entries.into_iter().filter(|entry| entry.state().has_vm()).collect();
        for (entry, worth_asking) in self.metrics.in_turn(with_vm, |entry| &entry.id) {
            let cgroup = self.cgroups.and_then(|root| root.find(&entry.id).ok().flatten());
            let usage = cgroup.and_then(|cgroup| cgroup.usage().ok());
            let asked = match entry.vm() {
                Some(vm) if worth_asking && Instant::now() < end => vm.metrics_now(),
                _ => None,
            };
            let answers = matches!(asked, Some(Ok(_)));
            let vmm = match asked {
                Some(Ok(samples)) => {
                    self.metrics.is_silent(&entry.id, false);
                    vmm::known(samples)
                }
                Some(Err(error)) => {
                    log::info!("the VMM of sandbox {} tells no metrics: {error}", entry.id);
                    self.metrics.is_silent(&entry.id, true);
                    missing += 1;
                    Counts::new()
                }
                // Somebody else talks to it just now, it was silent of late, or time is over.
                None => {
                    missing += 1;
                    Counts::new()
                }
            };
            let has_devices = || !self.devices.of(&entry.id).is_empty();
            let stored = entry.stored();
            let zeroed = stored.came_zeroed.bytes;
            all.push(One {
                usage: usage.map(|usage| Usage {
                    memory: usage.memory.map(|memory| memory_state::with_zeroed(memory, zeroed)),
                    ..usage
                }),
                zeroed,
                vmm,
                accelerator: self.ask_accelerator(&stored.sandbox, end),
                // One that has not answered is not asked again.
                memory: answers
                    .then(|| memory_state::of(&entry, has_devices(), self.sees_dma_faults))
                    .flatten(),
                disk: own_bytes(&self.paths.sandbox(&entry.id).directory),
                sandbox: stored.sandbox,
            });
        }
        (all, missing)
    }

    fn ask_accelerator(&self, sandbox: &Sandbox, end: Instant) -> Option<AcceleratorStats> {
        sandbox.accelerator?;
        let path = self.paths.sandbox(&sandbox.id).accelerator();
        self.metrics.silent_accelerators.ask(&sandbox.id, &path, end)
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

/// Memory that is zeroed ahead, where some is to be.
fn write_zeroed(text: &mut Exposition, zeroed: &ZeroedMemory) {
    if zeroed.size().bytes() == 0 {
        return;
    }
    let told = zeroed.numbers();
    let help = "Memory that was zeroed ahead and waits for a sandbox with devices.";
    text.family("basalt_zeroed_memory_ready_bytes", Kind::Gauge, help)
        .number(&[], told.ready.bytes());
    let help = "Memory that was zeroed ahead and sandboxes were given.";
    text.family("basalt_zeroed_memory_handed_out_bytes_total", Kind::Counter, help)
        .number(&[], told.handed_out.bytes());
    let help = "Pieces of 128 MiB that were zeroed ahead and given up, because they were not in huge pages.";
    text.family("basalt_zeroed_memory_not_huge_total", Kind::Counter, help)
        .number(&[], told.small);
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
        "All of its memory: what is charged to it, and what came zeroed.",
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

/// What is counted of memory that is plugged, and of devices.
type MemoryNumber = (&'static str, Kind, &'static str, fn(&MemoryState) -> u64);

const OF_MEMORY: [MemoryNumber; 8] = [
    (
        "basalt_sandbox_guest_memory_present_bytes",
        Kind::Gauge,
        "Memory that the guest has of what it was given, where that is plugged.",
        |memory| memory.present,
    ),
    (
        "basalt_sandbox_dma_mapped_bytes",
        Kind::Gauge,
        "Guest memory that its devices can reach.",
        |memory| memory.dma.mapped,
    ),
    (
        "basalt_sandbox_dma_total_bytes",
        Kind::Gauge,
        "Guest memory that its devices are to reach.",
        |memory| memory.dma.total,
    ),
    (
        "basalt_sandbox_dma_maps_total",
        Kind::Counter,
        "Pieces in which memory was mapped for its devices.",
        |memory| memory.dma.map_calls,
    ),
    (
        "basalt_sandbox_dma_map_bytes_total",
        Kind::Counter,
        "Bytes of guest memory that were mapped for its devices, whatever was unmapped since.",
        |memory| memory.dma.map_bytes,
    ),
    (
        "basalt_sandbox_plug_hits_total",
        Kind::Counter,
        "Blocks that were mapped before its guest plugged them.",
        |memory| memory.dma.plug_hits,
    ),
    (
        "basalt_sandbox_plug_misses_total",
        Kind::Counter,
        "Blocks that were mapped while its guest plugged them.",
        |memory| memory.dma.plug_misses,
    ),
    (
        "basalt_sandbox_devices_coming",
        Kind::Gauge,
        "Devices that it is started with and its guest does not have yet.",
        |memory| u64::try_from(memory.coming.len()).unwrap_or(u64::MAX),
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
    let help = "What of its memory came zeroed at most, which is charged to the cgroup zeroed-memory.";
    let zeroed = ("basalt_sandbox_memory_zeroed_bytes", Kind::Gauge, help);
    each(text, all, zeroed, &|family, labels, one| {
        if one.zeroed > 0 {
            family.number(labels, one.zeroed);
        }
    });
    let help = "The most memory that it may have, with what came zeroed.";
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
    for (name, kind, help, value) in OF_MEMORY {
        each(text, all, (name, kind, help), &|family, labels, one| {
            if let Some(memory) = &one.memory {
                family.number(labels, value(memory));
            }
        });
    }
    let help = "Time in which memory was being filled and mapped for its devices.";
    let mapping = ("basalt_sandbox_dma_map_seconds_total", Kind::Counter, help);
    each(text, all, mapping, &|family, labels, one| {
        if let Some(memory) = &one.memory {
            family.microseconds(labels, memory.dma.map_usec);
        }
    });
    let help = "DMA of its devices that an IOMMU refused, as far as the kernel logged it.";
    let faults = ("basalt_sandbox_dma_faults_total", Kind::Counter, help);
    each(text, all, faults, &|family, labels, one| {
        if let Some(faults) = one.memory.as_ref().and_then(|memory| memory.dma.faults) {
            family.number(labels, faults);
        }
    });
    for (name, help) in vmm::COUNTERS {
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

#[cfg(test)]
mod tests {
    use node_api::DmaState;

    use super::*;

    #[test]
    fn what_is_zeroed_ahead_is_told_where_some_is_to_be() {
        use crate::resources::zeroed_memory::tests::{Outcome, node};
        let told = |pieces| {
            let (node, mut text) = (node(pieces), Exposition::default());
            for outcome in [Outcome::Small, Outcome::Huge, Outcome::Huge] {
                node.maker.come_out(outcome);
                node.pool.make_one(None);
            }
            drop(node.pool.take(1));
            write_zeroed(&mut text, &node.pool);
            text.finish()
        };
        let text = told(2);
        for line in [
            "basalt_zeroed_memory_ready_bytes 134217728\n",
            "basalt_zeroed_memory_handed_out_bytes_total 134217728\n",
            "basalt_zeroed_memory_not_huge_total 1\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(told(0), "");
    }

    #[test]
    fn what_came_zeroed_is_its_memory() {
        let own = host::cgroup::MemoryUsage {
            current: 5,
            peak: Some(7),
            anon: 3,
            ..host::cgroup::MemoryUsage::default()
        };
        let one = |zeroed| One {
            sandbox: crate::testing::stored("id", "name").sandbox,
            usage: Some(Usage {
                memory: Some(memory_state::with_zeroed(own, zeroed)),
                ..Usage::default()
            }),
            zeroed,
            disk: 0,
            memory: None,
            accelerator: None,
            vmm: Counts::new(),
        };
        let told = |zeroed| {
            let mut text = Exposition::default();
            write_sandboxes(&mut text, &[one(zeroed)]);
            text.finish()
        };
        let text = told(20);
        for (name, value) in [("", 25), ("_peak", 27), ("_anonymous", 3), ("_zeroed", 20)] {
            let line = format!("basalt_sandbox_memory{name}_bytes{{sandbox=\"id\"}} {value}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
        assert!(!told(0).contains("memory_zeroed_bytes{"), "it has none");
    }

    #[test]
    fn the_limit_of_memory_is_that_of_what_is_charged() {
        let mut sandbox = crate::testing::stored("id", "name").sandbox;
        sandbox.config.resources.memory = base::ByteSize::mib(128);
        let told = |memory: Option<host::cgroup::MemoryUsage>| {
            let state = memory.as_ref().map(|_| MemoryState {
                dma: DmaState {
                    plug_hits: 7,
                    map_usec: 1_500_000,
                    faults: Some(3),
                    ..DmaState::default()
                },
                ..MemoryState::default()
            });
            let usage = Usage {
                memory,
                ..Usage::default()
            };
            let one = One {
                sandbox: sandbox.clone(),
                usage: Some(usage),
                zeroed: 0,
                disk: 0,
                memory: state,
                accelerator: None,
                vmm: Counts::new(),
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
        for (name, value) in [("plug_hits", "7"), ("dma_map_seconds", "1.500000"), ("dma_faults", "3")] {
            let line = format!("basalt_sandbox_{name}_total{{sandbox=\"id\"}} {value}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
        let text = told(None);
        assert!(!text.contains("memory_limit_bytes{"), "nothing limits it");
        assert!(!text.contains("plug_hits_total{"), "nothing is plugged");
        assert!(!text.contains("dma_faults_total{"), "it has no device");
    }
}
