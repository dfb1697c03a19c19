//! The client's half of a connection in a virtual machine that was saved, and is started again: as it was, or as another one. Its memory
//! is as it was, and so is the window; its sockets are cut, and another server goes on with the rings. Knows no ring and no record.
//!
//! ```text
//!   served ──(a pair's socket has ended, or a packet is there)──▶ cut ──(packets with a socket for each pair)──▶ served, by the next
//!                                                                  └ nobody holds the window, the agent hung up, 15 s, unsound ─▶ over
//! ```
//!
//! The threads that find the end wait side by side, and whoever sees the packets takes them for all. The new sockets get the descriptors'
//! numbers of the old ones (dup3(2)), so a thread that sleeps or looks at its ring goes on and needs no news. Each time counts as a
//! generation: a thread whose socket has ended since it looked at that number looks again, and waits for nothing. Both sides look at
//! all rings then: the new server when it begins, and each pair's server is woken once, as a wake-up may have been lost.
//!
//! What the program may do with descriptors that it does not know, such as close(2) of all, is noticed as far as it can be: no number
//! gets a new socket, and nothing is read from one, that is not the socket any more which the connection had there.
#![allow(
    unsafe_code,
    reason = "a descriptor that other threads use is replaced in place, which dup3(2) does and no borrowed type can say"
)]

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use accel_window::Life;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::{DupFlags, Errno, dup3};
use rustix::net::{Shutdown, SocketType};
use wire::packet::{PacketError, PacketSocket};

use crate::greeting::{MORE, unsound};
use crate::peer::{Peer, has_something};
use crate::signal::{wait_for, wake_by};
use crate::{Error, Signal};

/// How long a server has to take over. The agent waits for it 10 s.
const PATIENCE: Duration = Duration::from_secs(15);

/// How often who waits for that looks whether anybody holds the window.
const LOOK: Duration = Duration::from_millis(20);

/// What tells a socket from whatever else has its number later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// None of what is no socket.
    fn of(socket: impl AsFd) -> Result<Option<Self>, Errno> {
        let found = rustix::fs::fstat(socket)?;
        let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
        Ok(is_socket.then_some(Self {
            device: found.st_dev,
            inode: found.st_ino,
        }))
    }

    /// Whether it still is what a descriptor is of.
    fn is_of(self, socket: impl AsFd) -> bool {
        Self::of(socket) == Ok(Some(self))
    }
}

/// A pair's socket, as long as an end has it.
#[derive(Debug)]
struct Pair {
    socket: Weak<OwnedFd>,
    identity: Identity,
}

/// What changes.
#[derive(Debug, Default)]
struct State {
    pairs: Vec<Pair>,
    /// Since when it is cut.
    cut: Option<Instant>,
    /// Sockets that have come, until there is one for each pair.
    came: Vec<OwnedFd>,
}

/// What all ends of a connection have in common.
#[derive(Debug)]
pub(crate) struct Resumption {
    life: Life,
    packets: Arc<PacketSocket>,
    packets_identity: Identity,
    patience: Duration,
    /// How often a server has taken over.
    generation: AtomicU32,
    over: AtomicBool,
    /// Held for moments: nobody waits with it.
    state: Mutex<State>,
}

impl Resumption {
    /// Of a connection to the server that holds the window, by an agent at the other end of the socket.
    pub(crate) fn new(life: Life, packets: Arc<PacketSocket>) -> Result<Arc<Self>, Error> {
        let identity = identify(&*packets)?;
        Ok(Arc::new(Self {
            life,
            packets,
            packets_identity: identity,
            patience: PATIENCE,
            generation: AtomicU32::new(0),
            over: AtomicBool::new(false),
            state: Mutex::default(),
        }))
    }

