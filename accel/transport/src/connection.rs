//! How a client and a server meet: what each has and wishes, which way is taken, and what is passed for it. Knows what is passed, not how
//! it is used.
//!
//! ```text
//!   client ── {"versions", "transports", "pairs"} ──▶ server
//!   client ◀── {"transport", "pairs"} or {"refused"} ── server
//!              with descriptors: the window's memfd; with `bell` four ends of pipes a pair, of which two stay here;
//!              with streams a socket a pair. What does not fit one packet comes in more, each of one byte.
//! ```
//!
//! Then nothing more is said, and the socket stays open for as long as the connection is to last.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use accel_window::{Geometry, Holder, Side, VERSIONS, Window};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};
use wire::packet::{MAX_FDS, PacketSocket};
use wire::ring::Sequence;

use crate::busy_poll::BusyPoll;
use crate::end::{Counters, Way};
use crate::peer::{Bell, Peer, Watch};
use crate::placement::Placement;
use crate::ring_end::{BATCH, RingEnd};
use crate::stream_end::StreamEnd;
use crate::{ClientEnd, DescriptorSignal, Error, FutexSignal, Protocol, ServerEnd, Signal, Transport};

/// What a packet has that carries only descriptors.
const MORE: &[u8] = b"+";

/// What a client wishes.
#[derive(Clone, Debug)]
pub struct Offer {
    /// The ways that it would take, the best first; one alone forces that one.
    pub transports: Vec<Transport>,
    /// For so many threads.
    pub pairs: u32,
    /// How long the server has to answer.
    pub patience: Duration,
}

/// What a server has.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The ways that there are.
    pub transports: Vec<Transport>,
    /// The most pairs of rings of one client, or streams.
    pub pairs: u32,
    /// Records of each ring.
    pub records: u32,
    /// Bytes of the arena.
    pub arena: u64,
    /// How long a client has to say what it wishes.
    pub patience: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    versions: (u32, u32),
    transports: Vec<Transport>,
    pairs: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Welcome {
    Accepted { transport: Transport, pairs: u32 },
    Refused(String),
}

/// A client's half of a connection.
#[derive(Debug)]
pub struct ClientConnection {
    /// How records travel.
    pub transport: Transport,
    /// The memory that both have, and its version, where the way has some.
    pub window: Option<(Window, u32)>,
    /// An end for each thread.
    pub ends: Vec<ClientEnd>,
    /// Hung up with the last of the ends.
    _socket: Arc<PacketSocket>,
}

/// A server's half of a connection. Dropped, it is over: for its own threads, and for the client.
#[derive(Debug)]
pub struct ServerConnection {
    /// How records travel.
    pub transport: Transport,
    /// The memory that both have, where the way has some.
    pub window: Option<Window>,
    /// An end for each thread.
    pub ends: Vec<ServerEnd>,
    watch: Watch,
    _holder: Option<Holder>,
}

impl ServerConnection {
    /// Whether the client has ended.
    pub fn is_over(&self) -> bool {
        self.watch.has_seen_the_end()
    }
}

/// Meets the server at the other end of a socket.
///
/// # Errors
/// [`Protocol::Refused`] with the server's reason; each of [`Error`]'s.
pub fn connect(socket: PacketSocket, offer: &Offer) -> Result<ClientConnection, Error> {
    let hello = Hello {
        versions: (*VERSIONS.start(), *VERSIONS.end()),
        transports: offer.transports.clone(),
        pairs: offer.pairs,
    };
    send(&socket, &hello, &[])?;
    let (welcome, fds): (Welcome, _) = receive(&socket, "welcome", offer.patience)?;
    let (transport, pairs) = match welcome {
        Welcome::Refused(reason) => return Err(Protocol::Refused(reason).into()),
        Welcome::Accepted { transport, pairs } => (transport, pairs),
    };
    if !offer.transports.contains(&transport) || pairs == 0 || pairs > offer.pairs {
        let reason = format!("{transport} with {pairs} pairs was not asked for");
        return Err(unsound("welcome", reason));
    }
    let wanted = descriptors(transport, pairs);
    let mut fds = receive_all(&socket, fds, wanted, offer.patience)?.into_iter();
    let socket = Arc::new(socket);
    let (mut window, mut ends) = (None, Vec::new());
    if transport.has_rings() {
        let memory = fds.next().ok_or_else(|| unsound("welcome", "no window".to_owned()))?;
        let (found, version) = Window::open(accel_window::map(memory)?, VERSIONS)?;
        if found.geometry().pairs() < pairs {
            return Err(unsound(
                "welcome",
                format!("{pairs} pairs in a window of {}", found.geometry().pairs()),
            ));
        }
        let life = found.life()?;
        for pair in 0..pairs {
            let peer = Peer::Server {
                life: life.clone(),
                socket: Arc::clone(&socket),
            };
            let signal = signal(transport, &found, pair, Side::Client, &mut fds)?;
            let rings = found.client_pair(pair)?;
            let placement = match transport {
                Transport::SameCpu => Placement::tell(found.client_cpu(pair)?),
                _ => Placement::Anywhere,
            };
            let end = ring_end(
                transport,
                &found,
                (rings.submissions, rings.completions),
                (signal, peer, placement),
            );
            ends.push(ClientEnd::new(Way::Ring(Box::new(end)), transport));
        }
        window = Some((found, version));
    } else {
        for stream in fds {
            let end = StreamEnd::new(stream, Sequence::Stamped)?;
            ends.push(ClientEnd::new(Way::Stream(end), transport));
        }
    }
    Ok(ClientConnection {
        transport,
        window,
        ends,
        _socket: socket,
    })
}

