//! How often guests leave their CPUs, and what they get done, by class: idle, busy, and with Redis under its own benchmark over the
//! guest's loopback. Standard guests' exits are counted by the host's KVM, those of bare ones by basalt.ko.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::figures::{Bench, tell};
use crate::report::Figure;
use crate::run::Node;
use crate::stats::Target;

const STANDARD: &str = "standard";
const BARE: &str = "bare";
const POLLING: &str = "bare, polling";
const CLASSES: [&str; 3] = [STANDARD, BARE, POLLING];

/// The words by which `basalt run` makes one.
fn words(class: &str) -> &'static [&'static str] {
    match class {
        STANDARD => &["--class", "standard"],
        BARE => &["--class", "bare"],
        _ => &["--class", "bare", "--idle", "poll"],
    }
}

/// How many vCPUs a guest has, where the host can spare as many and one.
const VCPUS: usize = 2;

/// How long one is watched, and how long it is left alone before.
const WATCHED: Duration = Duration::from_secs(20);
const SETTLED: Duration = Duration::from_secs(4);

/// Each boots, settles and is watched three times.
const MOST_RUNS: usize = 3;

/// Where KVM's counters are.
const DEBUGFS: &str = "/sys/kernel/debug";

const NAME: &str = Node::CLONE;

/// Everything is busy for a while, and ends by itself.
const BUSY: &str = "for cpu in $(seq $(nproc)); do timeout 26 sh -c 'while :; do :; done' & done; wait";

/// A server, and who asks it for as long as it is there.
const SERVER: &str = "exec redis-server --save '' --daemonize no";
const ASKER: &str = "sleep 2; exec timeout 40 redis-benchmark -q -l -c 8 -t set,get";

/// What the server has done by when.
const DONE: &str = "cut -d' ' -f1 /proc/uptime; redis-cli info stats | sed -n 's/^total_commands_processed://p'";

/// The module, loaded while this lives.
struct Module;

impl Module {
    fn load(bench: &Bench<'_>) -> Result<Self> {
        let module = bench.world.binaries.join("basalt-assets/basalt.ko");
        run("insmod", &[&module.display().to_string()])?;
        Ok(Self)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Err(error) = run("rmmod", &["basalt"]) {
            eprintln!("classes: the module stays: {error:#}");
        }
    }
}

/// KVM's counters, mounted while this lives if nobody had them mounted.
struct Counters(bool);

impl Counters {
    fn mount() -> Result<Self> {
        let mounted = fs::exists(format!("{DEBUGFS}/kvm"))?;
        if !mounted {
            run("mount", &["-t", "debugfs", "none", DEBUGFS])?;
        }
        Ok(Self(!mounted))
    }

    /// Of the VM that this process has.
    fn exits(&self, vmm: u64) -> Result<u64> {
        let own = format!("{vmm}-");
        for entry in fs::read_dir(format!("{DEBUGFS}/kvm"))? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&own) {
                return Ok(fs::read_to_string(entry.path().join("exits"))?.trim().parse()?);
            }
        }
        anyhow::bail!("KVM knows no VM of process {vmm}")
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        if self.0
            && let Err(error) = run("umount", &[DEBUGFS])
        {
            eprintln!("classes: debugfs stays mounted: {error:#}");
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .context(program.to_owned())?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// What one guest was seen to do.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Exits a second.
    idle: f64,
    busy: f64,
    redis: f64,
    /// Commands a second.
    commands: f64,
}

/// One of these.
type Of = fn(&Seen) -> f64;

struct Stage<'b> {
    node: &'b Node,
    counters: &'b Counters,
    image: String,
    cpus: String,
}

