//! Sandboxes that are started with devices, and memory that is plugged, under a node that dies or is refused at every place, and VMMs that take
//! their time: a sandbox has what its record says, or what it cannot have is nobody's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base::ByteSize;
use base::points::RESTORE_REIDENTIFIED;
use node_api::{DeviceStart, DeviceState, EventKind, MemoryState, SandboxConfig, State};
use vfio::host::dma_faults::DmaFault;

use super::devices::{Case, NVME, address, bind, every_place, state};
use super::faults::Fault;
use super::machine::{BROKEN, Machine, NEVER, NOT_MAPPED};
use super::{Attempt, World, same, soon};
use crate::Error;
use crate::operations::detach_for::OnDevices;

/// What ends a sandbox takes no longer, whatever is mapped.
const AT_ONCE: Duration = Duration::from_secs(5);

/// More places than anything here has.
const MOST: usize = 60;

const BOOT: ByteSize = ByteSize::mib(256);
const MEMORY: ByteSize = ByteSize::mib(768);

/// Nothing is followed any more, and a guest's memory is what its record says.
pub(super) fn look(world: &World) -> Result<(), String> {
    for machine in world.machines.alive() {
        let entry = world.node().find(&machine.sandbox).map_err(|error| error.to_string())?;
        let inner = entry.lock();
        if !inner.coming.is_empty() || inner.memory_followed.is_some() {
            return Err(format!("{} is followed still", machine.sandbox));
        }
        let wanted = inner.stored.sandbox.config.resources.plugged().bytes();
        drop(inner);
        if let Some(memory) = machine.lock().memory {
            same("hot-pluggable memory asked for", &memory.target, &wanted)?;
            same("plugged memory", &memory.plugged, &wanted)?;
        }
    }
    Ok(())
}

fn config(start: DeviceStart) -> SandboxConfig {
    SandboxConfig {
        devices: vec![address(NVME)],
        device_start: Some(start),
        ..World::config("web")
    }
}

/// What boots with a part of its memory.
fn divided(mut config: SandboxConfig) -> SandboxConfig {
    (config.resources.memory, config.resources.boot_memory) = (MEMORY, Some(BOOT));
    config.resources.max_memory = Some(ByteSize::gib(1));
    config
}

/// Starts it and waits for what comes behind the start, or something has gone wrong.
fn run(world: &World, config: SandboxConfig) -> Result<(), Error> {
    world.run(config)?;
    wait(world);
    Ok(())
}

fn wait(world: &World) {
    let waited = soon(|| match world.faults.has_fired() {
        true => Ok(()),
        false => look(world),
    });
    waited.unwrap();
}

fn machine(world: &World) -> Arc<Machine> {
    world.machines.alive().into_iter().next().unwrap()
}

fn maps_after(world: &World, questions: u32) {
    world.machines.to_map.store(questions, Ordering::SeqCst);
}

fn memory_state(world: &World) -> Option<MemoryState> {
    world.node().inspect(&world.entry("web")).memory_state
}

/// There is a template of such sandboxes, and a device.
fn with_template(world: &World) {
    bind(world, NVME).unwrap();
    world.run(without_boot(World::config("first"))).unwrap();
    world.has_template().unwrap();
    world.node().remove(&world.entry("first"), true).unwrap();
    world.is_at_rest().unwrap();
}

fn without_boot(config: SandboxConfig) -> SandboxConfig {
    SandboxConfig { boot: false, ..config }
}

