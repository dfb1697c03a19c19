//! The names in a directory, in little memory: a guest has directories with a million of them. Knows nothing of what they are.

use std::ffi::{CStr, OsStr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{CWD, Dir, Mode, OFlags, openat};
use rustix::io::Errno;

/// How a directory is opened.
pub(super) const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The most bytes of one directory's names: more are of a file system that never ends.
const MOST_BYTES: usize = 64 << 20;

/// Names, one behind the other, each with a zero.
#[derive(Debug, Default)]
pub(super) struct Names {
    bytes: Vec<u8>,
    /// Where each begins. What was taken is not in it any more.
    starts: Vec<usize>,
}

impl Names {
    /// Those in a directory, to be taken in order; `None` if there are more than `most`. `flags` says whether a link at the path's end is
    /// followed.
    pub(super) fn read(path: &Path, flags: OFlags, most: usize) -> Result<Option<Self>, Errno> {
        let directory = openat(CWD, path, DIRECTORY | flags, Mode::empty())?;
        let mut names = Self::default();
        for name in entries(directory)? {
            if names.starts.len() >= most || names.bytes.len() > MOST_BYTES {
                return Ok(None);
            }
            names.push(name?.file_name());
        }
        let Self { bytes, starts } = &mut names;
        // The last is taken first.
        starts.sort_unstable_by(|a, b| at(bytes, *b).cmp(at(bytes, *a)));
        Ok(Some(names))
    }

    /// One more.
    pub(super) fn push(&mut self, name: &CStr) {
        self.starts.push(self.bytes.len());
        self.bytes.extend_from_slice(name.to_bytes_with_nul());
    }

    /// Takes the next one.
    pub(super) fn take(&mut self) -> Option<&OsStr> {
        let start = self.starts.pop()?;
        Some(OsStr::from_bytes(at(&self.bytes, start)))
    }

    /// How many are left.
    pub(super) fn len(&self) -> usize {
        self.starts.len()
    }
}

fn at(bytes: &[u8], start: usize) -> &[u8] {
    let rest = bytes.get(start..).unwrap_or_default();
    rest.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// What is in a directory, but for itself and the one above.
pub(super) fn entries(directory: OwnedFd) -> Result<impl Iterator<Item = Result<rustix::fs::DirEntry, Errno>>, Errno> {
    let is_other = |name: &CStr| name != c"." && name != c"..";
    let all = Dir::new(directory)?;
    Ok(all.filter(move |entry| entry.as_ref().map_or(true, |entry| is_other(entry.file_name()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_in_order_and_are_bounded() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b", "a", "aa", "B", "."] {
            drop(std::fs::write(directory.path().join(name), ""));
        }
        let mut names = Names::read(directory.path(), OFlags::empty(), 4).unwrap().unwrap();
        assert_eq!(names.len(), 4);
        let taken: Vec<_> = std::iter::from_fn(|| names.take().map(OsStr::to_owned)).collect();
        assert_eq!(taken, ["B", "a", "aa", "b"]);
        assert!(Names::read(directory.path(), OFlags::empty(), 3).unwrap().is_none());
    }
}
