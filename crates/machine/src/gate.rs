//! What vCPU threads may do now, and how many of them wait.
//!
//! The lock is held for moments only; a vCPU takes it when it was interrupted, never on a guest's exit.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// What the owner wants of the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Run,
    Pause,
    End,
}

struct State {
    wanted: Wanted,
    /// Threads that are outside of `Vcpu::run` and will stay there.
    parked: usize,
}

/// Shared by the owner and all vCPU threads.
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    // Mirrors `wanted != Run`, for the vCPU's look between two exits without the lock.
    hold: AtomicBool,
}

impl Gate {
    /// Closed.
    pub(crate) fn new() -> Self {
        let state = State {
            wanted: Wanted::Pause,
            parked: 0,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            hold: AtomicBool::new(true),
        }
    }

    /// Says what is wanted. The caller kicks the vCPUs afterwards. [`Wanted::End`] is final: a vCPU that pauses the
    /// others because the guest has ended may come later than the owner that has seen the end and joins its thread.
    pub(crate) fn set(&self, wanted: Wanted) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.wanted != Wanted::End {
            state.wanted = wanted;
            self.hold.store(wanted != Wanted::Run, Ordering::SeqCst);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until `count` vCPU threads are parked.
    pub(crate) fn wait_parked(&self, count: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.parked < count {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Called by a vCPU thread that is never coming back: it counts as parked.
    pub(crate) fn abandon(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).parked += 1;
        self.changed.notify_all();
    }

    /// A vCPU's look between two exits.
    pub(crate) fn is_open(&self) -> bool {
        !self.hold.load(Ordering::SeqCst)
    }

    /// Called by a vCPU thread that is not in the guest: waits until it may run (true) or shall end (false).
    pub(crate) fn pass(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.parked += 1;
        self.changed.notify_all();
        while state.wanted == Wanted::Pause {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.wanted == Wanted::Run {
            state.parked -= 1;
        }
        state.wanted == Wanted::Run
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn parked_threads_are_counted_and_let_go() {
        let gate = Arc::new(Gate::new());
        let passing = Arc::clone(&gate);
        let thread = std::thread::spawn(move || {
            let first = passing.pass();
            while passing.is_open() {
                std::thread::yield_now();
            }
            (first, passing.pass())
        });
        gate.wait_parked(1);
        assert!(!gate.is_open());
        gate.set(Wanted::Run);
        while gate.state.lock().unwrap().parked != 0 {
            std::thread::yield_now();
        }
        gate.set(Wanted::End);
        assert_eq!(thread.join().unwrap(), (true, false));
    }

    #[test]
    fn nobody_waits_for_a_thread_that_is_gone() {
        let gate = Gate::new();
        gate.abandon();
        gate.wait_parked(1);
    }

    #[test]
    fn the_end_is_final() {
        let gate = Gate::new();
        gate.set(Wanted::End);
        gate.set(Wanted::Pause);
        assert!(!gate.pass(), "a late pause must not hold a thread that is to end");
        gate.set(Wanted::Run);
        assert!(!gate.is_open());
    }
}
