//! What can go wrong with a copy.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Why a tree could not be packed or unpacked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of this side.
    #[error("{what} {} failed: {cause}", path.display())]
    File {
        /// What was tried, such as `reading`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// The stream broke, or is no tar.
    #[error("the stream of files cannot be read: {0}")]
    Stream(#[source] io::Error),
    /// Whoever takes the stream does not.
    #[error("the stream of files cannot be written: {0}")]
    Sink(#[source] io::Error),
    /// The stream ends too early.
    #[error("the stream of files ends in the middle of {}", .0.display())]
    Truncated(PathBuf),
    /// A name that leads out of the destination.
    #[error("{} leads out of the destination, so it was not written and the copy was ended there", .0.display())]
    Outside(PathBuf),
    /// A directory where a file is to be, or the other way round.
    #[error("{} is {there} and cannot become {wanted}: remove it first, or copy to another place", path.display())]
    InTheWay {
        /// Where.
        path: PathBuf,
        /// What is there.
        there: &'static str,
        /// What was to be there.
        wanted: &'static str,
    },
    /// Too many levels of directories.
    #[error("{} lies deeper than {} directories", .0.display(), crate::MAX_DEPTH)]
    TooDeep(PathBuf),
    /// A kind of file that is not copied.
    #[error("{} is a device, pipe or socket, which are not copied", .0.display())]
    Special(PathBuf),
    /// Nothing was in the stream.
    #[error("the stream of files is empty")]
    Empty,
}

impl Error {
    pub(crate) fn file(what: &'static str, path: &Path) -> impl FnOnce(Errno) -> Self {
        let path = path.to_owned();
        move |errno| Self::File {
            what,
            path,
            cause: errno.into(),
        }
    }

    /// The other end has gone: what it says, if it says anything, is the better explanation.
    pub fn is_of_stream(&self) -> bool {
        matches!(self, Self::Stream(_) | Self::Sink(_) | Self::Truncated(_))
    }
}
