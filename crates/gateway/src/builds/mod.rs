//! Templates that tenants build: a sandbox of the tenant's in which the steps are carried out, and a snapshot of it at the end, of which
//! sandboxes are cloned. What is asked for and what came of it is in the store; only what is under way is here. Knows no request of HTTP.
//!
//! ```text
//!  asked ─▶ row, waiting ─▶ started ─▶ turn ─▶ sandbox ─▶ steps ─▶ snapshot ─▶ sandbox gone ─▶ row, ready, tags
//!                              └─────────────────┴──────────┴─▶ sandbox gone ─▶ row, failed
//! ```
//! A snapshot's name follows from its build's id, and the sandbox has the id in a label, so that a gateway that is started again removes
//! what was left of a build that it has not ended (`housekeeping`).

mod carry_out;
mod files;
mod housekeeping;
mod log;
mod names;
mod plan;
mod scripts;
mod session;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use control::{Build, Template};
use tokio::sync::{Notify, Semaphore};

use files::Needed;
pub(crate) use files::{Files, check_hash};
pub(crate) use log::Log;
pub(crate) use names::{check_tags, wanted};
pub(crate) use plan::{Plan, StartBuild};

use crate::Error;
use crate::locks::Locks;
use crate::store::Store;

/// What names of snapshots begin with that are builds.
const SNAPSHOT: &str = "tpl-";

/// What may be changed of builds.
#[derive(Clone, Debug)]
pub struct BuildsConfig {
    /// Where uploads are kept.
    pub directory: PathBuf,
    /// Builds at once, and of one tenant.
    pub at_once: usize,
    /// Builds of one tenant at once; more wait.
    pub per_tenant: usize,
    /// How long a build may take, from when its sandbox is made.
    pub limit: Duration,
    /// How long it may take until the ready command is content.
    pub ready: Duration,
    /// The most bytes of an upload.
    pub upload: u64,
    /// The most bytes of all uploads of a tenant.
    pub uploads: u64,
    /// How long an upload may wait for its turn: an address is good for as long.
    pub upload_turn: Duration,
    /// How long it may take then.
    pub upload_limit: Duration,
}

impl BuildsConfig {
    /// The usual bounds.
    pub fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            at_once: 4,
            per_tenant: 2,
            limit: Duration::from_secs(3600),
            ready: Duration::from_secs(300),
            upload: 2 << 30,
            uploads: 8 << 30,
            upload_turn: Duration::from_secs(600),
            upload_limit: Duration::from_secs(3600),
        }
    }
}

/// The snapshot of a build.
pub(crate) fn snapshot_name(build: &str) -> String {
    format!("{SNAPSHOT}{}", build.replace('-', ""))
}

/// Whether a snapshot of this name is a build's.
pub(crate) fn is_build(snapshot: &str) -> bool {
    snapshot.starts_with(SNAPSHOT)
}

/// Checks what somebody asks to be done in a build, without doing any of it: the titles of its steps.
///
/// # Errors
/// The first thing found wrong.
pub fn check_build(json: &[u8]) -> Result<Vec<String>, Error> {
    let asked: StartBuild = serde_json::from_slice(json).map_err(|error| Error::invalid(error.to_string()))?;
    let plan = Plan::of(asked)?;
    Ok(plan.steps.iter().map(plan::Step::title).collect())
}

/// A build that has begun and has not come to its end.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) build: Build,
    pub(crate) template: Template,
    pub(crate) plan: Plan,
    pub(crate) log: Arc<Log>,
    cancelled: AtomicBool,
    /// Whoever waits for the build's turn is told of that.
    end: Notify,
}

impl Job {
    /// It ends at its next step, or within one.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.end.notify_one();
    }
}

/// What builds share.
pub(crate) struct Builds {
    pub(crate) config: BuildsConfig,
    pub(crate) files: Files,
    jobs: Mutex<HashMap<String, Arc<Job>>>,
    turns: Semaphore,
    tenants: Locks,
}

impl Builds {
    pub(crate) fn new(config: BuildsConfig, store: Store) -> Self {
        Self {
            files: Files::new(&config, store),
            jobs: Mutex::default(),
            turns: Semaphore::new(config.at_once),
            tenants: Locks::new(config.per_tenant),
            config,
        }
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<String, Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one of this id, if it is under way.
    pub(crate) fn job(&self, id: &str) -> Option<Arc<Job>> {
        self.jobs().get(id).cloned()
    }

    /// Ends all of a template, or all.
    pub(crate) fn cancel(&self, template: Option<&str>) {
        for job in self.jobs().values() {
            if template.is_none_or(|template| job.template.id == template) {
                job.cancel();
            }
        }
    }

    /// The uploads that builds need which have begun and have not come to their end.
    pub(crate) fn needed(&self) -> Needed {
        let jobs = self.jobs();
        let all = jobs.values().flat_map(|job| {
            let hashes = job.plan.hashes();
            hashes.map(|hash| (job.build.tenant.clone(), hash.to_owned()))
        });
        all.collect()
    }

    /// Takes an upload.
    pub(crate) async fn receive(&self, tenant: &str, hash: &str, length: u64, body: Body) -> Result<(), Error> {
        let needed = || self.needed();
        self.files.receive((tenant, hash), length, body, &needed).await
    }

    fn add(&self, template: Template, build: Build, plan: Plan) -> Arc<Job> {
        let job = Arc::new(Job {
            build,
            template,
            plan,
            log: Arc::default(),
            cancelled: AtomicBool::new(false),
            end: Notify::new(),
        });
        self.jobs().insert(job.build.id.clone(), Arc::clone(&job));
        job
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_name_snapshots() {
        let id = crate::uuid::random().unwrap();
        assert!(node_api::check_snapshot_name(&snapshot_name(&id)).is_ok());
    }
}
