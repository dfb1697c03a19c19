//! What a device wants of a container's configuration (CDI 1.1.0, OCI Edits). Plain data.

use serde::{Deserialize, Serialize};

/// Changes of a container's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device files of the host's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Network interfaces of the host's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// Programs of the host's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Directories and files of the host's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Shares of the host's caches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    /// Groups of the container's process.
    #[serde(default, skip_serializing_if = "Vec::is_empty", alias = "additionalGIDs")]
    pub additional_gids: Vec<u32>,
}

/// A device file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Where the container has it.
    pub path: String,
    /// Where the host has it; there too when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `b`, `c`, `u` or `p`.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub node_type: Option<String>,
    /// Its major number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// Its minor number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Permissions of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Permissions of the cgroup, of `r`, `w` and `m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Its owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

impl DeviceNode {
    /// Where the host has it.
    pub fn on_host(&self) -> &str {
        self.host_path.as_deref().unwrap_or(&self.path)
    }
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetDevice {
    /// Its name on the host.
    pub host_interface_name: String,
    /// Its name in the container.
    pub name: String,
}

/// A program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// When it is run, such as `createContainer`.
    pub hook_name: String,
    /// Its file.
    pub path: String,
    /// Its arguments, with its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Where the host has it.
    pub host_path: String,
    /// Where the container has it.
    pub container_path: String,
    /// Of which file system.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub mount_type: Option<String>,
    /// Its options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// Settings of resctrl.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IntelRdt {
    /// The class of service.
    #[serde(default, rename = "closID", skip_serializing_if = "Option::is_none")]
    pub clos_id: Option<String>,
    /// The cache's share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l3_cache_schema: Option<String>,
    /// The share of memory's bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_bw_schema: Option<String>,
    /// Lines of a schema.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schemata: Vec<String>,
    /// Bandwidth is counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub enable_monitoring: bool,
    /// As versions before 1.1.0 had it.
    #[serde(default, rename = "enableCMT", skip_serializing_if = "std::ops::Not::not")]
    pub enable_cmt: bool,
    /// As versions before 1.1.0 had it.
    #[serde(default, rename = "enableMBM", skip_serializing_if = "std::ops::Not::not")]
    pub enable_mbm: bool,
}

impl ContainerEdits {
    /// Nothing is to be changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// These, and then others.
    #[must_use]
    pub fn and(&self, others: &Self) -> Self {
        fn both<T: Clone>(first: &[T], then: &[T]) -> Vec<T> {
            [first, then].concat()
        }
        Self {
            env: both(&self.env, &others.env),
            device_nodes: both(&self.device_nodes, &others.device_nodes),
            net_devices: both(&self.net_devices, &others.net_devices),
            hooks: both(&self.hooks, &others.hooks),
            mounts: both(&self.mounts, &others.mounts),
            intel_rdt: others.intel_rdt.clone().or_else(|| self.intel_rdt.clone()),
            additional_gids: both(&self.additional_gids, &others.additional_gids),
        }
    }

    /// The oldest version of the specification that has all of this, and why.
    pub(crate) fn needs(&self) -> Option<([u32; 3], &'static str)> {
        let rdt = self.intel_rdt.as_ref();
        if rdt.is_some_and(|rdt| !rdt.schemata.is_empty() || rdt.enable_monitoring) {
            return Some(([1, 1, 0], "intelRdt.schemata and enableMonitoring"));
        }
        if !self.net_devices.is_empty() {
            return Some(([1, 1, 0], "netDevices"));
        }
        if rdt.is_some() {
            return Some(([0, 7, 0], "intelRdt"));
        }
        if !self.additional_gids.is_empty() {
            return Some(([0, 7, 0], "additionalGids"));
        }
        if self.device_nodes.iter().any(|node| node.host_path.is_some()) {
            return Some(([0, 5, 0], "hostPath of a device node"));
        }
        let has_type = self.mounts.iter().any(|mount| mount.mount_type.is_some());
        has_type.then_some(([0, 4, 0], "type of a mount"))
    }
}
