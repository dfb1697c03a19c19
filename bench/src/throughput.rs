//! What servers get done on the host itself, and in guests of each class, in one boot: the same programs out of the same image, on as many
//! CPUs. On the host they run in the image's file system (chroot), on the CPUs that guests get that own theirs.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use base::CpuSet;

use crate::class::{CLASSES, Counters, Module, UNTRANSLATED, reserved, run};
use crate::exits::{Done, LOADS, Load, SETTLED, Stage, VCPUS, WATCHED};
use crate::figures::{Bench, tell};
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

/// The image's file system with a writable layer in memory, as a guest has it; unmounted with this.
struct Root {
    mounts: Vec<PathBuf>,
    merged: PathBuf,
}

impl Root {
    fn mount(blob: &Path, scratch: &Path) -> Result<Self> {
        let place = |name: &str| scratch.join("root").join(name);
        let (lower, layer, merged) = (place("lower"), place("layer"), place("merged"));
        let mut root = Self {
            mounts: Vec::new(),
            merged: merged.clone(),
        };
        for directory in [&lower, &layer, &merged] {
            fs::create_dir_all(directory)?;
        }
        let text = |path: &Path| path.display().to_string();
        root.add(&["-t", "erofs", "-o", "ro,loop", &text(blob), &text(&lower)], &lower)?;
        root.add(&["-t", "tmpfs", "none", &text(&layer)], &layer)?;
        let (upper, work) = (layer.join("upper"), layer.join("work"));
        fs::create_dir_all(&upper)?;
        fs::create_dir_all(&work)?;
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            text(&lower),
            text(&upper),
            text(&work)
        );
        root.add(&["-t", "overlay", "-o", &options, "none", &text(&merged)], &merged)?;
        for directory in ["proc", "dev", "run"] {
            fs::create_dir_all(merged.join(directory))?;
        }
        let at = |name: &str| merged.join(name);
        root.add(&["-t", "proc", "none", &text(&at("proc"))], &at("proc"))?;
        root.add(&["--bind", "/dev", &text(&at("dev"))], &at("dev"))?;
        Ok(root)
    }

    fn add(&mut self, arguments: &[&str], place: &Path) -> Result<()> {
        run("mount", arguments)?;
        self.mounts.push(place.to_owned());
        Ok(())
    }

    /// A script in it, on these CPUs, as the leader of a group of its own.
    fn script(&self, cpus: &str, script: &str) -> Command {
        let mut command = Command::new("taskset");
        command.args(["--cpu-list", cpus, "chroot"]).arg(&self.merged);
        command.args(["sh", "-c", script]).process_group(0);
        command
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        for place in self.mounts.iter().rev() {
            if let Err(error) = run("umount", &[&place.display().to_string()]) {
                eprintln!("{} stays mounted: {error:#}", place.display());
            }
        }
    }
}

/// Programs of a load, which end with this.
struct Busy(Vec<Child>);

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let group = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
            let killed = group.map(|group| rustix::process::kill_process_group(group, rustix::process::Signal::KILL));
            if let Some(Err(error)) = killed {
                eprintln!("process group {} stays: {error}", child.id());
            }
            drop(child.wait());
        }
    }
}

/// The CPUs that guests of this node get that own theirs: the last. Not isolated, as nothing of this program's own could run there then.
fn last(online: &CpuSet) -> String {
    let mut cpus: Vec<String> = online.iter().rev().take(VCPUS).map(|cpu| cpu.to_string()).collect();
    cpus.reverse();
    cpus.join(",")
}

/// How much of this load is done a second on the host.
fn on_host(root: &Root, load: &Load) -> Result<f64> {
    let Some(Done::Soon(asked)) = load.done else {
        anyhow::bail!("{} says what it has done only at its end", load.name);
    };
    let cpus = last(&fs::read_to_string("/sys/devices/system/cpu/online")?.trim().parse()?);
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
        let blob = images
            .join("blobs")
            .join(format!("{}.erofs", digest.trim_start_matches("sha256:")));
        let root = Root::mount(&blob, &self.world.scratch)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_uses_the_cpus_that_a_guest_would_own() {
        assert_eq!(last(&"0-1,4-6".parse().unwrap()), "5,6");
    }

    #[test]
    fn there_is_such_a_load() {
        let load = LOADS.iter().find(|load| load.name == ROW).unwrap();
        assert!(matches!(load.done, Some(Done::Soon(_))));
    }
}
