//! Interrupt sources over any way to send one message. Knows no engine.

use std::sync::{Mutex, PoisonError};

use crate::{Interrupt, MsiMessage};

/// A way to send a message. One system call at most, no lock that a guest could hold up.
pub trait Deliver: Send + Sync {
    /// Sends it. A guest can program any address: what names no APIC is its own loss.
    fn deliver(&self, message: MsiMessage);
}

/// One source: where it goes now, and whether it waits to go anywhere.
pub struct Routed<D> {
    deliver: D,
    // Held for the time of one system call, and never across a call into a device: a vCPU that reprograms the vector waits for at
    // most one delivery.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    route: Option<MsiMessage>,
    pending: bool,
}

impl<D: Deliver> Routed<D> {
    /// One that goes nowhere yet.
    pub fn new(deliver: D) -> Self {
        Self {
            deliver,
            state: Mutex::new(State::default()),
        }
    }
}

impl<D: Deliver> Interrupt for Routed<D> {
    fn trigger(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.route {
            Some(message) => self.deliver.deliver(message),
            None => state.pending = true,
        }
    }

    fn route(&self, message: Option<MsiMessage>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.route = message;
        if message.is_some() && std::mem::take(&mut state.pending) {
            drop(state);
            self.trigger();
        }
    }

    fn is_pending(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).pending
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Default)]
    struct Sent(Mutex<Vec<MsiMessage>>);

    impl Deliver for Arc<Sent> {
        fn deliver(&self, message: MsiMessage) {
            self.0.lock().unwrap().push(message);
        }
    }

    #[test]
    fn a_trigger_without_a_route_is_kept_once() {
        let sent = Arc::<Sent>::default();
        let source = Routed::new(Arc::clone(&sent));
        let message = MsiMessage { address: 1, data: 2 };
        source.trigger();
        source.trigger();
        assert!(source.is_pending() && sent.0.lock().unwrap().is_empty());
        source.route(Some(message));
        assert!(!source.is_pending());
        source.trigger();
        source.route(None);
        source.route(Some(message));
        assert_eq!(*sent.0.lock().unwrap(), [message; 2]);
    }
}
