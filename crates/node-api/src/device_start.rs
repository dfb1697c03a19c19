//! When a sandbox that is started with devices of the host gets them, beside its memory being mapped for them. Plain data.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// When a sandbox that is started with devices of the host gets them. A device is never there before the memory is mapped that the guest
/// has by then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceStart {
    /// Before the guest's first instruction, which waits until all memory is mapped.
    Eager,
    /// Some time after its command was started: all memory is there from the start, and mapped beside the guest.
    Late,
    /// Before its command: what it boots with is mapped beside its boot, and the rest is plugged as it is mapped.
    #[default]
    Async,
    /// Before its command: its guest has all memory from the start, of which it does without a part (a balloon) until that is mapped.
    AsyncBalloon,
    /// Before its command, and nothing is mapped but what its guest maps, by an IOMMU that its machine has from the boot on.
    Lazy,
}

impl DeviceStart {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Eager, Self::Late, Self::Async, Self::AsyncBalloon, Self::Lazy];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Late => "late",
            Self::Async => "async",
            Self::AsyncBalloon => "async-balloon",
            Self::Lazy => "lazy",
        }
    }
}

impl fmt::Display for DeviceStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No such way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no way to start with devices: give eager, late, async, async-balloon or lazy")]
pub struct DeviceStartError(String);

impl FromStr for DeviceStart {
    type Err = DeviceStartError;

    fn from_str(text: &str) -> Result<Self, DeviceStartError> {
        let found = Self::ALL.into_iter().find(|start| start.name() == text);
        found.ok_or_else(|| DeviceStartError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_messages_and_no_others() {
        for start in DeviceStart::ALL {
            assert_eq!(start.to_string().parse(), Ok(start));
            assert_eq!(serde_json::to_string(&start).unwrap(), format!("\"{start}\""));
        }
        for wrong in ["balloon", "Lazy", "Eager", ""] {
            let error = wrong.parse::<DeviceStart>().unwrap_err().to_string();
            assert!(
                error.contains("eager, late, async, async-balloon or lazy") && error.contains(&format!("`{wrong}`")),
                "{error}"
            );
        }
    }
}
