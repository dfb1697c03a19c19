//! What can be wrong with an export, or on the way to and from one.

use std::io;

/// Why an export could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It begins like something else.
    #[error("it is no {kind} file: give one that `basalt {kind} save` wrote")]
    Foreign {
        /// What was wanted.
        kind: String,
    },
    /// Of something else that there are exports of.
    #[error("it is a {found} file and no {wanted} file: `basalt {found} load` reads it")]
    OtherKind {
        /// What was wanted.
        wanted: String,
        /// What it is, one of [`crate::KINDS`].
        found: &'static str,
    },
    /// Of another time.
    #[error(
        "it has layout {found}, and this Basalt reads layout {}: use the version that wrote it",
        crate::FORMAT
    )]
    Format {
        /// Its version.
        found: u32,
    },
    /// Not all of it is there.
    #[error("it ends too early: copy it once more, or save it again")]
    Truncated,
    /// Not what was written.
    #[error("it is damaged ({0}): copy it once more, or save it again")]
    Damaged(String),
    /// More than there may be.
    #[error("its member {name} has {found} bytes where {most} are the most: it was not written by Basalt")]
    TooLarge {
        /// The member.
        name: String,
        /// Its size.
        found: u64,
        /// What it may have.
        most: u64,
    },
    /// The other side of the stream.
    #[error("the stream failed: {0}")]
    Stream(#[source] io::Error),
    /// A file that is packed or unpacked.
    #[error("{what} {name} failed: {cause}")]
    File {
        /// What was done to it.
        what: &'static str,
        /// Its name in the export.
        name: String,
        /// What the system said.
        cause: io::Error,
    },
}

impl Error {
    pub(crate) fn file(what: &'static str, name: &str) -> impl FnOnce(io::Error) -> Self {
        let name = name.to_owned();
        move |cause| Self::File { what, name, cause }
    }

    pub(crate) fn damaged(why: impl Into<String>) -> Self {
        Self::Damaged(why.into())
    }

    /// What a decoder's error means: its own are those of damaged input.
    pub(crate) fn decoding(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Truncated,
            io::ErrorKind::Other | io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput
                if error.raw_os_error().is_none() =>
            {
                Self::Damaged(error.to_string())
            }
            _ => Self::Stream(error),
        }
    }

    /// The same, where a writer has told of both sides.
    pub(crate) fn passing(self) -> Self {
        match self {
            Self::Stream(error) => Self::decoding(error),
            other => other,
        }
    }

    /// The disk has no room.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::File { cause, .. } | Self::Stream(cause) => {
                matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            _ => false,
        }
    }
}
