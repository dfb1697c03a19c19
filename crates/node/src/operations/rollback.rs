//! A sandbox that is put back to what it was when a snapshot of it was taken.
//!
//! ```text
//!                 ┌ its machine is mapped from the snapshot, and it has no volumes ─► disk ─► in place ┐
//!  disk copied ───┤                                                                                    ├─► resumed ─► re-identified
//!                 └ any other, or none ─► its VMM ends ─► disk ─► cgroup, VMM, network, sockets ─► restored ┘
//! ```
//! In the first way the VMM, what the host has mapped for the guest, and everything outside of it stay, and a snapshot that is of
//! no use is refused before anything is lost. Whatever fails later leaves a sandbox that has exited, with its own disk.

use std::fs;
use std::sync::Arc;

use base::points;
use node_api::transfer::Kind;
use node_api::{Resources, Sandbox, SandboxConfig, State};
use observe::span::span;
use vmm_api::{ClientError, ErrorKind, VmState, VmmClient};

use crate::Error;
use crate::node::Node;
use crate::operations::clone::another;
use crate::operations::detach_for::{Guest, OnDevices};
use crate::operations::snapshot::STAYS;
use crate::operations::stages::{Started, ToRestore};
use crate::resources::budget::{Changed, Promise, Start, Wish};
use crate::resources::devices::DevicesError;
use crate::resources::{limits, volume_shares};
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::saved::checksums;
use crate::saved::disk::Beside;
use crate::saved::memory_files;
use crate::saved::snapshots::Place;
use crate::store::database::{CameZeroed, Stored};
use crate::store::operation::Operation;
use crate::vmm::launch;
use crate::vmm::line::Line;
use crate::vmm::vm::Vm;

/// Why a sandbox was not put back.
enum Why {
    /// Its machine is not mapped from the snapshot: all is as it was, and there is another way.
    Elsewhere(Error),
    /// All is as it was.
    Refused(Error),
    /// Its machine is gone, or of no use any more.
    Lost(Error),
}

impl Why {
    /// All is as it was, unless that could not be.
    fn after_undo(self, undone: Result<(), Error>) -> Self {
        match (self, undone) {
            (why, Ok(())) => why,
            (Self::Elsewhere(error) | Self::Refused(error) | Self::Lost(error), undone) => {
                Self::Lost(error.after_undo(undone))
            }
        }
    }
}

impl From<Error> for Why {
    fn from(error: Error) -> Self {
        Self::Lost(error)
    }
}

/// Its machine was asked, and is still what it was.
fn refused(error: Error) -> Why {
    let elsewhere = matches!(
        &error,
        Error::RefusedWhile { cause: ClientError::Refused(refusal), .. } if refusal.kind == ErrorKind::WrongState
    );
    match elsewhere {
        true => Why::Elsewhere(error),
        false => Why::Refused(error),
    }
}

impl Node {
    /// Lets a sandbox go on from a snapshot of it, in place of what it is now. No snapshot has devices of the host's.
    pub(crate) fn rollback(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        snapshot: &str,
        on: OnDevices,
    ) -> Result<Started, Error> {
        let _operation = self.turn(entry)?;
        let (place, record) = self.snapshots.get(snapshot)?;
        let sandbox = entry.stored().sandbox;
        if record.snapshot.sandbox != sandbox.id {
            return Err(Error::NotItsSnapshot {
                name: sandbox.name,
                snapshot: record.snapshot.name,
                of: record.snapshot.sandbox_name,
            });
        }
        if on == OnDevices::Refuse && !sandbox.config.devices.is_empty() {
            return Err(DevicesError::StartedWith(sandbox.name).into());
        }
        self.refuse_devices(entry, on)?;
        self.refuse_damaged(&place, &record.snapshot)?;
        let config = holding_what_both_have(&sandbox.config, &record.snapshot.config);
        self.can_be_put_back(entry, &config, &place)?;
        // What it has goes with its VMM, and the next one shall have it.
        let promise = self.admit_again("roll back", entry, Start::Boot)?;
        let wish = Wish::new("roll back", Some(&sandbox.name));
        let promise = Changed::new(promise, &wish, &config, None)?;
        let beside = self.beside(entry, &place)?;
        self.detach_for(entry, Guest::MayKeep)?;
        if sandbox.state == State::Exited {
            // It is started with them, and would have them now.
            let its = &sandbox.config.devices;
            self.update(entry, |stored| stored.detached.clone_from(its))?;
            self.points.at(points::DEVICE_RETURNS);
        }
        let started = self.roll_back_in_turn(entry, (&place, snapshot), (promise, beside), config.resources);
        self.return_devices(entry, started, |_| format!("the rollback to `{snapshot}` is done"))
    }

