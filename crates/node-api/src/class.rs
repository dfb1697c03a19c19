//! How a sandbox's machine has the host's processors.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a sandbox's machine has the host's processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Its vCPUs are threads, which share the host's CPUs with everything else.
    #[default]
    Standard,
    /// Each vCPU is a thread that has a CPU of the host to itself for as long as its machine runs.
    Dedicated,
    /// Each vCPU owns a CPU that Linux gives up for as long as its machine runs (basalt.ko).
    Bare,
}

impl Class {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Standard, Self::Dedicated, Self::Bare];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::Dedicated => "dedicated",
            Self::Bare => "bare",
        }
    }

    /// Whether it is what a sandbox is that asks for nothing.
    pub fn is_standard(&self) -> bool {
        *self == Self::Standard
    }

    /// Whether its machine has an engine other than KVM, so that it boots, and has its memory pinned.
    pub fn is_bare(&self) -> bool {
        *self == Self::Bare
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a vCPU does that has nothing to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Idle {
    /// It halts, until an interrupt comes.
    #[default]
    Halt,
    /// It waits for a write to its memory (MWAIT), so that nobody has to interrupt it. For vCPUs that own their CPUs.
    Wait,
    /// It looks for work all the time, so that nobody has to interrupt it. For vCPUs that have CPUs to themselves.
    Poll,
}

impl Idle {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Halt, Self::Wait, Self::Poll];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Halt => "halt",
            Self::Wait => "wait",
            Self::Poll => "poll",
        }
    }

    /// Whether it is what a vCPU does that is told nothing.
    pub fn halts(&self) -> bool {
        *self == Self::Halt
    }
}

impl fmt::Display for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Nothing that a vCPU could do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is nothing that an idle processor does: give halt, wait or poll")]
pub struct IdleError(String);

impl FromStr for Idle {
    type Err = IdleError;

    fn from_str(text: &str) -> Result<Self, IdleError> {
        let found = Self::ALL.into_iter().find(|idle| idle.name() == text);
        found.ok_or_else(|| IdleError(text.to_owned()))
    }
}

/// No such class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no class: give standard, dedicated or bare")]
pub struct ClassError(String);

impl FromStr for Class {
    type Err = ClassError;

    fn from_str(text: &str) -> Result<Self, ClassError> {
        let found = Self::ALL.into_iter().find(|class| class.name() == text);
        found.ok_or_else(|| ClassError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_read_as_they_are_written() {
        for class in Class::ALL {
            assert_eq!(class.to_string().parse(), Ok(class));
            assert_eq!(serde_json::to_value(class).unwrap(), class.name());
        }
        for idle in Idle::ALL {
            assert_eq!(idle.to_string().parse(), Ok(idle));
            assert_eq!(serde_json::to_value(idle).unwrap(), idle.name());
        }
        assert!("sleep".parse::<Idle>().unwrap_err().to_string().contains("poll"));
        assert!("metal".parse::<Class>().unwrap_err().to_string().contains("bare"));
    }
}
