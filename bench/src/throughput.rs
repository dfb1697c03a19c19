//! What servers get done on the host itself, and in guests of each class, in one boot: the same programs out of the same image, on as many
//! CPUs. On the host they run in the image's file system (chroot), on the CPUs that guests get that own theirs.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::class::{CLASSES, Counters, Module, UNTRANSLATED, reserved};
use crate::exits::{Done, LOADS, Load, SETTLED, Stage, VCPUS, WATCHED};
use crate::figures::{Bench, tell};
use crate::image_root::{Busy, Root, last_cpus};
use crate::report::{Figure, cell};
use crate::run::Node;
use crate::stats::Target;

const HOST: &str = "host";

/// What a guest has: no more than the lab reserves for guests whose memory nobody translates.
const MEMORY: &str = "256m";

/// The load: its work can be counted while it goes on.
const ROW: &str = "Redis";

/// Each boots every class.
const MOST_RUNS: usize = 5;

/// How much of this load is done a second on the host.
fn on_host(root: &Root, load: &Load) -> Result<f64> {
    let Some(Done::Soon(asked)) = load.done else {
        anyhow::bail!("{} says what it has done only at its end", load.name);
    };
    let cpus = last_cpus(VCPUS)?;
    let mut busy = Busy(Vec::new());
    for script in load.scripts {
        let mut command = root.script(&cpus, script);
        busy.0
            .push(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    }
    thread::sleep(SETTLED);
    let count = || -> Result<f64> {
        let output = root.script(&cpus, asked).output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        said.trim().parse().with_context(|| format!("{asked} says {said:?}"))
    };
    let (before, began) = (count()?, Instant::now());
    thread::sleep(WATCHED);
    let after = count()?;
    Ok((after - before) / began.elapsed().as_secs_f64())
}

impl Bench<'_> {
    /// The host, and guests of each class, in turn.
    pub(crate) fn throughput(&mut self) -> Result<()> {
        ensure!(
            thread::available_parallelism()?.get() > VCPUS,
            "a bare guest needs CPUs beside the first: `basalt-lab up --cpus 4`"
        );
        let images = PathBuf::from("/var/lib/basalt/images");
        let reserved = reserved(&fs::read_to_string("/proc/cmdline")?);
        let parameters = reserved.as_deref().unwrap_or_default();
        let _module = Module::load(&self.world.binaries.join("basalt-assets"), "basalt", parameters)?;
        let node = Node::with_images(self.world, &images)?;
        let counters = Counters::new(&node)?;
        let digest = node.image("load", "load-entrypoint")?;
        let root = Root::mount(&images, &digest, &self.world.scratch)?;
        let stage = Stage::new(&node, &counters, digest, MEMORY);
        let load = LOADS.iter().find(|load| load.name == ROW).context("no such load")?;
        if reserved.is_none() {
            eprintln!(
                "throughput: not \"{}\", as no memory is reserved (docs/bare.md)",
                UNTRANSLATED.name
            );
        }
        let classes: Vec<_> = CLASSES
            .iter()
            .chain(reserved.is_some().then_some(&UNTRANSLATED))
            .collect();
        let columns = std::iter::once(HOST).chain(classes.iter().map(|class| class.name));
        let mut figure = Figure::beside("Done a second, on the host and in guests", "commands/s", columns);
        for round in 0..self.runs.min(MOST_RUNS) {
            let rate = self.again("throughput", HOST, || on_host(&root, load))?;
            tell("throughput", round, HOST, rate, ROW);
            figure.put(ROW, HOST, rate);
            for class in &classes {
                let rate = self.again("throughput", class.name, || stage.rate(class, load))?;
                tell("throughput", round, class.name, rate, ROW);
                figure.put(ROW, class.name, rate);
            }
        }
        for class in classes.iter().filter(|class| class.owns) {
            figure.ratio(&cell(ROW, class.name), &cell(ROW, HOST), Target::AtLeast(0.97));
        }
        self.report.figures.push(figure);
        Ok(())
    }
}
