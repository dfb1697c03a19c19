//! What is asked for while something else is under way.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::points;
use node_api::{CloneConfig, State};

use super::cases::{exec, exited, running, state, with_snapshot};
use super::saved_cases::{find, while_it_goes};
use super::{Attempt, PATIENCE, World};
use crate::Error;
use crate::node::Node;
use crate::operations::detach_for::OnDevices;

/// Enough for somebody to come to where they wait.
const MOMENT: Duration = Duration::from_millis(100);

/// What somebody else was told.
type Other<T> = Arc<Mutex<Option<JoinHandle<Result<T, Error>>>>>;

/// Has somebody else ask for something when the node comes to this point, which goes on when that is done or waits.
fn meanwhile<T: Send + 'static>(
    world: &World,
    point: &'static str,
    ask: fn(&Arc<Node>) -> Result<T, Error>,
) -> Other<T> {
    let (node, other) = (Arc::downgrade(world.node()), Other::default());
    let asked = Arc::clone(&other);
    world.faults.at(point, move || {
        let node = node.upgrade().unwrap();
        let asker = std::thread::spawn(move || ask(&node));
        let end = Instant::now() + MOMENT;
        while !asker.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        *asked.lock().unwrap() = Some(asker);
    });
    other
}

/// What they were told, soon.
fn told<T>(other: &Other<T>) -> Result<T, Error> {
    let asker = other.lock().unwrap().take().expect("the node came to that point");
    let end = Instant::now() + PATIENCE;
    while !asker.is_finished() {
        assert!(Instant::now() < end, "somebody waits for ever");
        std::thread::sleep(Duration::from_millis(1));
    }
    asker.join().unwrap()
}

fn start(world: &World) {
    world.node().start(&world.entry("web")).unwrap();
}

/// Whatever is open of it or not: it is cloned, or that is refused and nothing is left of it.
#[test]
fn a_snapshot_may_go_at_any_point_of_a_clone() {
    let mut went = 0;
    for point in points::SANDBOX {
        let mut world = World::new();
        with_snapshot(&mut world);
        let attempt = world.attempt(|world| {
            let asked = CloneConfig {
                snapshot: "ready".to_owned(),
                name: Some("twin".to_owned()),
                ports: vec!["81:80".to_owned()],
                ..CloneConfig::default()
            };
            while_it_goes(world, "ready", point, || world.node().clone_of(asked))
        });
        let told = format!("{point}: {attempt:?}");
        world.is_at_rest().unwrap_or_else(|wrong| panic!("{told}: {wrong}"));
        let wanted = matches!(attempt, Attempt::Done).then_some(State::Running);
        assert_eq!(state(&world, "twin"), wanted, "{told}");
        assert!(world.running("web").is_some(), "{told}");
        went += usize::from(find(&world, "ready").is_none());
        world.ends_empty().unwrap_or_else(|wrong| panic!("{told}: {wrong}"));
    }
    assert!(went > 8, "a clone comes to {went} points");
}

/// Its commands stand still, and nobody is told so who only has to wait.
#[test]
fn a_command_waits_until_a_snapshot_is_taken() {
    let mut world = World::new();
    running(&mut world);
    let other = meanwhile(&world, points::SNAPSHOT_FROZEN, |node| exec(node, "web"));
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("ready"), OnDevices::Refuse)
        .unwrap();
    told(&other).unwrap();
    world.ends_empty().unwrap();
}

/// It had exited when it was asked for, and runs when it comes to it.
#[test]
fn what_was_started_meanwhile_is_removed_by_force_alone() {
    let mut world = World::new();
    exited(&mut world);
    let other = meanwhile(&world, points::START_NETWORK, |node| {
        node.remove(&node.find("web")?, false)
    });
    start(&world);
    let refused = told(&other).unwrap_err();
    assert!(matches!(refused, Error::WrongState { .. }), "{refused}");
    assert_eq!(state(&world, "web"), Some(State::Running));
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
    let other = meanwhile(&world, points::START_NETWORK, |node| node.prune());
    start(&world);
    assert_eq!(told(&other).unwrap(), [""; 0]);
    assert_eq!(state(&world, "web"), Some(State::Running));
    world.node().stop(&world.entry("web"), Duration::ZERO).unwrap();
    let other = meanwhile(&world, points::START_NETWORK, |node| {
        node.remove(&node.find("web")?, true)
    });
    start(&world);
    told(&other).unwrap();
    assert_eq!(state(&world, "web"), None);
    world.ends_empty().unwrap();
}
