//! The thread that keeps rights to files while the rest of its process gives up all: what is left to it, and how it ends
//! beneath a few directories. Knows neither what it does there nor who asked for it.

use std::os::fd::{AsFd, OwnedFd};

use rustix::thread::CapabilitySet;

use super::{give_up_capabilities, landlock};
use crate::Error;

/// What whoever makes files for others needs: to give them to their owners, to go where those may go, and to keep bits
/// that only owners may set. Device nodes, mounts and everything that is no file stay out.
const FILES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID);

/// Gives up all of this thread's capabilities but those to files, which reach as far as its user namespace does. For the
/// thread that [`super::enter`] lets its caller set aside; threads that it makes have the same.
///
/// # Errors
/// [`Error::Confine`].
pub fn keep_files() -> Result<(), Error> {
    give_up_capabilities(FILES)
}

/// From now on this thread, and those that it makes, open files beneath these directories only. `None` where the kernel
/// has no landlock, or one from before Linux 5.19, beneath which nothing could be moved from one directory to another.
///
/// # Errors
/// [`Error::Confine`].
pub fn enclose_files(directories: &[OwnedFd]) -> Result<Option<u32>, Error> {
    let beneath: Vec<_> = directories
        .iter()
        .map(|directory| (directory.as_fd(), landlock::FS_BENEATH))
        .collect();
    landlock::deny_all_but(&beneath)
}
