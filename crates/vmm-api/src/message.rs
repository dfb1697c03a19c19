//! Requests, replies and events.

use base::ByteSize;
use serde::{Deserialize, Serialize};

use crate::config::{DeviceSpec, FdRef, PageRuns, RestoreConfig, SnapshotConfig, VmConfig};
use crate::functions::Functions;
use crate::servers::{FreezeConfig, LinkConfig};

/// The most pages that `write-set` tells: 8 MiB.
pub const MAX_WRITE_SET: u64 = 2048;

/// The most runs of pages that `page-order` tells.
pub const MAX_ORDER: usize = 4096;

/// What a driver asks of a VMM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", content = "params", rename_all = "kebab-case")]
pub enum Request {
    /// Build the VM; allowed once. The packet carries the descriptors that the configuration refers to.
    Create(Box<VmConfig>),
    /// Build the VM from a snapshot, paused; allowed instead of `create`. The packet carries the descriptors.
    Restore(Box<RestoreConfig>),
    /// Put the VM back, in place, to a snapshot that its memory is mapped from; it is paused then. What is refused as invalid,
    /// or for the VM's state, has changed nothing; after any other refusal the VM has ended. The packet carries the descriptors.
    Rollback(Box<RestoreConfig>),
    /// Let the vCPUs run for the first time.
    Start,
    /// Stop the vCPUs and the devices; a VM that the VMM has stopped by itself is then one that was asked to pause.
    Pause,
    /// Let them go on.
    Resume,
    /// Write the paused VM to two files, whose descriptors the packet carries. It stays paused.
    Snapshot(SnapshotConfig),
    /// Map what the last snapshot has written in place of memory of the VM's own, which has not run since; the packet carries the
    /// memory file that was written, to be read. What changes from here on is what the next snapshot writes beside it.
    Rebase(FdRef),
    /// Tell which pages have changed since the VM was restored; at most [`MAX_WRITE_SET`] of them.
    WriteSet,
    /// Tell in which order pages were asked for since the VM was restored on demand without an order; at most [`MAX_ORDER`] runs.
    PageOrder,
    /// Give the VM, which runs or is paused, a function of the host's: its memory is mapped for DMA beside the guest, and the function is
    /// on the guest's bus when all of it is, which [`Request::Functions`] tells. The packet carries the descriptors.
    Attach(DeviceSpec),
    /// Take a function off the guest's bus, whether or not the guest has let go of it, and close it; or stop attaching it. The guest's
    /// memory is unmapped with the last one.
    Detach(String),
    /// Tell which functions of the host's the VM has, and how far its memory is mapped for them.
    Functions,
    /// Request that so much of the hot-pluggable memory is plugged: a multiple of its block size, up to its region's. The guest follows when
    /// it can, and need not come all the way: [`Info::hotplug_memory`] tells.
    ResizeMemory(ByteSize),
    /// Map so much of the hot-pluggable memory for functions of the host's, as soon as there are any, before the guest is asked to plug it: a
    /// guest that boots has other things to do. It lasts until the next [`Request::ResizeMemory`].
    MapAhead(ByteSize),
    /// Use these files in place of hot-pluggable memory that nothing is plugged of: each is [`crate::devices::ZEROED_PIECE`] of zeroes, of a
    /// file system in memory, unlinked, and nobody else's from now on. They take the lowest places that are free; what there is no place for
    /// is closed. [`Functions::zeroed_memory`] tells how much was taken. The packet carries the descriptors.
    AddZeroedMemory(Vec<FdRef>),
    /// Request that the guest does without so much of the memory that it boots with: a multiple of 4 KiB, less than that. It follows when it
    /// can, and need not come all the way: [`Info::balloon`] tells.
    ResizeBalloon(ByteSize),
    /// Freeze the VM when its guest says next that it waits to be entered ([`crate::servers`]): the answer is
    /// [`Reply::Freezing`] until then, and afterwards, as often as it is asked with the same budget, [`Reply::Frozen`].
    Freeze(FreezeConfig),
    /// Let the guest enter a frozen VM, or not any more; in any state. The packet carries the server's descriptor.
    Link(LinkConfig),
    /// Press the guest's power button; what comes of it is the guest's affair.
    PressPowerButton,
    /// End the VM and the process, without asking the guest; answered, and not followed by an event.
    Stop,
    /// Tell what the VM is and does.
    Info,
    /// Tell every metric.
    Metrics,
}

/// The state of the one VM that a VMM process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// Nothing has been created.
    Empty,
    /// Created, never started.
    Created,
    /// The vCPUs run.
    Running,
    /// The vCPUs and devices are stopped and can go on.
    Paused,
    /// It has no CPU: those that are linked to it run it. It stays that until it ends.
    Frozen,
    /// It has ended.
    Ended,
}

impl std::fmt::Display for VmState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Empty => "empty",
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Frozen => "frozen",
            Self::Ended => "ended",
        })
    }
}

/// Why a VMM has paused its VM without having been asked to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StopReason {
    /// The host has no space left for what the guest has written. The requests are kept and begin anew with [`Request::Resume`];
    /// the VM stops again if there is still none.
    NoSpace {
        /// The ids of the disks.
        disks: Vec<String>,
    },
}

