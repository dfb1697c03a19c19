//! The arbiter: a socket for each tenant, a page for each server that has connected, and one thread that looks at the pages.
//!
//! ```text
//!   nobody has work: sleeps ── a tenant's byte ──▶ one has: looks now and then ── another one's ──▶ several: looks each millisecond
//! ```
//!
//! Which tenant a server is, and so its share, is said by the socket that it connects to, which whoever starts servers makes reachable for
//! that one alone. A server that ends takes its credit and its work with it; the next one on its socket begins anew.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::{EventFd, StopSignal, Worker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::PacketSocket;

use crate::page::{HELLO, Page};
use crate::{Credit, Rounds, Seen, Share};

/// How often it looks while several have work.
const TICK: Duration = Duration::from_millis(1);

/// How often it looks while one has, to see that it has no more.
const SLOW: Duration = Duration::from_millis(25);

/// Microseconds of each round for the least weight: long beside what a round costs, short beside what people notice.
const QUANTUM: u32 = 4_000;

/// Why there is no arbiter, or no tenant.
#[derive(Debug, thiserror::Error)]
pub enum ArbiterError {
    /// No thread or descriptor.
    #[error("cannot start an arbiter: {0}")]
    Start(#[source] io::Error),
    /// The socket cannot be made.
    #[error("cannot listen for the accelerator's tenant '{name}' on {}: {source}; give a path in a directory that exists, where nobody \
             else listens", path.display())]
    Listen {
        /// Which tenant.
        name: String,
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// What is told of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Its part.
    pub share: Share,
    /// Whether its server is connected.
    pub is_connected: bool,
    /// Of the device's time, as its servers have said.
    pub used: Duration,
}

/// Divides one device's time.
#[derive(Debug)]
pub struct Arbiter {
    shared: Arc<Shared>,
    _worker: Worker<()>,
}

#[derive(Debug)]
struct Shared {
    tenants: Mutex<BTreeMap<String, Tenant>>,
    /// Tenants were changed.
    nudge: EventFd,
}

#[derive(Debug)]
struct Tenant {
    number: u64,
    share: Share,
    listener: OwnedFd,
    server: Option<Server>,
    used: Duration,
}

/// A server that has connected.
#[derive(Debug)]
struct Server {
    socket: PacketSocket,
    page: Page,
    /// What it has used in all, as far as it was seen.
    spent: u32,
}

impl Arbiter {
    /// One without tenants.
    ///
    /// # Errors
    /// [`ArbiterError::Start`].
    pub fn start() -> Result<Self, ArbiterError> {
        let shared = Arc::new(Shared {
            tenants: Mutex::default(),
            nudge: EventFd::new().map_err(ArbiterError::Start)?,
        });
        let serving = Arc::clone(&shared);
        let worker =
            Worker::spawn("accel-arbiter", (), move |(), stop| serve(&serving, stop)).map_err(ArbiterError::Start)?;
        Ok(Self {
            shared,
            _worker: worker,
        })
    }

    /// A tenant, whose server connects to this socket. One with this name that there is already has another share from now on, and stays
    /// where it is.
    ///
    /// # Errors
    /// [`ArbiterError::Listen`].
    pub fn admit(&self, name: &str, share: Share, path: &Path) -> Result<(), ArbiterError> {
        self.admit_on(name, share, || listen(path))
            .map_err(|source| ArbiterError::Listen {
                name: name.to_owned(),
                path: path.to_owned(),
                source,
            })
    }

    /// The same with a socket that whoever calls this makes, which is only asked for where there is no such tenant: a unix socket for
    /// packets in sequence that listens and does not block.
    ///
    /// # Errors
    /// Those of `listen`.
    pub fn admit_on<E>(&self, name: &str, share: Share, listen: impl FnOnce() -> Result<OwnedFd, E>) -> Result<(), E> {
        let mut tenants = self.shared.tenants();
        if let Some(tenant) = tenants.get_mut(name) {
            tenant.share = share;
            return Ok(());
        }
        let tenant = Tenant {
            number: tenants
                .values()
                .map(|tenant| tenant.number + 1)
                .max()
                .unwrap_or_default(),
            share,
            listener: listen()?,
            server: None,
            used: Duration::ZERO,
        };
        tenants.insert(name.to_owned(), tenant);
        drop(tenants);
        self.shared.nudge.signal();
        Ok(())
    }

    /// A tenant is no more; its server, if it has one, is no longer limited.
    pub fn dismiss(&self, name: &str) {
        let dismissed = self.shared.tenants().remove(name);
        drop(dismissed);
        self.shared.nudge.signal();
    }

    /// All tenants.
    #[must_use]
    pub fn report(&self) -> BTreeMap<String, Report> {
        let tenants = self.shared.tenants();
        let report = |tenant: &Tenant| Report {
            share: tenant.share,
            is_connected: tenant.server.is_some(),
            used: tenant.used,
        };
        (tenants.iter())
            .map(|(name, tenant)| (name.clone(), report(tenant)))
            .collect()
    }
}

impl Shared {
    fn tenants(&self) -> MutexGuard<'_, BTreeMap<String, Tenant>> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread's life.
fn serve(shared: &Shared, stop: &StopSignal) {
    let begun = Instant::now();
    let mut rounds = Rounds::new(QUANTUM);
    let mut most = None;
    loop {
        match wait(shared, stop, most) {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => {
                // Servers see its end, and go on without.
                log::error!("the arbiter of an accelerator ends: {error}; nothing divides its time now");
                shared.tenants().values_mut().for_each(|tenant| tenant.server = None);
                return;
            }
        }
        let mut tenants = shared.tenants();
        for (name, tenant) in tenants.iter_mut() {
            tenant.hear(name);
        }
        let now = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        most = look(&mut tenants, &mut rounds, now);
    }
}

/// Waits for a byte or a server of any tenant, or for the time to look again. True if this is to stop.
fn wait(shared: &Shared, stop: &StopSignal, most: Option<Duration>) -> Result<bool, Errno> {
    // Descriptors of their own, so that nobody who admits a tenant waits for this.
    let fds: Vec<OwnedFd> = {
        let tenants = shared.tenants();
        let of = |tenant: &Tenant| -> io::Result<Vec<OwnedFd>> {
            let mut fds = vec![tenant.listener.as_fd().try_clone_to_owned()?];
            if let Some(server) = &tenant.server {
                fds.push(server.socket.as_fd().try_clone_to_owned()?);
            }
            Ok(fds)
        };
        let fds: io::Result<Vec<_>> = tenants.values().map(of).collect();
        fds.map_err(|_| Errno::MFILE)?.into_iter().flatten().collect()
    };
    let own = [
        PollFd::new(stop.fd(), PollFlags::IN),
        PollFd::new(&shared.nudge, PollFlags::IN),
    ];
    let mut ready: Vec<_> = own
        .into_iter()
        .chain(fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)))
        .collect();
    let most = most.and_then(|most| Timespec::try_from(most).ok());
    match poll(&mut ready, most.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error),
    }
    let is = |index: usize| ready.get(index).is_some_and(|ready| !ready.revents().is_empty());
    if is(1) {
        shared.nudge.consume();
    }
    Ok(is(0))
}

