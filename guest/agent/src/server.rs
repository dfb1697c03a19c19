//! Serves connections: handshake, then one request after the other; a running command takes its requests in between.
//! The same server runs in a guest (vsock) and in the lab host (TCP with a token). Knows no transport.
//!
//! ```text
//!  handshake ─► idle ◄────────── answer ───────────┐
//!                │  Hello Ping Stat Upload Prepare Settle Freeze Re-identify Shutdown
//!                └─ Exec, Attach ─► command running: see `exec.rs` ─ Exited, Detach ─► idle
//! ```

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Scope};
use std::time::Duration;

use agent_api::message::{PROTOCOL, Prepare, Reply, Request, kind};
use agent_api::{Duplex, PowerAction, Shutdown, Token};
use wire::{FrameReader, FrameWriter};

use crate::cgroup::{self, Cgroups};
use crate::clones::{Clones, Part};
use crate::envs;
use crate::exec::Busy;
use crate::freezer::MayStart;
use crate::kept;
use crate::power::Power;
use crate::reaper::Reaper;
use crate::session::Session;
use crate::{Error, STACK_SIZE, files, info, pci, say, send_reply};

mod carry;

/// How long a new connection may take to shake hands.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);

/// Connections at once; each has two threads at most.
const MAX_CONNECTIONS: usize = 256;

/// Threads that wait for connections at first, and the most that go on waiting when theirs has ended: neither a connection nor
/// its end makes or ends a thread, as long as there are few at once. In a clone each thread that comes or goes touches some
/// hundred pages for the first time.
const FIRST_THREADS: usize = 3;
const MAX_WAITING: usize = 4;

/// Pause after a failed accept(2), so that a lasting failure does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(crate) const NO_ROOT: &str = "there is no root yet: send Prepare first";

/// Makes a root as a `Prepare` asks for.
pub type MakeRoot = Box<dyn Fn(&Prepare) -> Result<(), Error> + Send + Sync>;

/// Connects to where the log goes.
pub type OpenLog = Box<dyn Fn() -> io::Result<std::os::unix::net::UnixStream> + Send + Sync>;

/// Where commands run.
pub enum RootMode {
    /// In the root this process has. `Prepare` is refused.
    AsIs,
    /// In a root that `Prepare` makes by this function, once; commands are refused before.
    Prepared(MakeRoot),
}

/// What a server does and for whom.
pub struct ServerConfig {
    /// What clients must know; `None` where the transport itself proves who they are.
    pub token: Option<Token>,
    /// Where commands run.
    pub root: RootMode,
    /// Whether each command gets its own cgroup.
    pub cgroups: Option<Cgroups>,
    /// How the machine ends; `None` refuses `Shutdown`.
    pub power: Option<Power>,
    /// Opens the log of the sandbox's own command; `None` where there is no such command.
    pub log: Option<OpenLog>,
    /// What is done for clones of this machine; `None` refuses `Settle`, `Freeze` and `Reidentify`.
    pub clones: Option<Clones>,
    /// `CLOCK_BOOTTIME` at the first instruction of this process, for `Hello`.
    pub started_ns: u64,
}

impl ServerConfig {
    /// Of one that only starts commands, where it runs itself and for whoever has its socket: for tests, and to be added to.
    pub fn in_place() -> Self {
        Self {
            token: None,
            root: RootMode::AsIs,
            cgroups: None,
            power: None,
            log: None,
            clones: None,
            started_ns: crate::boottime_ns(),
        }
    }
}

/// A server; clones are the same one.
#[derive(Clone)]
pub struct Server(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) config: ServerConfig,
    /// The configuration's.
    pub(crate) log: Option<Arc<OpenLog>>,
    pub(crate) reaper: Reaper,
    prepared: Mutex<bool>,
    /// The sandbox's own command, once it was started.
    pub(crate) main: Mutex<Option<Arc<Session>>>,
    /// Commands that go on without the connections that started them.
    pub(crate) kept: kept::Commands,
    connections: AtomicUsize,
}

/// Something that hands out connections.
pub trait Listener {
    /// What it hands out.
    type Stream: Duplex + 'static;

