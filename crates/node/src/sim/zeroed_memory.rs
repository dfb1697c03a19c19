//! Sandboxes with devices where memory lies ready zeroed: which get some, each piece once, and none that a VMM may have had comes back.

use std::os::fd::OwnedFd;
use std::time::Duration;

use base::ByteSize;
use node_api::{DeviceStart, DeviceState, Resource, SandboxConfig};
use rustix::fs::fstat;

use super::World;
use super::devices::{NVME, address, bind, state};
use super::faults::Fault;
use super::machine::{BROKEN, Shown};
use crate::Error;
use crate::ZEROED_PIECE;
use crate::operations::detach_for::OnDevices;
use crate::resources::limits;
use crate::resources::zeroed_memory::Attempt;
use crate::store::database::CameZeroed;

/// Of three pieces and a half: what is plugged is mapped in whole ones.
const BOOT: ByteSize = ByteSize::mib(256);
const MEMORY: ByteSize = ByteSize::mib(256 + 448);
const WHOLE: u64 = 4;

impl Shown {
    /// Its guest is to have so much plugged.
    pub(super) fn resize(&mut self, bytes: u64) {
        let memory = self.memory.as_mut().unwrap();
        let is_less = bytes < memory.target;
        memory.target = bytes;
        if is_less {
            self.note("shrinks");
        }
    }

    /// Files lie in the place of all memory that it had.
    pub(super) fn is_mapped_anew(&mut self) {
        self.note("mapped anew");
        self.zeroed.iter_mut().for_each(Vec::clear);
    }
}

fn config(name: &str, start: DeviceStart) -> SandboxConfig {
    let mut config = SandboxConfig {
        devices: vec![address(NVME)],
        device_start: Some(start),
        ..World::config(name)
    };
    (config.resources.memory, config.resources.boot_memory) = (MEMORY, Some(BOOT));
    config.resources.max_memory = Some(ByteSize::gib(1));
    config
}

/// With a device and so many pieces that are ready.
fn world(pieces: u64) -> World {
    let world = World::with_zeroed_memory(pieces);
    bind(&world, NVME).unwrap();
    fill(&world);
    world
}

fn fill(world: &World) {
    while world.node().zeroed.make_one(None) == Attempt::Made {}
}

fn ready(world: &World) -> u64 {
    world.node().zeroed.numbers().ready.bytes() / ZEROED_PIECE.bytes()
}

/// Which files its only machine was given.
fn given(world: &World) -> Vec<u64> {
    let machine = world.machines.alive().into_iter().next().unwrap();
    let shown = machine.lock();
    let inode = |file: &OwnedFd| fstat(file).unwrap().st_ino;
    shown.zeroed.iter().flatten().map(inode).collect()
}

/// How often this process, which is its VMMs as well, has the file open.
fn open(inode: u64) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let its = |path: std::path::PathBuf| {
        use std::os::unix::fs::MetadataExt;
        let name = std::fs::read_link(&path).is_ok_and(|name| name.to_string_lossy().contains("memfd:zeroed"));
        name && std::fs::metadata(&path).is_ok_and(|found| found.ino() == inode)
    };
    all.filter(|entry| its(entry.path())).count()
}

fn remove(world: &World, name: &str) {
    world.node().remove(&world.entry(name), true).unwrap();
    world.is_at_rest().unwrap();
}

#[test]
fn a_sandbox_that_is_started_with_a_device_gets_what_it_will_plug_and_the_daemon_keeps_nothing_of_it() {
    let world = world(6);
    world.run(config("web", DeviceStart::Async)).unwrap();
    world.is_at_rest().unwrap();
    let first = given(&world);
    assert_eq!((first.len() as u64, ready(&world)), (WHOLE, 6 - WHOLE));
    for inode in &first {
        assert_eq!(open(*inode), 1, "the VMM has it, and nobody else");
    }
    // One that comes later gets what there is, and nothing that another had.
    remove(&world, "web");
    world.run(config("db", DeviceStart::Async)).unwrap();
    world.is_at_rest().unwrap();
    let second = given(&world);
    assert_eq!((second.len() as u64, ready(&world)), (6 - WHOLE, 0));
    assert!(
        second.iter().all(|inode| !first.contains(inode)),
        "{first:?} {second:?}"
    );
    remove(&world, "db");
    world.run(config("mail", DeviceStart::Async)).unwrap();
    assert_eq!(given(&world), [0; 0]);
    world.ends_empty().unwrap();
}

