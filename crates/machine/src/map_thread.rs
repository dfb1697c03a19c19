//! A thread that maps memory for functions of the host's as long as there is more to map: again after a rest where the host refuses, and over when
//! nothing is left, until somebody has it go on. Knows neither what it maps nor what is done with that.
//!
//! ```text
//!  go_on ──▶ next ── something ──▶ step ── done ──▶ next ...
//!              │                     └── refused ──▶ rest, until something else is wanted, or for long enough ──▶ next ...
//!              └── nothing, or it is stopped ──▶ over
//! ```

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use device::CreateError;

/// Between two attempts at what the host has refused: at first, and at most.
pub(crate) const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

const STACK: usize = 128 << 10;

/// What such a thread does.
pub(crate) trait Task: Send + Sync + Sized + 'static {
    /// What is wanted, as plain values.
    type Wants: Clone + PartialEq + Send;

    /// A part of the work.
    type Step;

    /// What is to be done next; nothing where that is all. Called with the lock held, so that what is wanted does not change meanwhile.
    fn next(&self, wants: &Self::Wants) -> Option<Self::Step>;

    /// Does it, as long as it is wanted.
    ///
    /// # Errors
    /// Why the host refuses; what was done stays so.
    fn step(&self, step: Self::Step, shared: &Shared<Self>) -> Result<(), String>;
}

/// What is wanted and how far it is, under one lock.
pub(crate) struct State<W> {
    pub(crate) wants: W,
    /// Functions are there: the thread may go on.
    pub(crate) ready: bool,
    pub(crate) stopped: bool,
    /// The thread will look at all of this again before it ends.
    pub(crate) running: bool,
    /// Why nothing is being mapped for now, if more is to be.
    pub(crate) error: Option<String>,
}

/// What the thread has in common with its owner.
pub(crate) struct Shared<T: Task> {
    pub(crate) task: T,
    state: Mutex<State<T::Wants>>,
    changed: Condvar,
}

