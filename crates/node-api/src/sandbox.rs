//! What a daemon knows of a sandbox, and what it keeps of it in its database.

use agent_api::ExitStatus;
use base::CpuSet;
use serde::{Deserialize, Serialize};

use crate::config::SandboxConfig;
use crate::memory_size::MemoryState;
use crate::volume::Mounted;

/// Where a sandbox stands.
///
/// ```text
///  Creating ──▶ Starting ──▶ Running ◀──▶ Paused
///     │            ▲  │          │           │
///     │     restart│  │failed    ▼           │
///     │            │  │       Stopping ◀─────┘
///     │            │  ▼          │
///     │           Exited ◀───────┘     (or by itself, from Running)
///     └──────────────┴──▶ Removing ──▶ gone
///
///  Running ──▶ (stands still) ──▶ Suspended ──▶ Starting
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its name is taken; its directory is being made, and the disk of one that boots.
    Creating,
    /// Its VM boots, or is restored; a clone's disk is being made.
    Starting,
    /// Its agent answers.
    Running,
    /// Its vCPUs and devices are stopped and can go on.
    Paused,
    /// It is being stopped.
    Stopping,
    /// Its VM is gone, and what was in its memory is on the disk: another goes on from there.
    Suspended,
    /// Its VM is gone; its disk and log are there.
    Exited,
    /// It is being removed.
    Removing,
}

impl State {
    /// Each of them.
    pub const ALL: [Self; 8] = [
        Self::Creating,
        Self::Starting,
        Self::Running,
        Self::Paused,
        Self::Stopping,
        Self::Suspended,
        Self::Exited,
        Self::Removing,
    ];

    /// A VM belongs to it.
    pub fn has_vm(self) -> bool {
        matches!(self, Self::Starting | Self::Running | Self::Paused | Self::Stopping)
    }

    /// It has no VM, and is not about to get one.
    pub fn is_off(self) -> bool {
        matches!(self, Self::Suspended | Self::Exited)
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Creating => "creating",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopping => "stopping",
            Self::Suspended => "suspended",
            Self::Exited => "exited",
            Self::Removing => "removing",
        })
    }
}

impl std::str::FromStr for State {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|state| state.to_string() == text);
        found.ok_or_else(|| {
            let all = Self::ALL.map(|state| state.to_string()).join(", ");
            format!("`{text}` is no state; there are {all}")
        })
    }
}

/// Why a sandbox is paused that nobody has paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PauseReason {
    /// The host has no space left for what it writes to its disk. It goes on by itself when there is some.
    NoSpace,
}

impl std::fmt::Display for PauseReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NoSpace => "no space",
        })
    }
}

/// How a sandbox came to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// Its command ended.
    Command(ExitStatus),
    /// It was stopped before its command had ended.
    Stopped,
    /// Its VM or VMM failed, or the host was shut down; a sentence says what is known.
    Failed(String),
}

impl Ended {
    /// The exit code: the command's own, 137 (killed) for one that was stopped, 125 for a failure.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Command(status) => status.exit_code(),
            Self::Stopped => 137,
            Self::Failed(_) => 125,
        }
    }
}

/// A sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// 12 hexadecimal digits.
    pub id: String,
    /// Unique on its node.
    pub name: String,
    /// Where it stands.
    pub state: State,
    /// Why it is paused, if nobody has asked for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_reason: Option<PauseReason>,
    /// What it was asked to be.
    pub config: SandboxConfig,
    /// The image's digest, 64 hexadecimal digits.
    pub digest: String,
    /// When it was made: nanoseconds since 1970.
    pub created_ns: u64,
    /// When its VM was last started.
    pub started_ns: Option<u64>,
    /// When its time is over, if it has a limit and runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_ns: Option<u64>,
    /// When that ended.
    pub ended_ns: Option<u64>,
    /// How that ended.
    pub ended: Option<Ended>,
    /// The VMM's process.
    pub vmm: Option<Process>,
    /// The process that serves its accelerator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<Process>,
    /// That one has ended, and its machine runs on without an accelerator: why, as far as that is known, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator_ended: Option<String>,
    /// Its volumes, as they were when its VM was last started.
    #[serde(default)]
    pub volumes: Vec<Mounted>,
    /// How often it was started again.
    pub restarts: u32,
    /// The name that the snapshot had which it is a clone of.
    #[serde(default)]
    pub clone_of: Option<String>,
    /// The id of the template that its machine was cloned of; `None` if it has booted a kernel since.
    #[serde(default)]
    pub template: Option<String>,
    /// What its guest has tried and none may that owns its CPUs; `None` for other classes, and where it does not run. Found out when
    /// somebody asks for it, and part of no record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<u64>,
    /// The host's CPUs that are its own now. Found out as `refused` is.
    #[serde(default, skip_serializing_if = "CpuSet::is_empty")]
    pub owned_cpus: CpuSet,
    /// How much of its memory, and which of its devices, it has now, of one whose memory is plugged or which has devices. Found out as
    /// `refused` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_state: Option<MemoryState>,
}

impl Sandbox {
    /// Only a sandbox that is paused has a reason to be.
    pub fn settle_pause(&mut self) {
        if self.state != State::Paused {
            self.pause_reason = None;
        }
    }

    /// What its machine is called.
    pub fn host_name(&self) -> &str {
        self.config.hostname.as_deref().unwrap_or(&self.id)
    }
}

/// A process, told from a later one of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// When it was started, in clock ticks since the host's boot (`/proc/PID/stat`, field 22).
    pub start: u64,
}
