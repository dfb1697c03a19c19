//! Sandboxes that may run for some time.

use std::time::{Duration, Instant};

use node_api::{OnTimeout, SandboxConfig, State, TimeLimit};

use super::cases::state;
use super::faults::Fault;
use super::{World, soon};
use crate::clock;

/// Is over when anybody looks.
const SHORT: u64 = 1;
/// Is not over before a test is.
const LONG: u64 = 3_600_000;

fn limit(ms: u64, then: OnTimeout) -> Option<TimeLimit> {
    Some(TimeLimit { ms, then })
}

fn limited(ms: u64, then: OnTimeout) -> SandboxConfig {
    SandboxConfig {
        time_limit: limit(ms, then),
        ..World::config("web")
    }
}

/// Looks as the node's thread does until the sandbox rests so.
fn comes_to(world: &World, wanted: Option<State>) {
    soon(|| {
        world.node().look_at_times();
        let now = state(world, "web");
        (now == wanted).then_some(()).ok_or_else(|| format!("it is {now:?}"))
    })
    .unwrap();
    world.is_at_rest().unwrap();
}

#[test]
fn one_whose_time_is_over_is_stopped_or_suspended_each_time() {
    let world = World::new();
    world.run(limited(SHORT, OnTimeout::Stop)).unwrap();
    comes_to(&world, Some(State::Exited));
    assert_eq!(world.entry("web").stored().sandbox.ends_ns, None);
    world.node().start(&world.entry("web")).unwrap();
    comes_to(&world, Some(State::Exited));
    // Of one that does not run it counts from the next start on.
    let then = Some(OnTimeout::Suspend);
    let set = world.node().set_time_limit(&world.entry("web"), Some(SHORT), then);
    assert_eq!(set.unwrap().ends_ns, None);
    world.node().start(&world.entry("web")).unwrap();
    comes_to(&world, Some(State::Suspended));
    world.node().resume(&world.entry("web")).unwrap();
    comes_to(&world, Some(State::Suspended));
    world.ends_empty().unwrap();
}

#[test]
fn one_that_is_to_be_removed_goes_when_its_time_is_over() {
    let world = World::new();
    let remove = true;
    let config = limited(SHORT, OnTimeout::Stop);
    world.run(SandboxConfig { remove, ..config }).unwrap();
    comes_to(&world, None);
    world.ends_empty().unwrap();
}

#[test]
fn a_daemon_that_was_not_there_does_it_later() {
    let mut world = World::new();
    world.run(limited(LONG, OnTimeout::Suspend)).unwrap();
    let ends = world.entry("web").stored().sandbox.ends_ns;
    assert!(ends > Some(clock::now_ns()));
    world.restart();
    assert_eq!(
        world.entry("web").stored().sandbox.ends_ns,
        ends,
        "it has other time than before"
    );
    world
        .node()
        .set_time_limit(&world.entry("web"), Some(SHORT), None)
        .unwrap();
    world.restart();
    comes_to(&world, Some(State::Suspended));
    world.ends_empty().unwrap();
}

#[test]
fn who_gets_more_time_meanwhile_runs_on() {
    let world = World::new();
    world.run(limited(SHORT, OnTimeout::Stop)).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    // Somebody is about to end it, and has not had its turn.
    let entry = world.entry("web");
    world.node().set_time_limit(&entry, Some(LONG), None).unwrap();
    world.node().timeout(&entry).unwrap();
    assert_eq!(state(&world, "web"), Some(State::Running));
    let next = world.node().look_at_times().unwrap();
    assert!(next > Duration::from_millis(LONG / 2), "{next:?}");
    let limit = entry.stored().sandbox.config.time_limit.unwrap();
    assert_eq!(limit.then, OnTimeout::Stop, "it is what it was");
    world.node().set_time_limit(&entry, None, None).unwrap();
    assert_eq!(world.node().look_at_times(), None);
    world.ends_empty().unwrap();
}

