//! Input that may never come: waited for only until a signal ends the work. Knows nothing of what is read.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use registry::Cancel;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// How often is looked whether a signal came.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// A file, pipe or socket that is read.
#[derive(Debug)]
pub(super) struct Watched {
    file: File,
    cancel: Cancel,
}

impl Watched {
    pub(super) fn new(fd: OwnedFd, cancel: &Cancel) -> Self {
        Self {
            file: fd.into(),
            cancel: cancel.clone(),
        }
    }

    pub(super) fn of_stdin(cancel: &Cancel) -> Result<Self> {
        let stdin = io::stdin().as_fd().try_clone_to_owned();
        Ok(Self::new(stdin.context("standard input cannot be used")?, cancel))
    }
}

impl Read for Watched {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.cancel.is_cancelled() {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "interrupted"));
            }
            match poll(&mut [PollFd::new(&self.file, PollFlags::IN)], Some(&LOOK)) {
                Ok(0) | Err(Errno::INTR) => (),
                Ok(_) => return self.file.read(space),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