const CASES: &[Case] = &[
    Case {
        name: "run, late, of a template",
        prepare: with_template,
        act: |world| run(world, without_boot(config(DeviceStart::Late))),
        undone: &[DeviceState::Ready, DeviceState::Quarantined],
        done: DeviceState::Claimed,
    },
    Case {
        name: "run, eager",
        prepare: |world| bind(world, NVME).unwrap(),
        act: |world| run(world, config(DeviceStart::Eager)),
        undone: &[DeviceState::Ready, DeviceState::Quarantined],
        done: DeviceState::Claimed,
    },
    Case {
        name: "run, async",
        prepare: |world| bind(world, NVME).unwrap(),
        act: |world| run(world, divided(config(DeviceStart::Async))),
        undone: &[DeviceState::Ready, DeviceState::Quarantined],
        done: DeviceState::Claimed,
    },
    Case {
        name: "run, late",
        prepare: |world| bind(world, NVME).unwrap(),
        act: |world| run(world, config(DeviceStart::Late)),
        undone: &[DeviceState::Ready, DeviceState::Quarantined],
        done: DeviceState::Claimed,
    },
    Case {
        name: "run, lazy",
        prepare: |world| bind(world, NVME).unwrap(),
        act: |world| run(world, config(DeviceStart::Lazy)),
        undone: &[DeviceState::Ready, DeviceState::Quarantined],
        done: DeviceState::Claimed,
    },
];

#[test]
fn whatever_is_refused_on_the_way_of_a_start_a_device_is_the_sandboxs_or_ready() {
    CASES.iter().for_each(|case| every_place(case, Fault::Refused));
}

#[test]
fn wherever_the_daemon_dies_on_the_way_of_a_start_a_device_is_the_sandboxs_or_ready() {
    CASES.iter().for_each(|case| every_place(case, Fault::Crash));
}

/// What has come about in a machine that was started so.
fn history(config: SandboxConfig) -> Vec<&'static str> {
    let world = World::new();
    bind(&world, NVME).unwrap();
    maps_after(&world, 3);
    run(&world, config).unwrap();
    let history = machine(&world).lock().history.clone();
    world.ends_empty().unwrap();
    history
}

#[test]
fn a_policy_is_an_order() {
    let ready = |config: SandboxConfig| SandboxConfig {
        memory_ready: true,
        ..config
    };
    let eager = ["mapped", "started", "shown", "command"];
    assert_eq!(history(config(DeviceStart::Eager)), eager);
    let held_back = ["started", "mapped", "shown", "command"];
    assert_eq!(history(config(DeviceStart::Async)), held_back);
    assert_eq!(history(config(DeviceStart::AsyncBalloon)), held_back);
    assert_eq!(history(config(DeviceStart::Lazy)), held_back);
    assert_eq!(history(ready(config(DeviceStart::Late))), held_back);
    let late = ["started", "command", "mapped", "shown"];
    assert_eq!(history(config(DeviceStart::Late)), late);
    let plugged = ["started", "mapped", "shown", "command", "plugged"];
    assert_eq!(history(divided(config(DeviceStart::Async))), plugged);
    let waits = ["started", "mapped", "shown", "plugged", "command"];
    assert_eq!(history(ready(divided(config(DeviceStart::Async)))), waits);
}

#[test]
fn memory_that_has_left_its_balloon_is_told_of() {
    let world = World::new();
    bind(&world, NVME).unwrap();
    maps_after(&world, 3);
    let events = world.node().events.listen();
    let mut config = divided(config(DeviceStart::AsyncBalloon));
    config.resources.max_memory = None;
    world.run(config).unwrap();
    let is_told = || events.try_iter().any(|event| event.kind == EventKind::MemoryReady);
    soon(|| same("told", &is_told(), &true)).unwrap();
    assert_eq!(machine(&world).lock().balloon.map(|balloon| balloon.inflated), Some(0));
    wait(&world);
    assert!(!is_told(), "it is told once");
    world.ends_empty().unwrap();
}

/// Its command does not wait for the device to be opened; whose memory waits for it does.
#[test]
fn the_command_of_a_clone_that_gets_its_device_late_comes_before_that() {
    let world = World::new();
    with_template(&world);
    let given_at_command = |start| {
        maps_after(&world, 3);
        run(&world, without_boot(config(start))).unwrap();
        let machine = machine(&world);
        let shown = machine.lock();
        assert!(world.entry("web").stored().sandbox.template.is_some(), "{start}");
        assert_eq!(shown.functions, [NVME], "{start}");
        let given = shown.had_at_command;
        drop(shown);
        world.node().remove(&world.entry("web"), true).unwrap();
        world.is_at_rest().unwrap();
        given
    };
    assert_eq!(given_at_command(DeviceStart::Late), 0);
    assert_eq!(given_at_command(DeviceStart::Async), 1);
    world.ends_empty().unwrap();
}

