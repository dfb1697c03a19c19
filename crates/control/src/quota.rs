//! How much a tenant may have, and what counts against it.
//!
//! Truth is what the node has: whoever asks for more says what there is ([`InUse`]). A claim stands beside that for what is being made and
//! was not there yet when somebody looked, and goes by itself.
//!
//! ```text
//!  reserve ──▶ claim, RESERVED ──▶ settle(sandbox) ──▶ claim for that sandbox, SETTLED ──▶ gone
//!                  │                                        │ release(sandbox)
//!                  └── drop_claim: it was not made ──▶ gone ◀──┘
//! ```
//! One sandbox counts once: of what the node says of it and what claims for it say, the larger. Knows no node.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long a claim counts of which nobody says what has become of it.
pub const RESERVED: Duration = Duration::from_secs(600);

/// How long a claim counts whose sandbox is there: longer than somebody who looked before needs to ask.
pub const SETTLED: Duration = Duration::from_secs(60);

/// So much of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amount {
    /// Sandboxes, suspended ones too.
    pub sandboxes: u64,
    /// Virtual CPUs of those that are not suspended.
    pub vcpus: u64,
    /// Bytes of memory of those that are not suspended.
    pub memory: u64,
}

impl Amount {
    fn plus(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_add(other.sandboxes),
            vcpus: self.vcpus.saturating_add(other.vcpus),
            memory: self.memory.saturating_add(other.memory),
        }
    }

    fn larger(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.max(other.sandboxes),
            vcpus: self.vcpus.max(other.vcpus),
            memory: self.memory.max(other.memory),
        }
    }
}

/// The most of each that a tenant may have; what is `None` is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quota {
    /// Sandboxes.
    pub sandboxes: Option<u64>,
    /// Virtual CPUs.
    pub vcpus: Option<u64>,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Volumes.
    pub volumes: Option<u64>,
    /// Bytes that their sizes may be together.
    pub volume_space: Option<u64>,
}

impl Quota {
    /// Something is limited.
    pub fn is_limited(&self) -> bool {
        *self != Self::default()
    }

    /// Something is limited that sandboxes take.
    pub fn limits_sandboxes(&self) -> bool {
        self.sandboxes.is_some() || self.vcpus.is_some() || self.memory.is_some()
    }

    /// Checks that a tenant may have so many volumes with so many bytes, if these are limited.
    ///
    /// # Errors
    /// It may not.
    pub fn check_volumes(&self, volumes: u64, bytes: u64) -> Result<(), Shortage> {
        within("volumes", volumes, self.volumes, OF_VOLUMES)?;
        within(
            "MiB of volumes",
            bytes.div_ceil(MIB),
            self.volume_space.map(|bytes| bytes / MIB),
            OF_VOLUMES,
        )
    }
}

/// A sandbox that there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InUse {
    /// Which.
    pub sandbox: String,
    /// What it takes.
    pub amount: Amount,
}

/// What somebody wants to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// By which it is settled.
    pub id: String,
    /// Whose.
    pub tenant: String,
    /// For which sandbox, if that is there already.
    pub sandbox: Option<String>,
    /// How much, all in all.
    pub amount: Amount,
}

/// A tenant has not that much left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Shortage {
    /// Of what.
    pub what: &'static str,
    /// How much it would have.
    pub wanted: u64,
    /// How much it may have.
    pub limit: u64,
    /// What its user can do.
    pub next: &'static str,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            what,
            wanted,
            limit,
            next,
        } = self;
        write!(
            f,
            "this would make {wanted} {what}, and the quota is {limit}: {next}, or ask the node's operator for more"
        )
    }
}

const MIB: u64 = 1 << 20;

/// What can be done where there is too much.
const OF_SANDBOXES: &str = "end some sandboxes";
const OF_VOLUMES: &str = "remove some volumes";

fn within(what: &'static str, wanted: u64, limit: Option<u64>, next: &'static str) -> Result<(), Shortage> {
    match limit.filter(|limit| wanted > *limit) {
        Some(limit) => Err(Shortage {
            what,
            wanted,
            limit,
            next,
        }),
        None => Ok(()),
    }
}

