//! Watchers that are polled: each watches on after the request that made it, keeps what happens until it is asked for, and goes away when
//! nobody asks any more. Bounded in number, in what each keeps, and in time.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::messages::{CreateWatcher, Created, Empty, Events, FilesystemEvent};
use super::watch::Watch;
use crate::error::Error;
use crate::memory::{Held, Share};
use crate::state::State;

/// How many a sandbox has at most.
const MAX_WATCHERS: usize = 64;

/// How many events one keeps at most.
const MAX_EVENTS: usize = 16 * 1024;

/// How many bytes of names it keeps at most, about.
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// How long a poll waits for something that may be on its way,
const FIRST_LIMIT: Duration = Duration::from_millis(50);

/// how long nothing may follow it,
const QUIET: Duration = Duration::from_millis(15);

/// and how long all of this may take.
const SETTLE_LIMIT: Duration = Duration::from_millis(150);

/// How long one lives that is not polled.
const IDLE: Duration = Duration::from_secs(600);

/// The watchers of one sandbox.
#[derive(Default)]
pub(crate) struct Watchers {
    by_id: Mutex<HashMap<String, Watcher>>,
}

/// One of them; it ends when it is dropped.
struct Watcher {
    kept: Arc<Shared>,
    task: AbortHandle,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a watcher keeps, and that something of it is new.
struct Shared {
    inner: Mutex<Kept>,
    changed: Notify,
}

impl Shared {
    fn new(memory: Share) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::new(Kept::new(memory)),
            changed: Notify::new(),
        })
    }

    /// Waits for what may be on its way: for something to tell, and then until nothing follows it at once.
    async fn settled(&self) {
        let begun = Instant::now();
        loop {
            // Before the look, so that nothing between the two is missed.
            let changed = self.changed.notified();
            let until = {
                let kept = lock(&self.inner);
                match kept.last {
                    _ if kept.lost || kept.failed.is_some() => return,
                    Some(last) if !kept.events.is_empty() => last + QUIET,
                    _ => begun + FIRST_LIMIT,
                }
            };
            let until = until.min(begun + SETTLE_LIMIT);
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return;
            }
        }
    }
}

/// What a watcher keeps.
struct Kept {
    events: VecDeque<FilesystemEvent>,
    bytes: usize,
    memory: Share,
    held: Held,
    /// Some were dropped since the last poll.
    lost: bool,
    /// When something came last.
    last: Option<Instant>,
    /// It watches no more.
    failed: Option<Error>,
    /// When it was made or polled last.
    asked: Instant,
}

impl Kept {
    fn new(memory: Share) -> Self {
        Self {
            events: VecDeque::new(),
            bytes: 0,
            held: memory.nothing(),
            memory,
            lost: false,
            last: None,
            failed: None,
            asked: Instant::now(),
        }
    }

    /// Keeps an event, and drops the oldest where there is no room.
    fn push(&mut self, event: FilesystemEvent) {
        self.bytes += weight(&event);
        self.events.push_back(event);
        let fits = self.bytes <= MAX_BYTES && self.held.grow_to(self.bytes).is_ok();
        let most = if fits { MAX_BYTES } else { self.held.bytes() };
        while self.events.len() > MAX_EVENTS || self.bytes > most {
            let Some(dropped) = self.events.pop_front() else { break };
            self.bytes -= weight(&dropped);
            self.lost = true;
        }
    }

    /// What has happened since the last time.
    fn poll(&mut self) -> Result<Events, Error> {
        self.asked = Instant::now();
        if std::mem::take(&mut self.lost) {
            return Err(Error::DataLoss(
                "more happened than is kept between two polls, and the oldest of it was dropped: list the directory, and poll again for \
                 the rest"
                    .to_owned(),
            ));
        }
        if self.events.is_empty()
            && let Some(error) = &self.failed
        {
            return Err(Error::DataLoss(format!(
                "the directory is not watched any more: {error}; remove this watcher and make another one"
            )));
        }
        self.bytes = 0;
        Ok(Events {
            events: std::mem::take(&mut self.events).into(),
            _held: std::mem::replace(&mut self.held, self.memory.nothing()),
        })
    }
}

