//! What a VM is made of.

use base::ByteSize;
use cpu::CpuModel;
use serde::{Deserialize, Serialize};

use crate::devices::{
    BalloonConfig, DeviceConfig, IommuConfig, MEM_MAX_REGION, MEM_MIN_BLOCK, MEM_SECTION, MemConfig, VfioPciConfig,
};

/// The most vCPUs of one VM; the guest kernel and the ACPI tables are made for no more.
pub const MAX_CPUS: u32 = 64;

/// The least memory a guest kernel starts with.
pub const MIN_MEMORY: ByteSize = ByteSize::mib(32);

/// The longest kernel command line, without its terminating zero (x86 `COMMAND_LINE_SIZE` is 2048).
pub const MAX_CMDLINE: usize = 2047;

/// The most devices: slots 1 to 31 of bus 0.
pub const MAX_DEVICES: usize = 31;

/// A descriptor that came with the same packet, by its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FdRef(pub u32);

/// One device: its name within the VM, its kind and that kind's own configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Unique within the VM; shown in logs and metrics.
    pub id: String,
    /// Which device module makes it, such as `block`.
    pub kind: String,
    /// What that module needs.
    pub config: serde_json::Value,
}

impl DeviceSpec {
    /// A device of the kind that `config` belongs to.
    ///
    /// # Errors
    /// The configuration has no JSON form; none of [`crate::devices`] is such.
    pub fn new<C: DeviceConfig>(id: &str, config: &C) -> Result<Self, serde_json::Error> {
        Ok(Self {
            id: id.to_owned(),
            kind: C::KIND.to_owned(),
            config: serde_json::to_value(config)?,
        })
    }
}

/// A whole VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// Number of vCPUs, 1 to [`MAX_CPUS`].
    pub cpus: u32,
    /// Guest memory, a multiple of 4 KiB.
    pub memory: ByteSize,
    /// Which processor the guest is shown.
    #[serde(default)]
    pub cpu: CpuModel,
    /// The kernel: vmlinux (ELF) or bzImage.
    pub kernel: FdRef,
    /// The initramfs, if any.
    pub initramfs: Option<FdRef>,
    /// The kernel command line.
    pub cmdline: String,
    /// `/dev/kvm`; when not given, the one that the VMM has inherited, or opened by path.
    pub kvm: Option<FdRef>,
    /// CPUs that Linux has given up: a reservation of basalt.ko, of as many as there are vCPUs at least. The guest owns them; there is no
    /// `kvm` then.
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "claim")]
    pub reservation: Option<FdRef>,
    /// Where the guest sees its memory; anything but the default needs a `reservation`.
    #[serde(default, skip_serializing_if = "MemoryMode::is_translated")]
    pub memory_mode: MemoryMode,
    /// With a `reservation`: for how many microseconds devices go on looking for the guest's next request before it has to ring, which is an
    /// exit. The engine knows when not given.
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "linger_us")]
    pub busy_poll_us: Option<u32>,
    /// Where early serial output goes; dropped when not given.
    pub serial: Option<FdRef>,
    /// If that is a regular file, opened for appending: how many of its last bytes are kept. All are when not given.
    #[serde(default)]
    pub serial_keep: Option<u64>,
    /// The guest is told by ACPI of functions that come to its bus while it runs, and leave it. For kernels whose guests have nobody who looks for
    /// them; each slot of the bus is an object of the guest's then, which its boot takes longer for. Not with [`MemoryMode::Identity`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub acpi_hotplug: bool,
    /// The devices, in the order of their PCI slots from 1 on.
    pub devices: Vec<DeviceSpec>,
}

/// Where a guest sees its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMode {
    /// Where its machine has it; the processor translates, and nothing else can be reached.
    #[default]
    Translated,
    /// Where the host's bus has it: nobody translates, and **the guest can reach all of the host's memory**. For guests that are
    /// trusted as the host's own kernel is; from memory that was reserved for them.
    Identity,
}

impl MemoryMode {
    /// Whether it is the default.
    pub fn is_translated(&self) -> bool {
        *self == Self::Translated
    }
}

