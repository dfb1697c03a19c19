//! Snapshots that come from elsewhere, are verified, and go.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use base::points;
use node_api::message::LoadStep;
use node_api::transfer::Kind;
use node_api::{CloneConfig, Snapshot, State, Verified};

use super::cases::{Case, UNNOTICED, exited_with_snapshot, running, with_snapshot};
use super::{Attempt, World};
use crate::Error;
use crate::operations::detach_for::OnDevices;
use crate::saved::disk;

/// What the snapshot `ready` is called where it has come to.
const LOADED: &str = "loaded";

/// The last byte of a memory file.
pub(super) const BYTE: u64 = 5;

/// Copies a snapshot's files from those that are open for whoever saves it to those that are open for whoever loads it.
pub(super) fn load(world: &World, name: &str, wanted: &str) -> Result<(), Error> {
    let node = world.node();
    let (names, files) = node.open_files(Kind::Snapshot, name)?;
    let mut loading = None;
    let begin = LoadStep::Begin {
        kind: Kind::Snapshot,
        name: Some(wanted.to_owned()),
        force: false,
    };
    node.load(&mut loading, begin)?;
    for (name, from) in names.into_iter().zip(files) {
        let (_, mut to) = node.load(&mut loading, LoadStep::File { name })?;
        let from = PathBuf::from(format!("/proc/self/fd/{}", from.as_raw_fd()));
        disk::copy(&from, to.remove(0).into()).map_err(Error::file("copy", &from))?;
    }
    node.load(&mut loading, LoadStep::Keep).map(drop)
}

pub(super) fn find(world: &World, name: &str) -> Option<Snapshot> {
    let all = world.node().list_snapshots().unwrap();
    all.into_iter().find(|snapshot| snapshot.name == name)
}

pub(super) fn verify(world: &World, name: &str) -> Result<Verified, Error> {
    world.node().verify(Kind::Snapshot, name, &mut |_| Ok(()))
}

/// Makes a clone, which goes again.
pub(super) fn can_be_cloned(world: &World, snapshot: &str) -> Result<(), String> {
    let asked = CloneConfig {
        snapshot: snapshot.to_owned(),
        name: Some("proof".to_owned()),
        ports: vec!["90:80".to_owned()],
        ..CloneConfig::default()
    };
    let node = world.node();
    let cloned = node.clone_of(asked).map(drop);
    let gone = cloned.and_then(|()| node.remove(&world.entry("proof"), true));
    gone.map_err(|error| format!("no clone of {snapshot} comes and goes: {error}"))
}

/// It is there, and as it was taken.
pub(super) fn is_whole(world: &World, snapshot: &str) -> Result<(), String> {
    let verified = verify(world, snapshot).map_err(|error| error.to_string())?;
    match verified.damage.is_empty() {
        true => can_be_cloned(world, snapshot),
        false => Err(format!("{snapshot} is damaged: {:?}", verified.damage)),
    }
}

fn refused_as_damaged<T>(asked: Result<T, Error>) -> Result<(), String> {
    match asked.map(drop) {
        Err(Error::SnapshotDamaged(_)) => Ok(()),
        other => Err(format!("of a damaged snapshot something was made: {other:?}")),
    }
}

/// Nothing is made of it.
pub(super) fn is_refused(world: &World, snapshot: &str) -> Result<(), String> {
    let asked = CloneConfig {
        snapshot: snapshot.to_owned(),
        ..CloneConfig::default()
    };
    refused_as_damaged(world.node().clone_of(asked))?;
    refused_as_damaged(world.node().rollback(&world.entry("web"), snapshot, OnDevices::Refuse))
}

/// Changes a byte of a file, or changes it back.
pub(super) fn touch(world: &World, snapshot: &str, file: &str, at: u64) {
    let path = world.node().snapshots.directory().join(snapshot).join(file);
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x5a], at).unwrap();
}

/// The snapshot `later` has the memory file of `ready`, and one more.
fn with_two(world: &mut World) {
    with_snapshot(world);
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("later"), OnDevices::Refuse)
        .unwrap();
}

fn damaged(world: &mut World) {
    with_two(world);
    touch(world, "ready", "memory", BYTE);
}

/// It was damaged, and was put back from a backup.
fn mended(world: &mut World) {
    damaged(world);
    assert_ne!(verify(world, "ready").unwrap().damage, []);
    touch(world, "ready", "memory", BYTE);
}

fn with_older(world: &mut World) {
    running(world);
    world
        .node()
        .make_snapshot(&world.entry("web"), Some("older"), OnDevices::Refuse)
        .unwrap();
}

