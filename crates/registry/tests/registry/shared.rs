//! Pulls at the same time share their work, in one process and between processes.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use image::Prune;
use registry::{BlobState, Cancel, Options, Progress};

use crate::kit::{PATIENCE, Place, location, names_in, options, push};
use crate::server::Registry;
use crate::wire::{Proxy, Rules};

/// `examples/pull.rs`, which cargo has built beside this test.
pub(crate) fn example() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().parent().unwrap().join("examples/pull");
    assert!(path.exists(), "{} is built with the tests", path.display());
    path
}

/// A registry that takes a second or so for a pull of two layers, and the name of an image in it.
fn slow(place: &Place) -> (Registry, Proxy, String, Vec<String>) {
    behind(
        place,
        Rules {
            delay: Duration::from_millis(10),
            ..Rules::default()
        },
    )
}

/// The same, behind a proxy that keeps to these rules.
fn behind(place: &Place, rules: Rules) -> (Registry, Proxy, String, Vec<String>) {
    let registry = Registry::start(place);
    let (ours, image) = place.with_image("ours", &[(1, 1 << 20), (2, 1 << 20)]);
    push(&ours, &format!("{}/x", registry.host()), &options()).unwrap();
    let proxy = Proxy::start(registry.port, rules);
    let export = ours.export(&image.digest).unwrap();
    let parts = export.layers.iter().chain([&export.config]);
    let blobs = parts.map(|part| part.hex().to_owned()).collect();
    (
        registry,
        Proxy {
            rules: proxy.rules,
            port: proxy.port,
        },
        format!("127.0.0.1:{}/x", proxy.port),
        blobs,
    )
}

#[test]
fn pulls_of_one_process_fetch_each_blob_once() {
    let place = Place::new();
    let (registry, _proxy, name, blobs) = slow(&place);
    let store = place.store("theirs");
    let steps = Mutex::new(Vec::new());
    let has = |step: &Progress, wanted| matches!(step, Progress::Blob { state, .. } if *state == wanted);
    let is_awaited = || steps.lock().unwrap().iter().any(|step| has(step, BlobState::Waiting));
    let begun = Instant::now();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let report = |step| {
                    let moving = has(&step, BlobState::Moving);
                    steps.lock().unwrap().push(step);
                    // Whoever works lets another come.
                    while moving && !is_awaited() && begun.elapsed() < PATIENCE {
                        thread::sleep(Duration::from_millis(5));
                    }
                };
                registry::pull(&store, &location(&name), &options(), &report).unwrap();
            });
        }
    });
    for blob in &blobs {
        assert_eq!(registry.gets(blob, &["200", "206"], 1), 1, "{blob}");
    }
    assert!(is_awaited(), "those that wait say so");
    assert_eq!(names_in(&place.path("theirs/partial")).len(), 0);
}

