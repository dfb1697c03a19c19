//! Whether this host can give what a sandbox asks for, and in which words its parts are told: the cgroup, the devices. Knows
//! numbers only; who enforces them is elsewhere.

use base::ByteSize;
use host::cgroup::{self, Root};
use node_api::{DeviceStart, Limits, MemoryMode, Rate, Resources, SandboxConfig};
use vmm_api::devices::{BalloonConfig, BalloonDma, BlockLimits, BlockRate, MemConfig, NetLimits, RateLimit};
use vmm_api::{ConfigError, config};

use crate::Error;
use crate::store::database::Stored;

/// What a VMM may have beside its guest's memory: its own (a few MiB), and the page cache of its disks, which the kernel takes
/// back when it is short.
const VMM_MEMORY: ByteSize = ByteSize::mib(128);

/// The kernel's tables for guest memory, charged to the VMM too: 8 bytes a page of 4 KiB (1/512) in the process's page tables
/// and as much in KVM's, and as much again for what else is kept by page.
const TABLES_SHARE: u64 = 128;

/// Threads of a VMM: one a vCPU (64), nine a queue of a disk (two disks of 4), one a pair of a network card, five others; the
/// rest is for the kernel's io_uring workers, which count as its own.
const VMM_THREADS: u64 = 1024;

/// What the server of an accelerator may have beside the window and the accelerator's memory, which is the host's where its processors are
/// the accelerator: itself, its compiler, and what that writes. And its threads: 64 clients of up to 32, and those of drivers and
/// compilers, which PoCL has as many as the host has CPUs.
const ACCELERATOR_MEMORY: ByteSize = ByteSize::mib(768);
const ACCELERATOR_THREADS: u64 = 4096;

/// Checks vCPUs, memory, and limits that this host must be able to keep. Whether there is room is `budget`'s.
///
/// # Errors
/// Numbers that make no VM, or a limit without a controller.
pub(crate) fn check(config: &SandboxConfig, cgroups: Option<&Root>) -> Result<(), Error> {
    check_size(&config.resources)?;
    for_memory(config).map_or(Ok(()), |memory| memory.check())?;
    match cgroups {
        Some(root) => Ok(root.check(&for_cgroup(config, root))?),
        None if config.limits.cpu_millis.is_some() || config.limits.cpu_weight.is_some() => Err(Error::NoCgroups),
        None => Ok(()),
    }
}

fn check_size(resources: &Resources) -> Result<(), Error> {
    let cpus = resources.cpus;
    if cpus == 0 || cpus > config::MAX_CPUS {
        return Err(ConfigError::Cpus(cpus).into());
    }
    let boot = resources.boots_with();
    if boot < config::MIN_MEMORY {
        return Err(ConfigError::MemoryTooSmall(boot).into());
    }
    Ok(())
}

/// The most memory that VMM and guest may have together, but for what was reserved for guests.
pub(crate) fn memory_max(config: &SandboxConfig) -> u64 {
    let guest = config.resources.mapped().bytes();
    let volumes = match config.volumes.is_empty() {
        true => 0,
        false => crate::resources::volume_shares::MEMORY.bytes(),
    };
    let charged = match config.resources.memory_mode {
        MemoryMode::Translated => guest,
        MemoryMode::Identity => 0,
    };
    let accelerator = config.accelerator.map_or(0, |accelerator| {
        accelerator.window.bytes() + accelerator.memory.bytes() + ACCELERATOR_MEMORY.bytes()
    });
    charged + guest / TABLES_SHARE + VMM_MEMORY.bytes() + volumes + accelerator
}

/// How much of that may be charged to its machine's own cgroup: memory that came zeroed is charged to another one, as long as it is there.
pub(crate) fn charged_max(stored: &Stored) -> u64 {
    memory_max(&stored.sandbox.config).saturating_sub(stored.came_zeroed.for_sure())
}

/// What the cgroup is told of a sandbox whose machine is there.
pub(crate) fn of_machine(stored: &Stored, root: &Root) -> cgroup::Limits {
    let limits = for_cgroup(&stored.sandbox.config, root);
    cgroup::Limits {
        memory_max: limits.memory_max.map(|_| charged_max(stored)),
        ..limits
    }
}

/// What the cgroup of a sandbox is told whose machine is to be made. Limits that nobody asked for are set where the host can.
pub(crate) fn for_cgroup(config: &SandboxConfig, root: &Root) -> cgroup::Limits {
    let has = |controller| root.missing().iter().all(|missing| missing.controller != controller);
    cgroup::Limits {
        cpu_millis: config.limits.cpu_millis,
        cpu_weight: config.limits.cpu_weight,
        memory_max: has("memory").then(|| memory_max(config)),
        pids_max: has("pids").then_some(match config.accelerator {
            Some(_) => VMM_THREADS + ACCELERATOR_THREADS,
            None => VMM_THREADS,
        }),
        ..cgroup::Limits::default()
    }
}

/// The memory that is plugged while it runs, if there is some.
pub(crate) fn for_memory(config: &SandboxConfig) -> Option<MemConfig> {
    let resources = &config.resources;
    let requested = match plugs_before_command(config) {
        true => ByteSize(0),
        false => resources.plugged(),
    };
    Some(MemConfig {
        region_size: resources.hotplug_addresses()?,
        max_size: resources.region(),
        requested_size: requested,
        block_size: node_api::memory_size::BLOCK,
        node_id: None,
    })
}

