//! How a client and a server meet: what each has and wishes, which way is taken, and what is made for it.
//!
//! ```text
//!   client ── {"versions", "transports", "pairs"} ──▶ server
//!   client ◀── {"transport", "pairs", "wake", "memory", "arena"} or {"refused"} ── server
//!              with descriptors: the window's file, where there is one; then a socket a pair, where they wake by sockets or
//!              records travel on them. What does not fit one packet comes in more, each of one byte.
//! ```
//!
//! Then nothing more is said, and the socket stays open for as long as the connection is to last.
//!
//! In a virtual machine the client speaks to its agent, which passes the greeting on ([`Agreement`]) and gives it a file of the guest's
//! that is the same memory as the server's; by [`Agreement::serve`] the server has its half.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use accel_window::{Geometry, Holder, ServerPair, Side, VERSIONS, Window};
use rustix::fs::Uid;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::packet::{MAX_FDS, PacketSocket};
use wire::ring::{Region, Sequence};

use crate::busy_poll::BusyPoll;
use crate::channel::Channel;
use crate::coalesce::{self, Coalesce};
use crate::end::{Counters, Way};
use crate::enter::Taken;
use crate::greeting::{
    Agreement, Hello, MORE, Memory, Wake, Welcome, bytes_of, receive, receive_all, receive_bytes, send, unsound,
};
use crate::peer::{Bell, Peer, Watch};
use crate::placement::Placement;
use crate::resumption::Resumption;
use crate::ring_end::{BATCH, Position, RingEnd};
use crate::stream_end::StreamEnd;
use crate::{ClientEnd, Error, FutexSignal, Protocol, ServerEnd, Signal, SocketSignal, Transport};

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
    /// How long who waits for a record of a ring looks before it sleeps, at most; if missing, what is the transport's.
    pub busy_poll: Option<Duration>,
}

/// A client's half of a connection.
#[derive(Debug)]
pub struct ClientConnection {
    /// How records travel.
    pub transport: Transport,
    /// The memory that both have, and its version; where records travel on streams, this side's copy of the arena.
    pub window: Option<(Window, u32)>,
    /// An end for each thread.
    pub ends: Vec<ClientEnd>,
    /// Hung up with the last of the ends.
    pub(crate) socket: Arc<Control>,
}

/// What stays open for as long as the connection is to last.
#[derive(Debug)]
pub(crate) enum Control {
    Packets(Arc<PacketSocket>),
    Stream(Channel),
    /// Nothing is said there: the window itself.
    Window(Taken),
}

impl ClientConnection {
    /// To a server on another machine.
    pub(crate) fn remote(agreed: Agreement, control: Channel, pairs: Vec<Channel>) -> Result<Self, Error> {
        Self::by_streams(agreed, Control::Stream(control), pairs)
    }

    fn by_streams(agreed: Agreement, socket: Control, pairs: Vec<Channel>) -> Result<Self, Error> {
        let socket = Arc::new(socket);
        let arena = agreed.copy_of_arena()?;
        let end = |channel| {
            let way = Way::Stream(Box::new(StreamEnd::new(channel, Sequence::Stamped, arena.clone())));
            ClientEnd::new(way, agreed.transport).keeping(&socket)
        };
        Ok(Self {
            transport: agreed.transport,
            ends: pairs.into_iter().map(end).collect(),
            window: Some((arena, *VERSIONS.end())),
            socket,
        })
    }

    /// The descriptor whose end is the connection's, once no process has it any more.
    pub fn descriptor(&self) -> RawFd {
        match self.socket.as_ref() {
            Control::Packets(socket) => socket.as_fd().as_raw_fd(),
            Control::Stream(channel) => channel.socket().as_raw_fd(),
            Control::Window(taken) => taken.file().as_raw_fd(),
        }
    }
}

