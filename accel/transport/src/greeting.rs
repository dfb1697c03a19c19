//! What two sides say to each other before records travel: packets, and the descriptors in them. Knows what is passed, not how it is
//! used.

use std::ops::RangeInclusive;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use accel_window::VERSIONS;
use serde::{Deserialize, Serialize};
use wire::packet::PacketSocket;

use crate::{Error, Protocol, Settings, Transport};

/// What a packet has that carries only descriptors.
pub(crate) const MORE: &[u8] = b"+";

/// What a client says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) versions: (u32, u32),
    pub(crate) transports: Vec<Transport>,
    pub(crate) pairs: u32,
}

/// What wakes who sleeps for a record of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Wake {
    /// Words in the window (futex(2)).
    Words,
    /// A stream socket for each pair.
    Sockets,
}

/// What the window is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Memory {
    /// A memfd whose size is sealed.
    Memfd,
    /// A file of somebody who does not shrink it: in a guest, of its agent.
    File,
}

/// What a server answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Welcome {
    Accepted {
        transport: Transport,
        pairs: u32,
        wake: Wake,
        memory: Memory,
        /// How long who waits for a record of a ring looks before it sleeps, at most, in microseconds.
        busy_poll_us: u32,
        /// Of streams: bytes of the arena, of which each side has a copy.
        #[serde(default)]
        arena: u64,
    },
    Refused(String),
}

/// What a client and a server have agreed on.
#[derive(Clone, Copy, Debug)]
pub struct Agreement {
    /// How records travel.
    pub transport: Transport,
    /// For so many threads.
    pub pairs: u32,
    /// How long who waits for a record of a ring looks before it sleeps, at most.
    pub busy_poll: Duration,
    /// Of streams: bytes of the arena, of which each side has a copy.
    pub arena: u64,
}

impl Agreement {
    /// On what a client has said.
    ///
    /// # Errors
    /// [`Protocol::Greeting`] if that is no greeting, [`Protocol::Refused`] with the reason if the client can have nothing of what it
    /// wishes.
    pub fn on(hello: &[u8], settings: &Settings) -> Result<Self, Error> {
        let hello = serde_json::from_slice(hello).map_err(|error| unsound("hello", error.to_string()))?;
        Ok(choose(&hello, settings).map_err(Protocol::Refused)?)
    }

    /// How many sockets there are for it between two sides that wake each other in this way.
    pub(crate) fn sockets(self, wake: Wake) -> usize {
        match (self.transport.has_rings(), wake) {
            _ if self.transport == Transport::Enter => 0,
            (true, Wake::Words) => 0,
            _ => self.pairs as usize,
        }
    }
}

/// What a client can have, or why nothing.
fn choose(hello: &Hello, settings: &Settings) -> Result<Agreement, String> {
    let (lowest, highest) = hello.versions;
    let common: RangeInclusive<u32> = lowest.max(*VERSIONS.start())..=highest.min(*VERSIONS.end());
    if common.is_empty() {
        return Err(format!(
            "it knows versions {lowest} to {highest}, this server {VERSIONS:?}"
        ));
    }
    let transport = Transport::choose(&hello.transports, &settings.transports).ok_or_else(|| {
        format!(
            "of the transports {:?} it has none, but {:?}",
            hello.transports, settings.transports
        )
    })?;
    match hello.pairs.min(settings.pairs) {
        0 => Err("no pairs of rings were asked for".to_owned()),
        pairs => Ok(Agreement {
            transport,
            pairs,
            busy_poll: settings.busy_poll.unwrap_or(transport.busy_poll()),
            arena: if transport.has_rings() { 0 } else { settings.arena },
        }),
    }
}

pub(crate) fn unsound(packet: &'static str, reason: String) -> Error {
    Protocol::Greeting { packet, reason }.into()
}

/// A message's bytes.
pub(crate) fn bytes_of(message: &impl Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(message).map_err(|error| unsound("own", error.to_string()))
}

pub(crate) fn send(socket: &PacketSocket, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
    socket
        .send(&bytes_of(message)?, fds)
        .map_err(|error| Error::packet(error, "a packet", Duration::ZERO))
}

pub(crate) fn receive<T: for<'a> Deserialize<'a>>(
    socket: &PacketSocket,
    packet: &'static str,
    patience: Duration,
) -> Result<(T, Vec<OwnedFd>), Error> {
    let (bytes, fds) = receive_bytes(socket, packet, patience)?;
    let message = serde_json::from_slice(&bytes).map_err(|error| unsound(packet, error.to_string()))?;
    Ok((message, fds))
}

pub(crate) fn receive_bytes(
    socket: &PacketSocket,
    packet: &'static str,
    patience: Duration,
) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
    let deadline = Instant::now() + patience;
    let received = socket.wait_to_receive(deadline).and_then(|()| socket.receive());
    received.map_err(|error| Error::packet(error, packet, patience))
}

/// The descriptors of a welcome, and those of the packets behind it.
pub(crate) fn receive_all(
    socket: &PacketSocket,
    mut fds: Vec<OwnedFd>,
    wanted: usize,
    patience: Duration,
) -> Result<Vec<OwnedFd>, Error> {
    while fds.len() < wanted {
        let (bytes, more) = receive_bytes(socket, "welcome", patience)?;
        if bytes != MORE || more.is_empty() {
            return Err(unsound(
                "welcome",
                format!("{} of {wanted} descriptors came", fds.len()),
            ));
        }
        fds.extend(more);
    }
    match fds.len() == wanted {
        true => Ok(fds),
        false => Err(unsound(
            "welcome",
            format!("{} descriptors came, {wanted} were due", fds.len()),
        )),
    }
}
