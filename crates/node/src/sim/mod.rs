//! A node whose outside is simulated: VMMs are processes that do nothing and speak the VMM's protocol, guests speak the agent's, the
//! network is a table, the disk is memory. Everything from the use cases down to the database is real, and so are its threads.
//!
//! What tests of it want to know: whatever fails, and wherever the daemon dies, every sandbox comes to rest, nothing is left of what is
//! gone, and nobody loses what was acknowledged.

mod accelerators;
mod at_once;
mod background;
mod cases;
mod cdi;
mod cpus;
mod detach_cases;
mod device_start;
mod devices;
mod egress;
mod failed_undo;
mod faults;
mod gateway_socket;
mod guest;
mod held_memory;
mod host_cases;
mod idle;
mod interrupted;
mod machine;
mod memory_templates;
pub(crate) mod network;
mod private_memory;
mod processes;
mod resets;
mod saved_cases;
mod sequences;
mod suspend_cases;
mod time_limits;
mod zeroed_memory;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use base::{ByteSize, Points};
use host::MemInfo;
use node_api::{ProcessConfig, Resources, Sandbox, SandboxConfig, State};
use vfio::host::simulated::Kernel;
use vmm_api::VmState;

use self::cpus::Cpus;
use self::faults::{Crashed, Faults};
use self::machine::Machines;
use self::network::Network;
use crate::Error;
use crate::config::{Config, Programs, TimeLimits, Zeroing};
use crate::node::{Node, Parts};
use crate::operations::stages::Started;
use crate::resources::budget::{HostNumbers, Space};
use crate::resources::devices::NullFiles;
use crate::resources::zeroed_memory::tests::Files;
use crate::sandbox::entry::Entry;
use crate::testing::SmallDisk;

/// A file system in memory that is there.
const MEMORY: &str = "/dev/shm";

/// More than anything here takes, on a machine that does other things too.
const PATIENCE: Duration = Duration::from_secs(30);

/// The only disk that sandboxes have here.
const DISK: ByteSize = ByteSize::mib(16);

/// A host with a node.
pub(crate) struct World {
    directory: Directory,
    pub(crate) faults: Faults,
    machines: Arc<Machines>,
    pub(crate) network: Network,
    cpus: Arc<Cpus>,
    /// Whose devices they are.
    pub(crate) kernel: Kernel,
    /// The host's boot.
    boot: String,
    /// How much memory its daemons have zeroed ahead.
    zeroed: ByteSize,
    /// How long things may take for its daemons.
    limits: TimeLimits,
    node: Option<Arc<Node>>,
}

/// Where its state is.
enum Directory {
    Large(tempfile::TempDir),
    Small(SmallDisk),
}

impl Directory {
    fn path(&self) -> &Path {
        match self {
            Self::Large(directory) => directory.path(),
            Self::Small(disk) => disk.path(),
        }
    }
}

/// As much as anybody could want.
#[derive(Debug)]
struct Plenty;

impl HostNumbers for Plenty {
    fn memory(&self) -> io::Result<MemInfo> {
        let total = ByteSize::mib(1 << 20);
        Ok(MemInfo {
            total,
            available: total,
            huge: ByteSize::mib(1 << 19),
        })
    }

    fn reserved_memory(&self) -> Option<ByteSize> {
        None
    }

    fn space(&self, _: &Path) -> io::Result<Space> {
        let size = 1 << 40;
        Ok(Space { size, free: size })
    }

