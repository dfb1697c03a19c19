//! How a clone's memory gets from the snapshot's files to its guest.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a clone's memory gets from the snapshot's files to its guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Paging {
    /// All clones share what they only read, in the host's page cache.
    #[default]
    Mapped,
    /// The same, but everything is in the page cache and mapped before the guest goes on.
    Eager,
    /// Each has its own, read when it is touched, or before in the order in which the first such clone has touched it.
    OnDemand,
}

impl Paging {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Mapped, Self::Eager, Self::OnDemand];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::Eager => "eager",
            Self::OnDemand => "on-demand",
        }
    }
}

impl fmt::Display for Paging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No such way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no way of paging: give mapped, eager or on-demand")]
pub struct PagingError(String);

impl FromStr for Paging {
    type Err = PagingError;

    fn from_str(text: &str) -> Result<Self, PagingError> {
        let found = Self::ALL.into_iter().find(|paging| paging.name() == text);
        found.ok_or_else(|| PagingError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_messages() {
        for paging in Paging::ALL {
            assert_eq!(paging.to_string().parse(), Ok(paging));
            assert_eq!(serde_json::to_string(&paging).unwrap(), format!("\"{paging}\""));
        }
        let error = "lazy".parse::<Paging>().unwrap_err();
        assert!(error.to_string().contains("mapped, eager or on-demand"), "{error}");
    }
}
