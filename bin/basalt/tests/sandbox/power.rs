//! The power fails: at random instants everything is lost that was not flushed to the disk, and what somebody was told is done
//! must be done. The disk is `drive`'s.
//!
//! One world works while its disk is copied at these instants; afterwards each copy is mounted in turn and a daemon started on
//! it. `BASALT_POWER_FAILURES` says how many instants (50 in `cargo xtask long`), `BASALT_SEED` repeats a run.

#![allow(
    clippy::cast_possible_truncation,
    reason = "sizes of files on a host of 64 bits, and small numbers"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base::points;

use crate::cases::kill;
use crate::drive::{Drive, Medium, Mounted};
use crate::world::{World, done, json, wait_for};

pub(crate) const CASES: &[(&str, fn())] = &[
    ("what_was_acknowledged_survives_power_failures", survives),
    (
        "a_power_failure_puts_no_sandbox_back_to_what_it_was_suspended_with",
        without_way_back,
    ),
];

const DISK: u64 = 512 << 20;

/// Instants of a run that nobody asked for more of.
const FEW: usize = 5;

/// Between two instants lie at most so many milliseconds.
const STEP_MS: u64 = 600;

/// More sandboxes than this are not there at a time.
const MOST: usize = 4;

/// SplitMix64: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }
}

/// What the world was told.
#[derive(Clone, Debug, Default)]
struct Told {
    /// All of them, and those that are suspended.
    sandboxes: BTreeSet<String>,
    suspended: BTreeSet<String>,
    snapshots: BTreeSet<String>,
    volumes: BTreeSet<String>,
    removed: BTreeSet<String>,
    /// What is being made or removed just now: it may be there or not.
    open: Option<String>,
    /// How many acknowledged operations there were, and how many of them suspended something or resumed it.
    count: usize,
    turns: usize,
}

/// An instant at which the power fails.
struct Cut {
    told: Told,
    medium: Medium,
}

struct Work<'a> {
    world: &'a World,
    told: &'a Mutex<Told>,
    random: Random,
    next: usize,
}

impl Told {
    /// The sandboxes that run.
    fn running(&self) -> BTreeSet<String> {
        self.sandboxes.difference(&self.suspended).cloned().collect()
    }
}

fn note(all: &mut BTreeSet<String>, name: &str) {
    all.insert(name.to_owned());
}

impl Work<'_> {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap()
    }

    /// Runs a verb about `name`, and notes what it has done when it was acknowledged.
    fn verb(&self, name: &str, words: &[&str], note: impl FnOnce(&mut Told)) {
        self.told().open = Some(name.to_owned());
        done(self.world, words);
        let mut told = self.told();
        note(&mut told);
        told.open = None;
        told.count += 1;
    }

    fn fresh(&mut self, kind: &str) -> String {
        self.next += 1;
        format!("{kind}{}", self.next)
    }

    fn one_of(&mut self, all: fn(&Told) -> BTreeSet<String>) -> Option<String> {
        let names: Vec<String> = all(&self.told()).into_iter().collect();
        (!names.is_empty()).then(|| names[self.random.below(names.len())].clone())
    }

    fn remove(&self, name: &str, words: &[&str]) {
        self.verb(name, words, |told| {
            for all in [
                &mut told.sandboxes,
                &mut told.suspended,
                &mut told.snapshots,
                &mut told.volumes,
            ] {
                all.remove(name);
            }
            told.removed.insert(name.to_owned());
        });
    }

    /// Something that somebody might do.
    fn step(&mut self) {
        let count = self.told().sandboxes.len();
        match self.random.below(14) {
            0..4 if count < MOST => {
                let name = self.fresh("s");
                let words = [
                    "run", "-d", "--disk", "16m", "--name", &name, "tiny", "--", "sleep", "1000",
                ];
                self.verb(&name, &words, |told| note(&mut told.sandboxes, &name));
            }
            4 if count < MOST => {
                if let Some(snapshot) = self.one_of(|told| told.snapshots.clone()) {
                    let name = self.fresh("s");
                    let words = ["clone", "--name", &name, &snapshot];
                    self.verb(&name, &words, |told| note(&mut told.sandboxes, &name));
                }
            }
            5 | 6 => {
                if let Some(sandbox) = self.one_of(Told::running) {
                    let name = self.fresh("k");
                    let words = ["snapshot", "create", &sandbox, &name];
                    self.verb(&name, &words, |told| note(&mut told.snapshots, &name));
                }
            }
            7 => {
                let name = self.fresh("v");
                let words = ["volume", "create", &name];
                self.verb(&name, &words, |told| note(&mut told.volumes, &name));
            }
            8 => {
                if let Some(name) = self.one_of(|told| told.snapshots.clone()) {
                    self.remove(&name, &["snapshot", "rm", &name]);
                } else if let Some(name) = self.one_of(|told| told.volumes.clone()) {
                    self.remove(&name, &["volume", "rm", &name]);
                }
            }
            10 | 11 => {
                if let Some(name) = self.one_of(Told::running) {
                    self.verb(&name, &["suspend", &name], |told| {
                        note(&mut told.suspended, &name);
                        told.turns += 1;
                    });
                }
            }
            12 | 13 => {
                if let Some(name) = self.one_of(|told| told.suspended.clone()) {
                    self.verb(&name, &["resume", &name], |told| {
                        told.suspended.remove(&name);
                        told.turns += 1;
                    });
                }
            }
            _ => {
                if let Some(name) = self.one_of(|told| told.sandboxes.clone()) {
                    self.remove(&name, &["rm", "-f", &name]);
                }
            }
        }
    }
}

