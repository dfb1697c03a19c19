//! Cases about the images of sandboxes that are there: who may remove them, and what all of it takes on disk.

use crate::cases::kill;
use crate::daemons::{detached, wait_for_state};
use crate::world::{World, text, wait_for};

pub(crate) fn an_image_of_a_sandbox_is_removed_only_by_force() {
    let world = World::new("");
    detached(&world, "over", "exit 0");
    wait_for_state(&world, "over", "exited");
    // One that has ended uses its image, too, and so does one of which no daemon tells just now.
    kill(world.daemon().unwrap());
    world.wait_for_no_daemon();
    let refused = world.verb(&["rmi", "tiny"]);
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(
        text(&refused.stderr),
        "basalt: the image \"tiny\" is used by over: remove that first (`basalt rm over`), or force it (`basalt rmi --force \
         tiny`)\n"
    );
    let pruned = world.verb(&["image", "prune", "--all"]);
    assert_eq!(text(&pruned.stdout), "0 B freed\n", "{}", text(&pruned.stderr));
    let one_of_two = world.verb(&["tag", "tiny", "other"]);
    assert_eq!(one_of_two.status.code(), Some(0));
    assert_eq!(world.verb(&["rmi", "other"]).status.code(), Some(0));
    assert_eq!(world.verb(&["start", "over"]).status.code(), Some(0));
    wait_for_state(&world, "over", "exited");
    assert_eq!(world.verb(&["rmi", "--force", "tiny"]).status.code(), Some(0));
    assert!(!text(&world.verb(&["images"]).stdout).contains("tiny"));
    let gone = world.verb(&["start", "over"]);
    assert!(
        text(&gone.stderr).contains("there is no image"),
        "{}",
        text(&gone.stderr)
    );
}

pub(crate) fn what_is_taken_adds_up_to_what_du_says() {
    let world = World::new("");
    let output = world.verb(&[
        "run", "-d", "--disk", "64m", "--name", "over", "tiny", "--", "sh", "-c", "exit 0",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    wait_for_state(&world, "over", "exited");
    let du = |path: &str| -> u64 {
        let output = std::process::Command::new("du")
            .args(["-s", "-B1"])
            .arg(world.path(path))
            .output()
            .unwrap();
        let line = text(&output.stdout);
        line.split('\t').next().unwrap().parse().unwrap()
    };
    // The daemon's log of the database may be written to between the two looks.
    wait_for("both to say the same", || {
        let output = world.verb(&["--json", "system", "df", "-v"]);
        let usage: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let kinds = usage["kinds"].as_array().unwrap();
        let bytes = |at: usize, name: &str| kinds[at][name].as_u64().unwrap();
        let all: u64 = (0..kinds.len()).map(|at| bytes(at, "bytes")).sum();
        let sandboxes = bytes(2, "bytes");
        assert_eq!(kinds[0]["active"], 1);
        assert_eq!((bytes(0, "reclaimable"), bytes(2, "total")), (0, 1));
        assert_eq!(usage["sandboxes"][0]["name"], "over");
        assert_eq!(usage["images"][0]["sandboxes"], 1);
        // All of it but the directory that it is in.
        let its = usage["sandboxes"][0]["bytes"].as_u64().unwrap();
        assert!(its > 0 && its < 64 << 20 && bytes(2, "reclaimable") == its, "{its}");
        (all == du("state") && sandboxes == du("state/sandboxes")).then_some(())
    });
    let table = text(&world.verb(&["system", "df"]).stdout);
    assert!(table.starts_with("TYPE        TOTAL  ACTIVE  SIZE"), "{table}");
    assert_eq!(table.lines().count(), 8, "{table}");
    assert_eq!(world.verb(&["rm", "over"]).status.code(), Some(0));
    assert_eq!(world.verb(&["rmi", "tiny"]).status.code(), Some(0));
}
