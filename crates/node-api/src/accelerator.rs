//! An accelerator that a sandbox has by forwarded calls: which API, and how large what it shares with its server is. Does not know who
//! carries calls out.

use std::fmt;
use std::str::FromStr;

use base::{ByteSize, CdiName};
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, SandboxConfig};

/// Memory that a guest and its server share, if nobody says how much; and the least and the most.
pub const WINDOW: ByteSize = ByteSize::mib(256);
const LEAST_WINDOW: ByteSize = ByteSize::mib(32);
const MOST_WINDOW: ByteSize = ByteSize::gib(64);

/// Memory of the accelerator, if nobody says how much, and the least.
pub const MEMORY: ByteSize = ByteSize::gib(1);
const LEAST_MEMORY: ByteSize = ByteSize::mib(1);

fn default_memory() -> ByteSize {
    MEMORY
}

/// What calls, programs' sources and binaries take of its state at most.
const MOST_OF_PROGRAMS: u64 = 1 << 30;

/// Its part of the accelerator's time, if nobody says which, and the most.
pub const SHARE: u32 = 100;
const MOST_SHARE: u32 = 1000;

/// The kind of names of the Container Device Interface that stand for accelerators, without a file that says so.
pub const CDI_KIND: &str = "basalt/accel";

/// What a window is a multiple of.
const WINDOW_UNIT: u64 = 2 << 20;

/// Which calls are forwarded, and to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AcceleratorApi {
    /// OpenCL, carried out by the host's drivers.
    Opencl,
    /// CUDA, computed on the host's processor: right results without a GPU, slowly. To test programs.
    Reference,
    /// OpenCL and CUDA, carried out by nobody: calls succeed, and no bytes move. To measure, and to try.
    Null,
}

/// How calls travel (docs/accel-window.md, "Transports").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AcceleratorTransport {
    /// Both sides look for records for some time before they sleep.
    Spin,
    /// They sleep soon.
    Bell,
}

/// Which of several sandboxes goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AcceleratorPriority {
    /// Has the accelerator while no sandbox of high priority has work for it.
    Low,
    /// Goes first, beside others of high priority by their shares.
    High,
}

/// An accelerator of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accelerator {
    /// Which calls.
    pub api: AcceleratorApi,
    /// Bytes that guest and server share, for all programs of the guest; they take what is used of it.
    pub window: ByteSize,
    /// The most memory of the accelerator that its programs may have together; they see that much.
    #[serde(default = "default_memory")]
    pub memory: ByteSize,
    /// Its part of the accelerator's time beside other sandboxes that have work for it, [`SHARE`] if it is not said: two with 100 and 300
    /// have a quarter and three quarters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<u32>,
    /// Whether it goes first, which it does if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<AcceleratorPriority>,
    /// How calls travel, whatever server and programs would choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<AcceleratorTransport>,
    /// How long who waits for a call looks for it before it sleeps, at most, in microseconds; more are fewer exits, and more processor time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_us: Option<u32>,
}

/// An accelerator that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceleratorError {
    /// No API of ours.
    #[error(
        "there is no accelerator {0:?}: write opencl, or reference for CUDA on the host's processor, or null to try without a driver"
    )]
    Api(String),
    /// Not a setting.
    #[error(
        "{0:?} is no setting of an accelerator: write opencl[:memory=SIZE,share=1..{MOST_SHARE},priority=low|high,window=SIZE,\
         transport=spin|bell,poll=MICROSECONDS]"
    )]
    Setting(String),
    /// Too small, too large, or not a multiple of 2 MiB.
    #[error("a window of {0} cannot be: give a multiple of 2 MiB from {LEAST_WINDOW} to {MOST_WINDOW}")]
    Window(ByteSize),
    /// Too little for anything.
    #[error("{0} are no memory of an accelerator: give at least {LEAST_MEMORY}")]
    Memory(ByteSize),
    /// None, or more than all others together should ever have.
    #[error(
        "a share of {0} of an accelerator's time cannot be: give 1 to {MOST_SHARE}; {SHARE} is what sandboxes have without one"
    )]
    Share(u32),
    /// Of an accelerator that takes no time.
    #[error("null carries out nothing, so that there is no time to divide: leave share and priority out")]
    NothingToShare,
    /// A name for one, beside another one.
    #[error("a sandbox has one accelerator: leave `{0}` or --accel out, or say the same API with both")]
    Two(CdiName),
    /// A machine that none can be given to.
    #[error(
        "a sandbox whose memory is not translated can have no accelerator, as that shares memory with its host: leave --accel or --memory-mode identity out"
    )]
    Identity,
    /// A machine that goes on from a template, in which there was none.
    #[error("a sandbox of a template has no accelerator, as the template has none: leave --accel or --template out")]
    OfTemplate,
}

