//! Guests that give memory back, or do not: what they have still is in their record, is promised to them and within their limits, whoever
//! dies, and wherever their machines go on.

use std::cell::RefCell;
use std::time::Duration;

use base::ByteSize;
use node_api::{Class, CloneConfig, CpuModel, EventKind, SandboxConfig, State};

use super::faults::{Fault, INJECTED};
use super::machine::NEVER;
use super::{Attempt, World, device_start, same, soon};
use crate::Error;
use crate::operations::detach_for::OnDevices;
use crate::resources::limits;

const BOOT: ByteSize = ByteSize::mib(256);
const MEMORY: ByteSize = ByteSize::mib(768);
const LESS: ByteSize = ByteSize::mib(512);

/// Whatever a machine has is in its record, and promised.
fn is_counted(world: &World) -> Result<(), String> {
    for machine in world.machines.alive() {
        let entry = world.node().find(&machine.sandbox).map_err(|error| error.to_string())?;
        let config = entry.stored().sandbox.config;
        let has = BOOT.bytes() + machine.lock().memory.unwrap().plugged;
        let held = config.resources.held().bytes();
        if has > held {
            return Err(format!("{} has {has} bytes, and its record says {held}", config.image));
        }
        let promised = entry.promised().map(|promise| promise.memory());
        same("promised memory", &promised, &Some(limits::memory_max(&config)))?;
        let limit = world.node().cgroup(&entry).map_err(|error| error.to_string())?;
        let limit = limit.map(|cgroup| std::fs::read_to_string(cgroup.path().join("memory.max")));
        // Not every host that this is built on has that controller for us.
        if let Some(Ok(limit)) = limit {
            same("memory.max", &limit.trim().parse(), &Ok(limits::memory_max(&config)))?;
        }
    }
    Ok(())
}

fn held(world: &World, name: &str) -> ByteSize {
    world.entry(name).stored().sandbox.config.resources.held()
}

fn config() -> SandboxConfig {
    let mut config = World::config("web");
    (config.resources.memory, config.resources.boot_memory) = (MEMORY, Some(BOOT));
    config.resources.max_memory = Some(ByteSize::gib(1));
    config.resources.cpu_model = Some(CpuModel::Common);
    config
}

/// A sandbox that runs and has all of its memory.
fn world() -> World {
    let world = World::new();
    world.run(config()).unwrap();
    world.is_at_rest().unwrap();
    assert_eq!(held(&world, "web"), MEMORY);
    is_counted(&world).unwrap();
    world
}

/// Guests plug nothing and give nothing back from here on, or do.
fn stand_still(world: &World, still: bool) {
    let questions = if still { NEVER } else { 0 };
    world
        .machines
        .to_map
        .store(questions, std::sync::atomic::Ordering::SeqCst);
    for machine in world.machines.alive() {
        machine.lock().map_after(questions);
    }
}

/// Its guest is to give back, and does not.
fn shrunk() -> World {
    let world = world();
    stand_still(&world, true);
    let told = world.node().update_memory(&world.entry("web"), BOOT).unwrap();
    assert_eq!(told.config.resources.memory, BOOT);
    assert_eq!(held(&world, "web"), MEMORY);
    is_counted(&world).unwrap();
    world
}

