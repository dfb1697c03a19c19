//! What is said of files: to be stored, unpacked, and looked at.

use serde::{Deserialize, Serialize};

use crate::OsText;

/// A file to store. It is written beside its place and renamed when complete; missing directories are made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upload {
    /// Absolute path.
    pub path: OsText,
    /// Permission bits.
    pub mode: u32,
    /// Its length in bytes.
    pub size: u64,
}

/// Where a tar stream goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnpackTarget {
    /// Its one tree, whose root is called `root` in it, becomes the path, which is in a directory that is there.
    Root,
    /// What is in its one tree goes into the path, a directory that is there.
    Into,
    /// Whatever is in it goes below the path, a directory that is there.
    Below,
}

/// What [`Request::Stat`](crate::message::Request::Stat) found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// Length in bytes.
    pub size: u64,
    /// `st_mode`: type and permission bits.
    pub mode: u32,
    /// SHA-256 in hexadecimal, of a regular file, if asked for.
    pub sha256: Option<String>,
}
