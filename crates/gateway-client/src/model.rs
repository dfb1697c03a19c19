//! The API's data as it travels: names are those of the E2B API. What this client does not need is not read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A moment as RFC 3339 writes it, in nanoseconds since 1970; 0 if it is none, or before.
#[must_use]
pub fn nanoseconds(text: &str) -> u64 {
    let parsed = OffsetDateTime::parse(text, &Rfc3339).ok();
    parsed
        .and_then(|time| u64::try_from(time.unix_timestamp_nanos()).ok())
        .unwrap_or(0)
}

/// A sandbox that is asked for.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    /// A template's name or id, or a snapshot's.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Seconds that it may run.
    pub timeout: u64,
    /// It is paused when its time is over, and not killed.
    pub auto_pause: bool,
    /// What its user finds it by.
    pub metadata: BTreeMap<String, String>,
    /// Environment variables of its processes.
    pub env_vars: BTreeMap<String, String>,
    /// What it may reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkRules>,
    /// Volumes that it has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
}

/// A volume that a sandbox has.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct VolumeMount {
    /// The volume's name.
    pub name: String,
    /// Where the sandbox has it.
    pub path: String,
}

/// What a sandbox may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkRules {
    /// Although it is denied.
    pub allow_out: Vec<String>,
    /// Not these.
    pub deny_out: Vec<String>,
}

/// Where a sandbox stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It runs.
    Running,
    /// Its memory is on a disk.
    Paused,
}

/// A sandbox.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// What it was made of.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// By which name that was asked for.
    #[serde(default)]
    pub alias: Option<String>,
    /// When it was made (RFC 3339).
    pub started_at: String,
    /// When its time is over (RFC 3339).
    pub end_at: String,
    /// Virtual CPUs.
    pub cpu_count: u64,
    /// MiB of memory.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// MiB of its disk.
    #[serde(rename = "diskSizeMB", default)]
    pub disk_size_mb: Option<u64>,
    /// What its user finds it by.
    #[serde(default)]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Where it stands.
    pub state: State,
    /// Volumes that it has.
    #[serde(default)]
    pub volume_mounts: Option<Vec<VolumeMount>>,
    /// What it may reach, where one sandbox was asked for.
    #[serde(default)]
    pub network: Option<NetworkRules>,
}

/// A snapshot.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Snapshot {
    /// Its id.
    #[serde(rename(deserialize = "snapshotID", serialize = "id"))]
    pub id: String,
    /// What it is called.
    #[serde(default)]
    pub names: Vec<String>,
}

/// A template.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Its id.
    #[serde(rename = "templateID")]
    pub id: String,
    /// What it is called.
    #[serde(default)]
    pub names: Vec<String>,
    /// The same, as older servers tell it.
    #[serde(default)]
    pub aliases: Option<Vec<String>>,
    /// Virtual CPUs.
    pub cpu_count: u64,
    /// MiB of memory.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// MiB of the disk.
    #[serde(rename = "diskSizeMB", default)]
    pub disk_size_mb: Option<u64>,
    /// When it was built (RFC 3339).
    pub created_at: String,
    /// How far its newest build is.
    #[serde(default)]
    pub build_status: Option<String>,
    /// All who ask this server can use it.
    #[serde(default)]
    pub public: bool,
}

/// A volume.
#[derive(Clone, Debug, Deserialize)]
pub struct Volume {
    /// Its id.
    #[serde(rename = "volumeID")]
    pub id: String,
    /// Its name.
    pub name: String,
}

/// What a sandbox uses.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metric {
    /// When that was, in seconds since 1970.
    #[serde(default)]
    pub timestamp_unix: u64,
    /// Virtual CPUs.
    pub cpu_count: u64,
    /// Per cent of all of them.
    pub cpu_used_pct: f64,
    /// Bytes.
    pub mem_used: u64,
    /// Bytes.
    pub mem_total: u64,
    /// Bytes.
    pub disk_used: u64,
    /// Bytes.
    pub disk_total: u64,
}

/// A line of a log.
#[derive(Clone, Debug, Deserialize)]
pub struct LogEntry {
    /// When it was written (RFC 3339).
    pub timestamp: String,
    /// The line.
    pub message: String,
    /// What is known of it.
    #[serde(default)]
    pub fields: BTreeMap<String, String>,
}
