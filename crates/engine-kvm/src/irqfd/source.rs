//! One interrupt source: of a device that this process is, which sends messages, or of one of the host's, whose event KVM takes.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use base::EventFd;
use engine::{Deliver, EngineError, Interrupt, MsiMessage, Result, Routed, failed};

use super::{Calls, Routes};

/// Bits 7 to 0 of a message's upper address; with them the rest is no APIC's id, and KVM refuses all routes because of the one
/// (api.rst, `KVM_CAP_X2APIC_API`).
const RESERVED: u64 = 0xff << 32;

/// One source.
pub(crate) struct Source<K: Calls, D> {
    routes: Arc<Routes<K>>,
    /// What it is while no event is attached.
    routed: Routed<D>,
    line: OnceLock<Line>,
}

/// An event and the GSI that it is tied to.
struct Line {
    event: EventFd,
    gsi: u32,
    /// It has an irqfd: what is signalled goes where the GSI is routed. Held for the time of a few system calls, none of which waits
    /// for a guest.
    assigned: Mutex<bool>,
}

impl Line {
    fn assigned(&self) -> MutexGuard<'_, bool> {
        self.assigned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Calls, D: Deliver> Source<K, D> {
    pub(crate) fn new(routes: Arc<Routes<K>>, deliver: D) -> Self {
        Self {
            routes,
            routed: Routed::new(deliver),
            line: OnceLock::new(),
        }
    }
}

impl<K: Calls, D> Source<K, D> {
    /// What is signalled from now on goes to `message`, and what the event has kept.
    fn connect(&self, line: &Line, assigned: &mut bool, message: MsiMessage) -> Result<()> {
        self.routes.set(line.gsi, message);
        self.routes.commit()?;
        if !*assigned {
            let assign = self.routes.kvm().assign(&line.event, line.gsi);
            assign.map_err(failed("KVM_IRQFD"))?;
            *assigned = true;
        }
        Ok(())
    }

    /// What is signalled from now on is kept in the event.
    fn disconnect(&self, line: &Line, assigned: &mut bool) {
        if !*assigned {
            return;
        }
        match self.routes.kvm().deassign(&line.event, line.gsi) {
            Ok(()) => *assigned = false,
            Err(error) => log::error!("an interrupt of a device could not be taken from its guest: KVM_IRQFD: {error}"),
        }
    }
}

impl<K: Calls, D: Deliver> Interrupt for Source<K, D> {
    fn trigger(&self) {
        match self.line.get() {
            Some(line) => line.event.signal(),
            None => self.routed.trigger(),
        }
    }

    fn prepare(&self, message: MsiMessage) {
        if let Some(line) = self.line.get()
            && names_an_apic(message)
        {
            self.routes.set(line.gsi, message);
        }
    }

    fn route(&self, message: Option<MsiMessage>) {
        let Some(line) = self.line.get() else {
            return self.routed.route(message);
        };
        let mut assigned = line.assigned();
        match message {
            Some(message) if names_an_apic(message) => {
                if let Err(error) = self.connect(line, &mut assigned, message) {
                    log::error!("an interrupt of a device does not reach its guest, and is kept: {error}");
                    // Rather than where it went before.
                    self.disconnect(line, &mut assigned);
                }
            }
            other => {
                if let Some(message) = other {
                    log::debug!("a message that names no local APIC: {message:x?}");
                }
                self.disconnect(line, &mut assigned);
            }
        }
    }

    fn is_pending(&self) -> bool {
        let Some(line) = self.line.get() else {
            return self.routed.is_pending();
        };
        let assigned = line.assigned();
        // Put back: without an irqfd nobody else takes it, and who makes one needs the line.
        let pending = !*assigned && line.event.consume();
        if pending {
            line.event.signal();
        }
        pending
    }

    fn report_ends(&self, pin: u32, message: Option<MsiMessage>) -> Result<()> {
        self.routes.set_pin(pin, message)
    }

    fn attach(&self, event: EventFd) -> Result<()> {
        let gsi = self.routes.take()?;
        let line = Line {
            event,
            gsi,
            assigned: Mutex::new(false),
        };
        self.line.set(line).map_err(|refused| {
            self.routes.give_back(refused.gsi);
            EngineError::State("an interrupt has an event already".into())
        })
    }
}

impl<K: Calls, D> Drop for Source<K, D> {
    fn drop(&mut self) {
        let Some(line) = self.line.take() else {
            return;
        };
        let mut assigned = line.assigned();
        self.disconnect(&line, &mut assigned);
        // A GSI that is still an event's must not become another's.
        if !*assigned {
            self.routes.give_back(line.gsi);
        }
    }
}

/// A guest can program any address, and its other routes are to go on.
fn names_an_apic(message: MsiMessage) -> bool {
    message.address & RESERVED == 0
}
