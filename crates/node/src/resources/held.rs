//! What the machine of a sandbox holds of the host: one list, by which it is given back when the machine ends, and by which a daemon that
//! starts finds what nobody holds any more. Whatever a machine comes to hold stands in it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use host::cgroup::Root;
use node_api::recovery::{Finding, Outcome, Subject};

use crate::Error;
use crate::resources::accelerators::Accelerators;
use crate::resources::cpus::OwnedCpus;
use crate::resources::devices::Devices;
use crate::resources::network::NodeNetwork;
use crate::sandbox::entry::Entry;
use crate::sandbox::registry::Sandboxes;
use crate::saved::memory_files;
use crate::store::StateStore;
use crate::store::database::Stored;
use crate::store::paths::{Paths, names};
use crate::store::remove::remove_directory;
use crate::vmm::process;

/// Where machines have what they hold from, and who knows whose it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Providers<'p> {
    pub(crate) cgroups: Option<&'p Root>,
    pub(crate) cpus: &'p dyn OwnedCpus,
    pub(crate) devices: &'p Devices,
    pub(crate) accelerators: &'p Accelerators,
    pub(crate) network: &'p NodeNetwork,
    pub(crate) paths: &'p Paths,
    pub(crate) store: &'p StateStore,
    pub(crate) sandboxes: &'p Sandboxes,
    /// From SIGKILL to the end of a process.
    pub(crate) kill: Duration,
}

/// A kind of thing that machines hold.
pub(crate) trait Held: Sync {
    /// Gives back what a sandbox's machine holds of it, which has ended, or ends by this. It is fine if that is nothing.
    fn release(&self, from: &Providers<'_>, entry: &Entry) -> Result<(), Error>;

    /// Gives back what belongs to nobody that is known. What cannot be given back stays, and the log tells of it.
    fn sweep(&self, from: &Providers<'_>, known: &mut Known) -> Result<(), Error>;
}

/// In the order in which they are given back: nothing else is any more used when the VMM and all in its cgroup are gone.
pub(crate) const ALL: &[&dyn Held] = &[
    &Vmm,
    &AcceleratorServer,
    &Cgroup,
    &Cpus,
    &Functions,
    &Place,
    &MemoryFiles,
    &RunDirectory,
];

/// Who is known.
#[derive(Debug)]
pub(crate) struct Known {
    sandboxes: BTreeSet<String>,
    /// Sandboxes of which nothing is known but that their VMMs work on: nothing of them is touched.
    pub(crate) left_alone: BTreeSet<String>,
}

impl Known {
    pub(crate) fn new(sandboxes: BTreeSet<String>) -> Self {
        Self {
            sandboxes,
            left_alone: BTreeSet::new(),
        }
    }

    /// Somebody may hold what is this one's.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.sandboxes.contains(id) || self.left_alone.contains(id)
    }
}

/// The process.
struct Vmm;

impl Held for Vmm {
    fn release(&self, from: &Providers<'_>, entry: &Entry) -> Result<(), Error> {
        let limit = from.kill;
        let vm = entry.lock().vm.take();
        let ended = match (vm, entry.stored().sandbox.vmm) {
            (Some(vm), _) => {
                vm.kill()?;
                vm.wait(limit)
            }
            // A daemon before this one has started it.
            (None, Some(process)) => process::end(process, limit).map_err(Error::host("killing a VMM"))?,
            (None, None) => true,
        };
        match ended {
            true => Ok(()),
            false => Err(Error::Deadline {
                what: "the end of a killed VMM",
                limit,
            }),
        }
    }

