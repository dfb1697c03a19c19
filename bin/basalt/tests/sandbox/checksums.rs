//! Cases of checksums: damage to the files of snapshots and templates is found, named, and not cloned.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::builds::{built, refusal, templates};
use crate::snapshots::refused;
use crate::world::{World, done, json, text, wait_for};

/// Each case with its name.
pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "damage_is_found_and_named_by_verify",
        damage_is_found_and_named_by_verify,
    ),
    (
        "a_damaged_snapshot_is_not_cloned_until_it_is_mended",
        a_damaged_snapshot_is_not_cloned_until_it_is_mended,
    ),
    (
        "damage_is_found_in_the_background_after_a_clone",
        damage_is_found_in_the_background_after_a_clone,
    ),
    (
        "damage_is_found_in_whatever_shares_the_file",
        damage_is_found_in_whatever_shares_the_file,
    ),
    (
        "snapshots_without_checksums_get_some",
        snapshots_without_checksums_get_some,
    ),
    (
        "what_is_damaged_does_not_leave_this_host",
        what_is_damaged_does_not_leave_this_host,
    ),
    ("a_damaged_template_is_built_again", a_damaged_template_is_built_again),
    (
        "a_damaged_template_that_nobody_has_built_goes",
        a_damaged_template_that_nobody_has_built_goes,
    ),
];

/// A sandbox `web` with a disk, and a snapshot `mine` of it, whose disk has its checksums.
fn kept() -> World {
    let world = World::new("can be kept");
    let words = [
        "run", "-d", "--boot", "--disk", "64m", "--name", "web", "tiny", "--", "sleep", "1000",
    ];
    done(&world, &words);
    done(&world, &["snapshot", "create", "web", "mine"]);
    wait_for("the checksums of the disk", || {
        place(&world, "mine").join("disk.sums").exists().then_some(())
    });
    world
}

fn place(world: &World, name: &str) -> PathBuf {
    world.path("state/snapshots").join(name)
}

/// Flips one bit; twice, and all is as it was.
fn flip(file: &Path) {
    let file = fs::File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 3).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 3).unwrap();
}

/// What `verify` says of a damaged one.
#[track_caller]
fn damaged(world: &World, words: &[&str]) -> String {
    let output = world.verb(words);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn damage_is_found_and_named_by_verify() {
    let world = kept();
    let place = place(&world, "mine");
    let whole = done(&world, &["snapshot", "verify", "mine"]);
    assert!(whole.starts_with("mine: ok, ") && whole.lines().count() == 1, "{whole}");
    for (file, says) in [
        ("memory", "memory: 6 B from offset 0 have changed (guest physical 0x0)"),
        ("disk", "disk: 64 KiB from offset 0 have changed"),
        ("state", "state: "),
        (
            "memory.sums",
            "memory: it cannot be checked, as the file of checksums is damaged",
        ),
    ] {
        flip(&place.join(file));
        let said = damaged(&world, &["snapshot", "verify", "mine"]);
        assert!(said.starts_with("mine: damaged\n") && said.contains(says), "{said}");
        assert!(
            said.contains("back from a backup") && !said.contains("snapshot rm"),
            "{said}"
        );
        flip(&place.join(file));
        done(&world, &["snapshot", "verify", "mine"]);
    }
    // Cut, and with a hole where data was.
    let memory = fs::read(place.join("memory")).unwrap();
    fs::write(place.join("memory"), &memory[..4]).unwrap();
    let said = damaged(&world, &["snapshot", "verify", "--all"]);
    assert!(said.contains("memory: it has 4 bytes and had 6"), "{said}");
    fs::write(place.join("memory"), vec![0; memory.len()]).unwrap();
    let output = world.verb(&["--json", "snapshot", "verify", "mine"]);
    assert_eq!(output.status.code(), Some(1));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        told[0]["damage"],
        serde_json::json!([{ "file": "memory", "problem": "changed", "offset": 0, "bytes": 6, "guest_physical": 0 }])
    );
    fs::write(place.join("memory"), memory).unwrap();
    let told = json(&world, &["snapshot", "verify", "--all"]);
    assert_eq!(
        (&told[0]["name"], &told[0]["damage"]),
        (&"mine".into(), &serde_json::json!([]))
    );
    let told = refused(&world, &["snapshot", "verify", "no", "mine"]);
    assert!(told.contains("there is no snapshot `no`"), "{told}");
}

