//! What a node is started with.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::ByteSize;
use host::jail::Pool;
use log::LevelFilter;
use node_api::CpuModel;
use otlp::Exporter;

use crate::resources::budget::{HostNumbers, Overcommit};

/// What a node is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// The state directory, an absolute path.
    pub state: PathBuf,
    /// The guest kernel.
    pub kernel: PathBuf,
    /// The initramfs with the agent.
    pub initramfs: PathBuf,
    /// What is started for sandboxes.
    pub programs: Programs,
    /// The KVM device, [`host::kvm::DEVICE`].
    pub kvm: PathBuf,
    /// Which processor guests see if nobody says.
    pub cpu_model: CpuModel,
    /// Users for the VMMs, which then are in namespaces of their own; `None` runs them as this process is.
    pub users: Option<Pool>,
    /// What the daemon and its VMMs say; from `debug` on, guests' kernels are talkative.
    pub log_level: LevelFilter,
    /// Who may ask the daemon.
    pub sockets: Sockets,
    /// A service manager would start the daemon again.
    pub managed: bool,
    /// The cgroup below which sandboxes have theirs, delegated by its manager; the top of the hierarchy when not given.
    pub cgroup: Option<PathBuf>,
    /// How long things may take.
    pub limits: TimeLimits,
    /// Who collects what its operations were made of, if anybody does.
    pub spans: Option<Exporter>,
    /// What the host has for sandboxes, [`crate::ThisHost`].
    pub host: Arc<dyn HostNumbers>,
    /// How many times over that may be promised.
    pub overcommit: Overcommit,
    /// How memory is zeroed that is mapped for devices.
    pub zeroing: Zeroing,
}

/// Where the daemon is asked, and by whom.
#[derive(Clone, Debug, Default)]
pub struct Sockets {
    /// The group whose members may ask the daemon, beside its own user; whoever may ask can become the daemon's user by it.
    pub group: Option<u32>,
    /// Where gateways ask: for tenants, and nothing that reaches the host. A socket in the state directory when not given.
    pub gateway: Option<PathBuf>,
    /// The group whose members may ask there, beside the daemon's own user.
    pub gateway_group: Option<u32>,
}

/// What is started for sandboxes; each is looked for when it is.
#[derive(Clone, Debug, Default)]
pub struct Programs {
    /// The VMM.
    pub vmm: PathBuf,
    /// The server of an accelerator.
    pub accelerator: PathBuf,
    /// OpenCL's driver for programs of guests that have one.
    pub opencl: PathBuf,
    /// The same for guests whose image has musl.
    pub opencl_musl: PathBuf,
    /// CUDA's libraries for programs of guests that have one.
    pub cuda: PathBuf,
}

/// How memory is zeroed that is mapped for devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeroing {
    /// How many bytes a second a VMM may zero of its guest's; no limit if missing.
    pub rate: Option<ByteSize>,
    /// How many bytes are zeroed while no sandbox is being started, for the next ones: a multiple of [`crate::ZEROED_PIECE`]; 0 for none.
    pub ahead: ByteSize,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimits {
    /// Until a guest's agent is ready.
    pub boot: Duration,
    /// An answer of a VMM or an agent that needs no work.
    pub answer: Duration,
    /// From the order to power off to the end.
    pub power_off: Duration,
    /// From SIGKILL to the end of a process.
    pub kill: Duration,
}

impl TimeLimits {
    /// For a host with hardware virtualization: a kernel boots in a second, a loaded machine needs many.
    pub const REAL: Self = Self {
        boot: Duration::from_secs(60),
        answer: Duration::from_secs(10),
        power_off: Duration::from_secs(5),
        kill: Duration::from_secs(10),
    };

    /// For an emulated host: a boot takes seconds, and its other guests slow it down.
    pub const EMULATED: Self = Self {
        boot: Duration::from_secs(120),
        answer: Duration::from_secs(60),
        power_off: Duration::from_secs(30),
        kill: Duration::from_secs(30),
    };
}

impl Config {
    /// Whether guests' kernels shall say all that they have to say.
    pub(crate) fn talkative(&self) -> bool {
        self.log_level >= LevelFilter::Debug
    }
}
