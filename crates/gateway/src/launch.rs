//! Sandboxes made and made to go on: claimed from the tenant's quota, asked of the node, and counted. Knows no request of HTTP.

use node_api::{CloneConfig, ListConfig, Request, Sandbox, Snapshot, SnapshotConfig, State, TimeLimit};

use control::{Amount, Claim, InUse, Settings};

use crate::Error;
use crate::auth::Principal;
use crate::error::with_causes;
use crate::gateway::Gateway;
use crate::labels::{self, Said};
use crate::node::{Owner, is_missing};
use crate::origin::{Found, Origin};
use crate::plan::{Plan, sandbox_config};
use crate::time_text;

/// What names of snapshots of ours begin with: that of one that stays, and that of one that a fork makes and removes.
pub(crate) const SNAPSHOT: &str = "snap-";
pub(crate) const FORK: &str = "fork-";

/// How often a sandbox is tried to be made of what goes meanwhile.
const ATTEMPTS: usize = 3;

/// What a machine takes of a quota while it runs.
pub(crate) fn amount(resources: &node_api::Resources) -> Amount {
    Amount {
        sandboxes: 1,
        vcpus: resources.cpus.into(),
        memory: resources.memory.bytes(),
    }
}

/// What a sandbox takes of it.
fn taken(sandbox: &Sandbox) -> InUse {
    let whole = amount(&sandbox.config.resources);
    let amount = match sandbox.state {
        State::Suspended => Amount {
            sandboxes: 1,
            ..Amount::default()
        },
        _ => whole,
    };
    InUse {
        sandbox: sandbox.id.clone(),
        amount,
    }
}

/// A sandbox that somebody may ask for: not one that has ended.
pub(crate) fn is_there(state: State) -> bool {
    match state {
        State::Creating | State::Starting | State::Running | State::Paused | State::Suspended => true,
        State::Stopping | State::Exited | State::Removing => false,
    }
}

/// It is there for a build, which ends it, and nobody's to see.
pub(crate) fn is_for_build(sandbox: &Sandbox) -> bool {
    sandbox.config.labels.contains_key(labels::BUILD)
}

/// It stands still until somebody lets it go on.
pub(crate) fn is_paused(state: State) -> bool {
    matches!(state, State::Paused | State::Suspended)
}

impl Gateway {
    /// A tenant's sandbox.
    pub(crate) async fn sandbox(&self, principal: &Principal, id: &str) -> Result<Sandbox, Error> {
        let sandbox = self.nodes.inspect(&principal.owner(), id).await?;
        match is_there(sandbox.state) && !is_for_build(&sandbox) {
            true => Ok(sandbox),
            false => Err(Error::NoSandbox(id.to_owned())),
        }
    }

    /// Makes one of what `text` stands for. What was found may go before it is used, such as a build to which no tag leads any more: then
    /// it is looked for once more.
    pub(crate) async fn launch_named(&self, principal: &Principal, text: &str, plan: Plan) -> Result<Sandbox, Error> {
        let mut found = self.find(principal, text).await?;
        for _ in 0..ATTEMPTS {
            let origin = found.origin.clone();
            match self.launch(principal, found, plan.clone()).await {
                Err(error) if is_missing(&error) && self.is_gone(&principal.owner(), &origin).await? => (),
                made => return made,
            }
            found = self.find(principal, text).await?;
        }
        Err(Error::Busy("what a sandbox is to be made of is being replaced"))
    }

    /// Whether the node has something no more.
    async fn is_gone(&self, owner: &Owner, origin: &Origin) -> Result<bool, Error> {
        Ok(match origin {
            Origin::Template(template) => self.nodes.find_template(owner, &template.id).await?.is_none(),
            Origin::Snapshot(snapshot) => self.nodes.find_snapshot(owner, &snapshot.name).await?.is_none(),
            Origin::Built(built) => self.nodes.find_snapshot(owner, &built.snapshot.name).await?.is_none(),
        })
    }

    /// Makes one.
    async fn launch(&self, principal: &Principal, found: Found, plan: Plan) -> Result<Sandbox, Error> {
        let said = Said {
            template: found.origin.id().to_owned(),
            alias: found.alias,
            ..plan.said.clone()
        };
        let owner = principal.owner();
        match found.origin {
            Origin::Template(template) => {
                let config = sandbox_config(&template, &plan, &said);
                let wanted = amount(&template.resources);
                self.claimed(&principal.tenant, wanted, None, self.nodes.run(&owner, config))
                    .await
            }
            Origin::Snapshot(snapshot) => {
                self.launch_clone(principal, &snapshot, Settings::default(), plan, &said)
                    .await
            }
            Origin::Built(built) => {
                self.launch_clone(principal, &built.snapshot, built.build.settings, plan, &said)
                    .await
            }
        }
    }

    /// Makes a clone, in which commands have what the settings say.
    async fn launch_clone(
        &self,
        principal: &Principal,
        snapshot: &Snapshot,
        settings: Settings,
        plan: Plan,
        said: &Said,
    ) -> Result<Sandbox, Error> {
        let Settings { env, workdir, user } = settings;
        let config = CloneConfig {
            snapshot: snapshot.name.clone(),
            remove: true,
            labels: said.write(),
            only_labels: true,
            // What comes later counts.
            env: env.into_iter().chain(plan.env).collect(),
            workdir,
            user,
            egress: plan.egress,
            volumes: plan.volumes,
            time_limit: Some(plan.limit),
            ..CloneConfig::default()
        };
        let wanted = amount(&snapshot.config.resources);
        let owner = principal.owner();
        let made = self.nodes.clone_of(&owner, config);
        self.claimed(&principal.tenant, wanted, None, made).await
    }