/// Where a snapshot goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotConfig {
    /// An empty file for the state, open for writing.
    pub state: FdRef,
    /// An empty file for the memory, open for writing. It will be sparse.
    pub memory: FdRef,
    /// The memory files beside which it is to lie. If these are what the VM's memory is mapped from, only what has changed is
    /// written.
    #[serde(default)]
    pub base: Vec<FdRef>,
}

/// The files of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotFiles {
    /// The state.
    pub state: FdRef,
    /// The memory, the file that was written last at the end. VMs that were restored from them map them: they must not change as
    /// long as there is one.
    pub memory: Vec<FdRef>,
}

/// What a VM is restored from. vCPUs and memory are those of the snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestoreConfig {
    /// The snapshot.
    pub files: SnapshotFiles,
    /// `/dev/kvm`; when not given, the one that the VMM has inherited, or opened by path.
    pub kvm: Option<FdRef>,
    /// As [`VmConfig::reservation`].
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "claim")]
    pub reservation: Option<FdRef>,
    /// Where early serial output goes; dropped when not given.
    pub serial: Option<FdRef>,
    /// As [`VmConfig::serial_keep`].
    #[serde(default)]
    pub serial_keep: Option<u64>,
    /// The devices that the VM had, in the same order and configured alike, with descriptors of this packet.
    pub devices: Vec<DeviceSpec>,
    /// Pages that the guest will write soon, such as those of another VM's `write-set`: they are copied before it runs.
    #[serde(default)]
    pub write_set: PageRuns,
    /// The guest's kernel is not notified of its new generation ID: nobody in it has taken random bytes before it was saved, and
    /// somebody else reseeds it. It is written by its former name, the only one that VMMs of earlier versions know, which a daemon has
    /// adopted and may ask for a rollback.
    #[serde(default, rename = "untold", alias = "skip_notification")]
    pub skip_notification: bool,
    /// How its memory gets from the files to the guest.
    #[serde(default, skip_serializing_if = "Paging::is_mapped")]
    pub paging: Paging,
    /// All of its memory will be its own, as devices of the host's are to reach it: what has no content in the files is not mapped from them,
    /// but zeroed memory from the start. Nothing of it is with [`Paging::OnDemand`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub anonymous_holes: bool,
}

/// How pages of a snapshot's memory files become a guest's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Paging {
    /// They are the host's page cache's, shared with all VMs of the snapshot until they are written; read when they are touched.
    #[default]
    Mapped,
    /// The same, but all that has content is read before the VM runs.
    Eager,
    /// Each VM has its own: they are read when they are touched (userfaultfd(2)), and these before that, in their order.
    OnDemand {
        /// /dev/userfaultfd, to be read and written.
        userfaultfd: FdRef,
        /// What another VM's `page-order` tells; none if missing.
        #[serde(default)]
        order: PageRuns,
    },
}

impl Paging {
    fn is_mapped(&self) -> bool {
        *self == Self::Mapped
    }
}

/// Runs of pages of guest memory, by the first page's number and how many there are, where pages are counted as they lie in a
/// memory file.
pub type PageRuns = Vec<(u64, u64)>;

