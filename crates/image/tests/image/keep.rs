//! What is kept so that an image can be sent on: layers shared by images, saving, downloads, and what is removed when.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::points;
use image::{Claim, Error, Listing, Partial, Prune, Pruned, Pulled, Reference, Store};

use crate::build::{self, Files, file, sha256};

fn store(directory: &Path) -> Store {
    Store::open(&directory.join("store")).unwrap()
}

/// An OCI archive of layers with one file each.
fn archive(directory: &Path, name: &str, contents: &[&str]) -> PathBuf {
    let layers: Vec<_> = contents
        .iter()
        .map(|contents| build::layer(&[file("a", contents)]))
        .collect();
    let path = directory.join(name);
    fs::write(&path, Files::oci(&layers, &[build::Store::Gzip]).to_tar()).unwrap();
    path
}

fn names_in(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_saved_image_is_imported_with_the_same_digest_and_the_same_bytes() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let layers = [build::layer(&[file("a", "1")]), build::layer(&[file("b", "2")])];
    for how in [build::Store::Plain, build::Store::Gzip, build::Store::Zstd] {
        let from = temp.path().join(format!("{how:?}"));
        fs::write(&from, Files::oci(&layers, &[how]).to_tar()).unwrap();
        let image = ours.import(&from, Some("team/x:1"), &mut |_| {}).unwrap();
        let saved = temp.path().join("saved.tar");
        ours.save("team/x:1", &mut fs::File::create(&saved).unwrap(), &saved)
            .unwrap();
        let theirs = Store::open(&temp.path().join(format!("theirs{how:?}"))).unwrap();
        let again = theirs.import(&saved, None, &mut |_| {}).unwrap();
        assert_eq!((&again.digest, &again.names), (&image.digest, &image.names));
        assert_eq!(fs::read(&again.path).unwrap(), fs::read(&image.path).unwrap());
    }
}

/// A docker-archive has no manifest: one is made, and from then on the digest stays.
#[test]
fn a_docker_archive_is_saved_with_a_manifest_of_ours() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let layers = [build::layer(&[file("a", "1")]), build::layer(&[file("b", "2")])];
    let from = temp.path().join("docker.tar");
    let files = Files::docker(
        &layers,
        &[build::Store::Plain, build::Store::Gzip],
        "registry.test/tool:2",
    );
    fs::write(&from, files.to_tar()).unwrap();
    let image = ours.import(&from, None, &mut |_| {}).unwrap();
    let save = |store: &Store, name: &str| {
        let path = temp.path().join(name);
        store
            .save("tool:2", &mut fs::File::create(&path).unwrap(), &path)
            .unwrap();
        fs::read(&path).unwrap()
    };
    let first = save(&ours, "first");
    let theirs = Store::open(&temp.path().join("theirs")).unwrap();
    let again = theirs.import(&temp.path().join("first"), None, &mut |_| {}).unwrap();
    assert_ne!(again.digest, image.digest, "a manifest's digest is not a config's");
    assert_eq!(again.layers, image.layers);
    assert_eq!(again.config, image.config);
    assert_eq!(save(&theirs, "second"), first);
}

/// What comes along with something else is the image that was meant, and gets no name.
#[test]
fn an_image_that_comes_along_is_the_one_that_is_wanted() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let layers = [build::layer(&[file("a", "1")]), build::layer(&[file("b", "2")])];
    let docker = Files::docker(&layers, &[build::Store::Gzip], "registry.test/tool:2");
    for (name, files) in [
        ("team/x:1", Files::oci(&layers, &[build::Store::Gzip])),
        ("registry.test/tool:2", docker),
    ] {
        let from = temp.path().join("from");
        fs::write(&from, files.to_tar()).unwrap();
        let image = ours.import(&from, Some(name), &mut |_| {}).unwrap();
        let export = ours.export(&image.digest).unwrap();
        let mut archive = Vec::new();
        export.write_archive(&mut archive).unwrap();
        assert_eq!(export.archive_bytes(), archive.len() as u64);
        let theirs = Store::open(&temp.path().join(image.digest.get(..8).unwrap())).unwrap();
        let saved = temp.path().join("saved");
        fs::write(&saved, archive).unwrap();
        let bring = |digest: &str| theirs.bring(fs::File::open(&saved).unwrap(), digest, &mut |_| {});
        let refused = bring(&"0".repeat(64));
        assert!(matches!(refused, Err(Error::DigestMismatch { .. })), "{refused:?}");
        assert!(theirs.list().unwrap().images.is_empty());
        for _ in 0..2 {
            let again = bring(&image.digest).unwrap();
            assert_eq!((&again.digest, again.names), (&image.digest, vec![]));
            assert_eq!(fs::read(&again.path).unwrap(), fs::read(&image.path).unwrap());
        }
    }
}

