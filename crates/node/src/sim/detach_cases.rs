//! Operations for which a sandbox's devices are detached, and attached again: whatever is refused, whichever machine dies, wherever the daemon
//! dies, a device is the sandbox's again, or nobody's where it could not be given back.

use std::time::Duration;

use base::points;
use node_api::{BindTerms, Class, DeviceState, EventKind, SandboxConfig, State};

use super::cases::{Case, UNNOTICED, state as sandbox_state};
use super::devices::{NVME, address, bind, state};
use super::faults::{Fault, INJECTED};
use super::{Attempt, World, saved_cases};
use crate::Error;
use crate::error::words::with_causes;
use crate::operations::detach_for::OnDevices;

const NIC: &str = "0000:02:00.0";

/// Both are bound, and `web` has them.
fn with_devices(world: &mut World) {
    bind(world, NVME).unwrap();
    world.node().devices.bind(address(NIC), BindTerms::default()).unwrap();
    world.run(World::config("web")).unwrap();
    attach(world).unwrap();
}

fn attach(world: &World) -> Result<(), Error> {
    let both = [address(NVME), address(NIC)];
    world.node().attach_devices(&world.entry("web"), &both).map(drop)
}

/// A snapshot of before it had them, and one that was taken with them.
fn with_snapshot(world: &mut World) {
    with_devices(world);
    snapshot(world, "ready").unwrap();
    world.write_to_disk("web", super::cases::OWN);
}

/// It is started with one of them, and has exited.
fn exited(world: &mut World) {
    bind(world, NVME).unwrap();
    let devices = vec![address(NVME)];
    let config = World::config("web");
    world.run(SandboxConfig { devices, ..config }).unwrap();
    snapshot(world, "ready").unwrap();
    world.write_to_disk("web", super::cases::OWN);
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
}

fn snapshot(world: &World, name: &str) -> Result<(), Error> {
    let entry = world.entry("web");
    world
        .node()
        .make_snapshot(&entry, Some(name), OnDevices::Detach)
        .map(drop)
}

fn rollback(world: &World) -> Result<(), Error> {
    let entry = world.entry("web");
    world.node().rollback(&entry, "ready", OnDevices::Detach).map(drop)
}

fn move_to(world: &World, class: Class) -> Result<(), Error> {
    let entry = world.entry("web");
    world.node().move_to(&entry, class, OnDevices::Detach).map(drop)
}

/// Whose the devices may be. Those of a machine that runs are its own again, unless somebody was told that they are not.
fn come_back(world: &World, attempt: &Attempt, devices: &[&str]) -> Result<(), String> {
    let runs = sandbox_state(world, "web") == Some(State::Running);
    for device in devices {
        let found = state(world, device);
        let may_be = match (found, attempt) {
            (DeviceState::Claimed, _) => runs,
            (DeviceState::Ready, Attempt::Failed(error)) => !runs || with_causes(error).contains(device),
            (DeviceState::Ready, _) => !runs,
            // A reset was refused.
            (DeviceState::Quarantined, _) => true,
            _ => false,
        };
        if !may_be {
            return Err(format!("the device {device} is {found}, and web runs: {runs}"));
        }
    }
    Ok(())
}

fn both_come_back(world: &World, attempt: &Attempt) -> Result<(), String> {
    come_back(world, attempt, &[NVME, NIC])
}

fn it_comes_back(world: &World, attempt: &Attempt) -> Result<(), String> {
    come_back(world, attempt, &[NVME])
}

/// One that was not put back has its own disk, if it has exited.
fn disk_is_its_own(world: &World, attempt: &Attempt) -> Result<(), String> {
    let not_done = |error: &Error| !with_causes(error).contains("the rollback to `ready` is done");
    match attempt {
        Attempt::Failed(error)
            if not_done(error)
                && sandbox_state(world, "web") == Some(State::Exited)
                && !world.disk_has("web", super::cases::OWN) =>
        {
            Err("its own disk is lost".to_owned())
        }
        _ => Ok(()),
    }
}

