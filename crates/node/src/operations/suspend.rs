//! A sandbox that is suspended: its machine is saved in its directory and ends, and another goes on from there when somebody wants it.
//! Until then it takes nothing of the host but space on its disk. Its guest notices no more than a pause, and a step of its clock.
//!
//! ```text
//!  suspend: held ─► commands frozen ─► vCPUs paused ─► state, memory ─► on the disk, with its disk ─► VMM ends ─► suspended
//!                                       (whatever fails until here: it goes on)  └ from here on it is suspended, also without this daemon
//!  resume:  VMM ─► restored ─► what was saved is spent ─► vCPUs run ─► re-identified, thawed ─► runs
//!             └ what fails: suspended as before ┘ └ from here on it goes on with this machine, or has exited
//! ```
//! Both moments from which there is no way back are on the disk before anything follows from them: a machine that has run on must never
//! be put back to its memory of before, as its disk is not that of before.

use std::sync::Arc;

use base::points;
use node_api::{Ended, EventKind, State};
use observe::span::span;

use crate::guest::reidentify::Reidentification;
use crate::node::Node;
use crate::operations::admission::comes_by;
use crate::operations::detach_for::OnDevices;
use crate::operations::snapshot::can_be_saved;
use crate::operations::stages::ToRestore;
use crate::resources::space::{self, LEAST};
use crate::resources::{limits, volume_shares};
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::saved::snapshots::{self, Begun, Place};
use crate::store::operation::Operation;
use crate::store::records;
use crate::store::remove::remove_directory;
use crate::vmm::line::Line;
use crate::vmm::vm::Vm;
use crate::{Error, clock};

/// What a suspended sandbox goes on from, in its directory.
const SAVED: &str = "suspended";

impl Node {
    /// Saves a sandbox and ends its machine.
    pub(crate) fn suspend(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        let _operation = self.turn(entry)?;
        self.suspend_now(entry)
    }

    /// The same for who has its turn already.
    pub(crate) fn suspend_now(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        let stored = entry.stored();
        let sandbox = &stored.sandbox;
        let vm = entry.vm_for(Verb::Suspend)?;
        if !sandbox.config.detach {
            return Err(Error::Invalid(format!(
                "sandbox {} cannot be suspended: it ends with the `basalt run` that started it; run one with --detach",
                sandbox.name
            )));
        }
        let refused = |why: &str| Error::Invalid(format!("sandbox {} cannot be suspended: {why}", sandbox.name));
        can_be_saved(&stored).map_err(|error| match error {
            Error::NotToBeKept { why, .. } => refused(&why),
            other => other,
        })?;
        if self.refuse_devices(entry, OnDevices::Refuse).is_err() {
            return Err(refused(
                "it has devices of the host's, whose state stays on them; detach them first with `basalt device detach`",
            ));
        }
        let directory = self.sandbox_paths(entry).directory;
        // How much of its memory has to be written is known when it is.
        space::require(&directory, LEAST, "suspending a sandbox")?;
        self.prepare_accelerator(sandbox)?;
        // The way back needs no descriptor that could be missing then.
        let line = vm.line()?;
        self.forget_suspended(entry)?;
        let begun = Begun::new(&directory)?;
        self.suspend_in_turn(entry, (&vm, line), begun)
    }

    fn suspend_in_turn(&self, entry: &Arc<Entry>, (vm, line): (&Arc<Vm>, Line), begun: Begun) -> Result<(), Error> {
        self.update(entry, |stored| {
            stored.was_suspended = true;
            stored.operation = Some(Operation::Suspend { is_saved: false });
        })?;
        if let Err(error) = self.save_to_suspend(entry, vm, begun) {
            let gone_on = self.go_on_after(Some(&error), vm, line);
            let undone = Error::first_of(gone_on, self.forget_suspended(entry));
            return Err(error.after_undo(self.held_no_more(entry, undone)));
        }
        self.carry_out(entry, || {
            let _span = span("its VMM ends");
            self.points.at(points::SUSPEND_SAVED);
            self.end_for_another(entry, vm)?;
            self.points.at(points::SUSPEND_ENDED);
            Ok(())
        })
    }

