//! What sandboxes have of the host: volumes, CPUs of their own, its clock, its network.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use base::points;
use node_api::{Class, CloneConfig, SandboxConfig, State};
use vmm_api::VmState;

use super::cases::{Case, OWN as ON_DISK, UNNOTICED, nothing, running, state};
use super::faults::INJECTED;
use super::processes::STATE;
use super::{Attempt, World};
use crate::Error;
use crate::operations::detach_for::OnDevices;
use crate::resources::held::{self, Held as _};

/// Volumes: of a sandbox, of nobody.
const OWN: &str = "own";
const FREE: &str = "free";

/// A file that somebody has put into a volume.
const FILE: &str = "kept";

fn with_port(name: &str, port: &str) -> SandboxConfig {
    SandboxConfig {
        ports: vec![port.to_owned()],
        ..World::config(name)
    }
}

fn run_with_volume(world: &World) -> Result<(), Error> {
    let config = SandboxConfig {
        volumes: vec!["own:/own".parse().unwrap()],
        ..World::config("web")
    };
    world.run(config).map(drop)
}

const READY: &str = "ready";

fn accelerated(world: &mut World) {
    run_with_accelerator(world).unwrap();
}

fn snapshot(world: &World) -> Result<(), Error> {
    let node = world.node();
    node.make_snapshot(&world.entry("web"), Some(READY), OnDevices::Refuse)
        .map(drop)
}

fn accelerated_with_snapshot(world: &mut World) {
    accelerated(world);
    snapshot(world).unwrap();
    world.write_to_disk("web", ON_DISK);
}

/// Its id.
fn clone(world: &World) -> Result<String, Error> {
    let asked = CloneConfig {
        snapshot: READY.to_owned(),
        name: Some("twin".to_owned()),
        ..CloneConfig::default()
    };
    Ok(world.node().clone_of(asked)?.sandbox.id)
}

fn run_with_accelerator(world: &World) -> Result<(), Error> {
    let config = SandboxConfig {
        accelerator: Some("null:window=32m".parse().unwrap()),
        ..World::config("web")
    };
    world.run(config).map(drop)
}

fn make_volume(world: &World, name: &str) -> Result<(), Error> {
    let node = world.node();
    let volume = node.volumes.make(name, &node.sandboxes)?;
    assert_eq!(fs::read_dir(volume.directory).unwrap().count(), 0);
    Ok(())
}

/// With a file in each.
fn with_volumes(world: &mut World) {
    run_with_volume(world).unwrap();
    make_volume(world, FREE).unwrap();
    for name in [OWN, FREE] {
        let files = world.node().volumes.make_files(name).unwrap();
        fs::write(files.join(FILE), name).unwrap();
    }
}

