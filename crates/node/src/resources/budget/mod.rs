//! What sandboxes are promised of the host: memory, disk, descriptors. A promise is made before a sandbox is accepted, and is kept until
//! it is dropped; whatever would be promised beyond what there is, is refused in a sentence.
//!
//! ```text
//!  machine(), disk() ─► Promise, as long as the machine or the disk is there ─┐
//!  lease()           ─► Lease, as long as a request is under way ─────────────┴─ dropped: others may have it
//! ```
//! One lock is held from the look at the host to the entry in the table, so that no two requests get the same room. Nothing here is
//! on a disk: a daemon that starts counts what it finds (`count_machine`, `count_disk`), which is never refused. Knows configurations, no sandbox.

mod host;
mod ledger;
mod refused;
#[cfg(test)]
mod tests;
mod zeroed;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use ::host::MemInfo;
use base::{ByteSize, Ratio};
use node_api::{Paging, Promised, Resource, SandboxConfig};

pub use host::{HostNumbers, Space, ThisHost};
pub(crate) use ledger::Machine;
use ledger::{Disk, Ledger};
pub use refused::{Refused, Wish};
use zeroed::Counted;
pub(crate) use zeroed::{Drain, Held};

use crate::resources::limits;

/// What the host keeps for itself of its memory: a share of it, and the least.
const KEPT_SHARE: u64 = 20;
const KEPT_LEAST: ByteSize = ByteSize::mib(256);

/// What the state directory's file system keeps: records, logs and the database need some.
const KEPT_DISK_SHARE: u64 = 100;

/// What a guest that boots touches until its command starts, and a clone until it has gone on; with their VMMs.
const TO_BOOT: ByteSize = ByteSize::mib(96);
const TO_RESTORE: ByteSize = ByteSize::mib(32);

/// Descriptors that the daemon has open for a sandbox with a VM, as long as that runs: two of its process (one waits for its end), and one
/// of its control socket.
pub(crate) const OF_MACHINE: u64 = 3;

/// The same for its accelerator: one of the server's process, where it asks for its part of the time, and its connection; those two once more
/// while somebody waits for them.
const OF_ACCELERATOR: u64 = 5;

/// Descriptors that the daemon has open without any sandbox, with what its own threads open now and then.
const OF_DAEMON: u64 = 32;

/// Descriptors that a request needs while it is carried out which starts, saves or restores a machine; and any other one.
pub(crate) const TO_START: u64 = 40;
pub(crate) const TO_ASK: u64 = 8;

/// Never leased to the former, so that sandboxes can be stopped and removed whatever else is under way.
const FOR_OTHERS: u64 = 2 * TO_ASK;

/// Connections of askers at once: a share of all descriptors, and the most. Each has a thread.
const CONNECTIONS_SHARE: u64 = 8;
const MOST_CONNECTIONS: u64 = 1024;

/// A file's blocks, as stat(2) counts them.
const STAT_BLOCK: u64 = 512;

/// How many times over things may be promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overcommit {
    /// The memory of sandboxes.
    pub memory: Ratio,
    /// The memory of clones, all but the largest: they use what they change.
    pub clones: Ratio,
    /// The state directory's file system, for disks.
    pub disk: Ratio,
}

impl Default for Overcommit {
    fn default() -> Self {
        Self {
            memory: Ratio::whole(1),
            clones: Ratio::whole(16),
            disk: Ratio::whole(50),
        }
    }
}

/// Which way a machine comes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Boot,
    /// From a snapshot's or a template's files.
    Restore,
}

impl Machine {
    /// What a sandbox needs that comes up this way.
    pub(crate) fn of(config: &SandboxConfig, start: Start) -> Self {
        let resources = &config.resources;
        let guest = resources.held().bytes();
        let (translated, bare) = (resources.memory_mode.is_translated(), resources.class.is_bare());
        // Pinned memory is all there, and memory that comes on demand is the clone's own.
        // So is what devices reach, which behind an IOMMU of the guest's is what that maps for them.
        let reached = config.devices_reach_all();
        let shared = start == Start::Restore && !bare && config.paging != Paging::OnDemand && !reached;
        let memory = limits::memory_max(config);
        Self {
            memory,
            shared,
            // It was plugged by nobody else.
            own: match shared {
                true => guest.saturating_sub(resources.boots_with().bytes()),
                false => 0,
            },
            huge: if bare && translated { guest } else { 0 },
            reserved: if translated { 0 } else { guest },
            at_once: match start {
                Start::Boot => TO_BOOT.bytes().min(memory),
                Start::Restore => TO_RESTORE.bytes().min(memory),
            },
            descriptors: OF_MACHINE + config.accelerator.map_or(0, |_| OF_ACCELERATOR),
        }
    }

