//! The network namespace that all jails of this process share: it is empty, and nobody in it may change it, as it belongs to
//! the host's user namespace. One for each would cost 150 KiB of the kernel's memory and milliseconds of its time. Does not
//! know what is started there.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::thread::Builder;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

static NOWHERE: OnceLock<OwnedFd> = OnceLock::new();

/// It, made if there is none yet; it is gone with this process and the last one that was started in it.
fn namespace() -> io::Result<BorrowedFd<'static>> {
    if let Some(namespace) = NOWHERE.get() {
        return Ok(namespace.as_fd());
    }
    let made = aside(|| -> io::Result<OwnedFd> {
        // SAFETY: the descriptor table stays shared; only this thread moves.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(
            CWD,
            "/proc/thread-self/ns/net",
            flags,
            Mode::empty(),
        )?)
    })??;
    Ok(NOWHERE.get_or_init(|| made).as_fd())
}

/// Does something there, on a thread of its own: this one stays where it is.
///
/// # Errors
/// There is no such namespace to be had: rights or a thread are wanting.
pub(super) fn run<T: Send>(job: impl FnOnce() -> T + Send) -> io::Result<T> {
    let namespace = namespace()?;
    aside(|| {
        move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
        Ok(job())
    })?
}

fn aside<T: Send>(job: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = Builder::new().name("jail".into()).spawn_scoped(scope, job)?;
        thread.join().map_err(|_| io::Error::other("the thread panicked"))
    })
}
