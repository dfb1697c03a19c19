//! One build, from its turn to its end, whether its client is still there or not.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use base::ByteSize;
use control::{Build, BuildState, Failure, LogLevel, Settings, Template};
use node_api::{
    Class, CloneConfig, ErrorKind, Idle, MemoryMode, OnTimeout, Request, Resources, Sandbox, SandboxConfig,
    SnapshotConfig, TimeLimit,
};

use super::plan::{Base, Plan};
use super::session::{self, Fault, Parts, Session, Stopped};
use super::{Job, snapshot_name};
use crate::Error;
use crate::auth::Principal;
use crate::error::with_causes;
use crate::gateway::Gateway;
use crate::guest::Guest;
use crate::labels::Said;
use crate::launch::amount;
use crate::node::Owner;
use crate::origin::{Found, Origin};
use crate::plan::{on_image, on_template};
use crate::time_text;

/// How much a template has where nobody says: what `basalt run` gives a sandbox.
const CPUS: u32 = 1;
const MEMORY: ByteSize = ByteSize::mib(512);
const DISK: ByteSize = ByteSize::gib(10);

fn usual() -> Resources {
    Resources {
        cpus: CPUS,
        memory: MEMORY,
        boot_memory: None,
        max_memory: None,
        held_memory: None,
        inflated: None,
        disk: Some(DISK),
        cpu_model: None,
        class: Class::Standard,
        idle: Idle::Halt,
        memory_mode: MemoryMode::Translated,
        free_page_reporting: false,
        guest_iommu: false,
    }
}

/// The image that the SDKs build on where they are told no other: here that of the template `base`.
const E2B_BASE: [&str; 2] = ["e2bdev/base", "e2bdev/base:latest"];
const BASE: &str = "base";

/// What a build's sandbox may run longer than the build, for its snapshot.
const MORE: Duration = Duration::from_secs(1800);

/// What a build is made in: a sandbox that is to be, and what commands in it have besides.
struct Ground {
    config: Config,
    resources: Resources,
    settings: Settings,
}

enum Config {
    Run(Box<SandboxConfig>),
    Clone(Box<CloneConfig>),
}

impl Gateway {
    /// Has a build that is waiting begin. It goes on by itself.
    pub(crate) async fn start_build(
        self: &Arc<Self>,
        principal: &Principal,
        template: Template,
        build: Build,
        plan: Plan,
    ) -> Result<(), Error> {
        for hash in plan.hashes() {
            if !self.builds.files.is_there(&build.tenant, hash).await? {
                return Err(Error::invalid(format!(
                    "the files of a COPY were not uploaded (hash {hash}): ask for an upload at GET /templates/{}/files/{hash}",
                    template.id
                )));
            }
        }
        let id = build.id.clone();
        if !self.store.with(move |store| store.begin_build(&id)).await? {
            return Err(Error::Conflict(format!(
                "build {} has been started before: ask for a new one at POST /v3/templates",
                build.id
            )));
        }
        let job = self.builds.add(template, build, plan);
        let (gateway, principal) = (Arc::clone(self), principal.clone());
        let held = self.limits.change();
        tokio::spawn(async move {
            gateway.build(&principal, &job).await;
            drop(held);
        });
        Ok(())
    }

