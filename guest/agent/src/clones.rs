//! Settle and Freeze before a snapshot and Re-identify after a restore: the order, and who may. What the machine itself needs is done by the
//! functions that a server was given. Knows no snapshot, and not whether there was one.
//!
//! ```text
//!  Settle:  caches and free memory hold nothing ─► answer
//!  Freeze:  commands stand still ─► disks written, prefetched randomness used up ─► answer
//!  Re-identify:   clock ─► entropy ─► names ─► connections ─► boot id ─► mounts ─► environment ─► hooks ─► answer
//!           ─► commands go on
//! ```

use std::path::PathBuf;
use std::time::Duration;

use agent_api::{Reidentify, message::Reply};
use observe::marks;

use crate::cgroup::Cgroups;
use crate::freezer::Turn;
use crate::hooks::Hooks;
use crate::reaper::Reaper;
use crate::{Error, envs, hooks};

/// Readies a machine for a snapshot, or for what comes before one.
pub type Settle = Box<dyn Fn() -> Result<(), Error> + Send + Sync>;

/// Makes a restored machine its own.
pub type MakeOwn = Box<dyn Fn(&Reidentify) -> Result<Reidentified, Error> + Send + Sync>;

/// Sets the time of day.
pub type SetClock = Box<dyn Fn(u64) -> Result<(), Error> + Send + Sync>;

/// What a server does for clones besides letting commands stand still.
pub struct Clones {
    /// Before a snapshot that is to be small, while commands run: memory holds nothing that nobody needs.
    pub shed: Settle,
    /// Before a snapshot, when all commands stand still.
    pub settle: Settle,
    /// After a restore: everything that makes the machine its own.
    pub reidentify: MakeOwn,
    /// When the host's clock was set: the time of day is what is given, in nanoseconds since 1970.
    pub set_clock: SetClock,
    /// Where the image's hooks are.
    pub hooks: PathBuf,
}

/// Who a re-identified machine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reidentified {
    /// Its boot id.
    pub boot_id: String,
    /// Its machine id, if it has one.
    pub machine_id: Option<String>,
}

/// A server's part in clones, with what it needs.
pub(crate) struct Part<'a> {
    pub(crate) clones: &'a Clones,
    pub(crate) cgroups: &'a Cgroups,
    pub(crate) reaper: &'a Reaper,
}

/// A re-identification that is done but for its end. Who drops it leaves the commands as they are.
pub(crate) struct Acknowledgeable<'a> {
    /// What the client must have before anything goes on.
    pub(crate) reply: Reply,
    /// `None` where nothing was asked to go on.
    thaw: Option<Turn<'a>>,
}

impl Acknowledgeable<'_> {
    /// The reply is on its way.
    pub(crate) fn acknowledged(self) -> Result<(), Error> {
        marks::mark("re-identification acknowledged");
        if let Some(mut turn) = self.thaw {
            turn.thaw()?;
            marks::mark("thawed");
        }
        Ok(())
    }
}

impl<'a> Part<'a> {
    /// Commands run meanwhile; none of them notices but by the time that reading takes which was cached.
    pub(crate) fn settle(&self) -> Result<Reply, Error> {
        marks::mark("settle asked");
        (self.clones.shed)()?;
        marks::mark("settled");
        Ok(Reply::Done)
    }

    pub(crate) fn freeze(&self) -> Result<Reply, Error> {
        marks::mark("freeze asked");
        self.cgroups.freezer().turn().freeze(|| {
            marks::mark("commands frozen");
            (self.clones.settle)()
        })?;
        marks::mark("frozen");
        Ok(Reply::Done)
    }

    pub(crate) fn set_clock(&self, clock_ns: u64) -> Result<Reply, Error> {
        (self.clones.set_clock)(clock_ns)?;
        Ok(Reply::Done)
    }

    /// Nothing is undone where this fails, and the commands are left as they are: it can be asked again.
    pub(crate) fn reidentify(&self, request: &Reidentify) -> Result<Acknowledgeable<'a>, Error> {
        marks::mark("re-identify asked");
        let turn = self.cgroups.freezer().turn();
        let reidentified = (self.clones.reidentify)(request)?;
        if let Some(most) = request.pids_max {
            self.cgroups.limit_processes(most)?;
        }
        if let Some(environment) = &request.environment {
            envs::tell(&environment.0)?;
        }
        if request.hook_ms > 0 {
            let hooks = Hooks {
                dir: &self.clones.hooks,
                limit: Duration::from_millis(u64::from(request.hook_ms)),
                clone_id: reidentified.machine_id.as_deref(),
            };
            hooks::run_all(&hooks, self.cgroups, self.reaper)?;
            marks::mark("hooks run");
        }
        Ok(Acknowledgeable {
            reply: Reply::Reidentified {
                boot_id: reidentified.boot_id,
            },
            thaw: request.thaw.then_some(turn),
        })
    }
}
