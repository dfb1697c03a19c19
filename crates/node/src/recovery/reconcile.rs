//! What a daemon does when it starts: what the one before it has begun is finished or taken back, VMs that run are taken
//! over, and what belongs to nobody is set aside. The kernel's view counts, not the database's.
//!
//! Nothing is deleted here but what somebody asked to have removed, what was being made and nobody was told of, and what holds no
//! data by its nature: sockets, empty cgroups, places in the network, and directories that were renamed to be removed.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use node_api::recovery::{Outcome, Subject};
use node_api::sandbox::Process;
use node_api::{Ended, State};
use vmm_api::{VmState, VmmClient};

use crate::Error;
use crate::node::Node;
use crate::operations::start::parse_ports;
use crate::resources::held::{self, Known, unless_it_stays};
use crate::sandbox::entry::{Entry, Unsettled};
use crate::store::Found;
use crate::store::database::Stored;
use crate::store::operation::Operation;
use crate::store::paths::names;
use crate::store::remove::remove_directory;
use crate::store::unfinished::UNFINISHED;
use crate::vmm::process;
use crate::vmm::vm::{Vm, pause_reason};

const RESTARTED: &str = "the daemon ended while the sandbox was being started";
const VMM_GONE: &str = "its VMM ended while no daemon ran, without a word of its command's end";

impl Node {
    /// Puts everything right.
    pub(crate) fn reconcile(self: &Arc<Self>, found: Found) -> Result<(), Error> {
        for stored in found.known {
            let entry = self.enter(stored);
            if let Err(error) = self.reconcile_one(&entry) {
                log::error!("sandbox {} cannot be put right: {error}", entry.id);
                self.set_interrupted(&entry, true);
            }
            self.sweep(&entry);
        }
        for stored in found.homeless {
            let entry = self.enter(stored);
            if let Err(error) = self.reconcile_homeless(&entry) {
                log::error!("sandbox {} cannot be put right: {error}", entry.id);
            }
        }
        self.deal_with_orphans(&found.orphans)
    }

    /// Removes what operations have left that are over.
    fn sweep(&self, entry: &Entry) {
        let (stored, directory) = (entry.stored(), self.sandbox_paths(entry).directory);
        if entry.lock().gone || stored.operation.is_some() {
            return;
        }
        // What one that has exited was suspended with stays until it is started or removed: its record may be of before that.
        let runs_on = matches!(stored.sandbox.state, State::Running | State::Paused);
        let swept = crate::saved::disk::clean_beside(&self.sandbox_paths(entry).disk())
            .and_then(|()| self.forget_move(entry))
            .and_then(|()| match runs_on {
                true => self.forget_suspended(entry),
                false => Ok(()),
            });
        if let Err(error) = swept {
            log::warn!("what an operation has left in {} stays: {error}", directory.display());
        }
    }

    fn enter(&self, stored: Stored) -> Arc<Entry> {
        let entry = Entry::new(stored);
        self.entries().insert(entry.id.clone(), Arc::clone(&entry));
        // Whatever has ended meanwhile gives it back.
        self.count(&entry);
        entry
    }

    /// One without a directory. A removal takes that away before the database forgets the sandbox, so there is nothing to remove;
    /// and nothing is, because what has its number in the network or its process's may be another one's by now.
    fn reconcile_homeless(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        match self.adopt(entry) {
            Ok(true) => {
                let why = "its directory is gone, and its VMM runs on without it";
                self.store
                    .found_sandbox(&entry.stored().sandbox.name, Outcome::LeftAlone, why);
                return self.go_on(entry);
            }
            Ok(false) => (),
            Err(error) => log::info!("the VMM of sandbox {} is not taken over: {error}", entry.id),
        }
        entry.lock().vm = None;
        let stored = entry.stored();
        if stored.is_acknowledged() && stored.sandbox.state != State::Removing {
            let why =
                "the database had it, and there is no directory of it: it was removed, or its disk is not mounted";
            self.store.found_sandbox(&stored.sandbox.name, Outcome::Forgotten, why);
        }
        self.forget(entry)
    }

