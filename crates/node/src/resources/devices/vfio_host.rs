//! Linux's VFIO as the node needs it: files that a VMM is given, and the right to lock memory. Knows no sandbox.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

use base::PciAddress;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use vfio::VfioError;
use vfio::host::Sysfs;

/// What of the host a device's way into a VMM needs.
pub(crate) trait VfioHost: fmt::Debug + Send + Sync {
    /// An empty container.
    fn container(&self) -> Result<OwnedFd, VfioError>;

    /// A function's group.
    fn group(&self, address: PciAddress) -> Result<OwnedFd, VfioError>;

    /// Lets a process lock so many bytes of memory, if it may not lock more.
    fn allow_locking(&self, process: i32, bytes: u64) -> io::Result<()>;
}

/// Linux's VFIO.
#[derive(Debug)]
pub(crate) struct ThisVfio;

impl VfioHost for ThisVfio {
    fn container(&self) -> Result<OwnedFd, VfioError> {
        vfio::host::open_container()
    }

    fn group(&self, address: PciAddress) -> Result<OwnedFd, VfioError> {
        vfio::host::open_group(&Sysfs::of_host(), address)
    }

    fn allow_locking(&self, process: i32, bytes: u64) -> io::Result<()> {
        let process = Pid::from_raw(process);
        let before = prlimit(process, Resource::Memlock, limit(Some(bytes), Some(bytes)))?;
        // What was more, or none, stays so.
        let most = |before: Option<u64>| before.map(|before| before.max(bytes));
        prlimit(
            process,
            Resource::Memlock,
            limit(most(before.current), most(before.maximum)),
        )?;
        Ok(())
    }
}

fn limit(current: Option<u64>, maximum: Option<u64>) -> Rlimit {
    Rlimit { current, maximum }
}
