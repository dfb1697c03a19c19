//! Snapshots: what a daemon tells of one, and what a clone of it is asked to be.

use std::collections::BTreeMap;
use std::fmt;

use base::Egress;
use observe::redact::Variables;
use serde::{Deserialize, Serialize};

use crate::class::Class;
use crate::config::{ConfigError, SandboxConfig, check_hostname, check_name};
use crate::paging::Paging;
use crate::time_limit::TimeLimit;
use crate::volume::VolumeMount;

/// A sandbox as it was at one moment: the state of its machine, its memory and its disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Unique on its node; what is right for a sandbox's name is right for this one.
    pub name: String,
    /// When it was taken: nanoseconds since 1970.
    pub created_ns: u64,
    /// The id of the sandbox that it is of.
    pub sandbox: String,
    /// Its name.
    pub sandbox_name: String,
    /// What that was asked to be.
    pub config: SandboxConfig,
    /// The image's digest, 64 hexadecimal digits.
    pub digest: String,
    /// What the machine was made with.
    pub programs: Programs,
    /// Bytes that it takes on the host.
    #[serde(default)]
    pub bytes: u64,
    /// What is damaged of it, as far as that was found out; none is cloned then. Part of no record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damaged: Option<String>,
}

/// SHA-256 of the programs that a machine was made with, 64 hexadecimal digits each; `None` where the file was replaced
/// between the machine's start and its snapshot, or cannot be read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    /// The VMM.
    pub vmm: Option<String>,
    /// The guest's kernel.
    pub kernel: Option<String>,
    /// The initramfs with the agent.
    pub initramfs: Option<String>,
}

/// A snapshot that is asked for. Of a sandbox that has devices of the host's it is refused, unless they are detached for that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotConfig {
    /// Which sandbox.
    pub sandbox: String,
    /// What the snapshot is to be called; the daemon finds a name when not given.
    pub name: Option<String>,
    /// Detach its devices for that, and attach them again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detach_devices: bool,
}

/// A sandbox that is to go on from a snapshot of it; the same is true of its devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RollbackConfig {
    /// Which sandbox.
    pub sandbox: String,
    /// The snapshot's name.
    pub snapshot: String,
    /// Detach its devices for that, and attach them again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detach_devices: bool,
}

/// A sandbox that is to go on as another class; the same is true of its devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveConfig {
    /// Which sandbox.
    pub sandbox: String,
    /// What it is from then on.
    pub class: Class,
    /// Detach its devices for that, and attach them again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detach_devices: bool,
}

/// A clone that is asked for. Everything else is as it was in the snapshot.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneConfig {
    /// The snapshot.
    pub snapshot: String,
    /// Its name; the daemon finds one when not given.
    pub name: Option<String>,
    /// The guest's host name; its own short id when not given.
    pub hostname: Option<String>,
    /// Ports of the host that lead into it. It has none of those that the snapshot's sandbox had.
    #[serde(default)]
    pub ports: Vec<String>,
    /// Where it may send by its network, in place of where the snapshot's sandbox might.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// How its memory comes from the snapshot's files.
    #[serde(default)]
    pub paging: Paging,
    /// Remove it when it has ended.
    #[serde(default)]
    pub remove: bool,
    /// Over those of the snapshot's sandbox.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// It has these labels alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_labels: bool,
    /// `NAME=value`, over those of the snapshot's sandbox, for commands that are executed in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// In place of the directory of the snapshot's sandbox, for commands that are executed in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// In place of the user of the snapshot's sandbox, for commands that are executed in it: `name|uid[:group|gid]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// How long it may run, in place of the snapshot's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<TimeLimit>,
    /// Volumes that it has, where the snapshot's sandbox had none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeMount>,
}

/// Without the values of its variables.
impl fmt::Debug for CloneConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            snapshot,
            name,
            hostname,
            ports,
            egress,
            paging,
            remove,
            labels,
            only_labels,
            env,
            workdir,
            user,
            time_limit,
            volumes,
        } = self;
        f.debug_struct("CloneConfig")
            .field("snapshot", snapshot)
            .field("name", name)
            .field("hostname", hostname)
            .field("ports", ports)
            .field("egress", egress)
            .field("paging", paging)
            .field("remove", remove)
            .field("labels", labels)
            .field("only_labels", only_labels)
            .field("env", &Variables(env))
            .field("workdir", workdir)
            .field("user", user)
            .field("time_limit", time_limit)
            .field("volumes", volumes)
            .finish()
    }
}

impl CloneConfig {
    /// Checks everything that can be told from the data alone.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_snapshot_name(&self.snapshot)?;
        self.name.as_deref().map_or(Ok(()), check_name)?;
        self.hostname.as_deref().map_or(Ok(()), check_hostname)
    }
}

/// Checks a snapshot's name.
///
/// # Errors
/// [`ConfigError::Snapshot`].
pub fn check_snapshot_name(name: &str) -> Result<(), ConfigError> {
    check_name(name).map_err(|_| ConfigError::Snapshot(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_knows_no_devices_asks_as_before() {
        let asked = crate::Request::Rollback(RollbackConfig {
            sandbox: "web".into(),
            snapshot: "ready".into(),
            detach_devices: false,
        });
        let text = serde_json::to_string(&asked).unwrap();
        assert_eq!(
            text,
            r#"{"method":"rollback","params":{"sandbox":"web","snapshot":"ready"}}"#
        );
        assert_eq!(serde_json::from_str::<crate::Request>(&text).unwrap(), asked);
        let text = r#"{"method":"move","params":{"sandbox":"web","class":"bare","detach_devices":true}}"#;
        let crate::Request::Move(asked) = serde_json::from_str(text).unwrap() else {
            panic!()
        };
        assert!(asked.detach_devices && asked.class == Class::Bare);
    }

    #[test]
    fn what_is_wrong_with_a_clone_is_named() {
        let good = CloneConfig {
            snapshot: "web-1".into(),
            name: Some("twin".into()),
            hostname: Some("twin.example".into()),
            ..CloneConfig::default()
        };
        assert_eq!(good.validate(), Ok(()));
        let text = serde_json::to_string(&good).unwrap();
        assert_eq!(serde_json::from_str::<CloneConfig>(&text).unwrap(), good);
        let broken = |change: fn(&mut CloneConfig)| {
            let mut config = good.clone();
            change(&mut config);
            config.validate().unwrap_err()
        };
        assert_eq!(
            broken(|c| c.snapshot = "../x".into()),
            ConfigError::Snapshot("../x".into())
        );
        assert_eq!(broken(|c| c.name = Some(".x".into())), ConfigError::Name(".x".into()));
        assert_eq!(
            broken(|c| c.hostname = Some("a_b".into())),
            ConfigError::Hostname("a_b".into())
        );
    }
}