    fn reconcile_one(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        let stored = entry.stored();
        match stored.under_way() {
            _ if stored.building => return self.abandon(entry),
            // Nobody was told that it runs.
            _ if !stored.is_acknowledged() => return self.destroy(entry),
            Some(Operation::Remove) => return self.destroy(entry),
            Some(
                Operation::Start
                | Operation::Rollback { .. }
                | Operation::Suspend { is_saved: true }
                | Operation::Resume { is_spent: false },
            ) => return self.undo(entry, RESTARTED),
            Some(Operation::Move { saved_at: Some(_), .. }) => {
                self.undo(entry, RESTARTED)?;
                // It goes on as what it was, and its devices come back.
                self.follow_found(entry);
                return Ok(());
            }
            Some(
                Operation::Move { .. }
                | Operation::Snapshot
                | Operation::Suspend { .. }
                | Operation::Resume { .. }
                | Operation::Stop,
            )
            | None => (),
        }
        match stored.sandbox.state {
            State::Exited | State::Suspended => match self.adopt(entry) {
                // Only an older copy of the database has forgotten that it was started again.
                Ok(true) => {
                    self.count(entry);
                    self.go_on(entry)
                }
                Ok(false) => self.rests_without(entry),
                Err(error) => {
                    log::info!("what is left of the VMM of sandbox {} is ended: {error}", entry.id);
                    self.rests_without(entry)
                }
            },
            _ => match self.adopt(entry) {
                Ok(true) => self.go_on(entry),
                Ok(false) => self.missed_end(entry),
                Err(error) => {
                    self.note_change(entry, |stored| stored.begins(Operation::Stop))?;
                    self.settle_as(entry, Ended::Failed(format!("it could not be taken over: {error}")))
                }
            },
        }
    }

    /// It has exited, and nothing of a machine, nor anything that was done with it, is left.
    pub(crate) fn rests_without(&self, entry: &Entry) -> Result<(), Error> {
        let cleared = self.clear(entry);
        if cleared.is_err() {
            let (vmm, ended) = (entry.stored().sandbox.vmm, None);
            self.set_unsettled(entry, Unsettled { vmm, ended });
            return cleared;
        }
        let stored = entry.stored();
        match stored.operation.is_some() || !stored.detached.is_empty() {
            true => self.note_change(entry, |stored| {
                stored.operation = None;
                stored.detached.clear();
            }),
            false => Ok(()),
        }
    }

    /// A template was built in it: whoever did that has no daemon any more who would keep it.
    fn abandon(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        match self.adopt(entry) {
            Ok(true) => return self.remove(entry, true),
            Ok(false) => (),
            Err(error) => log::info!("the VM of sandbox {} is ended without being asked: {error}", entry.id),
        }
        self.destroy(entry)
    }

    /// The process that is the sandbox's VMM: the one that is known, or whatever is in its cgroup, as with an older copy of the
    /// database that knows an earlier one.
    fn find_vmm(&self, entry: &Entry) -> Result<Option<(Process, OwnedFd)>, Error> {
        let open = |process: Process| -> Result<_, Error> {
            let pidfd = process::open(process).map_err(Error::host("looking for a VMM"))?;
            Ok(pidfd.map(|pidfd| (process, pidfd)))
        };
        if let Some(known) = entry.stored().sandbox.vmm
            && let Some(found) = open(known)?
        {
            return Ok(Some(found));
        }
        let Some(cgroup) = self.cgroup(entry)? else {
            return Ok(None);
        };
        let first = cgroup.processes()?.first().copied();
        let process = first.and_then(|pid| process::identify(i32::try_from(pid).ok()?));
        process.map_or(Ok(None), open)
    }