impl Stage<'_> {
    fn asked(&self, words: &[&str]) -> Result<Value> {
        let text = self.node.said(&[&["--json"], words].concat())?;
        Ok(serde_json::from_str(&text)?)
    }

    fn exits(&self, class: &str) -> Result<u64> {
        if class == STANDARD {
            let found = self.asked(&["inspect", NAME])?;
            let vmm = found.pointer("/0/vmm/pid").and_then(Value::as_u64).context("no VMM")?;
            return self.counters.exits(vmm);
        }
        let found = self.asked(&["stats", "--no-stream", NAME])?;
        let all = found
            .pointer("/0/usage/vmm")
            .and_then(Value::as_object)
            .context("no counters")?;
        let of_engine = all.iter().filter(|(name, _)| name.starts_with("engine_exits_total{"));
        Ok(of_engine.filter_map(|(_, count)| count.as_u64()).sum())
    }

    /// Exits a second while nobody asks it anything.
    #[allow(clippy::cast_precision_loss, reason = "far below 2^53 exits")]
    fn watch(&self, class: &str) -> Result<f64> {
        let (before, began) = (self.exits(class)?, Instant::now());
        thread::sleep(WATCHED);
        let after = self.exits(class)?;
        Ok((after - before) as f64 / began.elapsed().as_secs_f64())
    }

    fn exec(&self, script: &str) -> Result<()> {
        self.node.ok(&["exec", "--detach", NAME, "sh", "-c", script]).map(drop)
    }

    /// Seconds of the guest's, and commands.
    fn done(&self) -> Result<(f64, f64)> {
        let said = self.node.said(&["exec", NAME, "sh", "-c", DONE])?;
        let mut lines = said.lines().map(str::trim);
        let mut number = || lines.next()?.parse::<f64>().ok();
        Option::zip(number(), number()).with_context(|| format!("redis says {said:?}"))
    }

    fn guest(&self, class: &str) -> Result<Seen> {
        let options = [
            "run", "--detach", "--boot", "--name", NAME, "--cpus", &self.cpus, "--memory", "256m",
        ];
        self.node
            .ok(&[&options[..], words(class), &[&self.image, "--", "sleep", "100000"]].concat())?;
        thread::sleep(SETTLED);
        let idle = self.watch(class)?;
        self.exec(BUSY)?;
        thread::sleep(SETTLED);
        let busy = self.watch(class)?;
        thread::sleep(SETTLED);
        self.exec(SERVER)?;
        self.exec(ASKER)?;
        thread::sleep(2 * SETTLED);
        let before = self.done()?;
        let redis = self.watch(class)?;
        let after = self.done()?;
        self.node.ok(&["rm", "--force", NAME])?;
        let commands = (after.1 - before.1) / (after.0 - before.0);
        ensure!(
            commands > 100.0,
            "redis was asked {commands} commands a second: nobody did"
        );
        Ok(Seen {
            idle,
            busy,
            redis,
            commands,
        })
    }
}

impl Bench<'_> {
    /// Guests of each class, in turn.
    pub(crate) fn classes(&mut self) -> Result<()> {
        let online = thread::available_parallelism()?.get();
        ensure!(
            online > 1,
            "a bare guest needs a CPU beside the first: `basalt-lab up --cpus 4`"
        );
        let _module = Module::load(self)?;
        let counters = Counters::mount()?;
        let node = Node::with_images(self.world, &PathBuf::from("/var/lib/basalt/images"))?;
        let stage = Stage {
            node: &node,
            counters: &counters,
            image: node.image("redis", "redis-entrypoint")?,
            cpus: VCPUS.min(online - 1).to_string(),
        };
        let mut all: [Vec<Seen>; 3] = Default::default();
        for round in 0..self.runs.min(MOST_RUNS) {
            for (class, seen) in CLASSES.into_iter().zip(&mut all) {
                let one = self.again("classes", class, || {
                    drop(node.ok(&["rm", "--force", NAME]));
                    stage.guest(class)
                })?;
                tell("classes", round, class, one.redis, "exits/s with Redis");
                seen.push(one);
            }
        }
        let loads: [(&str, Of); 3] = [
            ("idle", |seen| seen.idle),
            ("busy", |seen| seen.busy),
            ("Redis", |seen| seen.redis),
        ];
        let mut exits = Figure::new(&format!("Exits a second, {} vCPU(s)", stage.cpus), "1/s");
        for (load, of) in loads {
            for (class, seen) in CLASSES.into_iter().zip(&all) {
                exits.add(&format!("{class}, {load}"), seen.iter().map(of).collect());
            }
        }
        for class in [BARE, POLLING] {
            exits.absolute(&format!("{class}, idle"), Target::AtMost(0.0));
            exits.absolute(&format!("{class}, busy"), Target::AtMost(0.0));
            exits.ratio(&format!("{class}, Redis"), "standard, Redis", Target::AtMost(0.001));
        }
        let mut commands = Figure::new("Redis, commands a second in the guest", "1/s");
        for (class, seen) in CLASSES.into_iter().zip(&all) {
            commands.add(class, seen.iter().map(|seen| seen.commands).collect());
        }
        for class in [BARE, POLLING] {
            commands.ratio(class, STANDARD, Target::AtLeast(1.0));
        }
        self.report.figures.extend([exits, commands]);
        Ok(())
    }
}