    /// Only cgroups tell of those that nobody knows.
    fn sweep(&self, _: &Providers<'_>, _: &mut Known) -> Result<(), Error> {
        Ok(())
    }
}

/// The process that serves its accelerator, and its part of that one's time.
pub(crate) struct AcceleratorServer;

impl Held for AcceleratorServer {
    fn release(&self, from: &Providers<'_>, entry: &Entry) -> Result<(), Error> {
        let Some(process) = entry.stored().sandbox.accelerator else {
            // It may be admitted, and was not started.
            from.accelerators.dismiss(&entry.id);
            return Ok(());
        };
        match process::end(process, from.kill).map_err(Error::host("killing an accelerator's server"))? {
            true => {
                from.accelerators.dismiss(&entry.id);
                Ok(())
            }
            false => Err(Error::Deadline {
                what: "the end of a killed server of an accelerator",
                limit: from.kill,
            }),
        }
    }

    /// It is in its sandbox's cgroup, by which one is found that nobody knows.
    fn sweep(&self, _: &Providers<'_>, _: &mut Known) -> Result<(), Error> {
        Ok(())
    }
}

/// Its cgroup, with all that runs in it.
struct Cgroup;

impl Held for Cgroup {
    fn release(&self, from: &Providers<'_>, entry: &Entry) -> Result<(), Error> {
        remove_cgroup(from, &entry.id)
    }

    /// One in which nothing runs is removed. A VMM is left alone as long as there is anything else of its sandbox: without its record
    /// nobody can reach it, but its guest works on.
    fn sweep(&self, from: &Providers<'_>, known: &mut Known) -> Result<(), Error> {
        let Some(root) = from.cgroups else { return Ok(()) };
        for id in root.list()?.into_iter().filter(|id| is_id(id)) {
            if known.has(&id) {
                continue;
            }
            let runs = match root.find(&id)? {
                Some(cgroup) => cgroup.populated()?,
                None => false,
            };
            let paths = from.paths.sandbox(&id);
            if runs && (paths.directory.exists() || paths.run.exists()) {
                let why = format!(
                    "nothing is known of the sandbox that it runs, but its files are there: it works on, and no command reaches it; \
                     when it is not needed any more, end it with `echo 1 > {}/cgroup.kill` and start basaltd again",
                    root.path().join(&id).display()
                );
                from.store.found(Finding {
                    subject: Subject::Vmm,
                    name: id.clone(),
                    outcome: Outcome::LeftAlone,
                    why,
                });
                known.left_alone.insert(id);
                continue;
            }
            if runs {
                log::warn!("the cgroup {id} has a process, and there is nothing else of such a sandbox: it is ended");
            }
            let removed = remove_cgroup(from, &id);
            if removed.is_ok() {
                from.cpus.release(&id);
            }
            unless_it_stays(removed, &id);
        }
        Ok(())
    }
}

fn remove_cgroup(from: &Providers<'_>, id: &str) -> Result<(), Error> {
    let Some(root) = from.cgroups else { return Ok(()) };
    if let Some(cgroup) = root.find(id)? {
        cgroup.kill()?;
        cgroup.wait_empty(from.kill)?;
    }
    Ok(root.remove(id)?)
}

/// CPUs that it owns.
struct Cpus;

impl Held for Cpus {
    fn release(&self, from: &Providers<'_>, entry: &Entry) -> Result<(), Error> {
        if !entry.stored().sandbox.config.resources.class.is_standard() {
            from.cpus.release(&entry.id);
        }
        Ok(())
    }

    fn sweep(&self, from: &Providers<'_>, _: &mut Known) -> Result<(), Error> {
        from.cpus.sweep();
        Ok(())
    }
}

/// Devices of the host's. They are reset when nobody has them open any more, which is when the VMM is gone.
struct Functions;

impl Held for Functions {
    fn release(&self, from: &Providers<'_>, entry: &Entry) -> Result<(), Error> {
        // They were taken from this machine, and are for the next one.
        match entry.stored().keeps_devices() {
            true => Ok(()),
            false => from.devices.release(&entry.id),
        }
    }