#[test]
fn a_clone_of_a_template_gets_some_too() {
    let world = world(6);
    let without_boot = |config| SandboxConfig { boot: false, ..config };
    let mut first = without_boot(World::config("first"));
    first.resources.memory = BOOT;
    // A machine that can plug memory is another one.
    first.resources.max_memory = Some(ByteSize::gib(1));
    world.run(first).unwrap();
    world.has_template().unwrap();
    remove(&world, "first");
    world.run(without_boot(config("web", DeviceStart::Async))).unwrap();
    assert!(world.entry("web").stored().sandbox.template.is_some());
    assert_eq!(given(&world).len() as u64, WHOLE);
    world.ends_empty().unwrap();
}

#[test]
fn who_has_no_use_for_it_gets_none() {
    let world = world(4);
    let without_region = |start| SandboxConfig {
        resources: World::config("web").resources,
        ..config("web", start)
    };
    let without_device = SandboxConfig {
        devices: Vec::new(),
        device_start: None,
        ..config("web", DeviceStart::Async)
    };
    for config in [
        without_device,
        without_region(DeviceStart::Async),
        without_region(DeviceStart::Eager),
        config("web", DeviceStart::Late),
    ] {
        world.run(config).unwrap();
        world.is_at_rest().unwrap();
        assert_eq!(given(&world), [0; 0]);
        // One whose guest has memory plugged gets a device, and nothing besides.
        if world.node().devices.of(&world.entry("web").id).is_empty() {
            world
                .node()
                .attach_devices(&world.entry("web"), &[address(NVME)])
                .unwrap();
            assert_eq!(given(&world), [0; 0]);
        }
        remove(&world, "web");
    }
    assert_eq!(ready(&world), 4);
    world.ends_empty().unwrap();
}

#[test]
fn a_vmm_of_before_is_sent_none() {
    let world = world(4);
    world
        .machines
        .take_zeroed
        .store(false, std::sync::atomic::Ordering::SeqCst);
    world.run(config("web", DeviceStart::Async)).unwrap();
    world.is_at_rest().unwrap();
    assert_eq!(ready(&world), 4);
    world.ends_empty().unwrap();
}

#[test]
fn a_daemon_without_any_sends_none() {
    let world = world(0);
    world.run(config("web", DeviceStart::Async)).unwrap();
    assert_eq!(given(&world), [0; 0]);
    world.ends_empty().unwrap();
}

#[test]
fn what_a_start_that_fails_was_given_does_not_come_back() {
    let world = world(4);
    world.machines.to_map.store(BROKEN, std::sync::atomic::Ordering::SeqCst);
    world.run(config("web", DeviceStart::Async)).unwrap_err();
    world.is_at_rest().unwrap();
    assert_eq!((ready(&world), state(&world, NVME)), (4 - WHOLE, DeviceState::Ready));
    world.ends_empty().unwrap();
}

/// Whatever is refused on the way, the sandbox starts or is gone, and what was taken is nobody's any more.
#[test]
fn a_vmm_that_refuses_it_has_its_memory_zeroed_as_ever() {
    let mut refused_by_itself = false;
    for number in 0..60 {
        let world = world(4);
        world.faults.arm(&[(number, Fault::Refused)]);
        let run = world.run(config("web", DeviceStart::Async)).map(drop);
        let fired = world.faults.disarm();
        world.is_at_rest().unwrap_or_else(|wrong| panic!("{fired:?}: {wrong}"));
        if fired.iter().any(|place| place.contains("add-zeroed-memory")) {
            refused_by_itself = true;
            run.unwrap();
            assert_eq!((given(&world).len(), ready(&world)), (0, 4 - WHOLE));
            assert_eq!(state(&world, NVME), DeviceState::Claimed);
        }
        world.ends_empty().unwrap();
        if fired.is_empty() {
            break;
        }
    }
    assert!(refused_by_itself);
}