/// An implementation that is not ours reads both formats of what we save. skopeo is what podman is made of.
#[test]
fn others_can_read_what_is_saved() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let image = ours
        .import(
            &archive(temp.path(), "a.tar", &["1", "2"]),
            Some("team/x:1"),
            &mut |_| {},
        )
        .unwrap();
    let saved = temp.path().join("saved.tar");
    ours.save("team/x:1", &mut fs::File::create(&saved).unwrap(), &saved)
        .unwrap();
    for format in ["oci-archive", "docker-archive"] {
        let to = temp.path().join(format);
        let output = Command::new("skopeo")
            .args(["--insecure-policy", "copy"])
            .args((format == "oci-archive").then_some("--preserve-digests"))
            .arg(format!("{format}:{}", saved.display()))
            .arg(format!("oci:{}:x", to.display()))
            .output()
            .expect("skopeo cannot be run: install Debian's package skopeo");
        assert!(
            output.status.success(),
            "{format}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let theirs = Store::open(&temp.path().join(format!("{format}-store"))).unwrap();
        let again = theirs.import(&to, None, &mut |_| {}).unwrap();
        assert_eq!(again.layers, image.layers, "{format}");
        assert_eq!(again.digest == image.digest, format == "oci-archive", "{format}");
    }
}

#[test]
fn a_shared_layer_is_kept_once_and_as_long_as_an_image_has_it() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let one = ours
        .import(&archive(temp.path(), "one", &["base", "1"]), None, &mut |_| {})
        .unwrap();
    let content = temp.path().join("store/content");
    assert_eq!(names_in(&content).len(), 4, "manifest, config and two layers");
    ours.import(&archive(temp.path(), "two", &["base", "2"]), None, &mut |_| {})
        .unwrap();
    assert_eq!(names_in(&content).len(), 7, "all but the base is new");

    let base = sha256(&build::compressed(
        &build::layer(&[file("a", "base")]),
        build::Store::Gzip,
    ));
    let base_size = fs::metadata(content.join(&base)).unwrap().len();
    let (usage, downloads) = ours.usage().unwrap();
    assert_eq!((usage.len(), downloads), (2, 0));
    let total: u64 = names_in(&content)
        .iter()
        .map(|name| fs::metadata(content.join(name)).unwrap().len())
        .sum();
    assert!(usage.iter().all(|image| image.shared == base_size && image.image > 0));
    assert_eq!(usage[0].unique + usage[1].unique + base_size, total);

    ours.remove("one").unwrap();
    assert!(content.join(&base).exists());
    assert!(!content.join(&one.digest).exists());
    assert_eq!(ours.usage().unwrap().0[0].shared, 0);
    ours.remove("two").unwrap();
    assert_eq!(names_in(&content).len(), 0);
}

#[test]
fn pruning_never_takes_what_is_in_use() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let images: Vec<_> = ["1", "2", "3", "4"]
        .iter()
        .map(|contents| {
            ours.import(&archive(temp.path(), "x", &["base", contents]), Some("x"), &mut |_| {})
                .unwrap()
        })
        .collect();
    ours.tag(&images[2].digest, "kept").unwrap();
    // 1 and 2 have lost their name; 1 is in use; 3 and 4 have names.
    let in_use = BTreeSet::from([images[0].digest.clone()]);
    let pruned = ours.prune(&in_use, Prune::Nameless).unwrap();
    assert_eq!(pruned.images, [images[1].digest.clone()]);
    assert!(pruned.bytes >= images[1].size);
    for image in [&images[0], &images[2], &images[3]] {
        ours.export(&image.digest).unwrap();
        ours.get(&image.digest).unwrap();
    }
    let before = ours.footprint(&in_use).unwrap();
    let pruned = ours.prune(&in_use, Prune::Unused).unwrap();
    assert_eq!(pruned.images.len(), 2);
    assert_eq!(
        pruned.bytes, before.needless,
        "what was said to be needless is what was freed"
    );
    let after = ours.footprint(&in_use).unwrap();
    assert_eq!((after.needless, after.images), (0, before.images - before.needless));
    // The base is shared with the image in use.
    assert!(pruned.bytes < ours.footprint(&BTreeSet::new()).unwrap().needless * 2);
    assert!(matches!(ours.get("kept"), Err(Error::NoSuchImage { .. })));
    ours.export(&images[0].digest).unwrap();
    assert_eq!(ours.prune(&in_use, Prune::Unused).unwrap(), Pruned::default());
}

