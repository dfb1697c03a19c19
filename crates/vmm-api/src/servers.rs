//! VMs that serve others without a CPU of their own, and those that enter them (`docs/accel-switch.md`): what freezing and linking take. For
//! guests that own their CPUs.

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, FdRef};

/// The least and the most that a server may run at once, in microseconds (`struct basalt_freeze` of `kmod/uapi/basalt.h`).
pub const BUDGET_US: std::ops::RangeInclusive<u32> = 100..=10_000_000;

/// How many links a VM can have (`BASALT_MAX_LINKS` there).
pub const MAX_LINKS: u32 = 4;

/// How a VM serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FreezeConfig {
    /// For how long it may run each time that it is entered, in microseconds: [`BUDGET_US`].
    pub budget_us: u32,
}

impl FreezeConfig {
    /// Whether it can be asked for.
    ///
    /// # Errors
    /// The budget is none that there is.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match BUDGET_US.contains(&self.budget_us) {
            true => Ok(()),
            false => Err(ConfigError::Budget(self.budget_us)),
        }
    }
}

/// A server for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkConfig {
    /// By which number the guest enters it, below [`MAX_LINKS`].
    pub index: u32,
    /// What [`crate::Reply::Frozen`] came with; `None` ends the link.
    #[serde(default)]
    pub server: Option<FdRef>,
}

impl LinkConfig {
    /// Whether it can be asked for.
    ///
    /// # Errors
    /// There is no link of that number.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match self.index < MAX_LINKS {
            true => Ok(()),
            false => Err(ConfigError::Link(self.index)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_and_numbers_have_their_bounds() {
        for (budget_us, good) in [
            (0, false),
            (99, false),
            (100, true),
            (10_000_000, true),
            (10_000_001, false),
        ] {
            assert_eq!(FreezeConfig { budget_us }.validate().is_ok(), good, "{budget_us}");
        }
        for (index, good) in [(0, true), (3, true), (4, false), (u32::MAX, false)] {
            assert_eq!(LinkConfig { index, server: None }.validate().is_ok(), good, "{index}");
        }
    }

    #[test]
    fn unknown_fields_are_errors_and_no_server_is_the_end_of_a_link() {
        let parsed: LinkConfig = serde_json::from_str(r#"{"index":2}"#).unwrap();
        assert_eq!(parsed, LinkConfig { index: 2, server: None });
        let parsed: LinkConfig = serde_json::from_str(r#"{"index":2,"server":0}"#).unwrap();
        assert_eq!(parsed.server, Some(FdRef(0)));
        assert!(serde_json::from_str::<LinkConfig>(r#"{"index":2,"sever":0}"#).is_err());
        assert!(serde_json::from_str::<FreezeConfig>(r#"{"budget_us":100,"cpu":1}"#).is_err());
    }
}