#[test]
fn pulls_of_several_processes_fetch_each_blob_once() {
    let place = Place::new();
    let (registry, _proxy, name, blobs) = slow(&place);
    let pull = || {
        let mut command = Command::new(example());
        command.arg(&name).arg(place.path("theirs")).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let running: Vec<_> = (0..3).map(|_| pull()).collect();
    for child in running {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    for blob in &blobs {
        assert_eq!(registry.gets(blob, &["200", "206"], 1), 1, "{blob}");
    }
}

/// What a killed pull was fetching is gone on with by one that has waited for it.
#[test]
fn a_killed_pull_leaves_its_work_to_the_one_that_waits() {
    let place = Place::new();
    // Of each of the two layers a part comes, and then nothing for as long as the first pull lives.
    let rules = Rules {
        after: 400_000.into(),
        cuts: 2.into(),
        silent: true,
        ..Rules::default()
    };
    let (registry, proxy, name, blobs) = behind(&place, rules);
    let theirs = place.path("theirs");
    let mut first = Command::new(example()).arg(&name).arg(&theirs).spawn().unwrap();
    let both = || proxy.rules.cuts.load(Ordering::SeqCst) <= 0;
    let large = |path: PathBuf| fs::metadata(path).is_ok_and(|meta| meta.len() > 300_000);
    let partial = theirs.join("partial");
    while !(both() && names_in(&partial).iter().any(|name| large(partial.join(name)))) {
        assert!(first.try_wait().unwrap().is_none(), "it has nothing to go on with");
        thread::sleep(Duration::from_millis(5));
    }
    let second = Command::new(example())
        .arg(&name)
        .arg(&theirs)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_millis(100));
    first.kill().unwrap();
    first.wait().unwrap();
    let output = second.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let begun = Instant::now();
    while blobs.iter().all(|blob| registry.gets(blob, &["206"], 0) == 0) {
        assert!(begun.elapsed() < PATIENCE, "{}", registry.log());
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(names_in(&partial).len(), 0);
    drop(proxy);
}

/// One that waits can be cancelled without harm to the one that works.
#[test]
fn one_of_two_pulls_may_be_cancelled() {
    let place = Place::new();
    let (_registry, _proxy, name, _) = slow(&place);
    let store = place.store("theirs");
    let cancel = Cancel::default();
    let cancelled = Options {
        cancel: cancel.clone(),
        ..options()
    };
    let seen = AtomicU64::new(0);
    let begun = Instant::now();
    thread::scope(|scope| {
        let working = scope.spawn(|| {
            registry::pull(&store, &location(&name), &options(), &|step| {
                let moving = matches!(
                    step,
                    Progress::Blob {
                        state: BlobState::Moving,
                        ..
                    }
                );
                // It lets the other one come.
                while moving && seen.load(Ordering::Relaxed) == 0 && begun.elapsed() < PATIENCE {
                    thread::sleep(Duration::from_millis(5));
                }
            })
        });
        let waiting = scope.spawn(|| {
            registry::pull(&store, &location(&name), &cancelled, &|step| {
                if matches!(
                    step,
                    Progress::Blob {
                        state: BlobState::Waiting | BlobState::Moving,
                        ..
                    }
                ) {
                    seen.fetch_add(1, Ordering::Relaxed);
                    cancel.cancel();
                }
            })
        });
        assert!(matches!(waiting.join().unwrap(), Err(registry::Error::Cancelled)));
        working.join().unwrap().unwrap();
    });
    assert!(seen.into_inner() > 0);
}

/// Whatever the moment: the image is whole or not there, and the next pull makes it.
#[test]
fn a_pull_killed_at_any_moment_leaves_a_whole_store() {
    let place = Place::new();
    let registry = Registry::start(&place);
    let (ours, image) = place.with_image("ours", &[(1, 1 << 20), (2, 2 << 20)]);
    let name = format!("{}/x", registry.host());
    push(&ours, &name, &options()).unwrap();
    let theirs = place.path("theirs");
    let (mut killed, mut finished) = (0, 0);
    for step in 0..200_u64 {
        let mut pull = Command::new(example())
            .arg(&name)
            .arg(&theirs)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_millis(step * step));
        pull.kill().unwrap();
        let ended = pull.wait().unwrap().success();
        let store = place.store("theirs");
        store.clear_leftovers().unwrap();
        let listing = store.list().unwrap();
        assert_eq!(listing.damaged.len(), 0);
        assert_eq!(names_in(&theirs.join("tmp")).len(), 0);
        match listing.images.as_slice() {
            [] => assert_eq!(
                names_in(&theirs.join("content")).len() + names_in(&theirs.join("blobs")).len(),
                0
            ),
            [found] => {
                assert_eq!(found.digest, image.digest);
                assert_eq!(fs::read(&found.path).unwrap(), fs::read(&image.path).unwrap());
                store.export(&found.digest).unwrap();
            }
            more => panic!("{more:?}"),
        }
        assert!(!ended || !listing.images.is_empty());
        *(if ended { &mut finished } else { &mut killed }) += 1;
        if finished == 2 {
            break;
        }
        if step % 2 == 0 {
            // Every other time the next one finds what this one has left.
            fs::remove_dir_all(&theirs).unwrap();
        }
    }
    assert!(killed > 3 && finished == 2, "{killed} killed, {finished} finished");
}

/// Downloads that are needed are in use, whatever is pruned meanwhile.
#[test]
fn pruning_takes_nothing_from_a_running_pull() {
    let place = Place::new();
    let (registry, _proxy, name, blobs) = slow(&place);
    let store = place.store("theirs");
    let pruned = AtomicU64::new(0);
    registry::pull(&store, &location(&name), &options(), &|step| {
        if matches!(step, Progress::Blob { .. }) {
            store.prune(&BTreeSet::new(), Prune::Unused).unwrap();
            pruned.fetch_add(1, Ordering::Relaxed);
        }
    })
    .unwrap();
    assert!(pruned.into_inner() > 5);
    for blob in &blobs {
        assert_eq!(registry.gets(blob, &["200", "206"], 1), 1, "{blob}");
    }
}