/// Guests do what they are asked to, and hold no more than that.
fn gives_back(world: &World) {
    stand_still(world, false);
    let fits = || {
        let entries: Vec<_> = world.node().entries().values().cloned().collect();
        entries.iter().try_for_each(|entry| {
            let resources = entry.stored().sandbox.config.resources;
            same("held", &resources.held(), &resources.memory)
        })
    };
    soon(fits).unwrap();
    world.is_at_rest().unwrap();
    is_counted(world).unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn a_daemon_that_dies_while_a_guest_gives_back_is_followed_by_one_that_counts_it() {
    let mut world = shrunk();
    world.restart();
    is_counted(&world).unwrap();
    assert_eq!(held(&world, "web"), MEMORY);
    gives_back(&world);
}

#[test]
fn another_size_meanwhile_makes_what_is_held_no_less() {
    let world = shrunk();
    for (size, holds) in [
        (LESS, MEMORY),
        (ByteSize::gib(1), ByteSize::gib(1)),
        (BOOT, ByteSize::gib(1)),
    ] {
        world.node().update_memory(&world.entry("web"), size).unwrap();
        assert_eq!(held(&world, "web"), holds);
        is_counted(&world).unwrap();
    }
    gives_back(&world);
}

#[test]
fn whatever_is_refused_or_dies_while_a_guest_gives_back_it_is_counted() {
    for fault in [Fault::Refused, Fault::Crash] {
        let places = (0..60).take_while(|number| shrinks_with(fault, *number)).count();
        assert!((3..60).contains(&places), "{fault:?}: {places} places");
    }
}

/// Whether there is such a place.
fn shrinks_with(fault: Fault, number: usize) -> bool {
    let mut world = world();
    world.faults.arm(&[(number, fault)]);
    let attempt = world.attempt(|world| {
        world.node().update_memory(&world.entry("web"), BOOT)?;
        let comes = soon(|| match world.faults.has_fired() {
            true => Ok(()),
            false => device_start::look(world),
        });
        comes.unwrap();
        Ok(())
    });
    let fired = world.faults.disarm();
    let said = format!("{fault:?} at {fired:?}: {attempt:?}");
    if fault == Fault::Crash && !fired.is_empty() {
        stand_still(&world, true);
        world.restart();
        is_counted(&world).unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
        stand_still(&world, false);
    }
    world.is_at_rest().unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
    soon(|| is_counted(&world)).unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
    let resources = world.entry("web").stored().sandbox.config.resources;
    assert_eq!(resources.held(), resources.memory, "{said}");
    if let Attempt::Done = attempt {
        assert_eq!(resources.memory, BOOT, "{said}");
    }
    world.ends_empty().unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
    !fired.is_empty()
}

/// Brings a sandbox back, or makes another, of a snapshot of one that had more.
fn of_snapshot(act: fn(&World) -> Result<(), Error>, name: &str, wanted: ByteSize) {
    let world = world();
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("more"), OnDevices::Refuse)
        .unwrap();
    world.node().update_memory(&world.entry("web"), BOOT).unwrap();
    world.is_at_rest().unwrap();
    assert_eq!(held(&world, "web"), BOOT);
    stand_still(&world, true);
    act(&world).unwrap();
    let resources = world.entry(name).stored().sandbox.config.resources;
    assert_eq!((resources.memory, resources.held()), (wanted, MEMORY));
    is_counted(&world).unwrap();
    gives_back(&world);
}

#[test]
fn a_rollback_to_more_counts_that_until_it_is_given_back() {
    let back: fn(&World) -> Result<(), Error> = |world| {
        world
            .node()
            .rollback(&world.entry("web"), "more", OnDevices::Refuse)
            .map(drop)
    };
    of_snapshot(back, "web", BOOT);
    let ended: fn(&World) -> Result<(), Error> = |world| {
        world.node().stop(&world.entry("web"), Duration::ZERO)?;
        assert_eq!(held(world, "web"), BOOT);
        world
            .node()
            .rollback(&world.entry("web"), "more", OnDevices::Refuse)
            .map(drop)
    };
    of_snapshot(ended, "web", BOOT);
}

#[test]
fn a_rollback_that_is_refused_leaves_what_was_held() {
    let refused = |number| {
        let world = world();
        world
            .node()
            .make_snapshot(&world.entry("web"), Some("more"), OnDevices::Refuse)
            .unwrap();
        world.node().update_memory(&world.entry("web"), BOOT).unwrap();
        world.is_at_rest().unwrap();
        world.faults.arm(&[(number, Fault::Refused)]);
        let attempt = world.attempt(|world| {
            world
                .node()
                .rollback(&world.entry("web"), "more", OnDevices::Refuse)
                .map(drop)
        });
        let fired = world.faults.disarm();
        world.is_at_rest().unwrap();
        is_counted(&world).unwrap_or_else(|wrong| panic!("{fired:?}, {attempt:?}: {wrong}"));
        assert_eq!(held(&world, "web"), BOOT, "{fired:?}, {attempt:?}");
        world.ends_empty().unwrap();
        !fired.is_empty()
    };
    let places = (0..60).take_while(|number| refused(*number)).count();
    assert!((3..60).contains(&places), "{places} places");
}

