//! An export: named sparse files as one stream, a tar archive in zstd. [`Writer`] and [`Reader`] need no seeking and no room for
//! the whole; holes take neither bytes nor time. The last member says what all the others were (SHA-256), and a reader that has
//! not come to it has read nothing that counts. A single member in the same form is a blob ([`write_blob`], [`Reader::of_blob`]),
//! for places that check their blobs themselves.
//!
//! Whoever wrote a stream is not trusted: there are few kinds of headers, names without a path, and no number that is believed.
//! Does not know what is in the files, which of them belong together, nor where they come from. docs/snapshot-file.md has the
//! layout.

mod error;
mod head;
mod read;
mod sparse;
mod write;

#[cfg(test)]
mod tests;

pub use error::Error;
pub use read::{Entry, Reader};
pub use sparse::data_bytes;
pub use write::{Writer, write_blob};

use serde::{Deserialize, Serialize};

/// The version of the layout.
pub const FORMAT: u32 = 1;

/// What there are exports of. Which members those have is not known here.
pub const KINDS: [&str; 2] = ["snapshot", "template"];

/// The first member: what it all is.
pub(crate) const HEAD: &str = "bundle.json";

/// The last member: what the others were.
pub(crate) const SUMS: &str = "sums.json";

/// Members besides these two.
pub(crate) const MOST_MEMBERS: usize = 256;

/// The most that head and sums can be long.
pub(crate) const MOST_TEXT: u64 = 256 << 10;

/// Bytes that are moved at once.
pub(crate) const CHUNK: usize = 256 << 10;

/// What `bundle.json` says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Head {
    pub(crate) format: u32,
    pub(crate) kind: String,
}

/// What `sums.json` says.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sums {
    pub(crate) members: Vec<Sum>,
}

/// One member as the archive has it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sum {
    pub(crate) name: String,
    /// Bytes in the archive: the map of a sparse file and its data.
    pub(crate) bytes: u64,
    /// Of these bytes.
    pub(crate) sha256: String,
}