#[test]
fn an_image_in_use_is_removed_only_by_force_but_may_lose_a_name() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let image = ours
        .import(&archive(temp.path(), "x", &["1"]), Some("x"), &mut |_| {})
        .unwrap();
    assert_eq!(
        ours.tag("x", "y:2").unwrap().names,
        ["localhost/x:latest", "localhost/y:2"]
    );
    let in_use = BTreeSet::from([image.digest.clone()]);
    ours.remove_unless("y:2", &in_use).unwrap();
    for reference in ["x", &image.digest] {
        let error = ours.remove_unless(reference, &in_use).unwrap_err();
        assert!(matches!(error, Error::InUse { .. }), "{error}");
        assert_eq!(ours.get("x").unwrap().names, ["localhost/x:latest"]);
    }
    ours.remove("x").unwrap();
    assert!(matches!(ours.tag("x", "y"), Err(Error::NoSuchImage { .. })));
}

/// Tries until it succeeds: a process that another test is starting holds the locks of our files until its exec.
#[track_caller]
fn retried<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(begun.elapsed() < Duration::from_secs(90), "somebody holds a lock");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[track_caller]
fn mine(store: &Store, digest: &str, size: u64) -> Partial {
    retried(|| match store.claim(digest, size).unwrap() {
        Claim::Mine(partial) => Some(*partial),
        Claim::Busy(_) => None,
        other => panic!("{other:?}"),
    })
}

#[test]
fn a_download_goes_on_where_it_stopped_and_is_checked() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let data = b"0123456789";
    let digest = format!("sha256:{}", sha256(data));
    let mut partial = mine(&ours, &digest, 10);
    partial.write(&data[..4]).unwrap();
    assert!(matches!(ours.claim(&digest, 10).unwrap(), Claim::Busy(4)));
    drop(partial);
    let mut partial = mine(&ours, &digest, 10);
    assert_eq!(partial.len(), 4);
    assert!(matches!(
        partial.write(b"more than there is"),
        Err(Error::SizeMismatch { found: 22, .. })
    ));
    partial.write(&data[4..]).unwrap();
    partial.finish().unwrap();
    assert!(matches!(ours.claim(&digest, 10).unwrap(), Claim::Whole(_)));

    // Damage on disk is found before anything is made of it.
    let whole = temp.path().join("store/partial").join(sha256(data));
    fs::write(&whole, b"0123456780").unwrap();
    let mut partial = mine(&ours, &digest, 10);
    assert_eq!(partial.len(), 0);
    partial.write(b"012345678x").unwrap();
    assert!(matches!(partial.finish(), Err(Error::DigestMismatch { .. })));
    let mut partial = mine(&ours, &digest, 10);
    assert_eq!(partial.len(), 0, "nothing of what was wrong is left");
    partial.write(b"01").unwrap();
    assert!(matches!(partial.finish(), Err(Error::SizeMismatch { .. })));
    assert_eq!(names_in(&temp.path().join("store/partial")).len(), 0);
    assert!(matches!(
        ours.claim("sha512:0", 1),
        Err(Error::UnsupportedDigest { .. })
    ));
}

#[test]
fn old_downloads_are_swept_but_never_one_that_runs() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let digest = |letter: char| format!("sha256:{}", letter.to_string().repeat(64));
    for letter in ['a', 'b'] {
        mine(&ours, &digest(letter), 10).write(b"1234").unwrap();
    }
    let running = mine(&ours, &digest('c'), 10);
    assert_eq!(ours.sweep().unwrap(), 0, "nothing is old");
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(25 * 3600);
    for letter in ["a", "c"] {
        let path = temp
            .path()
            .join("store/partial")
            .join(format!("{}.part", letter.repeat(64)));
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(long_ago).unwrap();
    }
    assert_eq!(retried(|| Some(ours.sweep().unwrap()).filter(|bytes| *bytes > 0)), 4);
    assert_eq!(ours.usage().unwrap().1, 4);
    let pruned = || Some(ours.prune(&BTreeSet::new(), Prune::Unused).unwrap().bytes);
    assert_eq!(retried(|| pruned().filter(|bytes| *bytes > 0)), 4);
    assert_eq!(names_in(&temp.path().join("store/partial")).len(), 1);
    drop(running);
}