/// Meets the client at the other end of a socket.
///
/// # Errors
/// Each of [`Error`]'s. A client that can have nothing of what it wishes is told so, and is [`Protocol::Refused`] here too.
pub fn accept(socket: PacketSocket, settings: &Settings) -> Result<ServerConnection, Error> {
    let (hello, fds): (Hello, _) = receive(&socket, "hello", settings.patience)?;
    if !fds.is_empty() {
        return Err(unsound("hello", format!("{} descriptors came with it", fds.len())));
    }
    let (transport, pairs) = match choose(&hello, settings) {
        Ok(chosen) => chosen,
        Err(reason) => {
            send(&socket, &Welcome::Refused(reason.clone()), &[])?;
            return Err(Protocol::Refused(reason).into());
        }
    };
    let mut parts = Parts::default();
    match transport.has_rings() {
        true => parts.make_rings(transport, pairs, settings)?,
        false => parts.make_streams(pairs)?,
    }
    let sent: Vec<BorrowedFd<'_>> = parts.sent.iter().map(AsFd::as_fd).collect();
    let (first, rest) = sent.split_at(sent.len().min(MAX_FDS));
    send(&socket, &Welcome::Accepted { transport, pairs }, first)?;
    for more in rest.chunks(MAX_FDS) {
        socket
            .send(MORE, more)
            .map_err(|error| Error::packet(error, "a packet", Duration::ZERO))?;
    }
    let watch = Watch::new(socket, parts.bells).map_err(Error::io("start a thread"))?;
    let mut ends = Vec::new();
    for (pair, own) in (0..).zip(parts.kept) {
        let way = match (own, &parts.window) {
            (Own::Stream(stream), _) => Way::Stream(StreamEnd::new(stream, Sequence::Callers)?),
            (Own::Signal(signal), Some(window)) => {
                let rings = window.server_pair(pair)?;
                let placement = match transport {
                    Transport::SameCpu => Placement::follow(window.client_cpu(pair)?),
                    _ => Placement::Anywhere,
                };
                let rings = (rings.completions, rings.submissions);
                Way::Ring(Box::new(ring_end(
                    transport,
                    window,
                    rings,
                    (signal, watch.peer(), placement),
                )))
            }
            (Own::Signal(_), None) => continue,
        };
        ends.push(ServerEnd { way, transport });
    }
    Ok(ServerConnection {
        transport,
        window: parts.window,
        ends,
        watch,
        _holder: parts.holder,
    })
}

/// What a client can have, or why nothing.
fn choose(hello: &Hello, settings: &Settings) -> Result<(Transport, u32), String> {
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
        pairs => Ok((transport, pairs)),
    }
}

/// What a server keeps of a pair before its ends are made.
#[derive(Debug)]
enum Own {
    Signal(Box<dyn Signal>),
    Stream(OwnedFd),
}

/// What a connection is made of, on the server's side.
#[derive(Debug, Default)]
struct Parts {
    window: Option<Window>,
    holder: Option<Holder>,
    kept: Vec<Own>,
    /// What goes to the client.
    sent: Vec<OwnedFd>,
    /// What wakes the server's threads when the client is gone.
    bells: Vec<Bell>,
}

