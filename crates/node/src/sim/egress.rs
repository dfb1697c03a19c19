//! Sandboxes that may not send everywhere. That the network says what records say is looked at after every case ([`super::World::is_at_rest`]).

use std::sync::Arc;
use std::time::Duration;

use base::{Egress, points};
use node_api::{CloneConfig, NetworkMode, SandboxConfig, State};

use super::cases::{Case, UNNOTICED, nothing, running};
use super::{Attempt, PATIENCE, World};
use crate::Error;
use crate::operations::detach_for::OnDevices;

fn egress(allow: &[&str], deny: &[&str]) -> Egress {
    let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    Egress::new(ranges(allow), ranges(deny)).unwrap()
}

/// What `web` has before it is updated, and what it is updated to.
fn before() -> Egress {
    egress(&["192.0.2.1"], &["0.0.0.0/0"])
}

fn after() -> Egress {
    egress(&[], &["10.0.0.0/8", "2001:db8::/32"])
}

fn restricted(name: &str, egress: Egress) -> SandboxConfig {
    SandboxConfig {
        egress,
        ..World::config(name)
    }
}

fn running_restricted(world: &mut World) {
    world.run(restricted("web", before())).unwrap();
}

fn suspended_restricted(world: &mut World) {
    running_restricted(world);
    world.node().suspend(&world.entry("web")).unwrap();
}

fn update(world: &World, egress: &Egress) -> Result<(), Error> {
    world.node().update_network(&world.entry("web"), egress).map(drop)
}

fn of(world: &World, name: &str) -> Egress {
    world.entry(name).stored().sandbox.config.egress
}

/// Where the network lets it send, if it has a machine.
fn sends(world: &World, name: &str) -> Option<Egress> {
    let slot = world.entry(name).stored().slot;
    world.network.egresses().remove(&slot)
}

/// Where it might send before its machine had any place in the network to send from.
fn sent_first(world: &World, name: &str) -> Option<Egress> {
    world.network.first_egress(world.entry(name).stored().slot)
}

/// What somebody was told of is so, and what failed changed nothing.
fn is_one_of_both(world: &World, attempt: &Attempt) -> Result<(), String> {
    let now = of(world, "web");
    let right = match attempt {
        Attempt::Done => now == after(),
        Attempt::Failed(_) => now == before(),
        Attempt::Crashed => now == before() || now == after(),
    };
    right.then_some(()).ok_or_else(|| format!("web sends by {now:?}"))
}

pub(super) const CASES: &[Case] = &[
    Case {
        name: "network update",
        prepare: running_restricted,
        act: |world| update(world, &after()),
        also: is_one_of_both,
        ..UNNOTICED
    },
    Case {
        name: "network update of one that sent everywhere",
        prepare: running,
        act: |world| update(world, &after()),
        ..UNNOTICED
    },
    Case {
        name: "network update that lifts all",
        prepare: running_restricted,
        act: |world| update(world, &Egress::default()),
        ..UNNOTICED
    },
    Case {
        name: "network update of one that is suspended",
        prepare: suspended_restricted,
        act: |world| update(world, &after()),
        undone: &[Some(State::Suspended)],
        done: Some(State::Suspended),
        also: is_one_of_both,
        ..UNNOTICED
    },
    Case {
        name: "run, which is restricted",
        prepare: nothing,
        act: |world| world.run(restricted("web", before())).map(drop),
        undone: &[None],
        lasts: false,
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "resume of one that is restricted",
        prepare: suspended_restricted,
        act: |world| world.node().resume(&world.entry("web")),
        undone: &[Some(State::Suspended), Some(State::Running)],
        goes_on: false,
        ..UNNOTICED
    },
    Case {
        name: "stop of one that is restricted",
        prepare: running_restricted,
        act: |world| world.node().stop(&world.entry("web"), Duration::ZERO),
        undone: &[Some(State::Running), Some(State::Exited)],
        done: Some(State::Exited),
        goes_on: false,
        ..UNNOTICED
    },
];

#[test]
fn a_policy_outlasts_daemons_tables_and_machines() {
    let mut world = World::new();
    running_restricted(&mut world);
    world
        .run(SandboxConfig {
            ports: vec!["81:80".into()],
            ..World::config("free")
        })
        .unwrap();
    let is = |world: &World, wanted: &Egress| {
        world.is_at_rest().unwrap();
        assert_eq!(
            (sends(world, "web").as_ref(), of(world, "web")),
            (Some(wanted), wanted.clone())
        );
        assert_eq!(sends(world, "free"), None);
    };
    is(&world, &before());
    assert_eq!(sent_first(&world, "web"), Some(before()));
    world.restart();
    is(&world, &before());
    update(&world, &after()).unwrap();
    is(&world, &after());
    world.restart();
    is(&world, &after());
    // What somebody was killed with who was about to end connections is asked for again.
    world.network.connect();
    update(&world, &after()).unwrap();
    is(&world, &after());
    world.network.connect();
    world.restart();
    is(&world, &after());
    // What is asked for while another program's rules have taken the tables away.
    world.network.damage();
    update(&world, &before()).unwrap();
    is(&world, &before());
    world.network.damage();
    world.node().network.restore().unwrap();
    is(&world, &before());
    let entry = world.entry("web");
    world.node().stop(&entry, Duration::ZERO).unwrap();
    assert_eq!(sends(&world, "web"), None, "its slot is nobody's");
    update(&world, &after()).unwrap();
    assert_eq!(sends(&world, "web"), None, "there is nobody who could send");
    world.node().start(&entry).unwrap();
    is(&world, &after());
    assert_eq!(sent_first(&world, "web"), Some(after()));
    world.node().suspend(&entry).unwrap();
    update(&world, &before()).unwrap();
    world.restart();
    world.node().resume(&world.entry("web")).unwrap();
    is(&world, &before());
    assert_eq!(sent_first(&world, "web"), Some(before()));
    world.ends_empty().unwrap();
}

