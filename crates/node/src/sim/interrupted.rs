//! Sandboxes that are stopped while somebody has their turn and waits for memory that is never mapped: it is given up at once, and nothing is
//! left of it.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use base::points;
use node_api::{DeviceStart, DeviceState, SandboxConfig, State};

use super::devices::{NVME, address, bind, state};
use super::machine::NEVER;
use super::{Attempt, World, cases, soon};
use crate::Error;
use crate::operations::detach_for::OnDevices;

/// Nobody waits longer for what is given up.
const AT_ONCE: Duration = Duration::from_secs(5);

fn never_maps(world: &World) {
    world.machines.to_map.store(NEVER, std::sync::atomic::Ordering::SeqCst);
}

/// Its VMM maps memory for a device.
fn maps(world: &World) -> Result<(), String> {
    let maps = world.machines.alive().iter().any(|machine| machine.lock().maps());
    maps.then_some(()).ok_or_else(|| "nothing is mapped".to_owned())
}

/// Stops `web` while `act` has its turn and waits; what came of both.
fn stopped_during(world: &World, act: impl FnOnce(&World) -> Result<(), Error> + Send) -> (Error, Result<(), Error>) {
    thread::scope(|scope| {
        let acting = scope.spawn(|| act(world));
        soon(|| maps(world)).unwrap();
        // Whoever is asked for how far it is waits on.
        thread::sleep(Duration::from_millis(50));
        let begun = Instant::now();
        let stopped = world.node().stop(&world.entry("web"), Duration::ZERO);
        let given_up = acting.join().unwrap().unwrap_err();
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        (given_up, stopped)
    })
}

fn config(start: DeviceStart) -> SandboxConfig {
    SandboxConfig {
        devices: vec![address(NVME)],
        device_start: Some(start),
        ..World::config("web")
    }
}

fn rests_as(world: &World, wanted: Option<State>) {
    world.is_at_rest().unwrap();
    assert_eq!(cases::state(world, "web"), wanted);
    assert_eq!(state(world, NVME), DeviceState::Ready);
    world.ends_empty().unwrap();
}

/// Whoever kills it does not wait for its turn.
#[test]
fn one_that_is_killed_while_it_is_suspended_has_exited() {
    for point in [points::SNAPSHOT_SAVED, points::SUSPEND_WRITTEN, points::SUSPEND_SAVED] {
        let world = World::new();
        world.run(World::config("web")).unwrap();
        let entry = world.entry("web");
        let (come, comes) = mpsc::channel();
        world.faults.at(point, move || {
            // Who is told may have taken it away before anything is done here.
            let vm = entry.vm().unwrap();
            come.send(()).unwrap();
            // Nothing else is done before its VMM is gone.
            assert!(vm.wait(AT_ONCE));
        });
        thread::scope(|scope| {
            let kill = || world.node().kill(&world.entry("web"), libc::SIGKILL);
            let killed = scope.spawn(move || comes.recv().map(|()| kill()));
            let suspended = world.node().suspend(&world.entry("web"));
            // From then on it could have been resumed.
            assert_eq!(
                suspended.is_ok(),
                point == points::SUSPEND_SAVED,
                "{point}: {suspended:?}"
            );
            killed.join().unwrap().unwrap().unwrap();
        });
        world.is_at_rest().unwrap();
        assert_eq!(cases::state(&world, "web"), Some(State::Exited), "{point}");
        world.ends_empty().unwrap();
    }
}

/// Who starts it anew, or stops it, says what becomes of what it has in its memory.
#[test]
fn what_is_suspended_is_given_up_by_who_says_so() {
    let world = World::new();
    for remove in [false, true] {
        let config = World::config("web");
        world.run(SandboxConfig { remove, ..config }).unwrap();
        let entry = world.entry("web");
        world.node().suspend(&entry).unwrap();
        let restarted = world.node().restart(&entry, Duration::ZERO).unwrap_err().to_string();
        assert!(restarted.contains("basalt resume"), "{restarted}");
        assert_eq!(cases::state(&world, "web"), Some(State::Suspended));
        world.node().stop(&entry, Duration::ZERO).unwrap();
        world.is_at_rest().unwrap();
        assert_eq!(cases::state(&world, "web"), (!remove).then_some(State::Exited));
        if !remove {
            world.node().remove(&entry, false).unwrap();
        }
    }
    world.ends_empty().unwrap();
}

