//! What a PCI function of the host's does for a guest beside what it does for the host itself: reads of its NVMe disk, TCP by a virtual
//! function of its network device, and how often the guest leaves its CPU for them, by class. Functions are bound and given as anybody
//! would do it, by the command line; what a killed run leaves bound is the guard's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base::PciAddress;
use vfio::host::Sysfs;
use vfio::host::binding::BindingRecord;

use crate::class::{CLASSES, Class, Counters, Module, run};
use crate::device_port::{CLIENT, Namespace, Port};
use crate::exits::{Done, Load, Reached, Seen, Stage, VCPUS};
use crate::figures::{Bench, tell};
use crate::function;
use crate::guard::Kept;
use crate::image_root::{Busy, Root, last_cpus};
use crate::report::{Figure, cell};
use crate::run::Node;
use crate::stats::Target;

const HOST: &str = "the host itself";
const MEMORY: &str = "256m";
const MOST_RUNS: usize = 5;

/// How long the host may take to have a function's driver ready again.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const PAUSE: Duration = Duration::from_millis(50);

/// Why a bare guest leaves its CPU to interrupt another vCPU of its own (`class`): no device and no timer takes part in that.
const BETWEEN_VCPUS: &str = "icr";

/// Where loads write what they have done (`exits::LOADS`).
const OPERATIONS: Done = Done::Late("cut -d';' -f8 /run/wrk | grep -x '[1-9][0-9.]*'");
/// The last rate of iperf3's report is the receiver's.
const BITS: Done =
    Done::Late("sed -n 's/.*\"bits_per_second\":[[:space:]]*\\([1-9][0-9]*\\).*/\\1/p' /run/wrk | tail -n 1 | grep .");

/// `fio --output-format=terse`, version 3: field 8 is the reads a second. As long as a guest is watched under a load.
macro_rules! reads {
    ($depth:literal) => {
        concat!(
            "exec fio --name=reads --filename=${DISK:-/dev/nvme0n1} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=",
            $depth,
            " --time_based --runtime=30 --output-format=terse --terse-version=3 >/run/wrk"
        )
    };
}

const DISK: [Load; 2] = [
    Load {
        name: "4 KiB, one at a time",
        scripts: &[reads!("1")],
        done: Some(OPERATIONS),
        target: Reached::None,
    },
    Load {
        name: "4 KiB, 32 at a time",
        scripts: &[reads!("32")],
        done: Some(OPERATIONS),
        target: Reached::None,
    },
];

const STREAMS: [Load; 2] = [
    Load {
        name: "TCP to the host",
        scripts: &["exec iperf3 --client 192.0.2.1 --time 30 --json >/run/wrk"],
        done: Some(BITS),
        target: Reached::None,
    },
    Load {
        name: "TCP from the host",
        scripts: &["exec iperf3 --client 192.0.2.1 --time 30 --json --reverse >/run/wrk"],
        done: Some(BITS),
        target: Reached::None,
    },
];

/// Those that a guest with a function can have: how a bare one idles is measured elsewhere.
fn classes() -> impl Iterator<Item = &'static Class> {
    CLASSES.iter().filter(|class| class.is_plain())
}

/// A function that a node of this run has in turn with the host's driver. The guard gives it back as it was.
pub(crate) struct Turn<'n> {
    node: &'n Node,
    sysfs: Sysfs,
    record: BindingRecord,
}

impl<'n> Turn<'n> {
    pub(crate) fn begin(node: &'n Node, address: PciAddress) -> Result<Self> {
        let sysfs = Sysfs::of_host();
        let record = BindingRecord::take(&sysfs, address)?;
        Kept::Function(record.clone()).tell(true);
        Ok(Self { node, sysfs, record })
    }

    fn address(&self) -> String {
        self.record.address.to_string()
    }

    /// What `guest` does with the function; the host's driver has it again afterwards.
    pub(crate) fn guests<T>(&self, guest: impl FnOnce() -> Result<T>) -> Result<T> {
        let address = self.address();
        self.node.ok(&["device", "bind", &address])?;
        let done = guest();
        // Before it can be given back, whoever has it has to go, who may be there still where something failed.
        drop(self.node.ok(&["rm", "--force", Node::CLONE]));
        let back = self.node.ok(&["device", "unbind", &address]);
        let done = done?;
        back?;
        Ok(done)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        match function::give_back(&self.sysfs, &self.record) {
            Ok(()) => Kept::Function(self.record.clone()).tell(false),
            Err(error) => eprintln!("{} stays as it is for now: {error:#}", self.record.address),
        }
    }
}

