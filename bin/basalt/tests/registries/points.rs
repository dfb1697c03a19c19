//! Imports, pulls and removals that are killed at each of the store's points: what is left works, and nothing else is left.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use base::points;
use serde_json::json;

use crate::registry::Registry;
use crate::{World, digest_of};

/// How an image comes into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Import,
    Pull,
}

/// The names of all files below a store.
fn files(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![directory.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            found.insert(path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned());
            if path.is_dir() {
                open.push(path);
            }
        }
    }
    found
}

/// Runs `args`, kills it with SIGKILL at `point`, and waits until it is gone.
fn kill_at(world: &World, state: &str, args: &[&str], point: &str) {
    let directory = world.path(&format!("{state}-points"));
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join(point), "").unwrap();
    let mut command = world.command(state, args);
    let mut child = command.env(points::VARIABLE, &directory).spawn().unwrap();
    let reached = directory.join(format!("{point}.reached"));
    let begun = Instant::now();
    while !reached.exists() {
        if let Some(status) = child.try_wait().unwrap() {
            panic!("{args:?} does not come to {point}: {status}");
        }
        assert!(
            begun.elapsed() < Duration::from_secs(90),
            "{args:?} is stuck before {point}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn killed_at_any_point_an_operation_leaves_a_store_that_works() {
    let world = World::with_image();
    let digest = digest_of(&world, "ours");
    let layout = world.path("layout");
    let registry = Registry::start(&world.path("."), false);
    let there = registry.image("tiny");
    world.does("ours", &["tag", "tiny", &there]);
    world.does("ours", &["push", &there]);

    let arrive: [(Way, Vec<&str>); 2] = [
        (Way::Import, vec!["import", "--name", &there, layout.to_str().unwrap()]),
        (Way::Pull, vec!["pull", &there]),
    ];
    let leave = ["rmi", &there];
    for (way, arrive) in &arrive {
        let untouched = format!("{way:?}");
        world.does(&untouched, arrive);
        world.does(&untouched, &leave);
        let expected = files(&world.path(&untouched).join("images"));
        for point in points::IMAGE {
            // An import has no downloads.
            if *way == Way::Import && [points::DOWNLOAD_CLAIMED, points::DOWNLOAD_WHOLE].contains(point) {
                continue;
            }
            let state = format!("{way:?}-{point}");
            if [points::IMAGE_UNNAMED, points::IMAGE_FORGOTTEN, points::IMAGE_REMOVED].contains(point) {
                world.does(&state, arrive);
                kill_at(&world, &state, &leave, point);
            } else {
                kill_at(&world, &state, arrive, point);
            }
            // Whole or gone, and never in the way of the next.
            let images = world.json(&state, &["images"]);
            if images == json!([]) {
                // Looking has cleaned up; a download is kept for the next pull.
                let left = files(&world.path(&state).join("images"));
                let kept = |file: &&String| file.starts_with("partial/") || *file == "names.json";
                assert!(left.difference(&expected).all(|file| kept(&file)), "{state}: {left:?}");
            }
            for image in images.as_array().unwrap() {
                let id = image["digest"].as_str().unwrap();
                assert_eq!(id, digest, "{state}");
                world.does(
                    &state,
                    &["save", "--output", world.path("saved.tar").to_str().unwrap(), id],
                );
            }
            world.does(&state, arrive);
            assert_eq!(digest_of(&world, &state), digest, "{state}");
            world.does(&state, &leave);
            assert_eq!(files(&world.path(&state).join("images")), expected, "{state}");
        }
    }
}