    /// The next pair, by its socket: what wakes its server, and what is seen of it.
    pub(crate) fn join(self: &Arc<Self>, socket: OwnedFd) -> Result<(Box<dyn Signal>, Peer), Error> {
        let identity = identify(&socket)?;
        let socket = Arc::new(socket);
        self.lock().pairs.push(Pair {
            socket: Arc::downgrade(&socket),
            identity,
        });
        let signal = ResumableSignal {
            resumption: Arc::clone(self),
            socket,
        };
        Ok((Box::new(signal), Peer::Resumable(Arc::clone(self))))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nobody goes on with the connection, by loads alone.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) || self.life.is_over()
    }

    /// Takes what the agent has sent, without waiting. False if it has hung up.
    pub(crate) fn look(&self) -> Result<bool, Error> {
        if !has_something(&self.packets) {
            return Ok(true);
        }
        match self.take(self.generation.load(Ordering::Acquire)) {
            Ok(_) => Ok(true),
            Err(Error::PeerGone) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Somebody's socket has ended, which was used when the generation was `since`: waits for another one, no longer than that. True if
    /// there is one.
    fn resume(&self, since: u32, most: Duration) -> Result<bool, Error> {
        let begun = Instant::now();
        loop {
            if self.is_over() {
                return Err(Error::PeerGone);
            }
            if self.take(since)? {
                return Ok(true);
            }
            let Some(cut) = self.cut_since(since, begun) else {
                return Ok(true);
            };
            if cut.elapsed() >= self.patience {
                return Err(self.end(Error::PeerGone));
            }
            let left = most.saturating_sub(begun.elapsed()).min(LOOK);
            if left.is_zero() {
                return Ok(false);
            }
            self.wait_for_packets(left)?;
        }
    }

    /// When the first thread found this generation's socket at an end; nothing if it is another generation's time.
    fn cut_since(&self, generation: u32, now: Instant) -> Option<Instant> {
        let mut state = self.lock();
        let is_current = self.generation.load(Ordering::Acquire) == generation;
        is_current.then(|| *state.cut.get_or_insert(now))
    }

    fn wait_for_packets(&self, most: Duration) -> Result<(), Error> {
        let most = Timespec {
            tv_sec: 0,
            tv_nsec: most.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&*self.packets, PollFlags::IN)], Some(&most)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(Error::io("wait for the guest's agent")(error)),
        }
    }

    /// Takes the packets that are there. True if the generation is another than `since` then.
    fn take(&self, since: u32) -> Result<bool, Error> {
        let mut state = self.lock();
        loop {
            if self.generation.load(Ordering::Acquire) != since {
                return Ok(true);
            }
            if self.over.load(Ordering::Acquire) {
                return Err(Error::PeerGone);
            }
            if !self.packets_identity.is_of(&*self.packets) {
                return Err(self.end(lost_descriptors()));
            }
            if !has_something(&self.packets) {
                return Ok(false);
            }
            let came = self.packets.receive().map_err(hung_up);
            let came = came.and_then(|(bytes, sockets)| state.add(&bytes, sockets));
            let Some(sockets) = came.map_err(|error| self.end(error))? else {
                continue;
            };
            state.replace(sockets).map_err(|error| self.end(error))?;
            self.generation.fetch_add(1, Ordering::Release);
            state.wake_all()?;
        }
    }

    /// It is over for all threads, and for the agent.
    fn end(&self, error: Error) -> Error {
        self.over.store(true, Ordering::Release);
        if self.packets_identity.is_of(&*self.packets)
            && let Err(errno) = rustix::net::shutdown(&*self.packets, Shutdown::Both)
            && errno != Errno::NOTCONN
        {
            log::warn!("the guest's agent is not told that a connection is over: {errno}");
        }
        error
    }
}

impl State {
    /// What a packet has; all sockets once there is one for each pair.
    fn add(&mut self, bytes: &[u8], sockets: Vec<OwnedFd>) -> Result<Option<Vec<OwnedFd>>, Error> {
        if bytes != MORE || sockets.is_empty() {
            let reason = format!("{} bytes and {} descriptors came in it", bytes.len(), sockets.len());
            return Err(unsound("resumption", reason));
        }
        self.came.extend(sockets);
        match (self.came.len(), self.pairs.len()) {
            (came, due) if came < due => Ok(None),
            (came, due) if came > due => {
                let reason = format!("{came} descriptors came, {due} were due");
                Err(unsound("resumption", reason))
            }
            _ => Ok(Some(std::mem::take(&mut self.came))),
        }
    }

