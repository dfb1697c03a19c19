//! Sandboxes that have an accelerator: what their servers tell of them, and that a server has ended before its machine.
//!
//! A server's first process starts another one in place of one that served and has ended. When the first one ends nobody does: the machine
//! runs on without an accelerator until it is started again.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use accel_arbiter::{Priority, Report};
use node_api::{AcceleratorInfo, AcceleratorPart, AcceleratorPriority, AcceleratorStats, EventKind, State};

use crate::node::Node;
use crate::sandbox::entry::Entry;
use crate::store::database::Stored;
use crate::vmm::accelerator_stats::{self, PATIENCE};
use crate::vmm::{launch, process};
use crate::{Error, thread};

/// How long all servers together may take for their answers: whoever asks for all waits for that.
const PATIENCE_WITH_ALL: Duration = Duration::from_secs(5);

/// Within this a machine ends whose cgroup was killed with all that is in it, a server too.
const WITH_ITS_MACHINE: Duration = Duration::from_millis(500);

impl Node {
    /// All that have one, whether they run or not.
    pub(crate) fn list_accelerators(&self) -> Vec<AcceleratorInfo> {
        let has_one = |entry: &Arc<Entry>| entry.stored().sandbox.config.accelerator.is_some();
        let mut entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        entries.retain(has_one);
        let end = Instant::now() + PATIENCE_WITH_ALL;
        let ask = |entry: &Arc<Entry>| {
            self.accelerator_info(entry, PATIENCE.min(end.saturating_duration_since(Instant::now())))
        };
        let asked = thread::with_each("accelerators", &entries, ask);
        let mut all: Vec<_> = asked.into_iter().flatten().collect();
        all.sort_by(|one, other| one.sandbox.cmp(&other.sandbox));
        all
    }

    fn accelerator_info(&self, entry: &Entry, limit: Duration) -> Option<AcceleratorInfo> {
        let sandbox = entry.stored().sandbox;
        let accelerator = sandbox.config.accelerator?;
        let (stats, why) = match self.accelerator_stats(entry, limit) {
            Some(Ok(stats)) => (Some(stats), None),
            Some(Err(why)) => (None, Some(why)),
            None => (None, sandbox.accelerator_ended),
        };
        Some(AcceleratorInfo {
            server: sandbox.accelerator.filter(|_| sandbox.state.has_vm()),
            part: self.accelerators.report().get(&sandbox.id).map(part),
            sandbox: sandbox.name,
            id: sandbox.id,
            state: sandbox.state,
            accelerator,
            stats,
            why,
        })
    }

    /// What the server of its accelerator tells within a time, or why it does not; nothing of a sandbox that has none now.
    pub(crate) fn accelerator_stats(&self, entry: &Entry, limit: Duration) -> Option<Result<AcceleratorStats, String>> {
        let stored = entry.stored();
        if !has_server(&stored) {
            return None;
        }
        if limit.is_zero() {
            return Some(Err(
                "its server was not asked: others took too long for their answers".to_owned()
            ));
        }
        let path = self.sandbox_paths(entry).accelerator();
        Some(accelerator_stats::ask(&path, limit).map_err(|error| {
            format!(
                "its server tells nothing: {error}; see {}",
                self.sandbox_paths(entry).accelerator_log().display()
            )
        }))
    }

    /// Has the end of its accelerator's server be noticed.
    pub(crate) fn watch_accelerator(&self, entry: &Entry, pidfd: BorrowedFd<'_>) -> Result<(), Error> {
        let watched = self.monitor.watch_accelerator(&entry.id, pidfd);
        watched.map_err(Error::host("waiting for the end of an accelerator's server"))
    }

    /// The server of a machine that this daemon has found running: it has its part of the accelerator's time from here on, or has ended
    /// while no daemon ran.
    pub(crate) fn adopt_accelerator(self: &Arc<Self>, entry: &Entry) {
        let stored = entry.stored();
        let Some(server) = stored.sandbox.accelerator else {
            return;
        };
        let adopted = || match process::open(server).map_err(Error::host("looking for an accelerator's server"))? {
            Some(pidfd) => {
                self.watch_accelerator(entry, pidfd.as_fd())?;
                let identity = launch::identity(&self.config, &stored);
                self.accelerators.admit(&stored, &self.sandbox_paths(entry), identity)
            }
            None => {
                self.accelerator_ended_in_thread(entry.id.clone());
                Ok(())
            }
        };
        if let Err(error) = adopted() {
            log::error!(
                "the end of the accelerator of sandbox {} may not be noticed, and nothing may limit its part of the time: {error}; when that is \
                 mended, start basaltd again",
                entry.id
            );
        }
    }

    /// A server has ended: its machine may take a moment to end with it.
    pub(crate) fn accelerator_ended_in_thread(self: &Arc<Self>, id: String) {
        let node = Arc::clone(self);
        let name = id.clone();
        let work = move || {
            // It may be gone by now.
            if let Ok(entry) = node.find(&id)
                && let Err(error) = node.accelerator_ended(&entry)
            {
                log::error!("the accelerator of sandbox {id} has ended, and its record does not have that: {error}");
            }
        };
        if let Err(error) = thread::spawn("accelerator-ended", work) {
            log::error!("the accelerator of sandbox {name} has ended, and nobody is told: {error}");
        }
    }

    /// Tells that its accelerator is gone, unless its machine is, too.
    fn accelerator_ended(&self, entry: &Entry) -> Result<(), Error> {
        let Some(vm) = entry.vm() else { return Ok(()) };
        if vm.wait(WITH_ITS_MACHINE) {
            return Ok(());
        }
        // Whoever takes its machine away ends the server as well.
        let ending = entry.ending();
        let is_same = entry.vm().is_some_and(|now| Arc::ptr_eq(&now, &vm));
        let sandbox = entry.stored().sandbox;
        let Some(server) = sandbox.accelerator.filter(|_| is_same) else {
            return Ok(());
        };
        let ends = matches!(sandbox.state, State::Stopping | State::Exited | State::Removing);
        if ends || process::identify(server.pid) == Some(server) {
            return Ok(());
        }
        let why = format!(
            "the server of its accelerator (process {}) has ended, and its programs have none: {} may say why; `basalt restart {}` gives it \
             another one",
            server.pid,
            self.sandbox_paths(entry).accelerator_log().display(),
            sandbox.name
        );
        self.accelerators.dismiss(&entry.id);
        self.note_change(entry, |stored| {
            (stored.sandbox.accelerator, stored.sandbox.accelerator_ended) = (None, Some(why.clone()));
        })?;
        drop(ending);
        log::error!("sandbox {}: {why}", entry.id);
        self.events
            .tell_why(EventKind::AcceleratorEnded, &entry.stored().sandbox, why);
        Ok(())
    }
}

/// Somebody serves an accelerator of it.
fn has_server(stored: &Stored) -> bool {
    stored.sandbox.state.has_vm() && stored.sandbox.accelerator.is_some()
}

fn part(report: &Report) -> AcceleratorPart {
    AcceleratorPart {
        share: report.share.weight,
        priority: match report.share.priority {
            Priority::Low => AcceleratorPriority::Low,
            Priority::High => AcceleratorPriority::High,
        },
        is_connected: report.is_connected,
        used_ns: nanoseconds(report.used),
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