#[test]
fn a_clone_of_a_snapshot_of_one_that_gives_back_counts_what_it_held() {
    let world = shrunk();
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("less"), OnDevices::Refuse)
        .unwrap();
    let asked = CloneConfig {
        snapshot: "less".to_owned(),
        name: Some("twin".to_owned()),
        ports: vec!["81:80".to_owned()],
        ..CloneConfig::default()
    };
    world.node().clone_of(asked).unwrap();
    let resources = world.entry("twin").stored().sandbox.config.resources;
    assert_eq!((resources.memory, resources.held()), (BOOT, MEMORY));
    is_counted(&world).unwrap();
    gives_back(&world);
}

#[test]
fn a_sandbox_that_is_moved_while_its_guest_gives_back_is_counted_there() {
    let mut world = shrunk();
    world
        .node()
        .move_to(&world.entry("web"), Class::Dedicated, OnDevices::Refuse)
        .unwrap();
    assert_eq!(held(&world, "web"), MEMORY);
    is_counted(&world).unwrap();
    world.restart();
    is_counted(&world).unwrap();
    gives_back(&world);
}

#[test]
fn one_that_has_exited_holds_nothing() {
    let world = shrunk();
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
    assert_eq!(held(&world, "web"), BOOT);
    stand_still(&world, false);
    world.node().start(&world.entry("web")).unwrap();
    gives_back(&world);
}

#[test]
fn a_record_from_before_counts_all_that_its_machine_can_have_until_it_is_asked() {
    let mut world = world();
    let entry = world.entry("web");
    let forget = |stored: &mut crate::store::database::Stored| stored.sandbox.config.resources.held_memory = None;
    world.node().update(&entry, forget).unwrap();
    drop(entry);
    // As it stands in a file, there is no such field.
    let record = serde_json::to_string(&world.entry("web").stored()).unwrap();
    assert!(!record.contains("held_memory"), "{record}");
    let back: crate::store::database::Stored = serde_json::from_str(&record).unwrap();
    assert_eq!(back.sandbox.config.resources.held(), ByteSize::gib(1));
    world.restart();
    soon(|| same("held", &held(&world, "web"), &MEMORY)).unwrap();
    gives_back(&world);
}

#[test]
fn what_fails_of_memory_alone_is_told_so_and_tried_again() {
    let world = shrunk();
    let events = world.node().events.listen();
    // Whoever follows it asks its VMM, and is refused once.
    world.faults.arm(&[(0, Fault::Refused)]);
    soon(|| same("refused", &world.faults.has_fired(), &true)).unwrap();
    assert_eq!(world.faults.disarm(), ["VMM info"]);
    let failed = || world.entry("web").lock().memory_failed.clone();
    soon(|| same("told why", &failed().is_some(), &true)).unwrap();
    let state = world.node().inspect(&world.entry("web")).memory_state.unwrap();
    assert!(state.memory_failed.is_some_and(|why| why.contains(INJECTED)) && state.failed.is_none());
    stand_still(&world, false);
    soon(|| same("failed", &failed(), &None)).unwrap();
    // That it is there again is told behind that.
    let told = RefCell::new(Vec::new());
    soon(|| {
        let mut told = told.borrow_mut();
        told.extend(events.try_iter().map(|event| event.kind));
        same("told", &*told, &vec![EventKind::MemoryFailed, EventKind::MemoryReady])
    })
    .unwrap();
    assert_eq!(world.entry("web").state(), State::Running);
    gives_back(&world);
}
