//! Devices of the host's that are detached for an operation that cannot be done with them, and attached again behind it.
//!
//! ```text
//!  record ─► guest lets go ─► VMM closes them ─► snapshot, rollback or move ─► attached again, one after the other ─► record
//! ```
//! They stay the sandbox's own meanwhile: nobody else can have them, also while it has no machine or another one. Which are to come back
//! stands in its record before the first leaves. They come back whether the operation was done or not; a daemon that dies on the way is
//! followed by one that attaches them behind the sandbox's return to rest (`follow_found`), and so does whoever has the sandbox's turn
//! next. Of a sandbox that has no machine any more they are given back as all others are (`exited`). What cannot be attached again is given
//! back, and told: what was asked for is done all the same. Knows no operation.

use std::time::Duration;

use base::PciAddress;
use base::points::{DEVICE_DETACHED, DEVICE_RETURNED, DEVICE_RETURNS};
use node_api::State;
use observe::span::span;
use vmm_api::{FunctionState, VmmClient};

use crate::Error;
use crate::error::words::with_causes;
use crate::node::Node;
use crate::operations::attach::{LetGo, can_have_devices, names};
use crate::resources::devices::DevicesError;
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::store::database::Stored;
use crate::vmm::vm::Vm;

/// What is done about devices that an operation cannot be done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnDevices {
    /// The operation is refused.
    Refuse,
    /// They are detached for it.
    Detach,
}

impl OnDevices {
    /// As it is asked for.
    pub(crate) fn asked(detach_devices: bool) -> Self {
        match detach_devices {
            true => Self::Detach,
            false => Self::Refuse,
        }
    }
}

/// Whether a guest has to let go of devices that are detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guest {
    /// It goes on, and would lose what it writes to them.
    LetsGo,
    /// It is what it was before, and may answer nobody any more.
    MayKeep,
}

/// A machine of another class has its window's memory in another way than the one that was saved.
pub(crate) fn refuse_accelerator(stored: &Stored) -> Result<(), Error> {
    match stored.sandbox.config.accelerator {
        None => Ok(()),
        Some(_) => Err(Error::NotToBeKept {
            name: stored.sandbox.name.clone(),
            why: "it has an accelerator, and goes on in no other class: run a new one with `--class`, and copy files with `basalt cp`".to_owned(),
        }),
    }
}

impl Node {
    /// Refuses an operation for which what a sandbox has of the host's cannot be detached, or is not to be: before anything is made for it.
    pub(crate) fn refuse_devices(&self, entry: &Entry, on: OnDevices) -> Result<(), Error> {
        let its = self.devices.of(&entry.id);
        if its.is_empty() {
            return Ok(());
        }
        let sandbox = entry.stored().sandbox;
        let (devices, is_paused, sandbox) = (names(&its), sandbox.state == State::Paused, sandbox.name);
        match on {
            OnDevices::Refuse => Err(DevicesError::Keeps { devices, sandbox }.into()),
            OnDevices::Detach if is_paused => Err(DevicesError::HeldWhilePaused { devices, sandbox }.into()),
            OnDevices::Detach => Ok(()),
        }
    }

    /// Detaches what a sandbox has of the host's; for who has its turn and has asked [`Node::refuse_devices`], and calls
    /// [`Node::return_devices`] next, whatever becomes of the operation. Where it fails all is as it was.
    pub(crate) fn detach_for(&self, entry: &Entry, guest: Guest) -> Result<(), Error> {
        let its = self.devices.of(&entry.id);
        if its.is_empty() {
            return Ok(());
        }
        let vm = entry.vm_for(Verb::Detach)?;
        let _span = span("devices detached");
        self.update(entry, |stored| stored.detached.clone_from(&its))?;
        self.points.at(DEVICE_RETURNS);
        let taken = self.take_for(entry, &vm, &its, guest);
        taken.map_err(|error| error.after_undo(self.attach_again(entry).map_err(Error::from)))
    }

    fn take_for(&self, entry: &Entry, vm: &Vm, its: &[PciAddress], guest: Guest) -> Result<(), Error> {
        let told = vm.ask("it was asked for its devices", VmmClient::functions)?;
        let mut let_go = LetGo::All;
        for &address in its {
            let name = address.to_string();
            let function = told.functions.iter().find(|function| function.id == name);
            let Some(FunctionState::Present { slot }) = function.map(|function| &function.state) else {
                continue;
            };
            match (self.leave_guest(vm, *slot), guest) {
                (Ok(()), _) => (),
                (Err(error), Guest::MayKeep) => {
                    let_go = LetGo::Unknown;
                    log::warn!(
                        "the guest of sandbox {} did not let go of {address}, which is taken from it: {error}",
                        entry.id
                    );
                }
                (Err(error), Guest::LetsGo) => {
                    let why = error.to_string();
                    return Err(DevicesError::Held { address, why }.into());
                }
            }
        }
        self.take_from_vmm(entry, vm, its, let_go)?;
        self.points.at(DEVICE_DETACHED);
        Ok(())
    }

    /// What came of an operation, with the devices attached again that were detached for it; `done` says what was done.
    pub(crate) fn return_devices<T>(
        &self,
        entry: &Entry,
        made: Result<T, Error>,
        done: impl FnOnce(&T) -> String,
    ) -> Result<T, Error> {
        match (made, self.attach_again(entry)) {
            (Ok(made), Ok(())) => Ok(made),
            (Err(error), Ok(())) => Err(error.after_undo(self.has_come_to_rest(entry))),
            (Ok(made), Err(missing)) => Err(missing.after(&done(&made)).into()),
            (Err(error), Err(missing)) => Err(error.after_undo(Err(missing.into()))),
        }
    }