/// There is power, and somebody who can say what a disk has without it.
fn is_possible() -> bool {
    if !rustix::process::geteuid().is_root() {
        crate::say("no power fails: only root can mount and attach loop devices");
        return false;
    }
    assert!(
        Path::new("/dev/fuse").exists(),
        "there is no /dev/fuse: `modprobe fuse`"
    );
    true
}

/// From these moments on it is suspended, and it has gone on: nothing of what was not flushed is needed for that.
fn without_way_back() {
    if !is_possible() {
        return;
    }
    // One that is removed at its end needs not survive a power failure, but for as long as it is suspended.
    for (point, verb, more, state) in [
        (points::SUSPEND_SAVED, "suspend", None, Some("suspended")),
        (points::RESUME_SPENT, "resume", None, Some("exited")),
        (points::SUSPEND_SAVED, "suspend", Some("--rm"), Some("suspended")),
        (points::RESUME_SPENT, "resume", Some("--rm"), None),
    ] {
        let mut drive = None;
        let world = World::prepared("can be kept", |top| {
            drive = Some(Drive::new(&top.join("drive"), DISK, &top.join("state")));
        });
        let drive = drive.unwrap();
        let held = world.path("points");
        fs::create_dir(&held).unwrap();
        let command = |words: &[&str]| {
            let mut command = world.command(words);
            command.env(points::VARIABLE, &held).stdout(Stdio::null());
            command
        };
        let mut run = vec!["run", "-d", "--disk", "16m", "--name", "web"];
        run.extend(more);
        run.extend(["tiny", "--", "sleep", "1000"]);
        assert!(command(&run).status().unwrap().success());
        if verb == "resume" {
            done(&world, &["suspend", "web"]);
        }
        fs::write(held.join(point), "").unwrap();
        let mut client = command(&[verb, "web"]).spawn().unwrap();
        wait_for(point, || held.join(format!("{point}.reached")).exists().then_some(()));
        let cut = drive.cut();
        fs::remove_file(held.join(point)).unwrap();
        assert!(client.wait().unwrap().success());
        end_all(&world);
        drop(drive);
        let image = world.path("after.img");
        cut.write(&image, || false);
        let mounted = Mounted::new(&image, &world.path("state"));
        let found = json(&world, &["ps", "-a"]);
        assert_eq!(
            found[0]["state"].as_str(),
            state,
            "the power failed at {point}, {more:?}"
        );
        if let Some(state) = state {
            done(&world, &[if state == "suspended" { "resume" } else { "start" }, "web"]);
            done(&world, &["exec", "web", "true"]);
        }
        end_all(&world);
        drop(mounted);
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn survives() {
    if !is_possible() {
        return;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = number("BASALT_SEED").unwrap_or(u64::from(now.subsec_nanos()));
    let instants = number("BASALT_POWER_FAILURES").map_or(FEW, |count| count as usize);
    crate::say(&format!("power fails {instants} times, BASALT_SEED={seed}"));
    let mut drive = None;
    let world = World::prepared("can be kept", |top| {
        drive = Some(Drive::new(&top.join("drive"), DISK, &top.join("state")));
    });
    let drive = drive.unwrap();
    let cuts = work(&world, &drive, instants, seed);
    end_all(&world);
    drop(drive);
    let mut random = Random(seed ^ 1);
    let mut lost: BTreeMap<&str, usize> = BTreeMap::new();
    let mut suspended = 0;
    for (number, cut) in cuts.into_iter().enumerate() {
        let pending = cut.medium.pending();
        // Every second time nothing of what was not flushed has come to the disk, else a part.
        let part = if number % 2 == 0 { 0 } else { random.below(100) };
        // One of its own: who had the last one open may write to it until it is closed, which is after its unmounting.
        let image = world.path(&format!("after-{number}.img"));
        cut.medium.write(&image, || random.below(100) < part);
        let mounted = Mounted::new(&image, &world.path("state"));
        let context = format!("BASALT_SEED={seed}, instant {number}, {part} % of {pending} writes");
        check(&world, &cut.told, &context);
        end_all(&world);
        drop(mounted);
        fs::remove_file(&image).unwrap();
        suspended += cut.told.suspended.len();
        *lost.entry("writes").or_default() += pending;
        *lost.entry("operations").or_default() += cut.told.count;
    }
    crate::say(&format!(
        "power failed {instants} times: {lost:?} before the instants, {suspended} suspended sandboxes at them"
    ));
}

/// Works until there were so many instants; what was there at each.
fn work(world: &World, drive: &Drive, instants: usize, seed: u64) -> Vec<Cut> {
    let (told, over) = (Mutex::new(Told::default()), AtomicBool::new(false));
    let begun = Instant::now();
    let mut cuts = Vec::new();
    std::thread::scope(|scope| {
        let (told, over) = (&told, &over);
        let worker = scope.spawn(move || {
            let mut work = Work {
                world,
                told,
                random: Random(seed),
                next: 0,
            };
            while !over.load(Ordering::SeqCst) {
                work.step();
            }
        });
        let mut random = Random(seed ^ 2);
        while cuts.len() < instants && !worker.is_finished() {
            // At any instant, or as soon as somebody was told of something that is flushed for no other reason.
            match random.next() % 2 {
                0 => std::thread::sleep(Duration::from_millis(1 + random.next() % STEP_MS)),
                _ => wait_for_turn(told),
            }
            let told = told.lock().unwrap();
            // The first ones would find nothing.
            if told.count > 3 {
                cuts.push(Cut {
                    told: told.clone(),
                    medium: drive.cut(),
                });
            }
        }
        over.store(true, Ordering::SeqCst);
        worker.join().unwrap();
    });
    crate::say(&format!("worked for {:?}", begun.elapsed()));
    assert_eq!(cuts.len(), instants);
    cuts
}

/// Waits a while until one more is suspended or resumed.
fn wait_for_turn(told: &Mutex<Told>) {
    let turns = || told.lock().unwrap().turns;
    let (before, end) = (turns(), Instant::now() + 3 * Duration::from_millis(STEP_MS));
    while turns() == before && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Ends the daemon and all VMMs, as if the host had.
fn end_all(world: &World) {
    if let Some(daemon) = world.daemon() {
        kill(daemon);
        world.wait_for_no_daemon();
    }
    for vmm in world.vmms() {
        kill(vmm);
    }
    wait_for("the VMMs to be gone", || world.vmms().is_empty().then_some(()));
}

fn names(world: &World, words: &[&str]) -> BTreeSet<String> {
    let listed = json(world, words);
    let all = listed.as_array().unwrap().iter();
    all.map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

/// What must be there is there and can be started, and what must not is not.
fn check(world: &World, told: &Told, context: &str) {
    let sandboxes = names(world, &["ps", "-a"]);
    let snapshots = names(world, &["snapshot", "ls"]);
    let volumes = names(world, &["volume", "ls"]);
    let is_sure = |name: &&String| Some(*name) != told.open.as_ref();
    for (what, there, wanted) in [
        ("sandboxes", &sandboxes, &told.sandboxes),
        ("snapshots", &snapshots, &told.snapshots),
        ("volumes", &volumes, &told.volumes),
    ] {
        let missing: Vec<_> = wanted
            .iter()
            .filter(is_sure)
            .filter(|name| !there.contains(*name))
            .collect();
        assert!(
            missing.is_empty(),
            "{context}: {what} {missing:?} are gone; there are {there:?}; the daemon says:\n{}",
            fs::read_to_string(world.path("state/basaltd.log")).unwrap_or_default()
        );
        let back: Vec<_> = told
            .removed
            .iter()
            .filter(is_sure)
            .filter(|name| there.contains(*name))
            .collect();
        assert!(back.is_empty(), "{context}: {what} {back:?} were removed");
    }
    let listed = json(world, &["ps", "-a"]);
    for sandbox in listed.as_array().unwrap() {
        let (id, name) = (sandbox["id"].as_str().unwrap(), sandbox["name"].as_str().unwrap());
        let disk = world.path("state/sandboxes").join(id).join("disk");
        let mut fsck = Command::new("/usr/sbin/e2fsck");
        let checked = fsck.arg("-fn").arg(&disk).output().unwrap();
        assert!(
            checked.status.success(),
            "{context}: the disk of {name}: {}",
            String::from_utf8_lossy(&checked.stdout)
        );
        let is_suspended = sandbox["state"] == "suspended";
        // One that has gone on since must not be put back to what it was: its disk is not that of then.
        assert!(
            told.open.as_deref() == Some(name) || is_suspended == told.suspended.contains(name),
            "{context}: {name} is {}, and suspended were {:?}",
            sandbox["state"],
            told.suspended
        );
        let verb = if is_suspended { "resume" } else { "start" };
        done(world, &[verb, name]);
        done(world, &["exec", name, "true"]);
    }
    for snapshot in &snapshots {
        let words = ["clone", "--name", &format!("of-{snapshot}"), snapshot];
        done(world, &words);
    }
}
