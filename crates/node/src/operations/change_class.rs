//! A sandbox that goes on as another class: its machine is saved, its VMM ends, and another with the host's processors as that class
//! has them goes on from there. Its guest notices no more than a pause.
//!
//! ```text
//!  held ─► commands frozen ─► vCPUs paused ─► state, memory ─► VMM ends ─► as the other class: restored ─► re-identified, thawed
//!                                                                  └ which cannot be had: as what it was ─┘
//! ```
//! What is saved lies in the sandbox's directory until a machine runs. A daemon that dies on the way leaves that, and the next one has the
//! sandbox go on as what it was; unless the host has booted again, which ends any machine. From the moment at which the other machine
//! is to run, nothing goes back to what was saved: what its guest did since would be lost from memory and not from the disk.

use std::sync::Arc;

use base::points;
use node_api::{Class, CpuModel, SandboxConfig, State};
use observe::span::span;

use crate::error::words::with_causes;
use crate::guest::reidentify::Reidentification;
use crate::node::Node;
use crate::operations::admission::comes_by;
use crate::operations::detach_for::{Guest, OnDevices, refuse_accelerator};
use crate::operations::snapshot::{STAYS, can_be_saved};
use crate::operations::stages::{Started, ToRestore};
use crate::resources::budget::Changed;
use crate::resources::space::{self, LEAST};
use crate::resources::{limits, volume_shares};
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::saved::snapshots::{self, Begun, Place};
use crate::store::database::Stored;
use crate::store::operation::Operation;
use crate::store::remove::remove_directory;
use crate::vmm::line::Line;
use crate::vmm::vm::Vm;
use crate::{Error, ids};

/// What a sandbox is moved by, in its directory.
const SAVED: &str = "moving";

impl Node {
    /// Lets a sandbox that runs go on as another class.
    pub(crate) fn move_to(self: &Arc<Self>, entry: &Arc<Entry>, class: Class, on: OnDevices) -> Result<Started, Error> {
        let _operation = self.turn(entry)?;
        let stored = entry.stored();
        let sandbox = &stored.sandbox;
        let vm = entry.vm_for(Verb::Move)?;
        if !sandbox.config.detach {
            return Err(Error::Tied(sandbox.name.clone()));
        }
        refuse_accelerator(&stored)?;
        self.refuse_devices(entry, on)?;
        let moved = moved(&stored, class)?;
        limits::check(&moved, self.cgroups.as_ref())?;
        drop(volume_shares::open_all(&moved, &self.volumes, &self.sandboxes)?);
        // How much of its memory has to be written is known when it is.
        space::require(&self.sandbox_paths(entry).directory, LEAST, "a move")?;
        let promise = self.admit_other("move", entry, &moved, Some(comes_by(&stored)))?;
        // The way back needs no descriptor that could be missing then.
        let line = vm.line()?;
        self.detach_for(entry, Guest::LetsGo)?;
        let started = self.move_in_turn(entry, (&vm, line), moved, promise);
        self.return_devices(entry, started, |_| format!("the move to the class {class} is done"))
    }

    fn move_in_turn(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        (vm, line): (&Arc<Vm>, Line),
        moved: SandboxConfig,
        promise: Changed,
    ) -> Result<Started, Error> {
        let (stored, class) = (entry.stored(), moved.resources.class);
        let sandbox = &stored.sandbox;
        let was = Box::new(sandbox.config.clone());
        self.forget_move(entry)?;
        let begun = Begun::new(&self.sandbox_paths(entry).directory)?;
        let saved_at = None;
        self.update(entry, |stored| {
            stored.operation = Some(Operation::Move { was, saved_at })
        })?;
        if let Err(error) = self.save_machine(vm, &stored, &begun.place) {
            // It takes room that the database may need.
            drop(begun);
            let gone_on = self.go_on_after(Some(&error), vm, line);
            return Err(error.after_undo(self.held_no_more(entry, gone_on)));
        }
        let promised = promise.promise();
        let moved = self.carry_out(entry, || {
            let place = self.save_for_move(entry, begun)?;
            {
                let _span = span("its VMM ends");
                self.end_for_another(entry, vm)?;
            }
            entry.promise(promised);
            self.points.at(points::MOVE_ENDED);
            self.go_on_as(entry, moved, &place)
        });
        let moved = moved.or_else(|error| {
            let now = entry.stored().sandbox;
            match (now.state, now.config.resources.class == class) {
                // It went on as that, and only something behind it failed.
                (State::Running, true) => {
                    log::warn!("sandbox {} was moved, but: {error}", entry.id);
                    Ok(Started {
                        sandbox: now,
                        command: None,
                    })
                }
                (State::Running, false) => Err(Error::NotMoved {
                    name: sandbox.name.clone(),
                    class,
                    source: Box::new(error),
                }),
                _ => Err(error),
            }
        });
        if moved.is_ok() {
            promise.keep();
        }
        // As what it was, too, it has another machine.
        self.follow_size(entry);
        moved
    }