impl Parts {
    fn make_rings(&mut self, transport: Transport, pairs: u32, settings: &Settings) -> Result<(), Error> {
        let geometry = Geometry::new(pairs, settings.records, settings.arena)?;
        let (memory, window) = Window::create(geometry)?;
        // Before the client sees the window, or it would see nobody in it.
        self.holder = Some(Holder::new(&window)?);
        self.sent.push(memory.into());
        for pair in 0..pairs {
            let signal: Box<dyn Signal> = match transport {
                Transport::Bell => {
                    let pipe = || pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(Error::io("have a pipe"));
                    let ((their_own, to_them), (own, to_us)) = (pipe()?, pipe()?);
                    let again = to_us.try_clone().map_err(Error::io("copy a descriptor"))?;
                    self.bells.push(Bell::Descriptor(again));
                    self.sent.extend([their_own, to_us]);
                    Box::new(DescriptorSignal::new(own, to_them)?)
                }
                _ => {
                    self.bells.push(Bell::Futex(window.bell(pair, Side::Server)?));
                    futex_signal(&window, pair, Side::Server)?
                }
            };
            self.kept.push(Own::Signal(signal));
        }
        self.window = Some(window);
        Ok(())
    }

    fn make_streams(&mut self, pairs: u32) -> Result<(), Error> {
        for _ in 0..pairs {
            let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
            let (own, theirs) = pair.map_err(Error::io("have a pair of sockets"))?;
            self.kept.push(Own::Stream(own));
            self.sent.push(theirs);
        }
        Ok(())
    }
}

/// How many descriptors a client gets.
fn descriptors(transport: Transport, pairs: u32) -> usize {
    let pairs = pairs as usize;
    match transport {
        Transport::Spin | Transport::SameCpu => 1,
        Transport::Bell => 1 + 2 * pairs,
        Transport::Stream | Transport::Synchronous => pairs,
    }
}

fn futex_signal(window: &Window, pair: u32, side: Side) -> Result<Box<dyn Signal>, Error> {
    let (own, other) = match side {
        Side::Client => (Side::Client, Side::Server),
        Side::Server => (Side::Server, Side::Client),
    };
    Ok(Box::new(FutexSignal::new(
        window.bell(pair, own)?,
        window.bell(pair, other)?,
    )))
}

/// A client's signal of a pair, out of what came.
fn signal(
    transport: Transport,
    window: &Window,
    pair: u32,
    side: Side,
    fds: &mut impl Iterator<Item = OwnedFd>,
) -> Result<Box<dyn Signal>, Error> {
    if transport != Transport::Bell {
        return futex_signal(window, pair, side);
    }
    let mut next = || {
        fds.next()
            .ok_or_else(|| unsound("welcome", format!("no descriptors for pair {pair}")))
    };
    let (own, other) = (next()?, next()?);
    Ok(Box::new(DescriptorSignal::new(own, other)?))
}

/// One side of a pair of rings: what goes out, and what comes in.
fn ring_end(
    transport: Transport,
    window: &Window,
    (outgoing, incoming): (wire::ring::Producer, wire::ring::Consumer),
    (signal, peer, placement): (Box<dyn Signal>, Peer, Placement),
) -> RingEnd {
    RingEnd {
        outgoing,
        incoming,
        signal,
        peer,
        poll: BusyPoll::up_to(transport.busy_poll()),
        placement,
        batch: BATCH.min(u64::from(window.geometry().records() / 2)),
        since: None,
        next: None,
        counters: Counters::default(),
    }
}

fn unsound(packet: &'static str, reason: String) -> Error {
    Protocol::Greeting { packet, reason }.into()
}

fn send(socket: &PacketSocket, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let bytes = serde_json::to_vec(message).map_err(|error| unsound("own", error.to_string()))?;
    socket
        .send(&bytes, fds)
        .map_err(|error| Error::packet(error, "a packet", Duration::ZERO))
}

fn receive<T: for<'a> Deserialize<'a>>(
    socket: &PacketSocket,
    packet: &'static str,
    patience: Duration,
) -> Result<(T, Vec<OwnedFd>), Error> {
    let (bytes, fds) = receive_bytes(socket, packet, patience)?;
    let message = serde_json::from_slice(&bytes).map_err(|error| unsound(packet, error.to_string()))?;
    Ok((message, fds))
}

fn receive_bytes(
    socket: &PacketSocket,
    packet: &'static str,
    patience: Duration,
) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
    let deadline = Instant::now() + patience;
    let received = socket.wait_to_receive(deadline).and_then(|()| socket.receive());
    received.map_err(|error| Error::packet(error, packet, patience))
}

/// The descriptors of a welcome, and those of the packets behind it.
fn receive_all(
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
