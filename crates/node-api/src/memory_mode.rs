//! Where a sandbox's guest sees its memory.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where a sandbox's guest sees its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryMode {
    /// Where its machine has it; the processor translates, and the guest reaches nothing else.
    #[default]
    Translated,
    /// Where the host's bus has it, in memory that was reserved for such guests: nobody translates, and **the guest can reach all of
    /// the host's memory**. For guests that are trusted as the host's own kernel is, of the class bare.
    Identity,
}

impl MemoryMode {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Translated, Self::Identity];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Translated => "translated",
            Self::Identity => "identity",
        }
    }

    /// Whether it is what a guest has that is asked for nothing.
    pub fn is_translated(&self) -> bool {
        *self == Self::Translated
    }
}

impl fmt::Display for MemoryMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No such mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no memory mode: give translated or identity")]
pub struct MemoryModeError(String);

impl FromStr for MemoryMode {
    type Err = MemoryModeError;

    fn from_str(text: &str) -> Result<Self, MemoryModeError> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| MemoryModeError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_as_they_are_written() {
        for mode in MemoryMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.name());
        }
        let error = "physical".parse::<MemoryMode>().unwrap_err();
        assert!(error.to_string().contains("identity"));
    }
}