pub(super) const CASES: &[Case] = &[
    Case {
        name: "devices detached for a snapshot",
        prepare: with_devices,
        act: |world| snapshot(world, "ready"),
        also: |world, attempt| {
            if saved_cases::find(world, "ready").is_some() {
                saved_cases::is_whole(world, "ready")?;
            } else if matches!(attempt, Attempt::Done) {
                return Err("it was taken, and is not there".to_owned());
            }
            both_come_back(world, attempt)
        },
        ..UNNOTICED
    },
    Case {
        name: "devices detached for a rollback in place",
        prepare: with_snapshot,
        act: rollback,
        undone: &[Some(State::Running), Some(State::Exited)],
        goes_on: false,
        also: |world, attempt| disk_is_its_own(world, attempt).and_then(|()| both_come_back(world, attempt)),
        ..UNNOTICED
    },
    Case {
        name: "devices detached for a rollback by another VMM",
        prepare: |world| {
            with_snapshot(world);
            move_to(world, Class::Bare).unwrap();
        },
        act: rollback,
        undone: &[Some(State::Running), Some(State::Exited)],
        goes_on: false,
        also: |world, attempt| disk_is_its_own(world, attempt).and_then(|()| both_come_back(world, attempt)),
        ..UNNOTICED
    },
    Case {
        name: "devices attached behind the rollback of one that has exited",
        prepare: exited,
        act: rollback,
        undone: &[Some(State::Exited), Some(State::Running)],
        goes_on: false,
        also: |world, attempt| disk_is_its_own(world, attempt).and_then(|()| it_comes_back(world, attempt)),
        ..UNNOTICED
    },
    Case {
        name: "devices detached for a move",
        prepare: with_devices,
        act: |world| move_to(world, Class::Bare),
        also: both_come_back,
        ..UNNOTICED
    },
];

