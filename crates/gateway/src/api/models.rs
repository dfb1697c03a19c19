//! The API's data as it travels, and nothing of the node's: fields and names are those of the E2B API. What a client may leave out is an
//! `Option` or has a default; fields that are not known are passed over. Knows no node and no handler.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::error::ErrorBody;

/// A sandbox that is asked for.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NewSandbox {
    /// A template's name or id, or a snapshot's, with a tag after a colon if there is one.
    #[serde(rename = "templateID")]
    pub(crate) template_id: String,
    /// Seconds that it may run; 15 by POST /sandboxes, 300 by POST /v2/sandboxes.
    pub(crate) timeout: Option<u64>,
    /// It is paused when its time is over, and not killed.
    pub(crate) auto_pause: Option<bool>,
    /// With its memory; only `true` can be had.
    pub(crate) auto_pause_memory: Option<bool>,
    /// Traffic lets it go on when it is paused.
    pub(crate) auto_resume: Option<AutoResume>,
    /// Of no effect: what reaches processes and files always wants the token.
    #[expect(dead_code, reason = "it is named for the document")]
    pub(crate) secure: Option<bool>,
    /// False: it reaches nothing but what `network.allowOut` has, as with `network.denyOut: ["0.0.0.0/0"]`.
    #[serde(rename = "allow_internet_access")]
    pub(crate) allow_internet_access: Option<bool>,
    /// Rules of its network.
    pub(crate) network: Option<Network>,
    /// What its user finds it by.
    pub(crate) metadata: Option<BTreeMap<String, String>>,
    /// Environment variables of its processes.
    pub(crate) env_vars: Option<BTreeMap<String, String>>,
    /// Refused.
    #[schema(value_type = Option<Object>)]
    pub(crate) mcp: Option<Value>,
    /// Refused.
    #[schema(value_type = Option<Object>)]
    pub(crate) iam: Option<Value>,
    /// Volumes that it has.
    pub(crate) volume_mounts: Option<Vec<SandboxVolumeMount>>,
}

/// A volume that a sandbox has.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub(crate) struct SandboxVolumeMount {
    /// The volume's name.
    pub(crate) name: String,
    /// Where the sandbox has it: an absolute path, which is made if it is missing.
    pub(crate) path: String,
}

/// Whether traffic lets a paused sandbox go on.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct AutoResume {
    /// It does.
    #[serde(default)]
    pub(crate) enabled: bool,
}

/// Rules of a sandbox's network.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Network {
    /// False: requests to its ports have to show its traffic token.
    pub(crate) allow_public_traffic: Option<bool>,
    /// Addresses and ranges of them that it may reach although they are denied; names of hosts are refused.
    pub(crate) allow_out: Option<Vec<String>>,
    /// Addresses and ranges of them that it may not reach; `0.0.0.0/0` is everything, IPv6 too.
    pub(crate) deny_out: Option<Vec<String>>,
    /// Refused unless it is empty.
    pub(crate) dns_servers: Option<Vec<String>>,
    /// Refused.
    #[schema(value_type = Option<Object>)]
    pub(crate) egress_proxy: Option<Value>,
    /// Refused.
    pub(crate) mask_request_host: Option<String>,
    /// Refused unless it is empty.
    pub(crate) https_ports: Option<Vec<u16>>,
    /// Refused unless it is empty.
    #[schema(value_type = Option<Object>)]
    pub(crate) rules: Option<Value>,
}

/// What a sandbox may reach from now on, in place of what it could.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NetworkUpdate {
    /// As of a new sandbox.
    pub(crate) allow_out: Option<Vec<String>>,
    /// As of a new sandbox.
    pub(crate) deny_out: Option<Vec<String>>,
    /// Refused unless it is empty.
    pub(crate) dns_servers: Option<Vec<String>>,
    /// Refused.
    #[schema(value_type = Option<Object>)]
    pub(crate) egress_proxy: Option<Value>,
    /// Refused unless it is empty.
    #[schema(value_type = Option<Object>)]
    pub(crate) rules: Option<Value>,
    /// As of a new sandbox.
    #[serde(rename = "allow_internet_access")]
    pub(crate) allow_internet_access: Option<bool>,
}

/// A sandbox that was made, or connected to.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Sandbox {
    /// What it was made of.
    #[serde(rename = "templateID")]
    pub(crate) template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub(crate) sandbox_id: String,
    /// The same for all; clients of before want it.
    #[serde(rename = "clientID")]
    pub(crate) client_id: &'static str,
    /// The version of envd whose features it has.
    pub(crate) envd_version: String,
    /// By which name it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) alias: Option<String>,
    /// To be sent as X-Access-Token to port 49983.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) envd_access_token: Option<String>,
    /// To be sent as E2B-Traffic-Access-Token to its other ports, where these are not public.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) traffic_access_token: Option<String>,
    /// Its ports are at `<port>-<id>.<domain>`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) domain: Option<String>,
}

/// Where a sandbox stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// It runs.
    Running,
    /// It is suspended, with its memory on the disk, or stands still.
    Paused,
}