    /// Finds the VMM and connects to it; false if there is none.
    fn adopt(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<bool, Error> {
        let Some((process, pidfd)) = self.find_vmm(entry)? else {
            return Ok(false);
        };
        let vm = Arc::new(Vm::connect(pidfd, &self.sandbox_paths(entry), self.config.limits)?);
        entry.lock().vm = Some(Arc::clone(&vm));
        // One that writes a snapshot answers when that is written.
        let stored = entry.stored();
        let limit = match stored.is_held() {
            true => self.snapshot_limit(&stored),
            false => self.config.limits.answer,
        };
        let info = vm.ask_within(limit, "the daemon was started", VmmClient::info)?;
        let reason = pause_reason(&info);
        let state = match info.state {
            // Who has frozen it was not this daemon; its guest runs when its clients do.
            VmState::Running | VmState::Frozen => State::Running,
            VmState::Paused => State::Paused,
            // It has ended just now, or never began.
            VmState::Empty | VmState::Created | VmState::Ended => return Ok(false),
        };
        // A VM that runs is not ended because there is no space for its record.
        self.note_change(entry, |stored| {
            let stopping = stored.sandbox.state == State::Stopping;
            stored.sandbox.state = if stopping { State::Stopping } else { state };
            stored.sandbox.pause_reason = reason;
            stored.sandbox.vmm = Some(process);
            (stored.sandbox.ended_ns, stored.sandbox.ended) = (None, None);
        })?;
        if reason.is_some() {
            log::warn!(
                "sandbox {} is paused, as there was no space on the host: it goes on when there is some",
                entry.id
            );
            self.hold.lack.tell();
        }
        if stored.networked {
            // One without a directory may have the slot of another one by now.
            self.network
                .has_restricted(stored.slot, &stored.sandbox.config.egress)?;
            self.network
                .has_published(stored.slot, parse_ports(&stored.sandbox.config.ports)?);
        }
        vm.watch(&self.monitor, &entry.id)
            .map_err(Error::host("waiting for the VMM's end"))?;
        self.adopt_accelerator(entry);
        Ok(true)
    }

    /// What was under way when the daemon ended.
    fn go_on(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        let stored = entry.stored();
        let sandbox = &stored.sandbox;
        if sandbox.state == State::Stopping {
            return self.stop(entry, Duration::ZERO);
        }
        if stored.is_held()
            && let Err(error) = self.undo(entry, RESTARTED)
        {
            log::error!("sandbox {} stays as it was held: {error}", entry.id);
        }
        // Without a client that would start its command, it would idle for ever.
        if sandbox.state == State::Running && !sandbox.config.detach && !self.may_have_command(entry) {
            return self.remove(entry, true);
        }
        // Also of one that is paused, for when it goes on.
        self.follow_found(entry);
        log::info!("sandbox {} runs on", sandbox.name);
        Ok(())
    }

    /// Whether its command runs, or nobody can tell: only an agent that says so has none.
    fn may_have_command(&self, entry: &Entry) -> bool {
        let Some(vm) = entry.vm() else { return false };
        let asked = vm.agent().and_then(|mut agent| {
            let asked = agent.signal_main(0);
            asked.map_err(|error| vm.diagnose("the daemon was started", error))
        });
        if let Err(error) = &asked {
            log::info!("sandbox {} has no command: {error}", entry.id);
        }
        !asked.is_err_and(|error| error.is_agents_refusal())
    }

    /// Its VMM ended while nobody watched.
    fn missed_end(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        let stored = entry.stored();
        let ended = self.learn(entry, || Ended::Failed(VMM_GONE.into()));
        self.settle_as(entry, ended)?;
        if stored.sandbox.config.remove {
            self.destroy(entry)?;
        }
        Ok(())
    }

    /// What is there of sandboxes that are not known.
    fn deal_with_orphans(&self, reasons: &BTreeMap<String, String>) -> Result<(), Error> {
        let mut known = Known::new(self.entries().keys().cloned().collect());
        for held in held::ALL {
            held.sweep(&self.providers(), &mut known)?;
        }
        for name in names(&self.paths.sandboxes())? {
            let path = self.paths.sandboxes().join(&name);
            if name.starts_with(UNFINISHED) {
                // It lost its name to be removed (`destroy`).
                unless_it_stays(remove_directory(&path), &name);
            } else if !known.has(&name) {
                // In an empty one there is nothing to be kept.
                if fs::remove_dir(&path).is_ok() {
                    continue;
                }
                let why = reasons.get(&name).map_or("it is no sandbox's", String::as_str);
                self.store.set_aside(Subject::Sandbox, &path, why);
            }
        }
        Ok(())
    }
}
