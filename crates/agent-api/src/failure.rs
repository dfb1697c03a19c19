//! Why a request could not be done, for a program that decides what to do then.

use serde::{Deserialize, Serialize};

/// Why something could not be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct RequestFailure {
    /// Its kind.
    pub kind: RequestFailureKind,
    /// One sentence.
    pub message: String,
}

/// Kinds of [`RequestFailure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestFailureKind {
    /// No such file, command or user; nothing listens at the port.
    NotFound,
    /// There is something already.
    AlreadyExists,
    /// It is no directory.
    NotADirectory,
    /// It is a directory.
    IsADirectory,
    /// The machine does not allow it, for instance on a file system that is read-only.
    PermissionDenied,
    /// No space left.
    NoSpace,
    /// What is asked for cannot be.
    Invalid,
    /// Anything else.
    Other,
}