/// Who has a volume, if it is there; with nothing missing of it.
fn users(world: &World, name: &str) -> Result<Option<Vec<String>>, String> {
    let node = world.node();
    match node.volumes.find(name, &node.sandboxes) {
        Ok(volume) if volume.directory.is_dir() => Ok(Some(volume.used_by)),
        Ok(volume) => Err(format!("{} is not there", volume.directory.display())),
        Err(Error::NoVolume(_)) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// The volume of `web` is there as long as that is, with what is in it.
fn own_volume_stays(world: &World, attempt: &Attempt) -> Result<(), String> {
    let users = users(world, OWN)?;
    let node = world.node();
    let removed = || node.volumes.remove(OWN, &node.sandboxes);
    match (state(world, "web"), users) {
        (Some(_), Some(users)) if users == ["web"] => match removed() {
            Err(Error::VolumeInUse { .. }) => Ok(()),
            other => Err(format!("a volume that is in use is removed: {other:?}")),
        },
        (None, None) if !matches!(attempt, Attempt::Done) => Ok(()),
        (None, Some(users)) if users.is_empty() => Ok(()),
        (state, users) => Err(format!("web is {state:?}, and its volume has {users:?}")),
    }
}

fn has_file(world: &World, name: &str) -> Result<(), String> {
    let file = world.node().volumes.make_files(name).unwrap().join(FILE);
    let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    (text == name).then_some(()).ok_or(format!("{text:?} is in {name}"))
}

/// The free one is gone, or all of it is there.
fn free_volume_goes(world: &World, attempt: &Attempt) -> Result<(), String> {
    own_volume_stays(world, attempt)?;
    if state(world, "web").is_some() {
        has_file(world, OWN)?;
    }
    match (attempt, users(world, FREE)?) {
        (Attempt::Done, Some(_)) => Err("it was removed, and is there".to_owned()),
        (_, Some(_)) => has_file(world, FREE),
        (_, None) => Ok(()),
    }
}

fn free_volume_comes(world: &World, attempt: &Attempt) -> Result<(), String> {
    match (attempt, users(world, FREE)?) {
        (Attempt::Done, None) => Err("it was made, and is not there".to_owned()),
        (Attempt::Failed(_), Some(_)) => Err("it was not made, and is there".to_owned()),
        _ => make_volume(world, FREE).map_err(|error| error.to_string()),
    }
}

fn dedicated() -> SandboxConfig {
    let mut config = World::config("web");
    config.resources.class = Class::Dedicated;
    config
}

fn running_dedicated(world: &mut World) {
    world.run(dedicated()).unwrap();
}

fn move_to(world: &World, class: Class) -> Result<(), Error> {
    world
        .node()
        .move_to(&world.entry("web"), class, OnDevices::Refuse)
        .map(drop)
}

/// It is of this class, if it is there and was moved; else of the one that it was of.
fn class(world: &World, attempt: &Attempt, [was, wanted]: [Class; 2]) -> Result<(), String> {
    let Ok(entry) = world.node().find("web") else {
        return Ok(());
    };
    let class = entry.stored().sandbox.config.resources.class;
    let has_vm = entry.state().has_vm();
    let is_right = match attempt {
        Attempt::Done => class == wanted,
        // It was to run as that, and nothing goes back then to what was saved.
        Attempt::Failed(Error::NotTakenBack { .. }) | Attempt::Crashed => [was, wanted].contains(&class),
        Attempt::Failed(_) => class == was || !has_vm,
    };
    is_right
        .then_some(())
        .ok_or(format!("it is {class:?}, was {was:?}, and was to be {wanted:?}"))
}

/// Beside `web` one that runs, and one that stands still.
fn with_paused(world: &mut World) {
    running(world);
    for (name, port) in [("another", "81:80"), ("still", "82:80")] {
        world.run(with_port(name, port)).unwrap();
    }
    world.node().pause(&world.entry("still")).unwrap();
}

/// Sets the host's clock, so that no guest's is right, and has guests told; none of those that run may be left out.
fn set_clock(world: &World) -> Result<(), Error> {
    let machines = world.machines.alive();
    machines.iter().for_each(|machine| machine.lock().clock_ns = 0);
    world.node().tell_time();
    let is_wrong = |wanted| {
        let alive = world.machines.alive().into_iter();
        alive.filter(move |machine| {
            let shown = machine.lock();
            shown.vm == Some(wanted) && shown.clock_ns == 0
        })
    };
    assert_eq!(
        is_wrong(VmState::Paused).count(),
        1,
        "one that stands still hears nothing"
    );
    match is_wrong(VmState::Running).count() {
        0 => Ok(()),
        // The node tells it to its log alone.
        more => Err(Error::Invalid(format!("{more} guests were not told, by {INJECTED}"))),
    }
}

/// One that stood still is told when it goes on.
fn told_when_it_goes_on(world: &World, _: &Attempt) -> Result<(), String> {
    let still = world.entry("still");
    world.node().resume(&still).map_err(|error| error.to_string())?;
    super::soon(|| {
        let alive = world.machines.alive();
        let told = alive
            .iter()
            .any(|machine| machine.sandbox == still.id && machine.lock().clock_ns > 0);
        told.then_some(())
            .ok_or("the clock of one that goes on is wrong".to_owned())
    })
}

/// Beside `web` one that stands still and one that has exited, when all tables are deleted.
fn without_tables(world: &mut World) {
    with_paused(world);
    let exited = world.entry("another");
    world.node().stop(&exited, Duration::ZERO).unwrap();
    world.network.damage();
}

fn another_without_tables(world: &mut World) {
    world.run(with_port("another", "81:80")).unwrap();
    world.network.damage();
}

/// What is published now is what sandboxes that run publish; nobody comes later who would put it right.
fn published(world: &World) -> Result<(), Error> {
    let wrong = world.look_at_network().err();
    wrong.map_or(Ok(()), |wrong| panic!("{wrong}"))
}

/// Has all tables deleted, and put back, when the node comes to this point.
fn while_tables_go(world: &World, point: &'static str, act: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let (node, network) = (std::sync::Arc::downgrade(world.node()), world.network.clone());
    world.faults.at(point, move || {
        network.damage();
        let node = node.upgrade().unwrap();
        // As its thread does, which comes again.
        while let Err(error) = node.network.restore() {
            log::warn!("the tables are not there: {error}");
        }
    });
    act()
}

pub(super) const CASES: &[Case] = &[
    Case {
        name: "run with a volume",
        prepare: nothing,
        act: run_with_volume,
        undone: &[None],
        lasts: false,
        goes_on: false,
        also: own_volume_stays,
        ..UNNOTICED
    },
    Case {
        name: "run with an accelerator",
        prepare: nothing,
        act: run_with_accelerator,
        undone: &[None],
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "snapshot of one with an accelerator",
        prepare: accelerated,
        act: snapshot,
        ..UNNOTICED
    },
    Case {
        name: "clone of one with an accelerator",
        prepare: accelerated_with_snapshot,
        act: |world| clone(world).map(drop),
        ..UNNOTICED
    },
    Case {
        name: "rollback of one with an accelerator",
        prepare: accelerated_with_snapshot,
        act: |world| {
            let node = world.node();
            node.rollback(&world.entry("web"), READY, OnDevices::Refuse).map(drop)
        },
        // Its machine ends before there is another.
        undone: &[Some(State::Running), Some(State::Exited)],
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "making a volume",
        act: |world| make_volume(world, FREE),
        also: free_volume_comes,
        ..UNNOTICED
    },
    Case {
        name: "removal of a volume",
        prepare: with_volumes,
        act: |world| world.node().volumes.remove(FREE, &world.node().sandboxes),
        also: free_volume_goes,
        ..UNNOTICED
    },
    Case {
        name: "prune of volumes",
        prepare: with_volumes,
        act: |world| {
            let pruned = world.node().volumes.prune(&world.node().sandboxes)?;
            assert_eq!(pruned, [FREE]);
            Ok(())
        },
        also: free_volume_goes,
        ..UNNOTICED
    },
    Case {
        name: "run as one with CPUs of its own",
        prepare: nothing,
        act: |world| world.run(dedicated()).map(drop),
        undone: &[None],
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "move to CPUs of its own",
        act: |world| move_to(world, Class::Dedicated),
        also: |world, attempt| class(world, attempt, [Class::Standard, Class::Dedicated]),
        ..UNNOTICED
    },
    Case {
        name: "move from CPUs of its own",
        prepare: running_dedicated,
        act: |world| move_to(world, Class::Standard),
        also: |world, attempt| class(world, attempt, [Class::Dedicated, Class::Standard]),
        ..UNNOTICED
    },
    Case {
        name: "a step of the clock",
        prepare: with_paused,
        act: set_clock,
        also: told_when_it_goes_on,
        ..UNNOTICED
    },
    Case {
        name: "tables that were deleted",
        prepare: without_tables,
        act: |world| {
            world.node().network.restore()?;
            published(world)
        },
        ..UNNOTICED
    },
    Case {
        name: "run, after the tables were deleted",
        prepare: another_without_tables,
        act: |world| {
            running_now(world)?;
            published(world)
        },
        undone: &[None],
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "run, while the tables are deleted",
        prepare: nothing,
        act: |world| {
            while_tables_go(world, points::START_PREPARED, || running_now(world))?;
            published(world)
        },
        undone: &[None],
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
];

fn running_now(world: &World) -> Result<(), Error> {
    world.run(World::config("web")).map(drop)
}

/// The next daemon publishes what sandboxes that run publish, and nothing else.
#[test]
fn tables_that_were_deleted_while_no_daemon_ran_are_made_anew() {
    let mut world = World::new();
    without_tables(&mut world);
    world.restart();
    world.look_at_network().unwrap();
    let published: BTreeMap<_, _> = world.network.taken();
    assert_eq!(published.values().filter(|ports| !ports.is_empty()).count(), 2);
    world.ends_empty().unwrap();
}

/// Nobody has a port twice, and a TAP is there for whoever comes next.
#[test]
fn a_network_that_was_taken_away_is_made_anew() {
    let mut world = World::new();
    running(&mut world);
    world.ends_empty().unwrap();
    world.node().network.take_away().unwrap();
    assert!(!world.node().network.exists());
    running(&mut world);
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn one_with_an_accelerator_is_of_no_template_and_is_saved_with_its_state() {
    let world = World::new();
    let config = SandboxConfig {
        boot: false,
        accelerator: Some("opencl".parse().unwrap()),
        ..World::config("web")
    };
    world.run(config).unwrap();
    let (node, entry) = (world.node(), world.entry("web"));
    assert_eq!(world.machines.accelerators.served(), [entry.id.as_str()]);
    let refused = node
        .move_to(&entry, Class::Bare, OnDevices::Refuse)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("it has an accelerator"), "{refused}");
    assert!(node.list_templates().is_empty());

    snapshot(&world).unwrap();
    let twin = clone(&world).unwrap();
    assert_eq!(world.machines.accelerators.restored(), [(twin.clone(), STATE.to_vec())]);
    node.rollback(&entry, READY, OnDevices::Refuse).unwrap();
    assert_eq!(
        world.machines.accelerators.restored()[1..],
        [(entry.id.clone(), STATE.to_vec())]
    );
    let mut served = world.machines.accelerators.served();
    served.sort();
    let mut both = [entry.id.clone(), twin];
    both.sort();
    assert_eq!(served, both, "the one before the rollback is gone");

    node.stop(&entry, Duration::ZERO).unwrap();
    assert_eq!(world.machines.accelerators.served().len(), 1);
    node.start(&entry).unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn what_is_missing_of_an_accelerator_is_missed_before_anything_is_lost() {
    let mut world = World::new();
    accelerated_with_snapshot(&mut world);
    let (node, entry) = (world.node(), world.entry("web"));
    fs::remove_file(node.snapshots.place(READY).accelerator()).unwrap();
    let refused = node.rollback(&entry, READY, OnDevices::Refuse).unwrap_err().to_string();
    assert!(refused.contains("a file beside it is missing"), "{refused}");
    assert_eq!(entry.state(), State::Running);
    world.ends_empty().unwrap();
}

/// Where there are no cgroups, nothing else ends it.
#[test]
fn the_server_of_an_accelerator_is_ended_by_itself() {
    let world = World::new();
    world
        .run(SandboxConfig {
            accelerator: Some("null".parse().unwrap()),
            ..World::config("web")
        })
        .unwrap();
    let (node, entry) = (world.node(), world.entry("web"));
    held::AcceleratorServer.release(&node.providers(), &entry).unwrap();
    assert!(world.machines.accelerators.served().is_empty());
    assert!(world.running("web").is_some(), "its machine goes on");
    world.node().remove(&entry, true).unwrap();
}
