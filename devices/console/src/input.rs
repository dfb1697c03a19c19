//! Where the guest's input comes from. Read only when the guest has a buffer; at its end it is closed. Knows no queue.

use std::io;
use std::os::fd::OwnedFd;

use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice};

/// A descriptor that does not block.
#[derive(Debug)]
pub(crate) struct Input {
    fd: Option<OwnedFd>,
    /// A read would not block, as far as is known.
    ready: bool,
}

impl Input {
    /// Reads from `fd`, which does not block.
    pub(crate) fn new(fd: Option<OwnedFd>) -> Self {
        Self { fd, ready: false }
    }

    /// Whether to read.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready && self.fd.is_some()
    }

    /// There is something, or it cannot be known without reading.
    pub(crate) fn set_ready(&mut self) {
        self.ready = true;
    }

    /// What to wait for, if there is anything to wait for.
    pub(crate) fn awaited(&self) -> Option<&OwnedFd> {
        self.fd.as_ref().filter(|_| !self.ready)
    }

    /// The descriptor, until its end.
    pub(crate) fn fd(&self) -> Option<&OwnedFd> {
        self.fd.as_ref()
    }

    /// Whether nothing will come any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.fd.is_none()
    }

    /// Reads into guest memory. Zero: not now, or never again.
    pub(crate) fn read(&mut self, room: &mut VolatileSlice<'_>) -> usize {
        let Some(mut fd) = self.fd.as_ref() else { return 0 };
        match ReadVolatile::read_volatile(&mut fd, room) {
            Ok(0) => {
                log::debug!("the console's input has ended");
                self.fd = None;
                0
            }
            Ok(count) => count,
            Err(VolatileMemoryError::IOError(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                self.ready = false;
                0
            }
            Err(VolatileMemoryError::IOError(error)) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => {
                // A terminal that was closed gives EIO instead of an end.
                log::info!("the console's input has ended: {error}");
                self.fd = None;
                0
            }
        }
    }
}
