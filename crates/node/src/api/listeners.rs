//! The sockets that the daemon listens on, and for whom each is: made, made again when somebody deletes one, removed at the end. Does not
//! know what is asked there.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use base::{Epoll, Interest};
use rustix::net::{SocketFlags, SocketType};

use crate::Error;
use crate::api::scope::Scope;
use crate::socket_file::{self, Report};

/// A socket that is listened on.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Who may connect besides this process's user.
    group: Option<u32>,
    /// What may be asked there.
    pub(super) scope: Scope,
    /// Its name belongs to a service manager, which listens on when this daemon has ended.
    inherited: bool,
    /// Said as long as somebody deletes it.
    deleted: Report,
}

impl Listener {
    /// Listens at `path`.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(super) fn bind(path: PathBuf, group: Option<u32>, scope: Scope) -> Result<Self, Error> {
        let socket = socket_file::listen(&path, group).map_err(Error::file("make a socket at", &path))?;
        Ok(Self {
            socket,
            path,
            group,
            scope,
            inherited: false,
            deleted: Report::new(),
        })
    }

    /// The same of a socket that a service manager listens on at `path`.
    ///
    /// # Errors
    /// It is no socket of the right kind.
    pub(super) fn inherit(socket: OwnedFd, path: PathBuf, group: Option<u32>) -> Result<Self, Error> {
        let checked = || -> io::Result<()> {
            if rustix::net::sockopt::socket_type(&socket)? != SocketType::SEQPACKET {
                return Err(io::Error::other("it is not a SEQPACKET socket"));
            }
            Ok(rustix::io::ioctl_fionbio(&socket, true)?)
        };
        checked().map_err(Error::file("listen on the service manager's socket for", &path))?;
        Ok(Self {
            socket,
            path,
            group,
            scope: Scope::Admin,
            inherited: true,
            deleted: Report::new(),
        })
    }

    /// Has `epoll` tell of whoever comes.
    ///
    /// # Errors
    /// epoll_ctl(2) fails.
    pub(super) fn register(&self, epoll: &Epoll, token: u64) -> io::Result<()> {
        epoll.add(&self.socket, token, Interest::READ)
    }

    /// Makes it again where its name was deleted.
    pub(super) fn look_after(&mut self, epoll: &Epoll, token: u64) {
        if !socket_file::is_missing(&self.path) {
            return;
        }
        let again = socket_file::listen_again(&self.path, self.group, (epoll, token), &self.socket, &self.deleted);
        if let Some(socket) = again {
            (self.socket, self.inherited) = (socket, false);
        }
    }

    /// The next who has come; nobody where they are gone again.
    ///
    /// # Errors
    /// Whoever has come cannot be let in now.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        use rustix::io::Errno;
        match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Listens no more. A new daemon makes its own name; until then askers hear at once that there is none.
    ///
    /// # Errors
    /// The name cannot be removed.
    pub(super) fn close(self) -> Result<(), Error> {
        if self.inherited {
            return Ok(());
        }
        socket_file::remove(&self.path).map_err(Error::file("remove", &self.path))
    }
}
