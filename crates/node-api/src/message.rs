//! Requests, replies and events.

use agent_api::ExecRequest;
use base::{ByteSize, CpuSet, Egress};
use observe::{Span, TraceContext};
use serde::{Deserialize, Serialize};

use crate::accelerator_stats::AcceleratorInfo;
use crate::config::SandboxConfig;
use crate::device::{Device, DeviceRequest};
use crate::host_cpu::HostCpu;
use crate::list::ListConfig;
use crate::memory_size::MemoryState;
use crate::pool::Pool;
use crate::promised::{Promised, ZeroedMemory};
use crate::sandbox::{Ended, Sandbox};
use crate::snapshot::{CloneConfig, MoveConfig, RollbackConfig, Snapshot, SnapshotConfig};
use crate::template::{BuildConfig, LoadedTemplate, Template};
use crate::tenant_volume::{TenantVolumeItem, TenantVolumeReply, TenantVolumeRequest};
use crate::time_limit::OnTimeout;
use crate::transfer::Kind;
use crate::usage::{BriefUsage, Sample};
use crate::verify::{Verified, VerifyProgress};
use crate::volume::Volume;

/// What is asked of a daemon. A `sandbox` is a name, or an id or the beginning of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "method", content = "params", rename_all = "kebab-case")]
pub enum Request {
    /// Who are you? [`Reply::Info`].
    Info,
    /// Make and start a sandbox. [`Reply::Started`]; for one that is not detached with a connection to its agent, on which
    /// its command is to be started as [`Reply::Started`] says, and the sandbox ends with this connection or the other.
    Run(Box<SandboxConfig>),
    /// Start one that has ended, detached. [`Reply::Started`].
    Start {
        /// Which.
        sandbox: String,
    },
    /// A connection to its agent, for a command in it. [`Reply::Agent`] with the descriptor.
    Exec {
        /// Which.
        sandbox: String,
    },
    /// Those that are asked for. Each is an item; then [`Reply::Done`].
    List(ListConfig),
    /// One of them. [`Reply::Sandbox`].
    Inspect {
        /// Which.
        sandbox: String,
    },
    /// What its command has written. [`Reply::Sandbox`] with its log and its console, open for
    /// reading.
    Logs {
        /// Which.
        sandbox: String,
    },
    /// Wait until it has ended. [`Reply::Ended`].
    Wait {
        /// Which.
        sandbox: String,
    },
    /// End it in order: SIGTERM to its command, and SIGKILL to the rest after the grace period. [`Reply::Done`].
    Stop {
        /// Which.
        sandbox: String,
        /// Milliseconds.
        grace_ms: u64,
    },
    /// Send its command a signal. SIGKILL ends the whole VM. [`Reply::Done`].
    Kill {
        /// Which.
        sandbox: String,
        /// Linux's number for x86-64.
        signal: i32,
    },
    /// Stop it if it runs, and start it. [`Reply::Started`].
    Restart {
        /// Which.
        sandbox: String,
        /// Milliseconds.
        grace_ms: u64,
    },
    /// Remove it with all that belongs to it. [`Reply::Done`].
    Remove {
        /// Which.
        sandbox: String,
        /// Also if it runs.
        force: bool,
    },
    /// Stop its vCPUs and devices. [`Reply::Done`].
    Pause {
        /// Which.
        sandbox: String,
    },
    /// Save its memory on the disk and end its VM, until [`Request::Resume`]. [`Reply::Done`].
    Suspend {
        /// Which.
        sandbox: String,
    },
    /// Let one that is paused or suspended go on. [`Reply::Done`].
    Resume {
        /// Which.
        sandbox: String,
    },
    /// What they use now. Each is an item; then [`Reply::Done`].
    Stats {
        /// Which; all that run when not given.
        sandbox: Option<String>,
    },
    /// What all of them use now, as far as the host counts it by itself: neither a VMM nor a guest is asked. [`Item::BriefUsage`] several
    /// times; then [`Reply::Done`].
    ListUsage,
    /// What is ready for sandboxes to come. Each is an item; then [`Reply::Done`].
    ListPools,
    /// What its last start, or the last time that it went on, was made of. [`Reply::Trace`].
    Trace {
        /// Which.
        sandbox: String,
    },
    /// What happens from now on. [`Reply::Done`] at once, then an item each.
    Events,
    /// Remove all that have ended. [`Reply::Pruned`].
    Prune,
    /// What was set aside because nobody could tell whose it is, by its names below the state directory. [`Reply::Pruned`].
    Quarantine {
        /// Delete all of it.
        delete: bool,
    },
    /// Make a named volume; it is fine if there is one. [`Reply::Volume`].
    MakeVolume {
        /// Its name.
        name: String,
    },
    /// All named volumes. Each is an item; then [`Reply::Done`].
    ListVolumes,
    /// One of them. [`Reply::Volume`].
    InspectVolume {
        /// Its name.
        name: String,
    },
    /// Remove a named volume with its files; refused while a sandbox has it. [`Reply::Done`].
    RemoveVolume {
        /// Its name.
        name: String,
    },
    /// Remove all named volumes that no sandbox has. [`Reply::Pruned`].
    PruneVolumes,
    /// Something about volumes of the tenant for whom it is asked.
    TenantVolume(TenantVolumeRequest),
    /// Keep a sandbox as it is now; it goes on. [`Reply::Snapshot`].
    MakeSnapshot(SnapshotConfig),
    /// All snapshots. Each is an item; then [`Reply::Done`].
    ListSnapshots,
    /// One of them. [`Reply::Snapshot`].
    InspectSnapshot {
        /// Its name.
        name: String,
    },
    /// Compare the files of a snapshot or a template with their checksums. [`Item::Progress`] now and then, then [`Reply::Verified`],
    /// also if they are damaged.
    Verify {
        /// Which of the two.
        kind: Kind,
        /// A snapshot's name; a template's, or its id or the beginning of one.
        name: String,
    },
    /// The files of a snapshot, or of a template that somebody has built, to be sent on. [`Reply::Files`] with a descriptor for each.
    OpenFiles {
        /// Which of the two.
        kind: Kind,
        /// A snapshot's name; a template's, or its id or the beginning of one.
        name: String,
    },
    /// A step of bringing a snapshot or a template; what was begun ends with this connection.
    Load(LoadStep),
    /// Remove a snapshot; clones of it run on. [`Reply::Done`].
    RemoveSnapshot {
        /// Its name.
        name: String,
    },
    /// Make a sandbox in which a template is built. [`Reply::Started`] with a connection to its agent, which is for whatever the
    /// asker runs there first; the sandbox ends with this connection. [`Reply::Template`] if there is the same template already,
    /// which is called as asked from now on.
    BuildTemplate(Box<BuildConfig>),
    /// Keep this connection's sandbox (see [`Request::BuildTemplate`]) as the template that is built in it, with all that runs there,
    /// and end it. [`Reply::Template`].
    KeepTemplate,
    /// One of the templates. [`Reply::Template`].
    InspectTemplate {
        /// A name, or an id or the beginning of one.
        template: String,
    },
    /// All templates. Each is an item; then [`Reply::Done`].
    ListTemplates,
    /// Remove a template; sandboxes that were cloned of it run on. [`Reply::Done`].
    RemoveTemplate {
        /// Its id, or the beginning of one, or a name of it. One that has other names only loses this one.
        template: String,
    },
    /// Remove the templates that the daemon has made by itself and that no sandbox can be cloned of any more, or all templates,
    /// those too that were built. [`Reply::Pruned`].
    PruneTemplates {
        /// All of them.
        all: bool,
    },
    /// Make a sandbox that goes on from a snapshot, detached. [`Reply::Started`].
    Clone(CloneConfig),
    /// Let a sandbox go on from a snapshot of it, in place of what it is now. [`Reply::Started`].
    Rollback(RollbackConfig),
    /// Let a sandbox that runs go on as another class. [`Reply::Started`].
    Move(MoveConfig),
    /// Have a sandbox's memory be of another size, as long as it is there; one that runs is given more, or asked to give some back.
    /// [`Reply::Sandbox`], after a moment for its guest.
    UpdateMemory {
        /// Which.
        sandbox: String,
        /// How much it is to have, whole pages.
        memory: ByteSize,
    },
    /// Have a sandbox run for so long from now on and from each next start, or without a limit. [`Reply::Sandbox`].
    SetTimeLimit {
        /// Which.
        sandbox: String,
        /// How long, in milliseconds.
        ms: Option<u64>,
        /// What is done then; if it is not said, what was to be done until now.
        #[serde(default)]
        then: Option<OnTimeout>,
    },
    /// Have a sandbox send where these rules let it, in place of those that it has: from when this is answered, until it is asked again, by
    /// whatever machine it has. Open connections to where it may not send any more end. [`Reply::Sandbox`].
    UpdateNetwork {
        /// Which.
        sandbox: String,
        /// Where it may send.
        egress: Egress,
    },
    /// All sandboxes that have an accelerator. Each is an item; then [`Reply::Done`].
    ListAccelerators,
    /// The host's CPUs. Each is an item; then [`Reply::Done`].
    ListCpus,
    /// Keep CPUs free for sandboxes that will own them. [`Reply::Cpus`].
    IsolateCpus {
        /// Which.
        cpus: CpuSet,
    },
    /// Give isolated CPUs back to everything. [`Reply::Cpus`].
    ReleaseCpus {
        /// Which; all when not given.
        cpus: Option<CpuSet>,
    },
    /// Something about the host's devices. Each that it is about is an item; then [`Reply::Done`].
    Devices(DeviceRequest),
    /// End this connection's sandbox (see [`Request::Run`]): its client has what it wanted. [`Reply::Done`].
    Finish,
    /// End the daemon; sandboxes run on. [`Reply::Done`].
    Quit {
        /// Take away all that it keeps in the kernel, its network and cgroup. Refused while there are sandboxes.
        clean: bool,
    },
}

