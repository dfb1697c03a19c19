//! How long a sandbox may run each time that it is started or resumed.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, SandboxConfig};
use crate::volume::{VolumeMount, VolumeSource};

/// What is done with a sandbox whose time is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnTimeout {
    /// It is stopped, as `basalt stop` does it.
    #[default]
    Stop,
    /// It is suspended, as `basalt suspend` does it.
    Suspend,
}

impl OnTimeout {
    const ALL: [Self; 2] = [Self::Stop, Self::Suspend];
}

impl fmt::Display for OnTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Stop => "stop",
            Self::Suspend => "suspend",
        })
    }
}

impl FromStr for OnTimeout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|one| one.to_string() == text);
        found.ok_or_else(|| format!("`{text}` is neither stop nor suspend"))
    }
}

/// For how long a sandbox may run, and what is done then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeLimit {
    /// Milliseconds, more than 0.
    pub ms: u64,
    /// What is done when they are over.
    #[serde(default)]
    pub then: OnTimeout,
}

impl TimeLimit {
    /// When it is over of one that begins at this moment: both in nanoseconds since 1970.
    pub fn end(self, begin_ns: u64) -> u64 {
        begin_ns.saturating_add(self.ms.saturating_mul(1_000_000))
    }
}

/// What cannot be suspended is told when it is asked for, and not when its time is over.
pub(crate) fn check(config: &SandboxConfig) -> Result<(), ConfigError> {
    let served = |volume: &VolumeMount| matches!(volume.source, VolumeSource::Served(_));
    let stays = !config.detach
        || !config.devices.is_empty()
        || !config.resources.memory_mode.is_translated()
        || config.volumes.iter().any(served);
    match config.time_limit {
        Some(TimeLimit { ms: 0, .. }) => Err(ConfigError::TimeLimit),
        Some(limit) if limit.then == OnTimeout::Suspend && stays => Err(ConfigError::NotToSuspend),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    #[test]
    fn what_cannot_be_done_then_is_refused_now() {
        let limit = |ms, then| Some(TimeLimit { ms, then });
        let mut config = config();
        config.detach = true;
        config.time_limit = limit(1, OnTimeout::Suspend);
        assert_eq!(check(&config), Ok(()));
        config.detach = false;
        assert_eq!(check(&config), Err(ConfigError::NotToSuspend));
        config.time_limit = limit(1, OnTimeout::Stop);
        assert_eq!(check(&config), Ok(()));
        config.time_limit = limit(0, OnTimeout::Stop);
        assert_eq!(config.validate(), Err(ConfigError::TimeLimit));
    }

    #[test]
    fn an_end_is_after_the_beginning() {
        let limit = TimeLimit {
            ms: 1500,
            then: OnTimeout::Suspend,
        };
        assert_eq!(limit.end(7), 1_500_000_007);
        let forever = TimeLimit { ms: u64::MAX, ..limit };
        assert_eq!(forever.end(7), u64::MAX);
    }

    #[test]
    fn it_is_read_as_it_is_written() {
        for then in OnTimeout::ALL {
            assert_eq!(then.to_string().parse(), Ok(then));
            let limit = TimeLimit { ms: 1, then };
            let text = serde_json::to_string(&limit).unwrap();
            assert_eq!(serde_json::from_str::<TimeLimit>(&text).unwrap(), limit);
        }
        assert_eq!(
            serde_json::from_str::<TimeLimit>(r#"{"ms":1}"#).unwrap().then,
            OnTimeout::Stop
        );
        assert!(
            "pause"
                .parse::<OnTimeout>()
                .unwrap_err()
                .contains("neither stop nor suspend")
        );
    }
}
