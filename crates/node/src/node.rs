//! The node: what its parts own, put together, and what is known of sandboxes, changed in memory and in the database at once. Making,
//! ending and finding them again are the other files' affair.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use base::Points;
use host::cgroup::{Cgroup, Root};
use image::Store;
use node_api::{EventKind, Sandbox};
use observe::span::span;
use vfio::host::Sysfs;
use vmm_api::devices::ZEROED_PIECE;

use crate::Error;
use crate::config::Config;
use crate::events::Events;
use crate::operations::follow_dma_faults::FaultWatch;
use crate::operations::time_limits::TimeLimits;
use crate::resources::accelerators::Accelerators;
use crate::resources::budget::Budget;
use crate::resources::cpus::{OfHost, OwnedCpus};
use crate::resources::devices::{self, Devices};
use crate::resources::held::Providers;
use crate::resources::network::{InKernel, NodeNetwork, SetUp};
use crate::resources::own_cgroup::OwnCgroup;
use crate::resources::space::{Hold, Reserve};
use crate::resources::tap_pool::TapPool;
use crate::resources::volumes::Volumes;
use crate::resources::zeroed_memory::ZeroedMemory;
use crate::resources::zeroed_memory::maker::{self, ByChild, Maker};
use crate::sandbox::entry::Entry;
use crate::sandbox::registry::Sandboxes;
use crate::saved::programs::Hashes;
use crate::saved::snapshots::Snapshots;
use crate::saved::templates::Templates;
use crate::store::StateStore;
use crate::store::database::Stored;
use crate::store::paths::{Paths, SandboxPaths};
use crate::store::private;
use crate::telemetry::metrics::{Endpoint, MetricSources, Metrics, Observed};
use crate::vmm::launch::{Jailed, Launcher};
use crate::vmm::monitor::Monitor;
use crate::vmm::process;

/// A daemon that was killed holds the lock until the kernel has ended its last thread.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// A node.
#[derive(Debug)]
pub struct Node {
    pub(crate) config: Config,
    pub(crate) paths: Paths,
    pub(crate) images: Store,
    pub(crate) cgroups: Option<Root>,
    pub(crate) events: Events,
    pub(crate) points: Points,
    pub(crate) monitor: Monitor,
    pub(crate) metrics: Metrics,
    pub(crate) hashes: Hashes,
    pub(crate) snapshots: Snapshots,
    pub(crate) templates: Arc<Templates>,
    pub(crate) budget: Budget,
    pub(crate) zeroed: Arc<ZeroedMemory>,
    own_cgroup: OwnCgroup,
    pub(crate) network: Arc<NodeNetwork>,
    pub(crate) taps: Arc<TapPool>,
    pub(crate) volumes: Volumes,
    pub(crate) launcher: Arc<dyn Launcher>,
    pub(crate) cpus: Arc<dyn OwnedCpus>,
    pub(crate) devices: Devices,
    pub(crate) accelerators: Accelerators,
    pub(crate) dma_faults: FaultWatch,
    pub(crate) time_limits: TimeLimits,
    pub(crate) store: Arc<StateStore>,
    pub(crate) sandboxes: Arc<Sandboxes>,
    /// Its state directory, with some room held.
    pub(crate) hold: Arc<Hold>,
}

/// What a node has outside of its own files, as ports: unit tests simulate them.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) launcher: Arc<dyn Launcher>,
    pub(crate) network: Option<Arc<dyn SetUp>>,
    pub(crate) cgroups: Option<Root>,
    pub(crate) cpus: Arc<dyn OwnedCpus>,
    pub(crate) sysfs: Sysfs,
    pub(crate) vfio: Arc<dyn devices::VfioHost>,
    /// Where specifications of the Container Device Interface are.
    pub(crate) cdi: cdi::Directories,
    /// The host's boot.
    pub(crate) boot: String,
    /// Who makes zeroed memory.
    pub(crate) zeroed: Arc<dyn Maker>,
    pub(crate) points: Points,
}

