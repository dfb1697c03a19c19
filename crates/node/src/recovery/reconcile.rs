//! What a daemon does when it starts: what the one before it has begun is finished or taken back, VMs that run are taken
//! over, and what belongs to nobody goes. The kernel's view counts, not the database's.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use host::cgroup::Root;
use node_api::{Ended, State};
use vmm_api::{VmState, VmmClient};

use crate::Error;
use crate::node::Node;
use crate::operations::stop::remove_directory;
use crate::resources::cpus;
use crate::sandbox::entry::Entry;
use crate::store::database::Stored;
use crate::store::paths::Paths;
use crate::vmm::process;
use crate::vmm::vm::Vm;

const RESTARTED: &str = "the daemon ended while the sandbox was being started";
const VMM_GONE: &str = "its VMM ended while no daemon ran, without a word of its command's end";

/// The sandboxes as their directories tell, for a database that was lost.
pub(crate) fn records(paths: &Paths) -> Vec<Stored> {
    let directories = fs::read_dir(paths.sandboxes()).into_iter().flatten().flatten();
    let read = |directory: fs::DirEntry| {
        let path = directory.path().join("record.json");
        let stored = fs::read(&path)
            .map_err(|error| error.to_string())
            .and_then(|text| serde_json::from_slice::<Stored>(&text).map_err(|error| error.to_string()));
        match stored {
            Ok(mut stored) => {
                // Whether it has a VM is found out next.
                stored.sandbox.state = State::Running;
                Some(stored)
            }
            Err(error) => {
                log::error!("{} is no sandbox any more and is removed: {error}", path.display());
                None
            }
        }
    };
    directories.filter_map(read).collect()
}

impl Node {
    /// Puts everything right.
    pub(crate) fn reconcile(self: &Arc<Self>, found: Vec<Stored>) -> Result<(), Error> {
        for stored in found {
            let entry = Entry::new(stored);
            self.entries().insert(entry.id.clone(), Arc::clone(&entry));
            // Whatever has ended meanwhile gives it back.
            self.count(&entry);
            if let Err(error) = self.reconcile_one(&entry) {
                log::error!("sandbox {} cannot be put right: {error}", entry.id);
            }
        }
        self.remove_strangers()
    }

    fn reconcile_one(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        if let Err(error) = crate::saved::disk::clean_beside(&self.sandbox_paths(entry).disk()) {
            log::warn!("what a rollback has left stays: {error}");
        }
        let Stored { sandbox, building, .. } = entry.stored();
        match sandbox.state {
            _ if building => self.abandon(entry),
            State::Creating | State::Removing => self.destroy(entry),
            State::Starting if sandbox.restarts == 0 => self.destroy(entry),
            State::Starting => {
                self.clear(entry)?;
                self.exited(entry, Ended::Failed(RESTARTED.into()))
            }
            State::Exited => self.clear(entry),
            State::Running | State::Paused | State::Stopping => match self.adopt(entry) {
                Ok(true) => self.go_on(entry),
                Ok(false) => self.missed_end(entry),
                Err(error) => {
                    self.clear(entry)?;
                    self.exited(entry, Ended::Failed(format!("it could not be taken over: {error}")))
                }
            },
        }
    }

    /// A template was built in it: whoever did that has no daemon any more who would keep it.
    fn abandon(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        match self.adopt(entry) {
            Ok(true) => return self.remove(entry, true),
            Ok(false) => (),
            Err(error) => log::info!("the VM of sandbox {} is ended without being asked: {error}", entry.id),
        }
        self.destroy(entry)
    }

    /// Finds the VMM and connects to it; false if there is none.
    fn adopt(&self, entry: &Arc<Entry>) -> Result<bool, Error> {
        let known = entry.stored().sandbox.vmm;
        let process = match known {
            Some(process) => Some(process),
            // After the loss of the database: what is in its cgroup is its VMM.
            None => match self.cgroup(entry)? {
                Some(cgroup) => {
                    let pid = cgroup.processes()?.first().copied();
                    pid.and_then(|pid| process::identify(i32::try_from(pid).ok()?))
                }
                None => None,
            },
        };
        let Some(process) = process else { return Ok(false) };
        let Some(pidfd) = process::open(process).map_err(Error::host("looking for a VMM"))? else {
            return Ok(false);
        };
        let vm = Arc::new(Vm::connect(pidfd, &self.sandbox_paths(entry), self.config.limits)?);
        entry.lock().vm = Some(Arc::clone(&vm));
        // One that writes a snapshot answers when that is written.
        let stored = entry.stored();
        let limit = match stored.held {
            true => self.snapshot_limit(&stored),
            false => self.config.limits.answer,
        };
        let info = vm.ask_within(limit, "the daemon was started", VmmClient::info)?;
        let state = match info.state {
            VmState::Running => State::Running,
            VmState::Paused => State::Paused,
            // It has ended just now, or never began.
            VmState::Empty | VmState::Created | VmState::Ended => return Ok(false),
        };
        self.update(entry, |stored| {
            let stopping = stored.sandbox.state == State::Stopping;
            stored.sandbox.state = if stopping { State::Stopping } else { state };
            stored.sandbox.vmm = Some(process);
        })?;
        self.monitor
            .watch(&entry.id, vm.pidfd())
            .map_err(Error::host("waiting for the VMM's end"))?;
        Ok(true)
    }

