//! Templates: what a daemon tells of one, and what somebody asks for who builds one.

use std::fmt;
use std::time::Duration;

use observe::redact::Variables;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, NetworkMode, Resources, SandboxConfig, check_name};
use crate::limits::Limits;
use crate::memory_size::MemoryError;
use crate::paging::Paging;
use crate::process::ProcessConfig;
use crate::snapshot::Programs;

/// Hexadecimal digits of an id, where it is shown to people.
const SHORT: usize = 12;

/// A machine that has booted an image, of which sandboxes are cloned instead of being booted. Nothing has run in it yet, or what
/// its recipe says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// SHA-256 of all that it was made of, 64 hexadecimal digits.
    pub id: String,
    /// What it is called; only one that was built is called something.
    #[serde(default)]
    pub names: Vec<String>,
    /// When it was made: nanoseconds since 1970.
    pub created_ns: u64,
    /// When a sandbox was last cloned of it, or it was made.
    #[serde(default)]
    pub used_ns: u64,
    /// The image's digest, 64 hexadecimal digits.
    pub digest: String,
    /// How large its machine is.
    pub resources: Resources,
    /// It has an interface in the node's network.
    pub networked: bool,
    /// What the machine was made with.
    pub programs: Programs,
    /// Bytes that it takes on the host.
    #[serde(default)]
    pub bytes: u64,
    /// How it was built; `None` of one that the daemon has made by itself.
    #[serde(default)]
    pub recipe: Option<Recipe>,
    /// It was built by itself for sandboxes of another size than a template of this recipe had, and has no name: it goes with the last
    /// one that somebody wanted.
    #[serde(default)]
    pub sized: bool,
    /// Where it was made; `None` of one that an older daemon has made.
    #[serde(default)]
    pub host: Option<HostTraits>,
    /// It has come from elsewhere, as a file or by a registry: what is in it is somebody else's word.
    #[serde(default)]
    pub brought: bool,
    /// Why no sandbox can be cloned of it now. Found out whenever somebody is told of it, and part of no record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outdated: Option<String>,
}

/// A template that has come from elsewhere and is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedTemplate {
    /// The template, with the names that it has now.
    #[serde(flatten)]
    pub template: Template,
    /// Names of it that others had until now.
    pub taken: Vec<TakenName>,
}

/// A name that one template has lost to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenName {
    /// The name.
    pub name: String,
    /// The id of the one that had it.
    pub from: String,
    /// That one had no other name, and is gone.
    pub gone: bool,
}

/// A host, as far as a machine that goes on from files depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTraits {
    /// The kernel's release.
    pub kernel: String,
    /// Who made the processor, as CPUID says.
    pub vendor: String,
    /// The processor's name, with family, model and stepping.
    pub processor: String,
    /// SHA-256 of the names of its features.
    pub features: String,
}

impl Template {
    /// Its first name, or the beginning of its id.
    pub fn name(&self) -> &str {
        let short = self.id.get(..SHORT).unwrap_or(&self.id);
        self.names.first().map_or(short, String::as_str)
    }
}

/// What is done in a machine that has booted, before it becomes a template.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Run by `sh -c`, one after the other.
    pub commands: Vec<String>,
    /// Run by `sh -c` until it ends with 0, while the last command may run on.
    pub ready: Option<String>,
    /// How long that may take, in milliseconds.
    pub ready_ms: u64,
    /// `NAME=value`, over the image's.
    pub env: Vec<String>,
    /// In place of the image's working directory.
    pub workdir: Option<String>,
    /// In place of the image's user.
    pub user: Option<String>,
    /// How it reaches the world.
    pub network: NetworkMode,
}

impl fmt::Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            commands,
            ready,
            ready_ms,
            env,
            workdir,
            user,
            network,
        } = self;
        f.debug_struct("Recipe")
            .field("commands", commands)
            .field("ready", ready)
            .field("ready_ms", ready_ms)
            .field("env", &Variables(env))
            .field("workdir", workdir)
            .field("user", user)
            .field("network", network)
            .finish()
    }
}

impl Recipe {
    /// How long the check may take.
    pub fn ready_limit(&self) -> Duration {
        Duration::from_millis(self.ready_ms)
    }

    /// It makes the same machine of the same image as the other: what is done counts, not how long is waited for it, nor by which
    /// word it got its network.
    #[must_use]
    pub fn essence(&self) -> Self {
        Self {
            ready_ms: 0,
            network: NetworkMode::Auto,
            ..self.clone()
        }
    }
}

/// A template that is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuildConfig {
    /// What it is to be called from now on, in place of others of these names.
    pub names: Vec<String>,
    /// The id of one that goes when this one is there.
    pub replaces: Option<String>,
    /// The image: a name, or a digest or its beginning.
    pub image: String,
    /// How large its machine is.
    pub resources: Resources,
    /// What is done in it.
    pub recipe: Recipe,
    /// Build it also if there is the same one.
    pub force: bool,
    /// It is for sandboxes of another size than a template of this recipe has ([`Template::sized`]). It gets no name.
    #[serde(default)]
    pub sized: bool,
}

