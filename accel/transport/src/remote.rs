//! How a client meets a server on another machine, by TCP: a connection for the greeting, which stays open, and one for each pair.
//!
//! ```text
//!   client ── {"client": hello} ──▶ server
//!   client ◀── {"name", "welcome"} ── server
//!   client ── {"pair": name, number} ──▶ server      each by a connection of its own; then records travel on it
//! ```
//! Each message is four bytes, its length, and so much JSON. The name is 128 random bits, so nobody else can bring a client a pair. With
//! TLS all of these connections have it. Knows no call.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use accel_window::VERSIONS;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::{ClientConfig, ServerConfig};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::channel::Channel;
use crate::connection::accepted;
use crate::greeting::{Agreement, Hello, Memory, Wake, Welcome, bytes_of, unsound};
use crate::{ClientConnection, Error, Offer, ServerConnection, Settings, Transport};

/// The longest message.
const MESSAGE: usize = 16 << 10;

/// When nothing is heard of a machine for so long, its connections have ended: seconds of silence, seconds between questions, questions.
const SILENCE: (Duration, Duration, u32) = (Duration::from_secs(10), Duration::from_secs(5), 3);
/// The same for bytes that are not acknowledged.
const UNACKNOWLEDGED: Duration = Duration::from_secs(25);

/// Where a server of another machine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
    /// Whether connections have TLS.
    pub is_secure: bool,
}

/// What is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no server's address: write tls://HOST:PORT, or tcp://HOST:PORT without encryption")]
pub struct AddressError(String);

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let parsed = || {
            let (scheme, rest) = text.split_once("://")?;
            let is_secure = match scheme {
                "tls" => true,
                "tcp" => false,
                _ => return None,
            };
            let (host, port) = rest.rsplit_once(':')?;
            let host = host
                .strip_prefix('[')
                .and_then(|host| host.strip_suffix(']'))
                .unwrap_or(host);
            let port = port.parse().ok().filter(|port| *port > 0)?;
            (!host.is_empty()).then(|| Self {
                host: host.to_owned(),
                port,
                is_secure,
            })
        };
        parsed().ok_or_else(|| AddressError(text.to_owned()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_secure { "tls" } else { "tcp" };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

/// The first message of a connection.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Begin {
    Client(Hello),
    Pair { name: String, number: u32 },
}

/// What a client is answered.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    name: String,
    welcome: Welcome,
}

/// Meets the server there.
///
/// # Errors
/// [`Protocol::Refused`] with the server's reason; each of [`Error`]'s. An address with TLS needs `tls`.
pub fn connect_remote(
    address: &Address,
    tls: Option<&Arc<ClientConfig>>,
    offer: &Offer,
) -> Result<ClientConnection, Error> {
    let tls = match (address.is_secure, tls) {
        (false, _) => None,
        (true, Some(tls)) => Some(tls),
        (true, None) => return Err(unusable(address, "there are no certificates to trust")),
    };
    let time = Time::new(offer.patience);
    let (socket, peer) = dial_first(address, time)?;
    let mut control = opened(socket, address, tls)?;
    secure(&mut control, time)?;
    let hello = Begin::Client(Hello {
        versions: (*VERSIONS.start(), *VERSIONS.end()),
        transports: offer.transports.clone(),
        pairs: offer.pairs,
    });
    say(&mut control, &hello, time)?;
    let Answer { name, welcome } = hear(&mut control, time)?;
    let (agreed, ..) = accepted(welcome, offer)?;
    // Side by side: one after the other, each would take its round trips of the time that all have.
    let dialled = (0..agreed.pairs)
        .map(|_| dial(peer))
        .collect::<Result<Vec<_>, Error>>()?;
    let open = |socket| opened(connected(socket, time)?, address, tls);
    let mut pairs = dialled.into_iter().map(open).collect::<Result<Vec<_>, Error>>()?;
    for (number, channel) in (0..).zip(&mut pairs) {
        secure(channel, time)?;
        let name = name.clone();
        say(channel, &Begin::Pair { name, number }, time)?;
    }
    ClientConnection::remote(agreed, control, pairs)
}

