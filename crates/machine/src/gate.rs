//! What vCPU threads may do now, and how many of them wait. While they wait they can be given an order for their vCPUs.
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

/// What a vCPU's thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Run the guest.
    Run,
    /// Carry out the order in the thread's slot, say so by [`Gate::done`], and come back.
    Obey,
    /// End.
    End,
}

struct State {
    wanted: Wanted,
    /// Threads that are outside of `Vcpu::run` and will stay there.
    parked: usize,
    /// How often the threads were given an order.
    orders: u64,
    /// How many have carried out this one.
    done: usize,
    /// Threads that will never do anything again.
    abandoned: usize,
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
            orders: 0,
            done: 0,
            abandoned: 0,
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
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.parked += 1;
        state.abandoned += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Has all `count` threads, which are parked, carry out what is in their slots; returns when they have.
    pub(crate) fn order_all(&self, count: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.orders += 1;
        state.done = 0;
        self.changed.notify_all();
        while state.done + state.abandoned < count {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Called by a vCPU thread that has carried out its order.
    pub(crate) fn done(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).done += 1;
        self.changed.notify_all();
    }

    /// A vCPU's look between two exits.
    pub(crate) fn is_open(&self) -> bool {
        !self.hold.load(Ordering::SeqCst)
    }

    /// Called by a vCPU thread that is not in the guest: waits until there is something to do. `orders` is the thread's own
    /// count of those that it was given, from 0 on.
    pub(crate) fn pass(&self, orders: &mut u64) -> Pass {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.parked += 1;
        self.changed.notify_all();
        while state.wanted == Wanted::Pause && state.orders == *orders {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let pass = match state.wanted {
            // It stays parked.
            Wanted::End => return Pass::End,
            Wanted::Run => Pass::Run,
            Wanted::Pause => Pass::Obey,
        };
        *orders = state.orders;
        state.parked -= 1;
        pass
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
            let mut orders = 0;
            let first = passing.pass(&mut orders);
            while passing.is_open() {
                std::thread::yield_now();
            }
            (first, passing.pass(&mut orders))
        });
        gate.wait_parked(1);
        assert!(!gate.is_open());
        gate.set(Wanted::Run);
        while gate.state.lock().unwrap().parked != 0 {
            std::thread::yield_now();
        }
        gate.set(Wanted::End);
        assert_eq!(thread.join().unwrap(), (Pass::Run, Pass::End));
    }

    #[test]
    fn nobody_waits_for_a_thread_that_is_gone() {
        let gate = Gate::new();
        gate.abandon();
        gate.wait_parked(1);
    }

    #[test]
    fn each_thread_obeys_once_for_each_request() {
        const THREADS: usize = 3;
        let gate = Arc::new(Gate::new());
        let count = || {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || {
                let (mut orders, mut done) = (0, 0);
                loop {
                    match gate.pass(&mut orders) {
                        Pass::Obey => {
                            done += 1;
                            gate.done();
                        }
                        Pass::End => return done,
                        Pass::Run => panic!("nobody was to run"),
                    }
                }
            })
        };
        let threads: Vec<_> = (0..THREADS).map(|_| count()).collect();
        for _ in 0..2 {
            gate.wait_parked(THREADS);
            gate.order_all(THREADS);
        }
        // One that is gone is not waited for.
        gate.abandon();
        gate.order_all(THREADS + 1);
        gate.wait_parked(THREADS + 1);
        gate.set(Wanted::End);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), 3);
        }
    }

    #[test]
    fn the_end_is_final() {
        let gate = Gate::new();
        gate.set(Wanted::End);
        gate.set(Wanted::Pause);
        let late = "a late pause must not hold a thread that is to end";
        assert_eq!(gate.pass(&mut 0), Pass::End, "{late}");
        gate.set(Wanted::Run);
        assert!(!gate.is_open());
    }
}
