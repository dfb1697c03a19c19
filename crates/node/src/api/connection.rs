//! A connection of the daemon's: one request at a time, each turned into calls of the node. Decides nothing itself but what belongs to a
//! connection: a sandbox that is not detached ends with it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use node_api::message::Item;
use node_api::tenant_volume::TenantVolumeRequest;
use node_api::{ApiError, BuildConfig, ErrorKind, ListConfig, Packet, Reply, Request, Sandbox, Tracing, VERSION};
use observe::span::{self, Operation};
use wire::packet::{PacketError, PacketSocket};

use crate::Error;
use crate::api::answers::{
    self, devices, done, exec, logs, moved, quarantine, resized, restricted, rolled_back, snapshot, started,
};
use crate::api::bounds;
use crate::api::scope::{Caller, Scope};
use crate::api::server::Server;
use crate::api::tenant_volumes;
use crate::node::Node;
use crate::operations::build_template::{Build, Wanted};
use crate::operations::stages::Started;
use crate::resources::cpus;
use crate::sandbox::entry::Entry;
use crate::telemetry::trace;
use crate::transfer::Loading;

/// How often is looked whether somebody who waits is there still.
const WAIT_STEP: Duration = Duration::from_secs(1);

/// One asker.
pub(super) struct Connection<'s> {
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

impl<'s> Connection<'s> {
    /// Somebody who has come to a socket of this scope.
    pub(super) fn new(server: &'s Arc<Server>, socket: PacketSocket, scope: Scope) -> Self {
        Self {
            server,
            socket,
            scope,
            tied: None,
            loading: None,
            build: None,
            quits: false,
        }
    }

    /// Answers until they leave.
    pub(super) fn serve(mut self) {
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
            Request::ListPools => self.items(node.list_pools(caller.snapshots(&node)?), Item::Pool)?,
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
            Request::TenantVolume(asked) => return self.tenant_volume(&node, caller, asked),
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
        for (entry, mut sandbox) in node.sandboxes.asked_for(wanted, owns) {
            sandbox.memory_state = node.memory_state(&entry);
            self.item(Item::Sandbox(Box::new(sandbox)))?;
        }
        Ok(Reply::Done)
    }

    fn tenant_volume(
        &self,
        node: &Node,
        caller: &Caller,
        asked: TenantVolumeRequest,
    ) -> Result<(Reply, Vec<OwnedFd>), Error> {
        if asked == TenantVolumeRequest::List && caller.is_administrator() {
            return Ok((
                self.items(tenant_volumes::list_all(node)?, Item::TenantVolume)?,
                Vec::new(),
            ));
        }
        let (items, reply, fd) = tenant_volumes::carry_out(node, caller.tenant()?, asked)?;
        self.items(items, Item::TenantVolume)?;
        Ok((reply.map_or(Reply::Done, Reply::TenantVolume), fd.into_iter().collect()))
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
