//! What a sandbox is asked to be.

use std::collections::BTreeMap;

use base::{ByteSize, CdiName, Egress, PciAddress};
use cpu::CpuModel;
use observe::redact;
use serde::{Deserialize, Serialize};

use crate::accelerator::{Accelerator, AcceleratorError};
use crate::class::{Class, Idle};
use crate::device_start::DeviceStart;
use crate::limits::{Limits, Rate};
use crate::memory_mode::MemoryMode;
use crate::memory_size::{HOTPLUG_ADDRESSES, MemoryError};
use crate::paging::Paging;
use crate::process::ProcessConfig;
use crate::time_limit::{self, TimeLimit};
use crate::tmpfs::{self, Tmpfs, TmpfsError};
use crate::volume::{self, VolumeError, VolumeMount};

/// The longest name of a sandbox, and of a host (`__NEW_UTS_LEN` of Linux).
pub const MAX_NAME: usize = 64;

/// The least writable layer on a disk: below it there is no room for a file system.
pub const MIN_DISK: ByteSize = ByteSize::mib(16);

/// How large it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resources {
    /// Number of vCPUs.
    pub cpus: u32,
    /// Guest memory, whole pages.
    pub memory: ByteSize,
    /// What of it is there when its machine boots; the rest is plugged then. All when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_memory: Option<ByteSize>,
    /// The most that it can be given while it runs; `memory` when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory: Option<ByteSize>,
    /// The most that its machine may have still: more than `memory` while its guest gives back. The daemon keeps it; nobody has where it is
    /// not given, and it may be all that the machine can have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_memory: Option<ByteSize>,
    /// What of `memory` its guest does without until that is mapped for its devices (`async-balloon`). The daemon chooses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inflated: Option<ByteSize>,
    /// The writable layer's disk; `None` keeps that layer in the guest's memory.
    pub disk: Option<ByteSize>,
    /// Which processor its guest is shown; the daemon fills its own default in.
    #[serde(default)]
    pub cpu_model: Option<CpuModel>,
    /// How its machine has the host's processors.
    #[serde(default, skip_serializing_if = "Class::is_standard")]
    pub class: Class,
    /// What its vCPUs do that have nothing to do.
    #[serde(default, skip_serializing_if = "Idle::halts")]
    pub idle: Idle,
    /// Where its guest sees its memory.
    #[serde(default, skip_serializing_if = "MemoryMode::is_translated")]
    pub memory_mode: MemoryMode,
    /// Its guest reports what is free of its memory, which is the host's then; not while devices reach it, nor with the class bare.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub free_page_reporting: bool,
    /// Its guest has an IOMMU, behind which devices come: they reach what it maps for them. It has all of its memory from its boot on, and not
    /// the class bare. With [`DeviceStart::Lazy`] the daemon fills it in.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guest_iommu: bool,
}

impl Resources {
    /// Whether such a machine can go on from no template: it has another engine, its kernel was told otherwise, or it has more memory to plug
    /// than others have addresses for.
    pub fn boots(&self) -> bool {
        self.class.is_bare() || !self.idle.halts() || self.region().is_some_and(|region| region > HOTPLUG_ADDRESSES)
    }

    /// What a machine's guest can tell of it before it plugs anything: not whether it shares the host's processors, nor how much it can plug.
    #[must_use]
    pub fn of_machine(&self) -> Self {
        let class = match self.class {
            Class::Dedicated => Class::Standard,
            other => other,
        };
        Self {
            class,
            ..self.with_nothing_plugged()
        }
    }
}

/// How it reaches the world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// As the node can: its network, or none where it has none.
    #[default]
    Auto,
    /// The node's network, or an error.
    Node,
    /// Not at all.
    None,
}