/// Looks at all pages, and says what each may do. How long until it has to look again.
fn look(tenants: &mut BTreeMap<String, Tenant>, rounds: &mut Rounds, now: u64) -> Option<Duration> {
    rounds.keep(|number| {
        tenants
            .values()
            .any(|tenant| tenant.number == number && tenant.server.is_some())
    });
    let mut waits = BTreeMap::new();
    for tenant in tenants.values_mut() {
        let Some(server) = &mut tenant.server else { continue };
        rounds.join(tenant.number, tenant.share);
        let (spent, busy, waiting) = server.page.seen();
        let more = spent.wrapping_sub(server.spent);
        server.spent = spent;
        tenant.used += Duration::from_micros(more.into());
        let seen = Seen {
            spent: more.into(),
            busy,
            waits: waiting,
        };
        rounds.see(tenant.number, seen, now);
        waits.insert(tenant.number, waiting);
    }
    let credits: BTreeMap<u64, Credit> = rounds.decide(now).into_iter().collect();
    let mut awake = false;
    for tenant in tenants.values() {
        let (Some(server), Some(credit)) = (&tenant.server, credits.get(&tenant.number)) else {
            continue;
        };
        let news = server.page.grant(*credit, server.spent);
        if news && waits.get(&tenant.number) == Some(&true) {
            // One whose socket is full has news enough.
            _ = rustix::net::send(&server.socket, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
        awake |= !(rounds.is_asleep(tenant.number, now) && server.page.sleep());
    }
    match (rounds.is_contended(), awake) {
        (true, _) => Some(TICK),
        (false, true) => Some(SLOW),
        (false, false) => None,
    }
}

impl Tenant {
    /// Whoever connects, and whoever has sent a byte or hung up.
    fn hear(&mut self, name: &str) {
        match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => match Server::greet(socket) {
                // One at a time: the one before is a server that was started again, or it is no longer limited.
                Ok(server) => self.server = Some(server),
                Err(error) => log::warn!("the server of the accelerator's tenant '{name}' cannot be greeted: {error}"),
            },
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
            Err(error) => log::warn!("no server of the accelerator's tenant '{name}' can connect: {error}"),
        }
        let heard = (self.server.as_ref()).map(|server| {
            let mut bytes = [0; 64];
            // All bytes, each of which is a packet; no more than a few, as one may send without end.
            (0..16).find_map(
                |_| match rustix::net::recv(&server.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                    Ok((_, length)) if length > 0 => None,
                    Err(Errno::INTR) => None,
                    Err(Errno::AGAIN) => Some(true),
                    Ok(_) | Err(_) => Some(false),
                },
            )
        });
        if heard == Some(Some(false)) {
            log::info!("the server of the accelerator's tenant '{name}' is gone");
            self.server = None;
        }
    }
}

impl Server {
    fn greet(socket: OwnedFd) -> io::Result<Self> {
        let (file, page) = Page::create()?;
        let socket = PacketSocket::from_fd(socket);
        socket.send(&HELLO, &[file.as_fd()]).map_err(io::Error::other)?;
        Ok(Self { socket, page, spent: 0 })
    }
}

/// A socket for this user alone; one that nobody listens on any more is replaced.
fn listen(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = new()?;
    if let Err(error) = rustix::net::bind(&socket, &address) {
        let stale = error == Errno::ADDRINUSE && rustix::net::connect(&new()?, &address) == Err(Errno::CONNREFUSED);
        if !stale {
            return Err(error.into());
        }
        std::fs::remove_file(path)?;
        rustix::net::bind(&socket, &address)?;
    }
    // Nobody can connect before it listens.
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    rustix::net::listen(&socket, 8)?;
    Ok(socket)
}
