//! The host's CPUs, and who has them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a CPU of the host is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuUse {
    /// By everything.
    Shared,
    /// By nothing: it is kept free for sandboxes that will own it.
    Isolated,
    /// By a vCPU of a sandbox of the class `dedicated`.
    Dedicated,
    /// By the guest of a sandbox of the class `bare` alone.
    #[serde(alias = "claimed")]
    Bare,
    /// By nothing: it is offline.
    Offline,
}

impl fmt::Display for CpuUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shared => "shared",
            Self::Isolated => "isolated",
            Self::Dedicated => "dedicated",
            Self::Bare => "bare",
            Self::Offline => "offline",
        })
    }
}

/// A CPU of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCpu {
    /// Its number, as Linux counts them.
    pub number: u32,
    /// Its NUMA node, where it is online and the host has any.
    pub node: Option<u32>,
    /// What it is used for.
    pub used: CpuUse,
    /// The id of the sandbox that owns it.
    pub sandbox: Option<String>,
    /// What that is called, if this daemon has it.
    pub name: Option<String>,
    /// The host was booted so that it has no timer tick while one task runs (`nohz_full=`).
    pub tickless: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_are_called_the_same_for_people_and_machines() {
        for used in [
            CpuUse::Shared,
            CpuUse::Isolated,
            CpuUse::Dedicated,
            CpuUse::Bare,
            CpuUse::Offline,
        ] {
            assert_eq!(serde_json::to_value(used).unwrap(), used.to_string());
        }
        // A daemon of before says it so.
        assert_eq!(serde_json::from_str::<CpuUse>("\"claimed\"").unwrap(), CpuUse::Bare);
    }
}
