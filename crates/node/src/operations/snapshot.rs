//! Taking a snapshot: the sandbox is held still, saved, and let go on.
//!
//! ```text
//!  record ─► held ─► commands frozen ─► vCPUs paused ─► state, memory ─► disk ─┐
//!                                                                             │  (whatever failed before)
//!  named ◄── on the disk ◄── held no more ◄── re-identified, commands thawed ◄── vCPUs resumed
//! ```
//! That it is held stands in the database first. Whoever finds it so, the next daemon too, lets it go on; of a snapshot that
//! has no name by then nothing stays.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agent_api::{Connection, Reidentify};
use base::points;
use node_api::{Sandbox, Snapshot, VolumeMount, VolumeSource};
use observe::span::span;
use vmm_api::{VmState, VmmClient};

use crate::deadline_stream::Timed;
use crate::guest::reidentify::Reidentification;
use crate::node::Node;
use crate::operations::detach_for::{Guest, OnDevices};
use crate::resources::space::{self, LEAST};
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::saved::disk;
use crate::saved::memory_files;
use crate::saved::snapshots::{Begun, Place, Record};
use crate::saved::{self, checksums};
use crate::store::database::{CameZeroed, Stored};
use crate::store::operation::Operation;
use crate::vmm::line::Line;
use crate::vmm::vm::{self, Vm};
use crate::{Error, clock};

/// Everything that a snapshot needs besides the machine.
struct ToSave {
    record: Record,
    /// The way back needs no descriptor that could be missing then.
    line: Line,
    begun: Begun,
}

impl Node {
    /// Saves a sandbox as it is now, but for devices of the host's.
    pub(crate) fn make_snapshot(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        name: Option<&str>,
        on: OnDevices,
    ) -> Result<Snapshot, Error> {
        let _operation = self.turn(entry)?;
        let stored = entry.stored();
        can_be_saved(&stored)?;
        let vm = entry.vm_for(Verb::Snapshot)?;
        let name = self.snapshots.name_for(name, &stored.sandbox.name)?;
        self.refuse_devices(entry, on)?;
        let to_save = self.begin_snapshot(entry, &vm, name)?;
        self.detach_for(entry, Guest::LetsGo)?;
        let made = self.snapshot_in_turn(entry, &vm, to_save);
        self.return_devices(entry, made, |made| format!("snapshot `{}` is taken", made.name))
    }

    /// What can fail without the guest fails before that notices anything, or loses its devices.
    fn begin_snapshot(&self, entry: &Entry, vm: &Vm, name: String) -> Result<ToSave, Error> {
        let stored = entry.stored();
        let sandbox = &stored.sandbox;
        let record = Record {
            snapshot: Snapshot {
                name,
                created_ns: clock::now_ns(),
                sandbox: sandbox.id.clone(),
                sandbox_name: sandbox.name.clone(),
                config: sandbox.config.clone(),
                digest: sandbox.digest.clone(),
                programs: self.hashes.of(&self.config, sandbox),
                bytes: 0,
                damaged: None,
            },
            command: stored.command.clone(),
            networked: stored.networked,
            share_slots: stored.share_slots,
        };
        self.prepare_accelerator(sandbox)?;
        let line = vm.line()?;
        let disk = self.sandbox_paths(entry).disk();
        // How much of its memory has to be written is known when it is.
        let needed = disk::copy_takes(&disk, self.snapshots.directory()).bytes() + LEAST.bytes();
        space::require(self.snapshots.directory(), base::ByteSize(needed), "a snapshot")?;
        let begun = self.snapshots.begin(&record)?;
        self.points.at(points::SNAPSHOT_BEGUN);
        Ok(ToSave { record, line, begun })
    }

