//! The names of the daemon's sockets in the state directory: whoever deletes one leaves a daemon that nobody reaches, so each is looked
//! for now and then and made again. Does not know what is spoken there.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use base::{Epoll, Interest};
use observe::Repeated;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// How often a name is looked for. Shorter than a second daemon, which somebody starts who found none, waits for the state directory.
pub(crate) const LOOK: Duration = Duration::from_secs(2);

/// How often the same is said of one.
const REPORTED: Duration = Duration::from_secs(60);

/// Whether nothing has this name any more.
pub(crate) fn is_missing(path: &Path) -> bool {
    matches!(path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// What is said of one socket, whoever deletes it as often as it is looked for.
#[derive(Debug)]
pub(crate) struct Report {
    made: Repeated,
    not_made: Repeated,
}

impl Report {
    pub(crate) const fn new() -> Self {
        Self {
            made: Repeated::new(REPORTED),
            not_made: Repeated::new(REPORTED),
        }
    }

    /// Says that `path` was made again, or why it was not.
    pub(crate) fn say(&self, path: &Path, made: Result<(), &io::Error>) {
        let path = path.display();
        match made {
            Ok(()) => self
                .made
                .say(|more| log::warn!("the socket {path} had been deleted and was made again{more}")),
            Err(error) => self
                .not_made
                .say(|more| log::error!("the socket {path} has been deleted and cannot be made again: {error}{more}")),
        }
    }
}

/// The daemon's own socket, which listens at `path` for root, and for a group if there is one.
pub(crate) fn listen(path: &Path, group: Option<u32>) -> io::Result<OwnedFd> {
    // The state directory's lock is ours, so whatever is there is stale.
    remove(path)?;
    let directory = node_api::client::directory(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &node_api::client::address(path, &directory)?)?;
    open_to(path, group)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Whoever may ask can become root by it: this user, and a group if there is one. Somebody who may write to the directory may have put
/// something else in its place, which stays as it is.
fn open_to(path: &Path, group: Option<u32>) -> io::Result<()> {
    use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags};
    use std::os::fd::AsRawFd;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let name = rustix::fs::open(path, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&name)?.st_mode) != FileType::Socket {
        return Err(io::Error::other("something else has taken the socket's place"));
    }
    let mode = match group {
        Some(group) => {
            rustix::fs::chownat(&name, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?;
            0o660
        }
        None => 0o600,
    };
    let held = Path::new("/proc/self/fd").join(name.as_raw_fd().to_string());
    fs::set_permissions(held, std::os::unix::fs::PermissionsExt::from_mode(mode))
}

/// Listens on a new socket with the name of the one that was deleted, `old`, and no more on that.
pub(crate) fn listen_again(
    path: &Path,
    group: Option<u32>,
    (epoll, token): (&Epoll, u64),
    old: &OwnedFd,
    report: &Report,
) -> Option<OwnedFd> {
    let made = listen(path, group).and_then(|socket| {
        epoll.add(&socket, token, Interest::READ)?;
        epoll.remove(old)?;
        Ok(socket)
    });
    report.say(path, made.as_ref().map(drop));
    made.ok()
}

/// Removes a socket's name; it is fine if there is none.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