#[test]
fn a_clone_claims_what_it_gets_late_while_its_guest_is_re_identified() {
    let world = World::new();
    with_template(&world);
    let (node, in_time) = (Arc::downgrade(world.node()), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&in_time);
    world.faults.at(RESTORE_REIDENTIFIED, move || {
        let node = node.upgrade().unwrap();
        let all = node.devices.list(&node.sandboxes).unwrap();
        let claimed = all.iter().any(|device| device.state == DeviceState::Claimed);
        told.store(claimed, Ordering::SeqCst);
    });
    run(&world, without_boot(config(DeviceStart::Late))).unwrap();
    assert!(in_time.load(Ordering::SeqCst), "its command waited for that");
    world.ends_empty().unwrap();
}

/// Its guest has an IOMMU as long as it is there, whatever devices it has.
#[test]
fn a_lazy_sandbox_has_an_iommu_without_a_device_too() {
    let world = World::new();
    let lazy = SandboxConfig {
        devices: Vec::new(),
        ..config(DeviceStart::Lazy)
    };
    run(&world, lazy).unwrap();
    assert!(world.entry("web").stored().sandbox.config.resources.guest_iommu);
    bind(&world, NVME).unwrap();
    let given = world.node().attach_devices(&world.entry("web"), &[address(NVME)]);
    assert_eq!(given.unwrap().len(), 1);
    world.ends_empty().unwrap();
}

#[test]
fn a_sandbox_that_is_started_again_follows_its_policy() {
    let world = World::new();
    bind(&world, NVME).unwrap();
    run(&world, divided(config(DeviceStart::Async))).unwrap();
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
    assert_eq!(state(&world, NVME), DeviceState::Ready);
    maps_after(&world, 2);
    world.node().start(&world.entry("web")).unwrap();
    world.is_at_rest().unwrap();
    let history = machine(&world).lock().history.clone();
    assert_eq!(history, ["started", "mapped", "shown", "command", "plugged"]);
    assert_eq!(state(&world, NVME), DeviceState::Claimed);
    world.ends_empty().unwrap();
}

/// A sandbox that runs, whose device never comes.
fn never_mapped() -> World {
    let world = World::new();
    bind(&world, NVME).unwrap();
    maps_after(&world, NEVER);
    world.run(config(DeviceStart::Late)).unwrap();
    let told = memory_state(&world).unwrap();
    assert_eq!((told.coming, told.dma.mapped), (vec![address(NVME)], 0));
    world
}

/// How somebody ends a sandbox, or takes its device.
type End = fn(&World) -> Result<(), Error>;

#[test]
fn who_ends_a_sandbox_does_not_wait_for_its_memory_to_be_mapped() {
    let ends: [End; 4] = [
        |world| world.node().stop(&world.entry("web"), Duration::ZERO),
        |world| world.node().kill(&world.entry("web"), libc::SIGKILL),
        |world| world.node().remove(&world.entry("web"), true),
        |world| {
            world
                .node()
                .detach_devices(&world.entry("web"), &[address(NVME)], false)
        },
    ];
    for end in ends {
        let world = never_mapped();
        let begun = Instant::now();
        end(&world).unwrap();
        assert!(begun.elapsed() < AT_ONCE);
        world.is_at_rest().unwrap();
        assert_eq!(state(&world, NVME), DeviceState::Ready);
        world.ends_empty().unwrap();
    }
}

#[test]
fn the_next_daemon_waits_for_no_mapping_and_brings_the_device() {
    let mut world = never_mapped();
    let before = Instant::now();
    world.restart();
    assert!(before.elapsed() < AT_ONCE);
    let events = world.node().events.listen();
    assert_eq!(state(&world, NVME), DeviceState::Claimed);
    // Its daemon asks once whether the VMM has the device, and once whether that is under way.
    machine(&world).lock().map_after(2);
    // Nothing is on its way until the daemon's thread has looked.
    soon(|| match machine(&world).lock().history.contains(&"shown") {
        true => Ok(()),
        false => Err("the guest was not told of it".to_owned()),
    })
    .unwrap();
    world.is_at_rest().unwrap();
    assert_eq!(memory_state(&world).unwrap().coming, []);
    let told: Vec<_> = events.try_iter().collect();
    let kinds: Vec<_> = told.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::DevicesPresent]);
    let rate = told[0].memory.as_ref().and_then(|memory| memory.dma.rate());
    assert_eq!(rate, Some(512 << 20), "how fast it came is told with it");
    world.ends_empty().unwrap();
}