#[test]
fn an_attach_is_given_up_for_who_stops_the_sandbox() {
    let world = World::new();
    bind(&world, NVME).unwrap();
    world.run(World::config("web")).unwrap();
    never_maps(&world);
    let (given_up, stopped) = stopped_during(&world, |world| {
        let entry = world.entry("web");
        world.node().attach_devices(&entry, &[address(NVME)]).map(drop)
    });
    stopped.unwrap();
    assert!(given_up.to_string().contains("stopped"), "{given_up}");
    rests_as(&world, Some(State::Exited));
}

#[test]
fn a_start_that_waits_for_memory_is_given_up_for_who_stops_the_sandbox() {
    for start in [DeviceStart::Eager, DeviceStart::Async] {
        let world = World::new();
        bind(&world, NVME).unwrap();
        world.run(config(start)).unwrap();
        world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
        never_maps(&world);
        let (given_up, stopped) = stopped_during(&world, |world| world.node().start(&world.entry("web")).map(drop));
        stopped.unwrap();
        assert!(given_up.to_string().contains("stopped"), "{given_up}");
        rests_as(&world, Some(State::Exited));
    }
}

#[test]
fn a_run_that_waits_for_memory_is_given_up_and_there_is_no_sandbox() {
    let ready = SandboxConfig {
        memory_ready: true,
        ..config(DeviceStart::Late)
    };
    for config in [config(DeviceStart::Eager), config(DeviceStart::Async), ready] {
        let world = World::new();
        bind(&world, NVME).unwrap();
        never_maps(&world);
        let (given_up, stopped) = stopped_during(&world, |world| world.run(config).map(drop));
        stopped.unwrap();
        assert!(given_up.to_string().contains("stopped"), "{given_up}");
        rests_as(&world, None);
    }
}

#[test]
fn devices_that_are_attached_again_are_given_up_for_who_stops_the_sandbox() {
    let world = World::new();
    bind(&world, NVME).unwrap();
    world.run(config(DeviceStart::Async)).unwrap();
    let weak = std::sync::Arc::downgrade(&world.machines);
    world.faults.at(points::DEVICE_DETACHED, move || {
        let machines = weak.upgrade().unwrap();
        machines.to_map.store(NEVER, std::sync::atomic::Ordering::SeqCst);
    });
    let (given_up, stopped) = stopped_during(&world, |world| {
        let entry = world.entry("web");
        let taken = world.node().make_snapshot(&entry, Some("ready"), OnDevices::Detach);
        taken.map(drop)
    });
    stopped.unwrap();
    let said = given_up.to_string();
    assert!(said.contains("snapshot `ready` is taken, but"), "{said}");
    assert!(said.contains("stopped") && said.contains(NVME), "{said}");
    rests_as(&world, Some(State::Exited));
}

#[test]
fn a_daemon_that_attaches_what_the_one_before_has_detached_gives_it_up_for_who_stops_the_sandbox() {
    let mut world = World::new();
    bind(&world, NVME).unwrap();
    world.run(config(DeviceStart::Async)).unwrap();
    world.is_at_rest().unwrap();
    // It dies when its guest has let go of the device.
    world.faults.die_at(points::DEVICE_DETACHED);
    let attempt = world.attempt(|world| {
        let taken = world
            .node()
            .make_snapshot(&world.entry("web"), Some("ready"), OnDevices::Detach);
        taken.map(drop)
    });
    assert!(matches!(attempt, Attempt::Crashed), "{attempt:?}");
    never_maps(&world);
    world.restart();
    soon(|| maps(&world)).unwrap();
    let begun = Instant::now();
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    rests_as(&world, Some(State::Exited));
}