/// A sandbox in a list.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListedSandbox {
    /// What it was made of.
    #[serde(rename = "templateID")]
    pub(crate) template_id: String,
    /// By which name it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) alias: Option<String>,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub(crate) sandbox_id: String,
    /// The same for all.
    #[serde(rename = "clientID")]
    pub(crate) client_id: &'static str,
    /// When it was made.
    #[schema(format = DateTime)]
    pub(crate) started_at: String,
    /// When its time is over; of one that is paused, when it was; in 2554 if it has no end.
    #[schema(format = DateTime)]
    pub(crate) end_at: String,
    /// Virtual CPUs.
    pub(crate) cpu_count: u32,
    /// MiB of memory.
    #[serde(rename = "memoryMB")]
    pub(crate) memory_mb: u64,
    /// MiB of its disk.
    #[serde(rename = "diskSizeMB")]
    pub(crate) disk_size_mb: u64,
    /// What its user finds it by.
    pub(crate) metadata: BTreeMap<String, String>,
    /// Where it stands.
    pub(crate) state: State,
    /// The version of envd whose features it has.
    pub(crate) envd_version: String,
    /// Volumes that it has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) volume_mounts: Vec<SandboxVolumeMount>,
}

/// Everything that is told of a sandbox.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxDetail {
    /// What a list has.
    #[serde(flatten)]
    pub(crate) listed: ListedSandbox,
    /// To be sent as X-Access-Token to port 49983.
    pub(crate) envd_access_token: String,
    /// Whether its user asked for the internet, or for none; `null` where nothing was said.
    pub(crate) allow_internet_access: Option<bool>,
    /// Its ports are at `<port>-<id>.<domain>`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) domain: Option<String>,
    /// Rules of its network.
    pub(crate) network: NetworkDetail,
    /// What is done when its time is over.
    pub(crate) lifecycle: Lifecycle,
    /// What its pause has saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pause_mode: Option<&'static str>,
}

/// Rules of a sandbox's network, as they are.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NetworkDetail {
    /// Requests to its ports need no token.
    pub(crate) allow_public_traffic: bool,
    /// What it may reach although it is denied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) allow_out: Option<Vec<String>>,
    /// What it may not reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) deny_out: Option<Vec<String>>,
}

/// What is done with a sandbox.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Lifecycle {
    /// Traffic lets it go on when it is paused.
    pub(crate) auto_resume: bool,
    /// When its time is over: `kill` or `pause`.
    pub(crate) on_timeout: &'static str,
}

/// How long a sandbox is to run from now on.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Timeout {
    /// Seconds.
    pub(crate) timeout: u64,
}

/// For how long a sandbox is kept, at least.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct Refresh {
    /// Seconds; 15 when not given.
    pub(crate) duration: Option<u64>,
}

/// A sandbox is to pause.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Pause {
    /// With its memory; only `true` can be had.
    pub(crate) memory: Option<bool>,
    /// Of no effect: a sandbox whose agent does not answer is never paused.
    pub(crate) require_healthy_guest: Option<bool>,
}

/// A paused sandbox is to go on.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Resume {
    /// Seconds that it may run from now on; 15 when not given.
    pub(crate) timeout: Option<u64>,
    /// It is paused when its time is over, and not killed.
    pub(crate) auto_pause: Option<bool>,
    /// With its memory; only `true` can be had.
    pub(crate) memory: Option<bool>,
}

/// A sandbox is to run, whether it is paused or not.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct Connect {
    /// Seconds that it is to run from now on, at least; 300 when not given.
    pub(crate) timeout: Option<u64>,
    /// With its memory, if it is paused; only `true` can be had.
    pub(crate) memory: Option<bool>,
}

/// Copies of a sandbox that go on from where it is.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct Fork {
    /// Seconds that they may run; 15 when not given.
    pub(crate) timeout: Option<u64>,
    /// How many, 1 to 100; 1 when not given.
    pub(crate) count: Option<u64>,
}

/// What has become of one of a fork's copies: one of the two.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Forked {
    /// It runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sandbox: Option<Sandbox>,
    /// It could not be made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<ErrorBody>,
}

/// A snapshot that is asked for.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default)]
pub(crate) struct NewSnapshot {
    /// What it is to be called.
    pub(crate) name: Option<String>,
    /// With its memory; only `true` can be had.
    pub(crate) memory: Option<bool>,
}

/// A snapshot.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct SnapshotInfo {
    /// Its id, which is good as a `templateID`.
    #[serde(rename = "snapshotID")]
    pub(crate) snapshot_id: String,
    /// What it is called.
    pub(crate) names: Vec<String>,
}

/// What is asked for of a list of sandboxes.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, rename_all = "camelCase")]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Only those with this metadata: `key=value&...`, escaped twice.
    pub(crate) metadata: Option<String>,
    /// Only those in these states: `running,paused`.
    pub(crate) state: Option<String>,
    /// `asc` or `desc` (default) by when they were made.
    pub(crate) order: Option<String>,
    /// Only those that were made at this moment or later.
    pub(crate) started_after: Option<String>,
    /// Only those of this template.
    pub(crate) template: Option<String>,
    /// The header `x-next-token` of the page before.
    pub(crate) next_token: Option<String>,
    /// How many, 1 to 100; 100 when not given.
    pub(crate) limit: Option<usize>,
}

/// What is asked for of a list of snapshots.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, rename_all = "camelCase")]
#[into_params(parameter_in = Query)]
pub(crate) struct SnapshotQuery {
    /// Only those of this sandbox.
    #[serde(rename = "sandboxID")]
    pub(crate) sandbox_id: Option<String>,
    /// Only those that are called so.
    pub(crate) name: Option<String>,
    /// The header `x-next-token` of the page before.
    pub(crate) next_token: Option<String>,
    /// How many, 1 to 100; 100 when not given.
    pub(crate) limit: Option<usize>,
}

/// A page of a list.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, rename_all = "camelCase")]
#[into_params(parameter_in = Query)]
pub(crate) struct PageQuery {
    /// The header `x-next-token` of the page before.
    pub(crate) next_token: Option<String>,
    /// How many, 1 to 100; 100 when not given.
    pub(crate) limit: Option<usize>,
}
