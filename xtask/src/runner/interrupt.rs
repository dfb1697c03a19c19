//! SIGINT and SIGTERM: noted once, then every running child is told to stop by the one who waits for it.
//!
//! Children live in process groups of their own, so the terminal's Ctrl-C reaches only us. Knows no child and no step.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use anyhow::Result;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Says whether to stop, and why. Cloned into every step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stop {
    /// 0 while running, a signal's number, or `FAILED`.
    reason: Arc<AtomicI32>,
}

/// Another step failed and the rest is pointless.
const FAILED: i32 = -1;

impl Stop {
    /// Begins to listen; the thread ends with the process.
    pub(crate) fn listen() -> Result<Self> {
        let stop = Self::default();
        let noted = stop.clone();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
        thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                noted.reason.store(signal, Ordering::SeqCst);
            }
        })?;
        Ok(stop)
    }

    /// Ends the remaining steps because one has failed.
    pub(crate) fn because_of_failure(&self) {
        // A signal that came first keeps its place: it decides the exit status.
        let _ = self
            .reason
            .compare_exchange(0, FAILED, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Whether steps should end now.
    pub(crate) fn requested(&self) -> bool {
        self.reason.load(Ordering::SeqCst) != 0
    }

    /// The signal that ended us, if it was one.
    pub(crate) fn signal(&self) -> Option<i32> {
        let reason = self.reason.load(Ordering::SeqCst);
        (reason > 0).then_some(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_outranks_a_later_failure() {
        let stop = Stop::default();
        assert!(!stop.requested());
        stop.reason.store(SIGTERM, Ordering::SeqCst);
        stop.because_of_failure();
        assert_eq!(stop.signal(), Some(SIGTERM));
    }

    #[test]
    fn a_failure_is_not_a_signal() {
        let stop = Stop::default();
        stop.because_of_failure();
        assert!(stop.requested());
        assert_eq!(stop.signal(), None);
    }
}