    /// What was under way when the daemon ended.
    fn go_on(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        let stored = entry.stored();
        let sandbox = &stored.sandbox;
        if sandbox.state == State::Stopping {
            return self.stop(entry, Duration::ZERO);
        }
        if let (true, Some(vm)) = (stored.held, entry.vm()) {
            match self.let_go_on(&vm) {
                Ok(()) => self.update(entry, |stored| {
                    (stored.sandbox.state, stored.held) = (State::Running, false);
                })?,
                Err(error) => log::error!("sandbox {} stays as it was held for a snapshot: {error}", entry.id),
            }
        }
        // Without a client that would start its command, it would idle for ever.
        if sandbox.state == State::Running && !sandbox.config.detach && !self.has_command(entry) {
            return self.remove(entry, true);
        }
        log::info!("sandbox {} runs on", sandbox.name);
        Ok(())
    }

    fn has_command(&self, entry: &Entry) -> bool {
        let Some(vm) = entry.vm() else { return false };
        let asked = vm.agent().and_then(|mut agent| {
            let asked = agent.signal_main(0);
            asked.map_err(|error| vm.diagnose("the daemon was started", error))
        });
        if let Err(error) = &asked {
            log::info!("sandbox {} has no command: {error}", entry.id);
        }
        asked.is_ok()
    }

    /// Its VMM ended while nobody watched.
    fn missed_end(&self, entry: &Arc<Entry>) -> Result<(), Error> {
        let stored = entry.stored();
        let ended = self.learn(entry, || Ended::Failed(VMM_GONE.into()));
        self.clear(entry)?;
        self.exited(entry, ended)?;
        if stored.sandbox.config.remove {
            self.destroy(entry)?;
        }
        Ok(())
    }

    /// Cgroups and directories of sandboxes that are not known.
    fn remove_strangers(&self) -> Result<(), Error> {
        let known: BTreeSet<String> = self.entries().keys().cloned().collect();
        if let Some(root) = &self.cgroups {
            for id in root.list()?.into_iter().filter(|id| is_id(id) && !known.contains(id)) {
                log::warn!("the cgroup {id} belongs to no sandbox and is removed");
                unless_it_stays(self.remove_cgroup(root, &id), &id);
            }
        }
        self.detach_strangers()?;
        for directory in [self.paths.runs(), self.paths.sandboxes()] {
            for name in names(&directory)?.into_iter().filter(|name| !known.contains(name)) {
                log::warn!("{}/{name} belongs to no sandbox and is removed", directory.display());
                unless_it_stays(remove_directory(&directory.join(&name)), &name);
            }
        }
        Ok(())
    }

    fn remove_cgroup(&self, root: &Root, id: &str) -> Result<(), Error> {
        if let Some(cgroup) = root.find(id)? {
            cgroup.kill()?;
            cgroup.wait_empty(self.config.limits.kill)?;
        }
        root.remove(id)?;
        cpus::release(id);
        Ok(())
    }

    /// Places in the network that belong to nobody. One that was never set up has none.
    fn detach_strangers(&self) -> Result<(), Error> {
        let stored: Vec<Stored> = self.entries().values().map(|entry| entry.stored()).collect();
        let known: BTreeSet<u32> = stored.iter().filter(|it| it.networked).map(|it| it.slot).collect();
        if known.is_empty() && !self.network_exists() {
            return Ok(());
        }
        let network = self.network()?;
        for slot in network.slots()? {
            if (slot.in_use || !slot.published.is_empty()) && !known.contains(&slot.slot) {
                log::warn!("the network's slot {} belongs to no sandbox and is detached", slot.slot);
                unless_it_stays(
                    network.detach(slot.slot).map_err(Error::from),
                    &format!("slot {}", slot.slot),
                );
            }
        }
        Ok(())
    }
}

/// What cannot be removed, such as the cgroup of a process that the kernel does not let go, must not keep all others from
/// being served.
fn unless_it_stays(removed: Result<(), Error>, what: &str) {
    if let Err(error) = removed {
        log::error!("{what} stays; the daemon tries again when it is started next: {error}");
    }
}

/// Twelve hexadecimal digits: anything else is not ours.
fn is_id(name: &str) -> bool {
    name.len() == 12 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn names(directory: &Path) -> Result<Vec<String>, Error> {
    let entries = fs::read_dir(directory).map_err(Error::file("list", directory))?;
    Ok(entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect())
}
