//! What can go wrong on a node: each error says what happened and, where a person can do something, what.

mod blame;
pub(crate) mod space;
mod undo;
pub(crate) mod words;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use agent_api::ExecFailure;
use base::ByteSize;
use node_api::transfer::Kind;
use node_api::{ApiError, ErrorKind, State};
use vmm_api::{ClientError, ExitReason};

use crate::error::space::Lacking;
use crate::error::words::{after_end, cpus_of, disk_of, fewer_volumes, stopped, with_causes, within};
use crate::vmm::tail::Tail;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The sandbox cannot be what it is asked to be.
    #[error(transparent)]
    Config(#[from] node_api::ConfigError),
    /// The numbers that were asked for make no VM.
    #[error(transparent)]
    Vm(#[from] vmm_api::ConfigError),
    /// No program to run.
    #[error("{0}")]
    Command(&'static str),
    /// The image.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// Cgroups or the jail.
    #[error(transparent)]
    Jail(#[from] host::Error),
    /// The node's network.
    #[error(transparent)]
    Network(#[from] network::Error),
    /// Nothing can be limited.
    #[error(
        "this host has no cgroups that could limit processor time: leave --cpu-limit and --cpu-weight out, or mount cgroup v2 \
         and start basaltd as root"
    )]
    NoCgroups,
    /// This daemon cannot have one.
    #[error("this daemon runs without root, so its sandboxes have no network: use --network none, or start it as root")]
    NoNetwork,
    /// No such sandbox.
    #[error("there is no sandbox `{0}`: `basalt ps --all` lists them")]
    NotFound(String),
    /// Several sandboxes' ids begin so.
    #[error("`{0}` is the beginning of several sandboxes' ids: write more of it, or the name")]
    Ambiguous(String),
    /// The name is taken.
    #[error("the name `{name}` is taken by sandbox {id}: choose another, or remove that one with `basalt rm {name}`")]
    NameTaken {
        /// The name.
        name: String,
        /// Whose it is.
        id: String,
    },
    /// Too many sandboxes.
    #[error("this node has {0} sandboxes, which is all it can have: remove some with `basalt rm` or `basalt prune`")]
    Full(u32),
    /// CPUs that a sandbox is to own cannot be had.
    #[error(transparent)]
    Cpus(#[from] crate::resources::cpus::Error),
    /// A device of the host's.
    #[error(transparent)]
    Devices(#[from] crate::resources::devices::DevicesError),
    /// No such volume.
    #[error("there is no volume `{0}`: `basalt volume ls` lists them")]
    NoVolume(String),
    /// A tenant's volume.
    #[error(transparent)]
    TenantVolume(#[from] crate::resources::tenant_volumes::TenantVolumeError),
    /// A sandbox has the volume.
    #[error("sandbox {sandbox} has the volume `{name}`: remove it first (`basalt rm {sandbox}`), also if it has ended")]
    VolumeInUse {
        /// The volume.
        name: String,
        /// Who has it.
        sandbox: String,
    },
    /// No such snapshot.
    #[error("there is no snapshot `{0}`: `basalt snapshot ls` lists them")]
    NoSnapshot(String),
    /// No such template.
    #[error("there is no template `{0}`: `basalt template ls` lists them")]
    NoTemplate(String),
    /// Several templates' ids begin so.
    #[error("`{0}` is the beginning of several templates' ids: write more of it, or a name")]
    AmbiguousTemplate(String),
    /// A template's machine cannot be made larger or smaller.
    #[error(
        "a sandbox of the template `{}` is as large as that, which has {}, {} of memory and {}, and sees its processor ({}): leave --cpus, \
         --memory, --disk and --cpu-model out, or build another",
        .0.name(), cpus_of(.0), .0.resources.memory, disk_of(.0), .0.resources.cpu_model.unwrap_or_default()
    )]
    TemplateSize(Box<node_api::Template>),
    /// A template with a network.
    #[error(
        "the template `{0}` has an interface in the node's network: leave --network none out, or build another with it"
    )]
    TemplateNetwork(String),
    /// A template without one.
    #[error("the template `{0}` has no network: leave --network node and --publish out, or build another with one")]
    TemplateWithoutNetwork(String),
    /// More directories than a template's machine has devices for.
    #[error("a sandbox of the template `{}` can have {}", .0, fewer_volumes(*.1))]
    TemplateVolumes(String, usize),
    /// A template whose image is gone.
    #[error(
        "the image of the template `{name}` is gone, and without it the template is of no use: pull or import sha256:{digest}, or \
         remove the template (`basalt template rm {name}`)"
    )]
    TemplateImage {
        /// Its name, or the beginning of its id.
        name: String,
        /// The image's digest.
        digest: String,
    },
    /// A template of this name.
    #[error(
        "there is a template `{0}`: choose another name with --name, or let the one that comes take its name with --force"
    )]
    TemplateNameTaken(String),
    /// The same template.
    #[error(
        "there is the same template already, `{0}`: use that one, or put the one that comes in its place with --force"
    )]
    TemplateThere(String),
    /// A template that would be another one here.
    #[error(
        "no sandbox could be cloned of this template here, as it was made {0}: build it here with `basalt template build`, or \
         load it where it can be used"
    )]
    TemplateOfAnother(String),
    /// A template of other programs, or of another host.
    #[error(
        "no sandbox can be cloned of the template `{0}` any more, as {1}: build it again (`basalt template build`, or \
         `basalt run --template {0}`, which does so)"
    )]
    TemplateOutdated(String, String),
    /// A build that a new version has overtaken.
    #[error("the VMM, the kernel or the agent was replaced while the template was built: build it again")]
    ProgramsReplaced,
    /// The name is taken.
    #[error("there is a snapshot `{0}`: choose another name, or remove that one with `basalt snapshot rm {0}`")]
    SnapshotTaken(String),
    /// A snapshot of which a file is damaged: which, and what to do.
    #[error("{0}")]
    SnapshotDamaged(String),
    /// Something that was to become a snapshot or a template here.
    #[error("this {0} cannot be stored here ({1}): get it again from its source")]
    NotToBeLoaded(Kind, String),
    /// The server of a sandbox's accelerator did not start.
    #[error("the server of the sandbox's accelerator ended before it was ready: {0}")]
    AcceleratorEnded(String),
    /// What its programs had of the accelerator could not be made again.
    #[error("what the sandbox's programs had on its accelerator when it was saved cannot be made again: {0}")]
    AcceleratorLost(String),
    /// A sandbox of which no snapshot can be taken.
    #[error("no snapshot can be taken of sandbox {name}: {why}")]
    NotToBeKept {
        /// Its name.
        name: String,
        /// Why, and what to do.
        why: String,
    },
    /// A sandbox that cannot go on from any snapshot.
    #[error("cannot roll sandbox {name} back: {why}")]
    NotToBePutBack {
        /// Its name.
        name: String,
        /// Why, and what to do.
        why: String,
    },
    /// A sandbox that cannot be of another class.
    #[error("sandbox {name} cannot be moved to the class {class}: {why}")]
    NotToBeMoved {
        /// Its name.
        name: String,
        /// The class.
        class: node_api::Class,
        /// Why, and what to do.
        why: String,
    },
    /// A sandbox that was to be of another class, and goes on as it was.
    #[error("sandbox {name} goes on as it was: it could not be moved to the class {class}")]
    NotMoved {
        /// Its name.
        name: String,
        /// The class.
        class: node_api::Class,
        /// Why.
        source: Box<Error>,
    },
    /// What was saved of a sandbox may not have reached the disk.
    #[error(
        "the host was started anew while sandbox {0} was moved to another class: start it again with `basalt start`"
    )]
    SavedBeforeBoot(String),
    /// A snapshot of another sandbox.
    #[error("the snapshot `{snapshot}` is of {of}, not of {name}: `basalt clone {snapshot}` makes a sandbox of it")]
    NotItsSnapshot {
        /// The sandbox.
        name: String,
        /// The snapshot.
        snapshot: String,
        /// Whose it is.
        of: String,
    },
    /// A sandbox that goes with its client.
    #[error(
        "sandbox {0} ends with the `basalt run` that started it, and so would its rollback: run one with --detach, or make a sandbox of the snapshot with `basalt clone`"
    )]
    Tied(String),
    /// A directory that cannot be shared.
    #[error("the directory {} of a volume {why}", .path.display())]
    Volume {
        /// As it was asked for.
        path: PathBuf,
        /// Why not, and what to do.
        why: &'static str,
    },
    /// A directory that is served elsewhere.
    #[error("the directory {} cannot be reached at {address}: {cause}; see whether what serves it still runs (in the lab: `basalt lab down`, and the same command again)", .directory.display())]
    Server {
        /// What it is there.
        directory: PathBuf,
        /// Where it is served.
        address: std::net::SocketAddr,
        /// What the system said.
        cause: io::Error,
    },
    /// The sandbox cannot do that now.
    #[error("sandbox {name} is {state}: {next}")]
    WrongState {
        /// Its name.
        name: String,
        /// Where it stands.
        state: State,
        /// What to do.
        next: &'static str,
    },
    /// There is no room for it.
    #[error(transparent)]
    NoRoom(#[from] crate::resources::budget::Refused),
    /// Something that a VM needs cannot be opened.
    #[error("{what} {} cannot be opened: {cause}; {next}", .path.display())]
    Open {
        /// What it is.
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
        /// What to do.
        next: &'static str,
    },
    /// Memory is to come on demand where nobody tells when it is touched.
    #[error(
        "memory cannot come on demand, as /dev/userfaultfd cannot be opened ({0}): it needs Linux 6.1 with CONFIG_USERFAULTFD, and a \
         daemon that may open it; choose another --paging"
    )]
    Userfaultfd(io::Error),
    /// A file or directory of the state directory.
    #[error("{} cannot be used (to {operation} it failed: {cause}): see whether its disk is full or read-only", .path.display())]
    File {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// The database.
    #[error("{doing} the node's database failed: {cause}; see whether its disk is full or read-only")]
    Database {
        /// What was tried.
        doing: &'static str,
        /// What SQLite said.
        cause: rusqlite::Error,
    },
    /// The database is damaged.
    #[error("the node's database is damaged: {0}")]
    DatabaseDamaged(String),
    /// The database belongs to a newer daemon.
    #[error("the node's database is of version {found}, this daemon knows {known}: use the newer basaltd")]
    DatabaseNewer {
        /// Its version.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// Another daemon has the state directory.
    #[error("another basaltd runs on {}: use that one, or give this one another --state", .0.display())]
    Locked(PathBuf),
    /// A disk cannot be made.
    #[error(
        "the writable disk cannot be made: {0}; see whether mkfs.ext4 (package e2fsprogs) is there and the disk is not full"
    )]
    Disk(String),
    /// The host has no space left.
    #[error(transparent)]
    Space(#[from] Lacking),
    /// A pipe, a socket, a thread: the host is out of something.
    #[error("{what} failed: {cause}; see whether the limits of processes and open files are reached (`ulimit -a`)")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        cause: io::Error,
    },
    /// The VMM refused to make or start the VM.
    #[error("the VM cannot be made: {cause}{log}")]
    Refused {
        /// What the VMM said.
        cause: ClientError,
        /// What it wrote.
        log: Tail,
    },
    /// The VMM refused something else.
    #[error("the VMM refused while {during}: {cause}{log}")]
    RefusedWhile {
        /// What was going on.
        during: &'static str,
        /// What the VMM said.
        cause: ClientError,
        /// What it wrote.
        log: Tail,
    },
    /// The VMM was killed for what it used.
    #[error(
        "the VMM took more memory than its limit of {limit}, which is the guest's and {} for itself, and was killed; what ran \
         in the sandbox is lost, run it again{log}", ByteSize(.limit.bytes() - .guest.bytes())
    )]
    VmmTookMemory {
        /// The guest's.
        guest: ByteSize,
        /// `memory.max`.
        limit: ByteSize,
        /// What it wrote.
        log: Tail,
    },
    /// The VMM process ended by itself or was killed.
    #[error("the VMM died while {during}; what ran in the sandbox is lost, run it again{log}")]
    VmmDied {
        /// What was going on.
        during: &'static str,
        /// What it wrote.
        log: Tail,
    },
    /// The guest stopped before its command had ended.
    #[error(
        "{} while {during}; what ran in the sandbox is lost, {}{console}",
        stopped(.reason, .panic.as_deref()), after_end(.reason, .panic.as_deref())
    )]
    GuestEnded {
        /// What was going on.
        during: &'static str,
        /// Why, as the VMM says.
        reason: ExitReason,
        /// The kernel's own words, where it panicked.
        panic: Option<String>,
        /// The last lines of the console.
        console: Tail,
    },
    /// The guest booted too slowly or not at all.
    #[error(
        "the guest's agent did not answer within {limit:?}; start basaltd with --log-level debug to keep its whole console{console}"
    )]
    AgentSilent {
        /// How long was waited.
        limit: Duration,
        /// The last lines of the console.
        console: Tail,
    },
    /// A guest that ran and does not answer any more.
    #[error(
        "the guest did not answer {} while {during}: its kernel may hang, or be very busy; `basalt logs --console` shows what it wrote \
         last, `basalt kill` ends it{console}", within(.limit)
    )]
    GuestSilent {
        /// What was going on.
        during: &'static str,
        /// How long was waited, if that is known.
        limit: Option<Duration>,
        /// The last lines of the console.
        console: Tail,
    },
    /// The agent could not do what it was asked.
    #[error("the guest's agent failed while {during}: {cause}{console}")]
    Agent {
        /// What was going on.
        during: &'static str,
        /// What the agent said.
        cause: agent_api::Error,
        /// The last lines of the console.
        console: Tail,
    },
    /// The command could not be started.
    #[error(transparent)]
    Exec(#[from] ExecFailure),
    /// Whoever asked is gone.
    #[error("request cancelled: the client closed the connection")]
    Cancelled,
    /// Somebody has asked for its end.
    #[error("somebody stopped the sandbox while its memory was mapped for devices or plugged, which was given up")]
    GivenUp,
    /// It took too long.
    #[error("{what} took longer than {limit:?}: `basalt rm --force` ends the sandbox in any case")]
    Deadline {
        /// What.
        what: &'static str,
        /// How long was waited.
        limit: Duration,
    },
    /// It failed, and so did taking back what had been done of it.
    #[error(
        "{}; besides, what had been done of it could not be taken back: {}",
        with_causes(first.as_ref()), with_causes(undo.as_ref())
    )]
    NotTakenBack {
        /// Why it failed.
        first: Box<Error>,
        /// Why it could not be taken back.
        undo: Box<Error>,
    },
    /// The request cannot be carried out.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// The exit code of podman's convention: 127 and 126 for commands that cannot be run, else 125.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exec(failure) => failure.kind.exit_code(),
            Self::NotTakenBack { first, .. } => first.exit_code(),
            _ => 125,
        }
    }

    /// Why a start failed, in a few words that are always the same.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Config(_) | Self::Vm(_) | Self::Command(_) | Self::Invalid(_) => "invalid-request",
            Self::Image(_) => "image",
            Self::Jail(host::Error::Share { .. }) => "volume",
            Self::Jail(_) => "jail",
            Self::Network(_) | Self::NoNetwork => "network",
            Self::NotFound(_)
            | Self::NoVolume(_)
            | Self::NoSnapshot(_)
            | Self::NoTemplate(_)
            | Self::Ambiguous(_)
            | Self::AmbiguousTemplate(_) => "not-found",
            Self::TemplateSize(_)
            | Self::TemplateNetwork(_)
            | Self::TemplateWithoutNetwork(_)
            | Self::TemplateVolumes(..)
            | Self::TemplateImage { .. }
            | Self::TemplateOutdated(..)
            | Self::TemplateNameTaken(_)
            | Self::TemplateThere(_)
            | Self::TemplateOfAnother(_)
            | Self::ProgramsReplaced => "template",
            Self::NameTaken { .. } => "name-taken",
            Self::Full(_) => "node-full",
            Self::WrongState { .. } => "wrong-state",
            Self::NoRoom(refused) => refused.resource(),
            Self::Devices(_) => "device",
            Self::AcceleratorEnded(_) | Self::AcceleratorLost(_) => "accelerator",
            Self::Open { .. }
            | Self::Userfaultfd(_)
            | Self::File { .. }
            | Self::Host { .. }
            | Self::Locked(_)
            | Self::Cpus(_)
            | Self::NoCgroups => "host",
            Self::Database { .. } | Self::DatabaseDamaged(_) | Self::DatabaseNewer { .. } => "database",
            Self::Disk(_) => "disk",
            Self::Space(_) => "no-space",
            Self::Volume { .. } | Self::VolumeInUse { .. } | Self::TenantVolume(_) | Self::Server { .. } => "volume",
            Self::Refused { .. } | Self::RefusedWhile { .. } => "vmm-refused",
            Self::SnapshotTaken(_)
            | Self::SnapshotDamaged(_)
            | Self::NotToBeLoaded(..)
            | Self::NotToBeKept { .. }
            | Self::NotToBePutBack { .. }
            | Self::NotToBeMoved { .. }
            | Self::NotMoved { .. }
            | Self::SavedBeforeBoot(_)
            | Self::NotItsSnapshot { .. }
            | Self::Tied(_) => "snapshot",
            Self::VmmDied { .. } | Self::VmmTookMemory { .. } => "vmm-died",
            Self::GuestEnded { .. } => "guest-ended",
            Self::AgentSilent { .. } | Self::GuestSilent { .. } => "guest-silent",
            Self::Agent { .. } => "agent",
            Self::Exec(_) => "command",
            Self::Cancelled => "cancelled",
            Self::GivenUp => "stopped",
            Self::Deadline { .. } => "deadline",
            Self::NotTakenBack { first, .. } => first.reason(),
        }
    }

    /// As askers get it.
    pub(crate) fn for_api(&self) -> ApiError {
        let kind = match self {
            Self::Config(_)
            | Self::Vm(_)
            | Self::Command(_)
            | Self::Invalid(_)
            | Self::NoNetwork
            | Self::Volume { .. }
            | Self::NotToBeLoaded(..)
            | Self::NotToBeKept { .. }
            | Self::NotToBePutBack { .. }
            | Self::NotToBeMoved { .. }
            | Self::NotItsSnapshot { .. }
            | Self::Tied(_)
            | Self::TemplateSize(_)
            | Self::TemplateNetwork(_)
            | Self::TemplateWithoutNetwork(_)
            | Self::TemplateVolumes(..)
            | Self::Jail(host::Error::Share { .. }) => ErrorKind::Invalid,
            Self::NoRoom(refused) if refused.is_of_request() => ErrorKind::Invalid,
            Self::NotFound(_)
            | Self::NoVolume(_)
            | Self::NoSnapshot(_)
            | Self::NoTemplate(_)
            | Self::Ambiguous(_)
            | Self::AmbiguousTemplate(_)
            | Self::TemplateImage { .. }
            | Self::Image(image::Error::NoSuchImage { .. }) => ErrorKind::NotFound,
            Self::NameTaken { .. }
            | Self::SnapshotTaken(_)
            | Self::TemplateNameTaken(_)
            | Self::TemplateThere(_)
            | Self::VolumeInUse { .. }
            | Self::Locked(_) => ErrorKind::Conflict,
            Self::WrongState { .. }
            | Self::Space(Lacking::Stopped(_))
            | Self::TemplateOutdated(..)
            | Self::TemplateOfAnother(_)
            | Self::ProgramsReplaced => ErrorKind::WrongState,
            Self::VmmDied { .. }
            | Self::VmmTookMemory { .. }
            | Self::GuestEnded { .. }
            | Self::AgentSilent { .. }
            | Self::GuestSilent { .. }
            | Self::Agent { .. }
            | Self::Exec(_) => ErrorKind::Guest,
            Self::Deadline { .. } | Self::Cancelled => ErrorKind::Deadline,
            Self::GivenUp => ErrorKind::WrongState,
            Self::NotTakenBack { first, .. } => first.for_api().kind,
            Self::Devices(error) => error.kind(),
            Self::TenantVolume(error) => error.kind(),
            _ => ErrorKind::Host,
        };
        ApiError {
            kind,
            message: with_causes(self),
            exit_code: self.exit_code(),
        }
    }

    pub(crate) fn host<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |cause| Self::Host {
            what,
            cause: cause.into(),
        }
    }

    pub(crate) fn database(doing: &'static str) -> impl FnOnce(rusqlite::Error) -> Self {
        move |cause| Self::Database { doing, cause }
    }
}

#[cfg(test)]
mod tests;