    /// Waits for the next one; `None` if one came that is not to be served.
    fn accept(&self) -> io::Result<Option<Self::Stream>>;
}

impl Listener for std::net::TcpListener {
    type Stream = std::net::TcpStream;

    fn accept(&self) -> io::Result<Option<Self::Stream>> {
        let (stream, _) = Self::accept(self)?;
        stream.set_nodelay(true)?;
        Ok(Some(stream))
    }
}

impl Listener for std::os::unix::net::UnixListener {
    type Stream = std::os::unix::net::UnixStream;

    fn accept(&self) -> io::Result<Option<Self::Stream>> {
        Ok(Some(Self::accept(self)?.0))
    }
}

impl Server {
    /// A server that starts commands through `reaper`.
    pub fn new(mut config: ServerConfig, reaper: Reaper) -> Self {
        let inner = Inner {
            log: config.log.take().map(Arc::new),
            config,
            reaper,
            prepared: Mutex::new(false),
            main: Mutex::new(None),
            kept: kept::Commands::default(),
            connections: AtomicUsize::new(0),
        };
        Self(Arc::new(inner))
    }

    /// Serves what `listener` hands out, each connection in a thread. Does not return.
    pub fn serve_listener(&self, listener: &(impl Listener + Sync)) -> ! {
        let waiting = Waiting::default();
        thread::scope(|scope| {
            for _ in 1..FIRST_THREADS {
                self.spawn_waiting(scope, listener, &waiting);
            }
            // The caller's thread is one of them, and stays one.
            loop {
                self.serve_next(scope, listener, &waiting);
            }
        })
    }

    /// One thread more that waits for connections, until enough others do; whether there is one.
    fn spawn_waiting<'scope, 'env>(
        &'env self,
        scope: &'scope Scope<'scope, 'env>,
        listener: &'env (impl Listener + Sync),
        waiting: &'env Waiting,
    ) -> bool {
        let work = move || {
            while waiting.threads.load(Ordering::SeqCst) < MAX_WAITING {
                self.serve_next(scope, listener, waiting);
            }
        };
        let builder = thread::Builder::new()
            .name("connection".to_owned())
            .stack_size(STACK_SIZE);
        let spawned = builder.spawn_scoped(scope, work);
        if let Err(error) = &spawned {
            say(format_args!("no thread for the next connection: {error}"));
        }
        spawned.is_ok()
    }

    /// Waits for a connection and serves it; sees to it that another thread waits meanwhile.
    fn serve_next<'scope, 'env>(
        &'env self,
        scope: &'scope Scope<'scope, 'env>,
        listener: &'env (impl Listener + Sync),
        waiting: &'env Waiting,
    ) {
        let stream = {
            waiting.threads.fetch_add(1, Ordering::SeqCst);
            let turn = waiting.turn.lock().unwrap_or_else(PoisonError::into_inner);
            let accepted = listener.accept();
            if let Err(error) = &accepted {
                say(format_args!("accepting a connection: {error}"));
                thread::sleep(ACCEPT_PAUSE);
            }
            drop(turn);
            let left = waiting.threads.fetch_sub(1, Ordering::SeqCst) - 1;
            let Ok(Some(stream)) = accepted else { return };
            // Nobody would wait for the next one: this one is dropped instead.
            if left == 0 && !self.spawn_waiting(scope, listener, waiting) {
                return;
            }
            stream
        };
        self.serve_and_tell(stream);
    }

    /// Serves one connection in a thread of its own.
    pub fn serve_in_thread(&self, stream: impl Duplex + 'static) {
        let server = self.clone();
        let spawned = thread::Builder::new()
            .name("connection".to_owned())
            .stack_size(STACK_SIZE)
            .spawn(move || server.serve_and_tell(stream));
        if let Err(error) = spawned {
            say(format_args!("no thread for a connection: {error}"));
        }
    }