/// A sandbox that is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SandboxConfig {
    /// Its name; the daemon finds one when not given.
    pub name: Option<String>,
    /// A name, or a digest or its beginning.
    pub image: String,
    /// What runs in it.
    pub process: ProcessConfig,
    /// How large it is.
    pub resources: Resources,
    /// What it may use besides.
    #[serde(default)]
    pub limits: Limits,
    /// File systems in its memory.
    #[serde(default)]
    pub tmpfs: Vec<Tmpfs>,
    /// How it reaches the world.
    #[serde(default)]
    pub network: NetworkMode,
    /// Where it may send by its network, if it has one. What no sandbox reaches it does not reach either, whatever is allowed here.
    #[serde(default, skip_serializing_if = "Egress::is_empty")]
    pub egress: Egress,
    /// Ports of the host that lead into it: `[IP:]HOST:GUEST[/tcp|udp]`.
    #[serde(default)]
    pub ports: Vec<String>,
    /// Directories of the host and named volumes that it has.
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
    /// Devices of the host that it gets each time that it is started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<PciAddress>,
    /// And those that these names of the Container Device Interface stand for when it is made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cdi_devices: Vec<CdiName>,
    /// When it gets them; as [`DeviceStart::default`] says when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_start: Option<DeviceStart>,
    /// The accelerator that its programs have by forwarded calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<Accelerator>,
    /// Its command is not started before all of its memory, and all of its devices, are there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory_ready: bool,
    /// The guest's host name; its own short id when not given.
    pub hostname: Option<String>,
    /// Its machine boots a kernel, whether there is a template of it or not, and none is made of it.
    #[serde(default)]
    pub boot: bool,
    /// Its machine goes on from this template: a name, or an id or its beginning. Image, size and network are the template's.
    #[serde(default)]
    pub template: Option<String>,
    /// How its memory comes from a snapshot's files, whenever its machine is restored.
    #[serde(default)]
    pub paging: Paging,
    /// How long it may run each time that it is started or resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<TimeLimit>,
    /// Remove it when it has ended.
    pub remove: bool,
    /// It lives by itself. Otherwise it lives as long as the connection that asked for it, which gets the stream on which
    /// its command is to be started.
    pub detach: bool,
    /// Whatever its owner wants to find it by.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The tenant whose it is, if it is one's; the daemon fills in who asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

