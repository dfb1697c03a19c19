//! The daemon's socket: a thread a connection, one request at a time. Turns requests into calls of the node; decides
//! nothing itself but what belongs to a connection: a sandbox that is not detached ends with it.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::{Epoll, EventFd, Interest};
use node_api::message::Item;
use node_api::{
    ApiError, BuildConfig, ErrorKind, ListConfig, NodeInfo, Packet, Reply, Request, Sandbox, Tracing, VERSION,
};
use observe::Repeated;
use observe::span::{self, Operation};
use wire::packet::{PacketError, PacketSocket};

use crate::Error;
use crate::api::answers::{
    self, devices, done, exec, logs, moved, quarantine, resized, restricted, rolled_back, snapshot, started,
};
use crate::api::bounds::{self, Seat, Seats};
use crate::api::listeners::Listener;
use crate::api::scope::{Caller, Scope};
use crate::node::Node;
use crate::operations::build_template::{Build, Wanted};
use crate::operations::stages::Started;
use crate::resources::cpus;
use crate::sandbox::entry::Entry;
use crate::socket_file;
use crate::telemetry::trace;
use crate::transfer::Loading;

const STOP: u64 = 0;
/// Of the first listener; the others' follow.
const LISTENER: u64 = 1;

/// How long an asker may take none of an answer.
const SEND_PATIENCE: Duration = Duration::from_secs(30);

/// How often is looked whether somebody who waits is there still.
const WAIT_STEP: Duration = Duration::from_secs(1);

/// Between two attempts to let somebody in.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Said as long as nobody can be let in.
static NOT_LET_IN: Repeated = Repeated::new(Duration::from_secs(10));

/// The daemon.
#[derive(Debug)]
pub struct Server {
    node: Arc<Node>,
    /// Until it serves.
    listeners: Vec<Listener>,
    stop: Arc<EventFd>,
    quitting: Arc<AtomicBool>,
    seats: Seats,
    /// What this program's file was when it started.
    program: Option<(PathBuf, FileId)>,
}

type FileId = (u64, u64);

