//! Sandboxes that may run for some time: one whose time is over is stopped or suspended, as it was asked to be. The record has the moment,
//! by the host's clock: a daemon that was not there at that moment does it when it is there again.
//!
//! A thread of its own looks at the earliest of these moments, and anew when one has changed. What is done takes its turn like everything
//! that is asked of a sandbox, and looks once more then: somebody may have given it more time meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use node_api::{EventKind, OnTimeout, Sandbox, State, TimeLimit};
use vmm_api::VmmClient;

use crate::error::words::with_causes;
use crate::node::Node;
use crate::resources::budget::{TO_START, Wish};
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::store::database::Stored;
use crate::{Error, clock, thread};

/// How long its command has after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);

/// What could not be done is tried again after that, and less and less often.
const AGAIN: Duration = Duration::from_secs(10);
const SELDOM: Duration = Duration::from_secs(300);

/// So many are ended or suspended at once: each of them may write its memory.
const AT_ONCE: usize = 4;

/// At most so long nobody looks at the clock, which may be set.
const LONGEST: Duration = Duration::from_secs(30);

/// What the thread that looks is told, and who is dealt with.
#[derive(Debug, Default)]
pub(crate) struct TimeLimits {
    state: Mutex<Looking>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct Looking {
    /// There is something to look at.
    changed: bool,
    /// Sandboxes whose time is over.
    overdue: BTreeMap<String, Overdue>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overdue {
    /// Somebody is about to end or suspend it.
    Begun,
    /// That has failed, and is tried again at this moment, and after such a pause if it fails then.
    Failed(Instant, Duration),
}

impl TimeLimits {
    /// A moment has changed, or there is one more.
    pub(crate) fn tell(&self) {
        self.lock().changed = true;
        self.news.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Looking> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, limit: Duration) {
        let waited = self.news.wait_timeout_while(self.lock(), limit, |state| !state.changed);
        waited.unwrap_or_else(PoisonError::into_inner).0.changed = false;
    }

    fn overdue(&self, id: &str) -> Option<Overdue> {
        self.lock().overdue.get(id).copied()
    }

    /// Somebody begins with one; how long it is until it is tried again if that fails. `None`: enough are dealt with.
    fn begin(&self, id: &str) -> Option<Duration> {
        let all = &mut self.lock().overdue;
        if all.values().filter(|one| **one == Overdue::Begun).count() >= AT_ONCE {
            return None;
        }
        match all.insert(id.to_owned(), Overdue::Begun) {
            Some(Overdue::Failed(_, pause)) => Some(pause),
            _ => Some(AGAIN),
        }
    }

    fn fails(&self, id: &str, pause: Duration) {
        let failed = Overdue::Failed(Instant::now() + pause, (2 * pause).min(SELDOM));
        self.lock().overdue.insert(id.to_owned(), failed);
    }

    fn is_done(&self, id: &str) {
        self.lock().overdue.remove(id);
    }

    /// What has failed counts no more of those that are gone, or have more time.
    fn forget_all_but(&self, over: &BTreeSet<String>) {
        let is_needed = |id: &String, one: &mut Overdue| *one == Overdue::Begun || over.contains(id);
        self.lock().overdue.retain(is_needed);
    }
}

impl Node {
    /// Ends and suspends sandboxes whose time is over, from here on.
    pub(crate) fn start_time_limits(self: &Arc<Self>) -> Result<(), Error> {
        let node = Arc::clone(self);
        thread::spawn("time-limits", move || {
            loop {
                let next = node.look_at_times();
                node.time_limits.wait(next.unwrap_or(LONGEST).min(LONGEST));
            }
        })
    }

    /// Has done what is to be done with those whose time is over, each on a thread of its own; how long it is until the next one's is.
    pub(crate) fn look_at_times(self: &Arc<Self>) -> Option<Duration> {
        let entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        let now = clock::now_ns();
        let over = entries.iter().filter(|entry| is_over(&entry.stored(), now));
        self.time_limits
            .forget_all_but(&over.map(|entry| entry.id.clone()).collect());
        let mut next: Option<Duration> = None;
        for entry in entries {
            let Some(left) = self.time_left(&entry) else { continue };
            if left.is_zero() && self.begin_timeout(&entry) {
                continue;
            }
            // Whoever is dealt with tells when that is done.
            let left = if left.is_zero() { LONGEST } else { left };
            next = Some(next.map_or(left, |next| next.min(left)));
        }
        next
    }

    /// False if it is not begun now.
    fn begin_timeout(self: &Arc<Self>, entry: &Arc<Entry>) -> bool {
        let Some(pause) = self.time_limits.begin(&entry.id) else {
            return false;
        };
        if pause == AGAIN {
            self.events.tell(EventKind::Timeout, &entry.stored().sandbox);
        }
        let (node, ended) = (Arc::clone(self), Arc::clone(entry));
        let work = move || {
            match node.timeout(&ended) {
                Ok(()) => node.time_limits.is_done(&ended.id),
                Err(error) => {
                    node.time_limits.fails(&ended.id, pause);
                    ended.lines.overdue.say(|more| {
                        log::error!(
                            "the time of sandbox {} is over, and it is still there, which is tried again: {}{more}",
                            ended.id,
                            with_causes(&error)
                        );
                    });
                }
            }
            node.time_limits.tell();
        };
        let begun = thread::spawn("timeout", work);
        if let Err(error) = &begun {
            log::warn!(
                "the time of sandbox {} is over, and nothing is done now: {error}",
                entry.id
            );
            self.time_limits.fails(&entry.id, pause);
        }
        begun.is_ok()
    }

    /// Does with a sandbox what was asked for when its time is over, if it is.
    pub(crate) fn timeout(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        let then = |stored: &Stored| {
            let limit = stored.sandbox.config.time_limit;
            limit.map(|limit| limit.then).unwrap_or_default()
        };
        let _lease = self
            .budget
            .lease(&Wish::request(), TO_START, self.config.limits.answer)?;
        let _operation = match then(&entry.stored()) {
            // Whoever waits for memory with it gives that up.
            OnTimeout::Stop => entry.operate_to_stop(),
            OnTimeout::Suspend => self.turn(entry)?,
        };
        let stored = entry.stored();
        if entry.lock().gone || !is_over(&stored, clock::now_ns()) {
            return Ok(());
        }
        log::info!("the time of sandbox {} is over: {}", entry.id, then(&stored));
        match then(&stored) {
            OnTimeout::Stop => self.stop_now(entry, GRACE),
            OnTimeout::Suspend => self.suspend_overdue(entry),
        }
    }

    /// Somebody may have paused it: then it runs for the moment in which its agent is needed.
    fn suspend_overdue(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        let sandbox = entry.stored().sandbox;
        if sandbox.state != State::Paused || sandbox.pause_reason.is_some() {
            return self.suspend_now(entry);
        }
        let vm = entry.vm_for(Verb::Unpause)?;
        let rests_as = |state| self.note_change(entry, |stored| stored.rests_as(state));
        vm.ask("it was resumed to be suspended", VmmClient::resume)?;
        rests_as(State::Running)?;
        self.suspend_now(entry).map_err(|error| {
            let paused = vm.ask("it was paused again", VmmClient::pause);
            error.after_undo(paused.map(drop).and_then(|()| rests_as(State::Paused)))
        })
    }

    /// How long a sandbox may run on; `None` if nothing limits that, or somebody is about it.
    fn time_left(&self, entry: &Entry) -> Option<Duration> {
        let sandbox = entry.stored().sandbox;
        let end = sandbox.ends_ns.filter(|_| runs(sandbox.state))?;
        let left = Duration::from_nanos(end.saturating_sub(clock::now_ns()));
        match self.time_limits.overdue(&entry.id) {
            Some(Overdue::Begun) => None,
            Some(Overdue::Failed(again, _)) => Some(left.max(again.saturating_duration_since(Instant::now()))),
            None => Some(left),
        }
    }

    /// Has a sandbox run for so long from now on, and from each of its next starts; or without a limit.
    pub(crate) fn set_time_limit(
        &self,
        entry: &Entry,
        ms: Option<u64>,
        then: Option<OnTimeout>,
    ) -> Result<Sandbox, Error> {
        let _operation = self.turn(entry)?;
        let sandbox = entry.stored().sandbox;
        Verb::Limit.check(&sandbox)?;
        let mut config = sandbox.config;
        let then = then.or(config.time_limit.map(|limit| limit.then)).unwrap_or_default();
        config.time_limit = ms.map(|ms| TimeLimit { ms, then });
        config.validate()?;
        let now = clock::now_ns();
        self.update(entry, |stored| {
            stored.sandbox.config = config;
            stored.begins_time(now);
        })?;
        self.time_limits.tell();
        Ok(self.inspect(entry))
    }
}

fn is_over(stored: &Stored, now: u64) -> bool {
    runs(stored.sandbox.state) && stored.sandbox.ends_ns.is_some_and(|end| end <= now)
}

fn runs(state: State) -> bool {
    matches!(state, State::Running | State::Paused)
}