/// Whether there is enough for `wanted` beside what there is and what others have claimed.
pub(crate) fn check(quota: &Quota, in_use: &[InUse], claims: &[Claim], wanted: &Claim) -> Result<(), Shortage> {
    let mut by_sandbox: BTreeMap<&str, Amount> = BTreeMap::new();
    for one in in_use {
        by_sandbox.insert(&one.sandbox, one.amount);
    }
    let mut total = Amount::default();
    for claim in claims.iter().chain([wanted]) {
        match &claim.sandbox {
            Some(sandbox) => {
                let known = by_sandbox.entry(sandbox).or_default();
                *known = known.larger(claim.amount);
            }
            None => total = total.plus(claim.amount),
        }
    }
    total = by_sandbox.into_values().fold(total, Amount::plus);
    let mib = |bytes: u64| bytes / MIB;
    within("sandboxes", total.sandboxes, quota.sandboxes, OF_SANDBOXES)?;
    within("vCPUs", total.vcpus, quota.vcpus, OF_SANDBOXES)?;
    within("MiB of memory", mib(total.memory), quota.memory.map(mib), OF_SANDBOXES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Amount = Amount {
        sandboxes: 1,
        vcpus: 2,
        memory: 512 << 20,
    };

    fn claim(sandbox: Option<&str>) -> Claim {
        Claim {
            id: "c".into(),
            tenant: "t".into(),
            sandbox: sandbox.map(str::to_owned),
            amount: ONE,
        }
    }

    fn in_use(sandbox: &str, amount: Amount) -> InUse {
        InUse {
            sandbox: sandbox.into(),
            amount,
        }
    }

    #[test]
    fn a_sandbox_and_the_claim_for_it_count_once() {
        let quota = Quota {
            sandboxes: Some(2),
            vcpus: Some(4),
            memory: Some(1 << 30),
            ..Quota::default()
        };
        let there = [in_use("a", ONE)];
        assert_eq!(check(&quota, &there, &[claim(Some("a"))], &claim(None)), Ok(()));
        let error = check(&quota, &there, &[claim(Some("b"))], &claim(None)).unwrap_err();
        assert_eq!((error.what, error.wanted, error.limit), ("sandboxes", 3, 2));
        // One that is suspended is a sandbox without CPUs, until it goes on.
        let asleep = [in_use(
            "a",
            Amount {
                vcpus: 0,
                memory: 0,
                ..ONE
            },
        )];
        assert_eq!(check(&quota, &asleep, &[claim(None)], &claim(Some("a"))), Ok(()));
        let cpus = Quota {
            vcpus: Some(3),
            ..Quota::default()
        };
        let error = check(&cpus, &asleep, &[claim(None)], &claim(Some("a"))).unwrap_err();
        assert_eq!((error.what, error.wanted), ("vCPUs", 4));
    }

    #[test]
    fn volumes_count_by_number_and_size() {
        let quota = Quota {
            volumes: Some(2),
            volume_space: Some(1 << 30),
            ..Quota::default()
        };
        assert!(quota.is_limited() && !quota.limits_sandboxes());
        assert_eq!(quota.check_volumes(2, 1 << 30), Ok(()));
        let error = quota.check_volumes(3, 0).unwrap_err();
        assert_eq!((error.what, error.wanted, error.limit), ("volumes", 3, 2));
        let error = quota.check_volumes(1, (1 << 30) + 1).unwrap_err().to_string();
        assert!(
            error.contains("1025 MiB of volumes") && error.contains("1024"),
            "{error}"
        );
        assert!(error.contains("remove some volumes"), "{error}");
        assert_eq!(Quota::default().check_volumes(u64::MAX, u64::MAX), Ok(()));
    }

    #[test]
    fn what_is_not_limited_is_not_counted() {
        let many: Vec<InUse> = (0..100).map(|n| in_use(&n.to_string(), ONE)).collect();
        assert_eq!(check(&Quota::default(), &many, &[], &claim(None)), Ok(()));
        let memory = Quota {
            memory: Some(50 << 30),
            ..Quota::default()
        };
        let error = check(&memory, &many, &[], &claim(None)).unwrap_err().to_string();
        assert!(error.contains("51712 MiB") && error.contains("51200"), "{error}");
    }
}