    fn snapshot_in_turn(self: &Arc<Self>, entry: &Arc<Entry>, vm: &Vm, to_save: ToSave) -> Result<Snapshot, Error> {
        let ToSave { record, line, begun } = to_save;
        let stored = entry.stored();
        let sandbox = &stored.sandbox;
        self.update(entry, |stored| stored.operation = Some(Operation::Snapshot))?;
        self.points.at(points::SNAPSHOT_HELD);
        let saved = self.save_all(vm, &stored, &begun.place);
        // The memory of a guest that owns its CPUs stays where it is.
        if saved.is_ok()
            && !sandbox.config.resources.class.is_bare()
            && let Err(error) = self.rebase(vm, entry, &begun.place)
        {
            log::warn!("the next snapshot of sandbox {} will be a whole one: {error}", entry.id);
        }
        let gone_on = self
            .go_on_after(saved.as_ref().err(), vm, line)
            .inspect_err(|error| log::error!("sandbox {} stays paused: {error}", entry.id));
        if let Err(error) = saved {
            // It takes room that the database may need.
            drop(begun);
            return Err(error.after_undo(self.held_no_more(entry, gone_on)));
        }
        self.held_no_more(entry, gone_on)?;
        {
            let _span = span("checksums");
            self.sum_new_memory(entry, &begun.place);
        }
        {
            let _span = span("snapshot reaches the disk");
            begun.sync()?;
        }
        self.points.at(points::SNAPSHOT_WRITTEN);
        if !begun.save_as(&record.snapshot.name)? {
            return Err(Error::SnapshotTaken(record.snapshot.name));
        }
        self.points.at(points::SNAPSHOT_KEPT);
        if sandbox.config.resources.disk.is_some() || sandbox.config.accelerator.is_some() {
            self.sum_later(&self.snapshots.place(&record.snapshot.name), &record.snapshot);
        }
        self.inspect_snapshot(&record.snapshot.name)
    }

    /// All snapshots, the oldest first.
    pub(crate) fn list_snapshots(&self) -> Result<Vec<Snapshot>, Error> {
        self.snapshots.list(self.templates.counted())
    }

    /// One of them, with its size.
    pub(crate) fn inspect_snapshot(&self, name: &str) -> Result<Snapshot, Error> {
        self.snapshots.inspect(name, self.templates.counted())
    }

    /// Removes one; sandboxes that were cloned of it go on.
    pub(crate) fn remove_snapshot(&self, name: &str) -> Result<(), Error> {
        self.snapshots.remove(name, || self.points.at(points::SNAPSHOT_HIDDEN))
    }

    /// It goes on, or is to be let go on later.
    pub(crate) fn held_no_more(&self, entry: &Entry, gone_on: Result<(), Error>) -> Result<(), Error> {
        let rests = gone_on.and_then(|()| self.note_change(entry, |stored| stored.operation = None));
        self.set_interrupted(entry, rests.is_err() && entry.stored().is_held());
        rests
    }

    /// Makes the checksums of memory that was just written and is in the page cache, before anybody can clone of it. They are a safety
    /// net: a snapshot is none the worse without, and gets them by `basalt snapshot verify`.
    fn sum_new_memory(&self, entry: &Entry, place: &Place) {
        let directory = place.directory();
        let made = checksums::make_newest(directory)
            // The sandbox's next snapshot has this one's files.
            .and_then(|()| memory_files::share_sums(directory, &self.sandbox_paths(entry).directory));
        if let Err(error) = made {
            log::warn!("a snapshot of sandbox {} has no checksums: {error}", entry.id);
        }
    }

    /// Everything that is done while it is held.
    pub(crate) fn save_all(&self, vm: &Vm, stored: &Stored, place: &Place) -> Result<(), Error> {
        self.save_machine(vm, stored, place)?;
        self.save_accelerator(stored, place)?;
        if stored.sandbox.config.resources.disk.is_some() {
            let _span = span("disk copied");
            let from = self.paths.sandbox(&stored.sandbox.id).disk();
            let limit = self.config.limits.boot;
            let target = place.create(&place.disk())?;
            disk::copy_until(&from, target, Some(Instant::now() + limit)).map_err(|error| match error.kind() {
                io::ErrorKind::TimedOut => Error::NotToBeKept {
                    name: stored.sandbox.name.clone(),
                    why: format!(
                        "its disk, for which it stands still, was not copied within {limit:?}: have the state directory on a file \
                         system with reflinks (XFS, btrfs), or write less to the disk"
                    ),
                },
                _ => Error::file("copy", &from)(error),
            })?;
        }
        self.points.at(points::SNAPSHOT_DISK);
        Ok(())
    }

    /// Has the server of its accelerator, if it has one, do what takes time before anything stands still.
    pub(crate) fn prepare_accelerator(&self, sandbox: &Sandbox) -> Result<(), Error> {
        if sandbox.config.accelerator.is_none() {
            return Ok(());
        }
        if let Some(why) = &sandbox.accelerator_ended {
            return Err(saved::accelerator::refused(&sandbox.name, why));
        }
        let _span = span("accelerator prepared");
        let socket = self.paths.sandbox(&sandbox.id).accelerator_save();
        saved::accelerator::prepare(&sandbox.name, &socket, self.config.limits.boot)
    }

