//! Extended attributes `user.e2b.NAME`: what a client has noted about a file. Others are neither shown nor touched.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr, lgetxattr, llistxattr, setxattr};
use rustix::io::Errno;

use super::failure::{Result, failed, invalid};

/// What the names begin with.
const PREFIX: &str = "user.e2b.";

/// The most that is shown of a file's: more would not fit into a message beside others.
const MOST: usize = 64 << 10;

/// Room for the names that most files have.
const FEW: usize = 512;

/// A file's, by descriptor or by path; none where the file system has no such thing, or they cannot be read.
pub(super) enum Of<'a> {
    /// Of what is open.
    Open(&'a File),
    /// Of what is at a path; a link has none.
    At(&'a Path),
}

impl Of<'_> {
    fn names(&self) -> std::result::Result<Vec<String>, Errno> {
        let mut list = vec![0; FEW];
        let mut result = self.list(&mut list);
        if result == Err(Errno::RANGE) {
            // `XATTR_LIST_MAX`.
            list.resize(64 << 10, 0);
            result = self.list(&mut list);
        }
        list.truncate(result?);
        let names = list
            .split(|byte| *byte == 0)
            .filter_map(|name| str::from_utf8(name).ok());
        let ours = names.filter(|name| name.starts_with(PREFIX) && name.len() > PREFIX.len());
        Ok(ours.map(str::to_owned).collect())
    }

    fn list(&self, space: &mut [u8]) -> std::result::Result<usize, Errno> {
        match self {
            Self::Open(file) => flistxattr(file, space),
            Self::At(path) => llistxattr(*path, space),
        }
    }

    fn value(&self, name: &str, space: &mut [u8]) -> std::result::Result<usize, Errno> {
        match self {
            Self::Open(file) => fgetxattr(file, name, space),
            Self::At(path) => lgetxattr(*path, name, space),
        }
    }

    /// What they are, without the prefix. What is no text is shown as well as can be.
    pub(super) fn read(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        let names = self.names().unwrap_or_default();
        if names.is_empty() {
            return all;
        }
        let (mut value, mut left) = (vec![0; MOST], MOST);
        for name in names {
            let Ok(length) = self.value(&name, &mut value) else {
                continue;
            };
            let text = String::from_utf8_lossy(value.get(..length).unwrap_or_default()).into_owned();
            let Some(rest) = left.checked_sub(name.len() + text.len()) else {
                break;
            };
            left = rest;
            all.insert(name.get(PREFIX.len()..).unwrap_or_default().to_owned(), text);
        }
        all
    }
}

/// An attribute's whole name.
fn whole(name: &str) -> Result<CString> {
    let whole = CString::new(format!("{PREFIX}{name}")).ok();
    whole
        .filter(|_| !name.is_empty())
        .ok_or_else(|| invalid(format!("{name:?} cannot be the name of an extended attribute")))
}

/// Has the file have these and no others. Where nothing is wanted, a file system that has no such thing will do.
pub(super) fn replace(file: &File, path: &Path, wanted: &BTreeMap<String, String>) -> Result<()> {
    let there = match Of::Open(file).names() {
        Err(Errno::OPNOTSUPP) if wanted.is_empty() => return Ok(()),
        Err(Errno::OPNOTSUPP) => return Err(unsupported(path)),
        names => names.map_err(failed("listing the extended attributes of", path))?,
    };
    for (name, value) in wanted {
        match fsetxattr(file.as_fd(), whole(name)?, value.as_bytes(), XattrFlags::empty()) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => return Err(unsupported(path)),
            Err(error) => {
                return Err(failed(&format!("setting the extended attribute {name:?} of"), path)(
                    error,
                ));
            }
        }
    }
    for name in there {
        if !wanted.contains_key(name.get(PREFIX.len()..).unwrap_or_default()) {
            let removed = fremovexattr(file.as_fd(), &*name);
            removed.map_err(failed("removing an extended attribute of", path))?;
        }
    }
    Ok(())
}

fn unsupported(path: &Path) -> agent_api::RequestFailure {
    invalid(format!(
        "{}: its file system has no extended attributes, so a file there can have no metadata; write it without, or \
         elsewhere",
        path.display()
    ))
}

/// Gives a copy what the original has, where its file system has such a thing.
pub(super) fn copy(all: &BTreeMap<String, String>, to: &Path) -> Result<()> {
    for (name, value) in all {
        match setxattr(to, whole(name)?, value.as_bytes(), XattrFlags::empty()) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) => break,
            Err(error) => return Err(failed("setting an extended attribute of", to)(error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_can_be_none_are_told() {
        assert_eq!(whole("a b").unwrap(), c"user.e2b.a b".to_owned());
        for name in ["", "a\0b"] {
            assert!(whole(name).is_err());
        }
    }
}
