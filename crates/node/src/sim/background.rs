//! Verification in the background: what the first clone of a snapshot sets off, with the daemon dying and the disk full at each place of it.

use node_api::CloneConfig;

use super::cases::with_snapshot;
use super::faults::Fault;
use super::saved_cases::{BYTE, find, is_refused, is_whole, touch, verify};
use super::{World, soon};
use crate::Error;
use crate::operations::detach_for::OnDevices;

/// What shares a damaged memory file.
const SHARING: [&str; 2] = ["ready", "later"];

fn clone(world: &World, snapshot: &str, name: &str, port: &str) -> Result<(), Error> {
    let asked = CloneConfig {
        snapshot: snapshot.to_owned(),
        name: Some(name.to_owned()),
        ports: vec![format!("{port}:80")],
        ..CloneConfig::default()
    };
    world.node().clone_of(asked).map(drop)
}

/// A clone of `ready`, whose memory is damaged behind its back; `later` has the same file.
fn damaged_under_a_clone(world: &mut World) {
    with_snapshot(world);
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("later"), OnDevices::Refuse)
        .unwrap();
    clone(world, "ready", "twin", "81").unwrap();
    touch(world, "ready", "memory", BYTE);
}

/// The background has come to its end, or has died: whether both are known to be damaged.
fn looked_at(world: &World) -> Result<bool, String> {
    soon(|| match world.works_in_background() && !world.faults.has_fired() {
        true => Err("something is verified for ever".to_owned()),
        false => Ok(()),
    })?;
    Ok(SHARING.iter().all(|name| find(world, name).unwrap().damaged.is_some()))
}

/// What is not known to be damaged is found out by its next clone. It is whole when that is made, and damaged when it is looked at.
fn verified_by_the_next_clone(world: &World) -> Result<(), String> {
    for (snapshot, name, port) in [("ready", "third", "82"), ("later", "fourth", "83")] {
        if find(world, snapshot).unwrap().damaged.is_none() {
            touch(world, "ready", "memory", BYTE);
            let cloned = clone(world, snapshot, name, port);
            touch(world, "ready", "memory", BYTE);
            cloned.map_err(|error| error.to_string())?;
            looked_at(world)?;
        }
        is_refused(world, snapshot)?;
    }
    Ok(())
}

/// A fault at a place of the background's work; whether there is one of that number.
fn at_place(fault: Fault, number: usize) -> bool {
    let mut world = match fault {
        Fault::Full => World::small(),
        _ => World::new(),
    };
    damaged_under_a_clone(&mut world);
    world.faults.arm(&[(number, fault)]);
    looked_at(&world).unwrap();
    if fault == Fault::Full {
        // It goes on with what is left.
        soon(|| {
            (!world.works_in_background())
                .then_some(())
                .ok_or("it works on".to_owned())
        })
        .unwrap();
    }
    let fired = world.faults.disarm();
    if fault == Fault::Crash && !fired.is_empty() {
        world.restart();
    }
    let told = format!("{fault:?} at {number}, {fired:?}");
    let known = world.empty().and_then(|()| verified_by_the_next_clone(&world));
    known.unwrap_or_else(|wrong| panic!("{told}: {wrong}"));
    let run = ["web", "twin"].iter().all(|name| world.running(name).is_some());
    assert!(run, "{told}: what runs hears of it");
    // It is put back from a backup.
    touch(&world, "ready", "memory", BYTE);
    for name in SHARING {
        assert_eq!(verify(&world, name).unwrap().damage, [], "{told}");
        is_whole(&world, name).unwrap_or_else(|wrong| panic!("{told}: {wrong}"));
    }
    world.ends_empty().unwrap_or_else(|wrong| panic!("{told}: {wrong}"));
    !fired.is_empty()
}

#[test]
fn what_the_background_finds_damaged_is_cloned_no_more_wherever_it_fails() {
    // Each waits for most of its time.
    let places = |fault| {
        let numbers: Vec<_> = (0..6)
            .map(|number| std::thread::spawn(move || at_place(fault, number)))
            .collect();
        let fired = numbers.into_iter().map(|place| place.join().unwrap());
        fired.filter(|fired| *fired).count()
    };
    for fault in [Fault::Crash, Fault::Full] {
        let count = places(fault);
        assert!((2..6).contains(&count), "{fault:?} at {count} places");
    }
}