#[test]
fn without_being_asked_to_nobody_detaches_anything_and_the_way_is_told() {
    let mut world = World::new();
    with_snapshot(&mut world);
    let entry = world.entry("web");
    let taken_before = entry.lock().devices_taken;
    let node = world.node();
    let refused = [
        node.make_snapshot(&entry, Some("other"), OnDevices::Refuse).map(drop),
        node.rollback(&entry, "ready", OnDevices::Refuse).map(drop),
        node.move_to(&entry, Class::Bare, OnDevices::Refuse).map(drop),
    ];
    for refused in refused {
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("--detach-devices") && said.contains(NVME), "{said}");
    }
    assert_eq!(state(&world, NVME), DeviceState::Claimed);
    assert!(saved_cases::find(&world, "other").is_none());
    // What is wrong besides is found out before anything is detached.
    let taken = snapshot(&world, "ready").unwrap_err().to_string();
    assert!(taken.contains("ready"), "{taken}");
    let same = move_to(&world, Class::Standard).unwrap_err().to_string();
    assert!(same.contains("it is of that class"), "{same}");
    assert_eq!(entry.lock().devices_taken, taken_before);
    node.pause(&entry).unwrap();
    let paused = rollback(&world).unwrap_err().to_string();
    assert!(paused.contains("basalt unpause"), "{paused}");
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn where_there_is_no_space_nothing_is_detached() {
    let mut world = World::small();
    with_snapshot(&mut world);
    let entry = world.entry("web");
    let taken_before = entry.lock().devices_taken;
    crate::testing::fill(&world.directory.path().join("filling"));
    let refused = [
        snapshot(&world, "other"),
        rollback(&world),
        move_to(&world, Class::Bare),
    ];
    for refused in refused {
        let said = with_causes(&refused.unwrap_err());
        assert!(said.contains("space"), "{said}");
        assert_eq!(entry.lock().devices_taken, taken_before, "{said}");
    }
    assert_eq!(entry.stored().detached, []);
    world.empty().unwrap();
    world.is_at_rest().unwrap();
    // And with space each of them is done.
    snapshot(&world, "other").unwrap();
    rollback(&world).unwrap();
    move_to(&world, Class::Bare).unwrap();
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn one_that_is_started_with_devices_and_has_exited_is_put_back_with_them() {
    let mut world = World::new();
    exited(&mut world);
    let entry = world.entry("web");
    let refused = world.node().rollback(&entry, "ready", OnDevices::Refuse).unwrap_err();
    assert!(refused.to_string().contains("--detach-devices"), "{refused}");
    rollback(&world).unwrap();
    assert_eq!(state(&world, NVME), DeviceState::Claimed);
    world.ends_empty().unwrap();
}

#[test]
fn meanwhile_a_device_is_nobody_elses() {
    for point in [points::SNAPSHOT_SAVED, points::DEVICE_DETACHED] {
        let mut world = World::new();
        with_devices(&mut world);
        let node = std::sync::Arc::downgrade(world.node());
        world.faults.at(point, move || {
            let claimed = node.upgrade().unwrap().devices.claim("bbbbbbbbbbbb", &[address(NVME)]);
            assert!(claimed.unwrap_err().to_string().contains("has the device"));
        });
        snapshot(&world, "ready").unwrap();
        world.is_at_rest().unwrap();
        world.ends_empty().unwrap();
    }
}

/// The second of the calls that a snapshot makes behind it: attaching is refused once, and the snapshot stays.
#[test]
fn what_does_not_come_back_is_told_by_name_and_what_was_asked_is_done() {
    let mut told = 0;
    for number in 0..super::cases::MOST {
        let mut world = World::new();
        with_devices(&mut world);
        let events = world.node().events.listen();
        world.faults.arm(&[(number, Fault::Refused)]);
        let made = snapshot(&world, "ready");
        if world.faults.disarm().is_empty() {
            break;
        }
        let Err(Error::Devices(error)) = made else { continue };
        let said = error.to_string();
        if !said.contains("snapshot `ready` is taken, but sandbox web goes on without") {
            continue;
        }
        told += 1;
        let (lost, kept) = match said.contains(&format!("basalt device attach web {NVME}`")) {
            true => (NVME, NIC),
            false => (NIC, NVME),
        };
        assert!(said.contains(&format!("basalt device attach web {lost}`")), "{said}");
        assert!(said.contains(INJECTED), "{said}");
        assert_eq!(state(&world, lost), DeviceState::Ready, "{said}");
        assert_eq!(state(&world, kept), DeviceState::Claimed, "{said}");
        let failed = events
            .try_iter()
            .find(|event| event.kind == EventKind::DevicesFailed)
            .unwrap();
        assert!(failed.why.unwrap().contains(lost));
        saved_cases::is_whole(&world, "ready").unwrap();
        world
            .node()
            .attach_devices(&world.entry("web"), &[address(lost)])
            .unwrap();
        world.is_at_rest().unwrap();
        world.ends_empty().unwrap();
    }
    assert!(told >= 4, "{told} places");
}

/// One that stays held, or moves still: whoever brings it to rest attaches them, and until then its asker knows of them.
#[test]
fn what_is_still_to_come_back_is_told_by_name_where_the_sandbox_has_not_come_to_rest() {
    type Act = fn(&World) -> Result<(), Error>;
    // A move is taken back when it fails once.
    let acts: [(Act, usize); 2] = [
        (|world| snapshot(world, "ready"), 1),
        (|world| move_to(world, Class::Bare), 2),
    ];
    for (act, times) in acts {
        let mut told = 0;
        for number in 0..super::cases::MOST {
            let mut world = World::new();
            with_devices(&mut world);
            let faults = [(number, Fault::Refused), (0, Fault::Refused)];
            world.faults.arm(&faults[..times]);
            let attempt = act(&world);
            let stored = world.entry("web").stored();
            if world.faults.disarm().is_empty() {
                break;
            }
            let left = stored.detached.clone();
            if left.is_empty() || !stored.is_held() {
                continue;
            }
            told += 1;
            let said = attempt.unwrap_err().to_string();
            let devices: Vec<_> = left.iter().map(ToString::to_string).collect();
            let devices = devices.join(" ");
            assert!(said.contains(INJECTED), "{said}");
            assert!(said.contains(&format!("still detached: {devices}")), "{said}");
            assert!(said.contains(&format!("basalt device attach web {devices}`")), "{said}");
            // What is told to be tried does it.
            let tried = world.node().attach_devices(&world.entry("web"), &left).unwrap();
            assert_eq!(tried.iter().map(|device| device.host).collect::<Vec<_>>(), left);
            world.is_at_rest().unwrap();
            for device in [NVME, NIC] {
                assert_eq!(state(&world, device), DeviceState::Claimed);
            }
            world.ends_empty().unwrap();
        }
        assert!(told >= 1, "{told} places");
    }
}

/// Whoever follows a late start sees that its device was taken, and does not take it away again.
#[test]
fn a_device_that_is_on_its_way_is_detached_and_comes_behind_the_operation() {
    let world = World::new();
    bind(&world, NVME).unwrap();
    world.machines.to_map.store(50, std::sync::atomic::Ordering::SeqCst);
    world
        .run(SandboxConfig {
            devices: vec![address(NVME)],
            device_start: Some(node_api::DeviceStart::Late),
            ..World::config("web")
        })
        .unwrap();
    snapshot(&world, "ready").unwrap();
    world.is_at_rest().unwrap();
    assert_eq!(state(&world, NVME), DeviceState::Claimed);
    assert_eq!(world.entry("web").lock().not_come, None);
    world.ends_empty().unwrap();
}
