//! Interrupt sources: of devices that this process is, and of devices of the host's, whose interrupts the module has go to the guest's
//! CPU without this process. Knows no device.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::EventFd;
use engine::{EngineError, Interrupt, MsiMessage, Result, Routed};

use crate::interrupts::Message;
use crate::module::uapi;
use crate::vm::{Sender, Shared};

/// One source.
pub(crate) struct Source {
    shared: Arc<Shared>,
    routed: Routed<Sender>,
    /// What it is attached to. Held for the time of a few system calls, none of which waits for a guest.
    line: Mutex<Option<Line>>,
}

/// An event, and the vCPU that has it now.
struct Line {
    event: EventFd,
    at: Option<Arc<OwnedFd>>,
}

impl Line {
    /// What is signalled from now on is kept in the event.
    fn detach(&mut self) {
        if let Some(vcpu) = self.at.take()
            && let Err(error) = uapi::detach_irq(&vcpu, &self.event)
        {
            log::error!("an interrupt of a device could not be taken from its vCPU: {error}");
        }
    }

    fn attach(&mut self, shared: &Shared, message: MsiMessage) {
        let Some(message) = Message::of(message) else {
            log::debug!("a message that is no interrupt for a program: {message:x?}");
            return;
        };
        // One interrupt has one destination. Whoever means several gets the first of them.
        let Some(vcpu) = shared.meant_by(message) else {
            log::debug!("an interrupt without a destination");
            return;
        };
        match uapi::attach_irq(&vcpu, &self.event, message.vector) {
            Ok(direct) => {
                let how = if direct { "goes to" } else { "is relayed to" };
                log::debug!("an interrupt of a device {how} vector {}", message.vector);
                self.at = Some(vcpu);
            }
            Err(error) => log::error!("an interrupt of a device does not reach its vCPU: {error}"),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.detach();
    }
}

impl Source {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            routed: Routed::new(Sender(Arc::clone(shared))),
            line: Mutex::default(),
        }
    }

    fn line(&self) -> MutexGuard<'_, Option<Line>> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Interrupt for Source {
    fn trigger(&self) {
        match &*self.line() {
            Some(line) => line.event.signal(),
            None => self.routed.trigger(),
        }
    }

    fn route(&self, message: Option<MsiMessage>) {
        match &mut *self.line() {
            Some(line) => {
                line.detach();
                if let Some(message) = message {
                    line.attach(&self.shared, message);
                }
            }
            None => self.routed.route(message),
        }
    }

    fn is_pending(&self) -> bool {
        match &*self.line() {
            // Put back: nobody takes it in between, as that needs the line.
            Some(line) if line.event.consume() => {
                line.event.signal();
                true
            }
            Some(_) => false,
            None => self.routed.is_pending(),
        }
    }

    fn attach(&self, event: EventFd) -> Result<()> {
        let mut line = self.line();
        if line.is_some() {
            return Err(EngineError::State("an interrupt has an event already".into()));
        }
        *line = Some(Line { event, at: None });
        Ok(())
    }
}