    /// What can fail without a VM fails before the one that is there is ended, or loses its devices.
    fn can_be_put_back(&self, entry: &Entry, config: &SandboxConfig, place: &Place) -> Result<(), Error> {
        let stored = entry.stored();
        let sandbox = &stored.sandbox;
        if !sandbox.config.resources.memory_mode.is_translated() {
            return Err(Error::NotToBePutBack {
                name: sandbox.name.clone(),
                why: STAYS.to_owned(),
            });
        }
        if !sandbox.config.detach && sandbox.state.has_vm() {
            return Err(Error::Tied(sandbox.name.clone()));
        }
        if sandbox.state != State::Exited {
            entry.vm_for(Verb::Rollback)?;
        }
        limits::check(config, self.cgroups.as_ref())?;
        launch::check_paging(sandbox.config.paging)?;
        self.image_of(&stored)?;
        drop(volume_shares::open_all(
            &sandbox.config,
            &self.volumes,
            &self.sandboxes,
        )?);
        let accelerator_is_whole = sandbox.config.accelerator.is_none() || place.accelerator().exists();
        match accelerator_is_whole && place.is_whole(&sandbox.config.resources) {
            true => Ok(()),
            false => Err(checksums::record_damaged(
                &place.record(),
                "a file beside it is missing",
            )),
        }
    }

    /// Its disk as it was, beside its own, if it has one.
    fn beside(&self, entry: &Entry, place: &Place) -> Result<Option<Beside>, Error> {
        if entry.stored().sandbox.config.resources.disk.is_none() {
            return Ok(None);
        }
        let _span = span("disk copied");
        Beside::new(&place.disk(), &self.sandbox_paths(entry).disk()).map(Some)
    }

    fn roll_back_in_turn(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        (place, snapshot): (&Place, &str),
        (promise, mut disk): (Changed, Option<Beside>),
        resources: Resources,
    ) -> Result<Started, Error> {
        let sandbox = entry.stored().sandbox;
        let vm = match entry.state() {
            State::Exited => None,
            _ => Some(entry.vm_for(Verb::Rollback)?),
        };
        let own_disk = disk.as_ref().map(Beside::inode).transpose()?.flatten();
        self.update(entry, |stored| {
            stored.operation = Some(Operation::Rollback { own_disk });
            stored.sandbox.config.resources = resources;
        })?;
        match self.put_back(entry, vm, promise.promise(), place, disk.as_mut()) {
            Ok(started) => {
                promise.keep();
                self.verify_later(Kind::Snapshot, snapshot, place);
                self.follow_size(entry);
                Ok(started)
            }
            Err(Why::Refused(error) | Why::Elsewhere(error)) => {
                // So that its limits are what they were, too.
                drop(promise);
                let rests = self.note_change(entry, |stored| {
                    stored.operation = None;
                    stored.sandbox.config.resources = sandbox.config.resources.clone();
                });
                let rests = rests.and_then(|()| self.limit_memory(entry));
                Err(error.after_undo(rests))
            }
            Err(Why::Lost(error)) => {
                let undone = self.undo(entry, &error.to_string());
                if undone.is_err() {
                    // Its record says so still, and a machine may be there.
                    promise.keep();
                    // Its own disk may be the one that lies beside.
                    std::mem::forget(disk);
                }
                Err(error.after_undo(undone))
            }
        }
    }

    /// By whichever way there is.
    fn put_back(
        &self,
        entry: &Arc<Entry>,
        vm: Option<Arc<Vm>>,
        promise: Arc<Promise>,
        place: &Place,
        mut disk: Option<&mut Beside>,
    ) -> Result<Started, Why> {
        if let Some(vm) = vm {
            let directory = self.sandbox_paths(entry).directory;
            // Shared directories are a VMM's own, and are given to each once; so is what it shares with its accelerator's server.
            // Memory that is pinned stays what it is.
            let config = entry.stored().sandbox.config;
            let in_place =
                config.volumes.is_empty() && !config.resources.class.is_bare() && config.accelerator.is_none();
            if in_place && memory_files::are_same(place.directory(), &directory).map_err(Why::Refused)? {
                match self.put_back_in_place(entry, &vm, place, disk.as_deref_mut()) {
                    Err(Why::Elsewhere(error)) => log::info!("sandbox {} gets another VMM: {error}", entry.id),
                    result => return result,
                }
            }
            let _span = span("its VMM ends");
            self.end_for_another(entry, &vm)?;
        }
        entry.promise(promise);
        self.points.at(points::ROLLBACK_ENDED);
        disk.map_or(Ok(()), Beside::put)?;
        self.points.at(points::ROLLBACK_DISK);
        self.update(entry, |stored| {
            stored.sandbox.restarts += 1;
            stored.sandbox.config.detach = true;
        })?;
        let restored = ToRestore::launch(self, entry, place)?.restore(self, entry, place, another(None))?;
        Ok(restored.go_on(self, entry, place)?.runs(self, entry)?)
    }