    /// How it came up, as it counts.
    fn start(&self) -> Start {
        match self.shared {
            true => Start::Restore,
            false => Start::Boot,
        }
    }
}

/// The budget.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    host: Arc<dyn HostNumbers>,
    overcommit: Overcommit,
    /// On the file system that disks are on.
    state: PathBuf,
    /// Descriptors that can be promised.
    descriptors: u64,
    connections: u64,
    ledger: Mutex<Ledger>,
    changed: Condvar,
    /// Who has zeroed memory ready, which a machine that is to be promised memory comes before.
    zeroed: OnceLock<Weak<dyn Drain>>,
}

impl Shared {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the host has for sandboxes, in bytes.
#[derive(Clone, Copy, Debug)]
struct Memory {
    read: MemInfo,
    kept: u64,
    total: u64,
}

impl Memory {
    fn of(read: MemInfo, overcommit: Ratio) -> Self {
        let all = read.total.bytes();
        let kept = (all / KEPT_SHARE).max(KEPT_LEAST.bytes()).min(all / 2);
        Self {
            read,
            kept,
            total: overcommit.times(all.saturating_sub(read.huge.bytes()).saturating_sub(kept)),
        }
    }
}

impl Budget {
    /// Nothing is promised; disks are below `state`. The daemon may have `open` descriptors besides those that all daemons have.
    pub(crate) fn new(host: Arc<dyn HostNumbers>, overcommit: Overcommit, state: &Path, open: u64) -> Self {
        let all = host.descriptors().saturating_sub(open);
        let connections = (all / CONNECTIONS_SHARE).clamp(1, MOST_CONNECTIONS);
        Self(Arc::new(Shared {
            host,
            overcommit,
            state: state.to_owned(),
            descriptors: all.saturating_sub(connections).saturating_sub(OF_DAEMON),
            connections,
            ledger: Mutex::default(),
            changed: Condvar::new(),
            zeroed: OnceLock::new(),
        }))
    }

    /// How many may be connected at once to ask.
    pub(crate) fn connections(&self) -> u64 {
        self.0.connections
    }

    /// Promises what a machine needs.
    pub(crate) fn machine(&self, wish: &Wish, config: &SandboxConfig, start: Start) -> Result<Promise, Refused> {
        let machine = Machine::of(config, start);
        let number = self.enter_machine(wish, config, (None, machine), |ledger| ledger.add_machine(machine))?;
        Ok(self.promise(number))
    }

    /// Counts one that is there, whether there is room or not.
    pub(crate) fn count_machine(&self, config: &SandboxConfig, start: Start) -> Promise {
        let machine = Machine {
            at_once: 0,
            ..Machine::of(config, start)
        };
        self.promise(self.0.ledger().add_machine(machine))
    }

    /// Promises room for a disk, which will be at `path`.
    pub(crate) fn disk(&self, wish: &Wish, size: ByteSize, path: &Path) -> Result<Promise, Refused> {
        let mut ledger = self.0.ledger();
        self.check_disk(wish, size, &ledger)?;
        Ok(self.promise(ledger.add_disk(disk(size, path))))
    }

    /// Counts one that is there.
    pub(crate) fn count_disk(&self, size: ByteSize, path: &Path) -> Promise {
        self.promise(self.0.ledger().add_disk(disk(size, path)))
    }

    fn promise(&self, number: u64) -> Promise {
        Promise {
            budget: self.clone(),
            number,
        }
    }

    /// Takes so many descriptors for a request under way, [`TO_START`] or more if it starts a machine; waits for others to end at most
    /// `patience`.
    pub(crate) fn lease(&self, wish: &Wish, descriptors: u64, patience: Duration) -> Result<Lease, Refused> {
        let end = Instant::now() + patience;
        let starts = descriptors >= TO_START;
        let total = self.0.descriptors;
        let mut ledger = self.0.ledger();
        loop {
            let sum = ledger.sum(0, self.0.overcommit.clones);
            let mut left = total.saturating_sub(sum.descriptors.saturating_add(sum.leased));
            if starts {
                let taken = sum.descriptors.saturating_add(sum.starting);
                left = left.min(total.saturating_sub(FOR_OTHERS).saturating_sub(taken));
            }
            if descriptors <= left {
                ledger.lease(descriptors, starts);
                return Ok(Lease {
                    budget: self.clone(),
                    descriptors,
                });
            }
            let free = left;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Refused::Descriptors {
                    wish: wish.clone(),
                    needed: descriptors,
                    left: free,
                    total,
                });
            }
            let waited = self.0.changed.wait_timeout(ledger, left);
            ledger = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn memory(&self, wish: &Wish) -> Result<Memory, Refused> {
        let read = self.0.host.memory().map_err(unknown(wish, "/proc/meminfo"))?;
        Ok(Memory::of(read, self.0.overcommit.memory))
    }