/// How a snapshot or a template is brought. Its files are written by whoever brings it; the daemon looks at them before it keeps
/// them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoadStep {
    /// Make a place for it. [`Reply::Done`].
    Begin {
        /// Which of the two.
        kind: Kind,
        /// What it is to be called; its record says so when not given.
        name: Option<String>,
        /// A template that is here already is replaced, and others lose the names that this one has. No snapshot is replaced.
        force: bool,
    },
    /// Make an empty file of it. [`Reply::Done`] with its descriptor, open for writing.
    File {
        /// The file's name.
        name: String,
    },
    /// It is whole: give it its name. [`Reply::Snapshot`] or [`Reply::LoadedTemplate`].
    Keep,
}

/// What a daemon says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// The daemon's version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Its program's file has been replaced since it was started.
    pub replaced: bool,
    /// A service manager started it and would start it again.
    pub managed: bool,
    /// How many sandboxes have a VM.
    pub running: usize,
    /// What sandboxes are promised of the host.
    #[serde(default)]
    pub promised: Vec<Promised>,
    /// Memory that is zeroed ahead, where some is to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeroed_memory: Option<ZeroedMemory>,
}

/// What happened to a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// It was made.
    Create,
    /// It runs.
    Start,
    /// It was paused.
    Pause,
    /// It was suspended.
    Suspend,
    /// Its time is over: it is being stopped or suspended.
    Timeout,
    /// It was paused, as the host has no space left for what it writes to its disk.
    NoSpace,
    /// It goes on.
    Resume,
    /// It has the devices that it was started with, some time after its start.
    DevicesPresent,
    /// It does not get them, or not again behind something for which they were detached: the daemon's log, `inspect` and `device ls` say why.
    DevicesFailed,
    /// All of its memory is there, some time after its start or a change of its size.
    MemoryReady,
    /// It cannot be brought to its size, which is tried again: the daemon's log and `inspect` say why.
    MemoryFailed,
    /// An IOMMU refused DMA of one of its devices; told at most once a minute for each sandbox, `stats` has the number.
    DmaFault,
    /// The server of its accelerator has ended, and it runs on without: the event, the daemon's log and `inspect` say what to do.
    AcceleratorEnded,
    /// Its VM is gone.
    Exit,
    /// It was removed.
    Remove,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEvent {
    /// When: nanoseconds since 1970.
    pub time_ns: u64,
    /// What.
    pub kind: EventKind,
    /// To which sandbox.
    pub id: String,
    /// Its name.
    pub name: String,
    /// With an exit: how.
    pub ended: Option<Ended>,
    /// With `devices-failed`: which device, why, and what to do. With `dma-fault`: which device, and to which address. With
    /// `accelerator-ended`: what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// With `devices-present` and `memory-ready`: what there is, how fast it was mapped, and how often its guest waited for that. Nothing where its
    /// VMM had no time to tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Box<MemoryState>>,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// Done.
    Done,
    /// To `info`.
    Info(NodeInfo),
    /// It runs.
    Started {
        /// The sandbox.
        sandbox: Box<Sandbox>,
        /// What is to be run on the connection that came along.
        command: Option<Box<ExecRequest>>,
    },
    /// To `exec`.
    Agent {
        /// The sandbox's environment, directory and user; the rest is for the asker to fill in.
        command: Box<ExecRequest>,
        /// How often the sandbox was started again by then; a command does not outlive that. `None` from daemons of before.
        #[serde(default)]
        restarts: Option<u32>,
        /// The version of the agent's protocol that its end of the connection speaks. `None` from daemons of before there were several.
        #[serde(default)]
        version: Option<u16>,
    },
    /// One sandbox.
    Sandbox(Box<Sandbox>),
    /// To `wait`.
    Ended(Ended),
    /// To `prune`: the ids, or the names.
    Pruned(Vec<String>),
    /// A named volume.
    Volume(Volume),
    /// To `tenant-volume`.
    TenantVolume(TenantVolumeReply),
    /// A snapshot.
    Snapshot(Box<Snapshot>),
    /// The names of files whose descriptors came along.
    Files(Vec<String>),
    /// A template.
    Template(Box<Template>),
    /// The CPUs that it was about.
    Cpus(CpuSet),
    /// A template that was brought.
    LoadedTemplate(Box<LoadedTemplate>),
    /// To `verify`.
    Verified(Box<Verified>),
    /// To `trace`: the operation is the last span. Empty where the daemon has not started it itself.
    Trace(Vec<Span>),
}

