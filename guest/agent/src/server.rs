//! Serves connections: handshake, then one request after the other; a running command takes its requests in between.
//! The same server runs in a guest (vsock) and in the lab host (TCP with a token). Knows no transport.
//!
//! ```text
//!  handshake ─► idle ◄────────── answer ───────────┐
//!                │  Hello Ping Stat Upload Prepare Settle Freeze Re-identify Shutdown
//!                └─ Exec ─► command running: STDIN, CloseStdin, CloseOutput, Resize, Signal ─ Exited ─► idle
//! ```

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use agent_api::message::{PROTOCOL, Prepare, Reply, Request, kind};
use agent_api::{Duplex, ExecFailure, ExecRequest, PowerAction, Shutdown, Token};
use wire::{FrameReader, FrameWriter};

use crate::cgroup::{self, Cgroups};
use crate::clones::{Clones, Part};
use crate::freezer::MayStart;
use crate::journal::Log;
use crate::power::Power;
use crate::reaper::Reaper;
use crate::session::{self, Session};
use crate::spawn::other;
use crate::stream::Streamer;
use crate::{Error, STACK_SIZE, copy, files, info, pci, say, send_reply};

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

const NO_ROOT: &str = "there is no root yet: send Prepare first";

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

/// A server; clones are the same one.
#[derive(Clone)]
pub struct Server(Arc<Inner>);

struct Inner {
    config: ServerConfig,
    /// The configuration's.
    log: Option<Arc<OpenLog>>,
    reaper: Reaper,
    prepared: Mutex<bool>,
    /// The sandbox's own command, once it was started.
    main: Mutex<Option<Arc<Session>>>,
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
    fn serve_and_tell(&self, stream: impl Duplex) {
        match self.serve(stream) {
            // A client that leaves while something is on its way to it is nothing to tell.
            Ok(()) | Err(Error::Wire(wire::Error::Io(_))) => {}
            Err(error) => say(format_args!("{error}")),
        }
    }

