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
}

impl Quota {
    /// Something is limited.
    pub fn is_limited(&self) -> bool {
        *self != Self::default()
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
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, wanted, limit } = self;
        write!(
            f,
            "this would make {wanted} {what}, and the quota is {limit}: end some sandboxes, or ask the node's operator for more"
        )
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
    let mib = |bytes: u64| bytes >> 20;
    for (what, has, limit) in [
        ("sandboxes", total.sandboxes, quota.sandboxes),
        ("vCPUs", total.vcpus, quota.vcpus),
        ("MiB of memory", mib(total.memory), quota.memory.map(mib)),
    ] {
        if let Some(limit) = limit.filter(|limit| has > *limit) {
            return Err(Shortage {
                what,
                wanted: has,
                limit,
            });
        }
    }
    Ok(())
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