fn a_damaged_snapshot_is_not_cloned_until_it_is_mended() {
    let world = kept();
    let state = |world: &World| json(world, &["snapshot", "inspect", "mine"])[0]["damaged"].clone();
    assert!(state(&world).is_null() && done(&world, &["snapshot", "ls"]).contains(" ok "));
    flip(&place(&world, "mine").join("memory"));
    damaged(&world, &["snapshot", "verify", "mine"]);
    for words in [&["clone", "mine"][..], &["rollback", "web", "mine"]] {
        let said = refused(&world, words);
        assert!(
            said.contains("the snapshot `mine` is damaged (memory: ") && said.contains("put memory in "),
            "{said}"
        );
        assert!(
            said.contains("disk, is whole") || said.contains("/disk, is whole"),
            "{said}"
        );
    }
    assert_eq!(done(&world, &["ps", "-aq"]).lines().count(), 1, "nothing was made");
    // The next daemon knows it as well.
    done(&world, &["daemon", "--stop"]);
    assert!(state(&world).as_str().unwrap().starts_with("memory: "));
    assert!(done(&world, &["snapshot", "ls"]).contains(" damaged "));
    let doctor = text(&world.verb(&["doctor"]).stdout);
    assert!(doctor.contains("damaged: mine"), "{doctor}");
    flip(&place(&world, "mine").join("memory"));
    done(&world, &["snapshot", "verify", "mine"]);
    assert!(state(&world).is_null());
    done(&world, &["clone", "--name", "twin", "mine"]);
}

fn damage_is_found_in_the_background_after_a_clone() {
    let world = kept();
    flip(&place(&world, "mine").join("disk"));
    done(&world, &["clone", "--name", "one", "mine"]);
    let damaged = wait_for("the damage to be found", || {
        json(&world, &["snapshot", "inspect", "mine"])[0]["damaged"]
            .as_str()
            .map(str::to_owned)
    });
    assert_eq!(damaged, "disk: 64 KiB from offset 0 have changed");
    let said = refused(&world, &["clone", "mine"]);
    assert!(said.contains("the snapshot `mine` is damaged"), "{said}");
    // Its clone runs on.
    done(&world, &["exec", "one", "true"]);
}

fn damage_is_found_in_whatever_shares_the_file() {
    let world = kept();
    done(&world, &["clone", "--name", "one", "mine"]);
    done(&world, &["snapshot", "create", "one", "second"]);
    let second = place(&world, "second");
    // Each file has its checksums once.
    for name in ["memory.sums", "memory.1.sums"] {
        assert!(second.join(name).exists(), "{name}");
    }
    let identity = |path: PathBuf| {
        let metadata = fs::metadata(path).unwrap();
        (
            std::os::unix::fs::MetadataExt::dev(&metadata),
            std::os::unix::fs::MetadataExt::ino(&metadata),
        )
    };
    assert_eq!(
        identity(place(&world, "mine").join("memory.sums")),
        identity(second.join("memory.sums"))
    );
    done(&world, &["snapshot", "verify", "second"]);
    flip(&second.join("memory.1"));
    let said = damaged(&world, &["snapshot", "verify", "second"]);
    assert!(said.contains("memory.1: 6 B from offset 0 have changed"), "{said}");
    assert!(json(&world, &["snapshot", "inspect", "mine"])[0]["damaged"].is_null());
    flip(&second.join("memory.1"));
    flip(&second.join("memory"));
    damaged(&world, &["snapshot", "verify", "second"]);
    wait_for("the other one's damage to be found", || {
        json(&world, &["snapshot", "inspect", "mine"])[0]["damaged"]
            .as_str()
            .map(drop)
    });
}