    /// Serves one connection; an error ends it and is told on the console.
    fn serve_and_tell(&self, stream: impl Duplex + 'static) {
        match self.serve(stream) {
            // A client that leaves while something is on its way to it is nothing to tell.
            Ok(()) | Err(Error::Wire(wire::Error::Io(_))) => {}
            Err(error) => say(format_args!("{error}")),
        }
    }

    /// Serves one connection until the client leaves.
    pub fn serve(&self, mut stream: impl Duplex + 'static) -> Result<(), Error> {
        let Some(_slot) = Slot::take(&self.0.connections) else {
            return Err(Error::Refused(format!(
                "a connection was closed: {MAX_CONNECTIONS} are open already"
            )));
        };
        stream
            .set_read_timeout(Some(HANDSHAKE_TIMEOUT))
            .map_err(wire::Error::Io)?;
        wire::accept(&mut stream, PROTOCOL, self.0.config.token.as_ref())?;
        stream.set_read_timeout(None).map_err(wire::Error::Io)?;
        let writer = Arc::new(FrameWriter::new(stream.try_clone().map_err(wire::Error::Io)?));
        let mut reader = FrameReader::new(stream);
        let has_main = AtomicBool::new(false);
        let result = thread::scope(|scope| {
            let mut connection = Connection {
                server: self,
                writer: &writer,
                scope,
                busy: None,
                has_main: &has_main,
                handed_over: false,
            };
            let result = connection.run(&mut reader);
            // Wakes the session's thread if it waits for the client to read.
            reader.get_ref().close();
            if let Some(busy) = connection.busy.take() {
                busy.lose();
            }
            result
        });
        if has_main.load(Ordering::SeqCst) {
            // Its client has all that it wanted, or will never want anything again.
            self.end_machine();
        }
        result
    }

    /// The sandbox's own command has ended, and with it the machine.
    pub(crate) fn end_machine(&self) {
        let Some(power) = &self.0.config.power else { return };
        let shutdown = Shutdown {
            how: PowerAction::PowerOff,
            grace_ms: 0,
        };
        if let Err(error) = power.end::<()>(shutdown) {
            say(format_args!("{error}"));
        }
    }
}

/// Threads that wait for a connection, one of them for the next one.
#[derive(Default)]
struct Waiting {
    turn: Mutex<()>,
    threads: AtomicUsize,
}

/// One of the connections that may be open at once.
struct Slot<'a>(&'a AtomicUsize);

