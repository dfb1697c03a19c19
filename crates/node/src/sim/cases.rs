//! Every use case, with every fault at every place.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{RefUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use agent_api::Connection;
use node_api::{BuildConfig, Class, CloneConfig, Recipe, SandboxConfig, State};

use super::faults::{Fault, INJECTED};
use super::{Attempt, World, detach_cases, egress, host_cases, saved_cases, suspend_cases};
use crate::Error;
use crate::error::words::with_causes;
use crate::node::Node;
use crate::operations::build_template::Wanted;
use crate::operations::detach_for::OnDevices;

/// Of no use case are there more places than this.
pub(super) const MOST: usize = 200;

/// What is on the disk of `web` since its snapshot was taken.
pub(super) const OWN: &[u8] = b"since the snapshot";

/// Something that can be asked of a node.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub(super) name: &'static str,
    /// What there is before.
    pub(super) prepare: fn(&mut World),
    pub(super) act: fn(&World) -> Result<(), Error>,
    /// The states in which the sandbox `web` may rest when it was not done, as something was refused; `None`: it is gone.
    pub(super) undone: &'static [Option<State>],
    pub(super) done: Option<State>,
    /// The sandbox `web` was there before, and nobody asks for its end: it is there afterwards, whatever happens.
    pub(super) lasts: bool,
    /// Nor is it put back in time: a machine of it that runs when the daemon dies is the one that runs afterwards.
    pub(super) goes_on: bool,
    /// What else has to be so, of this daemon and of the next one.
    pub(super) also: fn(&World, &Attempt) -> Result<(), String>,
}

/// Something that a sandbox that runs notices nothing of.
pub(super) const UNNOTICED: Case = Case {
    name: "",
    prepare: running,
    act: |_| Ok(()),
    undone: &[Some(State::Running)],
    done: Some(State::Running),
    lasts: true,
    goes_on: true,
    also: |_, _| Ok(()),
};

/// The cases of each subject.
const ALL: &[&[Case]] = &[
    CASES,
    saved_cases::CASES,
    suspend_cases::CASES,
    host_cases::CASES,
    detach_cases::CASES,
    egress::CASES,
];

pub(super) fn nothing(_: &mut World) {}

pub(super) fn running(world: &mut World) {
    world.run(World::config("web")).unwrap();
}

pub(super) fn exited(world: &mut World) {
    running(world);
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
}

pub(super) fn paused(world: &mut World) {
    running(world);
    world.node().pause(&world.entry("web")).unwrap();
}

pub(super) fn running_bare(world: &mut World) {
    running(world);
    world
        .node()
        .move_to(&world.entry("web"), Class::Bare, OnDevices::Refuse)
        .unwrap();
}

pub(super) fn with_snapshot(world: &mut World) {
    running(world);
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("ready"), OnDevices::Refuse)
        .unwrap();
    world.write_to_disk("web", OWN);
}

pub(super) fn exited_with_snapshot(world: &mut World) {
    with_snapshot(world);
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
}

/// A template that nobody has asked for.
fn with_template(world: &mut World) {
    world.run(from_template("first")).unwrap();
    // It is written while the sandbox runs.
    world.has_template().unwrap();
    world.node().remove(&world.entry("first"), true).unwrap();
}

fn from_template(name: &str) -> SandboxConfig {
    SandboxConfig {
        boot: false,
        ..World::config(name)
    }
}

fn clone(world: &World) -> Result<(), Error> {
    let asked = CloneConfig {
        snapshot: "ready".to_owned(),
        name: Some("twin".to_owned()),
        ports: vec!["81:80".to_owned()],
        ..CloneConfig::default()
    };
    world.node().clone_of(asked).map(drop)
}

fn build(world: &World) -> Result<(), Error> {
    let config = World::config("");
    let asked = BuildConfig {
        image: config.image,
        resources: config.resources,
        recipe: Recipe {
            commands: vec!["true".to_owned()],
            network: config.network,
            ..Recipe::default()
        },
        names: vec!["built".to_owned()],
        force: false,
        sized: false,
        replaces: None,
    };
    let (_asker, cancel) = UnixStream::pair().unwrap();
    match world.node().begin_build(asked, cancel.as_fd())? {
        Wanted::There(_) => Ok(()),
        Wanted::Begun(build, _) => {
            let saved = world.node().save_build(&build, cancel.as_fd());
            Error::first_of(saved, world.node().remove(&build.entry, true)).map(drop)
        }
    }
}