#[test]
fn a_clone_sends_where_its_snapshot_could_or_where_it_is_told_and_who_is_put_back_where_it_can_now() {
    let world = World::new();
    world.run(restricted("web", before())).unwrap();
    let entry = world.entry("web");
    let node = world.node();
    node.make_snapshot(&entry, Some("ready"), OnDevices::Refuse).unwrap();
    // What comes later is no matter of the snapshot's.
    update(&world, &Egress::default()).unwrap();
    let clone = |name: &str, egress: Option<Egress>| {
        let asked = CloneConfig {
            snapshot: "ready".into(),
            name: Some(name.into()),
            egress,
            ..CloneConfig::default()
        };
        node.clone_of(asked).unwrap();
        assert_eq!(sent_first(&world, name), Some(sends(&world, name).unwrap_or_default()));
        sends(&world, name)
    };
    assert_eq!(clone("same", None), Some(before()));
    assert_eq!(clone("other", Some(after())), Some(after()));
    assert_eq!(clone("free", Some(Egress::default())), None);
    update(&world, &after()).unwrap();
    node.rollback(&entry, "ready", OnDevices::Refuse).unwrap();
    assert_eq!(sends(&world, "web"), Some(after()));
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn who_has_no_network_or_is_gone_is_not_updated() {
    let world = World::new();
    let config = SandboxConfig {
        network: NetworkMode::None,
        ports: Vec::new(),
        ..World::config("web")
    };
    let refused = world
        .run(SandboxConfig {
            egress: after(),
            ..config.clone()
        })
        .unwrap_err();
    assert!(refused.to_string().contains("reaches nothing"), "{refused}");
    world.run(config).unwrap();
    let error = update(&world, &after()).unwrap_err();
    assert_eq!(error.for_api().kind, node_api::ErrorKind::WrongState);
    assert!(error.to_string().contains("it has no network"), "{error}");
    let entry = world.entry("web");
    world.node().remove(&entry, true).unwrap();
    let error = world.node().update_network(&entry, &after()).unwrap_err();
    assert_eq!(error.for_api().kind, node_api::ErrorKind::WrongState, "{error}");
    world.ends_empty().unwrap();
}

#[test]
fn a_machine_that_ends_during_an_update_leaves_nothing() {
    let world = World::new();
    world.run(restricted("web", before())).unwrap();
    let (entry, machines) = (world.entry("web"), Arc::clone(&world.machines));
    world.faults.at(points::NETWORK_RECORDED, move || {
        machines.alive().iter().for_each(|machine| machine.die());
        assert!(entry.wait(Some(PATIENCE), |inner| inner.has_exited()));
    });
    update(&world, &after()).unwrap();
    world.is_at_rest().unwrap();
    assert_eq!((sends(&world, "web"), of(&world, "web")), (None, after()));
    world.ends_empty().unwrap();
}

/// Its record is the database's alone, and its slot not told of before it is taken over.
#[test]
fn one_without_its_directory_is_restricted_by_the_next_daemon_too() {
    let mut world = World::new();
    running_restricted(&mut world);
    let ran = world.running("web");
    let directory = world.node().sandbox_paths(&world.entry("web")).directory;
    std::fs::remove_dir_all(directory).unwrap();
    world.restart();
    assert!(ran.is_some() && world.has(ran), "it was to run on");
    assert_eq!((sends(&world, "web"), of(&world, "web")), (Some(before()), before()));
    world.ends_empty().unwrap();
}

#[test]
fn nothing_of_somebody_who_was_in_a_slot_before_is_left_for_the_next_one() {
    let mut world = World::new();
    world.run(World::config("first")).unwrap();
    let next = world.entry("first").stored().slot + 1;
    world.network.occupy(next);
    world.restart();
    assert_eq!(world.network.egresses(), ::network::Egresses::default());
    world.network.occupy(next);
    // As when it has ended by itself.
    world.network.leave(next);
    world
        .run(SandboxConfig {
            ports: Vec::new(),
            ..World::config("web")
        })
        .unwrap();
    assert_eq!(world.entry("web").stored().slot, next);
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}