/// A server's half of a connection. Dropped, it is over: for its own threads, and for the client.
#[derive(Debug)]
pub struct ServerConnection {
    /// How records travel.
    pub transport: Transport,
    /// The memory that both have; where records travel on streams, this side's copy of the arena.
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
    let (agreed, wake, memory) = accepted(welcome, offer)?;
    let Agreement { transport, pairs, .. } = agreed;
    let wanted = usize::from(transport.has_rings()) + agreed.sockets(wake);
    let mut fds = receive_all(&socket, fds, wanted, offer.patience)?.into_iter();
    if !transport.has_rings() {
        let channels = fds.map(Channel::new).collect::<Result<Vec<_>, _>>()?;
        return ClientConnection::by_streams(agreed, Control::Packets(Arc::new(socket)), channels);
    }
    let (window, version) = open_window(&socket, fds.next(), memory, pairs)?;
    let socket = Arc::new(socket);
    // In a virtual machine, which can be saved.
    let resumption = match (wake, memory) {
        (Wake::Sockets, Memory::File) => Some(Resumption::new(window.life()?, Arc::clone(&socket))?),
        _ => None,
    };
    let mut ends = Vec::new();
    for pair in 0..pairs {
        let server = match &resumption {
            None => server_of(&window, pair, fds.next(), &socket)?,
            Some(resumption) => resumption.join(fds.next().ok_or_else(|| no_socket(pair))?)?,
        };
        let way = Way::Ring(Box::new(client_end(agreed, &window, pair, server)?));
        ends.push(ClientEnd::new(way, transport));
    }
    Ok(ClientConnection {
        transport,
        window: Some((window, version)),
        ends,
        socket: Arc::new(Control::Packets(socket)),
    })
}

fn no_socket(pair: u32) -> Error {
    unsound("welcome", format!("no descriptors for pair {pair}"))
}

/// What a client has got, if that is anything it asked for.
pub(crate) fn accepted(welcome: Welcome, offer: &Offer) -> Result<(Agreement, Wake, Memory), Error> {
    match welcome {
        Welcome::Refused(reason) => Err(Protocol::Refused(reason).into()),
        Welcome::Accepted {
            transport,
            pairs,
            wake,
            memory,
            busy_poll_us,
            arena,
        } => {
            let busy_poll = Duration::from_micros(busy_poll_us.into());
            let agreed = Agreement {
                transport,
                pairs,
                busy_poll,
                arena,
            };
            agreed.was_offered(offer)?;
            Ok((agreed, wake, memory))
        }
    }
}

/// What a client was given as the window. One that is no memfd is taken of root alone, or of who is the same user: whoever shrank it
/// would end this process (SIGBUS).
fn open_window(
    socket: &PacketSocket,
    file: Option<OwnedFd>,
    memory: Memory,
    pairs: u32,
) -> Result<(Window, u32), Error> {
    let file = file.ok_or_else(|| unsound("welcome", "no window".to_owned()))?;
    let region = match memory {
        Memory::Memfd => accel_window::map(file)?,
        Memory::File => {
            let peer = rustix::net::sockopt::socket_peercred(socket).map_err(Error::io("ask who the server is"))?;
            if !may_shrink(peer.uid, rustix::process::geteuid()) {
                let reason = format!("a window that can be shrunk, of user {}", peer.uid.as_raw());
                return Err(unsound("welcome", reason));
            }
            accel_window::map_file(file)?
        }
    };
    let (window, version) = Window::open(region, VERSIONS)?;
    let there = window.geometry().pairs();
    match there < pairs {
        true => Err(unsound("welcome", format!("{pairs} pairs in a window of {there}"))),
        false => Ok((window, version)),
    }
}

/// Who may have a file that this process maps: who could end it anyway.
pub(crate) fn may_shrink(server: Uid, own: Uid) -> bool {
    server.is_root() || server == own
}

