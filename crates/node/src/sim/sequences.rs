//! Operations in an order that chance has, with a fault now and then. After each, everything is at rest, whoever was acknowledged is there,
//! and whoever was not asked is as before; in the end nothing is left.
//!
//! The same seed gives the same sequence: a failed one tells its seed, and `BASALT_SIM_SEED` has it tried alone.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::Mutex;
use std::time::Duration;

use node_api::{Class, CloneConfig, SandboxConfig, State};

use super::faults::Fault;
use super::{Attempt, World, cases, saved_cases};
use crate::Error;
use crate::operations::detach_for::OnDevices;

/// How many are tried.
const SEQUENCES: u64 = 200;

/// So many at once.
const SIDE_BY_SIDE: usize = 4;

/// Of how many operations each is, at least and at most.
const LEAST: usize = 6;
const MOST: usize = 10;

/// Sandboxes that there may be, each with a port of its own.
const NAMES: [(&str, &str); 3] = [("one", "81:80"), ("two", "82:80"), ("three", "83:80")];

/// An operation calls its host, or passes points, about so often.
const PLACES: usize = 10;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        usize::try_from(mixed % u64::try_from(limit).unwrap()).unwrap()
    }
}

/// Something that is asked for.
#[derive(Clone, Debug)]
enum Step {
    /// Boots, or is cloned of a template, if there is one.
    Run {
        boot: bool,
    },
    Clone(String),
    Start,
    Stop,
    Pause,
    Suspend,
    /// Of one that is paused or suspended.
    Resume,
    /// By this name.
    Snapshot(String),
    Rollback(String),
    /// A command.
    Exec,
    Move(Class),
    Verify(String),
    /// The first is packed, and unpacked as the second.
    Load(String, String),
    RemoveSnapshot(String),
    Remove,
    /// Of all that have exited.
    Prune,
    /// Another program deletes the network's tables, and the host's clock is set.
    HostChanges,
    RestartDaemon,
}

impl Step {
    /// How a sandbox rests that rested so, when it was done.
    fn leaves(&self, before: Option<State>) -> Option<State> {
        match self {
            Self::Stop => Some(State::Exited),
            Self::Pause => Some(State::Paused),
            Self::Suspend => Some(State::Suspended),
            Self::Remove | Self::RestartDaemon => None,
            Self::Prune => before.filter(|state| *state != State::Exited),
            Self::Exec | Self::Verify(_) | Self::Load(..) | Self::RemoveSnapshot(_) | Self::HostChanges => before,
            _ => Some(State::Running),
        }
    }
}

/// One sequence.
struct Sequence {
    seed: u64,
    random: Random,
    world: World,
    /// What was done, for whoever reads why it failed.
    said: Vec<String>,
    /// Sandboxes that were acknowledged, by their names.
    there: BTreeSet<&'static str>,
    /// Snapshots that were, and whose they are, by its id.
    snapshots: BTreeMap<String, String>,
}

impl Drop for Sequence {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (seed, said) = (self.seed, self.said.join("\n  "));
            writeln!(std::io::stderr(), "BASALT_SIM_SEED={seed}:\n  {said}").unwrap();
        }
    }
}

impl Sequence {
    fn new(seed: u64) -> Self {
        Self {
            seed,
            random: Random(seed),
            world: World::new(),
            said: Vec::new(),
            there: BTreeSet::new(),
            snapshots: BTreeMap::new(),
        }
    }

    fn state(&self, name: &str) -> Option<State> {
        self.world.node().find(name).ok().map(|entry| entry.state())
    }

    /// Something that can be asked of a sandbox as it is.
    fn choose(&mut self, name: &str) -> Step {
        match self.random.below(16) {
            0 | 1 => return Step::RestartDaemon,
            2 => return Step::HostChanges,
            3 => return Step::Prune,
            4..=6 if !self.snapshots.is_empty() => return self.choose_of_snapshots(),
            _ => (),
        }
        let id = self.world.node().find(name).ok().map(|entry| entry.id.clone());
        let own = self.snapshots.iter().filter(|(_, of)| Some(*of) == id.as_ref());
        let rollbacks = own.map(|(snapshot, _)| Step::Rollback(snapshot.clone()));
        let mut steps: Vec<Step> = rollbacks.collect();
        let snapshot = Step::Snapshot(format!("s{}", self.said.len()));
        match self.state(name) {
            None => {
                steps.extend([Step::Run { boot: true }, Step::Run { boot: false }]);
                steps.extend(self.snapshots.keys().cloned().map(Step::Clone));
            }
            Some(State::Running) => {
                let class = [Class::Dedicated, Class::Bare, Class::Standard][self.random.below(3)];
                steps.extend([
                    Step::Stop,
                    Step::Pause,
                    Step::Suspend,
                    snapshot.clone(),
                    snapshot,
                    Step::Remove,
                    Step::Exec,
                ]);
                let of = self.world.entry(name).stored().sandbox.config.resources.class;
                steps.extend((of != class).then_some(Step::Move(class)));
            }
            Some(State::Paused) => steps.extend([Step::Resume, Step::Stop, Step::Remove]),
            // It is put back when it runs, or has exited.
            Some(State::Suspended) => {
                return [Step::Resume, Step::Resume, Step::Stop, Step::Remove][self.random.below(4)].clone();
            }
            Some(_) => steps.extend([Step::Start, Step::Start, Step::Remove]),
        }
        let number = self.random.below(steps.len());
        steps.swap_remove(number)
    }