/// Starts a command by the connection that is handed out.
pub(super) fn exec(node: &Node, name: &str) -> Result<(), Error> {
    let (stream, _, mut command) = node.exec(&*node.find(name)?)?;
    command.argv = vec!["true".to_owned().into()];
    let mut agent = Connection::resume(UnixStream::from(stream)).unwrap();
    let started = agent.exec_detached(&command);
    // It is the guest's affair, and the asker's.
    started.map(drop).map_err(|error| Error::Invalid(with_causes(&error)))
}

/// Beside one that runs.
fn two_exited(world: &mut World) {
    exited(world);
    for (name, port) in [("another", "81:80"), ("runs", "82:80")] {
        let ports = vec![port.to_owned()];
        let config = World::config(name);
        world.run(SandboxConfig { ports, ..config }).unwrap();
    }
    world.node().stop(&world.entry("another"), Duration::ZERO).unwrap();
}

fn only_the_exited_go(world: &World, attempt: &Attempt) -> Result<(), String> {
    match (state(world, "runs"), attempt, state(world, "another")) {
        (Some(State::Running), Attempt::Done, None) => Ok(()),
        (Some(State::Running), Attempt::Failed(_) | Attempt::Crashed, None | Some(State::Exited)) => Ok(()),
        other => Err(format!("runs, and another, are {other:?}")),
    }
}

