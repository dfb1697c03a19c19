//! What is said where the host has no space left: how much is needed, how much there is, where, and what to do.

use std::io;
use std::path::{Path, PathBuf};

use base::{ByteSize, space};
use rusqlite::ErrorCode;

use crate::Error;

/// The index of the database's log of changes could not be made larger: SQLite has no code of its own for why.
const INDEX_SIZE: i32 = rusqlite::ffi::SQLITE_IOERR_SHMSIZE;

/// The host has no space left.
#[derive(Debug, thiserror::Error)]
pub enum Lacking {
    /// For what is to be made, of which nothing is there yet.
    #[error(
        "no space left for {what}: {needed} needed, {free} free in {}; remove what is not needed (`basalt prune`; `basalt system df` \
         shows what takes how much)", .path.display()
    )]
    Before {
        /// What is to be made.
        what: &'static str,
        /// How much it takes.
        needed: ByteSize,
        /// How much there is.
        free: ByteSize,
        /// Where.
        path: PathBuf,
    },
    /// For what was being written.
    #[error(
        "no space left to {operation} {}: {cause}, {free} free; remove what is not needed (`basalt prune`; `basalt system df` shows \
         what takes how much)", .path.display()
    )]
    Amid {
        /// What was tried.
        operation: &'static str,
        /// Where.
        path: PathBuf,
        /// How much is free now.
        free: ByteSize,
        /// What the system said.
        cause: io::Error,
    },
    /// For what a sandbox writes, which its VMM has stopped.
    #[error(
        "sandbox {0} is paused, as there is no space left on the host for what it writes to its disk: remove what is not needed \
         (`basalt prune`; `basalt system df` shows what takes how much), and it goes on by itself"
    )]
    Stopped(String),
}

impl Lacking {
    /// An operation on the file at `path` has failed.
    pub(crate) fn written(operation: &'static str, path: PathBuf, cause: io::Error) -> Self {
        let directory = path.ancestors().find(|path| path.is_dir());
        let free = directory.and_then(|directory| space::available(directory).ok());
        Self::Amid {
            operation,
            free: ByteSize(free.unwrap_or(0)),
            path,
            cause,
        }
    }
}

/// The file system is full, or a quota is used up.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl Error {
    /// An operation on a file has failed, maybe for want of space.
    pub(crate) fn file<E: Into<io::Error>>(operation: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_owned();
        move |cause| match cause.into() {
            cause if is_full(&cause) => Lacking::written(operation, path, cause).into(),
            cause => Self::File { operation, path, cause },
        }
    }

    /// The host has no space left for what was to be written.
    pub(crate) fn is_no_space(&self) -> bool {
        match self {
            Self::Space(_) | Self::Image(image::Error::NoSpace { .. } | image::Error::NoRoom { .. }) => true,
            Self::Host { cause, .. } => is_full(cause),
            Self::Database { cause, .. } => {
                let code = cause.sqlite_error().map(|error| error.extended_code);
                cause.sqlite_error_code() == Some(ErrorCode::DiskFull) || code == Some(INDEX_SIZE)
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_api::ErrorKind;

    #[test]
    fn a_full_file_system_is_named_with_what_is_free_and_the_next_step() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("missing/record.json");
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let error = Error::file("write", &path)(full);
        let text = error.to_string();
        for part in [
            "no space left to write",
            "record.json",
            " free; remove",
            "`basalt prune`",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(error.is_no_space() && !text.contains(" 0 free"), "{text}");
        assert_eq!((error.reason(), error.for_api().kind), ("no-space", ErrorKind::Host));
        let other = Error::file("write", &path)(io::Error::from(io::ErrorKind::NotFound));
        assert!(!other.is_no_space(), "{other}");
        let stopped = Error::from(Lacking::Stopped("web".into()));
        assert_eq!(stopped.for_api().kind, ErrorKind::WrongState);
    }
}
