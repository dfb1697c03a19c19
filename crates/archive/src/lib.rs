//! File trees as tar streams. Both sides of a copy are here: [`pack`] walks a tree without following links, [`unpack`] writes
//! beneath one directory, whatever the stream says. Whoever made a stream is not trusted: names with `..`, links that lead out,
//! devices and headers without end do no harm.
//!
//! Does not know who sends a stream to whom, nor what is at its two ends: a guest, a host, a pipe.

mod error;
mod holes;
mod pack;
mod place;
mod unpack;

#[cfg(test)]
mod tests;

pub use error::Error;
pub use pack::{Measured, Packed, measure, pack};
pub use place::Target;
pub use unpack::{Owner, Unpacked, unpack};

/// The name of a tree's root in a stream that is meant for [`Target::Root`]: the receiver decides what it is called.
pub const ROOT: &str = "root";

/// What lies in a directory deeper than this is not copied: a copy holds one descriptor for each level.
pub(crate) const MAX_DEPTH: usize = 200;