    async fn build(&self, principal: &Principal, job: &Arc<Job>) {
        let outcome = self.build_in_turn(principal, job).await;
        let mut build = job.build.clone();
        build.finished_ns = Some(time_text::now_ns());
        match outcome {
            Ok((settings, resources)) => {
                job.log
                    .say(LogLevel::Info, Some(session::FINALIZE), "the template is ready");
                build.state = BuildState::Ready;
                build.kept = true;
                build.settings = settings;
                build.cpus = Some(resources.cpus);
                build.memory_mib = Some(resources.memory.bytes() >> 20);
                build.disk_mib = resources.disk.map(|disk| disk.bytes() >> 20);
            }
            Err(stopped) => {
                let message = stopped.message();
                job.log.say(LogLevel::Error, Some(&stopped.step), &message);
                build.state = BuildState::Failed;
                build.failure = Some(Failure {
                    message,
                    step: Some(stopped.step),
                });
            }
        }
        let is_written = match self.write_end(job, &build).await {
            Ok(there) => there,
            // It may have come to have too many tags.
            Err(error) if build.state == BuildState::Ready => {
                let message = error.told().message;
                job.log.say(LogLevel::Error, Some(session::FINALIZE), &message);
                let failed = Build {
                    state: BuildState::Failed,
                    failure: Some(Failure {
                        message,
                        step: Some(session::FINALIZE.to_owned()),
                    }),
                    // Until housekeeping has removed what there is of it.
                    kept: true,
                    ..build.clone()
                };
                self.write_end(job, &failed).await.unwrap_or_else(|error| {
                    log::error!(
                        "how build {} ended cannot be written down: {}",
                        build.id,
                        with_causes(&error)
                    );
                    false
                })
            }
            Err(error) => {
                log::error!(
                    "how build {} ended cannot be written down: {}",
                    build.id,
                    with_causes(&error)
                );
                false
            }
        };
        // Its template was deleted, or nobody will ever find it.
        if !is_written
            && build.kept
            && let Err(error) = self.remove_snapshot(&Owner::Gateway, &build.id).await
        {
            log::warn!("the snapshot of build {} stays: {}", build.id, with_causes(&error));
        }
        self.builds.jobs().remove(&build.id);
        self.remove_useless().await;
    }

    /// Writes down how it has ended; false if it is not there any more.
    async fn write_end(&self, job: &Job, build: &Build) -> Result<bool, Error> {
        let (row, log) = (build.clone(), job.log.lines());
        self.store.with(move |store| store.finish_build(&row, &log)).await
    }

    /// Waits until it may be made, and makes it.
    async fn build_in_turn(&self, principal: &Principal, job: &Arc<Job>) -> Result<(Settings, Resources), Stopped> {
        let stopped = |why: Fault| Stopped {
            step: session::BASE.to_owned(),
            title: None,
            why,
        };
        job.log.say(LogLevel::Info, Some(session::BASE), "waiting for a turn");
        // Its template may have been deleted before this was among what is ended with it.
        let there = self.own_template(&job.build.tenant, &job.template.id).await;
        if there
            .map_err(|error| stopped(error.into()))?
            .is_none_or(|template| template.id != job.template.id)
        {
            return Err(stopped(Fault::Cancelled));
        }
        // Nobody closes them.
        let turn = async {
            let its = self.builds.tenants.lock(&job.build.tenant).await;
            (its, self.builds.turns.acquire().await)
        };
        let _turn = tokio::select! {
            turn = turn => turn,
            () = job.end.notified() => return Err(stopped(Fault::Cancelled)),
        };
        if job.cancelled.load(Ordering::Relaxed) {
            return Err(stopped(Fault::Cancelled));
        }
        let ground = self
            .ground(principal, job)
            .await
            .map_err(|error| stopped(error.into()))?;
        let began = Instant::now();
        let owner = principal.owner();
        let name = match &job.plan.base {
            Base::Image(name) | Base::Template(name) => name,
        };
        job.log
            .say(LogLevel::Info, Some(session::BASE), &format!("building on {name}"));
        let resources = ground.resources.clone();
        let sandbox = self
            .make_ground(principal, ground.config, &resources)
            .await
            .map_err(|error| stopped(explain(error, &job.plan.base).into()))?;
        let done = self.in_sandbox(&owner, job, &sandbox, ground.settings, began).await;
        // It goes by itself later, if it must.
        if let Err(error) = self.remove(&owner, &sandbox.id).await {
            log::warn!(
                "the sandbox of build {} stays for a while: {}",
                job.build.id,
                with_causes(&error)
            );
        }
        done.map(|settings| (settings, resources))
    }