    /// What is on its accelerator, if it has one.
    pub(crate) fn save_accelerator(&self, stored: &Stored, place: &Place) -> Result<(), Error> {
        let sandbox = &stored.sandbox;
        let Some(accelerator) = &sandbox.config.accelerator else {
            return Ok(());
        };
        let _span = span("accelerator's state");
        let socket = self.paths.sandbox(&sandbox.id).accelerator_save();
        let path = place.accelerator();
        let file = place.create(&path)?;
        let limit = self.config.limits.boot + space::time_for(accelerator.most_saved());
        saved::accelerator::save((&sandbox.name, accelerator), &socket, (&file, &path), limit)
    }

    /// Its machine alone.
    pub(crate) fn save_machine(&self, vm: &Vm, stored: &Stored, place: &Place) -> Result<(), Error> {
        const FREEZING: &str = "its commands were frozen for a snapshot";
        {
            let _span = span("commands frozen");
            let mut agent = vm.agent()?;
            let frozen = agent
                .set_read_timeout(Some(self.config.limits.boot))
                .and_then(|()| agent.freeze())
                // A clone would deal with the end of a connection that is there still.
                .and_then(|()| agent.hang_up());
            frozen.map_err(|error| vm.diagnose(FREEZING, error))?;
        }
        self.points.at(points::SNAPSHOT_FROZEN);
        {
            let _span = span("VM paused");
            vm.ask("it was paused for a snapshot", VmmClient::pause)?;
        }
        self.points.at(points::SNAPSHOT_PAUSED);
        {
            let _span = span("state and memory");
            self.save_memory(vm, stored, place)?;
        }
        self.points.at(points::SNAPSHOT_SAVED);
        Ok(())
    }

    /// Has state and memory written: what has changed beside the files that the machine is mapped from, if it is.
    fn save_memory(&self, vm: &Vm, stored: &Stored, place: &Place) -> Result<(), Error> {
        let directory = place.directory();
        memory_files::share(&self.paths.sandbox(&stored.sandbox.id).directory, directory)?;
        let base = memory_files::open(directory)?;
        let state = place.create(&place.state())?;
        let memory = place.create(&memory_files::new(directory))?;
        let below: Vec<_> = base.iter().map(AsFd::as_fd).collect();
        let written = vm.ask_within(self.snapshot_limit(stored), "its state was written", |client| {
            client.snapshot(state.as_fd(), memory.as_fd(), &below)
        })?;
        if written.files != base.len() + 1 {
            memory_files::remove(directory)?;
        }
        memory_files::name_new(directory)
    }

    /// Has a paused machine go on from the files that it was just written to, so that the next snapshot of it has what changes
    /// from here on.
    fn rebase(&self, vm: &Vm, entry: &Entry, place: &Place) -> Result<(), Error> {
        let _span = span("memory mapped from the snapshot");
        let mut files = memory_files::open(place.directory())?;
        let Some(newest) = files.pop() else { return Ok(()) };
        vm.ask("its memory was mapped from the snapshot", |client| {
            client.rebase(newest.as_fd())
        })?;
        if entry.stored().came_zeroed != CameZeroed::default() {
            self.note_change(entry, |stored| stored.came_zeroed = CameZeroed::default())?;
        }
        memory_files::share(place.directory(), &self.sandbox_paths(entry).directory)
    }

    /// Lets a sandbox go on that was saved, or was not for this reason.
    pub(crate) fn go_on_after(&self, failed: Option<&Error>, vm: &Vm, line: Line) -> Result<(), Error> {
        match failed {
            // It never stood still.
            Some(error) if error.is_agents_refusal() => Ok(()),
            _ => self.let_go_on_by(vm, line, Reidentification::default()),
        }
    }

    /// Lets a sandbox that is held go on, wherever it was stopped. What its kernel had of randomness is in the snapshot, too:
    /// it gets other.
    pub(crate) fn let_go_on(&self, stored: &Stored, vm: &Vm) -> Result<(), Error> {
        let told = match stored.operation {
            Some(Operation::Resume { .. }) => Reidentification::later(),
            _ => Reidentification::default(),
        };
        self.let_go_on_by(vm, vm.line()?, told)
    }

    /// The same by a socket that is there already.
    fn let_go_on_by(&self, vm: &Vm, line: Line, told: Reidentification) -> Result<(), Error> {
        let _span = span("it goes on");
        // It may write on.
        let info = vm.ask_within(
            self.config.limits.boot,
            "it was resumed after a snapshot",
            VmmClient::info,
        )?;
        if info.state == VmState::Paused {
            vm.ask("it was resumed after a snapshot", VmmClient::resume)?;
        }
        self.points.at(points::SNAPSHOT_RESUMED);
        self.reidentify_by(vm, line, told)?;
        self.points.at(points::SNAPSHOT_THAWED);
        Ok(())
    }