/// What an event takes of memory, about: an entry repeats the name in its path.
fn weight(event: &FilesystemEvent) -> usize {
    let entry = event.entry.as_ref().map_or(0, |entry| {
        let metadata = entry.metadata.iter().map(|(key, value)| key.len() + value.len());
        entry.path.len() + entry.name.len() + metadata.sum::<usize>() + 256
    });
    event.name.len() + entry + 64
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watchers {
    fn room(by_id: &HashMap<String, Watcher>) -> Result<(), Error> {
        if by_id.len() < MAX_WATCHERS {
            return Ok(());
        }
        Err(Error::TooMuch(format!(
            "the sandbox has {MAX_WATCHERS} watchers that are polled, which is the most: remove some, or watch by a stream"
        )))
    }

    fn insert(&self, id: String, watcher: Watcher) -> Result<(), Error> {
        let mut by_id = lock(&self.by_id);
        Self::room(&by_id)?;
        by_id.insert(id, watcher);
        Ok(())
    }

    /// What one has seen since the last time. Whoever has just changed something in the directory expects to find it here: its way is a
    /// little longer than that of an answer, and is waited for.
    pub(super) async fn poll(&self, id: &str) -> Result<Events, Error> {
        let kept = {
            let by_id = lock(&self.by_id);
            let watcher = by_id.get(id).ok_or_else(|| unknown(id))?;
            Arc::clone(&watcher.kept)
        };
        kept.settled().await;
        lock(&kept.inner).poll()
    }

    /// There are none.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.by_id).is_empty()
    }

    /// Ends one.
    pub(super) fn remove(&self, id: &str) -> Result<Empty, Error> {
        let removed = lock(&self.by_id).remove(id);
        removed.map(|_| Empty {}).ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> Error {
    let shown: String = id.chars().filter(|char| !char.is_control()).take(64).collect();
    Error::NotFound(format!(
        "watcher with id {shown} was not found; one that is not polled for {} s is removed",
        IDLE.as_secs()
    ))
}

/// An id that nobody guesses.
fn fresh_id() -> String {
    // Each state has keys of its own, from the system's random numbers.
    let random = || RandomState::new().hash_one(0);
    format!("w{:016x}{:016x}", random(), random())
}

/// Makes a watcher.
pub(super) async fn create(state: &State, user: Option<String>, create: CreateWatcher) -> Result<Created, Error> {
    Watchers::room(&lock(&state.watchers.by_id))?;
    let watch = Watch::begin(state, user, create).await?;
    let kept = Shared::new(state.memory.clone());
    let id = fresh_id();
    let (watchers, own_id, own_kept) = (Arc::downgrade(&state.watchers), id.clone(), Arc::clone(&kept));
    let task = tokio::spawn(async move {
        keep(watch, &own_kept).await;
        if let Some(watchers) = watchers.upgrade() {
            drop(watchers.remove(&own_id));
        }
    });
    let task = task.abort_handle();
    // Where others were quicker and there is no room any more, it ends here.
    state.watchers.insert(id.clone(), Watcher { kept, task })?;
    Ok(Created { watcher_id: id })
}

/// Keeps what happens until nobody asks for it any more.
async fn keep(mut watch: Watch, kept: &Shared) {
    loop {
        let end = lock(&kept.inner).asked + IDLE;
        let next = tokio::select! {
            () = sleep_until(end) => {
                if lock(&kept.inner).asked + IDLE <= Instant::now() {
                    return;
                }
                continue;
            }
            next = watch.next() => next,
        };
        let failed = {
            let mut kept = lock(&kept.inner);
            kept.last = Some(Instant::now());
            match next {
                Ok(event) => kept.push(event),
                Err(error) => kept.failed = Some(error),
            }
            kept.failed.is_some()
        };
        kept.changed.notify_waiters();
        if failed {
            break;
        }
    }
    drop(watch);
    // It stays for its error to be found.
    loop {
        let end = lock(&kept.inner).asked + IDLE;
        if end <= Instant::now() {
            return;
        }
        sleep_until(end).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filesystem::messages::EventType;
    use crate::memory::Memory;

    fn share() -> Share {
        Memory::default().share()
    }

    fn event(name: &str) -> FilesystemEvent {
        FilesystemEvent {
            name: name.to_owned(),
            kind: EventType::Write,
            entry: None,
        }
    }

    #[tokio::test]
    async fn what_is_kept_is_bounded_and_a_loss_is_told() {
        let mut kept = Kept::new(share());
        kept.push(event("a"));
        assert_eq!(kept.poll().unwrap().events, [event("a")]);
        assert_eq!(kept.poll().unwrap().events, []);

        for n in 0..=MAX_EVENTS {
            kept.push(event(&n.to_string()));
        }
        assert_eq!(kept.poll().unwrap_err().code().name(), "data_loss");
        let rest = kept.poll().unwrap().events;
        assert_eq!((rest.len(), rest[0].name.as_str()), (MAX_EVENTS, "1"));

        let long = "n".repeat(MAX_BYTES / 2);
        for _ in 0..3 {
            kept.push(event(&long));
        }
        assert!(kept.poll().is_err());
        assert_eq!(kept.poll().unwrap().events.len(), 1);
        assert_eq!((kept.bytes, kept.events.len()), (0, 0));
    }

    #[tokio::test]
    async fn what_there_is_no_memory_for_is_dropped_and_told() {
        const KIB: usize = 1024;
        let share = Memory::new(128 * KIB).share();
        let mut kept = Kept::new(share.clone());
        let name = "n".repeat(16 * KIB);
        for _ in 0..6 {
            kept.push(event(&name));
        }
        assert!(!kept.lost && !share.has(64 * KIB));
        for _ in 0..6 {
            kept.push(event(&name));
        }
        assert_eq!(kept.poll().unwrap_err().code().name(), "data_loss");
        let rest = kept.poll().unwrap();
        assert!((4..=8).contains(&rest.events.len()), "{}", rest.events.len());
        assert!(!share.has(64 * KIB), "they are being told");
        drop(rest);
        assert!(share.has(128 * KIB));
    }

    #[tokio::test]
    async fn what_was_seen_is_told_before_a_failure() {
        let mut kept = Kept::new(share());
        kept.push(event("a"));
        kept.failed = Some(Error::Lost("gone".to_owned()));
        assert_eq!(kept.poll().unwrap().events.len(), 1);
        assert!(kept.poll().unwrap_err().to_string().contains("gone"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_poll_waits_for_what_is_on_its_way_and_not_longer() {
        let waited = async |shared: &Shared| {
            let begun = Instant::now();
            shared.settled().await;
            begun.elapsed()
        };
        let shared = Shared::new(share());
        let push = |name: &str| {
            let mut kept = lock(&shared.inner);
            kept.last = Some(Instant::now());
            kept.push(event(name));
            shared.changed.notify_waiters();
        };
        let nearly = |took: Duration, limit: Duration| took >= limit && took < limit + Duration::from_millis(3);
        assert!(nearly(waited(&shared).await, FIRST_LIMIT));
        push("a");
        assert!(nearly(waited(&shared).await, QUIET));
        // One that comes while it is waited for another.
        let late = async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            push("b");
        };
        let (took, ()) = tokio::join!(waited(&shared), late);
        // The first one is long ago.
        assert!(took < Duration::from_millis(3), "{took:?}");
        lock(&shared.inner).poll().unwrap();
        let late = async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            push("c");
        };
        let (took, ()) = tokio::join!(waited(&shared), late);
        assert!(nearly(took, Duration::from_millis(10) + QUIET), "{took:?}");
        // Something happens all the time, and has just happened.
        push("c");
        let busy = async {
            loop {
                push("d");
                tokio::time::sleep(QUIET / 2).await;
            }
        };
        let took = tokio::select! { took = waited(&shared) => took, () = busy => Duration::ZERO };
        assert!(nearly(took, SETTLE_LIMIT), "{took:?}");
        lock(&shared.inner).lost = true;
        assert_eq!(waited(&shared).await, Duration::ZERO);
    }

    /// A watcher that sees nothing.
    fn idle() -> Watcher {
        Watcher {
            kept: Shared::new(share()),
            task: tokio::spawn(std::future::pending::<()>()).abort_handle(),
        }
    }

    #[tokio::test]
    async fn watchers_are_bounded_in_number() {
        let watchers = Watchers::default();
        let ids: Vec<String> = (0..MAX_WATCHERS).map(|_| fresh_id()).collect();
        for id in &ids {
            watchers.insert(id.clone(), idle()).unwrap();
        }
        let error = watchers.insert(fresh_id(), idle()).unwrap_err();
        assert_eq!(error.code().name(), "resource_exhausted");
        watchers.remove(&ids[0]).unwrap();
        assert_eq!(watchers.remove(&ids[0]).unwrap_err().code().name(), "not_found");
        assert_eq!(watchers.poll(&ids[0]).await.unwrap_err().code().name(), "not_found");
        watchers.insert(fresh_id(), idle()).unwrap();
    }

    #[tokio::test]
    async fn a_watcher_that_is_dropped_ends() {
        let watcher = idle();
        let task = watcher.task.clone();
        drop(watcher);
        let ended = async {
            while !task.is_finished() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), ended).await.unwrap();
    }
}