    /// Has a sandbox run for so long from now on.
    pub(crate) async fn limit(&self, owner: &Owner, id: &str, limit: TimeLimit) -> Result<Sandbox, Error> {
        let request = Request::SetTimeLimit {
            sandbox: id.to_owned(),
            ms: Some(limit.ms),
            then: Some(limit.then),
        };
        self.nodes.changed(owner, request).await
    }

    /// Removes one, with what is kept of it.
    pub(crate) async fn remove(&self, owner: &Owner, id: &str) -> Result<(), Error> {
        let request = Request::Remove {
            sandbox: id.to_owned(),
            force: true,
        };
        self.nodes.done(owner, request).await?;
        self.envd.forget(id);
        self.history.forget(id);
        let id = id.to_owned();
        self.store.with(move |store| store.release(&id)).await
    }

    /// Copies of a sandbox that runs; what has become of each.
    pub(crate) async fn fork(
        &self,
        principal: &Principal,
        sandbox: &Sandbox,
        count: usize,
        limit: TimeLimit,
    ) -> Result<Vec<Result<Sandbox, Error>>, Error> {
        use futures_util::StreamExt;
        // Each of them reads the snapshot's memory.
        const AT_ONCE: usize = 4;
        let owner = principal.owner();
        let config = SnapshotConfig {
            sandbox: sandbox.id.clone(),
            name: Some(format!("{FORK}{}", control::random_hex::<6>()?)),
            detach_devices: false,
        };
        let snapshot = self.nodes.snapshot(&owner, config).await?;
        let wanted = amount(&sandbox.config.resources);
        let one = |_| {
            let config = CloneConfig {
                snapshot: snapshot.name.clone(),
                remove: true,
                time_limit: Some(limit),
                ..CloneConfig::default()
            };
            self.claimed(&principal.tenant, wanted, None, self.nodes.clone_of(&owner, config))
        };
        let made = futures_util::stream::iter(0..count)
            .map(one)
            .buffered(AT_ONCE)
            .collect()
            .await;
        // Clones go on without it.
        let name = snapshot.name;
        if let Err(error) = self
            .nodes
            .done(&owner, Request::RemoveSnapshot { name: name.clone() })
            .await
        {
            log::warn!("snapshot {name} of a fork stays: {}", with_causes(&error));
        }
        Ok(made)
    }

    /// Lets a sandbox go on that is paused, with a new limit if one is given; whether it was. Whoever else asks at once waits for the
    /// first.
    pub(crate) async fn resume(
        &self,
        owner: &Owner,
        id: &str,
        limit: Option<TimeLimit>,
    ) -> Result<(Sandbox, bool), Error> {
        let _lock = self.resuming.lock(id).await;
        let sandbox = self.nodes.inspect(owner, id).await?;
        if !is_there(sandbox.state) {
            return Err(Error::NoSandbox(id.to_owned()));
        }
        if !is_paused(sandbox.state) {
            return Ok((sandbox, false));
        }
        let wanted = amount(&sandbox.config.resources);
        let go_on = async {
            if let Some(limit) = limit {
                self.limit(owner, id, limit).await?;
            }
            let request = Request::Resume { sandbox: id.to_owned() };
            self.nodes.done(owner, request).await?;
            self.nodes.inspect(owner, id).await
        };
        let tenant = sandbox.config.owner.clone().unwrap_or_default();
        let sandbox = self.claimed(&tenant, wanted, Some(id), go_on).await?;
        Ok((sandbox, true))
    }

    /// Does something that makes a sandbox, or a larger one, if the tenant has that much left.
    pub(crate) async fn claimed(
        &self,
        tenant: &str,
        amount: Amount,
        sandbox: Option<&str>,
        work: impl Future<Output = Result<Sandbox, Error>>,
    ) -> Result<Sandbox, Error> {
        let Some(id) = self.reserve(tenant, amount, sandbox).await? else {
            return work.await;
        };
        match work.await {
            Ok(sandbox) => {
                let (made, now) = (sandbox.id.clone(), time_text::now());
                // It is there: a claim that stays counts until it expires.
                if let Err(error) = self.store.with(move |store| store.settle(&id, &made, now)).await {
                    log::warn!("a claim of tenant {tenant} stays for a while: {}", with_causes(&error));
                }
                Ok(sandbox)
            }
            Err(error) => {
                if let Err(second) = self.store.with(move |store| store.drop_claim(&id)).await {
                    log::warn!("a claim of tenant {tenant} stays for a while: {}", with_causes(&second));
                }
                Err(error)
            }
        }
    }

    /// A claim of what is wanted; none where nothing is limited.
    async fn reserve(&self, tenant: &str, amount: Amount, sandbox: Option<&str>) -> Result<Option<String>, Error> {
        let name = tenant.to_owned();
        let quota = self.store.with(move |store| store.quota(&name)).await?;
        if !quota.limits_sandboxes() {
            return Ok(None);
        }
        let owner = Owner::Tenant(tenant.into());
        let in_use: Vec<InUse> = self
            .nodes
            .list(&owner, ListConfig::default())
            .await?
            .iter()
            .map(taken)
            .collect();
        let claim = Claim {
            id: control::random_hex::<8>()?,
            tenant: tenant.to_owned(),
            sandbox: sandbox.map(str::to_owned),
            amount,
        };
        let id = claim.id.clone();
        let now = time_text::now();
        self.store
            .with(move |store| store.reserve(&claim, &in_use, now))
            .await?;
        Ok(Some(id))
    }
}