impl Parts {
    fn real(config: &Config) -> Result<Self, Error> {
        let cgroups = Self::cgroups(config)?;
        Ok(Self {
            cgroups,
            cpus: Arc::new(OfHost),
            sysfs: Sysfs::of_host(),
            vfio: Arc::new(devices::ThisVfio),
            cdi: cdi::Directories::of_host(),
            boot: crate::ids::boot()?,
            zeroed: Arc::new(ByChild::this_program()),
            launcher: Arc::new(Jailed),
            // The TAPs are handed to VMMs in jails.
            network: config.users.is_some().then(|| Arc::new(InKernel) as _),
            points: Points::from_environment(),
        })
    }

    /// Below the one that is given, or at the top; nothing where there are none.
    pub(crate) fn cgroups(config: &Config) -> Result<Option<Root>, Error> {
        let below = config.cgroup.as_deref().unwrap_or("".as_ref());
        match Root::open_below(below, &instance(&config.state)) {
            Ok(root) => Ok(Some(root)),
            // Elsewhere they would be in the way of whoever manages that place.
            Err(error) if config.cgroup.is_some() => Err(error.into()),
            Err(error) => {
                log::warn!("sandboxes have no cgroups, so nothing limits and accounts them: {error}");
                Ok(None)
            }
        }
    }
}

impl Node {
    /// Opens the state directory, finds the sandboxes that run, and puts right what a crash has left.
    ///
    /// # Errors
    /// Another daemon has it, or it cannot be used.
    pub fn open(config: Config) -> Result<Arc<Self>, Error> {
        let parts = Parts::real(&config)?;
        let node = Self::open_with(config, parts)?;
        node.start_network_upkeep()?;
        node.start_following_clock()?;
        node.start_following_dma_faults()?;
        node.start_tending()?;
        node.start_time_limits()?;
        node.start_zeroing_memory()?;
        Ok(node)
    }

    /// The same with these parts outside of it, and without what is looked at now and then.
    pub(crate) fn open_with(config: Config, parts: Parts) -> Result<Arc<Self>, Error> {
        let paths = Paths::new(config.state.clone());
        for directory in [paths.state().to_owned(), paths.sandboxes(), paths.runs()] {
            fs::create_dir_all(&directory).map_err(Error::file("make", &directory))?;
        }
        let lock = take_lock(&paths)?;
        close_to_others(&paths, config.sockets.group)?;
        let reserve = Reserve::new(paths.reserve());
        let open = || StateStore::open(&paths, runs, &|id, taken| crate::sandbox::names::make(id, taken));
        let (store, mut found) = match open() {
            Err(error) if error.is_no_space() && reserve.give_back() => open()?,
            opened => opened?,
        };
        crate::saved::disk::clean(&paths.disks()).map_err(Error::file("clean", &paths.disks()))?;
        let volumes = Volumes::open(paths.volumes(), paths.tenant_volumes(), parts.points.clone())?;
        let snapshots = Snapshots::open(paths.snapshots())?;
        let newest = found.known.iter().max_by_key(|stored| stored.sandbox.created_ns);
        let sandboxes = Arc::new(Sandboxes::behind(newest.map(|stored| stored.slot)));
        let network = Arc::new(NodeNetwork::new(instance(&config.state), parts.network));
        // Before anything is done with any of them: the network's tables are made anew when it is needed first.
        for stored in found.known.iter().filter(|stored| stored.networked) {
            network.sends_by(stored.slot, stored.sandbox.config.egress.clone());
        }
        let (store, hold) = (Arc::new(store), Arc::new(Hold::new(lock, reserve)));
        let devices = Devices::open(
            devices::Outside {
                sysfs: parts.sysfs,
                vfio: parts.vfio,
                cdi: parts.cdi,
                boot: parts.boot,
                own: config.state.clone(),
                points: parts.points.clone(),
            },
            (Arc::clone(&store), Arc::clone(&hold)),
            std::mem::take(&mut found.devices),
        );
        // Each piece is a file.
        let pieces = config.zeroing.ahead.bytes() / ZEROED_PIECE.bytes();
        let budget = Budget::new(Arc::clone(&config.host), config.overcommit, &config.state, pieces);
        let node = Arc::new(Self {
            images: Store::open(&paths.images())?,
            cgroups: parts.cgroups,
            events: Events::default(),
            points: parts.points,
            monitor: Monitor::new().map_err(Error::host("waiting for processes"))?,
            metrics: Metrics::default(),
            hashes: Hashes::default(),
            snapshots,
            templates: Arc::new(Templates::new(paths.templates())),
            zeroed: ZeroedMemory::new(config.zeroing.ahead, parts.zeroed, budget.clone()),
            budget,
            own_cgroup: OwnCgroup::default(),
            taps: TapPool::new(Arc::clone(&network), Arc::clone(&sandboxes)),
            network,
            volumes,
            launcher: parts.launcher,
            cpus: parts.cpus,
            devices,
            accelerators: Accelerators::default(),
            dma_faults: FaultWatch::default(),
            time_limits: TimeLimits::default(),
            store,
            sandboxes,
            hold,
            paths,
            config,
        });
        node.snapshots.find_all(&node.store)?;
        node.templates.find_all(node.template_context(), &node.store)?;
        node.start_monitor()?;
        node.reconcile(found)?;
        if let Err(error) = node.network.publish_again() {
            log::error!("published ports may be missing: {error}");
        }
        if let Err(error) = node.store.report() {
            log::error!("`basalt doctor` cannot tell what was found: {error}");
        }
        Ok(node)
    }