/// The parts of an image as a pull would hand them over.
fn pulled(store: &Store, files: &Files) -> Pulled {
    let index: serde_json::Value = serde_json::from_slice(&files.0["index.json"]).unwrap();
    let descriptor = &index["manifests"][0];
    let blob = |digest: &str| files.0[&format!("blobs/sha256/{}", digest.trim_start_matches("sha256:"))].clone();
    let manifest = blob(descriptor["digest"].as_str().unwrap());
    let parsed: image::Manifest = serde_json::from_slice(&manifest).unwrap();
    let mut layers = HashMap::new();
    for layer in &parsed.layers {
        let mut partial = mine(store, &layer.digest, layer.size);
        partial.write(&blob(&layer.digest)).unwrap();
        let file = partial.finish().unwrap().file().unwrap();
        layers.insert(layer.hex().unwrap().to_owned(), file);
    }
    Pulled {
        media_type: descriptor["mediaType"].as_str().unwrap().to_owned(),
        config: blob(&parsed.config.digest),
        manifest,
        layers,
    }
}

#[test]
fn what_was_downloaded_becomes_the_image_that_an_import_makes() {
    let temp = tempfile::tempdir().unwrap();
    let (ours, theirs) = (store(temp.path()), Store::open(&temp.path().join("theirs")).unwrap());
    let layers = [build::layer(&[file("a", "1")]), build::layer(&[file("b", "2")])];
    let files = Files::oci(&layers, &[build::Store::Gzip, build::Store::Zstd]);
    let name: Reference = "registry.test:5000/x:1".parse().unwrap();
    let image = ours.commit(pulled(&ours, &files), Some(&name), &mut |_| {}).unwrap();
    let path = temp.path().join("x");
    fs::write(&path, files.to_tar()).unwrap();
    let imported = theirs
        .import(&path, Some("registry.test:5000/x:1"), &mut |_| {})
        .unwrap();
    assert_eq!((&image.digest, &image.names), (&imported.digest, &imported.names));
    assert_eq!(fs::read(&image.path).unwrap(), fs::read(&imported.path).unwrap());
    assert_eq!(names_in(&temp.path().join("store/partial")).len(), 0);
    let other: Reference = "other".parse().unwrap();
    let known = ours.known(&image.digest, Some(&other)).unwrap().unwrap();
    assert_eq!(known.names.len(), 2);

    // An image that has lost a layer is not whole, and is repaired.
    let content = temp.path().join("store/content");
    let lost = content.join(sha256(&build::compressed(&layers[0], build::Store::Gzip)));
    fs::remove_file(&lost).unwrap();
    assert!(ours.known(&image.digest, None).unwrap().is_none());
    assert!(matches!(ours.export("other"), Err(Error::NoContent { .. })));
    ours.import(&path, None, &mut |_| {}).unwrap();
    ours.export("other").unwrap();
}

#[test]
fn nothing_but_the_download_is_left_of_a_pull_with_a_wrong_layer() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    let files = Files::oci(&[build::layer(&[file("a", "1")])], &[build::Store::Gzip]);
    let mut wrong = pulled(&ours, &files);
    let other = pulled(
        &ours,
        &Files::oci(&[build::layer(&[file("a", "2")])], &[build::Store::Gzip]),
    );
    for file in wrong.layers.values_mut() {
        *file = other.layers.values().next().unwrap().try_clone().unwrap();
    }
    let error = ours.commit(wrong, None, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::DigestMismatch { .. }), "{error}");
    for directory in ["blobs", "content", "tmp"] {
        assert_eq!(
            names_in(&temp.path().join("store").join(directory)).len(),
            0,
            "{directory}"
        );
    }
}

