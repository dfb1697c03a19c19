//! Whether a vCPU executes anything: what INIT and startup interrupts do (AMD64 Architecture Programmer's Manual, volume 2, 16.5), which
//! the module leaves to us. Knows no registers.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// One vCPU's.
#[derive(Debug, Default)]
pub(crate) struct Power {
    state: Mutex<PowerState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PowerState {
    /// It executes.
    on: bool,
    /// It is to become as after power on.
    init: bool,
    /// Where it begins then.
    start: Option<u8>,
}

/// What a vCPU's thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Runs on.
    Run,
    /// Begins at this page, as after power on.
    Start(u8),
    /// Looks who wants it: it waits for a startup interrupt meanwhile.
    Look,
}

impl Power {
    /// The first one's, which executes from the start.
    pub(crate) fn on() -> Self {
        let power = Self::default();
        power.lock().on = true;
        power
    }

    fn lock(&self) -> MutexGuard<'_, PowerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For its own thread: what comes next. Waits for a startup interrupt as long as `wanted` does not say that somebody wants the
    /// thread.
    pub(crate) fn next(&self, wanted: impl Fn() -> bool) -> Next {
        let mut state = self.lock();
        loop {
            if std::mem::take(&mut state.init) {
                state.on = false;
            }
            if state.on {
                return Next::Run;
            }
            if let Some(vector) = state.start.take() {
                state.on = true;
                return Next::Start(vector);
            }
            if wanted() {
                return Next::Look;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Somebody wants the thread, and has made its `wanted` say so.
    pub(crate) fn look(&self) {
        let _state = self.lock();
        self.changed.notify_all();
    }

    /// INIT: true if its thread has to be called, until [`Power::has_stopped`].
    pub(crate) fn init(&self) -> bool {
        let mut state = self.lock();
        state.start = None;
        state.init = state.on;
        state.init
    }

    /// Whether it has stopped for the last INIT.
    pub(crate) fn has_stopped(&self) -> bool {
        !self.lock().init
    }

    /// Whether it executes, and where it begins otherwise, if a startup interrupt waits for it. For its own thread, between runs.
    pub(crate) fn state(&self) -> (bool, Option<u8>) {
        let state = self.lock();
        (state.on && !state.init, state.start)
    }

    /// Becomes so, whatever it was.
    pub(crate) fn become_as(&self, on: bool, start: Option<u8>) {
        *self.lock() = PowerState { on, init: false, start };
        self.changed.notify_all();
    }

    /// It is neither off nor about to be.
    pub(crate) fn executes(&self) -> bool {
        let state = self.lock();
        state.on && !state.init
    }

    /// A startup interrupt, which one that executes does not notice.
    pub(crate) fn start(&self, vector: u8) {
        let mut state = self.lock();
        if !state.on || state.init {
            state.start = Some(vector);
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn one_that_is_off_begins_with_a_startup_interrupt_and_not_with_a_second() {
        let power = Power::default();
        assert_eq!(power.next(|| true), Next::Look);
        assert!(!power.init() && !power.executes(), "it executes nothing");
        power.start(0x9a);
        assert_eq!(power.next(|| false), Next::Start(0x9a));
        power.start(0x9a);
        assert_eq!(power.next(|| false), Next::Run);
    }

    #[test]
    fn init_ends_what_executes() {
        let power = Power::on();
        assert_eq!(power.next(|| false), Next::Run);
        assert!(power.executes() && power.init() && !power.has_stopped() && !power.executes());
        power.start(1);
        assert_eq!(power.next(|| false), Next::Start(1), "the interrupt came behind INIT");
        assert!(power.has_stopped());
    }

    #[test]
    fn one_becomes_what_another_was() {
        let power = Power::default();
        assert_eq!(power.state(), (false, None));
        power.become_as(false, Some(8));
        assert_eq!(power.state(), (false, Some(8)));
        assert_eq!(power.next(|| false), Next::Start(8));
        assert_eq!(power.state(), (true, None));
        power.become_as(false, None);
        assert_eq!(power.next(|| true), Next::Look);
    }

    #[test]
    fn who_waits_hears_of_both() {
        let power = Arc::new(Power::default());
        let own = Arc::clone(&power);
        let waiting = std::thread::spawn(move || own.next(|| false));
        power.start(7);
        assert_eq!(waiting.join().unwrap(), Next::Start(7));
    }
}
