//! How much room a file system has. Knows nothing of what is to be written.

use std::io;
use std::path::Path;

/// Bytes that can be written to the file system of `path` without the privileges of root.
///
/// # Errors
/// There is nothing at `path`, or it cannot be reached.
pub fn available(path: &Path) -> io::Result<u64> {
    let told = rustix::fs::statvfs(path)?;
    Ok(told.f_bavail.saturating_mul(told.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_told_of_what_is_there_alone() {
        let directory = tempfile::tempdir().unwrap();
        assert!(available(directory.path()).unwrap() > 0);
        let error = available(&directory.path().join("nothing")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
