//! One finding about the host, as data. Knows nothing of how it was found or how it is shown.

use serde::Serialize;

/// How good a finding is; ordered from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, but something is slower or missing.
    Warn,
    /// Does not work.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// A short fixed name, for machines too.
    pub name: &'static str,
    /// How good it is.
    pub status: Status,
    /// What was found, with the numbers.
    pub found: String,
    /// What to do about it; absent where nothing is to be done.
    pub next: Option<String>,
}

impl Check {
    /// A finding that is as it should be.
    pub fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            found: found.into(),
            next: None,
        }
    }

    /// A finding that costs something.
    pub fn warn(name: &'static str, found: impl Into<String>, next: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Warn,
            found: found.into(),
            next: Some(next.into()),
        }
    }

    /// A finding that stops something from working.
    pub fn fail(name: &'static str, found: impl Into<String>, next: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Fail,
            found: found.into(),
            next: Some(next.into()),
        }
    }
}