    /// Serves its metrics on the state directory's socket, and on `tcp`.
    ///
    /// # Errors
    /// One of the two cannot be had, or `tcp` can be reached from elsewhere.
    pub fn serve_metrics(self: &Arc<Self>, tcp: Option<SocketAddr>) -> Result<Endpoint, Error> {
        let observed: Arc<dyn Observed> = Arc::<Self>::clone(self);
        Endpoint::bind(&observed, tcp)
    }

    /// Moves this process to a cgroup of its own, so that it outlives whoever started it. A daemon that a service manager
    /// keeps, or that was given a cgroup, stays where it is.
    pub(crate) fn leave_cgroup(&self) {
        if let Some(root) = self
            .cgroups
            .as_ref()
            .filter(|_| !self.config.managed && self.config.cgroup.is_none())
            && let Err(error) = self.own_cgroup.enter(root)
        {
            log::warn!("the daemon stays in the cgroup of the process that started it, and may end with it: {error}");
        }
    }

    pub(crate) fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Entry>>> {
        self.sandboxes.entries()
    }

    /// All sandboxes, the oldest first.
    pub fn list(&self) -> Vec<Sandbox> {
        self.sandboxes.list()
    }

    /// The sandbox of this name, or whose id begins so.
    pub(crate) fn find(&self, wanted: &str) -> Result<Arc<Entry>, Error> {
        self.sandboxes.find(wanted)
    }

    /// Takes a name and a slot: from here on the sandbox is known. `name` is made up where it is not given.
    pub(crate) fn register(&self, stored: Stored, name: Option<&str>) -> Result<Arc<Entry>, Error> {
        let write = |stored: &Stored| self.with_room(|| self.store.put(stored));
        self.sandboxes.register(stored, name, write)
    }

    /// Changes what is known of a sandbox, in the database and in its record.
    pub(crate) fn update(&self, entry: &Entry, change: impl FnOnce(&mut Stored)) -> Result<(), Error> {
        let _span = span("record");
        let mut inner = entry.lock();
        if inner.gone {
            return Ok(());
        }
        let mut stored = inner.stored.clone();
        change(&mut stored);
        stored.sandbox.settle_pause();
        stored.generation += 1;
        self.with_room(|| self.store.change(&inner.stored, &stored))?;
        inner.stored = stored;
        drop(inner);
        entry.notify();
        Ok(())
    }

    /// Forgets a sandbox of which nothing is left.
    pub(crate) fn forget(&self, entry: &Entry) -> Result<(), Error> {
        let stored = entry.stored();
        self.with_room(|| self.store.forget(&stored))?;
        self.sandboxes.remove(entry);
        let mut inner = entry.lock();
        inner.is_gone();
        self.events.tell(EventKind::Remove, &inner.stored.sandbox);
        drop(inner);
        entry.notify();
        Ok(())
    }