/// The thread, while there is something to do, and what it works on. Ends with this.
pub(crate) struct MapThread<T: Task> {
    shared: Arc<Shared<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Task> MapThread<T> {
    /// There is none before it is told to go on.
    pub(crate) fn new(task: T, wants: T::Wants) -> Self {
        Self {
            shared: Arc::new(Shared {
                task,
                state: Mutex::new(State {
                    wants,
                    ready: false,
                    stopped: false,
                    running: false,
                    error: None,
                }),
                changed: Condvar::new(),
            }),
            thread: None,
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared<T>> {
        &self.shared
    }

    pub(crate) fn task(&self) -> &T {
        &self.shared.task
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State<T::Wants>> {
        self.shared.state()
    }

    /// Has something else be wanted, which a rest ends for. The thread goes on, if functions are there.
    ///
    /// # Errors
    /// The change's, or no thread could be had.
    pub(crate) fn change(
        &mut self,
        change: impl FnOnce(&T, &mut State<T::Wants>) -> Result<(), CreateError>,
    ) -> Result<(), CreateError> {
        let ready = {
            let mut state = self.shared.state();
            change(&self.shared.task, &mut state)?;
            self.shared.changed.notify_all();
            state.ready
        };
        if ready { self.go_on() } else { Ok(()) }
    }

    /// Functions are there from now on.
    ///
    /// # Errors
    /// No thread could be had.
    pub(crate) fn go_on(&mut self) -> Result<(), CreateError> {
        {
            let mut state = self.shared.state();
            state.ready = true;
            if state.running {
                return Ok(());
            }
            state.running = true;
        }
        self.join();
        let shared = Arc::clone(&self.shared);
        match base::thread::spawn("dma-map", STACK, move || shared.work()) {
            Ok(thread) => self.thread = Some(thread),
            Err(source) => {
                self.shared.state().running = false;
                let what = "a thread that maps memory";
                return Err(CreateError::Host { what, source });
            }
        }
        Ok(())
    }

    /// Functions are there no more: returns when nothing is being mapped.
    pub(crate) fn end(&mut self) {
        self.stop();
        let mut state = self.shared.state();
        (state.ready, state.stopped, state.error) = (false, false, None);
    }

    fn stop(&mut self) {
        self.shared.state().stopped = true;
        self.shared.changed.notify_all();
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that maps memory ahead panicked");
        }
    }
}

impl<T: Task> Drop for MapThread<T> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<T: Task> Shared<T> {
    pub(crate) fn state(&self) -> MutexGuard<'_, State<T::Wants>> {
        // Plain values, each set at once.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    /// What is to be done next, and for what that is wanted; nothing, and the thread ends, where there is nothing or it is stopped.
    fn next(&self) -> Option<(T::Step, T::Wants)> {
        let mut state = self.state();
        if !state.stopped {
            if let Some(step) = self.task.next(&state.wants) {
                return Some((step, state.wants.clone()));
            }
            state.error = None;
        }
        state.running = false;
        None
    }

    fn work(&self) {
        let mut pause = RETRY.0;
        while let Some((step, wants)) = self.next() {
            match self.task.step(step, self) {
                Ok(()) => {
                    self.state().error = None;
                    pause = RETRY.0;
                }
                Err(_) if self.is_stopped() => (),
                Err(error) => {
                    log::warn!("no more memory is mapped for functions of the host's for {pause:?}: {error}");
                    self.rest(error, &wants, pause);
                    pause = (pause * 2).min(RETRY.1);
                }
            }
        }
    }

    fn rest(&self, error: String, wants: &T::Wants, pause: Duration) {
        let mut state = self.state();
        state.error = Some(error);
        let waits = |state: &mut State<T::Wants>| !state.stopped && state.wants == *wants;
        let waited = self.changed.wait_timeout_while(state, pause, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use std::time::Instant;

    use super::*;

    /// Counts up to what is wanted; the host refuses to go beyond a limit.
    #[derive(Default)]
    struct Count {
        at: AtomicU64,
        limit: AtomicU64,
        refused: AtomicU32,
    }

    impl Task for Count {
        type Wants = u64;
        type Step = u64;

        fn next(&self, wants: &u64) -> Option<u64> {
            let at = self.at.load(Ordering::SeqCst);
            (at < *wants).then_some(at + 1)
        }

        fn step(&self, step: u64, _: &Shared<Self>) -> Result<(), String> {
            if step > self.limit.load(Ordering::SeqCst) {
                self.refused.fetch_add(1, Ordering::SeqCst);
                return Err("no more".into());
            }
            self.at.store(step, Ordering::SeqCst);
            Ok(())
        }
    }

    fn counts(limit: u64) -> MapThread<Count> {
        let count = Count::default();
        count.limit.store(limit, Ordering::SeqCst);
        MapThread::new(count, 0)
    }

    fn wants(thread: &mut MapThread<Count>, number: u64) {
        let changed = thread.change(|_, state| {
            state.wants = number;
            Ok(())
        });
        changed.unwrap();
    }

    fn waits(what: &str, until: impl Fn() -> bool) {
        let begun = Instant::now();
        while !until() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn at(thread: &MapThread<Count>) -> u64 {
        thread.task().at.load(Ordering::SeqCst)
    }

    /// How long the thread rests after its third attempt, at least.
    const LONG: Duration = Duration::from_secs(2);

    /// Waits until the thread has been refused three times more, after which it rests for long; from when on.
    fn third_attempt(thread: &MapThread<Count>) -> Instant {
        let refused = || thread.task().refused.load(Ordering::SeqCst);
        let before = refused();
        waits("more attempts", || refused() >= before + 3);
        Instant::now()
    }

    #[test]
    fn it_works_while_there_is_something_to_do_and_functions_are_there() {
        let mut thread = counts(100);
        wants(&mut thread, 10);
        assert!(thread.thread.is_none(), "there is no function");
        for number in [10, 20, 30] {
            wants(&mut thread, number);
            thread.go_on().unwrap();
            waits("the end", || !thread.state().running);
            assert_eq!(at(&thread), number);
        }
        thread.end();
        wants(&mut thread, 40);
        assert!(thread.thread.is_none() && !thread.state().ready);
        thread.go_on().unwrap();
        waits("the end", || !thread.state().running);
        assert_eq!(at(&thread), 40);
    }

    #[test]
    fn a_rest_ends_when_something_else_is_wanted_or_it_is_stopped() {
        let mut thread = counts(5);
        wants(&mut thread, 10);
        thread.go_on().unwrap();
        waits("an error", || thread.state().error.is_some());
        assert_eq!(RETRY.0 * 4, LONG);
        assert_eq!((at(&thread), thread.state().error.as_deref()), (5, Some("no more")));
        let begun = third_attempt(&thread);
        wants(&mut thread, 5);
        waits("the end", || !thread.state().running);
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
        assert_eq!(thread.state().error, None, "no more is wanted");
        wants(&mut thread, 7);
        let begun = third_attempt(&thread);
        thread.end();
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
        assert_eq!((at(&thread), thread.state().error.is_none()), (5, true));
    }
}