impl BuildConfig {
    /// The sandbox in which it is built. It boots, ends with whoever builds, and has no command of its own: that it would be a shell
    /// is for images without one.
    pub fn sandbox(&self) -> SandboxConfig {
        SandboxConfig {
            name: None,
            image: self.image.clone(),
            process: ProcessConfig {
                entrypoint: Some(Vec::new()),
                command: vec!["sh".into()],
                env: self.recipe.env.clone(),
                device_env: 0,
                workdir: self.recipe.workdir.clone(),
                user: self.recipe.user.clone(),
                tty: false,
                idle: false,
            },
            resources: self.resources.clone(),
            limits: Limits::default(),
            tmpfs: Vec::new(),
            network: self.recipe.network,
            egress: base::Egress::default(),
            ports: Vec::new(),
            volumes: Vec::new(),
            devices: Vec::new(),
            cdi_devices: Vec::new(),
            device_start: None,
            accelerator: None,
            time_limit: None,
            memory_ready: false,
            hostname: None,
            boot: true,
            paging: Paging::Mapped,
            template: None,
            remove: true,
            detach: false,
            labels: std::collections::BTreeMap::new(),
            owner: None,
        }
    }

    /// Checks everything that can be told from the data alone.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if let Some(name) = self.names.first().filter(|_| self.sized) {
            return Err(ConfigError::Template(name.clone()));
        }
        self.names.iter().try_for_each(|name| check_template_name(name))?;
        let mut scripts = self.recipe.commands.iter().chain(&self.recipe.ready);
        if let Some(script) = scripts.find(|script| script.trim().is_empty() || script.contains('\0')) {
            return Err(ConfigError::Script(script.clone()));
        }
        if !self.resources.memory_mode.is_translated() {
            return Err(ConfigError::IdentityOfTemplate);
        }
        if self.resources.boot_memory.is_some() || self.resources.max_memory.is_some() {
            return Err(MemoryError::Template.into());
        }
        self.sandbox().validate()
    }
}

/// Checks a template's name. Ids are shown with [`SHORT`] digits at least: what could be one is no name, so that whoever writes so much
/// of an id always means that. A shorter name wins over ids that begin like it.
///
/// # Errors
/// [`ConfigError::Template`], [`ConfigError::LikeId`].
pub fn check_template_name(name: &str) -> Result<(), ConfigError> {
    check_name(name).map_err(|_| ConfigError::Template(name.to_owned()))?;
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    match name.len() >= SHORT && name.bytes().all(is_digit) {
        true => Err(ConfigError::LikeId(name.to_owned())),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use base::ByteSize;

    use super::*;

    fn config() -> BuildConfig {
        BuildConfig {
            names: vec!["web".into()],
            replaces: None,
            image: "python".into(),
            resources: Resources {
                cpus: 1,
                memory: ByteSize::mib(128),
                boot_memory: None,
                max_memory: None,
                held_memory: None,
                inflated: None,
                disk: None,
                cpu_model: None,
                class: crate::class::Class::Standard,
                idle: crate::class::Idle::Halt,
                memory_mode: crate::MemoryMode::Translated,
                free_page_reporting: false,
                guest_iommu: false,
            },
            recipe: Recipe {
                commands: vec!["pip install x".into(), "server".into()],
                ready: Some("curl localhost".into()),
                ready_ms: 1000,
                ..Recipe::default()
            },
            force: false,
            sized: false,
        }
    }

    #[test]
    fn a_sensible_one_passes_and_what_is_wrong_is_named() {
        let right = config();
        assert_eq!(right.validate(), Ok(()));
        let text = serde_json::to_string(&right).unwrap();
        assert_eq!(serde_json::from_str::<BuildConfig>(&text).unwrap(), right);
        let broken = |change: fn(&mut BuildConfig)| {
            let mut config = config();
            change(&mut config);
            config.validate().unwrap_err()
        };
        assert_eq!(
            broken(|c| c.names.push("a/b".into())),
            ConfigError::Template("a/b".into())
        );
        assert_eq!(
            broken(|c| c.names.push("0123456789ab".into())),
            ConfigError::LikeId("0123456789ab".into())
        );
        for name in ["cafe", "0123456789a", "0123456789ABC", "0123456789abc-g"] {
            assert_eq!(check_template_name(name), Ok(()), "{name}");
        }
        assert_eq!(
            broken(|c| c.recipe.commands.push(" ".into())),
            ConfigError::Script(" ".into())
        );
        assert_eq!(
            broken(|c| c.recipe.ready = Some("a\0b".into())),
            ConfigError::Script("a\0b".into())
        );
        assert_eq!(broken(|c| c.sized = true), ConfigError::Template("web".into()));
        assert_eq!(
            broken(|c| c.recipe.env.push("=b".into())),
            ConfigError::Env("=<redacted>".into())
        );
        assert_eq!(
            broken(|c| {
                (c.resources.class, c.resources.memory_mode) = (crate::Class::Bare, crate::MemoryMode::Identity);
            }),
            ConfigError::IdentityOfTemplate
        );
        assert_eq!(
            broken(|c| c.resources.disk = Some(ByteSize(1))),
            ConfigError::Disk(ByteSize(1))
        );
    }

    #[test]
    fn patience_makes_no_other_machine() {
        let recipe = config().recipe;
        let patient = Recipe {
            ready_ms: 5,
            network: NetworkMode::Node,
            ..recipe.clone()
        };
        assert_eq!(recipe.essence(), patient.essence());
        let other = Recipe {
            ready: None,
            ..recipe.clone()
        };
        assert_ne!(recipe.essence(), other.essence());
    }

    #[test]
    fn it_is_shown_by_its_name_or_the_beginning_of_its_id() {
        let mut template = Template {
            id: "0123456789abcdef".into(),
            names: Vec::new(),
            created_ns: 1,
            used_ns: 1,
            digest: "00".into(),
            resources: config().resources,
            networked: false,
            programs: Programs::default(),
            bytes: 0,
            recipe: None,
            sized: false,
            host: None,
            brought: false,
            outdated: None,
        };
        assert_eq!(template.name(), "0123456789ab");
        template.names = vec!["web".into(), "www".into()];
        assert_eq!(template.name(), "web");
    }
}
