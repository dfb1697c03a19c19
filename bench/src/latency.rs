//! What timers, interrupts, registers and doorbells cost a CPU: on the host, and in guests of each class, by the same module in the same
//! kernel (bench/probe), in turn. Guests boot the host's kernel therefore, which takes modules, with our agent.
//!
//! The first half of this file runs on the host, the second in the guest: as PID 1 until the agent is, and as a command.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::class::{CLASSES, Class, Counters, Module, between, sum};
use crate::figures::{Bench, tell};
use crate::report::Figure;
use crate::run::{IDLE, IMAGE, Node};
use crate::stats::Target;
use crate::world::World;

const MODULE: &str = "basalt_probe";
/// Where the module has a file for each operation.
const PROBE: &str = "/proc/basalt_probe";

/// The word that has this program read the file of an operation.
pub(crate) const ASK: &str = "say-latency";

const HOST: &str = "host";

const fn of(file: &'static str, row: &'static str) -> Operation {
    Operation {
        file,
        row,
        device: false,
    }
}

const fn device(file: &'static str, row: &'static str) -> Operation {
    Operation {
        device: true,
        ..of(file, row)
    }
}

/// Fewer than one for each: the question itself varies by some dozens, in a thousand times.
const SOME: Target = Target::Under(0.1);

/// What has to be taken off where exits are counted: the question itself.
const NOTHING: usize = 0;

/// The operations that are measured, in the order of their rows.
const OPERATIONS: [Operation; 16] = [
    of("nothing", "taking the time"),
    of("timer-set", "the timer is set (and read before)"),
    of("timer-interrupt", "the timer's interrupt, to its handler"),
    of("timer-and-back", "the same, and back"),
    of("ipi-self", "an interrupt to itself"),
    of("ipi", "an interrupt to an idle CPU, and its answer"),
    of("ipi-busy", "to a busy one"),
    of("broadcast", "to all others, idle"),
    of("broadcast-busy", "to all others, busy"),
    of("rdmsr-own", "RDMSR of a guest's own register"),
    of("wrmsr-own", "WRMSR of it (and read before)"),
    of("rdmsr-kept", "RDMSR of one that the host keeps"),
    of("wrmsr-kept", "WRMSR of it, unchanged (and read before)"),
    of("cpuid", "CPUID"),
    device("kick", "a virtio doorbell"),
    device("disk-read", "4 KiB read from a virtio disk: doorbell, work, interrupt"),
];

/// Something that the module can do.
#[derive(Clone, Copy, Debug)]
struct Operation {
    file: &'static str,
    row: &'static str,
    /// With a device that only guests have.
    device: bool,
}

/// More CPUs than these tell nothing new.
const MOST_CPUS: usize = 3;

/// Each boots.
const MOST_RUNS: usize = 5;

const SETTLED: Duration = Duration::from_secs(3);

/// What the module says of one operation.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Told {
    least: f64,
    median: f64,
    /// How often it was done in all.
    done: f64,
}

impl Told {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace().map(str::parse::<f64>);
        let [least, median, done] = [words.next()?.ok()?, words.next()?.ok()?, words.next()?.ok()?];
        words.next().is_none().then_some(Self { least, median, done })
    }
}

/// The tables.
struct Tables {
    ticks: Figure,
    least: Figure,
    ratios: Figure,
    exits: Figure,
}

impl Tables {
    fn new(cpus: usize) -> Self {
        let guests = || CLASSES.iter().map(|class| class.name);
        let all = || std::iter::once(HOST).chain(guests());
        let unit = "ticks of the TSC";
        Self {
            ticks: Figure::beside(&format!("What it costs, of {cpus} CPUs"), unit, all()),
            least: Figure::beside("The least that it has cost", unit, all()),
            ratios: Figure::beside("The same, times the host's in the same round", "times", guests()),
            exits: Figure::beside("Exits for each", "exits", guests()),
        }
    }

    fn put(&mut self, operation: &Operation, place: &str, told: Told) {
        self.ticks.put(operation.row, place, told.median);
        self.least.put(operation.row, place, told.least);
    }

    /// Takes in one round of a class, beside the host's.
    fn take(&mut self, class: &str, host: &[Option<Told>], guest: &[(Told, f64)]) {
        for ((operation, host), (told, exits)) in OPERATIONS.iter().zip(host).zip(guest) {
            self.put(operation, class, *told);
            self.exits.put(operation.row, class, *exits);
            if let Some(host) = host {
                self.ratios.put(operation.row, class, told.median / host.median);
            }
        }
    }
}

impl Bench<'_> {
    /// The host, and guests of each class, in turn.
    pub(crate) fn latency(&mut self) -> Result<()> {
        let online = thread::available_parallelism()?.get();
        let cpus = MOST_CPUS.min(online.saturating_sub(1));
        ensure!(
            cpus > 1,
            "an interrupt from one CPU to another needs two, and the host keeps one: `basalt-lab up --cpus 4`"
        );
        let assets = self.world.binaries.join("basalt-assets");
        let _basalt = Module::load(&assets, "basalt", "")?;
        let own = own_assets(self.world)?;
        let node = Node::with_assets(self.world, Some(own))?;
        let counters = Counters::new(&node)?;
        let mut tables = Tables::new(cpus);
        for round in 0..self.runs.min(MOST_RUNS) {
            let host = on_host(&assets, cpus)?;
            for (operation, told) in OPERATIONS.iter().zip(&host) {
                if let Some(told) = told {
                    tell("latency", round, HOST, told.median, operation.file);
                    tables.put(operation, HOST, *told);
                }
            }
            for class in &CLASSES {
                let guest = self.again("latency", class.name, || {
                    drop(node.ok(&["rm", "--force", Node::CLONE]));
                    in_guest(&node, &counters, class, cpus)
                })?;
                for (operation, (told, _)) in OPERATIONS.iter().zip(&guest) {
                    tell("latency", round, class.name, told.median, operation.file);
                }
                tables.take(class.name, &host, &guest);
            }
        }
        for class in CLASSES.iter().filter(|class| class.owns) {
            for operation in OPERATIONS
                .iter()
                .filter(|operation| operation.file.starts_with("timer"))
            {
                let who = crate::report::cell(operation.row, class.name);
                tables.exits.absolute(&who, SOME);
            }
        }
        self.report
            .figures
            .extend([tables.ticks, tables.least, tables.ratios, tables.exits]);
        Ok(())
    }
}