/// Why a configuration cannot be run.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Too few or too many vCPUs.
    #[error("{0} CPUs were asked for: give 1 to {MAX_CPUS}")]
    Cpus(u32),
    /// Too little memory.
    #[error("{0} of memory were asked for: a guest needs at least {MIN_MEMORY}")]
    MemoryTooSmall(ByteSize),
    /// Not whole pages.
    #[error("{0} of memory are not a multiple of 4 KiB")]
    MemoryAlignment(ByteSize),
    /// The command line is too long.
    #[error("the kernel command line has {0} bytes, the most is {MAX_CMDLINE}")]
    Cmdline(usize),
    /// The command line holds a zero byte.
    #[error("the kernel command line holds a zero byte")]
    CmdlineZero,
    /// For how long a server may run at once.
    #[error("a server was to run for {0} us at once: give 100 to 10000000")]
    Budget(u32),
    /// By which number a guest enters a server.
    #[error("a link of the number {0} was asked for: a VM has four, 0 to 3")]
    Link(u32),
    /// Both ways to run vCPUs.
    #[error("both `kvm` and `reservation` are given: a VM has one engine")]
    TwoEngines,
    /// No translation where vCPUs do not own their CPUs, or where there is a device that no port reaches.
    #[error(
        "a guest whose memory is not translated owns its CPUs (`reservation`), and has no PCI function of the host's, nor gets one: give a reservation, no such device and no `acpi_hotplug`, or the memory mode `translated`"
    )]
    Identity,
    /// A guest whose kicks are KVM's to answer.
    #[error("`busy_poll_us` is for a guest that owns its CPUs (`reservation`): leave it out")]
    BusyPoll,
    /// A function of the host's in what is restored.
    #[error(
        "device `{0}` is a PCI function of the host's, whose state no snapshot has: restore without it, or make a VM of it with `create`"
    )]
    Function(String),
    /// A region of hot-pluggable memory of a size that no guest can use.
    #[error(
        "a region of {0} of hot-pluggable memory was asked for: give a multiple of {MEM_SECTION}, up to {MEM_MAX_REGION}"
    )]
    MemRegion(ByteSize),
    /// Blocks of hot-pluggable memory.
    #[error(
        "blocks of {0} of hot-pluggable memory were asked for: give a power of two from {MEM_MIN_BLOCK} to {MEM_SECTION}"
    )]
    MemBlock(ByteSize),
    /// More than there are addresses for, or a part of a section.
    #[error(
        "at most {max} of hot-pluggable memory were asked for: give a multiple of {MEM_SECTION}, up to the region's {region}"
    )]
    MemMax {
        /// What was asked for.
        max: ByteSize,
        /// The region.
        region: ByteSize,
    },
    /// More than there is, or a part of a block.
    #[error("{requested} of hot-pluggable memory were asked for: give a multiple of {block}, up to {max}")]
    MemRequested {
        /// What was asked for.
        requested: ByteSize,
        /// The most that can be plugged.
        max: ByteSize,
        /// The block size.
        block: ByteSize,
    },
    /// Two devices that plug memory.
    #[error("device `{0}` is a second one that plugs memory: a VM has one region of hot-pluggable memory")]
    SecondMem(String),
    /// The configuration of a device that plugs memory is not understood.
    #[error("device `{id}`: the configuration is not understood: {why}")]
    Mem {
        /// Its name.
        id: String,
        /// Why.
        why: String,
    },
    /// Memory that is to be pinned, all of it.
    #[error(
        "device `{0}` plugs memory, and that of a guest that owns its CPUs (`reservation`) is pinned from its boot on: leave one of them out"
    )]
    MemPinned(String),
    /// Two balloons.
    #[error("device `{0}` is a second balloon: a VM has one")]
    SecondBalloon(String),
    /// The configuration of a balloon is not understood.
    #[error("device `{id}`: the configuration is not understood: {why}")]
    Balloon {
        /// Its name.
        id: String,
        /// Why.
        why: String,
    },
    /// A balloon of no size that it can have.
    #[error("a balloon of {} bytes was asked for: give a multiple of 4096, less than the memory of {memory}", .target.0)]
    BalloonTarget {
        /// What was asked for.
        target: ByteSize,
        /// What the guest boots with.
        memory: ByteSize,
    },
    /// Two IOMMUs.
    #[error("device `{0}` is a second IOMMU: a VM has one")]
    SecondIommu(String),
    /// An IOMMU in a machine whose memory it cannot know.
    #[error(
        "device `{0}` is an IOMMU of the guest's: the VM can neither have a device that plugs memory, nor a guest that owns its CPUs \
         (`reservation`); leave one of them out"
    )]
    IommuMemory(String),
    /// Too many devices.
    #[error("{0} devices were asked for, the PCI bus has room for {MAX_DEVICES}")]
    Devices(usize),
    /// Two devices of one name.
    #[error("two devices are called `{0}`: names must differ")]
    DuplicateDevice(String),
}

