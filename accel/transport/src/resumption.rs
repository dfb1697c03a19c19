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
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
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
        Self::within(PATIENCE, life, packets)
    }

    fn within(patience: Duration, life: Life, packets: Arc<PacketSocket>) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            life,
            packets_identity: identify(&*packets)?,
            packets,
            patience,
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
                replace(place.as_fd(), socket.as_fd()).map_err(Error::io("put a socket in another one's place"))?;
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
fn replace(place: BorrowedFd<'_>, socket: BorrowedFd<'_>) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use accel_window::{Geometry, Holder, Window};

    use super::*;

    const MOST: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(80);

    /// A connection with two pairs: what an agent has, an end's signal, and what the server has.
    struct Met {
        resumption: Arc<Resumption>,
        agent: PacketSocket,
        signals: Vec<Box<dyn Signal>>,
        server: Vec<UnixStream>,
        _holder: Holder,
    }

    impl Met {
        fn new() -> Self {
            let (_, window) = Window::create(Geometry::new(1, 8, 0).unwrap()).unwrap();
            let holder = Holder::new(&window).unwrap();
            let (near, agent) = PacketSocket::pair().unwrap();
            let resumption = Resumption::within(SHORT, window.life().unwrap(), Arc::new(near)).unwrap();
            let (server, theirs) = streams();
            let signals = theirs.into_iter().map(|socket| resumption.join(socket).unwrap().0);
            Self {
                signals: signals.collect(),
                resumption,
                agent,
                server,
                _holder: holder,
            }
        }

        /// Other sockets for the client, of which the server has the other ends.
        fn hand_over(&mut self) {
            let (server, theirs) = streams();
            let theirs: Vec<_> = theirs.iter().map(AsFd::as_fd).collect();
            self.agent.send(MORE, &theirs).unwrap();
            self.server = server;
        }

        fn pair(&self, pair: usize) -> Arc<OwnedFd> {
            self.resumption.lock().pairs[pair].socket.upgrade().unwrap()
        }
    }

    fn streams() -> (Vec<UnixStream>, Vec<OwnedFd>) {
        let both = [UnixStream::pair().unwrap(), UnixStream::pair().unwrap()];
        both.map(|(own, theirs)| (own, OwnedFd::from(theirs)))
            .into_iter()
            .unzip()
    }

    #[test]
    fn a_server_that_does_not_come_is_waited_for_so_long_each_time() {
        let mut met = Met::new();
        for _ in 0..3 {
            met.server.clear();
            let begun = Instant::now();
            assert!(!met.signals[0].wait(met.signals[0].seen(), SHORT / 2).unwrap());
            assert!(begun.elapsed() >= SHORT / 2);
            met.hand_over();
            met.signals[0].wake().unwrap();
            // No part of the next time's.
            std::thread::sleep(SHORT);
        }
        met.server.clear();
        let begun = Instant::now();
        let signals = std::mem::take(&mut met.signals);
        let waiting = signals.into_iter().map(|signal| {
            std::thread::spawn(move || {
                (
                    signal.wake().unwrap_err(),
                    signal.wait(signal.seen(), MOST).unwrap_err(),
                )
            })
        });
        for waiting in waiting.collect::<Vec<_>>() {
            while !waiting.is_finished() {
                assert!(begun.elapsed() < MOST / 2);
                std::thread::sleep(Duration::from_millis(5));
            }
            let both = waiting.join().unwrap();
            assert!(matches!(both, (Error::PeerGone, Error::PeerGone)), "{both:?}");
        }
        assert!(begun.elapsed() >= SHORT && met.resumption.is_over());
        met.agent.wait_to_receive(Instant::now() + MOST).unwrap();
        assert!(matches!(met.agent.receive(), Err(PacketError::Closed)), "it is told");
    }

    #[test]
    fn numbers_stay_and_an_end_that_is_gone_gets_none() {
        let mut met = Met::new();
        let of = |met: &Met| (met.pair(1).as_raw_fd(), Identity::of(&*met.pair(1)).unwrap().unwrap());
        let before = of(&met);
        drop(met.signals.remove(0));
        met.server.clear();
        met.hand_over();
        let seen = met.signals[0].seen();
        met.signals[0].wake().unwrap();
        // Whoever looked before that looks again.
        let begun = Instant::now();
        assert!(met.signals[0].wait(seen, MOST).unwrap() && begun.elapsed() < MOST / 2);
        let after = of(&met);
        assert_eq!(before.0, after.0);
        assert_ne!(before.1, after.1);
        let closed = rustix::io::fcntl_getfd(&*met.pair(1)).unwrap();
        assert!(closed.contains(rustix::io::FdFlags::CLOEXEC));
        let [first, second] = &met.server[..] else {
            unreachable!()
        };
        assert_eq!((&*first).read(&mut [0]).unwrap(), 0, "nobody has its other end");
        assert_eq!((&*second).read(&mut [0]).unwrap(), 1);
    }

    #[test]
    fn a_number_that_is_the_programs_is_left_alone() {
        let refused = |met: &Met| {
            let error = met.signals[1].wake().unwrap_err().to_string();
            assert!(error.contains("has closed"), "{error}");
            assert!(met.resumption.is_over());
        };
        let mut met = Met::new();
        let file = OwnedFd::from(File::open("/dev/null").unwrap());
        replace(met.pair(0).as_fd(), file.as_fd()).unwrap();
        met.server.clear();
        met.hand_over();
        refused(&met);
        assert_eq!(Identity::of(&*met.pair(0)), Ok(None), "it still is the file");

        let mut met = Met::new();
        let (sends, receives) = PacketSocket::pair().unwrap();
        sends.send(b"the program's", &[]).unwrap();
        replace(met.resumption.packets.as_fd(), receives.as_fd()).unwrap();
        met.server.clear();
        refused(&met);
        assert_eq!(receives.receive().unwrap().0, b"the program's");
        sends.send(b"more", &[]).unwrap();
    }
}