impl Server {
    /// Listens on the state directory's socket, in a cgroup of its own if nobody keeps this process in another.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn bind(node: Arc<Node>) -> Result<Self, Error> {
        node.leave_cgroup();
        let admin = Listener::bind(node.paths.socket(), node.config.sockets.group, Scope::Admin)?;
        Self::new(node, admin)
    }

    /// The same on a socket that a service manager listens on.
    ///
    /// # Errors
    /// It is no socket of the right kind.
    pub fn inherit(node: Arc<Node>, listener: OwnedFd) -> Result<Self, Error> {
        let admin = Listener::inherit(listener, node.paths.socket(), node.config.sockets.group)?;
        Self::new(node, admin)
    }

    fn new(node: Arc<Node>, admin: Listener) -> Result<Self, Error> {
        let sockets = &node.config.sockets;
        let path = sockets.gateway.clone().unwrap_or_else(|| node.paths.gateway_socket());
        let gateway = Listener::bind(path, sockets.gateway_group, Scope::Gateway)?;
        Ok(Self {
            listeners: vec![admin, gateway],
            stop: Arc::new(EventFd::new().map_err(Error::host("making an eventfd"))?),
            quitting: Arc::default(),
            seats: Seats::default(),
            program: std::env::current_exe()
                .ok()
                .and_then(|path| Some((path.clone(), file_id(&path)?))),
            node,
        })
    }

    /// What ends [`Server::serve`] when it is signalled.
    pub fn stopper(&self) -> Arc<EventFd> {
        Arc::clone(&self.stop)
    }

    /// Serves until it is told to stop. Sandboxes that are detached run on.
    ///
    /// # Errors
    /// Nobody can be waited for.
    pub fn serve(mut self) -> Result<(), Error> {
        let mut listeners = std::mem::take(&mut self.listeners);
        let tokens = LISTENER..;
        let epoll = Epoll::new().map_err(Error::host("waiting for clients"))?;
        epoll
            .add(self.stop.as_ref(), STOP, Interest::READ)
            .and_then(|()| {
                (listeners.iter().zip(tokens.clone())).try_for_each(|(one, token)| one.register(&epoll, token))
            })
            .map_err(Error::host("waiting for clients"))?;
        let server = Arc::new(self);
        let mut ready = Vec::new();
        loop {
            epoll
                .wait(&mut ready, Some(socket_file::LOOK))
                .map_err(Error::host("waiting for clients"))?;
            if ready.iter().any(|event| event.token == STOP) {
                break;
            }
            for (listener, token) in listeners.iter_mut().zip(tokens.clone()) {
                listener.look_after(&epoll, token);
                match listener.accept() {
                    Ok(Some(socket)) => server.let_in(socket, listener.scope),
                    Ok(None) => (),
                    Err(error) => {
                        not_let_in(&error);
                        std::thread::sleep(ACCEPT_PAUSE);
                    }
                }
            }
        }
        server.quitting.store(true, Ordering::SeqCst);
        server.node.end_builds();
        listeners.into_iter().try_for_each(Listener::close)
    }

    /// Serves somebody, if there is room.
    fn let_in(self: &Arc<Self>, socket: OwnedFd, scope: Scope) {
        let most = self.node.budget.connections();
        match self.seats.take(most) {
            Some(seat) => self.serve_in_thread(socket, scope, seat),
            None => {
                not_let_in(&format!("{most} are connected"));
                if let Err(error) = bounds::turn_away(socket, most) {
                    log::debug!("a refused client does not know why: {error}");
                }
            }
        }
    }

    fn serve_in_thread(self: &Arc<Self>, socket: OwnedFd, scope: Scope, seat: Seat) {
        let server = Arc::clone(self);
        let work = move || {
            let _seat = seat;
            let limit = Some(SEND_PATIENCE);
            if let Err(error) =
                rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Send, limit)
            {
                log::warn!("the time limit for sending to a client cannot be set: {error}");
            }
            Connection {
                server: &server,
                socket: PacketSocket::from_fd(socket),
                scope,
                tied: None,
                loading: None,
                build: None,
                quits: false,
            }
            .serve();
        };
        if let Err(error) = crate::thread::spawn("asker", work) {
            not_let_in(&error);
        }
    }

    fn info(&self) -> NodeInfo {
        let now = self.program.as_ref().map(|(path, then)| file_id(path) != Some(*then));
        NodeInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            replaced: now.unwrap_or(false),
            managed: self.node.config.managed,
            running: self.node.sandboxes.running(),
            promised: self.node.budget.promised(),
            zeroed_memory: self.node.zeroed.told(),
        }
    }
}

/// Logs that somebody is turned away, or has to wait.
fn not_let_in(why: &dyn std::fmt::Display) {
    NOT_LET_IN.say(|more| log::warn!("connections cannot be accepted now: {why}{more}"));
}

fn file_id(path: &std::path::Path) -> Option<FileId> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// One asker.
struct Connection<'s> {
    server: &'s Arc<Server>,
    socket: PacketSocket,
    scope: Scope,
    /// The sandbox that ends with this connection.
    tied: Option<Arc<Entry>>,
    /// The snapshot or template that this connection brings; it goes with it.
    loading: Option<Loading>,
    /// What is built in that sandbox.
    build: Option<Box<Build>>,
    /// The daemon ends once this was answered.
    quits: bool,
}

/// What is asked, and by whom.
struct Asked {
    request: Request,
    tracing: Option<Tracing>,
    caller: Caller,
}

/// A reply and what travels with it.
type Answer = Result<(Reply, Vec<OwnedFd>), ApiError>;