    /// Gives a guest what nobody else has, and lets its commands go on; the connection to its agent.
    pub(crate) fn reidentify(&self, vm: &Vm, reidentification: Reidentification) -> Result<Connection<Timed>, Error> {
        self.reidentify_by(vm, vm.line()?, reidentification)
    }

    /// The same by a socket that is there already: it opens no other.
    pub(crate) fn reidentify_by(
        &self,
        vm: &Vm,
        line: Line,
        reidentification: Reidentification,
    ) -> Result<Connection<Timed>, Error> {
        const REIDENTIFYING: &str = "it was given an entropy, a clock, a name, limits and mounts of its own";
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let reidentify = Reidentify {
            clock_ns: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
            entropy: vm::entropy()?,
            identity: reidentification.identity,
            hook_ms: u32::try_from(reidentification.hooks.as_millis()).unwrap_or(u32::MAX),
            thaw: true,
            pids_max: reidentification.own.pids_max,
            tmpfs: reidentification.own.tmpfs,
            shared_directories: reidentification.own.shared_directories,
            restored: reidentification.restored,
            environment: reidentification.environment,
        };
        let reidentified = vm
            .dial_by(line)
            .and_then(|stream| Connection::reidentified(stream, &reidentify, self.config.limits.boot));
        let (agent, _) = reidentified.map_err(|error| vm.diagnose(REIDENTIFYING, error))?;
        Ok(agent)
    }

    /// How long a VMM may take to write a snapshot.
    pub(crate) fn snapshot_limit(&self, stored: &Stored) -> Duration {
        self.config.limits.boot + of_all_memory(stored)
    }
}

/// How long the slowest disk takes for all of a machine's memory.
pub(crate) fn of_all_memory(stored: &Stored) -> Duration {
    space::time_for(stored.sandbox.config.resources.held().bytes())
}

/// Why a machine cannot go on anywhere else.
pub(crate) const STAYS: &str = "its memory is not translated: its guest knows where the host has it, and it can go on nowhere else; \
     run one with --memory-mode translated, and copy files with `basalt cp`";

/// Refuses what has no saved form, before anything is done.
pub(crate) fn can_be_saved(stored: &Stored) -> Result<(), Error> {
    let config = &stored.sandbox.config;
    if !config.resources.memory_mode.is_translated() {
        return Err(Error::NotToBeKept {
            name: stored.sandbox.name.clone(),
            why: STAYS.to_owned(),
        });
    }
    let elsewhere = |volume: &&VolumeMount| matches!(volume.source, VolumeSource::Served(_));
    let Some(volume) = config.volumes.iter().find(elsewhere) else {
        return Ok(());
    };
    Err(Error::NotToBeKept {
        name: stored.sandbox.name.clone(),
        why: format!(
            "its volume {} is served from another machine, where what its guest has open is not part of a snapshot: run one \
             without it, and copy files with `basalt cp`",
            volume.target
        ),
    })
}

#[cfg(test)]
mod tests {
    use node_api::Class;

    use super::*;
    use crate::testing::stored;

    #[test]
    fn what_has_no_saved_form_is_refused_with_the_reason() {
        let mut stored = stored("aaaaaaaaaaaa", "web");
        stored.sandbox.config.volumes = vec!["/srv:/a".parse().unwrap(), "named:/b".parse().unwrap()];
        assert!(can_be_saved(&stored).is_ok());
        let told = |stored: &Stored| can_be_saved(stored).unwrap_err().to_string();
        let served = r#"{"source":{"served":{"directory":"/home/me","address":"127.0.0.1:9","key":"k"}},"target":"/far","read_only":false}"#;
        stored
            .sandbox
            .config
            .volumes
            .push(serde_json::from_str(served).unwrap());
        let why = told(&stored);
        assert!(why.contains("its volume /far is served from another machine"), "{why}");
        stored.sandbox.config.volumes.clear();
        for class in Class::ALL {
            stored.sandbox.config.resources.class = class;
            assert!(can_be_saved(&stored).is_ok());
        }
        stored.sandbox.config.resources.memory_mode = node_api::MemoryMode::Identity;
        let why = told(&stored);
        assert!(why.contains("its memory is not translated"), "{why}");
        assert!(why.contains("--memory-mode translated"), "{why}");
    }
}