    /// What was saved is found by the next daemon, too, from here on, and nothing else of the machine is of use.
    fn save_for_move(&self, entry: &Entry, begun: Begun) -> Result<Place, Error> {
        if !begun.save_as(SAVED)? {
            return Err(Error::Invalid(format!(
                "{} is there, which an earlier move has left: remove it",
                self.saved_for_move(entry).directory().display()
            )));
        }
        let boot = ids::boot()?;
        self.update(entry, |stored| {
            if let Some(Operation::Move { saved_at, .. }) = &mut stored.operation {
                *saved_at = Some(boot);
            }
        })?;
        Ok(self.saved_for_move(entry))
    }

    fn saved_for_move(&self, entry: &Entry) -> Place {
        Place::new(&self.sandbox_paths(entry).directory, SAVED)
    }

    /// By another VMM.
    fn go_on_as(&self, entry: &Entry, config: SandboxConfig, place: &Place) -> Result<Started, Error> {
        self.update(entry, |stored| stored.sandbox.config = config)?;
        // It is the same one, and the only one: nothing of it was used twice, and no hook has anything to mend.
        let restored =
            ToRestore::launch(self, entry, place)?.restore(self, entry, place, Reidentification::default())?;
        // What it does from here on is not in the files any more: nothing goes back to them.
        self.update(entry, |stored| {
            if let Some(Operation::Move { saved_at, .. }) = &mut stored.operation {
                *saved_at = None;
            }
        })?;
        let started = restored.go_on(self, entry, place)?.runs(self, entry)?;
        if let Err(error) = self.forget_move(entry) {
            log::warn!("what sandbox {} was moved by stays in its directory: {error}", entry.id);
        }
        Ok(started)
    }

    /// Removes what was saved, or begun to be.
    pub(crate) fn forget_move(&self, entry: &Entry) -> Result<(), Error> {
        let directory = self.sandbox_paths(entry).directory;
        remove_directory(self.saved_for_move(entry).directory())?;
        snapshots::clean(&directory).map_err(Error::file("clean", &directory))
    }

    /// Takes a move back: a sandbox that still has its machine goes on with it, any other from what was saved, as what it was.
    pub(crate) fn undo_move(&self, entry: &Entry, was: SandboxConfig, saved_at: Option<&str>) -> Result<(), Error> {
        let Some(saved_at) = saved_at else {
            self.let_go_on_if_there(entry)?;
            return self.forget_move(entry);
        };
        self.clear(entry)?;
        if saved_at != ids::boot()? {
            let why = Error::SavedBeforeBoot(entry.stored().sandbox.name);
            return self.give_move_up(entry, was, &why);
        }
        let machine = self.budget.count_machine(&was, comes_by(&entry.stored()));
        entry.promise(Arc::new(machine));
        let back = self.go_on_as(entry, was.clone(), &self.saved_for_move(entry));
        back.map(drop).or_else(|error| {
            log::error!("sandbox {} cannot go on as it was: {}", entry.id, with_causes(&error));
            self.give_move_up(entry, was, &error)
        })
    }

    /// What was saved is of no use: it has exited, as what it was.
    fn give_move_up(&self, entry: &Entry, was: SandboxConfig, why: &Error) -> Result<(), Error> {
        self.clear(entry)?;
        self.forget_move(entry)?;
        self.note_change(entry, |stored| stored.sandbox.config = was.clone())?;
        self.exited(entry, node_api::Ended::Failed(why.to_string()))
    }
}

/// What a sandbox is as another class.
fn moved(stored: &Stored, class: Class) -> Result<SandboxConfig, Error> {
    let mut config = stored.sandbox.config.clone();
    let refused = |why: &str| Error::NotToBeMoved {
        name: stored.sandbox.name.clone(),
        class,
        why: why.to_owned(),
    };
    if config.resources.class == class {
        return Err(refused("it is of that class"));
    }
    if !config.resources.memory_mode.is_translated() {
        return Err(refused(STAYS));
    }
    let engines_differ = config.resources.class.is_bare() != class.is_bare();
    if engines_differ && config.resources.cpu_model != Some(CpuModel::Common) {
        return Err(refused(
            "its guest was shown what not every class has: run it with --cpu-model common, and it can be moved",
        ));
    }
    config.resources.class = class;
    config.validate()?;
    can_be_saved(stored)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stored;

    #[test]
    fn what_every_class_has_can_be_moved() {
        let mut stored = stored("aaaaaaaaaaaa", "web");
        let told = |stored: &Stored, class| moved(stored, class).unwrap_err().to_string();
        assert!(told(&stored, Class::Standard).contains("it is of that class"));
        assert!(told(&stored, Class::Bare).contains("--cpu-model common"));
        let dedicated = moved(&stored, Class::Dedicated).unwrap();
        assert_eq!(dedicated.resources.class, Class::Dedicated);
        stored.sandbox.config.resources.cpu_model = Some(CpuModel::Common);
        assert_eq!(moved(&stored, Class::Bare).unwrap().resources.class, Class::Bare);
        stored.sandbox.config.resources.class = Class::Bare;
        stored.sandbox.config.resources.idle = node_api::Idle::Poll;
        assert!(told(&stored, Class::Standard).contains("--class dedicated or bare"));
        stored.sandbox.config.resources.memory_mode = node_api::MemoryMode::Identity;
        for class in [Class::Standard, Class::Dedicated] {
            assert!(told(&stored, class).contains("its memory is not translated"));
        }
    }
}