fn snapshots_without_checksums_get_some() {
    let world = kept();
    // As a former version of Basalt has left it.
    let place = place(&world, "mine");
    for name in ["memory.sums", "disk.sums"] {
        fs::remove_file(place.join(name)).unwrap();
    }
    done(&world, &["clone", "mine"]);
    let said = done(&world, &["snapshot", "verify", "mine"]);
    assert!(said.starts_with("mine: ok"), "{said}");
    assert!(
        said.contains("memory, disk had no checksums, and has some now") || place.join("disk.sums").exists(),
        "{said}"
    );
    flip(&place.join("disk"));
    damaged(&world, &["snapshot", "verify", "mine"]);
}

fn what_is_damaged_does_not_leave_this_host() {
    let world = kept();
    let file = world.path("mine.basalt");
    let file = file.to_str().unwrap();
    done(&world, &["snapshot", "save", "-o", file, "mine"]);
    done(&world, &["snapshot", "load", "-i", file, "--name", "again"]);
    let again = place(&world, "again");
    for name in ["memory.sums", "disk.sums"] {
        assert!(again.join(name).exists(), "{name}");
    }
    done(&world, &["snapshot", "verify", "again"]);
    flip(&again.join("disk"));
    let other = world.path("again.basalt");
    let said = refused(&world, &["snapshot", "save", "-o", other.to_str().unwrap(), "again"]);
    assert!(said.contains("the snapshot `again` is damaged (disk: "), "{said}");
    assert!(!other.exists());
    // Nor does a damaged file come in.
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(file, bytes).unwrap();
    refused(&world, &["snapshot", "load", "-i", file, "--name", "third"]);
    assert!(!place(&world, "third").exists());
}

fn a_damaged_template_is_built_again() {
    let world = World::new("can be kept");
    let id = built(&world, &["--name", "web", "--run", "true"]);
    let place = world.path("state/templates").join(&id);
    done(&world, &["template", "verify", "web"]);
    flip(&place.join("memory"));
    let said = damaged(&world, &["template", "verify", "web"]);
    assert!(said.contains("memory: ") && said.contains("build it again"), "{said}");
    assert_eq!(json(&world, &["template", "inspect", "web"])[0]["usable"], false);
    let output = world.verb(&["run", "--rm", "--template", "web", "echo", "out"]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), "out\n".into()));
    let said = text(&output.stderr);
    assert!(
        said.contains("the template web is built again, as its files are damaged"),
        "{said}"
    );
    done(&world, &["template", "verify", "--all"]);
    assert_eq!(templates(&world).len(), 1);
    let said = refusal(&world, &["template", "verify"]);
    assert!(said.contains("TEMPLATE"), "{said}");
}

fn a_damaged_template_that_nobody_has_built_goes() {
    let world = World::new("can be kept");
    let first = |world: &World| json(world, &["template", "ls"])[0]["id"].as_str().map(str::to_owned);
    done(&world, &["run", "--rm", "tiny", "true"]);
    let id = wait_for("the template", || first(&world));
    flip(&world.path("state/templates").join(&id).join("memory"));
    let said = damaged(&world, &["template", "verify", "--all"]);
    assert!(
        said.contains("it is removed, and the next sandbox like it makes another"),
        "{said}"
    );
    assert_eq!(first(&world), None);
    done(&world, &["run", "--rm", "tiny", "true"]);
    let again = wait_for("another template", || first(&world));
    done(&world, &["template", "verify", &again]);
    // One that is cloned is verified in the background.
    done(&world, &["daemon", "--stop"]);
    flip(&world.path("state/templates").join(&again).join("memory"));
    done(&world, &["run", "--rm", "tiny", "true"]);
    wait_for("the template to be removed", || first(&world).is_none().then_some(()));
}