/// Removes a snapshot when the node comes to this point, and does something meanwhile.
pub(super) fn while_it_goes<T>(
    world: &World,
    snapshot: &'static str,
    point: &'static str,
    act: impl FnOnce() -> Result<T, Error>,
) -> Result<(), Error> {
    let node = Arc::downgrade(world.node());
    world.faults.at(point, move || {
        node.upgrade().unwrap().remove_snapshot(snapshot).unwrap();
    });
    act().map(drop)
}

fn loaded_whole_or_not_at_all(world: &World, attempt: &Attempt) -> Result<(), String> {
    match (attempt, find(world, LOADED)) {
        (Attempt::Done, None) => Err("it was done, and is not there".to_owned()),
        (Attempt::Failed(_), Some(_)) => Err("it was not done, and is there".to_owned()),
        (_, Some(_)) => is_whole(world, LOADED),
        (_, None) => is_whole(world, "ready"),
    }
}

fn known_as_damaged(world: &World, attempt: &Attempt) -> Result<(), String> {
    let known = ["ready", "later"].map(|name| find(world, name).unwrap().damaged.is_some());
    match attempt {
        Attempt::Done if !known[0] => return Err("it was found to be damaged, and nobody knows".to_owned()),
        _ if known[0] => is_refused(world, "ready")?,
        _ => (),
    }
    // Whoever saves one looks first.
    refused_as_damaged(world.node().open_files(Kind::Snapshot, "ready"))
}

fn whole_again(world: &World, attempt: &Attempt) -> Result<(), String> {
    match (attempt, find(world, "ready").unwrap().damaged) {
        (Attempt::Done, Some(damage)) => Err(format!("it is whole, and is said to be damaged: {damage}")),
        (_, Some(_)) => is_refused(world, "ready"),
        (_, None) => is_whole(world, "ready"),
    }
}

/// Of `ready` nothing is there, or all.
fn gone_or_whole(world: &World, attempt: &Attempt) -> Result<(), String> {
    match (attempt, find(world, "ready")) {
        (Attempt::Done, Some(_)) => Err("it was removed, and is there".to_owned()),
        (_, Some(_)) => is_whole(world, "ready"),
        (_, None) => is_whole(world, "later"),
    }
}

fn newer_is_whole(world: &World, attempt: &Attempt) -> Result<(), String> {
    match (attempt, find(world, "newer")) {
        (Attempt::Done, None) => Err("it was taken, and is not there".to_owned()),
        (Attempt::Failed(_), Some(_)) => Err("it was not taken, and is there".to_owned()),
        (_, Some(_)) => is_whole(world, "newer"),
        (_, None) => Ok(()),
    }
}

pub(super) const CASES: &[Case] = &[
    Case {
        name: "load",
        prepare: with_snapshot,
        act: |world| load(world, "ready", LOADED),
        also: loaded_whole_or_not_at_all,
        ..UNNOTICED
    },
    Case {
        name: "verify",
        prepare: with_snapshot,
        act: |world| verify(world, "ready").map(|verified| assert_eq!(verified.damage, [])),
        also: |world, _| is_whole(world, "ready"),
        ..UNNOTICED
    },
    Case {
        name: "verify of one that is damaged",
        prepare: damaged,
        act: |world| verify(world, "ready").map(|verified| assert_ne!(verified.damage, [])),
        also: known_as_damaged,
        ..UNNOTICED
    },
    Case {
        name: "verify of one that was damaged",
        prepare: mended,
        act: |world| verify(world, "ready").map(|verified| assert_eq!(verified.damage, [])),
        also: whole_again,
        ..UNNOTICED
    },
    Case {
        name: "removal of a snapshot",
        prepare: with_two,
        act: |world| world.node().remove_snapshot("ready"),
        also: gone_or_whole,
        ..UNNOTICED
    },
    Case {
        name: "snapshot, while the one before goes",
        prepare: with_older,
        act: |world| {
            while_it_goes(world, "older", points::SNAPSHOT_PAUSED, || {
                world
                    .node()
                    .make_snapshot(&world.entry("web"), Some("newer"), OnDevices::Refuse)
            })
        },
        also: newer_is_whole,
        ..UNNOTICED
    },
    Case {
        name: "rollback, while its snapshot goes",
        prepare: exited_with_snapshot,
        act: |world| {
            while_it_goes(world, "ready", points::RESTORE_RESUMED, || {
                world.node().rollback(&world.entry("web"), "ready", OnDevices::Refuse)
            })
        },
        undone: &[Some(State::Exited)],
        goes_on: false,
        also: |world, attempt| match (attempt, find(world, "ready")) {
            (Attempt::Done, Some(_)) => Err("it was removed, and is there".to_owned()),
            _ => Ok(()),
        },
        ..UNNOTICED
    },
];