    fn descriptors(&self) -> u64 {
        1 << 16
    }
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_zeroed_memory(0)
    }

    /// With daemons that have so many pieces of memory zeroed ahead, when they are told to.
    pub(crate) fn with_zeroed_memory(pieces: u64) -> Self {
        let directory = Directory::Large(tempfile::tempdir_in(MEMORY).unwrap());
        Self::on(directory, ByteSize(pieces * crate::ZEROED_PIECE.bytes()))
    }

    /// With a file system that can be filled.
    pub(crate) fn small() -> Self {
        let world = Self::on(Directory::Small(SmallDisk::of(ByteSize::mib(96))), ByteSize(0));
        let filling = world.directory.path().join("filling");
        world.faults.fill_by(move || crate::testing::fill(&filling));
        world
    }

    fn on(directory: Directory, zeroed: ByteSize) -> Self {
        let copied = Command::new("cp")
            .args(["-r", "--sparse=always"])
            .arg(prototype().join("."))
            .arg(directory.path())
            .status();
        assert!(copied.unwrap().success());
        let faults = Faults::default();
        let mut world = Self {
            machines: Arc::new(Machines::new(faults.clone())),
            network: Network::new(faults.clone()),
            cpus: Arc::new(Cpus::new(faults.clone())),
            kernel: devices::kernel(&faults),
            boot: "first".to_owned(),
            zeroed,
            limits: TimeLimits::REAL,
            faults,
            directory,
            node: None,
        };
        world.open();
        world
    }

    /// Starts a daemon.
    fn open(&mut self) {
        let path = self.directory.path();
        let config = Config {
            programs: Programs {
                vmm: processes::PROGRAM.into(),
                ..Programs::default()
            },
            host: Arc::new(Plenty),
            zeroing: Zeroing {
                ahead: self.zeroed,
                ..Zeroing::default()
            },
            limits: self.limits,
            ..crate::testing::config(path)
        };
        let (faults, daemon) = (self.faults.clone(), self.faults.next_daemon());
        let parts = Parts {
            launcher: Arc::clone(&self.machines) as _,
            network: Some(Arc::new(self.network.clone())),
            cgroups: Parts::cgroups(&config).unwrap(),
            cpus: Arc::clone(&self.cpus) as _,
            sysfs: self.kernel.sysfs(),
            vfio: Arc::new(NullFiles { iommufd: false }),
            cdi: ::cdi::Directories::of(vec![path.join("etc-cdi"), path.join("run-cdi")]),
            boot: self.boot.clone(),
            zeroed: Arc::<Files>::default(),
            points: Points::new(move |name| faults.point(daemon, name)),
        };
        let node = Node::open_with(config, parts).unwrap();
        let weak = Arc::downgrade(&node);
        self.faults
            .die_by(move || weak.upgrade().iter().for_each(|node| forget_all(node)));
        self.node = Some(node);
    }

    /// With a daemon that waits no longer than this for machines that were told to power off.
    pub(crate) fn powers_off_within(&mut self, power_off: Duration) {
        self.limits.power_off = power_off;
        self.restart();
    }

    pub(crate) fn node(&self) -> &Arc<Node> {
        self.node.as_ref().unwrap()
    }

    /// The daemon dies where it is, if it has not, and another one starts.
    pub(crate) fn restart(&mut self) {
        self.restart_behind(|_| ());
    }

    /// The same with something that happens while there is none.
    pub(crate) fn restart_behind(&mut self, meanwhile: impl FnOnce(&Machines)) {
        // Threads of the old one end at the next point that they come to.
        self.faults.next_daemon();
        let node = self.node.take().unwrap();
        forget_all(&node);
        node.dies();
        drop(node);
        meanwhile(&self.machines);
        self.open();
        assert_eq!(self.cpus.ended_owners(), BTreeSet::new());
    }

    /// What a sandbox of this name is asked for with.
    pub(crate) fn config(name: &str) -> SandboxConfig {
        SandboxConfig {
            name: Some(name.to_owned()),
            image: "tiny".to_owned(),
            resources: Resources {
                disk: Some(DISK),
                ..crate::testing::stored("000000000000", "").sandbox.config.resources
            },
            network: node_api::NetworkMode::Node,
            ports: vec!["80:80".to_owned()],
            boot: true,
            process: ProcessConfig {
                command: vec!["true".to_owned()],
                ..ProcessConfig::default()
            },
            ..crate::testing::stored("000000000000", "").sandbox.config
        }
    }

    pub(crate) fn run(&self, config: SandboxConfig) -> Result<(Arc<Entry>, Started), Error> {
        let (_asker, cancel) = UnixStream::pair().unwrap();
        self.node().run(config, cancel.as_fd())
    }

    pub(crate) fn entry(&self, name: &str) -> Arc<Entry> {
        self.node().find(name).unwrap()
    }

    /// Does something as a daemon whose request it is: whether it came to its end, and how.
    pub(crate) fn attempt(&self, act: impl FnOnce(&Self) -> Result<(), Error>) -> Attempt {
        match catch_unwind(AssertUnwindSafe(|| act(self))) {
            Ok(Ok(())) => Attempt::Done,
            Ok(Err(error)) => Attempt::Failed(error),
            Err(panic) if panic.is::<Crashed>() => Attempt::Crashed,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Waits until nothing happens any more, and looks whether what there is is what the node thinks; what is wrong.
    pub(crate) fn is_at_rest(&self) -> Result<(), String> {
        soon(|| {
            // As its threads do now and then.
            self.node().tend(&mut BTreeMap::new());
            self.node().network.restore().map_err(|error| error.to_string())?;
            self.look()
        })
    }

    fn look(&self) -> Result<(), String> {
        let node = self.node();
        let all: Vec<_> = node.entries().values().map(|entry| entry.stored()).collect();
        let mut vmms = BTreeMap::new();
        for stored in &all {
            let Sandbox { id, state, vmm, .. } = &stored.sandbox;
            if !(matches!(state, State::Running | State::Paused) || state.is_off()) || stored.operation.is_some() {
                return Err(format!("sandbox {id} is {state:?}, under way: {:?}", stored.operation));
            }
            same("devices that are to come back", &stored.detached, &Vec::new())?;
            if state.has_vm() {
                vmms.insert(id.clone(), (vmm.map(|vmm| vmm.pid), *state));
            }
        }
        let entries: Vec<_> = node.entries().values().cloned().collect();
        let unwatched = entries
            .iter()
            .find(|entry| entry.vm().is_some_and(|vm| !vm.is_watched()));
        if let Some(entry) = unwatched {
            return Err(format!("nobody waits for the end of the machine of {}", entry.id));
        }
        let owners: BTreeSet<_> = all
            .iter()
            .filter(|stored| stored.sandbox.state.has_vm() && !stored.sandbox.config.resources.class.is_standard())
            .map(|stored| stored.sandbox.id.clone())
            .collect();
        same("owners of CPUs", &self.cpus.owners(), &owners)?;
        device_start::look(self)?;
        devices::look(self)?;
        self.look_at_machines(vmms)?;
        self.look_at_network()?;
        let known: BTreeSet<_> = all.iter().map(|stored| stored.sandbox.id.clone()).collect();
        let running: BTreeSet<_> = all
            .iter()
            .filter(|stored| stored.sandbox.state.has_vm())
            .map(|stored| stored.sandbox.id.clone())
            .collect();
        same("directories of sandboxes", &names(&node.paths.sandboxes()), &known)?;
        same("directories of VMs", &names(&node.paths.runs()), &running)?;
        if let Some(root) = &node.cgroups {
            let cgroups = root.list().map_err(|error| error.to_string())?.into_iter().collect();
            same("cgroups", &cgroups, &running)?;
        }
        for directory in [
            node.paths.snapshots(),
            node.paths.templates(),
            node.paths.disks(),
            node.paths.volumes(),
        ] {
            let unfinished: Vec<_> = names(&directory)
                .into_iter()
                .filter(|name| name.starts_with('.'))
                .collect();
            same("unfinished files", &unfinished, &Vec::new())?;
        }
        same("set aside", &names(&node.paths.quarantine()), &BTreeSet::new())
    }

    /// Those and only those that run have a place in the network, with their ports published, and send where they may.
    fn look_at_network(&self) -> Result<(), String> {
        let entries: Vec<_> = self.node().entries().values().cloned().collect();
        let all = entries.iter().map(|entry| entry.stored());
        let wanted: BTreeMap<_, _> = all
            .filter(|stored| stored.networked && stored.sandbox.state.has_vm())
            .map(|stored| (stored.slot, stored.sandbox.config.ports))
            .collect();
        let told = |port: ::network::PortMapping| port.to_string().trim_end_matches("/tcp").to_owned();
        let taken: BTreeMap<_, Vec<String>> = self
            .network
            .taken()
            .into_iter()
            .map(|(slot, ports)| (slot, ports.into_iter().map(told).collect()))
            .collect();
        same("slots of the network", &taken, &wanted)?;
        let all = entries.iter().map(|entry| entry.stored());
        let wanted: BTreeMap<_, _> = all
            .filter(|stored| stored.networked && stored.sandbox.state.has_vm())
            .map(|stored| (stored.slot, stored.sandbox.config.egress))
            .filter(|(_, egress)| egress.restricts())
            .collect();
        same("where slots may send", &self.network.egresses(), &wanted)?;
        same("where slots have no connections", &self.network.ended(), &wanted)
    }

    fn look_at_machines(&self, wanted: BTreeMap<String, (Option<i32>, State)>) -> Result<(), String> {
        let alive = self.machines.alive();
        let mut found = BTreeMap::new();
        for machine in &alive {
            let shown = machine.lock();
            if shown.has_hung_up() {
                return Err(format!("the machine of {} is about to end", machine.sandbox));
            }
            let state = match (shown.vm, shown.is_frozen) {
                (Some(VmState::Running), false) => State::Running,
                (Some(VmState::Paused), _) => State::Paused,
                other => return Err(format!("the machine of {} is {other:?}", machine.sandbox)),
            };
            found.insert(machine.sandbox.clone(), (i32::try_from(machine.pid).ok(), state));
        }
        if alive.len() != found.len() {
            return Err("a sandbox has two machines".to_owned());
        }
        let entries = self.node().entries();
        let accelerated = entries.values().map(|entry| entry.stored().sandbox);
        let accelerated = accelerated
            .filter(|it| it.state.has_vm() && it.config.accelerator.is_some() && it.accelerator_ended.is_none());
        let mut accelerated: Vec<_> = accelerated.map(|sandbox| sandbox.id).collect();
        accelerated.sort();
        let mut served = self.machines.accelerators.served();
        served.sort();
        same("accelerators that are served", &served, &accelerated)?;
        // The null back end, which has none, is not among these.
        let parts: Vec<_> = self.node().accelerators.report().into_keys().collect();
        same("parts of an accelerator's time", &parts, &accelerated)?;
        same("machines", &found, &wanted)
    }

    /// Has a sandbox's disk begin so.
    pub(crate) fn write_to_disk(&self, name: &str, bytes: &[u8]) {
        let disk = File::options().write(true).open(self.disk(name)).unwrap();
        disk.write_all_at(bytes, 0).unwrap();
    }

    /// Whether it begins so.
    pub(crate) fn disk_has(&self, name: &str, bytes: &[u8]) -> bool {
        let mut there = vec![0; bytes.len()];
        File::open(self.disk(name))
            .unwrap()
            .read_exact_at(&mut there, 0)
            .unwrap();
        there == bytes
    }

    fn disk(&self, name: &str) -> PathBuf {
        self.node().sandbox_paths(&self.entry(name)).disk()
    }

    /// The process of this sandbox's machine, if that runs now.
    pub(crate) fn running(&self, name: &str) -> Option<u32> {
        let id = self.node().find(name).ok()?.id.clone();
        let alive = self.machines.alive();
        let its = alive
            .iter()
            .find(|machine| machine.sandbox == id && machine.lock().vm == Some(VmState::Running));
        its.map(|machine| machine.pid)
    }

    /// This process is there still.
    pub(crate) fn has(&self, process: Option<u32>) -> bool {
        self.machines.alive().iter().any(|machine| Some(machine.pid) == process)
    }

    /// Waits until there is a template.
    pub(crate) fn has_template(&self) -> Result<(), String> {
        soon(|| same("templates", &self.node().list_templates().len(), &1))
    }

    /// Something is verified in the background, or waits for that.
    pub(crate) fn works_in_background(&self) -> bool {
        self.node().templates.checks.lock().works
    }

    /// Everybody can be removed, and nothing is left.
    pub(crate) fn ends_empty(&self) -> Result<(), String> {
        let all: Vec<_> = self.node().entries().values().cloned().collect();
        for entry in all {
            let removed = self.node().remove(&entry, true);
            removed.map_err(|error| format!("sandbox {} is not removed: {error}", entry.id))?;
        }
        self.is_at_rest()?;
        same("machines", &self.machines.alive().len(), &0)?;
        soon(|| {
            let promised = self.node().budget.promised();
            let left: Vec<_> = promised.iter().filter(|promised| promised.promised > 0).collect();
            same("promised", &format!("{left:?}"), &"[]".to_owned())
        })
    }

    /// There is space again, and the node has seen it.
    pub(crate) fn empty(&self) -> Result<(), String> {
        let filling = self.directory.path().join("filling");
        if !filling.exists() {
            return Ok(());
        }
        fs::remove_file(filling).unwrap();
        let (end, mut retries) = (Instant::now() + PATIENCE, BTreeMap::new());
        while !self.node().tend(&mut retries) {
            if Instant::now() > end {
                return Err("something lacks space that is there".to_owned());
            }
        }
        Ok(())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(node) = self.node.take() {
            for machine in self.machines.alive() {
                machine.die();
            }
            self.faults.next_daemon();
            // Those of sandboxes that it ends with, when their machines are gone.
            if let Some(root) = &node.cgroups {
                for id in root.list().unwrap() {
                    soon(|| root.remove(&id).map_err(|error| error.to_string())).unwrap();
                }
            }
            // A test that failed may have left more.
            if let Err(error) = node.take_away() {
                writeln!(io::stderr(), "something is left in the kernel: {error}").unwrap();
            }
            node.dies();
        }
    }
}

/// Threads of a daemon that has died wait for nothing more, and write nothing.
fn forget_all(node: &Node) {
    let all: Vec<_> = node.entries().values().cloned().collect();
    for entry in all {
        entry.lock().gone = true;
        entry.notify();
    }
}

/// What became of something that was asked for.
#[derive(Debug)]
pub(crate) enum Attempt {
    Done,
    Failed(Error),
    /// The daemon has died.
    Crashed,
}

/// Waits until it is so, or says what is not.
fn soon(look: impl Fn() -> Result<(), String>) -> Result<(), String> {
    let end = Instant::now() + PATIENCE;
    loop {
        match look() {
            Err(wrong) if Instant::now() > end => return Err(wrong),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
            Ok(()) => return Ok(()),
        }
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: &T, wanted: &T) -> Result<(), String> {
    match found == wanted {
        true => Ok(()),
        false => Err(format!("{what}: found {found:?}, wanted {wanted:?}")),
    }
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// What every world begins with: an image, an empty disk, and files that stand for programs.
fn prototype() -> &'static Path {
    static MADE: OnceLock<tempfile::TempDir> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let directory = tempfile::tempdir_in(MEMORY).unwrap();
        let path = directory.path();
        for program in ["vmlinux", "initramfs.cpio"] {
            fs::write(path.join(program), program).unwrap();
        }
        let state = path.join("state");
        fs::create_dir(&state).unwrap();
        let paths = crate::store::paths::Paths::new(state);
        let layout = path.join("layout");
        crate::testing::support::write_layout(&layout, &serde_json::json!({ "Cmd": ["true"] }));
        let images = image::Store::open(&paths.images()).unwrap();
        images.import(&layout, Some("tiny"), &mut |_| ()).unwrap();
        crate::saved::disk::create(&paths.disks(), DISK, &path.join("disk")).unwrap();
        fs::remove_dir_all(layout).unwrap();
        fs::remove_file(path.join("disk")).unwrap();
        directory
    });
    made.path()
}
