//! A machine that serves others without a CPU of its own, and one that enters such a machine: what their owner and their vCPUs' threads
//! tell each other of it. Knows neither what is served nor how one enters another, which is the engine's.
//!
//! ```text
//!              freeze                 the guest waits                     it ends
//!  no server ──────────▶ to be frozen ─────────────────▶ frozen for good ─────────▶ ended
//!      ▲                     │
//!      └─────────────────────┘ the engine refuses, and the owner has been told why
//! ```
//! A frozen guest runs in the place of others, whether or not its own vCPU's thread does, which only answers what it asks. So it cannot be
//! paused, and what cannot be paused cannot be saved.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::EventFd;
use engine::Vcpu;

use crate::error::MachineError;
use crate::machine::{Machine, host};
use crate::vcpu::VcpuCommand;

/// How many servers a guest can enter: those of an engine's vCPU ([`Vcpu::link`]).
const LINKS: usize = 4;

/// The numbers by which a machine's guest enters servers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Links([bool; LINKS]);

impl Links {
    fn of(&mut self, index: u32) -> Result<&mut bool, MachineError> {
        let at = usize::try_from(index).ok().and_then(|index| self.0.get_mut(index));
        at.ok_or(MachineError::NoLink(index))
    }

    pub(crate) fn any(self) -> bool {
        self.0.contains(&true)
    }
}

#[derive(Debug)]
enum Step {
    NoServer,
    ToBeFrozen(Duration),
    Refused(String),
    Frozen { link: OwnedFd, budget: Duration },
}

/// By one system call: the standard library's makes two of them.
fn copy(fd: &OwnedFd) -> Result<OwnedFd, MachineError> {
    let copy = rustix::io::fcntl_dupfd_cloexec(fd, 0);
    copy.map_err(|error| host("a copy of a descriptor")(error.into()))
}

/// Whether the machine is to serve, between its owner and its vCPU's thread.
#[derive(Debug)]
pub(crate) struct Freezing {
    step: Mutex<Step>,
    frozen: EventFd,
}

impl Freezing {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            step: Mutex::new(Step::NoServer),
            frozen: EventFd::new()?,
        })
    }

    fn step(&self) -> MutexGuard<'_, Step> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the vCPU's thread, whose guest has just said that it waits. One that is to serve nobody, or cannot be frozen, is told so when
    /// it goes on.
    pub(crate) fn at_wait(&self, vcpu: &mut dyn Vcpu) {
        let mut step = self.step();
        let Step::ToBeFrozen(budget) = *step else {
            return;
        };
        *step = match vcpu.freeze(budget) {
            Ok(link) => Step::Frozen { link, budget },
            Err(error) => Step::Refused(error.to_string()),
        };
        self.frozen.signal();
    }

    pub(crate) fn is_frozen(&self) -> bool {
        matches!(*self.step(), Step::Frozen { .. })
    }

    /// It is frozen, or will be soon.
    fn serves(&self) -> bool {
        matches!(*self.step(), Step::Frozen { .. } | Step::ToBeFrozen(_))
    }

    /// Why it could not be frozen, once.
    fn take_refusal(&self) -> Option<String> {
        let mut step = self.step();
        match std::mem::replace(&mut *step, Step::NoServer) {
            Step::Refused(why) => Some(why),
            other => {
                *step = other;
                None
            }
        }
    }

    /// Its descriptor, or, if there is none, it is to be had by the guest's next wait.
    fn ask(&self, budget: Duration) -> Result<Option<OwnedFd>, MachineError> {
        let mut step = self.step();
        match &*step {
            Step::Frozen { link, budget: has } if *has == budget => {
                return copy(link).map(Some);
            }
            Step::Frozen { budget: has, .. } => return Err(MachineError::OtherBudget { has: *has, budget }),
            Step::NoServer | Step::ToBeFrozen(_) | Step::Refused(_) => (),
        }
        *step = Step::ToBeFrozen(budget);
        Ok(None)
    }
}