/// What wakes a server, and what is seen of it; the connection ends with it.
fn server_of(
    window: &Window,
    pair: u32,
    bell: Option<OwnedFd>,
    socket: &Arc<PacketSocket>,
) -> Result<(Box<dyn Signal>, Peer), Error> {
    let peer = Peer::Server {
        life: window.life()?,
        socket: Arc::clone(socket),
    };
    let signal: Box<dyn Signal> = match bell {
        Some(bell) => Box::new(SocketSignal::new(bell)),
        None => futex_signal(window, pair, Side::Client)?,
    };
    Ok((signal, peer))
}

/// A client's end of a pair of rings.
pub(crate) fn client_end(
    agreed: Agreement,
    window: &Window,
    pair: u32,
    (signal, peer): (Box<dyn Signal>, Peer),
) -> Result<RingEnd, Error> {
    let rings = window.client_pair(pair)?;
    let placement = match agreed.transport {
        Transport::SameCpu => Placement::tell(window.client_cpu(pair)?),
        _ => Placement::Anywhere,
    };
    let rings = (rings.submissions, rings.completions);
    Ok(ring_end(agreed.busy_poll, window, rings, (signal, peer, placement)))
}

/// Meets the client at the other end of a socket.
///
/// # Errors
/// Each of [`Error`]'s. A client that can have nothing of what it wishes is told so, and is [`Protocol::Refused`] here too.
pub fn accept(socket: PacketSocket, settings: &Settings) -> Result<ServerConnection, Error> {
    let (hello, fds) = receive_bytes(&socket, "hello", settings.patience)?;
    if !fds.is_empty() {
        return Err(unsound("hello", format!("{} descriptors came with it", fds.len())));
    }
    let agreed = match Agreement::on(&hello, settings) {
        Err(Error::Protocol(Protocol::Refused(reason))) => {
            send(&socket, &Welcome::Refused(reason.clone()), &[])?;
            return Err(Protocol::Refused(reason).into());
        }
        agreed => agreed?,
    };
    let wake = match agreed.transport {
        Transport::Bell => Wake::Sockets,
        _ => Wake::Words,
    };
    let (mut sent, mut kept) = (Vec::new(), Vec::new());
    let mut window = None;
    if agreed.transport.has_rings() {
        let geometry = Geometry::new(agreed.pairs, settings.records, settings.arena)?;
        let (memory, made) = Window::create(geometry)?;
        // Before the client sees the window, or it would see nobody in it.
        window = Some((Holder::new(&made)?, made));
        sent.push(OwnedFd::from(memory));
    }
    for _ in 0..agreed.sockets(wake) {
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let (own, theirs) = pair.map_err(Error::io("have a pair of sockets"))?;
        kept.push(own);
        sent.push(theirs);
    }
    let sent: Vec<BorrowedFd<'_>> = sent.iter().map(AsFd::as_fd).collect();
    let (first, rest) = sent.split_at(sent.len().min(MAX_FDS));
    send(&socket, &agreed.welcome(wake, Memory::Memfd), first)?;
    for more in rest.chunks(MAX_FDS) {
        socket
            .send(MORE, more)
            .map_err(|error| Error::packet(error, "a packet", Duration::ZERO))?;
    }
    agreed.assemble(window, kept, socket.into())
}

impl Agreement {
    pub(crate) fn welcome(self, wake: Wake, memory: Memory) -> Welcome {
        Welcome::Accepted {
            transport: self.transport,
            pairs: self.pairs,
            wake,
            memory,
            busy_poll_us: u32::try_from(self.busy_poll.as_micros()).unwrap_or(u32::MAX),
            arena: self.arena,
        }
    }

    /// Whether it is what a client has offered.
    fn was_offered(&self, offer: &Offer) -> Result<(), Error> {
        let Self { transport, pairs, .. } = *self;
        match offer.transports.contains(&transport) && pairs > 0 && pairs <= offer.pairs {
            true => Ok(()),
            false => {
                let reason = format!("{transport} with {pairs} pairs was not asked for");
                Err(unsound("welcome", reason))
            }
        }
    }