#[test]
fn a_device_that_does_not_come_behind_the_start_is_given_back_and_told_of() {
    let world = World::new();
    bind(&world, NVME).unwrap();
    maps_after(&world, BROKEN);
    let events = world.node().events.listen();
    world.run(config(DeviceStart::Late)).unwrap();
    soon(|| same("device", &state(&world, NVME), &DeviceState::Ready)).unwrap();
    world.is_at_rest().unwrap();
    let failed = memory_state(&world).unwrap().failed.unwrap();
    assert!(failed.contains(NOT_MAPPED) && failed.contains(NVME), "{failed}");
    let devices = world.node().list_devices().unwrap();
    let why = devices.iter().find(|device| device.address == address(NVME)).unwrap();
    assert!(why.why.as_ref().is_some_and(|why| why.contains(NOT_MAPPED)), "{why:?}");
    let told: Vec<_> = events.try_iter().map(|event| event.kind).collect();
    assert!(told.contains(&EventKind::DevicesFailed), "{told:?}");
    // Where the command waits for it, there is no sandbox.
    let other = SandboxConfig {
        name: Some("other".to_owned()),
        ports: Vec::new(),
        ..config(DeviceStart::Eager)
    };
    let refused = world.run(other).unwrap_err().to_string();
    assert!(refused.contains(NOT_MAPPED), "{refused}");
    world.is_at_rest().unwrap();
    assert_eq!(state(&world, NVME), DeviceState::Ready);
    world.ends_empty().unwrap();
}

fn plugged(world: &World) -> u64 {
    machine(world).lock().memory.unwrap().plugged
}

#[test]
fn another_size_is_in_the_record_or_was_never() {
    for fault in [Fault::Refused, Fault::Crash] {
        for size in [BOOT, ByteSize::gib(1)] {
            let places = (0..MOST)
                .take_while(|number| resized_with(fault, size, *number))
                .count();
            assert!((2..MOST).contains(&places), "{fault:?}: {places} places");
        }
    }
}

/// Whether there is such a place.
fn resized_with(fault: Fault, size: ByteSize, number: usize) -> bool {
    let mut world = World::new();
    run(&world, divided(World::config("web"))).unwrap();
    world.faults.arm(&[(number, fault)]);
    let attempt = world.attempt(|world| {
        world.node().update_memory(&world.entry("web"), size)?;
        wait(world);
        Ok(())
    });
    let fired = world.faults.disarm();
    let said = format!("{fault:?} at {fired:?}: {attempt:?}");
    if fault == Fault::Crash && !fired.is_empty() {
        world.restart();
    }
    world.is_at_rest().unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
    let now = world.entry("web").stored().sandbox.config.resources;
    assert_eq!(plugged(&world), now.memory.bytes() - BOOT.bytes(), "{said}");
    match attempt {
        Attempt::Done => assert_eq!(now.memory, size, "{said}"),
        Attempt::Failed(_) if fault == Fault::Refused => assert!([MEMORY, size].contains(&now.memory), "{said}"),
        Attempt::Failed(_) | Attempt::Crashed => assert!([MEMORY, size].contains(&now.memory), "{said}"),
    }
    world.ends_empty().unwrap_or_else(|wrong| panic!("{said}: {wrong}"));
    !fired.is_empty()
}

/// What the kernel would write to its log.
fn fault_of(address: &str) -> DmaFault {
    let line = format!("DMAR: [DMA Write NO_PASID] Request device [{address}] fault addr 0x2000 [fault reason 0x05] x");
    DmaFault::of_line(&line).unwrap()
}

