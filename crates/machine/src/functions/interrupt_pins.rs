//! Interrupt pins of functions of the host's, of a guest whose I/O APIC has levels: who asserts which, as the owner of the machine is told by
//! events. Knows no function.
//!
//! ```text
//!  driver ── signals `asserts` ──▶ owner's thread: InterruptPins::look ──▶ I/O APIC ──▶ guest
//!     ▲                                                              │
//!     └───────────────────── signals `ended` ◀── the vCPU's end of interrupt
//! ```
//! The driver masks a function when it signals, until it is asked again: of each function there is at most one signal for each end of an
//! interrupt, whatever function and guest do.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::{Epoll, EventFd, Interest};
use device::InterruptPin;

use crate::platform::{IoApic, SLOT_PINS};

/// The line of one function.
pub(crate) struct Line {
    number: u64,
    asserts: EventFd,
    ended: EventFd,
    ioapic: Arc<IoApic>,
    /// Held while what was signalled is taken: nothing is asserted after it was turned off. Before the I/O APIC's.
    is_on: Mutex<bool>,
}

impl Line {
    fn look(&self) {
        let is_on = self.is_on.lock().unwrap_or_else(PoisonError::into_inner);
        if self.asserts.consume() && *is_on {
            self.ioapic.assert(self.number, true);
        }
    }

    /// The pin is that of this slot, which the guest is about to find the function in.
    pub(super) fn connect(&self, slot: usize) -> io::Result<()> {
        let ended = self.ended.try_clone()?;
        self.ioapic
            .connect(self.number, SLOT_PINS[slot % SLOT_PINS.len()], ended);
        Ok(())
    }
}

impl InterruptPin for Line {
    fn asserts(&self) -> &EventFd {
        &self.asserts
    }

    fn ended(&self) -> &EventFd {
        &self.ended
    }

    fn switch(&self, on: bool) {
        let mut is_on = self.is_on.lock().unwrap_or_else(PoisonError::into_inner);
        *is_on = on;
        self.asserts.consume();
        self.ioapic.assert(self.number, false);
    }
}

/// Those of all functions.
#[derive(Default)]
pub(crate) struct InterruptPins {
    /// Made with the first line: most guests have none.
    epoll: Option<Epoll>,
    lines: BTreeMap<u64, Arc<Line>>,
    next: u64,
}

impl InterruptPins {
    /// A line that is off and leads nowhere yet; none where the guest's I/O APIC has no levels.
    pub(super) fn make(&mut self, ioapic: &Arc<IoApic>) -> io::Result<Option<Arc<Line>>> {
        if !ioapic.has_levels() {
            return Ok(None);
        }
        let line = Arc::new(Line {
            number: self.next,
            asserts: EventFd::new()?,
            ended: EventFd::new()?,
            ioapic: Arc::clone(ioapic),
            is_on: Mutex::new(false),
        });
        let epoll = match self.epoll.take() {
            Some(epoll) => epoll,
            None => Epoll::new()?,
        };
        epoll.add(&line.asserts, line.number, Interest::READ)?;
        self.epoll = Some(epoll);
        self.next += 1;
        self.lines.insert(line.number, Arc::clone(&line));
        Ok(Some(line))
    }

    /// The function of a line is gone: nothing of it reaches the guest any more.
    pub(super) fn remove(&mut self, line: &Line) {
        line.switch(false);
        line.ioapic.disconnect(line.number);
        self.lines.remove(&line.number);
        if let Some(Err(error)) = self.epoll.as_ref().map(|epoll| epoll.remove(&line.asserts)) {
            log::error!("the interrupt pin of a function that has left is still watched: {error}");
        }
    }

    /// Readable when [`InterruptPins::look`] has something to do, once there is a line.
    pub(super) fn events(&self) -> Option<&Epoll> {
        self.epoll.as_ref()
    }

    /// Asserts what has been signalled.
    pub(super) fn look(&self) {
        let Some(epoll) = &self.epoll else {
            return;
        };
        let mut ready = Vec::new();
        if let Err(error) = epoll.wait(&mut ready, Some(Duration::ZERO)) {
            log::error!("interrupt pins of functions of the host's cannot be watched: {error}");
        }
        let lines = ready.iter().filter_map(|ready| self.lines.get(&ready.token));
        lines.for_each(|line| line.look());
    }
}
