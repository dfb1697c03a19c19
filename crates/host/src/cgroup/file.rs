//! A cgroup's directory and the small files in it, reached from an open descriptor. Does not know what they mean.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::Error;

/// More than any of the files that are read here holds for one sandbox.
const MOST: usize = 1 << 20;

/// An open directory of the hierarchy.
#[derive(Debug)]
pub(super) struct Directory {
    fd: OwnedFd,
    path: PathBuf,
}

impl Directory {
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| Error::Cgroup {
            operation: "opening",
            path: path.to_owned(),
            cause: error.into(),
        })?;
        Ok(Self {
            fd,
            path: path.to_owned(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A subdirectory, if it is there.
    pub(super) fn child(&self, name: &str) -> Result<Option<Self>, Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat(self, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Self {
                fd,
                path: self.path.join(name),
            })),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(self.failed("opening", name, error)),
        }
    }

    pub(super) fn children(&self) -> Result<Vec<String>, Error> {
        super::children(self)
    }

    pub(super) fn remove_child(&self, name: &str) -> Result<(), Error> {
        super::remove_child(self, name)
    }

    pub(super) fn open_file(&self, name: &str, flags: OFlags) -> Result<OwnedFd, Error> {
        rustix::fs::openat(self, name, flags | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| self.failed("opening", name, error))
    }

    pub(super) fn write(&self, name: &str, text: &str) -> Result<(), Error> {
        let file = self.open_file(name, OFlags::WRONLY)?;
        match rustix::io::write(&file, text.as_bytes()) {
            Ok(count) if count == text.len() => Ok(()),
            Ok(_) => Err(self.failed("writing", name, Errno::IO)),
            Err(error) => Err(self.failed("writing", name, error)),
        }
    }

    pub(super) fn read(&self, name: &str) -> Result<String, Error> {
        let file = self.open_file(name, OFlags::RDONLY)?;
        self.read_open(&file, name)
    }

    /// A file that only a controller brings: `None` without it.
    pub(super) fn read_if_there(&self, name: &str) -> Result<Option<String>, Error> {
        match rustix::fs::openat(self, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => self.read_open(&file, name).map(Some),
            Err(Errno::NOENT) if self.is_there() => Ok(None),
            Err(error) => Err(self.failed("opening", name, error)),
        }
    }

    /// A removed cgroup has no files at all; every other has this one.
    fn is_there(&self) -> bool {
        rustix::fs::statat(self, "cgroup.procs", rustix::fs::AtFlags::empty()).is_ok()
    }

    /// Reads an open file from its beginning.
    pub(super) fn read_open(&self, file: &OwnedFd, name: &str) -> Result<String, Error> {
        let mut bytes = Vec::new();
        let mut part = [0; 4096];
        while bytes.len() < MOST {
            let count = rustix::io::pread(file, &mut part, bytes.len() as u64)
                .map_err(|error| self.failed("reading", name, error))?;
            if count == 0 {
                break;
            }
            bytes.extend_from_slice(part.get(..count).unwrap_or_default());
        }
        String::from_utf8(bytes).map_err(|_| self.bad(name, "bytes that are no text"))
    }

    /// Whether one word of a file is this one.
    pub(super) fn lists(&self, name: &str, word: &str) -> Result<bool, Error> {
        Ok(self.read(name)?.split_whitespace().any(|found| found == word))
    }

    /// A number of a file of `key number` lines, asked as a flag.
    pub(super) fn flag(&self, name: &str, key: &str) -> Result<bool, Error> {
        let file = self.open_file(name, OFlags::RDONLY)?;
        self.flag_of(&file, name, key)
    }

    pub(super) fn flag_of(&self, file: &OwnedFd, name: &str, key: &str) -> Result<bool, Error> {
        let text = self.read_open(file, name)?;
        match keyed(&text, key) {
            Some(value) => Ok(value != 0),
            None => Err(self.bad(name, &text)),
        }
    }

    pub(super) fn failed(&self, operation: &'static str, name: &str, error: Errno) -> Error {
        Error::Cgroup {
            operation,
            path: self.path.join(name),
            cause: error.into(),
        }
    }

    pub(super) fn bad(&self, name: &str, text: &str) -> Error {
        Error::Format {
            path: self.path.join(name),
            text: text.chars().take(80).collect(),
        }
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The number beside `key` in lines of `key number`.
pub(super) fn keyed(text: &str, key: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
    line.trim().parse().ok()
}

/// rmdir by path; it is fine if there is nothing.
pub(super) fn remove(path: &Path) -> Result<(), Error> {
    match std::fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(|cause| Error::Cgroup {
            operation: "removing",
            path: path.to_owned(),
            cause,
        }),
    }
}