fn on_host(assets: &Path, cpus: usize) -> Result<Vec<Option<Told>>> {
    let _probe = Module::load(assets, MODULE, &format!("cpus={cpus}"))?;
    let ask = |operation: &Operation| {
        if operation.device {
            return Ok(None);
        }
        let path = Path::new(PROBE).join(operation.file);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let told = Told::parse(&text).with_context(|| format!("{} says {text:?}", path.display()))?;
        Ok(Some(told))
    };
    OPERATIONS.iter().map(ask).collect()
}

/// What it says of each, and the exits of one.
#[allow(clippy::cast_precision_loss, reason = "far below 2^53 exits")]
fn in_guest(node: &Node, counters: &Counters<'_>, class: &Class, cpus: usize) -> Result<Vec<(Told, f64)>> {
    let cpus = cpus.to_string();
    let sized = ["run", "--detach", "--boot", "--name", Node::CLONE, "--cpus", &cpus];
    let rest = ["--memory", "256m", "--disk", "0", "--network", "none"];
    let command = [IMAGE, "--", "/say", IDLE];
    node.ok(&[&sized[..], class.words, &rest, &command].concat())?;
    thread::sleep(SETTLED);
    let mut all: Vec<(Told, f64)> = Vec::new();
    for operation in &OPERATIONS {
        let before = counters.exits(class, Node::CLONE)?;
        let text = node.said(&["exec", Node::CLONE, "--", "/say", ASK, operation.file])?;
        let after = counters.exits(class, Node::CLONE)?;
        let told = Told::parse(&text).with_context(|| format!("{} in the guest: {text:?}", operation.file))?;
        all.push((told, sum(&between(&before, &after)) as f64));
    }
    node.ok(&["rm", "--force", Node::CLONE])?;
    let asking = all.get(NOTHING).map_or(0.0, |(_, exits)| *exits);
    let each = |(told, exits): (Told, f64)| (told, (exits - asking).max(0.0) / told.done);
    Ok(all.into_iter().map(each).collect())
}

/// The host's kernel with our agent, its drivers and the module: in place of the assets that a node has.
fn own_assets(world: &World) -> Result<PathBuf> {
    let assets = world.scratch.join("assets");
    fs::create_dir_all(&assets)?;
    fs::copy(&world.debian_kernel, assets.join("vmlinux"))?;
    fs::copy(&world.vmm, assets.join("basalt-vmm"))?;
    let probe = world.binaries.join("basalt-assets").join(format!("{MODULE}.ko"));
    let initramfs = foreign::initramfs(&world.binaries.join("basalt-agent"), &[probe])?;
    fs::write(assets.join("initramfs.cpio"), initramfs)?;
    Ok(assets)
}

/// The command in the guest: one operation's file.
pub(crate) fn ask() -> Result<()> {
    let operation = std::env::args().nth(2).context("which operation?")?;
    let path = Path::new(PROBE).join(operation);
    let text = fs::read(&path).with_context(|| path.display().to_string())?;
    Ok(std::io::stdout().write_all(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class::STANDARD;

    #[test]
    fn what_the_module_says_is_understood() {
        let told = Told {
            least: 100.0,
            median: 120.0,
            done: 1016.0,
        };
        assert_eq!(Told::parse("100 120 1016\n"), Some(told));
        for bad in ["", "1 2", "1 2 3 4", "a 2 3"] {
            assert_eq!(Told::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn operations_are_those_of_the_module() {
        let source = ["registers", "timer", "interrupts", "virtio"]
            .map(|file| fs::read_to_string(format!("{}/probe/{file}.c", env!("CARGO_MANIFEST_DIR"))).unwrap())
            .concat();
        for operation in &OPERATIONS {
            assert!(
                source.contains(&format!(".name = \"{}\"", operation.file)),
                "{operation:?}"
            );
        }
        assert_eq!(source.matches(".name = ").count(), OPERATIONS.len());
        assert_eq!(OPERATIONS[NOTHING].file, "nothing");
    }

    #[test]
    fn a_class_is_held_against_the_host() {
        let mut tables = Tables::new(2);
        let told = |median| Told {
            least: 1.0,
            median,
            done: 10.0,
        };
        let host = [Some(told(10.0)), None];
        tables.take(STANDARD, &host, &[(told(50.0), 1.0), (told(7.0), 2.0)]);
        let who = |operation: usize| crate::report::cell(OPERATIONS[operation].row, STANDARD);
        assert_eq!(tables.ratios.median(&who(0)), Some(5.0));
        assert_eq!(tables.ratios.median(&who(1)), None);
        assert_eq!(tables.exits.median(&who(1)), Some(2.0));
    }
}