impl<'a> Slot<'a> {
    fn take(count: &'a AtomicUsize) -> Option<Self> {
        if count.fetch_add(1, Ordering::SeqCst) < MAX_CONNECTIONS {
            return Some(Self(count));
        }
        count.fetch_sub(1, Ordering::SeqCst);
        None
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A connection after the handshake.
pub(crate) struct Connection<'scope, 'env, S: Duplex> {
    pub(crate) server: &'env Server,
    pub(crate) writer: &'env Arc<FrameWriter<S>>,
    pub(crate) scope: &'scope Scope<'scope, 'env>,
    pub(crate) busy: Option<Busy<'scope>>,
    /// The sandbox's own command was started on it.
    pub(crate) has_main: &'env AtomicBool,
    /// What comes on it is a port's, and no frames.
    handed_over: bool,
}

impl<'env, S: Duplex + 'static> Connection<'_, 'env, S> {
    fn run(&mut self, reader: &mut FrameReader<S>) -> Result<(), Error> {
        while !self.handed_over
            && let Some(frame) = reader.read()?
        {
            match frame.kind {
                kind::CONTROL => {
                    let request = serde_json::from_slice(frame.payload).map_err(Error::Malformed)?;
                    self.handle(request, reader)?;
                }
                kind::STDIN => {
                    if let Some(busy) = &self.busy {
                        busy.push_stdin(reader)?;
                    }
                }
                kind => {
                    return Err(Error::UnexpectedFrame {
                        kind,
                        length: frame.payload.len(),
                    });
                }
            }
        }
        Ok(())
    }

    pub(crate) fn answer(&mut self, request: Request, reader: &mut FrameReader<S>) -> Result<(), Error> {
        let result = match request {
            Request::Hello => info::gather(self.server.0.config.started_ns).map(Reply::Hello),
            Request::Stat { path, digest } => files::stat(&path, digest).map(Reply::File),
            Request::Prepare(prepare) => self.prepare(&prepare).map(|()| Reply::Done),
            request @ (Request::Upload(_)
            | Request::Pack { .. }
            | Request::Unpack { .. }
            | Request::Fs { .. }
            | Request::Connect { .. }) => return self.carry(request, reader),
            Request::Exec(request) => return self.exec(request),
            Request::Attach { command, output } => return self.attach(&command, output),
            Request::ListKept => return self.list_kept(),
            Request::Settle => self.part().and_then(|part| part.settle()),
            Request::Freeze => self.part().and_then(|part| part.freeze()),
            Request::SetClock(clock_ns) => self.part().and_then(|part| part.set_clock(clock_ns)),
            Request::Reidentify(reidentify) => {
                return match self.part().and_then(|part| part.reidentify(&reidentify)) {
                    // A client that cannot be told has a machine that stands still, and may ask again.
                    Ok(reidentified) => self
                        .reply(&reidentified.reply)
                        .and_then(|()| reidentified.acknowledged()),
                    Err(error) => self.refuse(error.to_string()),
                };
            }
            Request::Pci(request) => pci::answer(&request).map(Reply::Pci),
            Request::Environment(environment) => envs::tell(&environment.0).map(|()| Reply::Done),
            Request::SignalMain { number } => self.signal_main(number).map(|()| Reply::Done),
            Request::Shutdown(shutdown) => match &self.server.0.config.power {
                Some(power) => {
                    self.reply(&Reply::Done)?;
                    power.end(shutdown)
                }
                None => Err(Error::Refused("this agent may not end its machine".to_owned())),
            },
            // The rest was handled before.
            Request::Ping
            | Request::Detach
            | Request::Resize(_)
            | Request::Signal { .. }
            | Request::CloseStdin
            | Request::CloseOutput { .. } => Ok(Reply::Done),
        };
        match result {
            Ok(reply) => self.reply(&reply),
            Err(error) => self.refuse(error.to_string()),
        }
    }

    fn prepare(&self, prepare: &Prepare) -> Result<(), Error> {
        let RootMode::Prepared(make_root) = &self.server.0.config.root else {
            return Err(Error::Refused(
                "this agent runs commands in its own root; there is nothing to prepare".to_owned(),
            ));
        };
        let mut prepared = self.server.0.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        if *prepared {
            return Err(Error::Refused("the root is prepared already".to_owned()));
        }
        cgroup::prepare(self.server.0.config.cgroups.as_ref(), prepare.pids_max)?;
        make_root(prepare)?;
        *prepared = true;
        Ok(())
    }

    /// Leave to start or to store something; always there where nothing can stand still.
    pub(crate) fn may_start(&self) -> Result<Option<MayStart<'env>>, Error> {
        let cgroups = self.server.0.config.cgroups.as_ref();
        cgroups.map(|cgroups| cgroups.freezer().may_start()).transpose()
    }

    /// What `Settle`, `Freeze` and `Reidentify` are done with.
    fn part(&self) -> Result<Part<'env>, Error> {
        let inner = &self.server.0;
        if !self.has_root() {
            return Err(Error::Refused(NO_ROOT.to_owned()));
        }
        match (&inner.config.clones, &inner.config.cgroups) {
            (Some(clones), Some(cgroups)) => Ok(Part {
                clones,
                cgroups,
                reaper: &inner.reaper,
            }),
            _ => Err(Error::Refused(
                "this agent's machine is never cloned: it is neither settled nor frozen nor re-identified".to_owned(),
            )),
        }
    }

    /// There is a root for commands and files.
    pub(crate) fn has_root(&self) -> bool {
        let inner = &self.server.0;
        matches!(inner.config.root, RootMode::AsIs) || *inner.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn reply(&self, reply: &Reply) -> Result<(), Error> {
        send_reply(self.writer, reply)
    }

    pub(crate) fn refuse(&self, message: String) -> Result<(), Error> {
        self.reply(&Reply::Refused { message })
    }
}