    /// Memory of this side's own, for an arena of which bytes travel on streams.
    fn copy_of_arena(&self) -> Result<Window, Error> {
        // There are no rings in it but the least that a window has.
        Ok(Window::private(Geometry::new(1, 2, self.arena)?)?)
    }

    /// The server's half, of a client whose records travel on streams: of this machine, of a guest or of another machine.
    pub(crate) fn serve_streams(self, pairs: Vec<Channel>, client: OwnedFd) -> Result<ServerConnection, Error> {
        let arena = self.copy_of_arena()?;
        let mut bells = Vec::new();
        for channel in &pairs {
            let again = channel.socket().try_clone_to_owned();
            bells.push(Bell::Socket(again.map_err(Error::io("copy a descriptor"))?));
        }
        let watch = Watch::new(client, bells).map_err(Error::io("start a thread"))?;
        let end = |channel| ServerEnd {
            way: Way::Stream(Box::new(StreamEnd::new(channel, Sequence::Callers, arena.clone()))),
            transport: self.transport,
        };
        Ok(ServerConnection {
            transport: self.transport,
            ends: pairs.into_iter().map(end).collect(),
            window: Some(arena),
            watch,
            _holder: None,
        })
    }

    /// What a client in a guest is told of it, as bytes, with a file of the guest's and a socket for each pair.
    ///
    /// # Errors
    /// None that is known: it is written into memory.
    pub fn welcome_in_guest(self) -> Result<Vec<u8>, Error> {
        bytes_of(&self.welcome(Wake::Sockets, Memory::File))
    }

    /// What a client is told that can have nothing, as bytes.
    ///
    /// # Errors
    /// None that is known: it is written into memory.
    pub fn refusal(reason: &str) -> Result<Vec<u8>, Error> {
        bytes_of(&Welcome::Refused(reason.to_owned()))
    }

    /// Makes the window in memory that a client in a guest has as a file; the arena is what is left of it. Nobody else has the memory as
    /// a server. A client that enters has it already, and may write meanwhile: it is looked at as every client's memory is.
    ///
    /// # Errors
    /// The memory is too small; no thread can be had that holds it.
    pub fn make_window(self, memory: Region, settings: &Settings) -> Result<(Holder, Window), Error> {
        let rings = Geometry::new(self.pairs, settings.records, 0)?.length();
        let arena = memory.length().saturating_sub(rings) & !(accel_window::PAGE - 1);
        let window = Window::format(
            memory,
            Geometry::new(self.pairs, settings.records, arena.min(settings.arena))?,
        )?;
        Ok((Holder::new(&window)?, window))
    }

    /// The server's half: a window where the transport has rings, a socket for each pair, and one that is hung up when the client is
    /// gone.
    ///
    /// # Errors
    /// A thread cannot be had; sockets are too few.
    pub fn serve(
        self,
        window: Option<(Holder, Window)>,
        sockets: Vec<OwnedFd>,
        client: PacketSocket,
    ) -> Result<ServerConnection, Error> {
        match sockets.len() == self.sockets(Wake::Sockets) && window.is_some() == self.transport.has_rings() {
            true => self.assemble(window, sockets, client.into()),
            false => Err(unsound(
                "own",
                format!("{} sockets for {} pairs", sockets.len(), self.pairs),
            )),
        }
    }

    /// The server's half of a connection that another server had whose machine was saved: the window in memory with the same bytes, from
    /// where that server was in each pair.
    ///
    /// # Errors
    /// As [`Agreement::serve`]; positions are too few, or none of a ring's.
    pub fn resume(
        self,
        (window, positions): (Window, &[Position]),
        sockets: Vec<OwnedFd>,
        client: PacketSocket,
    ) -> Result<ServerConnection, Error> {
        let counts = [sockets.len(), positions.len()];
        if counts != [self.pairs as usize; 2] || !self.transport.has_rings() {
            let [sockets, positions] = counts;
            let reason = format!("{sockets} sockets and {positions} positions for {} pairs", self.pairs);
            return Err(unsound("own", reason));
        }
        let holder = Holder::new(&window)?;
        self.assemble_at((holder, window), sockets, client.into(), positions)
    }

