//! Files and sockets that a sandbox's processes are given: opened, or made, with what to do if that cannot be. Knows no process.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::Error;

/// Binds a socket, for this user alone; what an earlier VM left at this path goes.
pub(crate) fn listen(path: &Path, kind: SocketType) -> Result<OwnedFd, Error> {
    let bound = || -> io::Result<OwnedFd> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => (),
        }
        let directory = node_api::client::directory(path)?;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&socket, &node_api::client::address(path, &directory)?)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        rustix::net::listen(&socket, 64)?;
        Ok(socket)
    };
    bound().map_err(Error::file("make a socket at", path))
}

pub(crate) fn open(what: &'static str, path: &Path, next: &'static str) -> Result<File, Error> {
    File::open(path).map_err(not_open(what, path, next))
}

pub(crate) fn open_writable(what: &'static str, path: &Path, next: &'static str) -> Result<File, Error> {
    let file = File::options().read(true).write(true).open(path);
    file.map_err(not_open(what, path, next))
}

fn not_open(what: &'static str, path: &Path, next: &'static str) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |cause| Error::Open {
        what,
        path,
        cause,
        next,
    }
}

/// A log, made if it is not there.
pub(crate) fn append(path: &Path) -> Result<File, Error> {
    let file = File::options().append(true).create(true).open(path);
    file.map_err(Error::file("open", path))
}