    /// By the VMM that it has. A daemon that dies on the way leaves a sandbox that is being started, which the next one ends.
    fn put_back_in_place(
        &self,
        entry: &Arc<Entry>,
        vm: &Vm,
        place: &Place,
        mut disk: Option<&mut Beside>,
    ) -> Result<Started, Why> {
        let before = entry.stored();
        let line = vm.line().map_err(Why::Refused)?;
        self.limit_memory(entry).map_err(Why::Refused)?;
        let log = fs::metadata(self.sandbox_paths(entry).log()).map_or(0, |metadata| metadata.len());
        self.update(entry, |stored| {
            stored.log_from = log;
            stored.sandbox.state = State::Starting;
            stored.sandbox.restarts += 1;
        })?;
        self.points.at(points::ROLLBACK_BEGUN);
        let machine = disk
            .as_deref_mut()
            .map_or(Ok(()), Beside::put)
            .map_err(Why::Refused)
            .and_then(|()| {
                self.points.at(points::ROLLBACK_DISK);
                self.roll_machine_back(entry, vm, place)
            });
        if let Err(Why::Refused(_) | Why::Elsewhere(_)) = &machine {
            // And nothing else: somebody may have asked for its end meanwhile.
            let as_before = |stored: &mut Stored| {
                stored.log_from = before.log_from;
                stored.sandbox.state = before.sandbox.state;
                stored.sandbox.pause_reason = before.sandbox.pause_reason;
                stored.sandbox.restarts = before.sandbox.restarts;
            };
            let undone = disk.map_or(Ok(()), Beside::put_back);
            let undone = undone.and_then(|()| self.update(entry, as_before));
            machine.map_err(|why| why.after_undo(undone))?;
        } else {
            machine?;
        }
        self.points.at(points::RESTORE_MADE);
        self.go_on_from(vm, line)?;
        let sandbox = self.runs_again(entry)?;
        Ok(Started { sandbox, command: None })
    }

    fn roll_machine_back(&self, entry: &Entry, vm: &Vm, place: &Place) -> Result<(), Why> {
        let _span = span("VM rolled back");
        let (stored, paths) = (entry.stored(), self.sandbox_paths(entry));
        let prepared = || {
            let attachment = self.attachment(&stored)?;
            let image = self.image_of(&stored)?;
            launch::prepare_rollback(
                &self.config,
                &stored,
                &paths,
                self.outside(&image, attachment, None),
                place,
            )
        };
        let (config, fds) = prepared().map_err(Why::Refused)?;
        let rolled = vm.ask_within(self.config.limits.boot, "it was rolled back", |client| {
            client.rollback(config, &fds.borrow())
        });
        match rolled {
            // Nobody finds the new socket before somebody answers there.
            Ok(()) => Ok(launch::take_next_vsock(&paths)?),
            Err(error) => {
                let info = vm.ask("it was not rolled back", VmmClient::info);
                let stands = info.is_ok_and(|info| matches!(info.state, VmState::Running | VmState::Paused));
                Err(if stands { refused(error) } else { Why::Lost(error) })
            }
        }
    }

    /// Everything from a machine that is what it was to one that goes on.
    fn go_on_from(&self, vm: &Vm, line: Line) -> Result<(), Error> {
        {
            let _span = span("VM started");
            vm.ask("it was resumed from a snapshot", VmmClient::resume)?;
        }
        self.points.at(points::RESTORE_RESUMED);
        {
            let _span = span("guest re-identified");
            self.reidentify_by(vm, line, another(None))?;
        }
        self.points.at(points::RESTORE_REIDENTIFIED);
        Ok(())
    }

    /// It runs, and its end is waited for already.
    fn runs_again(&self, entry: &Entry) -> Result<Sandbox, Error> {
        self.update(entry, |stored| {
            stored.rests_as(State::Running);
            // Its VMM has put back what was there before.
            stored.came_zeroed = CameZeroed::default();
            let sandbox = &mut stored.sandbox;
            sandbox.started_ns = Some(crate::clock::now_ns());
        })?;
        self.points.at(points::START_RUNNING);
        let sandbox = entry.stored().sandbox;
        self.events.tell(node_api::EventKind::Start, &sandbox);
        Ok(sandbox)
    }
}

/// A sandbox's configuration until its guest has given back what it had when the snapshot was taken and is not to have now.
fn holding_what_both_have(now: &SandboxConfig, then: &SandboxConfig) -> SandboxConfig {
    let held = now.resources.held().max(then.resources.held());
    SandboxConfig {
        resources: now.resources.holding(held),
        ..now.clone()
    }
}