impl VmConfig {
    /// Checks everything that can be told from the data alone.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.cpus == 0 || self.cpus > MAX_CPUS {
            return Err(ConfigError::Cpus(self.cpus));
        }
        if self.memory < MIN_MEMORY {
            return Err(ConfigError::MemoryTooSmall(self.memory));
        }
        if !self.memory.bytes().is_multiple_of(4096) {
            return Err(ConfigError::MemoryAlignment(self.memory));
        }
        if self.cmdline.len() > MAX_CMDLINE {
            return Err(ConfigError::Cmdline(self.cmdline.len()));
        }
        if self.cmdline.contains('\0') {
            return Err(ConfigError::CmdlineZero);
        }
        if self.kvm.is_some() && self.reservation.is_some() {
            return Err(ConfigError::TwoEngines);
        }
        if self.reservation.is_none() && self.busy_poll_us.is_some() {
            return Err(ConfigError::BusyPoll);
        }
        if self.memory_mode == MemoryMode::Identity {
            let functions = check_no_function(&self.devices);
            self.reservation
                .filter(|_| functions.is_ok() && !self.acpi_hotplug)
                .ok_or(ConfigError::Identity)?;
        }
        if let Some(balloon) = balloon_device(&self.devices)? {
            balloon.check(self.memory)?;
        }
        check_devices(&self.devices, self.reservation.is_some())
    }
}

impl RestoreConfig {
    /// Checks everything that can be told from the data alone.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.kvm.is_some() && self.reservation.is_some() {
            return Err(ConfigError::TwoEngines);
        }
        check_no_function(&self.devices)?;
        check_devices(&self.devices, self.reservation.is_some())
    }
}

/// The device that plugs memory, if there is one.
///
/// # Errors
/// There are two, or its configuration makes no sense.
pub fn mem_device(devices: &[DeviceSpec]) -> Result<Option<(&DeviceSpec, MemConfig)>, ConfigError> {
    let mut found = devices.iter().filter(|device| device.kind == MemConfig::KIND);
    let Some(device) = found.next() else { return Ok(None) };
    if let Some(second) = found.next() {
        return Err(ConfigError::SecondMem(second.id.clone()));
    }
    let config: MemConfig = serde_json::from_value(device.config.clone()).map_err(|error| ConfigError::Mem {
        id: device.id.clone(),
        why: error.to_string(),
    })?;
    config.check()?;
    Ok(Some((device, config)))
}

/// The balloon, if there is one.
///
/// # Errors
/// There are two, or its configuration is not understood.
fn balloon_device(devices: &[DeviceSpec]) -> Result<Option<BalloonConfig>, ConfigError> {
    let mut found = devices.iter().filter(|device| device.kind == BalloonConfig::KIND);
    let Some(device) = found.next() else { return Ok(None) };
    if let Some(second) = found.next() {
        return Err(ConfigError::SecondBalloon(second.id.clone()));
    }
    let config = serde_json::from_value(device.config.clone()).map_err(|error| ConfigError::Balloon {
        id: device.id.clone(),
        why: error.to_string(),
    })?;
    Ok(Some(config))
}

/// The guest's IOMMU, if there is one.
///
/// # Errors
/// There are two.
pub fn iommu_device(devices: &[DeviceSpec]) -> Result<Option<&DeviceSpec>, ConfigError> {
    let mut found = devices.iter().filter(|device| device.kind == IommuConfig::KIND);
    let first = found.next();
    match found.next() {
        Some(second) => Err(ConfigError::SecondIommu(second.id.clone())),
        None => Ok(first),
    }
}

fn check_no_function(devices: &[DeviceSpec]) -> Result<(), ConfigError> {
    match devices.iter().find(|device| device.kind == VfioPciConfig::KIND) {
        Some(device) => Err(ConfigError::Function(device.id.clone())),
        None => Ok(()),
    }
}

fn check_devices(devices: &[DeviceSpec], owns_cpus: bool) -> Result<(), ConfigError> {
    balloon_device(devices)?;
    let mem = mem_device(devices)?;
    if let Some(iommu) = iommu_device(devices)?
        && (mem.is_some() || owns_cpus)
    {
        return Err(ConfigError::IommuMemory(iommu.id.clone()));
    }
    if let Some((device, _)) = mem.filter(|_| owns_cpus) {
        return Err(ConfigError::MemPinned(device.id.clone()));
    }
    if devices.len() > MAX_DEVICES {
        return Err(ConfigError::Devices(devices.len()));
    }
    for (index, device) in devices.iter().enumerate() {
        if devices[..index].iter().any(|other| other.id == device.id) {
            return Err(ConfigError::DuplicateDevice(device.id.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
