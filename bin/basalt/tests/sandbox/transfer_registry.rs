//! Cases of snapshots in a registry, Debian's `docker-registry`.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::Value;

use crate::snapshots::{files, refused};
use crate::transfer::{elsewhere, is_whole, with_snapshot};
use crate::world::{CREDENTIALS, Registry, World, done, text, wait_for};

fn pull(world: &World, words: &[&str]) -> Output {
    let mut command = vec!["snapshot", "pull", "--creds", CREDENTIALS];
    command.extend(words);
    world.verb(&command)
}

pub(crate) fn a_snapshot_goes_by_a_registry() {
    let here = with_snapshot();
    let registry = Registry::start(&here.path("."), true);
    let reference = registry.image("team/ready:1");
    let push = ["--json", "snapshot", "push", "--creds", CREDENTIALS, "mine", &reference];
    let pushed: Value = serde_json::from_str(&done(&here, &push)).unwrap();
    // Record, state, memory, its layer and disk.
    assert_eq!(pushed["sent"], 5, "{pushed}");
    let digest = pushed["digest"].as_str().unwrap().to_owned();
    let again: Value = serde_json::from_str(&done(&here, &push)).unwrap();
    assert_eq!(
        (&again["sent"], again["digest"].as_str()),
        (&0.into(), Some(digest.as_str()))
    );
    let told = refused(&here, &["snapshot", "push", "mine", &reference]);
    assert!(told.contains("credentials"), "{told}");

    let there = elsewhere();
    let output = pull(&there, &[&reference]);
    assert_eq!(
        (output.status.code(), text(&output.stdout)),
        (Some(0), "mine\n".into()),
        "{}",
        text(&output.stderr)
    );
    let told = text(&output.stderr);
    assert!(
        told.contains("its image tiny (sha256:") && told.contains("is not here: `basalt pull`"),
        "{told}"
    );
    refused(&there, &["clone", "mine"]);
    done(&there, &["import", here.path("layout").to_str().unwrap()]);
    is_whole(&there, "mine");
    let by_digest = format!("{}@{digest}", reference.trim_end_matches(":1"));
    let output = pull(&there, &["--quiet", "--name", "again", &by_digest]);
    assert_eq!(
        (text(&output.stdout), text(&output.stderr)),
        ("again\n".into(), String::new())
    );
    is_whole(&there, "again");
    // Nothing is kept twice.
    assert_eq!(fs::read_dir(there.path("state/images/partial")).unwrap().count(), 0);
    let output = pull(&there, &[&reference]);
    assert!(
        text(&output.stderr).contains("there is a snapshot `mine`"),
        "{}",
        text(&output.stderr)
    );
}

/// The files of all blobs that its registry has.
fn blobs(world: &World) -> Vec<PathBuf> {
    let entries = fs::read_dir(world.path("."))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries
        .map(|path| path.join("data/docker/registry/v2/blobs"))
        .filter(|path| path.is_dir())
        .collect();
    while found.iter().any(|path| path.is_dir()) {
        let (directories, mut files): (Vec<_>, Vec<_>) = found.into_iter().partition(|path| path.is_dir());
        for directory in directories {
            files.extend(fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()));
        }
        found = files;
    }
    found
}

pub(crate) fn what_a_registry_has_instead_leaves_nothing() {
    let here = with_snapshot();
    let registry = Registry::start(&here.path("."), false);
    let (image, reference) = (registry.image("tiny:1"), registry.image("ready:1"));
    done(&here, &["push", "tiny", &image]);
    done(&here, &["snapshot", "push", "mine", &reference]);
    let there = elsewhere();
    let told = refused(&there, &["snapshot", "pull", &image]);
    assert!(
        told.contains("is an image and no application/vnd.basalt.snapshot.v1"),
        "{told}"
    );
    let told = refused(&there, &["pull", &reference]);
    assert!(told.contains("vnd.basalt.snapshot"), "{told}");
    let told = refused(&there, &["snapshot", "pull", &registry.image("no:1")]);
    assert!(told.contains("has no"), "{told}");
    let told = refused(
        &here,
        &[
            "snapshot",
            "push",
            "mine",
            &format!("{image}@sha256:{}", "0".repeat(64)),
        ],
    );
    assert!(told.contains("pushes to a tag"), "{told}");
    // A mirror has it, whatever became of its registry.
    let mirrored = [
        "snapshot",
        "pull",
        "--mirror",
        &registry.host(),
        "registry.invalid/ready:1",
    ];
    assert_eq!(done(&there, &mirrored), "mine\n");
    done(&there, &["snapshot", "rm", "mine"]);
    // A blob that was changed on the registry's disk.
    let blobs = blobs(&here);
    let largest = blobs
        .iter()
        .max_by_key(|path| fs::metadata(path).unwrap().len())
        .unwrap();
    let mut bytes = fs::read(largest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(largest, bytes).unwrap();
    let told = refused(&there, &["snapshot", "pull", &reference]);
    assert!(
        told.contains("sha256:") && told.contains("nothing of it was used"),
        "{told}"
    );
    wait_for("nothing to be there", || files(&there).is_empty().then_some(()));
}