#[test]
fn a_sandbox_that_needs_all_memory_is_started_though_some_lies_ready() {
    let world = world(3);
    let promised = world.node().budget.promised();
    let memory = promised.iter().find(|one| one.resource == Resource::Memory).unwrap();
    assert_eq!(memory.promised, 0, "no sandbox has it");
    // With the tables for it and its VMM all that can be promised but half a piece.
    let most = (memory.total - ByteSize::mib(128).bytes() - ZEROED_PIECE.bytes() / 2) / 129 * 128;
    let mut config = World::config("web");
    config.resources.memory = ByteSize(most >> 21 << 21);
    world.run(config).unwrap();
    assert_eq!(ready(&world), 0);
    fill(&world);
    assert_eq!(ready(&world), 0, "there is no room for it beside the sandbox");
    remove(&world, "web");
    fill(&world);
    assert_eq!(ready(&world), 3);
    world.ends_empty().unwrap();
}

#[test]
fn the_next_daemon_begins_with_nothing_and_a_sandbox_keeps_what_it_was_given() {
    let mut world = world(6);
    world.run(config("web", DeviceStart::Async)).unwrap();
    world.is_at_rest().unwrap();
    let before = given(&world);
    world.restart();
    world.is_at_rest().unwrap();
    assert_eq!((given(&world), ready(&world)), (before, 0));
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn each_piece_that_may_be_ready_is_a_descriptor_that_no_sandbox_is_promised() {
    let descriptors = |pieces| {
        let promised = World::with_zeroed_memory(pieces).node().budget.promised();
        let all = promised.iter().find(|one| one.resource == Resource::Descriptors);
        all.unwrap().total
    };
    assert_eq!(descriptors(0) - descriptors(64), 64);
}

fn came_zeroed(world: &World) -> CameZeroed {
    world.entry("web").stored().came_zeroed
}

/// How much less may be charged to its own cgroup than it may have.
fn less(world: &World) -> u64 {
    let stored = world.entry("web").stored();
    limits::memory_max(&stored.sandbox.config) - limits::charged_max(&stored)
}

fn told(world: &World) -> u64 {
    world.node().inspect(&world.entry("web")).memory_state.unwrap().zeroed
}

fn bytes(pieces: u64) -> u64 {
    pieces * ZEROED_PIECE.bytes()
}

#[test]
fn what_a_machine_has_of_it_counts_as_its_memory_and_its_own_cgroup_may_have_that_much_less() {
    for (pieces, has) in [(6, WHOLE), (2, 2), (0, 0)] {
        let mut world = world(pieces);
        world.run(config("web", DeviceStart::Async)).unwrap();
        for _ in 0..2 {
            world.is_at_rest().unwrap();
            assert_eq!((less(&world), told(&world)), (bytes(has), bytes(has)));
            // The next daemon knows it as well.
            world.restart();
        }
        // What is promised is all of it, wherever that is charged.
        let entry = world.entry("web");
        let promised = entry.promised().map(|promise| promise.memory());
        assert_eq!(promised, Some(limits::memory_max(&entry.stored().sandbox.config)));
        drop(entry);
        world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
        assert_eq!(came_zeroed(&world), CameZeroed::default(), "nothing is there any more");
        world.ends_empty().unwrap();
    }
}

#[test]
fn more_memory_is_allowed_besides_what_came_zeroed() {
    let world = world(6);
    world.run(config("web", DeviceStart::Async)).unwrap();
    world.is_at_rest().unwrap();
    world
        .node()
        .update_memory(&world.entry("web"), ByteSize::gib(1))
        .unwrap();
    world.is_at_rest().unwrap();
    assert_eq!((less(&world), told(&world)), (bytes(WHOLE), bytes(WHOLE)));
    world.ends_empty().unwrap();
}

/// What has its VMM give pages back that came zeroed, or may: it takes others for them, which are charged to it.
type GivesBack = fn(&World) -> Result<(), Error>;

fn detaches(world: &World) -> Result<(), Error> {
    world
        .node()
        .detach_devices(&world.entry("web"), &[address(NVME)], false)
}

fn shrinks(world: &World) -> Result<(), Error> {
    world
        .node()
        .update_memory(&world.entry("web"), ByteSize::mib(256 + 128))
        .map(drop)
}

fn snapshot(world: &World) -> Result<(), Error> {
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("ready"), OnDevices::Detach)
        .map(drop)
}