    fn sweep(&self, from: &Providers<'_>, known: &mut Known) -> Result<(), Error> {
        for sandbox in from.devices.owners().into_iter().filter(|id| !known.has(id)) {
            log::warn!("sandbox {sandbox} is gone, and the devices that it had are reset");
            unless_it_stays(from.devices.release(&sandbox), &format!("what sandbox {sandbox} had"));
        }
        Ok(())
    }
}

/// Its place in the network: its TAP, and what is published of it.
struct Place;

impl Held for Place {
    fn release(&self, from: &Providers<'_>, entry: &Entry) -> Result<(), Error> {
        let stored = entry.stored();
        if !stored.networked {
            return Ok(());
        }
        from.network
            .give_back(stored.slot, !stored.sandbox.config.ports.is_empty())
    }

    /// A network that was never set up has none.
    fn sweep(&self, from: &Providers<'_>, known: &mut Known) -> Result<(), Error> {
        let stored: Vec<Stored> = from.sandboxes.entries().values().map(|entry| entry.stored()).collect();
        let taken: BTreeSet<u32> = stored.iter().filter(|it| it.networked).map(|it| it.slot).collect();
        if taken.is_empty() && !from.network.exists() {
            return Ok(());
        }
        let network = from.network.get()?;
        for slot in network.slots()? {
            // It may be that of a VMM that is left alone, of which not even this is known.
            if slot.in_use && !known.left_alone.is_empty() {
                continue;
            }
            if (slot.in_use || !slot.published.is_empty()) && !taken.contains(&slot.slot) {
                log::warn!("the network's slot {} belongs to no sandbox and is detached", slot.slot);
                let detached = from.network.give_back(slot.slot, true);
                unless_it_stays(detached, &format!("slot {}", slot.slot));
            }
        }
        Ok(())
    }
}

/// Files that its memory is mapped from, by their names in its directory: they go with that where nobody knows it.
struct MemoryFiles;

impl Held for MemoryFiles {
    fn release(&self, from: &Providers<'_>, entry: &Entry) -> Result<(), Error> {
        memory_files::remove(&from.paths.sandbox(&entry.id).directory)
    }

    fn sweep(&self, _: &Providers<'_>, _: &mut Known) -> Result<(), Error> {
        Ok(())
    }
}

/// The directory with its sockets.
struct RunDirectory;

impl Held for RunDirectory {
    fn release(&self, from: &Providers<'_>, entry: &Entry) -> Result<(), Error> {
        remove_directory(&from.paths.sandbox(&entry.id).run)
    }

    fn sweep(&self, from: &Providers<'_>, known: &mut Known) -> Result<(), Error> {
        for name in names(&from.paths.runs())? {
            if known.has(&name) {
                continue;
            }
            let path = from.paths.runs().join(&name);
            // Nobody listens on these any more.
            let arbiter = from.paths.sandbox(&name).arbiter();
            let removed = match arbiter.is_dir() {
                true => remove_sockets(&arbiter).and_then(|()| remove_sockets(&path)),
                false => remove_sockets(&path),
            };
            unless_it_stays(removed.map_err(Error::file("remove the sockets in", &path)), &name);
            if path.exists() {
                let why = "it has other files than sockets";
                from.store.set_aside(Subject::Run, &path, why);
            }
        }
        Ok(())
    }
}

/// What cannot be removed, such as the cgroup of a process that the kernel does not let go, must not keep all others from
/// being served.
pub(crate) fn unless_it_stays(removed: Result<(), Error>, what: &str) {
    if let Err(error) = removed {
        log::error!("{what} stays; the daemon tries again when it is started next: {error}");
    }
}

/// Removes the sockets in a directory, and the directory if nothing else was in it.
fn remove_sockets(directory: &Path) -> io::Result<()> {
    let mut others = !directory.is_dir();
    for entry in fs::read_dir(directory).into_iter().flatten() {
        let entry = entry?;
        match entry.file_type()?.is_socket() {
            true => fs::remove_file(entry.path())?,
            false => others = true,
        }
    }
    match others {
        true => Ok(()),
        false => fs::remove_dir(directory),
    }
}

/// Twelve hexadecimal digits: anything else is not ours.
fn is_id(name: &str) -> bool {
    name.len() == 12 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}