    pub(crate) fn sandbox_paths(&self, entry: &Entry) -> SandboxPaths {
        self.paths.sandbox(&entry.id)
    }

    /// The sandbox's cgroup, if it has one.
    pub(crate) fn cgroup(&self, entry: &Entry) -> Result<Option<Cgroup>, Error> {
        match &self.cgroups {
            Some(root) => Ok(root.find(&entry.id)?),
            None => Ok(None),
        }
    }

    /// Where machines have what they hold from.
    pub(crate) fn providers(&self) -> Providers<'_> {
        Providers {
            cgroups: self.cgroups.as_ref(),
            cpus: &*self.cpus,
            devices: &self.devices,
            accelerators: &self.accelerators,
            network: &self.network,
            paths: &self.paths,
            store: &self.store,
            sandboxes: &self.sandboxes,
            kill: self.config.limits.kill,
        }
    }

    /// Takes away what the node keeps in the kernel beyond its sandboxes.
    pub(crate) fn clean(&self) -> Result<(), Error> {
        if !self.entries().is_empty() {
            return Err(Error::Invalid(
                "there are sandboxes: remove them first (`basalt rm --force`)".into(),
            ));
        }
        self.take_away()
    }

    /// The same while sandboxes are known, none of which has a VM: the next start makes it again.
    pub(crate) fn take_away(&self) -> Result<(), Error> {
        self.taps.wait(self.config.limits.answer)?;
        self.network.take_away()?;
        self.volumes.tenants.take_away(&self.sandboxes);
        self.zeroed.close();
        if let Some(root) = &self.cgroups {
            maker::remove_cgroup(root)?;
            self.own_cgroup.take_away(root)?;
        }
        Ok(())
    }

    /// As if this process had died: another node can have the state directory.
    #[cfg(test)]
    pub(crate) fn dies(&self) {
        self.hold.let_go();
        self.monitor.close();
    }
}

impl Observed for Node {
    fn sources(&self) -> MetricSources<'_> {
        MetricSources {
            metrics: &self.metrics,
            sandboxes: &self.sandboxes,
            budget: &self.budget,
            zeroed: &self.zeroed,
            devices: &self.devices,
            sees_dma_faults: self.dma_faults.is_on(),
            images: &self.images,
            paths: &self.paths,
            cgroups: self.cgroups.as_ref(),
            exporter: self.config.spans.as_ref(),
        }
    }
}

/// What the cgroups and the network of the node with this state directory are called.
pub fn instance(state: &std::path::Path) -> String {
    if state == std::path::Path::new("/var/lib/basalt") {
        return "basalt-node".to_owned();
    }
    // FNV-1a: the name must be the same after every start, and nobody has a reason to make two the same.
    let hash = state
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("basalt-node-{:08x}", hash >> 32)
}

/// What an earlier version, or another umask, has left open to other users is closed.
fn close_to_others(paths: &Paths, group: Option<u32>) -> Result<(), Error> {
    let state = paths.state();
    let closed = private::close(paths, group).map_err(Error::file("look at", state))?;
    if closed.count > 0 {
        log::warn!(
            "{} files and directories in {} were open to other users of this host; they are closed now",
            closed.count,
            state.display()
        );
    }
    if let Some((path, error)) = closed.failed {
        log::error!("{path} stays open to other users of this host: {error}");
    }
    Ok(())
}

fn take_lock(paths: &Paths) -> Result<File, Error> {
    let path = paths.lock();
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(Error::file("open", &path))?;
    let end = Instant::now() + LOCK_PATIENCE;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(fs::TryLockError::WouldBlock) if Instant::now() < end => std::thread::sleep(LOCK_PAUSE),
            Err(fs::TryLockError::WouldBlock) => return Err(Error::Locked(paths.state().to_owned())),
            Err(fs::TryLockError::Error(error)) => return Err(Error::file("lock", &path)(error)),
        }
    }
}

/// Whether the process is there that was a sandbox's VMM.
fn runs(stored: &Stored) -> bool {
    let process = stored.sandbox.vmm;
    process.is_some_and(|known| process::identify(known.pid) == Some(known))
}
