//! How the system's errors become failures that have a name. Knows no request.

use std::io;
use std::path::Path;

use agent_api::{RequestFailure, RequestFailureKind};

/// What a request about files comes to.
pub(super) type Result<T> = std::result::Result<T, RequestFailure>;

/// A failed system call, with what it was for.
pub(super) fn failed<E: Into<io::Error>>(what: &str, path: &Path) -> impl FnOnce(E) -> RequestFailure + use<E> {
    let what = format!("{what} {}", path.display());
    move |error| {
        let error = error.into();
        RequestFailure {
            kind: kind(&error),
            message: format!("{what}: {error}"),
        }
    }
}

/// Something that cannot be.
pub(super) fn invalid(message: String) -> RequestFailure {
    RequestFailure {
        kind: RequestFailureKind::Invalid,
        message,
    }
}

/// Something is there and is no directory.
pub(super) fn not_a_directory(path: &Path) -> RequestFailure {
    RequestFailure {
        kind: RequestFailureKind::NotADirectory,
        message: format!("{} is no directory", path.display()),
    }
}

/// A failure of a copy from one file system to another.
pub(super) fn of_archive(error: &archive::Error) -> RequestFailure {
    let kind = match error {
        archive::Error::File { cause, .. } => kind(cause),
        archive::Error::Special(_) | archive::Error::TooDeep(_) => RequestFailureKind::Invalid,
        _ => RequestFailureKind::Other,
    };
    RequestFailure {
        kind,
        message: format!("moving to another file system: {error}"),
    }
}

/// Nothing is there, or not any more.
pub(super) fn is_gone(failure: &RequestFailure) -> bool {
    matches!(
        failure.kind,
        RequestFailureKind::NotFound | RequestFailureKind::NotADirectory
    )
}

fn kind(error: &io::Error) -> RequestFailureKind {
    match error.raw_os_error() {
        Some(libc::ENOENT) => RequestFailureKind::NotFound,
        Some(libc::EEXIST | libc::ENOTEMPTY) => RequestFailureKind::AlreadyExists,
        Some(libc::ENOTDIR) => RequestFailureKind::NotADirectory,
        Some(libc::EISDIR) => RequestFailureKind::IsADirectory,
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => RequestFailureKind::PermissionDenied,
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => RequestFailureKind::NoSpace,
        Some(libc::EINVAL | libc::ENAMETOOLONG | libc::ELOOP | libc::EOPNOTSUPP | libc::ERANGE | libc::E2BIG) => {
            RequestFailureKind::Invalid
        }
        _ => RequestFailureKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_kinds_that_clients_tell_apart() {
        for (number, kind) in [
            (libc::ENOENT, RequestFailureKind::NotFound),
            (libc::ENOTEMPTY, RequestFailureKind::AlreadyExists),
            (libc::EROFS, RequestFailureKind::PermissionDenied),
            (libc::EDQUOT, RequestFailureKind::NoSpace),
            (libc::ELOOP, RequestFailureKind::Invalid),
            (libc::EIO, RequestFailureKind::Other),
        ] {
            let failure = failed("reading", Path::new("/a"))(io::Error::from_raw_os_error(number));
            assert_eq!(failure.kind, kind);
            assert!(failure.message.starts_with("reading /a: "), "{failure}");
        }
    }
}
