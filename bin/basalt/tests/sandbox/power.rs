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
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::cases::kill;
use crate::drive::{Drive, Medium, Mounted};
use crate::world::{World, done, json, wait_for};

pub(crate) const CASES: &[(&str, fn())] = &[("what_was_acknowledged_survives_power_failures", survives)];

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
    sandboxes: BTreeSet<String>,
    snapshots: BTreeSet<String>,
    volumes: BTreeSet<String>,
    removed: BTreeSet<String>,
    /// What is being made or removed just now: it may be there or not.
    open: Option<String>,
    /// How many acknowledged operations there were.
    count: usize,
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

    fn one_of(&mut self, all: fn(&Told) -> &BTreeSet<String>) -> Option<String> {
        let names: Vec<String> = all(&self.told()).iter().cloned().collect();
        (!names.is_empty()).then(|| names[self.random.below(names.len())].clone())
    }

    fn remove(&self, name: &str, words: &[&str]) {
        self.verb(name, words, |told| {
            for all in [&mut told.sandboxes, &mut told.snapshots, &mut told.volumes] {
                all.remove(name);
            }
            told.removed.insert(name.to_owned());
        });
    }

    /// Something that somebody might do.
    fn step(&mut self) {
        let count = self.told().sandboxes.len();
        match self.random.below(10) {
            0..4 if count < MOST => {
                let name = self.fresh("s");
                let words = [
                    "run", "-d", "--disk", "16m", "--name", &name, "tiny", "--", "sleep", "1000",
                ];
                self.verb(&name, &words, |told| note(&mut told.sandboxes, &name));
            }
            4 if count < MOST => {
                if let Some(snapshot) = self.one_of(|told| &told.snapshots) {
                    let name = self.fresh("s");
                    let words = ["clone", "--name", &name, &snapshot];
                    self.verb(&name, &words, |told| note(&mut told.sandboxes, &name));
                }
            }
            5 | 6 => {
                if let Some(sandbox) = self.one_of(|told| &told.sandboxes) {
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
                if let Some(name) = self.one_of(|told| &told.snapshots) {
                    self.remove(&name, &["snapshot", "rm", &name]);
                } else if let Some(name) = self.one_of(|told| &told.volumes) {
                    self.remove(&name, &["volume", "rm", &name]);
                }
            }
            _ => {
                if let Some(name) = self.one_of(|told| &told.sandboxes) {
                    self.remove(&name, &["rm", "-f", &name]);
                }
            }
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn survives() {
    if !rustix::process::geteuid().is_root() {
        crate::say("no power fails: only root can mount and attach loop devices");
        return;
    }
    assert!(
        Path::new("/dev/fuse").exists(),
        "there is no /dev/fuse: `modprobe fuse`"
    );
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
        *lost.entry("writes").or_default() += pending;
        *lost.entry("operations").or_default() += cut.told.count;
    }
    crate::say(&format!("power failed {instants} times: {lost:?} before the instants"));
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
            std::thread::sleep(Duration::from_millis(1 + random.next() % STEP_MS));
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
        done(world, &["start", name]);
        done(world, &["exec", name, "true"]);
    }
    for snapshot in &snapshots {
        let words = ["clone", "--name", &format!("of-{snapshot}"), snapshot];
        done(world, &words);
    }
}
