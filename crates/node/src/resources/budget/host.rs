//! What the host has of memory, disk and descriptors: the few numbers that admission needs, behind a trait, so that tests can have
//! another host. Counts nothing itself.

use std::fmt;
use std::io;
use std::path::Path;

use base::ByteSize;
use host::MemInfo;

/// A file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// All of it, in bytes.
    pub size: u64,
    /// What may still be written.
    pub free: u64,
}

/// What a host has.
pub trait HostNumbers: fmt::Debug + Send + Sync {
    /// Its memory.
    ///
    /// # Errors
    /// It cannot be read.
    fn memory(&self) -> io::Result<MemInfo>;

    /// The memory that basalt.ko keeps for guests whose memory is not translated; `None` where there is no such module.
    fn reserved_memory(&self) -> Option<ByteSize>;

    /// The file system that `path` is on.
    ///
    /// # Errors
    /// It cannot be looked at.
    fn space(&self, path: &Path) -> io::Result<Space>;

    /// How many descriptors this process may have.
    fn descriptors(&self) -> u64;
}

/// The host that this process runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThisHost;

impl HostNumbers for ThisHost {
    fn memory(&self) -> io::Result<MemInfo> {
        MemInfo::read()
    }

    fn reserved_memory(&self) -> Option<ByteSize> {
        let device = reservation::Device::open(reservation::Device::PATH).ok()?;
        let reserved = device.reserved_memory();
        // Whoever needs it asks the module for it, and is told what is wrong with that.
        let reserved = reserved.inspect_err(|error| log::info!("what memory is reserved is not known: {error}"));
        Some(ByteSize(reserved.ok()?.total))
    }

    fn space(&self, path: &Path) -> io::Result<Space> {
        let found = rustix::fs::statvfs(path)?;
        Ok(Space {
            size: found.f_blocks.saturating_mul(found.f_frsize),
            free: found.f_bavail.saturating_mul(found.f_frsize),
        })
    }

    fn descriptors(&self) -> u64 {
        base::open_files::limit()
    }
}