/// Why a sandbox cannot be what it is asked to be.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not a name.
    #[error(
        "`{0}` cannot be a sandbox's name: begin with a letter or digit, then letters, digits, `_`, `.` and `-`, 64 at most"
    )]
    Name(String),
    /// Not a snapshot's name.
    #[error(
        "`{0}` cannot be a snapshot's name: begin with a letter or digit, then letters, digits, `_`, `.` and `-`, 64 at most"
    )]
    Snapshot(String),
    /// Not a template's name.
    #[error(
        "`{0}` cannot be a template's name: begin with a letter or digit, then letters, digits, `_`, `.` and `-`, 64 at most"
    )]
    Template(String),
    /// A template's name that could as well be an id.
    #[error("`{0}` cannot be a template's name, as it looks like an id: give it another letter than a to f")]
    LikeId(String),
    /// No command for `sh -c`.
    #[error("{0:?} is nothing that `sh -c` could run: write a command, without zero bytes")]
    Script(String),
    /// A machine that goes on from a template, and boots.
    #[error("a sandbox of a template boots nothing: leave --boot out, or the template")]
    OfTemplate,
    /// A machine that goes on from a template, and is to be one that none goes on as.
    #[error(
        "a sandbox of the class bare, or one that waits or polls, boots a kernel: leave --class bare and --idle out, or --template"
    )]
    ClassOfTemplate,
    /// A machine that would keep the host's CPUs from others for nothing.
    #[error("processors that are shared are not to poll: add --class dedicated or bare, or leave --idle out")]
    Polls,
    /// A machine whose guest is not shown how to wait.
    #[error(
        "only a guest that owns its CPUs can have them wait for a write: add --class bare, or leave --idle wait out"
    )]
    Waits,
    /// A machine on threads of the host, whose memory is never where the host's bus has it.
    #[error(
        "only a guest that owns its CPUs can have memory that is not translated: add --class bare, or leave --memory-mode identity out"
    )]
    Identity,
    /// A template whose memory would have to be where the host's bus has it, which it is nowhere else.
    #[error(
        "a template is memory that goes on elsewhere, and memory that is not translated stays where the host has it: build it with the memory mode translated"
    )]
    IdentityOfTemplate,
    /// Memory that cannot be divided so, or devices that cannot be there then.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Not a host name.
    #[error("`{0}` cannot be a host name: 1 to 64 letters, digits, dots and dashes")]
    Hostname(String),
    /// No room for a file system.
    #[error("a disk of {0} is too small: give at least {MIN_DISK}, or none with --disk 0")]
    Disk(ByteSize),
    /// Ports of a sandbox that has no network.
    #[error("ports cannot be published of a sandbox without a network: leave --publish or --network none out")]
    Ports,
    /// Rules of a network that it does not have.
    #[error("a sandbox without a network reaches nothing: leave what it may and may not reach, or --network none, out")]
    Egress,
    /// A volume that cannot be.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// A command of a sandbox that has none, or nobody who would end it.
    #[error(
        "a sandbox without a command has no entrypoint, command or terminal and is detached: leave them out and add --detach, or leave --no-command out"
    )]
    Idle,
    /// No time at all.
    #[error("no sandbox runs for no time: give a time limit of more than 0, or none")]
    TimeLimit,
    /// What it is to be when its time is over it cannot be.
    #[error(
        "it cannot be suspended when its time is over: run it with --detach, without devices of the host and volumes of another machine, and \
         with translated memory, or with --on-timeout stop"
    )]
    NotToSuspend,
    /// Rates of a network that it does not have.
    #[error("a sandbox without a network has no rate of it: leave the rate or --network none out")]
    NetRate,
    /// Too little or too much processor time.
    #[error("{} processors cannot be a limit: give 0.01 to 1000", millis(*.0))]
    CpuLimit(u64),
    /// Not a weight.
    #[error("a processor weight of {0} cannot be: give 1 to 10000; others have 100")]
    CpuWeight(u64),
    /// Not a number of processes.
    #[error("{0} processes cannot be a limit: give at least 1 and at most 4194304, or leave it out for no limit")]
    Pids(u64),
    /// Too slow.
    #[error(
        "{given} a second is too little for {what}: give at least {least} (bytes/operations), or leave it out for no limit"
    )]
    Rate {
        /// What would be limited.
        what: &'static str,
        /// By how much.
        given: Rate,
        /// What would do.
        least: Rate,
    },
    /// An accelerator that cannot be.
    #[error(transparent)]
    Accelerator(#[from] AcceleratorError),
    /// A tmpfs that cannot be.
    #[error(transparent)]
    Tmpfs(#[from] TmpfsError),
    /// A variable without a name, or with a zero byte.
    #[error("`{0}` is no environment variable: write NAME=value")]
    Env(String),
}

/// Thousandths, as people write them.
fn millis(count: u64) -> String {
    let text = format!("{}.{:03}", count / 1000, count % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Checks a sandbox's name.
///
/// # Errors
/// [`ConfigError::Name`].
pub fn check_name(name: &str) -> Result<(), ConfigError> {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    let rest = name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
    if first && rest && name.len() <= MAX_NAME {
        Ok(())
    } else {
        Err(ConfigError::Name(name.to_owned()))
    }
}

/// Checks a host name.
///
/// # Errors
/// [`ConfigError::Hostname`].
pub fn check_hostname(name: &str) -> Result<(), ConfigError> {
    let is_label = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'.' || byte == b'-';
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_label) {
        return Err(ConfigError::Hostname(name.to_owned()));
    }
    Ok(())
}

impl SandboxConfig {
    /// Nothing says what its command is, and it lives by itself.
    fn is_idle_alone(&self) -> bool {
        let process = &self.process;
        process.entrypoint.is_none() && process.command.is_empty() && !process.tty && self.detach
    }

    /// Checks everything that can be told from the data alone. CPUs and memory are checked against the host.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Some(name) = &self.name {
            check_name(name)?;
        }
        self.hostname.as_deref().map_or(Ok(()), check_hostname)?;
        if let Some(disk) = self.resources.disk
            && disk < MIN_DISK
        {
            return Err(ConfigError::Disk(disk));
        }
        if self.network == NetworkMode::None && !self.ports.is_empty() {
            return Err(ConfigError::Ports);
        }
        if self.network == NetworkMode::None && !self.egress.is_empty() {
            return Err(ConfigError::Egress);
        }
        volume::check(&self.volumes)?;
        if self.template.is_some() && self.boot {
            return Err(ConfigError::OfTemplate);
        }
        self.check_memory()?;
        if self.template.is_some() && self.resources.boots() {
            return Err(ConfigError::ClassOfTemplate);
        }
        if self.resources.idle == Idle::Wait && !self.resources.class.is_bare() {
            return Err(ConfigError::Waits);
        }
        if self.resources.class.is_standard() && !self.resources.idle.halts() {
            return Err(ConfigError::Polls);
        }
        if !self.resources.memory_mode.is_translated() && !self.resources.class.is_bare() {
            return Err(ConfigError::Identity);
        }
        if self.process.idle && !self.is_idle_alone() {
            return Err(ConfigError::Idle);
        }
        self.check_accelerator()?;
        time_limit::check(self)?;
        let both = |volume: &&VolumeMount| self.tmpfs.iter().any(|tmpfs| tmpfs.path == volume.target);
        if let Some(volume) = self.volumes.iter().find(both) {
            return Err(VolumeError::Twice(volume.target.clone()).into());
        }
        self.limits.validate()?;
        if self.network == NetworkMode::None && self.limits.limits_network() {
            return Err(ConfigError::NetRate);
        }
        tmpfs::validate_all(&self.tmpfs)?;
        let bad = |entry: &&String| entry.starts_with('=') || !entry.contains('=') || entry.contains('\0');
        match self.process.env.iter().find(bad) {
            // Without its value, which may be a secret.
            Some(entry) => Err(ConfigError::Env(redact::variable(entry.as_bytes()))),
            None => Ok(()),
        }
    }

    fn check_accelerator(&self) -> Result<(), AcceleratorError> {
        let Some(accelerator) = &self.accelerator else {
            return Ok(());
        };
        accelerator.validate()?;
        if !self.resources.memory_mode.is_translated() {
            return Err(AcceleratorError::Identity);
        }
        match self.template {
            Some(_) => Err(AcceleratorError::OfTemplate),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn config() -> SandboxConfig {
        SandboxConfig {
            name: Some("web-1".into()),
            image: "python".into(),
            process: ProcessConfig {
                env: vec!["A=".into(), "B=c=d".into()],
                ..ProcessConfig::default()
            },
            resources: Resources {
                cpus: 1,
                memory: ByteSize::mib(512),
                boot_memory: None,
                max_memory: None,
                held_memory: None,
                inflated: None,
                disk: Some(ByteSize::gib(10)),
                cpu_model: Some(CpuModel::V3),
                class: Class::Standard,
                idle: Idle::Halt,
                memory_mode: MemoryMode::Translated,
                free_page_reporting: false,
                guest_iommu: false,
            },
            limits: Limits {
                cpu_millis: Some(500),
                disk_write: "1M/100".parse().unwrap(),
                ..Limits::default()
            },
            tmpfs: vec!["/run:size=1M".parse().unwrap()],
            network: NetworkMode::Auto,
            egress: Egress::nothing(),
            ports: vec!["8080:80".into()],
            volumes: vec!["/srv:/data:ro".parse().unwrap(), "cache:/var/cache".parse().unwrap()],
            devices: Vec::new(),
            cdi_devices: Vec::new(),
            device_start: None,
            accelerator: None,
            time_limit: None,
            memory_ready: false,
            hostname: None,
            boot: false,
            paging: Paging::Mapped,
            template: None,
            remove: false,
            detach: true,
            labels: BTreeMap::new(),
            owner: None,
        }
    }

    #[test]
    fn a_sensible_one_passes_and_survives_json() {
        let config = config();
        assert_eq!(config.validate(), Ok(()));
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<SandboxConfig>(&text).unwrap(), config);
        // One that an earlier daemon has kept has none of the later fields.
        let mut older = serde_json::to_value(&config).unwrap();
        for later in ["limits", "tmpfs", "egress"] {
            older.as_object_mut().unwrap().remove(later).unwrap();
        }
        let resources = older.get_mut("resources").unwrap().as_object_mut().unwrap();
        assert!(
            !resources.contains_key("memory_mode"),
            "what is not asked for is not told"
        );
        let older: SandboxConfig = serde_json::from_value(older).unwrap();
        assert_eq!((older.limits, older.tmpfs), (Limits::default(), Vec::new()));
        assert!(older.egress.is_empty());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let broken = |change: fn(&mut SandboxConfig)| {
            let mut config = config();
            change(&mut config);
            config.validate().unwrap_err()
        };
        for name in ["", "-x", "a/b", "a b", ".x", "ä"] {
            assert_eq!(check_name(name), Err(ConfigError::Name(name.into())));
        }
        assert_eq!(check_name(&"x".repeat(65)), Err(ConfigError::Name("x".repeat(65))));
        assert_eq!(
            broken(|c| c.hostname = Some("a_b".into())),
            ConfigError::Hostname("a_b".into())
        );
        assert_eq!(
            broken(|c| c.resources.disk = Some(ByteSize(1))),
            ConfigError::Disk(ByteSize(1))
        );
        assert_eq!(broken(|c| c.network = NetworkMode::None), ConfigError::Ports);
        let rules_of_nothing = |c: &mut SandboxConfig| (c.network, c.ports) = (NetworkMode::None, Vec::new());
        assert_eq!(broken(rules_of_nothing), ConfigError::Egress);
        let rate_of_nothing = |c: &mut SandboxConfig| {
            (c.network, c.ports, c.egress) = (NetworkMode::None, Vec::new(), Egress::default());
            c.limits.net_receive = "1M".parse().unwrap();
        };
        assert_eq!(broken(rate_of_nothing), ConfigError::NetRate);
        assert_eq!(
            broken(|c| (c.template, c.boot) = (Some("web".into()), true)),
            ConfigError::OfTemplate
        );
        assert_eq!(
            broken(|c| (c.template, c.resources.class) = (Some("web".into()), Class::Bare)),
            ConfigError::ClassOfTemplate
        );
        assert_eq!(broken(|c| c.resources.idle = Idle::Poll), ConfigError::Polls);
        assert_eq!(broken(|c| c.resources.idle = Idle::Wait), ConfigError::Waits);
        let identity = |c: &mut SandboxConfig| c.resources.memory_mode = MemoryMode::Identity;
        assert_eq!(broken(identity), ConfigError::Identity);
        let dedicated = |c: &mut SandboxConfig| {
            (c.resources.class, c.resources.memory_mode) = (Class::Dedicated, MemoryMode::Identity);
        };
        assert_eq!(broken(dedicated), ConfigError::Identity);
        let mut owner = config();
        (owner.resources.class, owner.resources.memory_mode) = (Class::Bare, MemoryMode::Identity);
        assert_eq!(owner.validate(), Ok(()));
        let text = serde_json::to_string(&owner).unwrap();
        assert!(text.contains(r#""memory_mode":"identity""#), "{text}");
        assert_eq!(serde_json::from_str::<SandboxConfig>(&text).unwrap(), owner);
        owner.template = Some("web".into());
        assert_eq!(owner.validate(), Err(ConfigError::ClassOfTemplate));
        assert_eq!(broken(|c| c.limits.pids = Some(0)), ConfigError::Pids(0));
        assert_eq!(
            broken(|c| c.limits.cpu_millis = Some(5)).to_string().split(' ').next(),
            Some("0.005")
        );
        assert!(matches!(
            broken(|c| c.tmpfs[0].path = "x".into()),
            ConfigError::Tmpfs(_)
        ));
        assert_eq!(
            broken(|c| c.process.env.push("A".into())),
            ConfigError::Env("<redacted>".into())
        );
        assert_eq!(
            broken(|c| c.process.env.push("=b".into())),
            ConfigError::Env("=<redacted>".into())
        );
    }
}