/// One of several things, before the reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Item {
    /// Of `list`.
    Sandbox(Box<Sandbox>),
    /// Of `stats`.
    Sample(Sample),
    /// Of `list-usage`.
    BriefUsage(Vec<BriefUsage>),
    /// Of `events`.
    Event(NodeEvent),
    /// Of any request whose asker wants them.
    Spans(Vec<Span>),
    /// Of `list-volumes`.
    Volume(Volume),
    /// Of `tenant-volume`.
    TenantVolume(TenantVolumeItem),
    /// Of `list-snapshots`.
    Snapshot(Box<Snapshot>),
    /// Of `list-templates`.
    Template(Box<Template>),
    /// Of `list-pools`.
    Pool(Pool),
    /// Of `list-accelerators`.
    Accelerator(Box<AcceleratorInfo>),
    /// Of `list-cpus`.
    Cpu(HostCpu),
    /// Of `devices`.
    Device(Box<Device>),
    /// Of `verify`.
    Progress(VerifyProgress),
}

/// The kind of a refusal, for machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// The request is malformed or asks for what cannot be.
    Invalid,
    /// No such sandbox or image.
    NotFound,
    /// The name is taken.
    Conflict,
    /// The request does not fit the sandbox's state.
    WrongState,
    /// The host lacks something.
    Host,
    /// The guest or its VMM failed.
    Guest,
    /// It took too long.
    Deadline,
    /// A bug.
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
    /// What `basalt run` exits with.
    pub exit_code: u8,
}

/// How a request is part of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracing {
    /// What it is part of.
    pub parent: TraceContext,
    /// The asker wants to see where the time goes: [`Item::Spans`] before the reply.
    pub wanted: bool,
}

/// One packet on the socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packet {
    /// To the daemon.
    Request {
        /// [`crate::VERSION`] of the asker.
        version: u32,
        /// What is asked.
        request: Request,
        /// Which trace it is part of.
        #[serde(default)]
        trace: Option<Tracing>,
        /// The tenant for whom it is asked: others' sandboxes and snapshots are not there then, and what is made is this tenant's. On the
        /// socket for gateways all tenants' are there where it is not given, and nothing else.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tenant: Option<String>,
    },
    /// From the daemon.
    Item(Item),
    /// From the daemon, after all items.
    Reply(Result<Reply, ApiError>),
}
