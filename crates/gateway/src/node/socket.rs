//! A node by its socket: a connection a request. Knows what each request may take of time, and not what it is for.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use node_api::{ApiError, Client, ClientError, ErrorKind, Request};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use wire::packet::PacketError;

use super::{Answer, Node, Owner};

/// How long the daemon may be silent during what writes or reads a machine's memory.
const LONG: Duration = Duration::from_secs(600);

/// How long it may be silent otherwise.
const SHORT: Duration = Duration::from_secs(60);

/// How long it may take to read a request.
const SEND: Duration = Duration::from_secs(30);

/// The most items that are taken of one answer.
const MAX_ITEMS: usize = 100_000;

/// The daemon that listens on a socket.
#[derive(Clone, Debug)]
pub struct SocketNode {
    path: PathBuf,
}

impl SocketNode {
    /// The daemon at this path. It need not be there yet.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    fn connect(&self, limit: Duration) -> io::Result<Client> {
        let client = Client::connect(&self.path)?;
        set_socket_timeout(client.as_fd(), Timeout::Recv, Some(limit))?;
        set_socket_timeout(client.as_fd(), Timeout::Send, Some(SEND))?;
        Ok(client)
    }
}

impl Node for SocketNode {
    fn ask(&self, owner: &Owner, request: Request) -> Result<Answer, ClientError> {
        let mut client = self
            .connect(limit(&request))
            .map_err(|error| ClientError::Packet(PacketError::Io(errno(&error))))?;
        let mut items = Vec::new();
        let mut left_out = 0_usize;
        let mut each = |item| match items.len() < MAX_ITEMS {
            true => items.push(item),
            false => left_out += 1,
        };
        say_owner(&mut client, owner);
        let (reply, fds) = client.ask_each(request, &mut each).map_err(late)?;
        if left_out > 0 {
            log::warn!("{left_out} of a node's items were left out, as an answer has {MAX_ITEMS} at most");
        }
        Ok(Answer { items, reply, fds })
    }
}

/// Has the node know for whom it is asked: it compares the owner of whatever that is about.
fn say_owner(client: &mut Client, owner: &Owner) {
    match owner {
        Owner::Tenant(tenant) => client.for_tenant(tenant),
        Owner::Gateway => (),
    }
}

fn limit(request: &Request) -> Duration {
    match request {
        Request::Run(_)
        | Request::Suspend { .. }
        | Request::Resume { .. }
        | Request::MakeSnapshot(_)
        | Request::Clone(_)
        | Request::Remove { .. }
        | Request::RemoveSnapshot { .. }
        | Request::RemoveTemplate { .. } => LONG,
        _ => SHORT,
    }
}

/// A silence that lasted too long is no broken connection.
fn late(error: ClientError) -> ClientError {
    match error {
        ClientError::Packet(PacketError::Io(Errno::AGAIN | Errno::TIMEDOUT)) => ClientError::Refused(ApiError {
            kind: ErrorKind::Deadline,
            message: "the node's daemon does not answer in time: look at its log".into(),
            exit_code: 125,
        }),
        other => other,
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