impl Accelerator {
    /// What a name of the Container Device Interface stands for, if it is of [`CDI_KIND`].
    ///
    /// # Errors
    /// There is no such accelerator.
    pub fn named(name: &CdiName) -> Option<Result<Self, AcceleratorError>> {
        (name.kind().to_string() == CDI_KIND).then(|| name.name().parse())
    }

    /// Checks its numbers.
    ///
    /// # Errors
    /// [`AcceleratorError::Window`], [`AcceleratorError::Memory`], [`AcceleratorError::Share`], [`AcceleratorError::NothingToShare`].
    pub fn validate(&self) -> Result<(), AcceleratorError> {
        if self.api == AcceleratorApi::Null && (self.share.is_some() || self.priority.is_some()) {
            return Err(AcceleratorError::NothingToShare);
        }
        if let Some(share) = self.share.filter(|share| !(1..=MOST_SHARE).contains(share)) {
            return Err(AcceleratorError::Share(share));
        }
        let sound =
            (LEAST_WINDOW..=MOST_WINDOW).contains(&self.window) && self.window.bytes().is_multiple_of(WINDOW_UNIT);
        match sound {
            true if self.memory < LEAST_MEMORY => Err(AcceleratorError::Memory(self.memory)),
            true => Ok(()),
            false => Err(AcceleratorError::Window(self.window)),
        }
    }
}

impl Accelerator {
    /// How many bytes its state has at most, in a snapshot: the window, its memory, and what programs were made of.
    #[must_use]
    pub fn most_saved(&self) -> u64 {
        self.window
            .bytes()
            .saturating_add(self.memory.bytes())
            .saturating_add(MOST_OF_PROGRAMS)
    }
}

impl SandboxConfig {
    /// Names of the Container Device Interface that stand for an accelerator are it, and no devices. Where it is asked for otherwise as
    /// well, what is said of it there counts.
    ///
    /// # Errors
    /// [`ConfigError::Accelerator`].
    pub fn name_accelerator(&mut self) -> Result<(), ConfigError> {
        for name in std::mem::take(&mut self.cdi_devices) {
            match (Accelerator::named(&name).transpose()?, self.accelerator) {
                (None, _) => self.cdi_devices.push(name),
                (Some(named), None) => self.accelerator = Some(named),
                (Some(named), Some(other)) if named.api == other.api => (),
                (Some(_), Some(_)) => return Err(AcceleratorError::Two(name).into()),
            }
        }
        Ok(())
    }
}

impl fmt::Display for AcceleratorApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Opencl => "opencl",
            Self::Reference => "reference",
            Self::Null => "null",
        })
    }
}

impl fmt::Display for AcceleratorTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Spin => "spin",
            Self::Bell => "bell",
        })
    }
}

impl fmt::Display for AcceleratorPriority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Low => "low",
            Self::High => "high",
        })
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (window, memory) = (self.window.bytes(), self.memory.bytes());
        write!(f, "{}:window={window},memory={memory}", self.api)?;
        if let Some(share) = self.share {
            write!(f, ",share={share}")?;
        }
        if let Some(priority) = self.priority {
            write!(f, ",priority={priority}")?;
        }
        if let Some(transport) = self.transport {
            write!(f, ",transport={transport}")?;
        }
        self.poll_us.map_or(Ok(()), |micros| write!(f, ",poll={micros}"))
    }
}

impl FromStr for Accelerator {
    type Err = AcceleratorError;

