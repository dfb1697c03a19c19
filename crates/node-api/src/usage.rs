//! What sandboxes use: at length, as their VMMs tell it, and in short, as the host counts it. Plain data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::accelerator_stats::AcceleratorStats;
use crate::memory_size::MemoryState;

/// What went in and out of a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes in.
    pub bytes_in: u64,
    /// Bytes out.
    pub bytes_out: u64,
    /// Disk requests or packets in.
    pub operations_in: u64,
    /// Disk requests or packets out.
    pub operations_out: u64,
}

/// What a sandbox uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time, in microseconds.
    pub cpu_usec: u64,
    /// For how long its processor limit has held it back, in microseconds.
    #[serde(default)]
    pub cpu_throttled_usec: u64,
    /// Memory of the VMM with the guest's, in bytes: what is charged to its cgroup, and what came zeroed ([`MemoryState::zeroed`]).
    pub memory: u64,
    /// The most that the VMM with the guest may have; `None` where nothing limits it.
    #[serde(default)]
    pub memory_limit: Option<u64>,
    /// Bytes that its disk and logs take on the host.
    pub disk: u64,
    /// Processes and threads on the host.
    pub pids: u64,
    /// What it has read from its disks (in) and written to them (out).
    #[serde(default)]
    pub block: Traffic,
    /// What came by its network (in) and was sent by it (out).
    #[serde(default)]
    pub network: Traffic,
    /// Metrics of the VMM, by name and labels.
    pub vmm: BTreeMap<String, u64>,
    /// How much of its memory, and which of its devices, it has, where memory is plugged or it has devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_state: Option<Box<MemoryState>>,
    /// What the server of its accelerator tells, if it has one and that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<Box<AcceleratorStats>>,
    /// The VMM had no time to tell its metrics, as while it writes a snapshot: `block`, `network` and `vmm` are not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vmm_busy: bool,
}

/// One sandbox's usage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// What it uses.
    pub usage: Usage,
}

/// What a sandbox uses, in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BriefUsage {
    /// Its id.
    pub id: String,
    /// `None` of one that has no VM, or whose use could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Used>,
}

/// What a machine uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// When it was last started: nanoseconds since 1970. CPU time is counted from then on.
    pub started_ns: u64,
    /// As in [`Usage`].
    pub cpu_usec: u64,
    /// As in [`Usage`].
    pub memory: u64,
    /// As in [`Usage`].
    pub disk: u64,
}