/// Also while it waits for others: here for a lock that the test holds.
#[test]
fn an_operation_ends_when_it_is_told_to_and_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let from = archive(temp.path(), "x", &["1"]);
    let ours = store(temp.path());
    // Each time a little later: at every place where it looks.
    let mut stopped = 0;
    for looks in 0..1000 {
        let left = AtomicU32::new(looks);
        let until = ours.until(move || left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_err());
        match until.import(&from, None, &mut |_| {}) {
            Err(Error::Stopped) => stopped += 1,
            Err(error) => panic!("{error}"),
            Ok(image) => {
                assert_eq!(image.names, ["localhost/x:latest"]);
                break;
            }
        }
        for directory in ["blobs", "content", "tmp"] {
            assert_eq!(
                names_in(&temp.path().join("store").join(directory)).len(),
                0,
                "{directory}"
            );
        }
    }
    assert!((3..1000).contains(&stopped), "it looks {stopped} times");

    let held = fs::File::options()
        .write(true)
        .open(temp.path().join("store/lock"))
        .unwrap();
    held.lock().unwrap();
    let begun = Instant::now();
    let until = ours.until(move || begun.elapsed() > Duration::from_millis(200));
    assert!(matches!(until.tag("x", "y"), Err(Error::Stopped)));
    assert!(begun.elapsed() < Duration::from_secs(90));
}

#[test]
fn leftovers_of_a_crash_are_cleared_and_nothing_else() {
    let temp = tempfile::tempdir().unwrap();
    let ours = store(temp.path());
    ours.import(&archive(temp.path(), "x", &["1"]), None, &mut |_| {})
        .unwrap();
    let before = names_in(&temp.path().join("store/content"));
    fs::write(temp.path().join("store/content").join("0".repeat(64)), b"12345").unwrap();
    fs::write(temp.path().join("store/tmp/4711.0"), b"").unwrap();
    assert_eq!(ours.clear_leftovers().unwrap(), 5);
    assert_eq!(names_in(&temp.path().join("store/content")), before);
    assert_eq!(names_in(&temp.path().join("store/tmp")).len(), 0);
    ours.export("x").unwrap();

    // Nobody knows what a damaged image refers to: nothing is taken for a leftover then.
    let image = ours.get("x").unwrap();
    fs::write(image.path.with_extension("json"), b"{").unwrap();
    assert_eq!(ours.clear_leftovers().unwrap(), 0);
    assert_eq!(names_in(&temp.path().join("store/content")), before);
}

/// A life of an image comes to every step, in this order; and whatever the step at which it ends, the store is whole.
#[test]
fn every_step_is_told_and_at_none_is_the_store_broken() {
    let temp = tempfile::tempdir().unwrap();
    let files = Files::oci(&[build::layer(&[file("a", "1")])], &[build::Store::Gzip]);
    let name: Reference = "x".parse().unwrap();
    let life = |store: &Store| {
        let image = store.commit(pulled(store, &files), Some(&name), &mut |_| {}).unwrap();
        store.remove("x").unwrap();
        image.digest
    };
    let told = Arc::new(Mutex::new(Vec::new()));
    let (to, at) = (Arc::clone(&told), temp.path().join("store"));
    life(&store(temp.path()).telling(move |step| {
        to.lock().unwrap().push(step);
        // What another process would find that began after a crash here; the lock is held, so it is a copy.
        let copy = at.with_extension(step);
        let status = Command::new("cp").arg("-a").args([&at, &copy]).status().unwrap();
        assert!(status.success());
    }));
    assert_eq!(told.lock().unwrap().as_slice(), points::IMAGE);
    for step in points::IMAGE {
        let found = Store::open(&temp.path().join("store").with_extension(step)).unwrap();
        let Listing { images, damaged } = found.list().unwrap();
        assert_eq!(damaged.len(), 0, "{step}");
        let whole = ["image.recorded", "image.named", "image.unnamed"].contains(step);
        assert_eq!(images.len(), usize::from(whole), "{step}");
        for image in &images {
            found.export(&image.digest).unwrap();
            found.get(&image.digest).unwrap();
        }
        let content = temp.path().join(format!("store.{step}")).join("content");
        assert_eq!(
            fs::exists(&content).unwrap() && !names_in(&content).is_empty(),
            whole,
            "{step}"
        );
        found.prune(&BTreeSet::new(), Prune::Unused).unwrap();
        life(&found);
    }
}