    /// Carries the steps out, and keeps what came of them.
    async fn in_sandbox(
        &self,
        owner: &Owner,
        job: &Arc<Job>,
        sandbox: &Sandbox,
        settings: Settings,
        began: Instant,
    ) -> Result<Settings, Stopped> {
        let stopped = |why: Fault| Stopped {
            step: session::FINALIZE.to_owned(),
            title: None,
            why,
        };
        let guest = Guest::new(self.nodes.clone(), &sandbox.id);
        let (work, files, config) = (
            Arc::clone(job),
            self.builds.files.opener(&job.build.tenant),
            self.builds.config.clone(),
        );
        let handle = tokio::runtime::Handle::current();
        let carried_out = tokio::task::spawn_blocking(move || {
            let connect = || handle.block_on(guest.connect_blocking());
            let parts = Parts {
                connect: &connect,
                open: &|hash| files.open(hash),
                log: &work.log,
                cancelled: &work.cancelled,
                began,
                limit: config.limit,
                ready: config.ready,
            };
            Session::new(parts, settings)?.carry_out(&work.plan)
        });
        let settings = match carried_out.await {
            Ok(done) => done?,
            Err(error) => return Err(stopped(Error::Task(error.to_string()).into())),
        };
        job.log
            .say(LogLevel::Info, Some(session::FINALIZE), "keeping it as a template");
        let config = SnapshotConfig {
            sandbox: sandbox.id.clone(),
            name: Some(snapshot_name(&job.build.id)),
            detach_devices: false,
        };
        match self.nodes.snapshot(owner, config).await {
            Ok(_) => Ok(settings),
            Err(error) => {
                // It may be there all the same, as when it only took too long.
                if let Err(second) = self.remove_snapshot(owner, &job.build.id).await {
                    log::warn!(
                        "the snapshot of build {} may stay: {}",
                        job.build.id,
                        with_causes(&second)
                    );
                }
                Err(stopped(error.into()))
            }
        }
    }

    /// What it is built on.
    async fn ground(&self, principal: &Principal, job: &Job) -> Result<Ground, Error> {
        let wanted = match &job.plan.base {
            Base::Image(image) if E2B_BASE.contains(&image.as_str()) => Some(BASE),
            Base::Image(_) => None,
            Base::Template(name) => Some(name.as_str()),
        };
        let limit = TimeLimit {
            ms: u64::try_from((self.builds.config.limit + MORE).as_millis()).unwrap_or(u64::MAX),
            then: OnTimeout::Stop,
        };
        let said = Said {
            build: Some(job.build.id.clone()),
            private_traffic: true,
            ..Said::default()
        };
        let asked = |usual: &Resources| Resources {
            cpus: job.build.cpus.unwrap_or(usual.cpus),
            memory: job.build.memory_mib.map_or(usual.memory, ByteSize::mib),
            ..usual.clone()
        };
        let Some(wanted) = wanted else {
            let resources = asked(&usual());
            let Base::Image(image) = &job.plan.base else {
                return Err(Error::Unexpected("a base"));
            };
            let config = on_image(image, resources.clone(), limit, &said);
            return Ok(Ground {
                config: Config::Run(Box::new(config)),
                resources,
                settings: Settings::default(),
            });
        };
        let found = match &job.plan.base {
            Base::Image(_) => self.nodes_base(principal).await?,
            Base::Template(_) => self.find(principal, wanted).await?,
        };
        let (usual, name) = match &found.origin {
            Origin::Template(template) => (&template.resources, template.name()),
            Origin::Built(built) => (&built.snapshot.config.resources, built.template.name.as_str()),
            Origin::Snapshot(snapshot) => (&snapshot.config.resources, snapshot.name.as_str()),
        };
        let (resources, is_same) = (asked(usual), asked(usual) == *usual);
        let clone = |settings: &Settings, snapshot: &str| {
            Config::Clone(Box::new(CloneConfig {
                snapshot: snapshot.to_owned(),
                remove: true,
                labels: said.write(),
                only_labels: true,
                env: settings.env.clone(),
                workdir: settings.workdir.clone(),
                user: settings.user.clone(),
                time_limit: Some(limit),
                ..CloneConfig::default()
            }))
        };
        let (config, settings) = match &found.origin {
            Origin::Template(template) if is_same => (Config::Run(Box::new(on_template(template, limit, &said))), None),
            // Nothing was done in it, so that it is its image, which has any size.
            Origin::Template(template)
                if template
                    .recipe
                    .as_ref()
                    .is_some_and(|recipe| recipe.commands.is_empty()) =>
            {
                let config = on_template(template, limit, &said);
                let config = SandboxConfig {
                    template: None,
                    resources: resources.clone(),
                    ..config
                };
                (Config::Run(Box::new(config)), None)
            }
            Origin::Built(built) if is_same => (
                clone(&built.build.settings, &built.snapshot.name),
                Some(built.build.settings.clone()),
            ),
            Origin::Snapshot(snapshot) if is_same => (clone(&Settings::default(), &snapshot.name), None),
            _ => {
                return Err(Error::invalid(format!(
                    "what is built on `{name}` has its size, which is {} CPUs and {} MiB: leave cpuCount and memoryMB out, or build on an image",
                    usual.cpus,
                    usual.memory.bytes() >> 20
                )));
            }
        };
        Ok(Ground {
            config,
            resources,
            settings: settings.unwrap_or_default(),
        })
    }

