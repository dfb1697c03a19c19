//! Clients, each a process with a connection: a thread for each of its threads, one table of objects for all of them, and its end.
//!
//! ```text
//!   connected ── greeting ──▶ served ── hung up, or the protocol broken ──▶ abandoned ── threads ended, queues finished ──▶ released
//! ```
//!
//! Knows no call. A client's end is noticed by whichever thread waits for it, or by the connection's own, as threads may be in the back
//! end and wait for events that nobody would set any more.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use accel_proto::{Arguments, Limits, Record, Span};
use accel_transport::{Error, Meeting, ServerConnection, ServerEnd, Settings, Transport, accept};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::PacketSocket;

use crate::api::Backend;
use crate::dispatch::Worker;
use crate::session::Client;
use crate::stats::{self, Connected, Stats};
use crate::tenant::{Tenant, TenantLimits};

/// Connections at a time: each has a window.
const MOST_CLIENTS: usize = 64;

/// Connections by TCP at a time that have not said what they are, or whose client is not whole.
const MOST_GREETED: usize = 256;

/// How long a client may leave its answers in a ring that is full.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often it is looked whether a client is gone whose threads are all in the back end.
const INTERVAL: Duration = Duration::from_millis(100);

/// Bytes of a thread's stack: compilers of drivers run on it, of code that a stranger wrote. Pages that are not used do not exist.
const STACK: usize = 64 << 20;

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The socket cannot be made.
    #[error("cannot listen on {}: {source}; give a path in a directory that exists, where nobody else listens", path.display())]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// No client can be accepted.
    #[error("cannot accept clients: {0}")]
    Accept(#[source] io::Error),
    /// No thread, or no descriptor, to know the time of commands by or to tell statistics.
    #[error("cannot start a thread beside those of clients: {0}")]
    Thread(#[source] io::Error),
    /// The accelerator's context has failed for good.
    #[error(
        "CUDA's context has failed with {0}, and only a new process gets another one: this server ends; start it again"
    )]
    Lost(i32),
    /// Nobody can ask for statistics.
    #[error("cannot tell statistics on {}: {source}; give a path in a directory that exists, where nobody else listens", path.display())]
    Control {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Serves clients by a back end.
#[derive(Debug)]
pub struct Server {
    backend: Arc<Backend>,
    tenant: Arc<Tenant>,
    /// Clients that are served, by numbers of their own.
    connected: Mutex<BTreeMap<u64, Connected>>,
    settings: Settings,
    /// How long records may be left, where it is not the back end that says.
    coalesce: Option<Duration>,
    clients: AtomicUsize,
}

/// A client that counts, until it does not.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A connection by TCP that is about to say what it is.
struct Greeted(Arc<AtomicUsize>);

impl Greeted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Greeted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Server {
    /// By this back end, on connections with these settings.
    #[must_use]
    pub fn new(backend: Backend, settings: Settings) -> Self {
        Self::of(backend, settings, Tenant::unlimited())
    }

    /// The same, whose clients have no more of the accelerator than that.
    ///
    /// # Errors
    ///
    /// [`ServerError::Thread`].
    pub fn with_limits(backend: Backend, settings: Settings, limits: &TenantLimits) -> Result<Self, ServerError> {
        let tenant = Tenant::new(limits).map_err(ServerError::Thread)?;
        Ok(Self::of(backend, settings, tenant))
    }

    fn of(backend: Backend, settings: Settings, tenant: Arc<Tenant>) -> Self {
        Self {
            backend: Arc::new(backend),
            tenant,
            connected: Mutex::default(),
            settings,
            coalesce: None,
            clients: AtomicUsize::new(0),
        }
    }

    /// The same, which may leave records that nobody waits for in their rings for so long, whatever its back end is
    /// ([`ServerEnd::coalesce`]).
    #[must_use]
    pub fn coalescing(self, most: Duration) -> Self {
        Self {
            coalesce: Some(most),
            ..self
        }
    }

    /// For how long records may be left: a back end that computes nothing has nothing to begin early with.
    fn coalesce(&self) -> Option<Duration> {
        match self.backend.name() {
            "null" => self.coalesce,
            _ => self.coalesce.or(Some(accel_transport::COALESCE)),
        }
    }

    /// A socket that clients connect to, for this user alone. One that nobody listens on any more is replaced.
    ///
    /// # Errors
    ///
    /// [`ServerError::Listen`].
    pub fn listen(path: &Path) -> Result<OwnedFd, ServerError> {
        listen(path).map_err(|source| ServerError::Listen {
            path: path.to_owned(),
            source,
        })
    }

    /// Serves whoever connects, each in a thread of its own.
    ///
    /// # Errors
    ///
    /// [`ServerError::Accept`]; a client's errors end the client.
    pub fn serve(self: &Arc<Self>, listener: impl AsFd) -> Result<(), ServerError> {
        loop {
            let socket = match rustix::net::accept_with(&listener, SocketFlags::CLOEXEC) {
                Ok(socket) => PacketSocket::from_fd(socket),
                Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(ServerError::Accept(error.into())),
            };
            self.is_usable()?;
            let server = Arc::clone(self);
            let started = thread::Builder::new().name("accel-client".into()).spawn(move || {
                if let Err(error) = server.serve_client(socket) {
                    log::warn!("a client's connection has ended: {error}");
                }
            });
            if let Err(error) = started {
                log::warn!("no thread for a client: {error}; it is hung up");
            }
        }
    }

    /// Serves clients of other machines that connect there; what each connection says first is waited for in a thread of its own.
    ///
    /// # Errors
    ///
    /// [`ServerError::Accept`]; a client's errors end the client.
    pub fn serve_remote(
        self: &Arc<Self>,
        listener: &TcpListener,
        tls: Option<Arc<accel_transport::tls::ServerConfig>>,
    ) -> Result<(), ServerError> {
        let meeting = Arc::new(Meeting::new(&self.settings, tls));
        let greeted = Arc::new(AtomicUsize::new(0));
        loop {
            let (socket, peer) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if is_of_one(&error) => continue,
                Err(error) if is_for_now(&error) => {
                    log::warn!("no client can be accepted for now: {error}");
                    thread::sleep(INTERVAL);
                    continue;
                }
                Err(error) => return Err(ServerError::Accept(error)),
            };
            self.is_usable()?;
            let counted = Greeted::new(&greeted);
            if greeted.load(Ordering::SeqCst) > MOST_GREETED {
                log::warn!("{MOST_GREETED} connections have not said what they are; {peer} is hung up");
                continue;
            }
            let (server, meeting) = (Arc::clone(self), Arc::clone(&meeting));
            let started = thread::Builder::new().name("accel-client".into()).spawn(move || {
                let met = meeting.greet(socket);
                drop(counted);
                let served = match met {
                    Ok(Some(connection)) => server.serve_connection(connection),
                    Ok(None) => Ok(()),
                    Err(error) => Err(error),
                };
                if let Err(error) = served {
                    log::warn!("the connection of {peer} has ended: {error}");
                }
            });
            if let Err(error) = started {
                log::warn!("no thread for {peer}: {error}; it is hung up");
            }
        }
    }

    /// Whether a new client can be served: not when the accelerator's context has failed, and the last client that saw it is gone.
    fn is_usable(&self) -> Result<(), ServerError> {
        match self.backend.lost() {
            Some(code) if self.clients.load(Ordering::SeqCst) == 0 => Err(ServerError::Lost(code)),
            _ => Ok(()),
        }
    }

    /// What it has done, and has.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::new(&self.backend, &self.tenant, self.connected().values())
    }

    /// A unix socket for [`Server::tell_stats`] at a path, for this user alone. One that nobody listens on any more is replaced.
    ///
    /// # Errors
    ///
    /// [`ServerError::Control`].
    pub fn listen_for_stats(path: &Path) -> Result<UnixListener, ServerError> {
        stats::listen(path).map_err(|source| ServerError::Control {
            path: path.to_owned(),
            source,
        })
    }

    /// Tells what it has done, in one line of JSON, to whoever connects there; and how many processes have served there before this one.
    ///
    /// # Errors
    ///
    /// [`ServerError::Thread`].
    pub fn tell_stats(self: &Arc<Self>, listener: UnixListener, restarts: u64) -> Result<(), ServerError> {
        let server = Arc::clone(self);
        let tell = move || {
            let stats = || Stats {
                restarts,
                ..server.stats()
            };
            if let Err(error) = stats::tell(&listener, stats) {
                log::error!("nobody is told statistics any more: {error}");
            }
        };
        let started = thread::Builder::new().name("accel-stats".into()).spawn(tell);
        started.map(drop).map_err(ServerError::Thread)
    }

    fn connected(&self) -> MutexGuard<'_, BTreeMap<u64, Connected>> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What connections are like.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Serves one client until it ends, and releases all that was its own.
    ///
    /// # Errors
    ///
    /// How the greeting failed, or how the client broke the protocol.
    pub fn serve_client(&self, socket: PacketSocket) -> Result<(), Error> {
        match self.count() {
            Some(counted) => {
                let connection = accept(socket, &self.settings)?;
                let client = Arc::new(self.client(&connection));
                self.serve_counted(connection, &client, || (), counted)
            }
            None => Ok(()),
        }
    }

    /// The same of a client that was greeted already.
    ///
    /// # Errors
    ///
    /// How the client broke the protocol.
    pub fn serve_connection(&self, connection: ServerConnection) -> Result<(), Error> {
        let client = Arc::new(self.client(&connection));
        self.serve_known(connection, &client)
    }

    /// The same of a client that somebody else knows, too.
    pub(crate) fn serve_known(&self, connection: ServerConnection, client: &Arc<Client>) -> Result<(), Error> {
        match self.count() {
            Some(counted) => self.serve_counted(connection, client, || (), counted),
            None => Ok(()),
        }
    }

    /// A client of a connection, of which nothing is there yet.
    pub(crate) fn client(&self, connection: &ServerConnection) -> Client {
        let (backend, tenant) = (Arc::clone(&self.backend), Arc::clone(&self.tenant));
        let mut client = Client::new(backend, tenant, connection.window.clone());
        // A server that its clients enter has none.
        client.has_timers = connection.transport != Transport::Enter;
        client
    }

    /// Serves a client that can be saved: a new one, or one that was. What `known` gives is dropped when no thread works for it any more.
    pub(crate) fn serve_saved<T>(
        &self,
        connection: ServerConnection,
        resumed: Option<Arc<Client>>,
        known: impl FnOnce(&Arc<Client>) -> T,
    ) -> Result<(), Error> {
        let Some(counted) = self.count() else { return Ok(()) };
        let client = resumed.unwrap_or_else(|| {
            let client = self.client(&connection);
            Arc::new(client.saved(connection.ends.len(), None))
        });
        self.serve_counted(connection, &client, || known(&client), counted)
    }

    /// What carries calls out, and for whom.
    pub(crate) fn parts(&self) -> (&Arc<Backend>, &Arc<Tenant>) {
        (&self.backend, &self.tenant)
    }

    /// One client more, if there can be.
    fn count(&self) -> Option<Counted<'_>> {
        let counted = Counted(&self.clients);
        if self.clients.fetch_add(1, Ordering::SeqCst) >= MOST_CLIENTS {
            log::warn!("there are {MOST_CLIENTS} clients; one more is hung up");
            return None;
        }
        Some(counted)
    }

    /// A client is connected, under a number.
    fn add(&self, connection: &ServerConnection, threads: usize) -> u64 {
        let mut connected = self.connected();
        let number = connected.last_key_value().map_or(0, |(last, _)| last + 1);
        let client = Connected {
            transport: connection.transport.to_string(),
            threads,
            arena: connection.window.as_ref().map_or(0, |window| window.geometry().arena()),
            since: Instant::now(),
        };
        connected.insert(number, client);
        number
    }

    fn serve_counted<T>(
        &self,
        mut connection: ServerConnection,
        client: &Arc<Client>,
        known: impl FnOnce() -> T,
        counted: Counted<'_>,
    ) -> Result<(), Error> {
        let mut ends = std::mem::take(&mut connection.ends);
        ends.iter_mut().for_each(|end| end.coalesce(self.coalesce()));
        log::info!(
            "a client with {} threads by {}, on {}",
            ends.len(),
            connection.transport,
            self.backend.name()
        );
        let number = self.add(&connection, ends.len());
        // It may be saved before one of its threads has begun.
        for (turn, end) in client.turns.iter().zip(&ends) {
            *turn.lock().unwrap_or_else(PoisonError::into_inner) = end.position();
        }
        let known = known();
        let outcome = serve_ends(client, connection, ends);
        drop(known);
        client.end();
        self.connected().remove(&number);
        log::info!("a client has ended, and all of its objects are released");
        drop(counted);
        outcome
    }
}