/// Its guest is asked to plug memory when its agent answers, and not before: a template can be made of it until then. Nor is any plugged
/// before its devices are given to its VMM, which maps it for them; but with `late` its memory waits for none.
pub(crate) fn plugs_before_command(config: &SandboxConfig) -> bool {
    let waits = config.devices.is_empty() || config.device_start() == DeviceStart::Async;
    waits && config.resources.region().is_some()
}

/// By what its guest gives memory back, if it does.
pub(crate) fn for_balloon(config: &SandboxConfig) -> Option<BalloonConfig> {
    let resources = &config.resources;
    let inflated = resources.inflated;
    (resources.free_page_reporting || inflated.is_some()).then(|| BalloonConfig {
        // Nobody would have it fall where no device comes.
        target: inflated.filter(|_| !config.devices.is_empty()).unwrap_or_default(),
        free_page_reporting: resources.free_page_reporting,
        dma: inflated.map(|_| BalloonDma::default()),
        ..BalloonConfig::default()
    })
}

/// What its disks are told. The devices keep these rates, not `io.max`: that is one of whole block devices of the host, and of
/// what reaches them, so what the page cache answers or a file system without writeback accounting writes would be free.
pub(crate) fn for_disks(limits: &Limits) -> BlockLimits {
    let rate = |rate: Rate| BlockRate {
        bytes_per_second: rate.bytes.map(ByteSize::bytes),
        operations_per_second: rate.operations,
    };
    BlockLimits {
        read: rate(limits.disk_read),
        write: rate(limits.disk_write),
    }
}

/// What its network card is told.
pub(crate) fn for_network(limits: &Limits) -> NetLimits {
    let rate = |rate: Rate| RateLimit {
        bytes_per_second: rate.bytes.map(ByteSize::bytes),
        packets_per_second: rate.operations,
    };
    NetLimits {
        receive: rate(limits.net_receive),
        transmit: rate(limits.net_transmit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(cpus: u32, memory: ByteSize) -> Error {
        check_size(&Resources {
            cpus,
            memory,
            boot_memory: None,
            max_memory: None,
            held_memory: None,
            inflated: None,
            disk: None,
            cpu_model: None,
            class: node_api::Class::Standard,
            idle: node_api::Idle::Halt,
            memory_mode: node_api::MemoryMode::Translated,
            free_page_reporting: false,
            guest_iommu: false,
        })
        .unwrap_err()
    }

    #[test]
    fn numbers_that_make_no_vm_are_refused_with_the_limits() {
        assert!(refusal(0, ByteSize::mib(64)).to_string().contains("1 to 64"));
        assert!(refusal(1000, ByteSize::mib(64)).to_string().contains("1000 CPUs"));
        assert!(refusal(1, ByteSize::mib(1)).to_string().contains("32 MiB"));
        assert_eq!(refusal(1, ByteSize::mib(1)).exit_code(), 125);
    }

    #[test]
    fn memory_that_is_reserved_is_none_of_the_hosts() {
        let mut config = crate::testing::stored("aaaaaaaaaaaa", "web").sandbox.config;
        let all = memory_max(&config);
        config.resources.memory_mode = MemoryMode::Identity;
        assert_eq!(memory_max(&config), all - config.resources.memory.bytes());
    }

    #[test]
    fn a_vmm_has_room_beside_its_guest() {
        let mut config = crate::testing::stored("id", "name").sandbox.config;
        config.resources.memory = ByteSize::gib(1);
        assert_eq!(memory_max(&config), (1024 + 8 + 128) << 20);
        config.volumes = vec!["cache:/c".parse().unwrap()];
        assert_eq!(memory_max(&config), (1024 + 8 + 128 + 288) << 20);
    }

    #[test]
    fn a_balloon_is_full_before_devices_come_and_where_none_do_it_is_empty() {
        let mut config = crate::testing::stored("id", "name").sandbox.config;
        config.resources.inflated = Some(ByteSize::mib(96));
        let balloon = for_balloon(&config).unwrap();
        assert_eq!((balloon.target, balloon.dma.is_some()), (ByteSize(0), true));
        config.devices = vec!["0000:01:00.0".parse().unwrap()];
        let balloon = for_balloon(&config).unwrap();
        assert_eq!(
            (balloon.target, balloon.free_page_reporting),
            (ByteSize::mib(96), false)
        );
    }

    #[test]
    fn a_guest_gives_memory_back_only_where_that_was_asked_for() {
        let mut config = crate::testing::stored("id", "name").sandbox.config;
        assert_eq!(for_balloon(&config), None);
        config.resources.free_page_reporting = true;
        let balloon = for_balloon(&config).unwrap();
        assert!(
            balloon.free_page_reporting && balloon.target == ByteSize(0),
            "{balloon:?}"
        );
        let record = serde_json::to_string(&config.resources).unwrap();
        assert!(record.contains(r#""free_page_reporting":true"#), "{record}");
        assert!(!config.resources.boots(), "it is cloned from a template of its own");
    }

    #[test]
    fn rates_reach_the_devices() {
        let limits = Limits {
            disk_read: "1M/10".parse().unwrap(),
            net_transmit: "/20".parse().unwrap(),
            ..Limits::default()
        };
        let (disks, network) = (for_disks(&limits), for_network(&limits));
        assert_eq!(disks.read.bytes_per_second, Some(1 << 20));
        assert_eq!(disks.read.operations_per_second, Some(10));
        assert_eq!(disks.write, BlockRate::default());
        assert_eq!(network.transmit.packets_per_second, Some(20));
        assert_eq!(
            (network.transmit.bytes_per_second, network.receive),
            (None, RateLimit::default())
        );
    }
}
