//! Sandboxes that have no command of their own.

use std::time::Duration;

use node_api::{CloneConfig, Ended, OnTimeout, ProcessConfig, SandboxConfig, State, TimeLimit};

use super::World;
use super::cases::state;
use crate::operations::detach_for::OnDevices;

fn idle(name: &str) -> SandboxConfig {
    SandboxConfig {
        process: ProcessConfig {
            env: vec!["A=1".to_owned(), "B=1".to_owned()],
            idle: true,
            ..ProcessConfig::default()
        },
        ..World::config(name)
    }
}

#[test]
fn one_without_a_command_runs_until_it_is_stopped() {
    let mut world = World::new();
    world.run(idle("web")).unwrap();
    let machines = world.machines.alive();
    assert!(machines.iter().all(|machine| !machine.lock().has_command));
    let error = world.node().kill(&world.entry("web"), libc::SIGTERM).unwrap_err();
    assert!(error.to_string().contains("has no command"), "{error}");
    world.node().suspend(&world.entry("web")).unwrap();
    world.node().resume(&world.entry("web")).unwrap();
    world.restart();
    assert_eq!(state(&world, "web"), Some(State::Running));
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
    assert_eq!(world.entry("web").stored().sandbox.ended, Some(Ended::Stopped));
    world.node().start(&world.entry("web")).unwrap();
    assert_eq!(state(&world, "web"), Some(State::Running));
    world.is_at_rest().unwrap();
    world.node().remove(&world.entry("web"), true).unwrap();
    world.ends_empty().unwrap();
}

/// It is whoever asks for a command that says what it is, and with which variables beside the sandbox's.
#[test]
fn a_clone_has_the_variables_labels_and_time_that_it_is_asked_for_with() {
    let world = World::new();
    let labels = [("k".to_owned(), "v".to_owned())].into();
    world.run(SandboxConfig { labels, ..idle("web") }).unwrap();
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("ready"), OnDevices::Refuse)
        .unwrap();
    let time_limit = Some(TimeLimit {
        ms: 3_600_000,
        then: OnTimeout::Suspend,
    });
    let asked = CloneConfig {
        snapshot: "ready".to_owned(),
        name: Some("twin".to_owned()),
        labels: [("l".to_owned(), "w".to_owned())].into(),
        only_labels: true,
        env: vec!["B=2".to_owned()],
        time_limit,
        ..CloneConfig::default()
    };
    world.node().clone_of(asked).unwrap();
    let twin = world.entry("twin").stored();
    let config = &twin.sandbox.config;
    assert_eq!(config.labels.keys().collect::<Vec<_>>(), ["l"]);
    assert_eq!(config.time_limit, time_limit);
    assert!(twin.sandbox.ends_ns.is_some());
    let env: Vec<String> = twin.command.env.iter().map(ToString::to_string).collect();
    assert!(
        env.contains(&"A=1".to_owned()) && env.contains(&"B=2".to_owned()) && !env.contains(&"B=1".to_owned()),
        "{env:?}"
    );
}

/// It is for what runs in it that the grace is, and its disks are written behind that.
#[test]
fn one_without_a_command_has_its_grace_when_it_is_stopped() {
    let mut world = World::new();
    world.powers_off_within(Duration::from_millis(400));
    world.run(idle("web")).unwrap();
    let machine = world.machines.alive().into_iter().next().unwrap();
    world
        .node()
        .stop(&world.entry("web"), Duration::from_millis(800))
        .unwrap();
    assert!(
        machine.lock().history.contains(&"powered off"),
        "it was killed in its grace"
    );
    assert_eq!(world.entry("web").stored().sandbox.ended, Some(Ended::Stopped));
}

/// A program that asks as soon as it goes on gets no answer of before.
#[test]
fn a_clones_programs_are_told_its_environment_before_they_go_on() {
    let world = World::new();
    world.run(idle("web")).unwrap();
    let told = || -> Vec<_> {
        let machines = world.machines.alive();
        machines
            .iter()
            .map(|machine| machine.lock().own.environment.clone())
            .collect()
    };
    assert_eq!(told(), [None], "one that boots has nobody who could ask");
    let node = world.node();
    node.make_snapshot(&world.entry("web"), Some("kept"), OnDevices::asked(false))
        .unwrap();
    node.remove(&world.entry("web"), true).unwrap();
    let cloned = CloneConfig {
        snapshot: "kept".to_owned(),
        env: vec!["OF=the clone".to_owned()],
        ..CloneConfig::default()
    };
    node.clone_of(cloned).unwrap();
    let Some(Some(environment)) = told().pop() else {
        panic!("it was told nothing")
    };
    assert!(environment.0.contains(&"OF=the clone".into()), "{:?}", environment.0);
}