    /// When this is done, a sandbox whose machine is gone is suspended, also after a power failure.
    fn save_to_suspend(&self, entry: &Entry, vm: &Vm, begun: Begun) -> Result<(), Error> {
        let stored = entry.stored();
        self.save_machine(vm, &stored, &begun.place)?;
        self.save_accelerator(&stored, &begun.place)?;
        {
            let _span = span("memory and disk reach the disk");
            begun.sync()?;
            if stored.sandbox.config.resources.disk.is_some() {
                records::sync_file(&self.sandbox_paths(entry).disk())?;
            }
        }
        self.points.at(points::SUSPEND_WRITTEN);
        if !begun.save_as(SAVED)? {
            let path = self.suspended(entry).directory().display().to_string();
            return Err(Error::Invalid(format!("{path} is there already: remove it")));
        }
        self.note_for_good(
            entry,
            Operation::Suspend { is_saved: false },
            Operation::Suspend { is_saved: true },
        )
    }

    /// Notes a moment from which there is no way back, on the disk. If that fails it was not that moment.
    fn note_for_good(&self, entry: &Entry, before: Operation, now: Operation) -> Result<(), Error> {
        let _span = span("record reaches the disk");
        let was = entry.stored().sandbox;
        self.update(entry, |stored| {
            // Somebody may have ended it meanwhile.
            if stored.operation.as_ref() == Some(&before) {
                stored.operation = Some(now.clone());
                if now == (Operation::Resume { is_spent: true }) {
                    // Whatever comes now, it has this machine, and is stopped like any other that runs.
                    stored.sandbox.state = State::Running;
                    stored.begins_time(clock::now_ns());
                }
            }
        })?;
        let stored = entry.stored();
        if stored.operation != Some(now) {
            let name = stored.sandbox.name;
            return Err(Error::Invalid(format!(
                "sandbox {name} was ended by somebody meanwhile"
            )));
        }
        self.store.reaches_disk(&stored).map_err(|error| {
            let taken_back = self.note_change(entry, |stored| {
                stored.operation = Some(before.clone());
                (stored.sandbox.state, stored.sandbox.ends_ns) = (was.state, was.ends_ns);
            });
            error.after_undo(taken_back)
        })
    }

    /// Lets a suspended sandbox go on, in a machine like the one that it had.
    pub(crate) fn resume_suspended(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        let _operation = self.turn(entry)?;
        let stored = entry.stored();
        let sandbox = &stored.sandbox;
        match sandbox.state {
            State::Suspended => (),
            // Somebody else has had the same wish.
            State::Running => return Ok(()),
            _ => return Verb::Unpause.check(sandbox),
        }
        // What can fail without a machine fails before there is one.
        limits::check(&sandbox.config, self.cgroups.as_ref())?;
        self.image_of(&stored)?;
        drop(volume_shares::open_all(
            &sandbox.config,
            &self.volumes,
            &self.sandboxes,
        )?);
        let promise = self.admit_again("resume", entry, comes_by(&stored))?;
        self.update(entry, |stored| {
            stored.operation = Some(Operation::Resume { is_spent: false })
        })?;
        entry.promise(promise);
        self.carry_out(entry, || self.resume_in_turn(entry))?;
        self.events.tell(EventKind::Resume, &entry.stored().sandbox);
        self.follow_size(entry);
        Ok(())
    }

    fn resume_in_turn(&self, entry: &Entry) -> Result<(), Error> {
        let place = self.suspended(entry);
        let mut restored =
            ToRestore::launch(self, entry, &place)?.restore(self, entry, &place, Reidentification::later())?;
        restored.has_accelerator(self, entry)?;
        self.points.at(points::RESUME_RESTORED);
        self.note_for_good(
            entry,
            Operation::Resume { is_spent: false },
            Operation::Resume { is_spent: true },
        )?;
        self.points.at(points::RESUME_SPENT);
        restored.go_on(self, entry, &place)?.runs(self, entry)?;
        if let Err(error) = self.forget_suspended(entry) {
            log::warn!(
                "what sandbox {} has gone on from stays in its directory: {error}",
                entry.id
            );
        }
        Ok(())
    }

    /// Gives up what a suspended sandbox has in its memory: it has exited. For who has its turn.
    pub(crate) fn end_suspended(&self, entry: &Entry) -> Result<(), Error> {
        // What it was to go on from goes when nothing says any more that it is to.
        self.exited(entry, Ended::Stopped)?;
        self.forget_suspended(entry)?;
        self.remove_if_wanted(entry)
    }

    pub(crate) fn suspended(&self, entry: &Entry) -> Place {
        Place::new(&self.sandbox_paths(entry).directory, SAVED)
    }

    /// Removes what was saved, or begun to be.
    pub(crate) fn forget_suspended(&self, entry: &Entry) -> Result<(), Error> {
        let directory = self.sandbox_paths(entry).directory;
        remove_directory(self.suspended(entry).directory())?;
        snapshots::clean(&directory).map_err(Error::file("clean", &directory))
    }
}