#[test]
fn dma_that_is_refused_is_told_once_and_counted_with_whoever_has_the_device() {
    let world = World::new();
    bind(&world, NVME).unwrap();
    let (node, faults) = (world.node(), || {
        memory_state(&world).and_then(|memory| memory.dma.faults)
    });
    // Nobody has it yet.
    node.count_dma_fault(&fault_of("01:00.0"));
    run(&world, config(DeviceStart::Eager)).unwrap();
    assert_eq!(faults(), None, "nobody looks");
    node.dma_faults.set(true);
    assert_eq!(faults(), Some(0));
    let events = node.events.listen();
    for address in ["01:00.0", "02:00.0", "01:00.0"] {
        node.count_dma_fault(&fault_of(address));
    }
    assert_eq!(faults(), Some(2));
    let told: Vec<_> = events.try_iter().collect();
    assert_eq!(told.len(), 1, "{told:?}");
    let why = told[0].why.as_deref().unwrap_or_default();
    assert!(
        told[0].kind == EventKind::DmaFault && told[0].name == "web" && why.contains(NVME),
        "{told:?}"
    );
    node.remove(&world.entry("web"), true).unwrap();
    node.count_dma_fault(&fault_of("01:00.0"));
    assert_eq!(
        events
            .try_iter()
            .filter(|event| event.kind == EventKind::DmaFault)
            .count(),
        0
    );
    world.ends_empty().unwrap();
}

#[test]
fn a_size_is_kept_while_the_sandbox_has_exited_and_what_it_cannot_have_is_refused() {
    let world = World::new();
    run(&world, divided(World::config("web"))).unwrap();
    let update = |size| world.node().update_memory(&world.entry("web"), size);
    for (size, why) in [
        (ByteSize::gib(2), "256 MiB to 1 GiB"),
        (ByteSize::mib(128), "256 MiB to 1 GiB"),
        (ByteSize::mib(513), "2 MiB"),
    ] {
        let refused = update(size).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
    let told = update(ByteSize::mib(512)).unwrap();
    assert_eq!((told.state, told.memory_state), (State::Exited, None));
    world.node().start(&world.entry("web")).unwrap();
    world.is_at_rest().unwrap();
    assert_eq!(plugged(&world), BOOT.bytes());
    let fixed = SandboxConfig {
        ports: Vec::new(),
        ..World::config("fixed")
    };
    world.run(fixed).unwrap();
    let refused = world.node().update_memory(&world.entry("fixed"), MEMORY).unwrap_err();
    assert!(refused.to_string().contains("--max-memory"), "{refused}");
    world.ends_empty().unwrap();
}

#[test]
fn a_guest_that_does_not_follow_is_told_of_and_keeps_its_limits() {
    let world = World::new();
    run(&world, divided(World::config("web"))).unwrap();
    machine(&world).lock().map_after(NEVER);
    let promised = || world.node().budget.promised()[0].promised;
    let before = promised();
    let told = world.node().update_memory(&world.entry("web"), BOOT).unwrap();
    let told = told.memory_state.unwrap();
    assert_eq!((told.present, told.target), (MEMORY.bytes(), BOOT.bytes()));
    assert_eq!(promised(), before, "it has it still");
    machine(&world).lock().map_after(0);
    world.is_at_rest().unwrap();
    let tables = (MEMORY.bytes() - BOOT.bytes()) / 128;
    assert_eq!(promised(), before - (MEMORY.bytes() - BOOT.bytes()) - tables);
    world.ends_empty().unwrap();
}

#[test]
fn a_clone_has_the_same_region() {
    let world = World::new();
    run(&world, divided(World::config("web"))).unwrap();
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("ready"), OnDevices::Refuse)
        .unwrap();
    let asked = node_api::CloneConfig {
        snapshot: "ready".to_owned(),
        name: Some("twin".to_owned()),
        ports: vec!["81:80".to_owned()],
        ..node_api::CloneConfig::default()
    };
    world.node().clone_of(asked).unwrap();
    world.is_at_rest().unwrap();
    let regions: Vec<_> = world
        .machines
        .alive()
        .iter()
        .map(|machine| machine.lock().memory.unwrap().region)
        .collect();
    assert_eq!(regions, [ByteSize::mib(768).bytes(); 2]);
    world.ends_empty().unwrap();
}