/// Whether one connection alone has failed (accept(2)).
fn is_of_one(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
}

/// Whether a client that ends may mend it: there are no descriptors, or no memory.
fn is_for_now(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(
        Errno::from_io_error(error),
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
    )
}

/// All threads of a client, until all have ended.
fn serve_ends(client: &Client, connection: ServerConnection, ends: Vec<ServerEnd>) -> Result<(), Error> {
    let (ended, news) = mpsc::channel();
    thread::scope(|scope| {
        let mut outcome = Ok(());
        for (index, end) in ends.into_iter().enumerate() {
            let ended = ended.clone();
            let builder = thread::Builder::new().name("accel-worker".into()).stack_size(STACK);
            let started = builder.spawn_scoped(scope, move || {
                // Nobody listens to those that end later.
                _ = ended.send(serve_end(client, end, index));
            });
            if let Err(source) = started {
                outcome = Err(Error::Io {
                    what: "start a thread for a client's",
                    source,
                });
                break;
            }
        }
        drop(ended);
        while outcome.is_ok() && !connection.is_over() {
            match news.recv_timeout(INTERVAL) {
                Ok(result) => {
                    outcome = result;
                    break;
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
        // The other threads learn of the end by this, wherever they wait.
        drop(connection);
        client.completions.end();
        client.abandon();
        outcome
    })
}

/// One thread of a client.
fn serve_end(client: &Client, mut end: ServerEnd, index: usize) -> Result<(), Error> {
    let mut worker = Worker::new(client);
    let turn = client.turns.get(index);
    let lock = || turn.map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
    loop {
        let request = match end.receive(None) {
            Ok(request) => request,
            Err(Error::PeerGone) => return Ok(()),
            Err(error) => return Err(error),
        };
        // A machine that is saved now has the record in its ring still.
        let turn = lock();
        let answer = worker.serve(&Record::from_bytes(request.to_bytes()));
        if let Some(span) = answer.as_ref().and_then(|answer| long_reply(client, answer)) {
            match end.send_data(span.offset, span.length, PATIENCE) {
                Ok(()) => {}
                Err(Error::PeerGone) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        let answer = answer.map(|answer| wire::ring::Record::from_bytes(answer.as_bytes()));
        let finished = end.finish(&request, answer.as_ref(), PATIENCE);
        let finished = match turn {
            // Whoever goes on from there has the answer behind it.
            Some(mut turn) => finished
                .and_then(|()| end.flush(PATIENCE))
                .map(|()| *turn = end.position()),
            None => finished,
        };
        match finished {
            Ok(()) => {}
            Err(Error::PeerGone) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Where in the arena a reply is that is longer than a record: a client with a copy of its own gets it before the record.
fn long_reply(client: &Client, answer: &Record) -> Option<Span> {
    let limits = Limits { arena: client.arena() };
    match answer.arguments(limits) {
        Ok(Arguments::Message(span)) => Some(span),
        _ => None,
    }
}

fn listen(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let new = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let socket = new()?;
    match rustix::net::bind(&socket, &address) {
        Err(rustix::io::Errno::ADDRINUSE) => {
            // A socket of somebody who has ended refuses connections; anything else is not ours to remove.
            match rustix::net::connect(&new()?, &address) {
                Err(rustix::io::Errno::CONNREFUSED) => std::fs::remove_file(path)?,
                _ => return Err(rustix::io::Errno::ADDRINUSE.into()),
            }
            rustix::net::bind(&socket, &address)?;
        }
        bound => bound?,
    }
    // Nobody can connect before it listens.
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    rustix::net::listen(&socket, 64)?;
    Ok(socket)
}