    fn check_machine(
        &self,
        wish: &Wish,
        config: &SandboxConfig,
        ledger: &Ledger,
        change: (Option<u64>, Machine),
        zeroed: Counted,
    ) -> Result<(), Refused> {
        let host = self.memory(wish)?;
        let (zeroed, given_up) = zeroed.of(ledger);
        let asked = config.resources.memory;
        if config.resources.memory_mode.is_translated() && asked > host.read.total {
            return Err(Refused::LargerThanHost {
                asked,
                total: host.read.total,
                available: host.read.available,
            });
        }
        let Overcommit { memory, clones, .. } = self.0.overcommit;
        let huge = host.read.huge.bytes();
        let (now, then) = (ledger.sum(huge, clones), ledger.sum_with(Some(change), huge, clones));
        if then.memory.saturating_add(zeroed) > host.total && then.memory > now.memory {
            return Err(Refused::Memory {
                wish: wish.clone(),
                needed: ByteSize(then.memory - now.memory),
                left: ByteSize(host.total.saturating_sub(now.memory).saturating_sub(zeroed)),
                total: ByteSize(host.total),
                overcommit: memory,
            });
        }
        let available = host.read.available.bytes().saturating_add(given_up);
        if then.at_once > now.at_once && then.at_once.saturating_add(host.kept) > available {
            return Err(Refused::MemoryInUse {
                wish: wish.clone(),
                needed: ByteSize(then.at_once),
                available: ByteSize(available),
                kept: ByteSize(host.kept),
            });
        }
        if then.reserved > now.reserved {
            self.check_reserved(wish, asked, now.reserved)?;
        }
        let most = self.0.descriptors.saturating_sub(TO_START + FOR_OTHERS);
        let room = then.descriptors <= most && then.descriptors.saturating_add(then.leased) <= self.0.descriptors;
        if !room && then.descriptors > now.descriptors {
            return Err(Refused::Descriptors {
                wish: wish.clone(),
                needed: then.descriptors - now.descriptors,
                left: most.saturating_sub(now.descriptors),
                total: most,
            });
        }
        Ok(())
    }

    /// What is more than all of it, or where there is none, the module refuses with better reasons.
    fn check_reserved(&self, wish: &Wish, needed: ByteSize, promised: u64) -> Result<(), Refused> {
        let Some(total) = self.0.host.reserved_memory().filter(|total| needed <= *total) else {
            return Ok(());
        };
        let left = ByteSize(total.bytes().saturating_sub(promised));
        match needed <= left {
            true => Ok(()),
            false => Err(Refused::Reserved {
                wish: wish.clone(),
                needed,
                left,
                total,
            }),
        }
    }

    fn space(&self, wish: &Wish) -> Result<Space, Refused> {
        self.0
            .host
            .space(&self.0.state)
            .map_err(unknown(wish, "the state directory's disk"))
    }

    fn check_disk(&self, wish: &Wish, needed: ByteSize, ledger: &Ledger) -> Result<(), Refused> {
        let space = self.space(wish)?;
        let promised = ledger.disks();
        let wanted = promised.saturating_add(needed.bytes());
        // What disks have taken already is part of what they were promised. Most times it does not matter how much that is.
        if wanted <= self.for_disks(space, 0) {
            return Ok(());
        }
        let total = self.for_disks(space, taken(ledger));
        if wanted <= total {
            return Ok(());
        }
        Err(Refused::Disk {
            wish: wish.clone(),
            needed,
            left: ByteSize(total.saturating_sub(promised)),
            total: ByteSize(total),
            free: ByteSize(space.free),
            overcommit: self.0.overcommit.disk,
        })
    }

    /// All that disks can have together which have `taken` so much.
    fn for_disks(&self, space: Space, taken: u64) -> u64 {
        // Blocks that several share were counted for each.
        let disks = space.free.saturating_add(taken).min(space.size);
        self.0
            .overcommit
            .disk
            .times(disks.saturating_sub(space.size / KEPT_DISK_SHARE))
    }

