//! A node that has no machines: it keeps sandboxes, snapshots and templates as values, and answers what the gateway asks as `basaltd` would.
//! For tests and development alone. Knows nothing of the gateway.

mod agent;
mod pools;
mod volumes;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{SystemTime, UNIX_EPOCH};

use agent_api::ExecRequest;
use base::ByteSize;
use node_api::message::Item;
use node_api::{
    ApiError, BriefUsage, CloneConfig, Ended, ErrorKind, ListConfig, NetworkMode, OnTimeout, Programs, Recipe, Reply,
    Request, Resources, Sample, Sandbox, SandboxConfig, Snapshot, SnapshotConfig, State, Template, TimeLimit, Usage,
    Used,
};
use observe::span::{Operation, past, record};
use serde_json::json;

/// The id of the template that there is, whose name is `base`.
pub(crate) const BASE: &str = "b45eb45eb45eb45eb45eb45eb45eb45eb45eb45eb45eb45eb45eb45eb45eb45e";

/// The images that there are.
const IMAGES: [&str; 2] = [
    "python:3",
    "dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd",
];

/// An answer: items, the reply, descriptors.
pub(crate) type Answered = (Vec<Item>, Result<Reply, ApiError>, Vec<OwnedFd>);

/// The node.
#[derive(Debug, Default)]
pub(crate) struct FakeNode {
    state: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    sandboxes: BTreeMap<String, Sandbox>,
    snapshots: BTreeMap<String, Snapshot>,
    volumes: volumes::Volumes,
    made: u64,
    /// For whom it is being asked.
    tenant: Option<String>,
    /// Requests that were answered, by their name.
    asked: BTreeMap<&'static str, u64>,
    /// What the next request of this name waits for.
    held: BTreeMap<&'static str, mpsc::Receiver<()>>,
    /// What a request of this name is refused with.
    refused: BTreeMap<&'static str, ErrorKind>,
    /// What all commands have written, as a log has it.
    log: Option<Vec<u8>>,
}

pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_nanos()).unwrap()
}

fn refusal(kind: ErrorKind, message: &str) -> ApiError {
    ApiError {
        kind,
        message: message.to_owned(),
        exit_code: 125,
    }
}

fn valid(checked: Result<(), node_api::ConfigError>) -> Result<(), ApiError> {
    checked.map_err(|error| refusal(ErrorKind::Invalid, &error.to_string()))
}

fn missing(what: &str) -> ApiError {
    refusal(ErrorKind::NotFound, &format!("there is no {what}"))
}

pub(crate) fn resources() -> Resources {
    let json = json!({"cpus": 2, "memory": ByteSize::mib(512), "disk": ByteSize::gib(1)});
    serde_json::from_value(json).unwrap()
}

/// The templates that there are.
pub(crate) fn templates() -> Vec<Template> {
    let one = |id: &str, name: &str, networked| Template {
        id: id.to_owned(),
        names: vec![name.to_owned()],
        created_ns: 1_763_710_727_000_000_000,
        used_ns: 1_763_710_727_000_000_000,
        digest: "d".repeat(64),
        resources: resources(),
        networked,
        programs: Programs::default(),
        bytes: 0,
        recipe: Some(Recipe {
            commands: vec!["true".to_owned()],
            ready: None,
            ready_ms: 1000,
            env: vec!["FROM=template".to_owned()],
            workdir: Some("/home/user".to_owned()),
            user: Some("user".to_owned()),
            network: NetworkMode::Auto,
        }),
        sized: false,
        host: None,
        brought: false,
        outdated: None,
    };
    vec![one(BASE, "base", true), one(&"0ff1".repeat(16), "offline", false)]
}