/// Waits for a file of the host's.
pub(crate) fn wait_for(path: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !path.exists() {
        ensure!(
            Instant::now() < deadline,
            "{} is not there after {PATIENCE:?}",
            path.display()
        );
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// What the host's driver calls the first disk of a function, when it has one: the host may have others.
fn disk_of(function: PciAddress) -> Result<String> {
    let controllers = Path::new("/sys/bus/pci/devices")
        .join(function.to_string())
        .join("nvme");
    wait_for(&controllers)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        for controller in fs::read_dir(&controllers)? {
            for entry in fs::read_dir(controller?.path())? {
                if let Some(disk) = disk_by(&entry?.file_name().to_string_lossy()) {
                    return Ok(disk);
                }
            }
        }
        ensure!(Instant::now() < deadline, "{function} has no disk after {PATIENCE:?}");
        thread::sleep(PAUSE);
    }
}

/// The disk of a controller's first namespace, by the name that stands with the controller: the disk's own, or that of the one path to it
/// (`nvme0c0n1` of `nvme0n1`), where the driver counts with several.
fn disk_by(name: &str) -> Option<String> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name.strip_prefix("nvme")?.strip_suffix("n1")?;
    let (disk, path) = numbers.split_once('c').unwrap_or((numbers, "0"));
    (digits(disk) && digits(path)).then(|| format!("nvme{disk}n1"))
}

/// How much of a load the host does a second, its script started by these words.
fn on_host(root: &Root, load: &Load, by: &[&str]) -> Result<f64> {
    let cpus = last_cpus(VCPUS)?;
    let script = load.scripts.first().context("a load without a script")?;
    let Some(Done::Late(said)) = load.done else {
        bail!("{} says nothing at its end", load.name);
    };
    let script = root.script(&cpus, script);
    let mut command = match by {
        [] => script,
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(script.get_program()).args(script.get_args());
            command
        }
    };
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(
        output.status.success(),
        "{}: {}",
        load.name,
        String::from_utf8_lossy(&output.stderr)
    );
    let output = root.script(&cpus, said).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim()
        .parse()
        .with_context(|| format!("{} says {text:?}", load.name))
}

/// The tables of one kind of function.
struct Tables {
    done: Figure,
    exits: Figure,
    reasons: Figure,
    others: Figure,
}

impl Tables {
    fn new(what: &str, unit: &str) -> Self {
        let names = || classes().map(|class| class.name);
        Self {
            done: Figure::beside(what, unit, std::iter::once(HOST).chain(names())),
            exits: Figure::beside(&format!("Exits of that, {VCPUS} vCPUs"), "a second", names()),
            reasons: Figure::beside("The same by reason", "a second", names()),
            others: Figure::beside(
                "Exits of those that own their CPUs, but for interrupts between their vCPUs",
                "a second",
                classes().filter(|class| class.owns).map(|class| class.name),
            ),
        }
    }

    fn take(&mut self, class: &Class, seen: Seen) {
        if class.owns {
            for load in seen.exits.iter().map(|(load, _)| load) {
                let between = cell(load, BETWEEN_VCPUS);
                let others = seen
                    .reasons
                    .iter()
                    .filter(|(row, _)| row.starts_with(load.as_str()) && *row != between);
                self.others.put(load, class.name, others.map(|(_, rate)| rate).sum());
            }
        }
        for (figure, rows) in [
            (&mut self.done, seen.done),
            (&mut self.exits, seen.exits),
            (&mut self.reasons, seen.reasons),
        ] {
            for (row, rate) in rows {
                figure.put(&row, class.name, rate);
            }
        }
    }

    fn judge(&mut self, loads: &[Load]) {
        for class in classes() {
            let least = if class.owns { 0.98 } else { 0.95 };
            for load in loads {
                let (ours, theirs) = (cell(load.name, class.name), cell(load.name, HOST));
                self.done.ratio(&ours, &theirs, Target::AtLeast(least));
                if class.owns {
                    self.others.absolute(&ours, Target::AtMost(0.0));
                }
            }
        }
    }

    fn figures(mut self, loads: &[Load]) -> [Figure; 4] {
        self.judge(loads);
        [self.done, self.exits, self.reasons, self.others]
    }
}