    /// What is promised of what, for people.
    pub(crate) fn promised(&self) -> Vec<Promised> {
        let ledger = self.0.ledger();
        let Overcommit { memory, clones, disk } = self.0.overcommit;
        let mut all = Vec::new();
        let mut add = |resource, promised, total, overcommit: Option<Ratio>| {
            let overcommit = overcommit.map(|ratio| ratio.to_string());
            all.push(Promised {
                resource,
                promised,
                total,
                overcommit,
            });
        };
        let read = self.0.host.memory();
        let huge = read.as_ref().map_or(0, |read| read.huge.bytes());
        let sum = ledger.sum(huge, clones);
        // What cannot be read is left out, and said where somebody needs it.
        if let Ok(read) = read {
            add(
                Resource::Memory,
                sum.memory,
                Memory::of(read, memory).total,
                Some(memory),
            );
        }
        if let Ok(space) = self.0.host.space(&self.0.state) {
            let total = self.for_disks(space, taken(&ledger));
            add(Resource::Disk, ledger.disks(), total, Some(disk));
        }
        let held = sum.descriptors.saturating_add(sum.leased);
        add(Resource::Descriptors, held, self.0.descriptors, None);
        all
    }
}

fn disk(size: ByteSize, path: &Path) -> Disk {
    Disk {
        size: size.bytes(),
        path: path.to_owned(),
    }
}

/// What all disks take of their file system. One that is not made yet takes none.
fn taken(ledger: &Ledger) -> u64 {
    let blocks = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.blocks());
    ledger
        .disk_paths()
        .map(|path| blocks(path).saturating_mul(STAT_BLOCK))
        .sum()
}

fn unknown(wish: &Wish, what: &'static str) -> impl FnOnce(std::io::Error) -> Refused {
    let wish = wish.clone();
    move |cause| Refused::Unknown { wish, what, cause }
}

/// Something of the host, as long as this is there.
#[derive(Debug)]
pub(crate) struct Promise {
    budget: Budget,
    number: u64,
}

impl Promise {
    /// Makes it what a machine of this configuration needs which comes up this way. If that is refused it stays what it was.
    pub(crate) fn change(&self, wish: &Wish, config: &SandboxConfig, start: Start) -> Result<(), Refused> {
        self.become_of(wish, config, Machine::of(config, start))
    }

    fn become_of(&self, wish: &Wish, config: &SandboxConfig, machine: Machine) -> Result<(), Refused> {
        let change = (Some(self.number), machine);
        self.budget
            .enter_machine(wish, config, change, |ledger| ledger.set_machine(self.number, machine))?;
        self.budget.0.changed.notify_all();
        Ok(())
    }

    /// Bytes of memory.
    #[cfg(test)]
    pub(crate) fn memory(&self) -> u64 {
        let machine = self.budget.0.ledger().machine(self.number);
        machine.map_or(0, |machine| machine.memory)
    }

    /// It runs: what it needed to come to that is in use, and the host's own numbers have it.
    pub(crate) fn runs(&self) {
        let mut ledger = self.budget.0.ledger();
        if let Some(machine) = ledger.machine(self.number) {
            ledger.set_machine(self.number, Machine { at_once: 0, ..machine });
        }
    }
}

/// A promise that was changed to what another machine needs. Unless that is kept, it is in the end what it was.
#[derive(Debug)]
pub(crate) struct Changed {
    promise: Arc<Promise>,
    before: Option<Machine>,
}

impl Changed {
    /// Where nobody says how the other machine comes up, it is this one of another size: it counts as it does, and what it needed to come up
    /// it does not need again.
    pub(crate) fn new(
        promise: Arc<Promise>,
        wish: &Wish,
        config: &SandboxConfig,
        start: Option<Start>,
    ) -> Result<Self, Refused> {
        let before = promise.budget.0.ledger().machine(promise.number);
        let machine = match (start, before) {
            (Some(start), _) => Machine::of(config, start),
            (None, Some(before)) => Machine {
                at_once: before.at_once,
                ..Machine::of(config, before.start())
            },
            (None, None) => Machine::of(config, Start::Boot),
        };
        promise.become_of(wish, config, machine)?;
        Ok(Self { promise, before })
    }

    /// It shares nothing any more, and counts as one that has booted; `None` where it shares nothing now.
    pub(crate) fn to_private(
        promise: Arc<Promise>,
        wish: &Wish,
        config: &SandboxConfig,
    ) -> Result<Option<Self>, Refused> {
        let before = promise.budget.0.ledger().machine(promise.number);
        let Some(shares) = before.filter(|machine| machine.shared) else {
            return Ok(None);
        };
        let machine = Machine {
            at_once: shares.at_once,
            ..Machine::of(config, Start::Boot)
        };
        promise.become_of(wish, config, machine)?;
        Ok(Some(Self { promise, before }))
    }

    pub(crate) fn promise(&self) -> Arc<Promise> {
        Arc::clone(&self.promise)
    }

    /// The other machine is there.
    pub(crate) fn keep(mut self) {
        self.before = None;
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            self.promise.budget.0.ledger().set_machine(self.promise.number, before);
            self.promise.budget.0.changed.notify_all();
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.budget.0.ledger().remove(self.number);
        self.budget.0.changed.notify_all();
    }
}

/// Descriptors for a request, as long as this is there.
#[derive(Debug)]
pub(crate) struct Lease {
    budget: Budget,
    descriptors: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let starts = self.descriptors >= TO_START;
        self.budget.0.ledger().end_lease(self.descriptors, starts);
        self.budget.0.changed.notify_all();
    }
}
