//! Connections between a guest's agent and the daemon, by the VMM's sockets. Knows neither the agent's protocol nor the VMM's.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use agent_api::VSOCK_PORT;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::packet::{PacketError, PacketSocket};

use crate::deadline_stream::Timed;

/// Bounds how long the socket's reads and writes wait.
pub(crate) fn set_patience(socket: impl AsFd, limit: Duration) -> io::Result<()> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    set_socket_timeout(&socket, Timeout::Recv, Some(limit))?;
    Ok(set_socket_timeout(&socket, Timeout::Send, Some(limit))?)
}

/// Everything that a connection to an agent needs of descriptors, before it is made.
#[derive(Debug)]
pub(crate) struct Line {
    socket: OwnedFd,
    /// Where the agent's socket is.
    directory: OwnedFd,
}

impl Line {
    /// For the agent whose connections are taken at `path`.
    pub(crate) fn new(path: &Path) -> io::Result<Self> {
        let kind = SocketType::STREAM;
        Ok(Self {
            directory: node_api::client::directory(path)?,
            socket: rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?,
        })
    }

    /// Connects.
    pub(crate) fn connect(self, path: &Path) -> io::Result<Timed> {
        rustix::net::connect(&self.socket, &node_api::client::address(path, &self.directory)?)?;
        Ok(Timed::new(UnixStream::from(self.socket)))
    }
}

/// One connection that the guest has opened; `None` if it is to another port.
pub(crate) fn accept(acceptor: &PacketSocket) -> Result<Option<UnixStream>, PacketError> {
    let (bytes, fds) = acceptor.receive()?;
    let port = bytes.as_slice().try_into().map(u32::from_le_bytes).ok();
    if port != Some(VSOCK_PORT) {
        log::info!("the guest connects to port {port:?}, where nothing listens");
        return Ok(None);
    }
    Ok(fds.into_iter().next().map(UnixStream::from))
}