/// A connection to a server that is about to be there.
fn dial(peer: SocketAddr) -> Result<OwnedFd, Error> {
    let family = match peer {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let dialled = || -> rustix::io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &peer) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(error) => Err(error),
        }
    };
    dialled().map_err(Error::io("connect to the server"))
}

/// The same once it is there.
fn connected(socket: OwnedFd, time: Time) -> Result<TcpStream, Error> {
    let is_there = || -> rustix::io::Result<()> {
        loop {
            let left = time.left();
            let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
            match rustix::event::poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&left)) {
                Ok(0) => return Err(Errno::TIMEDOUT),
                Ok(_) => return sockopt::socket_error(&socket)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    };
    is_there()
        .and_then(|()| rustix::io::ioctl_fionbio(&socket, false))
        .map_err(Error::io("connect to the server"))?;
    Ok(socket.into())
}

/// A connection with the first address of a server's that answers, and that address. One that does not answer has its share of the time.
fn dial_first(address: &Address, time: Time) -> Result<(TcpStream, SocketAddr), Error> {
    let named = (address.host.as_str(), address.port).to_socket_addrs();
    let peers: Vec<_> = named.map_err(Error::io("connect to the server"))?.collect();
    first_of(&peers, time)
}

fn first_of(peers: &[SocketAddr], time: Time) -> Result<(TcpStream, SocketAddr), Error> {
    let mut last = Error::io("connect to the server")(io::Error::other("its name has no address"));
    for (tried, &peer) in (0..).zip(peers) {
        let left = u32::try_from(peers.len() - tried).unwrap_or(u32::MAX);
        match dial(peer).and_then(|socket| connected(socket, Time::new(time.left() / left))) {
            Ok(socket) => return Ok((socket, peer)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// What goes through a connection; with TLS its first words are on their way.
fn opened(socket: TcpStream, address: &Address, tls: Option<&Arc<ClientConfig>>) -> Result<Channel, Error> {
    keep_alive(&socket)?;
    let Some(config) = tls else {
        return Channel::new(socket.into());
    };
    let name = rustls::pki_types::ServerName::try_from(address.host.clone());
    let name = name.map_err(|error| unusable(address, error))?;
    let state = rustls::ClientConnection::new(Arc::clone(config), name);
    let state = state.map_err(|error| unusable(address, error))?;
    let mut channel = Channel::tls(socket, state.into())?;
    match channel.flush() {
        Err(error) if !is_not_yet(&error) => Err(Error::io("agree with the other side on TLS")(error)),
        _ => Ok(channel),
    }
}

/// What this side was told of a server does not do for TLS.
fn unusable(address: &Address, reason: impl fmt::Display) -> Error {
    let reason = format!("{}: {reason}", address.host);
    Error::io("use TLS with the server's name and certificates that were given")(io::Error::other(reason))
}

/// Has a handshake where there is TLS, to its end.
fn secure(channel: &mut Channel, time: Time) -> Result<(), Error> {
    let Channel::Tls(tls) = channel else {
        return Ok(());
    };
    while tls.state.is_handshaking() {
        let advanced = tls.advance();
        match advanced {
            Ok(0) => return Err(Error::PeerGone),
            Ok(_) => time.check("the TLS handshake")?,
            Err(error) if is_not_yet(&error) => time.check("the TLS handshake")?,
            Err(error) => return Err(Error::io("agree with the other side on TLS")(error)),
        }
    }
    Ok(())
}

fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// What is left for a greeting.
#[derive(Clone, Copy, Debug)]
struct Time {
    begun: Instant,
    most: Duration,
}

impl Time {
    fn new(most: Duration) -> Self {
        let begun = Instant::now();
        Self { begun, most }
    }

    fn left(self) -> Duration {
        self.most.saturating_sub(self.begun.elapsed())
    }

    /// An error when it is over.
    fn check(self, what: &'static str) -> Result<(), Error> {
        match self.left().is_zero() {
            true => Err(Error::Deadline {
                what,
                waited: self.most,
            }),
            false => Ok(()),
        }
    }
}

/// Small messages go at once, and a machine that is gone is noticed (tcp(7)).
fn keep_alive(socket: &TcpStream) -> Result<(), Error> {
    let (idle, between, count) = SILENCE;
    let set = || -> rustix::io::Result<()> {
        sockopt::set_tcp_nodelay(socket, true)?;
        sockopt::set_socket_keepalive(socket, true)?;
        sockopt::set_tcp_keepidle(socket, idle)?;
        sockopt::set_tcp_keepintvl(socket, between)?;
        sockopt::set_tcp_keepcnt(socket, count)?;
        sockopt::set_tcp_user_timeout(socket, u32::try_from(UNACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX))
    };
    set().map_err(Error::io("set a TCP socket up"))
}

fn say(channel: &mut Channel, message: &impl Serialize, time: Time) -> Result<(), Error> {
    let json = bytes_of(message)?;
    let mut bytes = u32::try_from(json.len()).unwrap_or(u32::MAX).to_le_bytes().to_vec();
    bytes.extend_from_slice(&json);
    let mut rest = bytes.as_slice();
    loop {
        let done = match rest.is_empty() {
            true => channel.flush().map(|()| None),
            false => channel.send(rest).map(Some),
        };
        match done {
            Ok(None) => return Ok(()),
            Ok(Some(sent)) => rest = rest.get(sent..).unwrap_or_default(),
            Err(error) if is_not_yet(&error) => time.check("space in a socket")?,
            Err(error) => return Err(Error::io("greet the other side")(error)),
        }
    }
}

/// The next message. Nothing is taken of the channel that comes behind it.
fn hear<T: DeserializeOwned>(channel: &mut Channel, time: Time) -> Result<T, Error> {
    let mut length = [0; 4];
    fill(channel, &mut length, time)?;
    let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length > MESSAGE {
        return Err(unsound(
            "greeting",
            format!("{length} bytes are announced, {MESSAGE} is the most"),
        ));
    }
    let mut json = vec![0; length];
    fill(channel, &mut json, time)?;
    serde_json::from_slice(&json).map_err(|error| unsound("greeting", error.to_string()))
}

fn fill(channel: &mut Channel, mut into: &mut [u8], time: Time) -> Result<(), Error> {
    while !into.is_empty() {
        match channel.receive(into) {
            Ok(0) => return Err(Error::PeerGone),
            Ok(got) => into = into.get_mut(got..).unwrap_or_default(),
            Err(error) if is_not_yet(&error) => {}
            Err(error) => return Err(Error::io("hear what the other side says")(error)),
        }
        time.check("the greeting")?;
    }
    Ok(())
}

/// Where a server meets clients of other machines.
#[derive(Debug)]
pub struct Meeting {
    settings: Settings,
    tls: Option<Arc<ServerConfig>>,
    /// Clients whose pairs are still to come.
    waiting: Mutex<HashMap<String, Sender<(u32, Channel)>>>,
}

impl Meeting {
    /// With what the server has; of its ways those that need no common memory.
    #[must_use]
    pub fn new(settings: &Settings, tls: Option<Arc<ServerConfig>>) -> Self {
        let mut settings = settings.clone();
        settings.transports.retain(|transport| !transport.has_rings());
        if settings.transports.is_empty() {
            settings.transports.push(Transport::Stream);
        }
        Self {
            settings,
            tls,
            waiting: Mutex::default(),
        }
    }

    /// Greets whoever has connected. A client is there once all of its pairs are; a pair is brought to its client, and is nothing more.
    /// How many are greeted at a time, the caller bounds.
    ///
    /// # Errors
    /// Each of [`Error`]'s: then there is no client.
    pub fn greet(&self, socket: TcpStream) -> Result<Option<ServerConnection>, Error> {
        let time = Time::new(self.settings.patience);
        keep_alive(&socket)?;
        let mut channel = match &self.tls {
            None => Channel::new(socket.into())?,
            Some(config) => {
                let state = rustls::ServerConnection::new(Arc::clone(config));
                let state = state.map_err(|error| Error::io("begin TLS with a client")(io::Error::other(error)))?;
                let mut channel = Channel::tls(socket, state.into())?;
                secure(&mut channel, time)?;
                channel
            }
        };
        match hear(&mut channel, time)? {
            Begin::Client(hello) => self.client(channel, &hello, time).map(Some),
            Begin::Pair { name, number } => {
                let client = self.waiting().get(&name).cloned();
                let client = client.ok_or_else(|| unsound("pair", "nobody waits for it".to_owned()))?;
                // A client that waits no more has gone meanwhile.
                client.send((number, channel)).map_err(|_| Error::PeerGone)?;
                Ok(None)
            }
        }
    }

    fn client(&self, mut control: Channel, hello: &Hello, time: Time) -> Result<ServerConnection, Error> {
        let agreed = match Agreement::on(&bytes_of(hello)?, &self.settings) {
            Ok(agreed) => agreed,
            Err(error) => {
                let welcome = Welcome::Refused(error.to_string());
                say(
                    &mut control,
                    &Answer {
                        name: String::new(),
                        welcome,
                    },
                    time,
                )?;
                return Err(error);
            }
        };
        let name = name()?;
        let (sender, pairs) = mpsc::channel();
        let waiting = Waiting::new(self, name.clone(), sender);
        let welcome = agreed.welcome(Wake::Sockets, Memory::File);
        say(&mut control, &Answer { name, welcome }, time)?;
        let mut channels: Vec<Option<Channel>> = (0..agreed.pairs).map(|_| None).collect();
        while channels.iter().any(Option::is_none) {
            let (number, channel) = pairs.recv_timeout(time.left()).map_err(|_| Error::Deadline {
                what: "a client's pairs",
                waited: self.settings.patience,
            })?;
            let place = channels.get_mut(usize::try_from(number).unwrap_or(usize::MAX));
            match place {
                Some(place) if place.is_none() => *place = Some(channel),
                _ => return Err(unsound("pair", format!("{number} of {}", agreed.pairs))),
            }
        }
        drop(waiting);
        let control: OwnedFd = match control {
            Channel::Socket(socket) => socket,
            // Nothing more is said on it.
            Channel::Tls(tls) => tls.socket.into(),
        };
        agreed.serve_streams(channels.into_iter().flatten().collect(), control)
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, HashMap<String, Sender<(u32, Channel)>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A client whose pairs are still to come, for as long as they may.
struct Waiting<'a> {
    meeting: &'a Meeting,
    name: String,
}

impl<'a> Waiting<'a> {
    fn new(meeting: &'a Meeting, name: String, sender: Sender<(u32, Channel)>) -> Self {
        meeting.waiting().insert(name.clone(), sender);
        Self { meeting, name }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.meeting.waiting().remove(&self.name);
    }
}

/// A name that nobody guesses.
fn name() -> Result<String, Error> {
    let mut bytes = [0; 16];
    // Of up to 256 bytes it gives all (getrandom(2)).
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(Error::io("have random bytes"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A listener that answers nobody any more: its queue of new connections is full.
    fn silent() -> (OwnedFd, Vec<OwnedFd>, SocketAddr) {
        let listener = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let listener = listener.unwrap();
        rustix::net::bind(&listener, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let at = SocketAddr::try_from(rustix::net::getsockname(&listener).unwrap()).unwrap();
        let waiting = (0..8).map(|_| dial(at).unwrap()).collect();
        (listener, waiting, at)
    }

    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        let (_listener, _waiting, silent) = silent();
        let answers = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = answers.local_addr().unwrap();
        let begun = Instant::now();
        let (_socket, found) = first_of(&[silent, silent, peer], Time::new(Duration::from_secs(3))).unwrap();
        assert_eq!(found, peer);
        assert!(begun.elapsed() >= Duration::from_millis(1900), "{:?}", begun.elapsed());
        assert!(first_of(&[silent], Time::new(Duration::from_millis(100))).is_err());
        assert!(first_of(&[], Time::new(Duration::from_millis(100))).is_err());
    }
}
