//! The contract between a VMM process and whoever drives it: plain data, validation and a thin client.
//!
//! One SEQPACKET socket carries requests, replies and events, one JSON document a packet; descriptors that a
//! request needs travel with it and are named by their position ([`FdRef`]). This crate knows no VMM.

pub mod client;
pub mod config;
pub mod devices;
mod functions;
pub mod message;
pub mod servers;

pub use client::{ClientError, VmmClient};
pub use config::{
    ConfigError, DeviceSpec, FdRef, MemoryMode, PageRuns, Paging, RestoreConfig, SnapshotConfig, SnapshotFiles,
    VmConfig, iommu_device, mem_device,
};
pub use cpu::CpuModel;
pub use functions::{FunctionInfo, FunctionState, Functions};
pub use message::{
    ApiError, Balloon, ErrorKind, Event, ExitReason, HotplugMemory, Info, MAX_ORDER, MAX_WRITE_SET, Mark, MetricSample,
    Packet, Reply, Request, StopReason, VmState, Written,
};
pub use servers::{FreezeConfig, LinkConfig};

/// The version of this contract. A VMM and its driver are of the same build; anything else is refused.
pub const VERSION: u32 = 1;
