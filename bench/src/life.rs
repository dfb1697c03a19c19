//! How long sandboxes that own CPUs take to have them and to give them back, and what the host's other CPUs notice of that: reservations alone,
//! by basalt.ko; starts and ends of sandboxes by class; and the longest time that a CPU of Linux's stood still while either went on,
//! beside a window in which nothing did.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base::CpuSet;
use node_api::{Client, Request};
use reservation::Device;
use serde_json::Value;

use crate::class::{CLASSES, Class, Module};
use crate::clone::{asked, remove};
use crate::figures::{Bench, scrub, tell};
use crate::machine::now_ns;
use crate::report::{Figure, cell};
use crate::run::{IDLE, IMAGE, Node, SAY};
use crate::stall::Watch;
use crate::stats::Target;
use crate::trace::milliseconds;

const NAME: &str = Node::CLONE;

/// vCPUs of a sandbox, and so CPUs of a reservation. The others are watched.
const OWNED: usize = 1;
const VCPUS: &str = "1";

/// To reach, in milliseconds: a start, an end, and how long a CPU may stand still.
const SOON: Target = Target::Under(500.0);
const STILL: Target = Target::AtMost(10.0);

/// How long the host is watched at least.
const WINDOW: Duration = Duration::from_secs(10);

/// How long what takes no time by itself is watched at once: about a sandbox's life.
const AT_ONCE: Duration = Duration::from_secs(2);

/// From a reservation to the next.
const BETWEEN: Duration = Duration::from_millis(100);

/// How long CPUs may take to come back.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often their coming back is looked for.
const LOOK: Duration = Duration::from_millis(2);

/// Each with a start or more of everything.
const MOST_RUNS: usize = 10;

/// For how long a command may refuse to end.
const GRACE_MS: u64 = 10_000;

/// The phase of a start in which its CPUs are taken (`node::trace`), and the one that begins when the guest runs.
const CPUS: &str = "CPUs";
const BOOTS: &str = "guest boots";

const RESERVATION: &str = "a CPU is reserved";
const RELEASE: &str = "a CPU is released";
const TAKEN: &str = "of a start, the CPUs are taken";
const STARTED: &str = "asked to run, until the guest's first instruction";
const STOPPED: &str = "asked to stop, until its CPUs are everybody's";
const KILLED: &str = "asked to be removed, until its CPUs are everybody's";
const ALONE: &str = "alone";

const NOTHING: &str = "nothing goes on";
const RESERVATIONS: &str = "a CPU is reserved and released all the time";

/// Linux's CPUs, as the kernel lists them.
const ONLINE: &str = "/sys/devices/system/cpu/online";
/// There as long as somebody owns a CPU (docs/dedicated.md).
const JOURNAL: &str = "/run/basalt-cpus/journal.json";

fn online() -> Result<CpuSet> {
    Ok(fs::read_to_string(ONLINE)?.trim().parse()?)
}

/// Waits until no CPU is owned; the milliseconds since then.
fn wait_for_all(all: &CpuSet, since_ns: u64) -> Result<f64> {
    let deadline = Instant::now() + PATIENCE;
    while online()? != *all || Path::new(JOURNAL).exists() {
        ensure!(
            Instant::now() < deadline,
            "CPUs did not come back: {} are online",
            online()?
        );
        thread::sleep(LOOK);
    }
    Ok(milliseconds(now_ns() - since_ns))
}

/// One reservation of these, and its end.
fn reserved(device: &Device, cpus: &[u32]) -> Result<[f64; 2]> {
    let began = now_ns();
    let reservation = device.reserve(cpus)?;
    let took = milliseconds(now_ns() - began);
    let began = now_ns();
    drop(reservation);
    Ok([took, milliseconds(now_ns() - began)])
}

/// When the guest ran, and how long its CPUs took, by the trace of `basalt run`.
fn started(report: &Value) -> Option<(f64, Option<f64>)> {
    let phases = report["phases"].as_array()?;
    let phase = |name: &str| phases.iter().find(|phase| phase["name"] == name);
    let runs = phase(BOOTS)?["start_ms"].as_f64()?;
    Some((runs, phase(CPUS).and_then(|phase| phase["duration_ms"].as_f64())))
}

/// Who starts and ends sandboxes.
struct Stage<'b> {
    node: &'b Node,
    all: &'b CpuSet,
}

impl Stage<'_> {
    fn words<'w>(first: &[&'w str], class: &Class, command: &'w str) -> Vec<&'w str> {
        let sized = ["--boot", "--name", NAME, "--cpus", VCPUS, "--memory", "128m"];
        [first, &sized, class.words, &[IMAGE, "--", "/say", command]].concat()
    }

    /// One that is there until it is told to go.
    fn detached(&self, class: &Class) -> Result<()> {
        self.node.ok(&Self::words(&["run", "--detach"], class, IDLE)).map(drop)
    }

    /// The rows of one life of each kind.
    fn lives(&self, class: &Class, client: &mut Client) -> Result<Vec<(&'static str, f64)>> {
        // What an attempt that failed has left; usually there is none.
        drop(remove(client, NAME));
        wait_for_all(self.all, now_ns())?;
        scrub();
        let traced = ["--json", "run", "--rm", "--trace"];
        let text = self.node.ok(&Self::words(&traced, class, SAY))?;
        let report: Value = serde_json::from_str(&text)?;
        let (runs, taken) = started(&report).with_context(|| format!("no start was traced: {text}"))?;
        let mut rows = vec![(STARTED, runs)];
        rows.extend(taken.map(|taken| (TAKEN, taken)));
        wait_for_all(self.all, now_ns())?;
        scrub();
        self.detached(class)?;
        let stop = Request::Stop {
            sandbox: NAME.into(),
            grace_ms: GRACE_MS,
        };
        let began = now_ns();
        asked(client, stop)?;
        rows.push((STOPPED, wait_for_all(self.all, began)?));
        remove(client, NAME)?;
        scrub();
        self.detached(class)?;
        let began = now_ns();
        remove(client, NAME)?;
        rows.push((KILLED, wait_for_all(self.all, began)?));
        Ok(rows)
    }
}