    fn from_str(text: &str) -> Result<Self, AcceleratorError> {
        let (api, settings) = text.split_once(':').unwrap_or((text, ""));
        let api = match api {
            "opencl" => AcceleratorApi::Opencl,
            "reference" => AcceleratorApi::Reference,
            "null" => AcceleratorApi::Null,
            other => return Err(AcceleratorError::Api(other.to_owned())),
        };
        let mut accelerator = Self {
            api,
            window: WINDOW,
            memory: MEMORY,
            share: None,
            priority: None,
            transport: None,
            poll_us: None,
        };
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
            let wrong = || AcceleratorError::Setting(setting.to_owned());
            match setting.split_once('=').ok_or_else(wrong)? {
                ("window", size) => accelerator.window = size.parse().map_err(|_| wrong())?,
                ("memory", size) => accelerator.memory = size.parse().map_err(|_| wrong())?,
                ("share", share) => accelerator.share = Some(share.parse().map_err(|_| wrong())?),
                ("priority", "low") => accelerator.priority = Some(AcceleratorPriority::Low),
                ("priority", "high") => accelerator.priority = Some(AcceleratorPriority::High),
                ("transport", "spin") => accelerator.transport = Some(AcceleratorTransport::Spin),
                ("transport", "bell") => accelerator.transport = Some(AcceleratorTransport::Bell),
                ("poll", micros) => accelerator.poll_us = Some(micros.parse().map_err(|_| wrong())?),
                _ => return Err(wrong()),
            }
        }
        accelerator.validate()?;
        Ok(accelerator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    #[test]
    fn a_name_can_stand_for_an_accelerator() {
        let named = |names: &[&str], accelerator: Option<&str>| {
            let mut config = config();
            config.cdi_devices = names.iter().map(|name| name.parse().unwrap()).collect();
            config.accelerator = accelerator.map(|text| text.parse().unwrap());
            config.name_accelerator().map(|()| config)
        };
        let config = named(&["vendor.com/disk=a", "basalt/accel=opencl"], None).unwrap();
        assert_eq!(config.accelerator, Some("opencl".parse().unwrap()));
        assert_eq!(config.cdi_devices, ["vendor.com/disk=a".parse().unwrap()]);
        let config = named(&["basalt/accel=opencl"], Some("opencl:share=7")).unwrap();
        assert_eq!(config.accelerator.unwrap().share, Some(7));
        assert!(!config.has_devices());
        for (names, accelerator, part) in [
            (&["basalt/accel=opencl"][..], Some("null"), "one accelerator"),
            (&["basalt/accel=opencl", "basalt/accel=null"], None, "basalt/accel=null"),
            (&["basalt/accel=cuda"], None, "opencl, or reference for CUDA"),
        ] {
            let error = named(names, accelerator).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn it_is_read_as_it_is_written() {
        let plain: Accelerator = "opencl".parse().unwrap();
        assert_eq!((plain.api, plain.window), (AcceleratorApi::Opencl, WINDOW));
        let computed: Accelerator = "reference:share=7".parse().unwrap();
        assert_eq!((computed.api, computed.share), (AcceleratorApi::Reference, Some(7)));
        assert_eq!(computed.to_string().parse::<Accelerator>(), Ok(computed));
        let other: Accelerator = "null:memory=2g,window=64m,transport=spin,poll=200".parse().unwrap();
        assert_eq!((other.api, other.window), (AcceleratorApi::Null, ByteSize::mib(64)));
        let shared: Accelerator = "opencl:share=300,priority=low".parse().unwrap();
        assert_eq!(
            (shared.share, shared.priority),
            (Some(300), Some(AcceleratorPriority::Low))
        );
        assert_eq!((plain.share, plain.priority), (None, None));
        for one in [plain, other, shared] {
            assert_eq!(one.to_string().parse(), Ok(one));
            let json = serde_json::to_string(&one).unwrap();
            assert_eq!(serde_json::from_str::<Accelerator>(&json).unwrap(), one);
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_can() {
        for (text, words) in [
            ("cuda", "opencl, or reference for CUDA"),
            ("", "opencl, or reference for CUDA"),
            ("opencl:window", "opencl[:memory=SIZE"),
            ("opencl:window=big", "opencl[:memory=SIZE"),
            ("opencl:color=red", "color=red"),
            ("opencl:memory=0", "at least 1 MiB"),
            ("opencl:share=0", "give 1 to 1000"),
            ("opencl:share=1001", "give 1 to 1000"),
            ("opencl:share=half", "share=1..1000"),
            ("opencl:priority=higher", "priority=low|high"),
            ("null:share=1", "leave share and priority out"),
            ("null:priority=low", "leave share and priority out"),
            ("opencl:poll=1ms", "poll=MICROSECONDS"),
            ("opencl:transport=stream", "spin|bell"),
            ("opencl:window=16m", "multiple of 2 MiB"),
            ("opencl:window=33m", "multiple of 2 MiB"),
            ("opencl:window=65g", "multiple of 2 MiB"),
        ] {
            let error = text.parse::<Accelerator>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