/// What a request is called.
fn name(request: &Request) -> &'static str {
    match request {
        Request::Run(_) => "run",
        Request::Clone(_) => "clone",
        Request::Resume { .. } => "resume",
        Request::Suspend { .. } => "suspend",
        Request::Remove { .. } => "remove",
        Request::SetTimeLimit { .. } => "limit",
        Request::UpdateNetwork { .. } => "network",
        Request::MakeSnapshot(_) => "snapshot",
        Request::RemoveSnapshot { .. } => "remove-snapshot",
        Request::Exec { .. } => "exec",
        Request::Stats { .. } => "stats",
        Request::ListUsage => "usage",
        Request::TenantVolume(_) => "volume",
        _ => "other",
    }
}

impl FakeNode {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        let mut kept = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        kept.end_overdue();
        kept
    }

    /// How often a request of this name was answered.
    pub(crate) fn asked(&self, name: &str) -> u64 {
        self.lock().asked.get(name).copied().unwrap_or(0)
    }

    /// Refuses requests of this name from now on, or none any more.
    pub(crate) fn refuse(&self, name: &'static str, kind: Option<ErrorKind>) {
        let mut kept = self.lock();
        match kind {
            Some(kind) => kept.refused.insert(name, kind),
            None => kept.refused.remove(name),
        };
    }

    /// Has the next request of this name wait until it is told to go on.
    pub(crate) fn hold(&self, name: &'static str) -> mpsc::Sender<()> {
        let (go_on, held) = mpsc::channel();
        self.lock().held.insert(name, held);
        go_on
    }

    /// What sandboxes' commands have written from now on.
    pub(crate) fn set_log(&self, log: &[u8]) {
        self.lock().log = Some(log.to_owned());
    }

    /// Changes a sandbox as its own life would.
    pub(crate) fn change(&self, id: &str, change: impl FnOnce(&mut Sandbox)) {
        change(self.lock().sandboxes.get_mut(id).unwrap());
    }

    /// One of them.
    pub(crate) fn sandbox(&self, id: &str) -> Option<Sandbox> {
        self.lock().sandboxes.get(id).cloned()
    }

    /// All of them.
    pub(crate) fn sandboxes(&self) -> Vec<Sandbox> {
        self.lock().sandboxes.values().cloned().collect()
    }

    /// The names of the snapshots.
    pub(crate) fn snapshots(&self) -> Vec<String> {
        self.lock().snapshots.keys().cloned().collect()
    }

    /// Answers, for this tenant if there is one.
    pub(crate) fn answer(&self, tenant: Option<&str>, request: Request) -> Answered {
        let mut kept = self.lock();
        let name = name(&request);
        *kept.asked.entry(name).or_default() += 1;
        if let Some(held) = kept.held.remove(name) {
            drop(kept);
            held.recv().unwrap();
            kept = self.lock();
        }
        if let Some(kind) = kept.refused.get(name) {
            return (
                Vec::new(),
                Err(refusal(*kind, "see /var/lib/basalt: it is refused")),
                Vec::new(),
            );
        }
        kept.tenant = tenant.map(str::to_owned);
        let mut items = Vec::new();
        let mut fds = Vec::new();
        let mut reply = kept.reply(request, &mut items, &mut fds);
        if let Ok(Reply::Agent { version, .. }) = &mut reply {
            drop(kept);
            let (stream, speaks) = agent::connect();
            fds.push(stream);
            *version = Some(speaks);
        }
        (items, reply, fds)
    }
}

impl Kept {
    fn end_overdue(&mut self) {
        let now = now_ns();
        let is_over = |sandbox: &Sandbox| sandbox.ends_ns.is_some_and(|end| end <= now);
        let over: Vec<String> = self
            .sandboxes
            .values()
            .filter(|one| is_over(one))
            .map(|one| one.id.clone())
            .collect();
        for id in over {
            let suspends = |limit: TimeLimit| limit.then == OnTimeout::Suspend;
            let sandbox = self.sandboxes.get_mut(&id).unwrap();
            match sandbox.config.time_limit.is_some_and(suspends) {
                true => suspend(sandbox),
                false => drop(self.sandboxes.remove(&id)),
            }
        }
    }