/// Has `work` done over and over while the clock is watched on these CPUs; the longest time that one stood still. Before each time the
/// emulator forgets, unwatched, what it keeps of dead guests.
fn watched(cpus: &[u32], mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let (mut longest, mut passed) = (0.0_f64, Duration::ZERO);
    while passed < WINDOW {
        scrub();
        thread::sleep(BETWEEN);
        let watch = Watch::begin(cpus)?;
        let began = Instant::now();
        work()?;
        passed += began.elapsed();
        longest = longest.max(watch.end()?);
    }
    Ok(longest)
}

#[allow(clippy::unnecessary_wraps, reason = "it takes a turn with what may fail")]
fn nothing() -> Result<()> {
    thread::sleep(AT_ONCE);
    Ok(())
}

/// One reservation after the other.
fn reservations(device: &Device, cpus: &[u32]) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < AT_ONCE {
        reserved(device, cpus)?;
        thread::sleep(BETWEEN);
    }
    Ok(())
}

impl Bench<'_> {
    /// Reservations alone, and lives of sandboxes of each class, in turn; then the same again, watched.
    pub(crate) fn life(&mut self) -> Result<()> {
        let all = online()?;
        ensure!(
            all.len() > OWNED,
            "there has to be a CPU beside those that are owned: `basalt-lab up --cpus 4`"
        );
        let _module = Module::load(&self.world.binaries.join("basalt-assets"), "basalt", "")?;
        let device = Device::open(Device::PATH)?;
        let node = Node::new(self.world)?;
        // Whoever asks first starts the daemon.
        node.ok(&["ps"])?;
        let mut client = Client::connect(&node.socket())?;
        // As sandboxes get them: the last.
        let (watched_cpus, owned) = split(&all);
        let classes = CLASSES.iter().filter(|class| class.is_plain());
        let stage = Stage { node: &node, all: &all };
        let names: Vec<_> = classes.clone().map(|class| class.name).collect();
        let columns = || std::iter::once(ALONE).chain(names.iter().copied());
        let mut times = Figure::beside("CPUs are taken and given back", "ms", columns());
        let mut stalls = Figure::new(
            &format!("The longest time that a CPU stood still in {} s", WINDOW.as_secs()),
            "ms",
        );
        let mut gaps: Vec<(String, Vec<f64>)> = Vec::new();
        for round in 0..self.runs.min(MOST_RUNS) {
            let [took, gave] = reserved(&device, &owned)?;
            times.put(RESERVATION, ALONE, took);
            times.put(RELEASE, ALONE, gave);
            for class in classes.clone() {
                let rows = self.again("life", class.name, || stage.lives(class, &mut client))?;
                for (row, value) in rows {
                    tell("life", round, class.name, value, &format!("ms, {row}"));
                    times.put(row, class.name, value);
                }
            }
            let mut put = |what: &str, gap: f64| {
                tell("life", round, what, gap, "ms, stood still");
                match gaps.iter_mut().find(|(name, _)| name == what) {
                    Some((_, samples)) => samples.push(gap),
                    None => gaps.push((what.to_owned(), vec![gap])),
                }
            };
            put(NOTHING, watched(&watched_cpus, nothing)?);
            put(RESERVATIONS, watched(&watched_cpus, || reservations(&device, &owned))?);
            for class in classes.clone() {
                let life = || {
                    stage.detached(class)?;
                    remove(&mut client, NAME)
                };
                put(&lives_of(class), watched(&watched_cpus, life)?);
            }
        }
        for (what, samples) in gaps {
            stalls.add(&what, samples);
        }
        for class in classes.filter(|class| class.owns) {
            for row in [STARTED, STOPPED, KILLED] {
                times.absolute(&cell(row, class.name), SOON);
            }
            stalls.absolute(&lives_of(class), STILL);
            stalls.ratio(&lives_of(class), NOTHING, Target::AtMost(1.0));
        }
        stalls.absolute(RESERVATIONS, STILL);
        self.report.figures.extend([times, stalls]);
        Ok(())
    }
}

fn lives_of(class: &Class) -> String {
    format!("sandboxes of the class {} come and go", class.name)
}

/// Those that are watched, and those that are owned.
fn split(all: &CpuSet) -> (Vec<u32>, Vec<u32>) {
    let mut watched: Vec<u32> = all.iter().collect();
    let owned = watched.split_off(watched.len().saturating_sub(OWNED));
    (watched, owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_is_the_number() {
        assert_eq!(VCPUS.parse(), Ok(OWNED));
    }

    #[test]
    fn the_last_cpus_are_owned_and_the_others_watched() {
        let (watched, owned) = split(&"0-2,5".parse().unwrap());
        assert_eq!((watched, owned), (vec![0, 1, 2], vec![5]));
    }

    #[test]
    fn a_start_ends_where_the_guest_boots() {
        let report = serde_json::json!({ "phases": [
            { "name": "CPUs", "start_ms": 10.0, "duration_ms": 40.5 },
            { "name": "guest boots", "start_ms": 99.0, "duration_ms": 900.0 },
        ] });
        assert_eq!(started(&report), Some((99.0, Some(40.5))));
        assert_eq!(started(&serde_json::json!({ "phases": [] })), None);
    }
}