    fn assemble(
        self,
        window: Option<(Holder, Window)>,
        sockets: Vec<OwnedFd>,
        client: OwnedFd,
    ) -> Result<ServerConnection, Error> {
        let Some(window) = window else {
            let channels = sockets.into_iter().map(Channel::new).collect::<Result<Vec<_>, _>>()?;
            return self.serve_streams(channels, client);
        };
        self.assemble_at(window, sockets, client, &[])
    }

    /// The same with a window, from these positions of its pairs on; all from the beginning if there are none.
    fn assemble_at(
        self,
        (holder, window): (Holder, Window),
        sockets: Vec<OwnedFd>,
        client: OwnedFd,
        positions: &[Position],
    ) -> Result<ServerConnection, Error> {
        let mut bells = Vec::new();
        for pair in 0..self.pairs {
            bells.push(match sockets.get(pair as usize) {
                Some(socket) => {
                    let again = socket.try_clone().map_err(Error::io("copy a descriptor"))?;
                    Bell::Socket(again)
                }
                None => Bell::Futex(window.bell(pair, Side::Server)?),
            });
        }
        let watch = Watch::new(client, bells).map_err(Error::io("start a thread"))?;
        let mut sockets = sockets.into_iter();
        let mut ends = Vec::new();
        for pair in 0..self.pairs {
            let rings = match positions.get(pair as usize) {
                Some(at) => window.resume_server_pair(pair, (at.incoming, at.outgoing))?,
                None => window.server_pair(pair)?,
            };
            let bell = sockets.next();
            let way = Way::Ring(Box::new(self.server_end((&window, rings), pair, bell, watch.peer())?));
            ends.push(ServerEnd {
                way,
                transport: self.transport,
            });
        }
        Ok(ServerConnection {
            transport: self.transport,
            window: Some(window),
            ends,
            watch,
            _holder: Some(holder),
        })
    }

    /// A server's end of a pair of rings.
    fn server_end(
        self,
        (window, rings): (&Window, ServerPair),
        pair: u32,
        bell: Option<OwnedFd>,
        peer: Peer,
    ) -> Result<RingEnd, Error> {
        let signal: Box<dyn Signal> = match bell {
            Some(bell) => Box::new(SocketSignal::new(bell)),
            None => futex_signal(window, pair, Side::Server)?,
        };
        let placement = match self.transport {
            Transport::SameCpu => Placement::follow(window.client_cpu(pair)?),
            _ => Placement::Anywhere,
        };
        let rings = (rings.completions, rings.submissions);
        let mut end = ring_end(self.busy_poll, window, rings, (signal, peer, placement));
        end.leave_records(Some(coalesce::DEFAULT));
        Ok(end)
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

/// One side of a pair of rings: what goes out, and what comes in.
fn ring_end(
    busy_poll: Duration,
    window: &Window,
    (outgoing, incoming): (wire::ring::Producer, wire::ring::Consumer),
    (signal, peer, placement): (Box<dyn Signal>, Peer, Placement),
) -> RingEnd {
    let batch = BATCH.min(window.geometry().records() / 2);
    RingEnd {
        outgoing,
        incoming,
        signal,
        peer,
        poll: BusyPoll::up_to(busy_poll),
        placement,
        batch,
        is_left: false,
        since: None,
        coalesce: Coalesce::of(1),
        next: None,
        counters: Counters::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_can_be_shrunk_is_roots_or_the_users_own() {
        let [root, own, other] = [0, 1000, 1001].map(Uid::from_raw);
        assert!(may_shrink(root, own) && may_shrink(own, own));
        assert!(!may_shrink(other, own) && !may_shrink(other, root));
    }
}