    fn reply(&mut self, request: Request, items: &mut Vec<Item>, fds: &mut Vec<OwnedFd>) -> Result<Reply, ApiError> {
        match request {
            Request::Run(config) => self.run(*config),
            Request::Clone(config) => self.clone_of(config),
            Request::Inspect { sandbox } => Ok(Reply::Sandbox(Box::new(self.get(&sandbox)?.clone()))),
            Request::List(list) => {
                items.extend(self.list(&list));
                Ok(Reply::Done)
            }
            Request::Remove { sandbox, .. } => {
                self.get(&sandbox)?;
                self.sandboxes.remove(&sandbox);
                Ok(Reply::Done)
            }
            Request::Suspend { sandbox } => match self.get(&sandbox)? {
                one if one.state == State::Running => {
                    suspend(one);
                    Ok(Reply::Done)
                }
                _ => Err(refusal(ErrorKind::WrongState, "it does not run")),
            },
            Request::Resume { sandbox } => {
                let one = self.get(&sandbox)?;
                one.state = State::Running;
                one.started_ns = Some(now_ns());
                one.ends_ns = one.config.time_limit.map(|limit| limit.end(now_ns()));
                Ok(Reply::Done)
            }
            Request::UpdateNetwork { sandbox, egress } => {
                let one = self.get(&sandbox)?;
                one.config.egress = egress;
                Ok(Reply::Sandbox(Box::new(one.clone())))
            }
            Request::SetTimeLimit { sandbox, ms, then } => {
                let one = self.get(&sandbox)?;
                let then = then
                    .or(one.config.time_limit.map(|limit| limit.then))
                    .unwrap_or_default();
                one.config.time_limit = ms.map(|ms| TimeLimit { ms, then });
                let runs = one.state == State::Running;
                one.ends_ns = one.config.time_limit.filter(|_| runs).map(|limit| limit.end(now_ns()));
                Ok(Reply::Sandbox(Box::new(one.clone())))
            }
            Request::Exec { sandbox } => self.exec(&sandbox),
            Request::Stats { sandbox } => {
                items.extend(self.stats(sandbox.as_deref()));
                Ok(Reply::Done)
            }
            Request::ListUsage => {
                items.push(Item::BriefUsage(self.usage()));
                Ok(Reply::Done)
            }
            Request::ListPools => {
                items.extend(pools::list(self));
                Ok(Reply::Done)
            }
            Request::Trace { sandbox } => {
                self.get(&sandbox)?;
                Ok(Reply::Trace(trace()))
            }
            Request::Logs { sandbox } => {
                let one = self.get(&sandbox)?.clone();
                let log = self.log.as_deref().unwrap_or(LOG);
                fds.extend([log_file(log), log_file(log)]);
                Ok(Reply::Sandbox(Box::new(one)))
            }
            Request::ListTemplates => {
                items.extend(templates().into_iter().map(|one| Item::Template(Box::new(one))));
                Ok(Reply::Done)
            }
            Request::InspectTemplate { template } => {
                let is_it = |one: &Template| one.names.contains(&template) || one.id.starts_with(&template);
                let found = templates().into_iter().find(is_it).ok_or_else(|| missing("template"))?;
                Ok(Reply::Template(Box::new(found)))
            }
            Request::MakeSnapshot(config) => self.snapshot(&config),
            Request::ListSnapshots => {
                let its = self.snapshots.values().filter(|one| self.owns(&one.config));
                items.extend(its.map(|one| Item::Snapshot(Box::new(one.clone()))));
                Ok(Reply::Done)
            }
            Request::InspectSnapshot { name } => Ok(Reply::Snapshot(Box::new(self.snapshot_named(&name)?.clone()))),
            Request::RemoveSnapshot { name } => {
                self.snapshot_named(&name)?;
                self.snapshots.remove(&name);
                Ok(Reply::Done)
            }
            Request::TenantVolume(asked) => {
                let tenant = self.tenant.clone();
                self.volumes
                    .reply(tenant.as_deref(), asked, &self.sandboxes, (items, fds))
            }
            other => Err(refusal(ErrorKind::Invalid, &format!("not here: {other:?}"))),
        }
    }

