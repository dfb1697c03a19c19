//! Other sizes of a machine: a clone of a template that has the size, as a node makes it, and beside it what a guest alone takes
//! to bring a vCPU or memory into use, which is the least that hotplug into a clone of a smaller template would cost.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base::ByteSize;
use node_api::{Client, Reply, Request};

use crate::clone::{asked, remove};
use crate::figures::{Bench, tell};
use crate::report::Figure;
use crate::run::Node;
use crate::stats::Target;

/// What a guest is asked to do: [`online`].
pub(crate) const ONLINE: &str = "online";

const CLONE: &str = Node::CLONE;

/// vCPUs and MiB of memory; the first is what the others would grow from.
const SHAPES: [(&str, u32, u64); 3] = [
    ("Basalt, 1 vCPU, 128 MiB", 1, 128),
    ("Basalt, 2 vCPUs, 128 MiB", 2, 128),
    ("Basalt, 2 vCPUs, 1 GiB", 2, 1024),
];
const SMALL: usize = 0;
const MORE_CPUS: usize = 1;
const MORE_MEMORY: usize = 2;

const CPU: &str = "A guest: one vCPU comes into use";
const MEMORY: &str = "A guest: 128 MiB come into use";

/// Of the guest's kernel: a vCPU that it can do without, and 128 MiB that nobody is to have pages in that cannot be moved.
const THE_CPU: (&str, [&str; 2]) = ("/sys/devices/system/cpu/cpu1/online", ["0", "1"]);
const THE_MEMORY: (&str, [&str; 2]) = ("/sys/devices/system/memory/memory4/state", ["offline", "online"]);

/// In the guest: takes a vCPU and memory out of use, brings both back, and says how many milliseconds the latter took.
pub(crate) fn online() -> Result<()> {
    let times = [THE_CPU, THE_MEMORY].map(|(path, [off, on])| -> Result<f64> {
        fs::write(path, off).with_context(|| format!("{off} > {path}"))?;
        let begun = Instant::now();
        fs::write(path, on).with_context(|| format!("{on} > {path}"))?;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    });
    let [cpu, memory] = times;
    eprintln!("{} {}", cpu?, memory?);
    Ok(())
}

/// Milliseconds, and whether it was a clone.
fn start(node: &Node, client: &mut Client, (_, cpus, mebibytes): (&str, u32, u64)) -> Result<(f64, bool)> {
    let mut config = node.config(CLONE, false)?;
    config.resources.cpus = cpus;
    config.resources.memory = ByteSize::mib(mebibytes);
    match asked(client, Request::Run(Box::new(config)))? {
        (time, Reply::Started { sandbox, .. }) => Ok((time, sandbox.template.is_some())),
        (_, other) => anyhow::bail!("no sandbox: {other:?}"),
    }
}

impl Bench<'_> {
    /// Templates of several shapes, or hotplug.
    pub(crate) fn shapes(&mut self) -> Result<()> {
        let node = Node::new(self.world)?;
        // Starts the daemon, and makes the small one's template.
        node.originate()?;
        let mut client = Client::connect(&node.socket())?;
        for (number, shape) in SHAPES.into_iter().enumerate() {
            start(&node, &mut client, shape)?;
            node.wait_for_templates(number + 1)?;
            remove(&mut client, CLONE)?;
        }
        let mut clones = SHAPES.map(|_| Vec::new());
        let (mut cpus, mut memories) = (Vec::new(), Vec::new());
        for number in 0..self.runs {
            for (shape, samples) in SHAPES.into_iter().zip(&mut clones) {
                let (time, is_clone) = self.again("shapes", shape.0, || {
                    drop(remove(&mut client, CLONE));
                    start(&node, &mut client, shape)
                })?;
                ensure!(is_clone, "{} was no clone", shape.0);
                tell("shapes", number, shape.0, time, "ms");
                samples.push(time);
            }
            // The last one has both.
            thread::sleep(Duration::from_millis(500));
            let told = node.ok(&["exec", CLONE, "/say", ONLINE])?;
            let mut numbers = told.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
            let mut next = || numbers.next().with_context(|| format!("the guest has said {told:?}"));
            for (who, samples) in [(CPU, &mut cpus), (MEMORY, &mut memories)] {
                let time = next()?;
                tell("shapes", number, who, time, "ms");
                samples.push(time);
            }
        }
        remove(&mut client, CLONE)?;
        let mut figure = Figure::new(
            "A clone of a template of its own shape, and what hotplug would add to a small one",
            "ms",
        );
        for (shape, samples) in SHAPES.iter().zip(clones) {
            figure.add(shape.0, samples);
        }
        figure.add(CPU, cpus);
        figure.add(MEMORY, memories);
        let median = |figure: &Figure, who| figure.median(who).context("no median");
        let small = median(&figure, SHAPES[SMALL].0)?;
        for (larger, who) in [(MORE_CPUS, CPU), (MORE_MEMORY, MEMORY)] {
            let by_template = median(&figure, SHAPES[larger].0)?;
            let by_hotplug = small + median(&figure, who)?;
            let what = format!("{} / the small one and {who:?}", SHAPES[larger].0);
            figure.judge(&what, by_template / by_hotplug, Target::AtMost(1.0));
        }
        self.report.figures.push(figure);
        Ok(())
    }
}