const CASES: &[Case] = &[
    Case {
        name: "run, which boots",
        prepare: nothing,
        act: |world| world.run(World::config("web")).map(drop),
        undone: &[None],
        done: Some(State::Running),
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "run, which makes a template",
        prepare: nothing,
        act: |world| world.run(from_template("web")).map(drop),
        undone: &[None],
        done: Some(State::Running),
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "run, which is cloned of a template",
        prepare: with_template,
        act: |world| world.run(from_template("web")).map(drop),
        undone: &[None],
        done: Some(State::Running),
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "start",
        prepare: exited,
        act: |world| world.node().start(&world.entry("web")).map(drop),
        undone: &[Some(State::Exited)],
        done: Some(State::Running),
        lasts: true,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "restart",
        prepare: running,
        act: |world| world.node().restart(&world.entry("web"), Duration::ZERO).map(drop),
        undone: &[Some(State::Exited)],
        done: Some(State::Running),
        lasts: true,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "pause",
        prepare: running,
        act: |world| world.node().pause(&world.entry("web")),
        undone: &[Some(State::Running)],
        done: Some(State::Paused),
        lasts: true,
        goes_on: true,
        ..UNNOTICED
    },
    Case {
        name: "resume",
        prepare: paused,
        act: |world| world.node().resume(&world.entry("web")),
        undone: &[Some(State::Paused)],
        done: Some(State::Running),
        lasts: true,
        goes_on: true,
        ..UNNOTICED
    },
    Case {
        name: "stop",
        prepare: running,
        act: |world| world.node().stop(&world.entry("web"), Duration::ZERO),
        undone: &[Some(State::Running)],
        done: Some(State::Exited),
        lasts: true,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "kill",
        prepare: running,
        act: |world| world.node().kill(&world.entry("web"), libc::SIGKILL),
        undone: &[Some(State::Running)],
        done: Some(State::Exited),
        lasts: true,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "remove",
        prepare: running,
        act: |world| world.node().remove(&world.entry("web"), true),
        // What could not be taken away is soon after.
        undone: &[Some(State::Running), None],
        done: None,
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "stop of one that owns CPUs",
        prepare: running_bare,
        act: |world| world.node().stop(&world.entry("web"), Duration::ZERO),
        undone: &[Some(State::Running)],
        done: Some(State::Exited),
        lasts: true,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "snapshot",
        prepare: running,
        act: |world| {
            world
                .node()
                .make_snapshot(&world.entry("web"), Some("ready"), OnDevices::Refuse)
                .map(drop)
        },
        undone: &[Some(State::Running)],
        done: Some(State::Running),
        lasts: true,
        goes_on: true,
        ..UNNOTICED
    },
    Case {
        name: "clone",
        prepare: with_snapshot,
        act: clone,
        undone: &[Some(State::Running)],
        done: Some(State::Running),
        lasts: true,
        goes_on: true,
        ..UNNOTICED
    },
    Case {
        name: "rollback in place",
        prepare: with_snapshot,
        act: |world| {
            world
                .node()
                .rollback(&world.entry("web"), "ready", OnDevices::Refuse)
                .map(drop)
        },
        // Once its machine is what it was, there is no way back to what it was before that.
        undone: &[Some(State::Running), Some(State::Exited)],
        done: Some(State::Running),
        lasts: true,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "rollback of one that has exited",
        prepare: exited_with_snapshot,
        act: |world| {
            world
                .node()
                .rollback(&world.entry("web"), "ready", OnDevices::Refuse)
                .map(drop)
        },
        undone: &[Some(State::Exited)],
        done: Some(State::Running),
        lasts: true,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "move",
        prepare: running,
        act: |world| {
            world
                .node()
                .move_to(&world.entry("web"), Class::Bare, OnDevices::Refuse)
                .map(drop)
        },
        undone: &[Some(State::Running)],
        done: Some(State::Running),
        lasts: true,
        goes_on: true,
        ..UNNOTICED
    },
    Case {
        name: "exec",
        act: |world| exec(world.node(), "web"),
        ..UNNOTICED
    },
    Case {
        name: "prune",
        prepare: two_exited,
        act: |world| world.node().prune().map(drop),
        undone: &[Some(State::Exited), None],
        done: None,
        lasts: false,
        goes_on: false,
        also: only_the_exited_go,
    },
    Case {
        name: "build",
        prepare: nothing,
        act: build,
        undone: &[None],
        done: None,
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
];

/// The state of a sandbox, if there is one of this name.
pub(super) fn state(world: &World, name: &str) -> Option<State> {
    world.node().find(name).ok().map(|entry| entry.state())
}

/// Goes through the places of a case at which `fault` can happen, each in a world of its own; how many there are.
fn every_place(case: &Case, fault: Fault) -> usize {
    for number in 0..MOST {
        let mut world = match fault {
            Fault::Full => World::small(),
            _ => World::new(),
        };
        (case.prepare)(&mut world);
        world.faults.arm(&[(number, fault)]);
        let attempt = world.attempt(case.act);
        let place = world.faults.disarm().pop();
        let told = format!(
            "{}, {fault:?} at {number}, {}",
            case.name,
            place.as_deref().unwrap_or("no place")
        );
        let ran = world.running("web");
        if matches!(fault, Fault::Crash) && place.is_some() {
            world.restart();
        }
        world
            .empty()
            .unwrap_or_else(|wrong| panic!("{told}: {wrong}\n{attempt:?}"));
        if case.goes_on && fault == Fault::Crash && ran.is_some() {
            world.is_at_rest().unwrap_or_else(|wrong| panic!("{told}: {wrong}"));
            assert!(world.has(ran), "{told}: its machine was put back in time");
        }
        check(case, fault, place.is_some(), &attempt, &mut world)
            .unwrap_or_else(|wrong| panic!("{told}: {wrong}\n{attempt:?}"));
        if place.is_none() {
            assert!(matches!(attempt, Attempt::Done), "{told}: {attempt:?}");
            return number;
        }
    }
    panic!("{}: more than {MOST} places", case.name);
}

pub(super) fn check(
    case: &Case,
    fault: Fault,
    fired: bool,
    attempt: &Attempt,
    world: &mut World,
) -> Result<(), String> {
    world.is_at_rest()?;
    let now = state(world, "web");
    match attempt {
        Attempt::Done if now != case.done && fault != Fault::Dies && fault != Fault::Crash => {
            return Err(format!("it was done, and web is {now:?}"));
        }
        // Its end is somebody's wish, or its machine's death.
        Attempt::Failed(_) if fault == Fault::Refused && !case.undone.contains(&now) => {
            return Err(format!("it was not done, and web is {now:?}"));
        }
        Attempt::Failed(error) if fault == Fault::Refused && !with_causes(error).contains(INJECTED) => {
            return Err("the error does not tell what failed".to_owned());
        }
        _ => (),
    }
    let undone = now == Some(State::Exited) && !matches!(attempt, Attempt::Done);
    if case.name.starts_with("rollback") && undone && !world.disk_has("web", OWN) {
        return Err("its own disk is lost".to_owned());
    }
    if case.lasts && now.is_none() {
        return Err("a sandbox that was there is gone".to_owned());
    }
    (case.also)(world, attempt)?;
    if fired {
        // Nothing is in the way of the next attempt.
        world.restart();
        world.is_at_rest()?;
        (case.also)(world, attempt).map_err(|wrong| format!("the next daemon: {wrong}"))?;
        let found = world.node().find("web").ok();
        let again = match (found.as_ref().map(|entry| entry.state()), &found) {
            (Some(State::Exited), Some(entry)) => world.node().start(entry).map(drop),
            (Some(State::Suspended), Some(entry)) => world.node().resume(entry),
            _ => Ok(()),
        };
        again.map_err(|error| format!("it cannot be started or resumed any more: {error}"))?;
        world.is_at_rest()?;
    }
    world.ends_empty()
}

fn all(fault: Fault) {
    each(&format!("places for {fault:?}"), |case| every_place(case, fault));
}

/// Cases that are tried side by side: each waits most of the time, for what a node does after a while.
const SIDE_BY_SIDE: usize = 6;

/// Tries every case, or those that are asked for, and tells how many `places` each has.
pub(super) fn each(places: &str, try_case: impl Fn(&Case) -> usize + RefUnwindSafe + Sync) {
    let filter = std::env::var("BASALT_SIM_CASE").ok();
    let wanted = |case: &&Case| filter.as_ref().is_none_or(|filter| case.name.contains(filter.as_str()));
    let chosen: Vec<_> = ALL.iter().copied().flatten().filter(wanted).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..SIDE_BY_SIDE {
            scope.spawn(|| {
                while let Some(case) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match catch_unwind(|| try_case(case)) {
                        Ok(count) => writeln!(std::io::stderr(), "{}: {count} {places}", case.name).unwrap(),
                        Err(_) => failed.lock().unwrap().push(case.name),
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn whatever_is_refused_nothing_is_left_of_it() {
    all(Fault::Refused);
}

#[test]
fn whenever_a_machine_dies_its_sandbox_ends() {
    all(Fault::Dies);
}

#[test]
fn wherever_the_daemon_dies_the_next_one_puts_it_right() {
    all(Fault::Crash);
}

#[test]
fn whenever_there_is_no_space_left_nothing_is_lost() {
    all(Fault::Full);
}

/// Its disk and record could not be flushed: nobody is told that it runs, so nothing of it may be there.
#[test]
fn what_cannot_reach_the_disk_has_never_run() {
    for lost in ["node.db-wal", "sandboxes/ID/disk"] {
        let world = World::new();
        let directory = world.node().paths.state().to_owned();
        world.faults.at(base::points::START_COMMAND, move || {
            let id = std::fs::read_dir(directory.join("sandboxes"))
                .unwrap()
                .flatten()
                .next()
                .unwrap();
            let id = id.file_name().to_string_lossy().into_owned();
            std::fs::remove_file(directory.join(lost.replace("ID", &id))).unwrap();
        });
        let error = world.run(World::config("web")).unwrap_err();
        assert!(error.to_string().contains("No such file"), "{lost}: {error}");
        assert_eq!(state(&world, "web"), None, "{lost}");
        world.ends_empty().unwrap();
    }
}

/// Whoever leaves a sandbox on the way holds it still: who looks after such ones comes again.
#[test]
fn one_that_is_busy_is_looked_after_later() {
    let world = World::new();
    world.run(World::config("web")).unwrap();
    let entry = world.entry("web");
    let mut retries = BTreeMap::new();
    assert!(world.node().tend(&mut retries));
    let turn = entry.operate();
    world.node().set_interrupted(&entry, true);
    assert!(!world.node().tend(&mut retries));
    drop(turn);
    assert!(world.node().tend(&mut retries));
    world.ends_empty().unwrap();
}
