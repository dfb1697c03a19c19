//! A VM that its clients run, and one that is such a client: the requests `freeze` and `link`, and what comes of them. Knows no engine.

use std::os::fd::OwnedFd;
use std::time::Duration;

use base::EventFd;
use device::FdTable;
use machine::{Machine, MachineError};
use vmm_api::{ApiError, ErrorKind, Event, FreezeConfig, LinkConfig, Reply, VmState};

use super::Vm;
use crate::refusal::{from_machine, refuse};
use crate::request_fds::all_used;

const NO_SERVERS: &str = "only a guest that owns its CPUs can be frozen, or enter a frozen one: make the VM with a `reservation` (class `bare`)";

/// What a request is answered with.
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    pub(crate) fd: Option<OwnedFd>,
}

impl From<Reply> for Answer {
    fn from(reply: Reply) -> Self {
        Self { reply, fd: None }
    }
}

impl Vm {
    /// What becomes readable when the VM was to freeze, and has, or could not.
    pub(crate) fn frozen_event(&self) -> Option<&EventFd> {
        self.machine.as_ref().map(Machine::frozen_event)
    }

    /// What has come of freezing it, for its driver, after that event.
    pub(crate) fn look_at_freezing(&mut self) -> Option<Event> {
        self.frozen_event()?.consume();
        self.follow_freezing();
        let machine = self.machine.as_ref()?;
        if let Some(why) = machine.take_freeze_refusal() {
            log::warn!("the VM could not be frozen when its guest waited: {why}");
            return Some(Event::NotFrozen(why));
        }
        (self.state == VmState::Frozen).then_some(Event::Frozen)
    }

    /// The vCPU's thread freezes it, when its guest says so.
    pub(crate) fn follow_freezing(&mut self) {
        if self.state == VmState::Running && self.is_frozen() {
            self.state = VmState::Frozen;
            // With its reservation: its CPU is Linux's when nobody has that any more.
            self.engine = None;
        }
    }

    fn is_frozen(&self) -> bool {
        self.machine.as_ref().is_some_and(Machine::is_frozen)
    }

    /// Refuses what a frozen VM cannot do.
    pub(super) fn not_frozen(&self) -> Result<(), ApiError> {
        match self.is_frozen() {
            true => Err(from_machine(&MachineError::Frozen)),
            false => Ok(()),
        }
    }

    /// Refuses what one cannot do that is frozen or will be: what comes to its bus from now on its guest might never see.
    pub(super) fn is_no_server(&self) -> Result<(), ApiError> {
        match self.machine.as_ref().is_some_and(Machine::is_server) {
            true => Err(from_machine(&MachineError::Frozen)),
            false => Ok(()),
        }
    }

    /// Whether its engine has servers; one that is frozen has no engine any more.
    fn has_servers(&self) -> Result<(), ApiError> {
        self.its_machine()?;
        match &self.engine {
            Some(engine) if !engine.has_servers() => Err(refuse(ErrorKind::Host, NO_SERVERS)),
            _ => Ok(()),
        }
    }

    pub(super) fn freeze(&mut self, config: FreezeConfig) -> Result<Answer, ApiError> {
        config.validate().map_err(|error| refuse(ErrorKind::Invalid, error))?;
        self.has_servers()?;
        let Some(machine) = self.machine.as_mut().filter(|machine| machine.end().is_none()) else {
            return Err(refuse(ErrorKind::WrongState, "the guest has ended: freeze another VM"));
        };
        let budget = Duration::from_micros(config.budget_us.into());
        let fd = machine.freeze(budget).map_err(|error| from_machine(&error))?;
        self.follow_freezing();
        let reply = match fd {
            Some(_) => Reply::Frozen,
            None => Reply::Freezing,
        };
        Ok(Answer { reply, fd })
    }

    pub(super) fn link(&mut self, config: LinkConfig, fds: Vec<OwnedFd>) -> Result<(), ApiError> {
        config.validate().map_err(|error| refuse(ErrorKind::Invalid, error))?;
        self.has_servers()?;
        let mut fds = FdTable::new(fds);
        let server = config.server.map(|server| fds.take(server)).transpose();
        let server = server.map_err(|error| refuse(ErrorKind::Invalid, error))?;
        all_used(&fds)?;
        let Some(machine) = self.machine.as_mut().filter(|machine| machine.end().is_none()) else {
            return Err(refuse(ErrorKind::WrongState, "the guest has ended: link another VM"));
        };
        // What was written of it is without the link.
        self.written = None;
        machine.link(config.index, server).map_err(|error| from_machine(&error))
    }
}

#[cfg(test)]
mod tests {
    use vmm_api::{FdRef, Request};

    use super::*;

    fn refused(request: Request, fds: Vec<OwnedFd>) -> ApiError {
        let refused = Vm::new().handle(vmm_api::VERSION, request, fds);
        refused.map(|answer| answer.reply).unwrap_err()
    }

    #[test]
    fn what_cannot_be_is_told_before_there_is_a_vm_and_the_rest_needs_one() {
        let freeze = |budget_us| Request::Freeze(FreezeConfig { budget_us });
        let link = |index, server| Request::Link(LinkConfig { index, server });
        for (request, kind, words) in [
            (freeze(0), ErrorKind::Invalid, "give 100 to 10000000"),
            (freeze(100), ErrorKind::WrongState, "there is no VM"),
            (link(4, None), ErrorKind::Invalid, "0 to 3"),
            (link(0, Some(FdRef(0))), ErrorKind::WrongState, "there is no VM"),
        ] {
            let error = refused(request.clone(), Vec::new());
            assert_eq!(error.kind, kind, "{request:?}: {error}");
            assert!(error.message.contains(words), "{request:?}: {error}");
        }
    }
}
