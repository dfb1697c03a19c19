//! The asker's end of the socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::{PacketError, PacketSocket};

use crate::VERSION;
use crate::message::{ApiError, Item, Packet, Reply, Request, Tracing};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket failed.
    #[error(
        "the daemon cannot be reached any more ({0}): ask again, which starts it if it is gone; sandboxes that are detached run on"
    )]
    Packet(#[from] PacketError),
    /// The daemon said something that is no reply.
    #[error("the daemon answered with something that is not understood ({0}): use basalt and basaltd of one build")]
    Malformed(String),
    /// The daemon refused.
    #[error(transparent)]
    Refused(#[from] ApiError),
}

/// A connection to the daemon. One request at a time.
#[derive(Debug)]
pub struct Client {
    socket: PacketSocket,
    tenant: Option<String>,
}

impl Client {
    /// Connects to the socket at `path`, which may be longer than a socket's address.
    ///
    /// # Errors
    /// As connect(2): `NotFound` where there never was a daemon, `ConnectionRefused` where it is gone.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&socket, &address(path, &directory(path)?)?)?;
        Ok(Self {
            socket: PacketSocket::from_fd(socket),
            tenant: None,
        })
    }

    /// A client over a connected socket.
    pub fn new(socket: PacketSocket) -> Self {
        Self { socket, tenant: None }
    }

    /// Asks for this tenant from here on.
    pub fn for_tenant(&mut self, tenant: &str) {
        self.tenant = Some(tenant.to_owned());
    }

    /// Asks, and gives each item that comes before the reply to `each`.
    ///
    /// # Errors
    /// The daemon is gone or refuses.
    pub fn ask_each(
        &mut self,
        request: Request,
        each: &mut dyn FnMut(Item),
    ) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        self.send(request)?;
        self.receive(each)
    }

    /// Sends a request; [`Client::receive`] waits for its answer.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn send(&mut self, request: Request) -> Result<(), ClientError> {
        let tracing = observe::span::context().map(|parent| Tracing {
            parent,
            wanted: observe::span::is_detailed(),
        });
        let packet = Packet::Request {
            version: VERSION,
            request,
            trace: tracing,
            tenant: self.tenant.clone(),
        };
        let bytes = serde_json::to_vec(&packet).map_err(|error| ClientError::Malformed(error.to_string()))?;
        match self.socket.send(&bytes, &[]) {
            // A daemon that lets nobody in has said why before it hung up.
            Err(closed @ PacketError::Closed) => match self.receive(&mut |_| ()) {
                Err(refused @ ClientError::Refused(_)) => Err(refused),
                _ => Err(closed.into()),
            },
            sent => Ok(sent?),
        }
    }

    /// Waits for the answer to what was sent; gives each item before it to `each`.
    ///
    /// # Errors
    /// The daemon is gone or refuses.
    pub fn receive(&mut self, each: &mut dyn FnMut(Item)) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        loop {
            let (bytes, fds) = self.next_packet()?;
            match serde_json::from_slice(&bytes) {
                Ok(Packet::Item(Item::Spans(spans))) => observe::span::adopt(spans),
                Ok(Packet::Item(item)) => each(item),
                Ok(Packet::Reply(reply)) => return Ok((reply?, fds)),
                Ok(Packet::Request { .. }) => return Err(ClientError::Malformed("a request".into())),
                Err(error) => return Err(ClientError::Malformed(error.to_string())),
            }
        }
    }

    /// The next packet. Of a daemon that has hung up without reading what was sent, that it did is told before what it has said.
    fn next_packet(&self) -> Result<(Vec<u8>, Vec<OwnedFd>), PacketError> {
        match self.socket.receive() {
            Err(PacketError::Closed) => self.socket.receive(),
            received => received,
        }
    }

    /// Asks for something that has no items.
    ///
    /// # Errors
    /// The daemon is gone or refuses.
    pub fn ask(&mut self, request: Request) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        self.ask_each(request, &mut |_| ())
    }

    /// The next thing that happens, after `events`.
    ///
    /// # Errors
    /// The daemon is gone.
    pub fn next_item(&mut self) -> Result<Item, ClientError> {
        let (bytes, _) = self.socket.receive()?;
        match serde_json::from_slice(&bytes) {
            Ok(Packet::Item(item)) => Ok(item),
            other => Err(ClientError::Malformed(format!("{other:?}"))),
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The directory of `path`, held open: its number stands for its path in [`address`].
///
/// # Errors
/// There is none.
pub fn directory(path: &Path) -> io::Result<OwnedFd> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open(
        parent.unwrap_or(Path::new(".")),
        flags,
        rustix::fs::Mode::empty(),
    )?)
}

/// The address of the socket at `path`: at most 107 bytes long, whatever the directory's name is.
///
/// # Errors
/// The file's own name is too long.
pub fn address(path: &Path, directory: &OwnedFd) -> io::Result<SocketAddrUnix> {
    use std::os::fd::AsRawFd;
    let name = path.file_name().unwrap_or_default();
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string());
    Ok(SocketAddrUnix::new(short.join(name))?)
}