/// What a VMM tells of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// [`crate::VERSION`] of the VMM.
    pub api_version: u32,
    /// The VMM's own version.
    pub vmm_version: String,
    /// The VMM's process id, in its own pid namespace.
    pub pid: u32,
    /// The engine in use, such as `kvm`; empty before `create`.
    pub engine: String,
    /// The VM's state.
    pub state: VmState,
    /// Why the VMM has paused it by itself; `None` of one that was asked to pause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<StopReason>,
    /// Number of vCPUs; 0 before `create`.
    pub cpus: u32,
    /// Guest memory in bytes, without what can be plugged; 0 before `create`.
    pub memory: u64,
    /// Memory that can be plugged, if there is any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hotplug_memory: Option<HotplugMemory>,
    /// Memory that the guest gives back, if it has a device for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<Balloon>,
    /// The numbers by which the guest can enter frozen VMs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<u32>,
    /// What the process has reached, and when, in this order.
    #[serde(default)]
    pub marks: Vec<Mark>,
}

/// Memory that is plugged while the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotplugMemory {
    /// Bytes of its region: the most that can be plugged.
    pub region: u64,
    /// Bytes of a block: all other numbers are multiples of it.
    pub block: u64,
    /// Bytes that the guest is asked to have plugged now.
    pub requested: u64,
    /// Bytes that it has plugged.
    pub plugged: u64,
    /// Bytes that it is to have plugged in the end: more than `requested` as long as memory is being mapped for functions of the host's.
    #[serde(default)]
    pub target: u64,
}

/// Memory that a guest gives back, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Balloon {
    /// What the guest is asked to do without.
    pub target: u64,
    /// What it does without, by its driver's word.
    pub inflated: u64,
    /// What it has reported as free since the VM was made or restored; the same memory as often as it was.
    pub reported: u64,
    /// What of both the host was given. The rest has stayed: it is pinned, or is none that could be given back.
    pub discarded: u64,
    /// Requests of the guest to put pages in or take them back, where functions of the host's do without what is in it (`dma`).
    #[serde(default)]
    pub messages: u64,
    /// The guest did not fill it before the first function came, so that what was not in it was mapped for that first.
    #[serde(default)]
    pub fell_back: bool,
}

/// A moment of a VMM's start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// What was reached; [`FIRST_RUN`] is the last of a start.
    pub name: String,
    /// CLOCK_MONOTONIC of the host.
    pub at_ns: u64,
}

/// The mark just before a vCPU enters the guest for the first time.
pub const FIRST_RUN: &str = "first KVM_RUN";

/// One metric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricSample {
    /// Its name, such as `vcpu_exits_total`.
    pub name: String,
    /// Label names and values, such as `reason`, `port-out`.
    pub labels: Vec<(String, String)>,
    /// Its value.
    pub value: u64,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// Done.
    Done,
    /// To `info`.
    Info(Info),
    /// To `metrics`.
    Metrics(Vec<MetricSample>),
    /// To `snapshot`.
    Written(Written),
    /// To `write-set`.
    WriteSet(PageRuns),
    /// In which order pages were asked for.
    PageOrder(PageRuns),
    /// To `functions`.
    Functions(Functions),
    /// To `freeze`: the guest has not said that it waits since. [`Event::Frozen`] comes when it has.
    Freezing,
    /// To `freeze`: it is done. The packet carries a descriptor, which is for [`Request::Link`] of others and for nothing else.
    Frozen,
}

/// What a snapshot's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// How many files: 1, or one more than there were beside it.
    pub files: usize,
}

/// The kind of a refusal, for machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// The request is malformed or its configuration invalid.
    Invalid,
    /// The request does not fit the VM's state.
    WrongState,
    /// The host lacks something: KVM, memory, a descriptor.
    Host,
    /// The kernel or initramfs cannot be used.
    Boot,
    /// A bug or a failure of the engine.
    Internal,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Its kind.
    pub kind: ErrorKind,
    /// A sentence for people, with the next step where there is one.
    pub message: String,
}

/// Why a VM ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExitReason {
    /// The guest powered off.
    PowerOff,
    /// The guest has halted all its processors for good, with interrupts off.
    Halted,
    /// The guest asked for a reset, or a triple fault did; this VMM does not boot twice.
    Reset,
    /// The engine or a device failed.
    Failed(String),
}

impl std::fmt::Display for ExitReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PowerOff => f.write_str("the guest powered off"),
            Self::Halted => f.write_str("the guest halted its processors"),
            Self::Reset => f.write_str("the guest reset"),
            Self::Failed(why) => write!(f, "the VMM failed: {why}"),
        }
    }
}

/// What a VMM tells without being asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// The VM has ended; the process follows.
    Ended(ExitReason),
    /// The VM ran, and the VMM has paused it.
    Stopped(StopReason),
    /// The VM was to freeze, and has: [`Request::Freeze`] gives its descriptor.
    Frozen,
    /// Its guest has said that it waits, and it could not be frozen; why. It goes on, and is to serve nobody until it is asked again.
    NotFrozen(String),
}

/// One packet on the socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packet {
    /// Driver to VMM.
    Request {
        /// Chosen by the driver, repeated in the reply.
        id: u64,
        /// [`crate::VERSION`] of the driver.
        version: u32,
        /// What is asked.
        request: Request,
    },
    /// VMM to driver.
    Reply {
        /// The request's.
        id: u64,
        /// The answer or the refusal.
        result: Result<Reply, ApiError>,
    },
    /// VMM to driver.
    Event(Event),
}
