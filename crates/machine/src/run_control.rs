//! Run control: what vCPU threads may do now, and how many of them are parked. While they are, each can be given a command for its vCPU.
//!
//! ```text
//!            request(Run)                     request(Pause), kick
//!  parked ────────────────▶ in Vcpu::run ───────────────────────────▶ parked ── request(Exit) ──▶ ended
//!    │ ▲ command_done
//!    ▼ │ execute_all
//!  executing its command
//! ```
//! The lock is held for moments only; a vCPU takes it when it was interrupted, never on a guest's exit.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// What the owner has the vCPUs do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunRequest {
    Run,
    Pause,
    Exit,
}

/// What a vCPU's thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Run the guest.
    Run,
    /// Execute the command in the thread's mailbox, say so by [`RunControl::command_done`], and come back.
    Execute,
    /// End.
    Exit,
}

struct State {
    request: RunRequest,
    /// Threads that are outside of `Vcpu::run` and will stay there.
    parked: usize,
    /// How often the threads were given a command.
    commands: u64,
    /// How many have executed this one.
    done: usize,
    /// Threads that will never do anything again.
    abandoned: usize,
}

/// Shared by the owner and all vCPU threads.
pub(crate) struct RunControl {
    state: Mutex<State>,
    changed: Condvar,
    // Mirrors `request != Run`, for the vCPU's look between two exits without the lock.
    must_stop: AtomicBool,
}

impl RunControl {
    /// All are to pause.
    pub(crate) fn new() -> Self {
        let state = State {
            request: RunRequest::Pause,
            parked: 0,
            commands: 0,
            done: 0,
            abandoned: 0,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            must_stop: AtomicBool::new(true),
        }
    }

    /// Requests something of all. The caller kicks the vCPUs afterwards. [`RunRequest::Exit`] is final: a vCPU that pauses the
    /// others because the guest has ended may come later than the owner that has seen the end and joins its thread.
    pub(crate) fn request(&self, request: RunRequest) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.request != RunRequest::Exit {
            state.request = request;
            self.must_stop.store(request != RunRequest::Run, Ordering::SeqCst);
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

    /// Has all `count` threads, which are parked, execute what is in their mailboxes; returns when they have.
    pub(crate) fn execute_all(&self, count: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.commands += 1;
        state.done = 0;
        self.changed.notify_all();
        while state.done + state.abandoned < count {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Called by a vCPU thread that has executed its command.
    pub(crate) fn command_done(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).done += 1;
        self.changed.notify_all();
    }

    /// A vCPU's look between two exits.
    pub(crate) fn may_run(&self) -> bool {
        !self.must_stop.load(Ordering::SeqCst)
    }

    /// Called by a vCPU thread that is not in the guest: waits until there is something to do. `commands` is the thread's
    /// own count of those that it was given, from 0 on.
    pub(crate) fn wait_next(&self, commands: &mut u64) -> Next {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.parked += 1;
        self.changed.notify_all();
        while state.request == RunRequest::Pause && state.commands == *commands {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let next = match state.request {
            // It stays parked.
            RunRequest::Exit => return Next::Exit,
            RunRequest::Run => Next::Run,
            RunRequest::Pause => Next::Execute,
        };
        *commands = state.commands;
        state.parked -= 1;
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn parked_threads_are_counted_and_let_go() {
        let control = Arc::new(RunControl::new());
        let threads = Arc::clone(&control);
        let thread = std::thread::spawn(move || {
            let mut commands = 0;
            let first = threads.wait_next(&mut commands);
            while threads.may_run() {
                std::thread::yield_now();
            }
            (first, threads.wait_next(&mut commands))
        });
        control.wait_parked(1);
        assert!(!control.may_run());
        control.request(RunRequest::Run);
        while control.state.lock().unwrap().parked != 0 {
            std::thread::yield_now();
        }
        control.request(RunRequest::Exit);
        assert_eq!(thread.join().unwrap(), (Next::Run, Next::Exit));
    }

    #[test]
    fn nobody_waits_for_a_thread_that_is_gone() {
        let control = RunControl::new();
        control.abandon();
        control.wait_parked(1);
    }

    #[test]
    fn each_thread_executes_once_for_each_command() {
        const THREADS: usize = 3;
        let control = Arc::new(RunControl::new());
        let count = || {
            let control = Arc::clone(&control);
            std::thread::spawn(move || {
                let (mut commands, mut done) = (0, 0);
                loop {
                    match control.wait_next(&mut commands) {
                        Next::Execute => {
                            done += 1;
                            control.command_done();
                        }
                        Next::Exit => return done,
                        Next::Run => panic!("nobody was to run"),
                    }
                }
            })
        };
        let threads: Vec<_> = (0..THREADS).map(|_| count()).collect();
        for _ in 0..2 {
            control.wait_parked(THREADS);
            control.execute_all(THREADS);
        }
        // One that is gone is not waited for.
        control.abandon();
        control.execute_all(THREADS + 1);
        control.wait_parked(THREADS + 1);
        control.request(RunRequest::Exit);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), 3);
        }
    }

    #[test]
    fn the_end_is_final() {
        let control = RunControl::new();
        control.request(RunRequest::Exit);
        control.request(RunRequest::Pause);
        let late = "a late pause must not hold a thread that is to end";
        assert_eq!(control.wait_next(&mut 0), Next::Exit, "{late}");
        control.request(RunRequest::Run);
        assert!(!control.may_run());
    }
}
