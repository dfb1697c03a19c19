//! The contract between the node daemon and whoever asks it for sandboxes: plain data, validation and a thin client.
//!
//! One SEQPACKET unix socket carries requests, items and replies, one JSON document a packet; descriptors travel with the
//! replies that need them. A command's streams never pass through the daemon: who asks for one gets a connection to the
//! guest's agent, and speaks `agent-api` on it. Knows neither how a daemon works nor what a VMM is.

pub mod accelerator;
pub mod accelerator_stats;
pub mod class;
pub mod client;
pub mod config;
pub mod device;
pub mod device_start;
pub mod host_cpu;
pub mod limits;
pub mod list;
pub mod memory_mode;
pub mod memory_size;
pub mod message;
pub mod paging;
pub mod pool;
pub mod process;
pub mod promised;
pub mod recovery;
pub mod sandbox;
pub mod secrets;
pub mod snapshot;
pub mod template;
pub mod tenant_volume;
pub mod time_limit;
pub mod tmpfs;
pub mod transfer;
pub mod usage;
pub mod verify;
pub mod volume;

pub use accelerator::{Accelerator, AcceleratorApi, AcceleratorError, AcceleratorPriority, AcceleratorTransport};
pub use accelerator_stats::{AcceleratorInfo, AcceleratorMemory, AcceleratorPart, AcceleratorStats, AcceleratorTime};
pub use class::{Class, Idle};
pub use client::{Client, ClientError};
pub use config::{ConfigError, NetworkMode, Resources, SandboxConfig, check_name};
pub use cpu::CpuModel;
pub use device::{
    BindTerms, Device, DeviceGroup, DeviceIdentity, DeviceRequest, DeviceState, GroupMember, GuestDevice, Vfs,
};
pub use device_start::DeviceStart;
pub use host_cpu::{CpuUse, HostCpu};
pub use limits::{Limits, Rate};
pub use list::ListConfig;
pub use memory_mode::MemoryMode;
pub use memory_size::{DmaState, MemoryError, MemoryState};
pub use message::{ApiError, ErrorKind, EventKind, LoadStep, NodeEvent, NodeInfo, Packet, Reply, Request, Tracing};
pub use paging::Paging;
pub use pool::Pool;
pub use process::ProcessConfig;
pub use promised::{Promised, Resource, ZeroedMemory};
pub use sandbox::{Ended, PauseReason, Sandbox, State};
pub use secrets::Secrets;
pub use snapshot::{CloneConfig, MoveConfig, Programs, RollbackConfig, Snapshot, SnapshotConfig, check_snapshot_name};
pub use template::{BuildConfig, HostTraits, LoadedTemplate, Recipe, TakenName, Template, check_template_name};
pub use time_limit::{OnTimeout, TimeLimit};
pub use tmpfs::Tmpfs;
pub use usage::{BriefUsage, Sample, Traffic, Usage, Used};
pub use verify::{Damage, Problem, Verified, VerifyProgress};
pub use volume::{Volume, VolumeError, VolumeMount, VolumeSource};

/// The version of this contract. A daemon refuses any other.
pub const VERSION: u32 = 1;

/// The name of the daemon's socket, in the state directory.
pub const SOCKET: &str = "basaltd.sock";

/// The same for gateways, which ask for tenants and for nothing that reaches the host, where the daemon is told no other place.
pub const GATEWAY_SOCKET: &str = "gateway.sock";

/// The name of the socket in the state directory on which the daemon tells its metrics, by HTTP.
pub const METRICS_SOCKET: &str = "metrics.sock";