    /// One that is held still, or has no machine until it goes on, gets its devices from whoever brings it to rest; its asker is told of them.
    fn has_come_to_rest(&self, entry: &Entry) -> Result<(), Error> {
        let stored = entry.stored();
        let goes_on = stored.keeps_devices() || entry.vm().is_some_and(|vm| !vm.wait(Duration::ZERO));
        if stored.detached.is_empty() || !stored.is_held() || !goes_on {
            return Ok(());
        }
        let (devices, sandbox) = (names(&stored.detached), stored.sandbox.name);
        Err(DevicesError::StillDetached { devices, sandbox }.into())
    }

    /// Attaches what an earlier daemon has detached for an operation, of a sandbox that is at rest; for who has its turn. What cannot be
    /// attached is told by an event and the log.
    pub(crate) fn return_left_devices(&self, entry: &Entry) {
        if matches!(entry.state(), State::Running | State::Exited)
            && let Err(missing) = self.attach_again(entry)
        {
            log::warn!("{}", Error::from(missing));
        }
    }

    /// Attaches all that the record says, one by one; those that cannot be are given back, and told.
    fn attach_again(&self, entry: &Entry) -> Result<(), Missing> {
        let stored = entry.stored();
        // Whoever brings it to rest comes here again, and whoever deals with its end gives them back.
        if stored.detached.is_empty() || stored.operation.is_some() {
            return Ok(());
        }
        let Some(vm) = entry.vm().filter(|vm| !vm.wait(Duration::ZERO)) else {
            self.forget_detached(entry);
            return Ok(());
        };
        let _span = span("devices attached again");
        let (mut missing, mut why) = (Vec::new(), Vec::new());
        for (number, &address) in stored.detached.iter().enumerate() {
            if entry.lock().is_to_stop() {
                // Whoever stops it gives them back, and if that fails whoever has its turn next comes here.
                missing.extend_from_slice(&stored.detached[number..]);
                why.push(Error::GivenUp.to_string());
                break;
            }
            let given = self.give_again(entry, &vm, address);
            if given.is_ok() {
                self.points.at(DEVICE_RETURNED);
            }
            let ended = match given.is_err() && self.devices.of(&entry.id).contains(&address) {
                // It could not be given back either: whoever looks after who was left on the way tries again.
                true => {
                    self.set_interrupted(entry, true);
                    Ok(())
                }
                false => self.note_change(entry, |stored| stored.detached.retain(|other| *other != address)),
            };
            if let Err(error) = Error::first_of(given, ended) {
                missing.push(address);
                why.push(with_causes(&error));
            }
        }
        if missing.is_empty() || vm.wait(Duration::ZERO) {
            return Ok(());
        }
        let missing = Missing {
            devices: names(&missing),
            sandbox: stored.sandbox.name,
            why: why.join("; "),
        };
        if !entry.lock().is_to_stop() {
            self.did_not_come(entry, &missing.clone().into());
        }
        Err(missing)
    }

    /// One that has exited gets its devices when it is started.
    fn forget_detached(&self, entry: &Entry) {
        let has_exited = |stored: &Stored| stored.sandbox.state == State::Exited;
        let forgotten = match has_exited(&entry.stored()) {
            true => self.note_change(entry, |stored| {
                if has_exited(stored) {
                    stored.detached.clear();
                }
            }),
            false => Ok(()),
        };
        if let Err(error) = forgotten {
            log::error!(
                "the record of sandbox {} says still that devices come back to it: {error}",
                entry.id
            );
        }
    }

    /// Attaches one, or gives it back.
    fn give_again(&self, entry: &Entry, vm: &Vm, address: PciAddress) -> Result<(), Error> {
        let handed = self.hand_over_again(entry, vm, address);
        handed.map_err(|error| error.after_undo(self.take_devices_back(entry, vm, &[address])))?;
        self.bring(entry, vm, &[address], None).map(drop)
    }

    /// Has its VMM take one over, which may have what an earlier daemon came to.
    fn hand_over_again(&self, entry: &Entry, vm: &Vm, address: PciAddress) -> Result<(), Error> {
        let stored = entry.stored();
        can_have_devices(&stored)?;
        let claimed = self.devices.claim(&entry.id, &[address])?.functions;
        let told = vm.ask("it was asked for its devices", VmmClient::functions)?;
        let name = address.to_string();
        let function = told.functions.iter().find(|function| function.id == name);
        match function.map(|function| &function.state) {
            Some(FunctionState::Present { .. } | FunctionState::Mapping) => return Ok(()),
            Some(FunctionState::Failed(_) | FunctionState::Leaving) => {
                self.take_from_vmm(entry, vm, &claimed, LetGo::Unknown)?;
            }
            None => (),
        }
        self.hand_over(entry, vm, &claimed)
    }
}

/// Devices that could not be attached again.
#[derive(Clone, Debug)]
struct Missing {
    devices: String,
    sandbox: String,
    why: String,
}

impl Missing {
    /// Behind something that was done.
    fn after(self, done: &str) -> DevicesError {
        let Self { devices, sandbox, why } = self;
        let done = match done {
            "" => String::new(),
            done => format!("{done}, but "),
        };
        DevicesError::NotReturned {
            done,
            devices,
            sandbox,
            why,
        }
    }
}

impl From<Missing> for Error {
    fn from(missing: Missing) -> Self {
        missing.after("").into()
    }
}