#[test]
fn one_that_is_paused_is_suspended_too() {
    let world = World::new();
    world.run(limited(LONG, OnTimeout::Suspend)).unwrap();
    let entry = world.entry("web");
    world.node().pause(&entry).unwrap();
    world.node().set_time_limit(&entry, Some(SHORT), None).unwrap();
    comes_to(&world, Some(State::Suspended));
    world.ends_empty().unwrap();
}

#[test]
fn what_fails_is_tried_again_later() {
    let world = World::new();
    world.run(limited(LONG, OnTimeout::Suspend)).unwrap();
    let entry = world.entry("web");
    world.node().set_time_limit(&entry, Some(SHORT), None).unwrap();
    world.faults.arm(&[(0, Fault::Refused)]);
    // Not at once.
    soon(|| match world.node().look_at_times() {
        Some(left) if left > Duration::from_secs(1) => Ok(()),
        left => Err(format!("it has not failed: {left:?}")),
    })
    .unwrap();
    world.faults.disarm();
    assert_eq!(state(&world, "web"), Some(State::Running));
    // With more time nothing has failed, and what is over then is dealt with at once.
    world.node().set_time_limit(&entry, Some(LONG), None).unwrap();
    assert!(world.node().look_at_times() > Some(Duration::from_millis(LONG / 2)));
    let begun = Instant::now();
    world.node().set_time_limit(&entry, Some(SHORT), None).unwrap();
    comes_to(&world, Some(State::Suspended));
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "it was not dealt with at once"
    );
    world.ends_empty().unwrap();
}

/// What was paused and cannot be suspended is paused again.
#[test]
fn a_pause_outlasts_a_suspend_that_fails() {
    let world = World::new();
    world.run(limited(LONG, OnTimeout::Suspend)).unwrap();
    let entry = world.entry("web");
    world.node().pause(&entry).unwrap();
    world.node().set_time_limit(&entry, Some(SHORT), None).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    // The first place is that of the resume, the next ones are those of the suspend.
    world.faults.arm(&[(2, Fault::Refused)]);
    world.node().timeout(&entry).unwrap_err();
    world.faults.disarm();
    world.is_at_rest().unwrap();
    assert_eq!(state(&world, "web"), Some(State::Paused));
    world.ends_empty().unwrap();
}

/// The limit counts from the moment at which it runs, also if the daemon dies at that moment.
#[test]
fn an_interrupted_resume_has_its_time() {
    let mut world = World::new();
    world.run(limited(LONG, OnTimeout::Stop)).unwrap();
    world.node().suspend(&world.entry("web")).unwrap();
    assert_eq!(world.entry("web").stored().sandbox.ends_ns, None);
    for number in 0..super::cases::MOST {
        world.faults.arm(&[(number, Fault::Crash)]);
        let attempt = world.attempt(|world| world.node().resume(&world.entry("web")));
        let place = world.faults.disarm().pop();
        world.restart();
        world.is_at_rest().unwrap();
        let sandbox = world.entry("web").stored().sandbox;
        let (runs, limited) = (sandbox.state == State::Running, sandbox.ends_ns.is_some());
        assert_eq!(runs, limited, "{place:?}: {attempt:?}, {:?}", sandbox.state);
        if place.is_none() {
            break;
        }
        if runs {
            world.node().suspend(&world.entry("web")).unwrap();
        }
    }
    world.ends_empty().unwrap();
}

#[test]
fn one_that_is_put_back_has_its_time() {
    let world = World::new();
    world.run(limited(LONG, OnTimeout::Stop)).unwrap();
    let entry = world.entry("web");
    let on = crate::operations::detach_for::OnDevices::Refuse;
    world.node().make_snapshot(&entry, Some("ready"), on).unwrap();
    let ends = entry.stored().sandbox.ends_ns;
    world.node().rollback(&entry, "ready", on).unwrap();
    assert_eq!(entry.stored().sandbox.ends_ns, ends, "it has other time than before");
    world.node().stop(&entry, Duration::ZERO).unwrap();
    world.node().rollback(&entry, "ready", on).unwrap();
    assert!(entry.stored().sandbox.ends_ns > ends);
    world.ends_empty().unwrap();
}
