//! Whether the other side is still there. Knows no record.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use accel_window::Life;
use base::{StopSignal, Worker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;
use wire::packet::PacketSocket;
use wire::ring::Word;

use crate::Error;
use crate::enter;
use crate::resumption::Resumption;
use crate::signal::ring;

/// How often a client that sleeps looks whether its server is there. It is told by nobody: it has no thread of its own in a program that
/// is somebody else's.
const CLIENT_LOOKS: Duration = Duration::from_millis(40);

/// A server is woken by its [`Watch`]; this is for waits without end.
const SERVER_LOOKS: Duration = Duration::from_secs(3600);

/// The other side.
#[derive(Clone, Debug)]
pub(crate) enum Peer {
    /// A server, as its client sees it: by the window's header, and by the socket.
    Server { life: Life, socket: Arc<PacketSocket> },
    /// A server of which another one may take over, after this machine was saved.
    Resumable(Arc<Resumption>),
    /// A server that its client runs: what came of it last is known, and the window's header says the rest.
    Entered { life: Life, server: Arc<enter::Server> },
    /// A client, as its server sees it: by what the connection's watch has seen.
    Client(Arc<AtomicBool>),
}

impl Peer {
    /// Whether it is known to be gone, by loads alone.
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Self::Server { life, .. } => life.is_over(),
            Self::Resumable(resumption) => resumption.is_over(),
            Self::Entered { life, server } => server.is_gone() || life.is_over(),
            Self::Client(gone) => gone.load(Ordering::Acquire),
        }
    }

    /// The same after a wait that nobody ended: by a system call, too.
    ///
    /// # Errors
    /// What came from the guest's agent is unsound.
    pub(crate) fn look(&self) -> Result<bool, Error> {
        let is_over = match self {
            Self::Server { socket, .. } => has_something(socket),
            Self::Resumable(resumption) => !resumption.look()?,
            Self::Entered { .. } | Self::Client(_) => false,
        };
        Ok(is_over || self.is_gone())
    }

    /// How long may be waited without a look.
    pub(crate) fn looks(&self) -> Duration {
        match self {
            Self::Server { .. } | Self::Resumable(_) | Self::Entered { .. } => CLIENT_LOOKS,
            Self::Client(_) => SERVER_LOOKS,
        }
    }
}

/// Whether there is an end on the socket, or anything: once they have met neither side says more on it, unless a server takes over.
pub(crate) fn has_something(socket: &PacketSocket) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    !matches!(
        poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&now)),
        Ok(0) | Err(Errno::INTR)
    )
}

/// What a server's threads wait by, to be woken when their client is gone.
#[derive(Debug)]
pub(crate) enum Bell {
    /// A word.
    Futex(Word),
    /// A socket on which this side waits.
    Socket(OwnedFd),
}

/// A thread that waits for the end of a client, and wakes whoever waits for it then.
#[derive(Debug)]
pub(crate) struct Watch {
    gone: Arc<AtomicBool>,
    _worker: Worker<()>,
}

impl Watch {
    pub(crate) fn new(socket: OwnedFd, bells: Vec<Bell>) -> io::Result<Self> {
        let gone = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&gone);
        let body = move |(), stop: &StopSignal| {
            wait(&socket, stop);
            // The connection is over for its threads when the watch is stopped as well.
            told.store(true, Ordering::Release);
            for bell in &bells {
                let rung = match bell {
                    Bell::Futex(word) => ring(word),
                    Bell::Socket(fd) => close(fd),
                };
                if let Err(error) = rung {
                    log::error!("a thread was not told that its client is gone: {error}");
                }
            }
        };
        Ok(Self {
            gone,
            _worker: Worker::spawn("accel-watch", (), body)?,
        })
    }

    /// The client, by what is seen of it.
    pub(crate) fn peer(&self) -> Peer {
        Peer::Client(Arc::clone(&self.gone))
    }

    /// Whether it is gone.
    pub(crate) fn has_seen_the_end(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

/// Whoever waits for the socket finds its end.
fn close(socket: &OwnedFd) -> Result<(), Error> {
    match rustix::net::shutdown(socket, Shutdown::Both) {
        Ok(()) | Err(Errno::NOTCONN) => Ok(()),
        Err(error) => Err(Error::io("shut a socket down")(error)),
    }
}

/// Until the socket or the signal has something.
fn wait(socket: &OwnedFd, stop: &StopSignal) {
    loop {
        let mut both = [
            PollFd::new(socket, PollFlags::IN),
            PollFd::new(stop.fd(), PollFlags::IN),
        ];
        match poll(&mut both, None) {
            Err(Errno::INTR) => (),
            Ok(_) => return,
            Err(error) => return log::error!("a client cannot be watched, and counts as gone: poll failed: {error}"),
        }
    }
}