    /// The node's template `base`, whatever the tenant calls its own.
    async fn nodes_base(&self, principal: &Principal) -> Result<Found, Error> {
        let template = self.nodes.find_template(&principal.owner(), BASE).await?;
        let template = template.ok_or_else(|| Error::NotFound {
            what: "template",
            name: BASE.to_owned(),
        })?;
        Ok(Found {
            origin: Origin::Template(Box::new(template)),
            alias: None,
        })
    }

    async fn make_ground(
        &self,
        principal: &Principal,
        config: Config,
        resources: &Resources,
    ) -> Result<Sandbox, Error> {
        let owner = principal.owner();
        let wanted = amount(resources);
        match config {
            Config::Run(config) => {
                let made = self.nodes.run(&owner, *config);
                self.claimed(&principal.tenant, wanted, None, made).await
            }
            Config::Clone(config) => {
                let made = self.nodes.clone_of(&owner, *config);
                self.claimed(&principal.tenant, wanted, None, made).await
            }
        }
    }

    /// Removes the snapshot of a build; it is fine if there is none.
    pub(super) async fn remove_snapshot(&self, owner: &Owner, build: &str) -> Result<(), Error> {
        let name = snapshot_name(build);
        match self.nodes.done(owner, Request::RemoveSnapshot { name }).await {
            Err(error) if crate::node::is_missing(&error) => Ok(()),
            done => done,
        }
    }

    /// Removes a template with its builds, and ends those that are under way.
    pub(crate) async fn remove_template(&self, template: &Template) -> Result<(), Error> {
        let id = template.id.clone();
        self.builds.cancel(Some(&id));
        // Nobody finds it from here on; what fails behind this is done by housekeeping.
        let untag = move |store: &dyn control::ControlStore| {
            store.remove_tags(&id, None)?;
            store.builds(&id)
        };
        for build in self.store.with(untag).await? {
            if build.kept {
                self.remove_snapshot(&Owner::Gateway, &build.id).await?;
                self.store.with(move |store| store.forget(&build.id)).await?;
            }
        }
        let id = template.id.clone();
        // One may have come to its end meanwhile.
        for build in self.store.with(move |store| store.remove_template(&id)).await? {
            self.remove_snapshot(&Owner::Gateway, &build.id).await?;
        }
        // One may have begun meanwhile.
        self.builds.cancel(Some(&template.id));
        Ok(())
    }

    /// Removes the snapshots of builds to which no tag leads any more. One that cannot be removed keeps no other.
    pub(crate) async fn remove_useless(&self) {
        let all = self.store.with(|store| store.useless()).await.unwrap_or_else(|error| {
            log::warn!("builds that are of no use stay for a while: {}", with_causes(&error));
            Vec::new()
        });
        for build in all {
            if let Err(error) = self.remove_one_useless(&build.id).await {
                log::warn!(
                    "build {} is of no use and stays for a while: {}",
                    build.id,
                    with_causes(&error)
                );
            }
        }
    }

    async fn remove_one_useless(&self, build: &str) -> Result<(), Error> {
        let id = build.to_owned();
        // Somebody may have given it a tag meanwhile.
        if !self.store.with(move |store| store.retire(&id)).await? {
            return Ok(());
        }
        self.remove_snapshot(&Owner::Gateway, build).await?;
        let id = build.to_owned();
        self.store.with(move |store| store.forget(&id)).await
    }
}

/// That an image is not there is for the tenant to know, and what to do.
fn explain(error: Error, base: &Base) -> Error {
    match (&error, base) {
        (Error::Refused(refused), Base::Image(image)) if refused.kind == ErrorKind::NotFound => {
            Error::invalid(format!(
                "this node has no image `{image}`: its operator brings it with `basalt pull {image}` or `basalt import`, and `basalt images` \
             lists those that there are"
            ))
        }
        _ => error,
    }
}