impl Connection<'_> {
    fn serve(mut self) {
        loop {
            let Asked {
                mut request,
                tracing,
                caller,
            } = match self.receive() {
                Ok(Some(asked)) => asked,
                Ok(None) => break,
                Err(refusal) => {
                    drop(self.send(&Packet::Reply(Err(refusal)), &[]));
                    break;
                }
            };
            let listens = matches!(request, Request::Events);
            let takes_slot = matches!(request, Request::Run(_) | Request::Clone(_));
            let lease = bounds::lease(&self.server.node, &request);
            let lease = caller.admit(&mut request).and(lease);
            let answer = match &lease {
                Ok(_) => self.traced(&caller, request, tracing),
                Err(refused) => Err(refused.for_api()),
            };
            let (reply, fds) = match answer {
                Ok((reply, fds)) => (Ok(reply), fds),
                Err(refusal) => (Err(refusal), Vec::new()),
            };
            let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            let sent = self.send(&Packet::Reply(reply), &borrowed);
            drop((fds, lease));
            if self.quits {
                self.server.stop.signal();
            }
            if takes_slot {
                self.server.node.taps.fill();
            }
            if sent.is_err() {
                break;
            }
            if listens {
                self.tell_events();
                break;
            }
        }
        // A daemon that ends leaves its sandboxes alone, these too: their clients still have them.
        if let Some(entry) = self.tied.take()
            && !self.server.quitting.load(Ordering::SeqCst)
            && let Err(error) = self.server.node.end_foreground(&entry)
        {
            log::error!("sandbox {}, whose client is gone, cannot be ended: {error}", entry.id);
        }
    }

    /// Answers, and tells its asker and whoever collects spans what that was made of.
    fn traced(&mut self, caller: &Caller, request: Request, tracing: Option<Tracing>) -> Answer {
        let Some(name) = trace::name(&request) else {
            return self.answer(caller, request);
        };
        let node = Arc::clone(&self.server.node);
        let exporter = node.config.spans.as_ref();
        let operation = Operation {
            service: trace::SERVICE,
            name,
            parent: tracing.map(|tracing| tracing.parent),
            detailed: tracing.is_some_and(|tracing| tracing.wanted) || exporter.is_some(),
            began_ns: None,
        };
        let resumed = answers::goes_on(&request, &node, caller);
        let (answer, spans) = span::record(operation, || {
            let answer = self.answer(caller, request);
            if let Err(refusal) = &answer {
                span::failed(refusal);
            }
            answer
        });
        trace::operation_ended(name, &spans, &node.metrics, exporter);
        if let Ok((reply, _)) = &answer {
            answers::keep_trace(&node, resumed.as_ref(), reply, &spans);
        }
        if tracing.is_some_and(|tracing| tracing.wanted) {
            // An asker that is gone is found out by the reply.
            drop(self.send(&Packet::Item(Item::Spans(spans)), &[]));
        }
        answer
    }

    fn receive(&self) -> Result<Option<Asked>, ApiError> {
        let refuse = |message: String| ApiError {
            kind: ErrorKind::Invalid,
            message,
            exit_code: 125,
        };
        let bytes = match self.socket.receive() {
            Ok((bytes, _)) => bytes,
            Err(PacketError::Closed) => return Ok(None),
            Err(error) => return Err(refuse(error.to_string())),
        };
        match serde_json::from_slice(&bytes) {
            Ok(Packet::Request {
                version: VERSION,
                request,
                trace,
                tenant,
            }) => Ok(Some(Asked {
                request,
                tracing: trace,
                caller: Caller::new(self.scope, tenant).map_err(|error| error.for_api())?,
            })),
            Ok(Packet::Request { version, .. }) => Err(refuse(format!(
                "the client speaks version {version} of the daemon's API, this daemon version {VERSION}: use basalt and \
                 basaltd of one build"
            ))),
            Ok(_) => Err(refuse("the packet is not a request".into())),
            Err(error) => Err(refuse(format!(
                "the request is not understood ({error}): use basalt and basaltd of one build"
            ))),
        }
    }

    fn send(&self, packet: &Packet, fds: &[BorrowedFd<'_>]) -> Result<(), PacketError> {
        let bytes = serde_json::to_vec(packet).map_err(|_| PacketError::Closed)?;
        match self.socket.send(&bytes, fds) {
            Err(error @ PacketError::TooLarge(_)) => {
                let refusal = ApiError {
                    kind: ErrorKind::Internal,
                    message: format!("the answer cannot be sent: {error}"),
                    exit_code: 125,
                };
                let bytes = serde_json::to_vec(&Packet::Reply(Err(refusal))).map_err(|_| PacketError::Closed)?;
                self.socket.send(&bytes, &[])
            }
            sent => sent,
        }
    }

    fn tell_events(&self) {
        let events = self.server.node.events.listen();
        loop {
            match events.recv_timeout(Duration::from_secs(1)) {
                Ok(event) => {
                    if self.send(&Packet::Item(Item::Event(event)), &[]).is_err() {
                        return;
                    }
                }
                // Whether anybody is there still; nothing more is ever asked on this connection.
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    if crate::vmm::process::readable(&self.socket, Duration::ZERO) {
                        return;
                    }
                }
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn answer(&mut self, caller: &Caller, request: Request) -> Answer {
        self.carry_out(caller, request).map_err(|error| error.for_api())
    }

    fn carry_out(&mut self, caller: &Caller, request: Request) -> Result<(Reply, Vec<OwnedFd>), Error> {
        let node = Arc::clone(&self.server.node);
        let find = |sandbox: &str| caller.find(&node, sandbox);
        let reply = match request {
            Request::Info => Reply::Info(self.server.info()),
            Request::Run(config) => return self.run(&node, *config),
            Request::Start { sandbox } => self.goes_on(node.start(&find(&sandbox)?))?,
            Request::Exec { sandbox } => return exec(&node, &*find(&sandbox)?),
            Request::List(wanted) => self.list(&node, caller, &wanted)?,
            Request::Inspect { sandbox } => Reply::Sandbox(Box::new(node.inspect(&*find(&sandbox)?))),
            Request::Logs { sandbox } => return logs(&node, &*find(&sandbox)?),
            Request::Wait { sandbox } => self.wait(&*find(&sandbox)?)?,
            Request::Stop { sandbox, grace_ms } => {
                node.stop(&find(&sandbox)?, Duration::from_millis(grace_ms))?;
                Reply::Done
            }
            Request::Kill { sandbox, signal } => done(node.kill(&find(&sandbox)?, signal))?,
            Request::Restart { sandbox, grace_ms } => {
                self.goes_on(node.restart(&find(&sandbox)?, Duration::from_millis(grace_ms)))?
            }
            Request::Remove { sandbox, force } => done(node.remove(&find(&sandbox)?, force))?,
            Request::Pause { sandbox } => done(node.pause(&*find(&sandbox)?))?,
            Request::Suspend { sandbox } => done(node.suspend(&find(&sandbox)?))?,
            Request::Resume { sandbox } => done(node.resume(&find(&sandbox)?))?,
            Request::Stats { sandbox } => self.stats(&node, caller, sandbox.as_deref())?,
            Request::ListUsage => self.items(answers::usage(&node, caller), Item::BriefUsage)?,
            Request::Trace { sandbox } => Reply::Trace(find(&sandbox)?.trace()),
            Request::Events => Reply::Done,
            Request::Prune => Reply::Pruned(node.prune()?),
            Request::Quarantine { delete } => Reply::Pruned(quarantine(&node, delete)?),
            Request::MakeVolume { name } => Reply::Volume(node.volumes.make(&name, &node.sandboxes)?),
            Request::InspectVolume { name } => Reply::Volume(node.volumes.find(&name, &node.sandboxes)?),
            Request::ListVolumes => self.items(node.volumes.list(&node.sandboxes)?, Item::Volume)?,
            Request::RemoveVolume { name } => {
                node.volumes.remove(&name, &node.sandboxes)?;
                Reply::Done
            }
            Request::PruneVolumes => Reply::Pruned(node.volumes.prune(&node.sandboxes)?),
            Request::MakeSnapshot(asked) => snapshot(&node, &find(&asked.sandbox)?, &asked)?,
            Request::InspectSnapshot { name } => Reply::Snapshot(Box::new(caller.find_snapshot(&node, &name)?)),
            Request::OpenFiles { kind, name } => {
                let (names, files) = node.open_files(kind, &name)?;
                return Ok((Reply::Files(names), files));
            }
            Request::Verify { kind, name } => self.verify(&node, kind, &name)?,
            Request::Load(step) => return node.load(&mut self.loading, step),
            Request::ListSnapshots => self.items(caller.snapshots(&node)?, |one| Item::Snapshot(Box::new(one)))?,
            Request::BuildTemplate(config) => return self.begin_build(&node, *config),
            Request::KeepTemplate => self.save_build(&node)?,
            Request::InspectTemplate { template } => Reply::Template(Box::new(node.find_template(&template)?)),
            Request::ListTemplates => self.items(node.list_templates(), |one| Item::Template(Box::new(one)))?,
            Request::RemoveTemplate { template } => done(node.templates.remove_named(&template))?,
            Request::PruneTemplates { all } => Reply::Pruned(node.templates.prune(all, node.template_context())?),
            Request::Clone(config) => {
                caller.find_snapshot(&node, &config.snapshot)?;
                self.goes_on(node.clone_of(config))?
            }
            Request::Rollback(asked) => {
                caller.find_snapshot(&node, &asked.snapshot)?;
                self.goes_on(rolled_back(&node, &find(&asked.sandbox)?, &asked))?
            }
            Request::Move(asked) => self.goes_on(moved(&node, &find(&asked.sandbox)?, &asked))?,
            Request::SetTimeLimit { sandbox, ms, then } => {
                Reply::Sandbox(Box::new(node.set_time_limit(&*find(&sandbox)?, ms, then)?))
            }
            Request::UpdateNetwork { sandbox, egress } => restricted(&node, &find(&sandbox)?, &egress)?,
            Request::UpdateMemory { sandbox, memory } => resized(&node, &find(&sandbox)?, memory)?,
            Request::RemoveSnapshot { name } => {
                caller.find_snapshot(&node, &name)?;
                done(node.remove_snapshot(&name))?
            }
            Request::ListAccelerators => {
                let item = |info| Item::Accelerator(Box::new(info));
                self.items(node.list_accelerators(), item)?
            }
            Request::ListCpus => self.items(cpus::list(&node.sandboxes)?, Item::Cpu)?,
            Request::IsolateCpus { cpus } => {
                cpus::isolate(&cpus, node.cgroups.as_ref())?;
                Reply::Cpus(cpus)
            }
            Request::ReleaseCpus { cpus } => Reply::Cpus(cpus::give_back(cpus.as_ref())?),
            Request::Devices(asked) => self.items(devices(&node, asked)?, |one| Item::Device(Box::new(one)))?,
            Request::Finish => {
                if let Some(entry) = self.tied.take() {
                    node.end_foreground(&entry)?;
                }
                Reply::Done
            }
            Request::Quit { clean } => {
                if clean {
                    node.clean()?;
                }
                self.quits = true;
                Reply::Done
            }
        };
        Ok((reply, Vec::new()))
    }

    /// A sandbox that runs, or does so again.
    fn goes_on(&self, result: Result<Started, Error>) -> Result<Reply, Error> {
        Ok(started(self.server.node.metrics.started(result)?).0)
    }

    fn run(&mut self, node: &Arc<Node>, config: node_api::SandboxConfig) -> Result<(Reply, Vec<OwnedFd>), Error> {
        self.is_free()?;
        let tied = !config.detach;
        let (entry, begun) = node.metrics.started(node.run(config, self.socket.as_fd()))?;
        self.tied = tied.then_some(entry);
        Ok(started(begun))
    }

    /// It has no sandbox yet that ends with it.
    fn is_free(&self) -> Result<(), Error> {
        match &self.tied {
            Some(_) => Err(Error::Invalid(
                "this connection has a sandbox that ends with it: use another connection for the next one".into(),
            )),
            None => Ok(()),
        }
    }

    fn begin_build(&mut self, node: &Arc<Node>, config: BuildConfig) -> Result<(Reply, Vec<OwnedFd>), Error> {
        self.is_free()?;
        match node.begin_build(config, self.socket.as_fd())? {
            Wanted::There(template) => Ok((Reply::Template(template), Vec::new())),
            Wanted::Begun(build, begun) => {
                self.tied = Some(Arc::clone(&build.entry));
                self.build = Some(build);
                Ok(started(*begun))
            }
        }
    }

    fn save_build(&mut self, node: &Node) -> Result<Reply, Error> {
        let Some(build) = self.build.take() else {
            return Err(Error::Invalid("nothing is built on this connection".into()));
        };
        let saved = node.save_build(&build, self.socket.as_fd());
        // It stands still, or has failed: nobody can do anything with it any more.
        let ended = self.tied.take().map_or(Ok(()), |entry| node.end_foreground(&entry));
        Error::first_of(saved, ended).map(|template| Reply::Template(Box::new(template)))
    }

    /// Waits for a sandbox's end, as long as anybody wants to know.
    fn wait(&self, entry: &Entry) -> Result<Reply, Error> {
        while !entry.wait(Some(WAIT_STEP), |inner| inner.has_exited()) {
            if crate::vmm::process::readable(&self.socket, Duration::ZERO) {
                return Err(Error::Cancelled);
            }
        }
        match entry.stored().sandbox.ended {
            Some(ended) => Ok(Reply::Ended(ended)),
            None => Err(Error::NotFound(entry.id.clone())),
        }
    }

    fn list(&self, node: &Node, caller: &Caller, wanted: &ListConfig) -> Result<Reply, Error> {
        let owns = |sandbox: &Sandbox| caller.owns(sandbox.config.owner.as_deref());
        for entry in node.sandboxes.asked_for(wanted, owns) {
            let mut sandbox = entry.stored().sandbox;
            sandbox.memory_state = node.memory_state(&entry);
            self.item(Item::Sandbox(Box::new(sandbox)))?;
        }
        Ok(Reply::Done)
    }

    fn stats(&self, node: &Node, caller: &Caller, sandbox: Option<&str>) -> Result<Reply, Error> {
        let entries = match sandbox {
            Some(sandbox) => vec![caller.find(node, sandbox)?],
            None => node.entries().values().cloned().collect(),
        };
        for entry in entries {
            if !caller.owns(entry.lock().stored.sandbox.config.owner.as_deref()) {
                continue;
            }
            if sandbox.is_some() || entry.state().has_vm() {
                self.item(Item::Sample(node.sample(&entry)?))?;
            }
        }
        Ok(Reply::Done)
    }

    /// Whoever waits is told how far it is; one that is gone ends it.
    fn verify(&self, node: &Arc<Node>, kind: node_api::transfer::Kind, name: &str) -> Result<Reply, Error> {
        let mut tell = |progress| self.item(Item::Progress(progress));
        Ok(Reply::Verified(Box::new(node.verify(kind, name, &mut tell)?)))
    }

    fn items<T>(&self, all: Vec<T>, item: impl Fn(T) -> Item) -> Result<Reply, Error> {
        all.into_iter().try_for_each(|one| self.item(item(one)))?;
        Ok(Reply::Done)
    }

    /// One of several things. What is too large for a packet is left out: the rest of a list is not to be lost with it.
    fn item(&self, item: Item) -> Result<(), Error> {
        let bytes = serde_json::to_vec(&Packet::Item(item)).map_err(|_| Error::Cancelled)?;
        match self.socket.send(&bytes, &[]) {
            Err(error @ PacketError::TooLarge(_)) => {
                log::error!("something is left out of an answer: {error}");
                Ok(())
            }
            sent => sent.map_err(|_| Error::Cancelled),
        }
    }
}