fn rollback(world: &World) -> Result<(), Error> {
    world
        .node()
        .rollback(&world.entry("web"), "ready", OnDevices::Detach)
        .map(drop)
}

#[test]
fn what_its_guest_gives_back_it_may_be_charged_for_before_it_is_asked_to() {
    let world = world(6);
    world.run(config("web", DeviceStart::Async)).unwrap();
    world.is_at_rest().unwrap();
    shrinks(&world).unwrap();
    world.is_at_rest().unwrap();
    // It cannot have more of it than it has plugged.
    assert_eq!((less(&world), told(&world)), (0, bytes(1)));
    world.node().update_memory(&world.entry("web"), MEMORY).unwrap();
    world.is_at_rest().unwrap();
    assert_eq!((less(&world), told(&world)), (0, bytes(1)));
    world.ends_empty().unwrap();
}

#[test]
fn without_devices_it_may_give_all_of_it_back_and_with_a_snapshot_it_has_none() {
    let world = world(6);
    world.run(config("web", DeviceStart::Async)).unwrap();
    world.is_at_rest().unwrap();
    detaches(&world).unwrap();
    assert_eq!((less(&world), came_zeroed(&world).bytes), (0, bytes(WHOLE)));
    snapshot(&world).unwrap();
    assert_eq!(came_zeroed(&world), CameZeroed::default());
    // The next machine has what is left, and the one behind it none.
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
    world.node().start(&world.entry("web")).unwrap();
    world.is_at_rest().unwrap();
    assert_eq!(less(&world), bytes(6 - WHOLE));
    rollback(&world).unwrap();
    assert_eq!((came_zeroed(&world), less(&world)), (CameZeroed::default(), 0));
    world.ends_empty().unwrap();
}

/// Whether there is such a place.
fn gives_back_with(act: GivesBack, fault: Fault, number: usize) -> bool {
    let mut world = world(6);
    world.run(config("web", DeviceStart::Async)).unwrap();
    world.is_at_rest().unwrap();
    world.faults.arm(&[(number, fault)]);
    let attempt = world.attempt(act);
    let fired = world.faults.disarm();
    let said = format!("{fault:?} at {fired:?}: {attempt:?}");
    let is_right = |world: &World| {
        for machine in world.machines.alive() {
            let shown = machine.lock();
            let may_go = ["detached", "shrinks", "mapped anew"];
            let may_go = shown.history.iter().any(|what| may_go.contains(what));
            let has = bytes(shown.zeroed.iter().flatten().count() as u64);
            drop(shown);
            assert!(
                less(world) <= if may_go { 0 } else { has },
                "{said}: it would be killed"
            );
        }
    };
    is_right(&world);
    if fault == Fault::Crash && !fired.is_empty() {
        world.restart();
        is_right(&world);
    }
    // As whoever is refused a device's way back does.
    if matches!(attempt, super::Attempt::Failed(_)) {
        drop(act(&world));
    }
    world.is_at_rest().unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
    is_right(&world);
    world.ends_empty().unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
    !fired.is_empty()
}

#[test]
fn whatever_is_refused_or_dies_nobody_is_killed_for_what_was_given_back() {
    let acts: [(GivesBack, Fault); 5] = [
        (detaches, Fault::Refused),
        (detaches, Fault::Crash),
        (shrinks, Fault::Refused),
        (shrinks, Fault::Crash),
        (snapshot, Fault::Crash),
    ];
    for (act, fault) in acts {
        let places = (0..60)
            .take_while(|number| gives_back_with(act, fault, *number))
            .count();
        assert!((2..60).contains(&places), "{fault:?}: {places} places");
    }
}
