//! Saved state: named, versioned schemas, the container file that holds them, checksums of the large files beside it, and a kit for
//! golden files. Knows no component, neither what a schema describes nor who restores from it.
//!
//! ```text
//!  component ── Schema ──▶ Saved (kind, version, payload) ── Container ──▶ bytes
//!                             take::<T>() exactly once ◀── finish(): nothing may be left over
//! ```

pub mod bytes;
mod container;
pub mod golden;
mod schema;
mod sums;

pub use container::{Container, FORMAT, Fingerprint, HEADER};
pub use schema::{Saved, Schema};
pub use sums::{CHUNK, Difference, SUMS_FORMAT, Scan, Sums};

/// Why saved state cannot be written or used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Something else altogether.
    #[error("this is no snapshot: it does not begin with the mark of one; give the file that `snapshot` wrote")]
    NoSnapshot,
    /// Written by a newer or older program.
    #[error(
        "the snapshot has format {found}, this program reads format {FORMAT}: restore it with the program that wrote it"
    )]
    Format {
        /// What the header says.
        found: u32,
    },
    /// The end is missing, or there is more behind it.
    #[error("the snapshot should have {expected} bytes and has {found}: it was cut short or added to; take it anew")]
    Length {
        /// What the header says.
        expected: u64,
        /// How many there are.
        found: u64,
    },
    /// Bits have changed.
    #[error("the snapshot is damaged: the checksum of {part} is {found:#010x}, not {expected:#010x}; take it anew")]
    Checksum {
        /// Of what.
        part: String,
        /// What is written in the file.
        expected: u32,
        /// What was computed.
        found: u32,
    },
    /// The header contradicts itself.
    #[error("the snapshot's header makes no sense at byte {at}: it is damaged; take it anew")]
    Header {
        /// Where, or shortly before.
        at: usize,
    },
    /// The section table contradicts itself.
    #[error("the snapshot's section table makes no sense at byte {at}: it is damaged; take it anew")]
    Table {
        /// Where.
        at: usize,
    },
    /// More than any snapshot has.
    #[error("{what} of {size} is more than a snapshot can have, which is {most}")]
    TooLarge {
        /// What.
        what: &'static str,
        /// How much.
        size: usize,
        /// The limit.
        most: usize,
    },
    /// A component's name cannot stand in a file.
    #[error("`{0}` cannot be part of a snapshot: give it a name without control characters")]
    Name(String),
    /// A component's state is not there.
    #[error("the snapshot has no state of `{0}`: restore with the configuration that it was taken from")]
    Missing(String),
    /// State that nobody asked for.
    #[error(
        "the snapshot has state of `{0}`, which this VM does not have: restore with the configuration that it was taken from"
    )]
    LeftOver(String),
    /// The same component twice.
    #[error("the snapshot has state of `{0}` twice: it is damaged; take it anew")]
    Twice(String),
    /// State of another kind of component.
    #[error(
        "`{component}` was saved as `{found}` and is now `{expected}`: restore with the configuration that it was taken from"
    )]
    Kind {
        /// Whose.
        component: String,
        /// What is in the file.
        found: String,
        /// What was asked for.
        expected: &'static str,
    },
    /// A file of checksums that is none.
    #[error("the file of checksums is damaged: {why}")]
    Sums {
        /// What is wrong with it.
        why: &'static str,
    },
    /// A schema version that this program cannot read.
    #[error(
        "`{kind}` was saved in version {found}, this program reads up to version {known}: use the program that wrote it"
    )]
    Version {
        /// The schema.
        kind: String,
        /// What is in the file.
        found: u32,
        /// What is known.
        known: u32,
    },
    /// The payload is no such state.
    #[error(
        "the saved `{kind}` cannot be read ({}): the snapshot is damaged; take it anew",
        source.to_string().escape_debug()
    )]
    Payload {
        /// The schema.
        kind: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// The state has no form in a file; a bug.
    #[error("the state of `{kind}` cannot be written: {source}")]
    Write {
        /// The schema.
        kind: &'static str,
        /// Why.
        source: serde_json::Error,
    },
    /// An engine that can do less.
    #[error(
        "this host's KVM lacks capabilities ({0:#x}) that the snapshot was taken with: restore it on a host with a newer kernel"
    )]
    Capabilities(u64),
    /// Another host or program.
    #[error(
        "the snapshot was taken with another {what} ({saved}; here {here}) and cannot be restored: use a host and a program like those it was taken with"
    )]
    Fingerprint {
        /// What differs.
        what: &'static str,
        /// In the snapshot.
        saved: String,
        /// Here.
        here: String,
    },
}