    /// Whether what has this configuration is there for who asks.
    fn owns(&self, config: &SandboxConfig) -> bool {
        is_for(self.tenant.as_ref(), config)
    }

    fn get(&mut self, id: &str) -> Result<&mut Sandbox, ApiError> {
        let tenant = self.tenant.clone();
        let found = self.sandboxes.get_mut(id);
        found
            .filter(|one| is_for(tenant.as_ref(), &one.config))
            .ok_or_else(|| missing("sandbox"))
    }

    fn snapshot_named(&self, name: &str) -> Result<&Snapshot, ApiError> {
        let found = self.snapshots.get(name).filter(|one| self.owns(&one.config));
        found.ok_or_else(|| missing("snapshot"))
    }

    fn list(&self, list: &ListConfig) -> Vec<Item> {
        let its = self.sandboxes.values().filter(|one| self.owns(&one.config));
        let all = list.of(its);
        all.into_iter()
            .map(|one| Item::Sandbox(Box::new(one.clone())))
            .collect()
    }

    fn stats(&self, id: Option<&str>) -> Vec<Item> {
        let wanted =
            |one: &&Sandbox| self.owns(&one.config) && one.state == State::Running && id.is_none_or(|id| one.id == id);
        let sample = |one: &Sandbox| {
            Item::Sample(Sample {
                id: one.id.clone(),
                name: one.name.clone(),
                usage: Usage {
                    cpu_usec: 1000,
                    memory: 64 << 20,
                    disk: 8 << 20,
                    ..Usage::default()
                },
            })
        };
        self.sandboxes.values().filter(wanted).map(sample).collect()
    }

    fn usage(&self) -> Vec<BriefUsage> {
        let used = |one: &Sandbox| Used {
            started_ns: one.started_ns.unwrap(),
            cpu_usec: 1000,
            memory: 64 << 20,
            disk: 8 << 20,
        };
        let its = self.sandboxes.values().filter(|one| self.owns(&one.config));
        its.map(|one| BriefUsage {
            id: one.id.clone(),
            used: (one.state == State::Running).then(|| used(one)),
        })
        .collect()
    }

    fn run(&mut self, mut config: SandboxConfig) -> Result<Reply, ApiError> {
        valid(config.validate())?;
        if config.template.is_none() && !IMAGES.contains(&config.image.as_str()) {
            return Err(missing("image"));
        }
        if let Some(template) = templates().iter().find(|one| Some(&one.id) == config.template.as_ref()) {
            config.image.clone_from(&template.digest);
        }
        let template = config.template.clone();
        config.owner.clone_from(&self.tenant);
        Ok(self.add(config, template, None))
    }

    fn clone_of(&mut self, asked: CloneConfig) -> Result<Reply, ApiError> {
        valid(asked.validate())?;
        let mut config = self.snapshot_named(&asked.snapshot)?.config.clone();
        if asked.only_labels {
            config.labels.clear();
        }
        config.labels.extend(asked.labels);
        config.process.env.extend(asked.env);
        config.process.workdir = asked.workdir.or(config.process.workdir);
        config.process.user = asked.user.or(config.process.user);
        config.time_limit = asked.time_limit.or(config.time_limit);
        config.egress = asked.egress.unwrap_or(config.egress);
        config.volumes.extend(asked.volumes);
        valid(config.validate())?;
        (config.remove, config.name) = (asked.remove, asked.name);
        Ok(self.add(config, None, Some(asked.snapshot)))
    }

    fn add(&mut self, config: SandboxConfig, template: Option<String>, clone_of: Option<String>) -> Reply {
        self.made += 1;
        let now = now_ns();
        let id = format!("{:012x}", 0x00c0_ffee_0000 + self.made);
        let sandbox = Sandbox {
            id: id.clone(),
            name: config.name.clone().unwrap_or_else(|| format!("fake-{}", self.made)),
            state: State::Running,
            pause_reason: None,
            digest: config.image.clone(),
            created_ns: now,
            started_ns: Some(now),
            ends_ns: config.time_limit.map(|limit| limit.end(now)),
            ended_ns: None,
            ended: None,
            vmm: None,
            accelerator: None,
            accelerator_ended: None,
            volumes: Vec::new(),
            restarts: 0,
            clone_of,
            template,
            refused: None,
            owned_cpus: base::CpuSet::default(),
            memory_state: None,
            config,
        };
        self.sandboxes.insert(id, sandbox.clone());
        Reply::Started {
            sandbox: Box::new(sandbox),
            command: None,
        }
    }

