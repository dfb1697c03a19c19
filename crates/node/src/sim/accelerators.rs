//! Servers of accelerators that end before their machines, which a daemon sees, or the next one finds.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use node_api::{EventKind, NodeEvent, SandboxConfig, State};

use super::World;

const MOST: Duration = Duration::from_secs(90);

fn run(world: &World) {
    let config = SandboxConfig {
        accelerator: Some("opencl".parse().unwrap()),
        ..World::config("web")
    };
    world.run(config).unwrap();
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < MOST, "never {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The event, if it is told in time.
fn told(events: &Receiver<NodeEvent>) -> NodeEvent {
    loop {
        let event = events.recv_timeout(MOST).unwrap();
        if event.kind == EventKind::AcceleratorEnded {
            return event;
        }
    }
}

/// It runs on, its record says so, and another start gives it another one.
fn runs_without_until_it_is_started_again(world: &World) {
    let (node, entry) = (world.node(), world.entry("web"));
    let sandbox = entry.stored().sandbox;
    assert_eq!((sandbox.state, sandbox.accelerator), (State::Running, None));
    let why = sandbox.accelerator_ended.unwrap();
    assert!(
        why.contains("basalt restart web") && why.contains("accelerator.log"),
        "{why}"
    );
    assert!(node.accelerators.report().is_empty(), "its part is others'");
    let listed = node.list_accelerators();
    assert_eq!((listed[0].server, &listed[0].why), (None, &Some(why)));
    world.is_at_rest().unwrap();
    node.restart(&entry, Duration::ZERO).unwrap();
    let sandbox = entry.stored().sandbox;
    assert!(sandbox.accelerator.is_some() && sandbox.accelerator_ended.is_none());
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

#[test]
fn a_server_that_ends_is_told_and_its_machine_runs_on() {
    let world = World::new();
    let events = world.node().events.listen();
    run(&world);
    let entry = world.entry("web");
    let server = entry.stored().sandbox.accelerator.unwrap();
    world.machines.accelerators.kill(&entry.id);
    let event = told(&events);
    assert_eq!(event.id, entry.id);
    assert!(event.why.unwrap().contains(&format!("process {}", server.pid)));
    assert!(
        !std::path::Path::new(&format!("/proc/{}", server.pid)).exists(),
        "it is reaped"
    );
    runs_without_until_it_is_started_again(&world);
}

#[test]
fn one_that_ended_while_no_daemon_ran_is_found_out() {
    let mut world = World::new();
    run(&world);
    let id = world.entry("web").id.clone();
    world.restart_behind(|machines| machines.accelerators.kill(&id));
    until("found out", || {
        world.entry("web").stored().sandbox.accelerator_ended.is_some()
    });
    runs_without_until_it_is_started_again(&world);
}

#[test]
fn one_that_runs_on_is_watched_and_limited_by_the_next_daemon() {
    let mut world = World::new();
    run(&world);
    let id = world.entry("web").id.clone();
    world.restart();
    assert!(world.node().accelerators.report().contains_key(&id));
    world.is_at_rest().unwrap();
    let events = world.node().events.listen();
    world.machines.accelerators.kill(&id);
    told(&events);
    runs_without_until_it_is_started_again(&world);
}

#[test]
fn one_that_ends_with_its_machine_is_not_told() {
    let world = World::new();
    let events = world.node().events.listen();
    run(&world);
    let (node, entry) = (world.node(), world.entry("web"));
    // As if its cgroup was killed: the server first.
    world.machines.accelerators.kill(&entry.id);
    for machine in world.machines.alive() {
        machine.die();
    }
    until("exited", || entry.state() == State::Exited);
    node.start(&entry).unwrap();
    node.stop(&entry, Duration::ZERO).unwrap();
    std::thread::sleep(Duration::from_millis(800));
    let kinds: Vec<_> = events.try_iter().map(|event| event.kind).collect();
    assert!(!kinds.contains(&EventKind::AcceleratorEnded), "{kinds:?}");
    world.ends_empty().unwrap();
}