impl Machine {
    /// Freezes the machine when its guest says next that it waits: it has no CPU then, and runs when another enters it, for at most `budget`
    /// at once. What others are linked to it by; `None` as long as it is not frozen. Whoever asks again may give another budget until then.
    ///
    /// # Errors
    /// It has more than one vCPU, no translated memory, links of its own, or functions of the host's that come or go just then; it was frozen
    /// with another budget.
    pub fn freeze(&mut self, budget: Duration) -> Result<Option<OwnedFd>, MachineError> {
        if self.ram.identity_layout().is_some() {
            return Err(MachineError::IdentityServer);
        }
        if self.threads.len() != 1 {
            return Err(MachineError::ServerVcpus(self.threads.len()));
        }
        if self.links.any() {
            return Err(MachineError::Linked);
        }
        if self.maps_memory() {
            return Err(MachineError::FunctionsComing);
        }
        self.shared.freezing.ask(budget)
    }

    /// Whether it has no CPU any more.
    pub fn is_frozen(&self) -> bool {
        self.shared.freezing.is_frozen()
    }

    /// Whether it has no CPU any more, or will have none when its guest waits.
    pub fn is_server(&self) -> bool {
        self.shared.freezing.serves()
    }

    /// Pauses it, but for one that is frozen just then: its clients run it, whatever its own thread does, which is to answer what it asks.
    /// Whether it is paused.
    ///
    /// # Errors
    /// As [`Machine::run`], by which the thread of a frozen one goes on.
    pub fn try_pause(&mut self) -> Result<bool, MachineError> {
        self.pause();
        match self.is_frozen() {
            true => self.run().map(|()| false),
            false => Ok(true),
        }
    }

    /// Readable when it was to freeze, and has, or could not; until it is consumed.
    pub fn frozen_event(&self) -> &EventFd {
        &self.shared.freezing.frozen
    }

    /// Why it could not be frozen when its guest waited, once. It is to serve nobody then.
    pub fn take_freeze_refusal(&self) -> Option<String> {
        self.shared.freezing.take_refusal()
    }

    /// Lets the guest enter a frozen machine by the number `index`, from each of its vCPUs, or, with `None`, not any more. The vCPUs stand
    /// still meanwhile. What was refused has changed nothing.
    ///
    /// # Errors
    /// The machine is a server itself or its memory is not translated; the number is none, or has a link already, or has none to end; the
    /// engine has refused.
    pub fn link(&mut self, index: u32, server: Option<OwnedFd>) -> Result<(), MachineError> {
        if self.shared.freezing.serves() {
            return Err(MachineError::ServerLinks);
        }
        if self.ram.identity_layout().is_some() {
            return Err(MachineError::IdentityServer);
        }
        let has = *self.links.of(index)?;
        match (&server, has) {
            (Some(_), true) => return Err(MachineError::LinkTaken(index)),
            (None, false) => return Err(MachineError::NoLink(index)),
            _ => (),
        }
        let wanted = server.is_some();
        // One that was frozen meanwhile refuses by itself.
        self.with_vcpus_parked(|machine| machine.link_all(index, server.as_ref()))?;
        *self.links.of(index)? = wanted;
        Ok(())
    }

    fn link_all(&self, index: u32, server: Option<&OwnedFd>) -> Result<(), MachineError> {
        let mut copies = Vec::new();
        for _ in &self.threads {
            copies.push(server.map(copy).transpose()?);
        }
        let linked = self.command_vcpus(|at| {
            let server = copies.get_mut(at)?.take();
            Some(VcpuCommand::Link { index, server })
        });
        if linked.is_err() && server.is_some() {
            // Of those that have it: none had one of this number before.
            drop(self.command_vcpus(|_| Some(VcpuCommand::Link { index, server: None })));
        }
        linked.map(drop)
    }

    /// The numbers by which its guest can enter servers.
    pub fn links(&self) -> Vec<u32> {
        let numbers = (0..).zip(self.links.0);
        numbers.filter(|(_, has)| *has).map(|(index, _)| index).collect()
    }

    /// Does something while no vCPU runs, in any state. A device that cannot go on afterwards is the machine's end.
    fn with_vcpus_parked<T>(&mut self, act: impl FnOnce(&Self) -> T) -> T {
        if self.fresh {
            // It has not run yet.
            return act(self);
        }
        self.standing_still(act)
    }
}

#[cfg(test)]
mod tests;