    fn snapshot(&mut self, asked: &SnapshotConfig) -> Result<Reply, ApiError> {
        let one = self.get(&asked.sandbox)?.clone();
        if one.state != State::Running {
            return Err(refusal(ErrorKind::WrongState, "it does not run"));
        }
        let name = asked.name.clone().unwrap();
        let snapshot = Snapshot {
            name: name.clone(),
            created_ns: now_ns(),
            sandbox: one.id,
            sandbox_name: one.name,
            config: one.config,
            digest: one.digest,
            programs: Programs::default(),
            bytes: 0,
            damaged: None,
        };
        match self.snapshots.contains_key(&name) {
            true => Err(refusal(ErrorKind::Conflict, "there is one of this name")),
            false => {
                self.snapshots.insert(name, snapshot.clone());
                Ok(Reply::Snapshot(Box::new(snapshot)))
            }
        }
    }

    /// What all commands begin with; the agent's connection is the node's to add.
    fn exec(&mut self, id: &str) -> Result<Reply, ApiError> {
        let one = self.get(id)?;
        if one.state != State::Running {
            return Err(refusal(ErrorKind::WrongState, "it does not run"));
        }
        let own = one.config.process.env.iter().map(String::as_str);
        // Login shells of builds are not to read what this host's user has for his.
        let is_build = one.config.labels.contains_key("basalt.e2b/build");
        let home = is_build.then_some("HOME=/nowhere");
        let command = ExecRequest {
            env: own.chain(home).map(Into::into).collect(),
            cwd: one.config.process.workdir.as_deref().unwrap_or("/").into(),
            // As whom tests run.
            user: None,
            ..ExecRequest::default()
        };
        Ok(Reply::Agent {
            command: Box::new(command),
            restarts: Some(0),
            version: None,
        })
    }
}

/// Whether it is this tenant's, or any tenant's where none is named.
fn is_for(tenant: Option<&String>, config: &SandboxConfig) -> bool {
    match tenant {
        Some(tenant) => config.owner.as_ref() == Some(tenant),
        None => config.owner.is_some(),
    }
}

fn suspend(sandbox: &mut Sandbox) {
    sandbox.state = State::Suspended;
    sandbox.ends_ns = None;
    sandbox.ended_ns = Some(now_ns());
    sandbox.ended = Some(Ended::Stopped);
}

/// What a start was made of.
fn trace() -> Vec<observe::Span> {
    const MS: u64 = 1_000_000;
    let operation = Operation {
        service: "basaltd",
        name: "create and start",
        parent: None,
        detailed: false,
        began_ns: Some(MS),
    };
    let parts = [
        ("directory and record", 1, 4),
        ("disk", 4, 9),
        ("network", 9, 12),
        ("cgroup", 12, 13),
        ("VMM process", 13, 31),
        ("VM restored", 31, 52),
        ("guest re-identified", 52, 66),
    ];
    let make = || {
        for (name, start, end) in parts {
            past("basaltd", name, start * MS, end * MS);
        }
        past("basalt-vmm", "memory mapped", 33 * MS, 48 * MS);
    };
    let ((), mut spans) = record(operation, make);
    let end = 68 * MS;
    spans.last_mut().unwrap().end_ns = end;
    spans
}

/// What sandboxes' commands have written, unless it is said otherwise.
const LOG: &[u8] = b"1763710727.000000000 o F hello\n1763710728.000000000 e F oops\n";

fn log_file(log: &[u8]) -> OwnedFd {
    use std::io::Write;
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(log).unwrap();
    file.into()
}