    /// Serves one connection until the client leaves.
    pub fn serve(&self, mut stream: impl Duplex) -> Result<(), Error> {
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
        let writer = FrameWriter::new(stream.try_clone().map_err(wire::Error::Io)?);
        let mut reader = FrameReader::new(stream);
        let has_main = AtomicBool::new(false);
        let result = thread::scope(|scope| {
            let mut connection = Connection {
                server: self,
                writer: &writer,
                scope,
                running: None,
                has_main: &has_main,
            };
            let result = connection.run(&mut reader);
            // Wakes the session's thread if it waits for the client to read.
            reader.get_ref().close();
            if let Some((session, thread)) = connection.running.take() {
                session.lost();
                join(thread);
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
    fn end_machine(&self) {
        let Some(power) = &self.0.config.power else { return };
        let shutdown = Shutdown {
            how: PowerAction::PowerOff,
            grace_ms: 0,
        };
        if let Err(error) = power.end::<()>(shutdown) {
            say(format_args!("{error}"));
        }
    }

    /// Starts a command that nobody waits for, in a thread of its own.
    fn start_detached(&self, request: ExecRequest, log: Option<Log>) -> Result<i32, ExecFailure> {
        let server = self.clone();
        let (tell, told) = mpsc::channel();
        let work = move || server.run_detached(&request, log, &tell);
        let spawned = thread::Builder::new()
            .name("command".to_owned())
            .stack_size(STACK_SIZE)
            .spawn(work);
        spawned.map_err(|error| other("starting a thread for the command", error))?;
        told.recv()
            .unwrap_or_else(|error| Err(other("starting the command", error)))
    }

    fn run_detached(&self, request: &ExecRequest, log: Option<Log>, tell: &mpsc::Sender<Result<i32, ExecFailure>>) {
        let inner = &self.0;
        let (session, ends) = match session::start(request, &inner.reaper, inner.config.cgroups.as_ref()) {
            Ok(started) => started,
            Err(failure) => return drop(tell.send(Err(failure))),
        };
        let pid = session.pid;
        if request.main {
            *inner.main.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(session));
        }
        // Whoever asked may be gone: the command runs nevertheless.
        drop(tell.send(Ok(pid)));
        if let Err(error) = Streamer::<std::os::unix::net::UnixStream>::new(ends, None, log).run() {
            say(format_args!("a command was killed: {error}"));
        }
        if request.main {
            self.end_machine();
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
struct Connection<'scope, 'env, S: Duplex> {
    server: &'env Server,
    writer: &'env FrameWriter<S>,
    scope: &'scope Scope<'scope, 'env>,
    running: Option<(Arc<Session>, ScopedJoinHandle<'scope, ()>)>,
    /// The sandbox's own command was started on it.
    has_main: &'env AtomicBool,
}

impl<'scope, 'env, S: Duplex> Connection<'scope, 'env, S> {
    fn run(&mut self, reader: &mut FrameReader<S>) -> Result<(), Error> {
        while let Some(frame) = reader.read()? {
            match frame.kind {
                kind::CONTROL => {
                    let request = serde_json::from_slice(frame.payload).map_err(Error::Malformed)?;
                    self.handle(request, reader)?;
                }
                kind::STDIN => {
                    if let Some((session, _)) = &self.running {
                        session.push_stdin(frame.payload)?;
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

    fn handle(&mut self, request: Request, reader: &mut FrameReader<S>) -> Result<(), Error> {
        // Requests of a running command have no answer; when they come late, after its end, they mean nothing.
        let session = self.running.as_ref().map(|(session, _)| session);
        match request {
            Request::Resize(size) => session.into_iter().for_each(|session| session.resize(size)),
            Request::Signal { number } => session.into_iter().for_each(|session| session.signal(number)),
            Request::CloseStdin => session.into_iter().for_each(|session| session.close_stdin()),
            Request::CloseOutput { stream } => session.into_iter().for_each(|session| session.close_output(stream)),
            request => {
                if session.is_some_and(|session| !session.is_finished()) {
                    return self.refuse("a command is running on this connection; use another one".to_owned());
                }
                if let Some((_, thread)) = self.running.take() {
                    join(thread);
                }
                return self.answer(request, reader);
            }
        }
        Ok(())
    }

    fn answer(&mut self, request: Request, reader: &mut FrameReader<S>) -> Result<(), Error> {
        let result = match request {
            Request::Hello => info::gather(self.server.0.config.started_ns).map(Reply::Hello),
            Request::Stat { path, digest } => files::stat(&path, digest).map(Reply::File),
            Request::Prepare(prepare) => self.prepare(&prepare).map(|()| Reply::Done),
            Request::Upload(upload) => {
                if let Err(error) = self.may_start() {
                    return self.refuse(error.to_string());
                }
                let target = files::Target::create(&upload);
                return files::receive(target, upload.size, reader, self.writer);
            }
            Request::Pack { path, name } => {
                return match self.has_root() {
                    true => copy::pack(&path, &name, self.writer),
                    false => self.refuse(NO_ROOT.to_owned()),
                };
            }
            Request::Unpack {
                path,
                target,
                keep_owner,
            } => {
                if !self.has_root() {
                    return self.refuse(NO_ROOT.to_owned());
                }
                return match self.may_start().map(drop) {
                    Ok(()) => copy::unpack(&path, target, keep_owner, reader, self.writer),
                    Err(error) => self.refuse(error.to_string()),
                };
            }
            Request::Exec(request) => return self.exec(&request),
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

    fn exec(&mut self, request: &ExecRequest) -> Result<(), Error> {
        let inner: &'env Inner = &self.server.0;
        if !self.has_root() {
            return self.refuse(NO_ROOT.to_owned());
        }
        // Until the command is in its cgroup.
        let may_start = match self.may_start() {
            Ok(may_start) => may_start,
            Err(error) => return self.refuse(error.to_string()),
        };
        let log = match self.take_main(request) {
            Ok(log) => log,
            Err(message) => return self.refuse(message),
        };
        if request.detached {
            let reply = match self.server.start_detached(request.clone(), log) {
                Ok(pid) => Reply::Started {
                    pid: u32::try_from(pid).unwrap_or(0),
                },
                Err(failure) => Reply::Failed(failure),
            };
            return self.reply(&reply);
        }
        let (session, ends) = match session::start(request, &inner.reaper, inner.config.cgroups.as_ref()) {
            Ok((session, ends)) => (Arc::new(session), ends),
            Err(failure) => return self.reply(&Reply::Failed(failure)),
        };
        drop(may_start);
        if request.main {
            *inner.main.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&session));
            self.has_main.store(true, Ordering::SeqCst);
        }
        // Before the thread that sends output: Started comes first.
        let announced = self.reply(&Reply::Started {
            pid: u32::try_from(session.pid).unwrap_or(0),
        });
        let streamer = Streamer::new(ends, Some(self.writer), log);
        let work = move || {
            if let Err(error) = streamer.run() {
                say(format_args!("a command was killed: {error}"));
            }
        };
        let thread = thread::Builder::new()
            .name("command".to_owned())
            .stack_size(STACK_SIZE)
            .spawn_scoped(self.scope, work)
            .map_err(|error| {
                session.signal(libc::SIGKILL);
                Error::system("starting a thread for a command")(error)
            })?;
        self.running = Some((session, thread));
        announced
    }

    /// Leave to start or to store something; always there where nothing can stand still.
    fn may_start(&self) -> Result<Option<MayStart<'env>>, Error> {
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
    fn has_root(&self) -> bool {
        let inner = &self.server.0;
        matches!(inner.config.root, RootMode::AsIs) || *inner.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `request` may be the sandbox's own command, and the log for it.
    fn take_main(&self, request: &ExecRequest) -> Result<Option<Log>, String> {
        let inner = &self.server.0;
        if !request.main {
            return Ok(None);
        }
        let Some(open) = &inner.log else {
            return Err("this agent has no sandbox whose command this could be".to_owned());
        };
        if inner.main.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            return Err("the sandbox has its command already".to_owned());
        }
        match Log::new(Arc::clone(open)) {
            Ok(log) => Ok(Some(log)),
            Err(error) => {
                // A host that keeps no log does not answer there.
                say(format_args!("the command's output is not logged: {error}"));
                Ok(None)
            }
        }
    }

    fn signal_main(&self, number: i32) -> Result<(), Error> {
        let main = self.server.0.main.lock().unwrap_or_else(PoisonError::into_inner);
        match main.as_ref() {
            Some(session) => {
                session.signal(number);
                Ok(())
            }
            None => Err(Error::Refused("the sandbox's command has not been started".to_owned())),
        }
    }

    fn reply(&self, reply: &Reply) -> Result<(), Error> {
        send_reply(self.writer, reply)
    }

    fn refuse(&self, message: String) -> Result<(), Error> {
        self.reply(&Reply::Refused { message })
    }
}

fn join(thread: ScopedJoinHandle<'_, ()>) {
    if thread.join().is_err() {
        say(format_args!("a command's thread has panicked"));
    }
}