    /// Puts each in the place of the one before; none if one is no socket, or a place has become somebody else's.
    fn replace(&mut self, sockets: Vec<OwnedFd>) -> Result<(), Error> {
        let mut identities = Vec::new();
        for socket in &sockets {
            let of_stream = rustix::net::sockopt::socket_type(socket) == Ok(SocketType::STREAM);
            let identity = Identity::of(socket).map_err(Error::io("look at a descriptor"))?;
            identities.push(match identity.filter(|_| of_stream) {
                Some(identity) => identity,
                None => return Err(unsound("resumption", "a descriptor is no stream socket".to_owned())),
            });
        }
        let places: Vec<_> = self.pairs.iter().map(|pair| pair.socket.upgrade()).collect();
        let is_own = |(pair, place): (&Pair, &Option<Arc<OwnedFd>>)| {
            place.as_ref().is_none_or(|place| pair.identity.is_of(&**place))
        };
        if !self.pairs.iter().zip(&places).all(is_own) {
            return Err(lost_descriptors());
        }
        for ((place, socket), (pair, identity)) in places.iter().zip(sockets).zip(self.pairs.iter_mut().zip(identities))
        {
            // One whose end is gone is hung up.
            if let Some(place) = place {
                replace(place, &socket).map_err(Error::io("put a socket in another one's place"))?;
                pair.identity = identity;
            }
        }
        self.cut = None;
        Ok(())
    }

    /// Wakes the server's side of each pair.
    fn wake_all(&self) -> Result<(), Error> {
        for socket in self.pairs.iter().filter_map(|pair| pair.socket.upgrade()) {
            match wake_by(&socket) {
                // Cut again: who uses it finds that out, too.
                Ok(()) | Err(Error::PeerGone) => (),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Makes a descriptor one of another socket, whose own descriptor stays.
fn replace(place: &OwnedFd, socket: &OwnedFd) -> io::Result<()> {
    // SAFETY: 1. the number is open and owned, as `place` is borrowed meanwhile; 2. this second owner never closes it.
    let mut number = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(place.as_raw_fd()) });
    // Threads that use it have the one socket or the other.
    dup3(socket, &mut number, DupFlags::CLOEXEC).map_err(io::Error::from)
}

fn identify(socket: impl AsFd) -> Result<Identity, Error> {
    let identity = Identity::of(socket).map_err(Error::io("look at a descriptor"))?;
    identity.ok_or_else(|| unsound("welcome", "a descriptor is no socket".to_owned()))
}

/// Of the agent's socket.
fn hung_up(error: PacketError) -> Error {
    Error::packet(error, "a packet of sockets", Duration::ZERO)
}

fn lost_descriptors() -> Error {
    let reason = "the program has closed the connection's descriptors; its next connection works";
    Error::io("go on after the machine was saved")(io::Error::other(reason))
}

/// By a pair's socket, and another one in its place each time that a server has taken over.
#[derive(Debug)]
struct ResumableSignal {
    resumption: Arc<Resumption>,
    socket: Arc<OwnedFd>,
}

impl ResumableSignal {
    fn generation(&self) -> u32 {
        self.resumption.generation.load(Ordering::Acquire)
    }
}

impl Signal for ResumableSignal {
    fn seen(&self) -> u32 {
        self.generation()
    }

    /// Returns when a server can be woken: it may be that nobody waits here for its answer, and so would see it come back.
    fn wake(&self) -> Result<(), Error> {
        loop {
            let generation = self.generation();
            match wake_by(&self.socket) {
                Err(Error::PeerGone) => drop(self.resumption.resume(generation, Duration::MAX)?),
                outcome => return outcome,
            }
        }
    }

    fn wait(&self, seen: u32, most: Duration) -> Result<bool, Error> {
        if self.generation() != seen {
            return Ok(true);
        }
        match wait_for(&self.socket, most) {
            Err(Error::PeerGone) => self.resumption.resume(seen, most),
            outcome => outcome,
        }
    }
}