    /// Something that can be asked of a snapshot.
    fn choose_of_snapshots(&mut self) -> Step {
        let names: Vec<_> = self.snapshots.keys().cloned().collect();
        let name = names[self.random.below(names.len())].clone();
        match self.random.below(3) {
            0 => Step::Verify(name),
            1 => Step::Load(name, format!("l{}", self.said.len())),
            _ => Step::RemoveSnapshot(name),
        }
    }

    fn choose_fault(&mut self) -> Option<(usize, Fault)> {
        let kinds = [Fault::Refused, Fault::Dies, Fault::Crash];
        let fault = kinds[self.random.below(kinds.len())];
        let number = self.random.below(PLACES);
        (self.random.below(3) == 0).then_some((number, fault))
    }

    /// The processes of all machines that run, but for this sandbox's.
    fn running_others(&self, name: &str) -> BTreeMap<&'static str, Option<u32>> {
        let others = NAMES.iter().filter(|(other, _)| *other != name);
        others.map(|(other, _)| (*other, self.world.running(other))).collect()
    }

    fn step(&mut self) -> Result<(), String> {
        let (name, port) = NAMES[self.random.below(NAMES.len())];
        let step = self.choose(name);
        let fault = self.choose_fault();
        self.said.push(format!("{step:?} of {name}, {fault:?}"));
        if matches!(step, Step::RestartDaemon) {
            return self.restart();
        }
        let others = self.running_others(name);
        let before = self.state(name);
        let has_exited = |(name, _): &(&'static str, &str)| self.state(name) == Some(State::Exited);
        let exited: Vec<_> = NAMES
            .iter()
            .filter(|one| has_exited(one))
            .map(|(name, _)| *name)
            .collect();
        self.world.faults.arm(fault.as_slice());
        let attempt = self.world.attempt(|world| ask(world, &step, name, port));
        let fired = self.world.faults.disarm().pop();
        self.said.push(format!("  {attempt:?}, {fired:?}"));
        let crashed = fired.is_some() && matches!(fault, Some((_, Fault::Crash)));
        if crashed {
            self.world.restart();
        }
        self.world.is_at_rest()?;
        self.note(name, &step, &attempt, crashed);
        if matches!(step, Step::Prune) {
            self.note_pruned(&exited, matches!(attempt, Attempt::Done));
        }
        let now = self.state(name);
        match attempt {
            Attempt::Done if fired.is_none() && now != step.leaves(before) => {
                return Err(format!("it was done, and {name} is {now:?}"));
            }
            Attempt::Failed(_) | Attempt::Crashed if fired.is_none() => {
                return Err("nothing was in its way, and it was not done".to_owned());
            }
            _ => (),
        }
        self.look()?;
        match self.running_others(name) == others {
            true => Ok(()),
            false => Err("another one's machine is not what it was".to_owned()),
        }
    }

    /// The next daemon finds everything as it was.
    fn restart(&mut self) -> Result<(), String> {
        let states = |sequence: &Self| NAMES.map(|(name, _)| (sequence.state(name), sequence.world.running(name)));
        let before = states(self);
        self.world.restart();
        self.world.is_at_rest()?;
        let now = states(self);
        if now != before {
            return Err(format!("the next daemon finds {now:?}, and there was {before:?}"));
        }
        self.look()
    }

    /// Keeps what was acknowledged. Whether the daemon died before it said so cannot be told from outside.
    fn note(&mut self, name: &'static str, step: &Step, attempt: &Attempt, crashed: bool) {
        let found = self.world.node().find(name).ok();
        let is_done = matches!(attempt, Attempt::Done);
        match step {
            Step::Run { .. } | Step::Clone(_) if is_done || (crashed && found.is_some()) => {
                self.there.insert(name);
            }
            Step::Remove if (is_done && !crashed) || found.is_none() => {
                self.there.remove(name);
            }
            Step::Snapshot(snapshot) if is_done => {
                let of = found.map(|entry| entry.id.clone()).unwrap_or_default();
                self.snapshots.insert(snapshot.clone(), of);
            }
            Step::Load(from, to) if is_done => {
                let of = self.snapshots[from].clone();
                self.snapshots.insert(to.clone(), of);
            }
            // It may have lost its name, and who asked has heard nothing.
            Step::RemoveSnapshot(snapshot) => {
                self.snapshots.remove(snapshot);
            }
            _ => (),
        }
    }

    /// Forgets those that are gone of those that had exited: all, if it was done.
    fn note_pruned(&mut self, exited: &[&'static str], is_done: bool) {
        for name in exited {
            if is_done || self.state(name).is_none() {
                self.there.remove(name);
            }
        }
    }

    /// Whoever was acknowledged is there, and nobody else.
    fn look(&self) -> Result<(), String> {
        let node = self.world.node();
        let there: BTreeSet<String> = node.list().into_iter().map(|sandbox| sandbox.name).collect();
        if !there.iter().eq(&self.there) {
            return Err(format!("there are {there:?}, and were acknowledged {:?}", self.there));
        }
        let snapshots = node.list_snapshots().map_err(|error| error.to_string())?;
        let lost = |name: &&String| !snapshots.iter().any(|snapshot| snapshot.name == **name);
        match self.snapshots.keys().find(lost) {
            Some(name) => Err(format!("the snapshot {name} is lost")),
            None => Ok(()),
        }
    }
}

fn ask(world: &World, step: &Step, name: &str, port: &str) -> Result<(), Error> {
    let (node, ports) = (world.node(), vec![port.to_owned()]);
    match step {
        Step::Run { boot } => {
            let (boot, config) = (*boot, World::config(name));
            world.run(SandboxConfig { boot, ports, ..config }).map(drop)
        }
        Step::Clone(snapshot) => {
            let asked = CloneConfig {
                snapshot: snapshot.clone(),
                name: Some(name.to_owned()),
                ports,
                ..CloneConfig::default()
            };
            node.clone_of(asked).map(drop)
        }
        Step::Start => node.start(&world.entry(name)).map(drop),
        Step::Stop => node.stop(&world.entry(name), Duration::ZERO),
        Step::Pause => node.pause(&world.entry(name)),
        Step::Suspend => node.suspend(&world.entry(name)),
        Step::Resume => node.resume(&world.entry(name)),
        Step::Snapshot(snapshot) => node
            .make_snapshot(&world.entry(name), Some(snapshot), OnDevices::Refuse)
            .map(drop),
        Step::Rollback(snapshot) => node.rollback(&world.entry(name), snapshot, OnDevices::Refuse).map(drop),
        Step::Exec => cases::exec(node, name),
        Step::Move(class) => node.move_to(&world.entry(name), *class, OnDevices::Refuse).map(drop),
        Step::Verify(snapshot) => {
            let damage = saved_cases::verify(world, snapshot)?.damage;
            assert_eq!(damage, [], "{snapshot} is damaged");
            Ok(())
        }
        Step::Load(snapshot, wanted) => saved_cases::load(world, snapshot, wanted),
        Step::RemoveSnapshot(snapshot) => node.remove_snapshot(snapshot),
        Step::Prune => node.prune().map(drop),
        Step::HostChanges => {
            world.network.damage();
            node.tell_time();
            node.network.restore()
        }
        Step::Remove => node.remove(&world.entry(name), true),
        Step::RestartDaemon => Ok(()),
    }
}

#[test]
fn in_whatever_order_things_are_asked_for_nothing_is_lost_and_nothing_is_left() {
    let seed = std::env::var("BASALT_SIM_SEED").ok().map(|seed| seed.parse().unwrap());
    let seeds = seed.map_or(0..SEQUENCES, |seed: u64| seed..seed + 1);
    let seeds = Mutex::new(seeds);
    let next = || seeds.lock().unwrap().next();
    // Each waits more than it works.
    std::thread::scope(|scope| {
        for _ in 0..SIDE_BY_SIDE {
            scope.spawn(|| {
                while let Some(seed) = next() {
                    try_sequence(seed);
                }
            });
        }
    });
}

fn try_sequence(seed: u64) {
    let mut sequence = Sequence::new(seed);
    for _ in 0..LEAST + sequence.random.below(MOST - LEAST + 1) {
        let stepped = sequence.step();
        stepped.unwrap_or_else(|wrong| panic!("{wrong}"));
    }
    sequence.world.ends_empty().unwrap();
}