impl Bench<'_> {
    /// The host's NVMe disk, by the host's driver and by guests'.
    pub(crate) fn device_disk(&mut self) -> Result<()> {
        run("modprobe", &["vfio-pci"])?;
        let (_module, node) = self.node_for_guests()?;
        let counters = Counters::new(&node)?;
        let digest = node.image("load", "load-entrypoint")?;
        let root = Root::mount(&images(), &digest, &self.world.scratch)?;
        let address = function::find(self.device.device)?;
        self.fact("device-disk: function", &address.to_string());
        let turn = Turn::begin(&node, address)?;
        let words = ["--device", &turn.address(), "--device-start", "eager"];
        let stage = Stage::new(&node, &counters, digest, MEMORY).with(&words);
        let mut tables = Tables::new("Reads of an NVMe disk", "a second");
        for round in 0..self.runs.min(MOST_RUNS) {
            let disk = format!("DISK=/dev/{}", disk_of(address)?);
            for load in &DISK {
                let rate = self.again("device-disk", HOST, || on_host(&root, load, &["env", &disk]))?;
                tell("device-disk", round, HOST, rate, load.name);
                tables.done.put(load.name, HOST, rate);
            }
            for class in classes() {
                let seen = self.again("device-disk", class.name, || {
                    turn.guests(|| stage.guest(round, class, &DISK, |_| Ok(())))
                })?;
                tables.take(class, seen);
            }
        }
        self.report.figures.extend(tables.figures(&DISK));
        Ok(())
    }

    /// A virtual function of the host's network device, by the host's driver and by guests', with the physical one at the other end.
    pub(crate) fn device_network(&mut self) -> Result<()> {
        run("modprobe", &["vfio-pci"])?;
        let (_module, node) = self.node_for_guests()?;
        let counters = Counters::new(&node)?;
        let digest = node.image("load", "load-entrypoint")?;
        let root = Root::mount(&images(), &digest, &self.world.scratch)?;
        let port = Port::take(&node)?;
        self.fact("device-network: function", &port.function.to_string());
        let turn = Turn::begin(&node, port.function)?;
        let mut server = root.script(&last_cpus(1)?, "exec iperf3 --server >/dev/null");
        let _server = Busy(vec![server.stdin(Stdio::null()).spawn()?]);
        let words = ["--device", &turn.address(), "--device-start", "eager"];
        let stage = Stage::new(&node, &counters, digest, MEMORY).with(&words);
        let mut tables = Tables::new("TCP by a virtual function of an Intel 82576", "bit/s");
        for round in 0..self.runs.min(MOST_RUNS) {
            for load in &STREAMS {
                let rate = self.again("device-network", HOST, || {
                    let namespace = Namespace::with(port.function)?;
                    on_host(&root, load, &namespace.enter())
                })?;
                tell("device-network", round, HOST, rate, load.name);
                tables.done.put(load.name, HOST, rate);
            }
            for class in classes() {
                let seen = self.again("device-network", class.name, || {
                    turn.guests(|| {
                        stage.guest(round, class, &STREAMS, |stage| {
                            let up = format!("ip address replace {CLIENT} dev eth1 && ip link set eth1 up && sleep 3");
                            stage.ask(&up).map(drop)
                        })
                    })
                })?;
                tables.take(class, seen);
            }
        }
        self.report.figures.extend(tables.figures(&STREAMS));
        Ok(())
    }

    fn node_for_guests(&self) -> Result<(Module, Node)> {
        ensure!(
            thread::available_parallelism()?.get() > VCPUS,
            "a bare guest needs CPUs beside the first: `basalt-lab up --cpus 4`"
        );
        let module = Module::load(&self.world.binaries.join("basalt-assets"), "basalt", "")?;
        Ok((module, Node::with_images(self.world, &images())?))
    }
}

fn images() -> PathBuf {
    PathBuf::from("/var/lib/basalt/images")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_known_by_its_name_and_by_its_path() {
        for (name, disk) in [
            ("nvme0n1", Some("nvme0n1")),
            ("nvme2c1n1", Some("nvme2n1")),
            ("nvme0", None),
            ("nvme0n2", None),
            ("nvmexn1", None),
            ("nvme0cn1", None),
        ] {
            assert_eq!(disk_by(name).as_deref(), disk, "{name}");
        }
    }

    fn seen(reason: &str) -> Seen {
        let load = DISK[0].name.to_owned();
        Seen {
            exits: vec![(load.clone(), 20.0)],
            reasons: vec![(cell(&load, BETWEEN_VCPUS), 15.0), (cell(&load, reason), 5.0)],
            done: vec![(load, 990.0)],
            ..Seen::default()
        }
    }

    #[test]
    fn an_interrupt_of_the_device_that_leaves_the_guest_is_told() {
        let bare = classes().find(|class| class.owns).unwrap();
        let mut tables = Tables::new("reads", "a second");
        tables.done.put(DISK[0].name, HOST, 1000.0);
        tables.take(bare, seen("external interrupt"));
        let [done, .., others] = tables.figures(&DISK);
        let told = |figure: &Figure| {
            figure
                .verdicts
                .iter()
                .map(|it| (it.value, it.reached))
                .collect::<Vec<_>>()
        };
        assert_eq!((told(&done), told(&others)), (vec![(0.99, true)], vec![(5.0, false)]));
    }

    #[test]
    fn interrupts_between_vcpus_are_no_devices() {
        let bare = classes().find(|class| class.owns).unwrap();
        let mut tables = Tables::new("reads", "a second");
        let mut without = seen(BETWEEN_VCPUS);
        without.reasons.truncate(1);
        tables.take(bare, without);
        let [.., others] = tables.figures(&DISK);
        assert_eq!(others.verdicts.len(), 1);
        assert!(others.verdicts[0].reached);
    }
}
