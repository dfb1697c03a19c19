//! The store: names, digests, removal, what is left of interrupted imports, damage, and imports at the same time.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use image::{Error, Phase, Store};

use crate::build::{self, Files, file};

fn archive(directory: &Path, name: &str, contents: &str) -> PathBuf {
    let layers = [build::layer(&[file("a", contents)])];
    let path = directory.join(name);
    fs::write(&path, Files::oci(&layers, &[build::Store::Gzip]).to_tar()).unwrap();
    path
}

#[test]
fn an_image_is_found_by_its_names_and_its_digest() {
    let temp = tempfile::tempdir().unwrap();
    let store = Store::open(&temp.path().join("deep/store")).unwrap();
    let one = store
        .import(&archive(temp.path(), "one.tar", "1"), None, &mut |_| {})
        .unwrap();
    assert_eq!(one.names, ["localhost/one:latest"]);
    let again = store
        .import(&archive(temp.path(), "one.tar", "1"), Some("team/uno:v1"), &mut |_| {})
        .unwrap();
    assert_eq!((again.digest, again.names.len()), (one.digest.clone(), 2));
    let two = store
        .import(
            &archive(temp.path(), "two.tar", "2"),
            Some("registry.test/x/two"),
            &mut |_| {},
        )
        .unwrap();
    for reference in [
        "one",
        "one:latest",
        "localhost/one",
        "team/uno:v1",
        &one.digest[..12],
        &one.digest,
    ] {
        assert_eq!(store.get(reference).unwrap().digest, one.digest, "{reference}");
    }
    for reference in [
        "two",
        "x/two",
        "registry.test/x/two:latest",
        &format!("sha256:{}", two.digest),
    ] {
        assert_eq!(store.get(reference).unwrap().digest, two.digest, "{reference}");
    }
    for reference in [
        "three",
        "one:v2",
        "",
        "x",
        "sha256:",
        "ffffffffffffff",
        "../one",
        "one/../one",
    ] {
        assert!(
            matches!(store.get(reference), Err(Error::NoSuchImage { .. })),
            "{reference}"
        );
    }
    let listed: Vec<_> = store
        .list()
        .unwrap()
        .images
        .into_iter()
        .map(|image| image.digest)
        .collect();
    assert_eq!(listed, [one.digest.clone(), two.digest.clone()]);

    let config = store.get("one").unwrap().config;
    assert_eq!(
        (config.entrypoint, config.cmd),
        (vec!["/bin/entry".to_owned(), "-x".to_owned()], vec!["serve".to_owned()])
    );
    assert_eq!(
        (config.env, config.user.as_str()),
        (vec!["A=b".to_owned(), "PATH=/bin".to_owned()], "7:8")
    );
    assert_eq!(
        (config.working_dir.as_str(), config.exposed_ports),
        ("/srv", vec!["80/tcp".to_owned()])
    );
    assert_eq!(
        (config.stop_signal.as_deref(), config.labels["k"].as_str()),
        (Some("SIGINT"), "v")
    );
    assert_eq!(one.created.as_deref(), Some("2024-01-02T03:04:05Z"));

    store.remove("one").unwrap();
    assert!(one.path.exists(), "it has another name");
    store.remove("team/uno:v1").unwrap();
    assert!(!one.path.exists());
    store.remove(&two.digest).unwrap();
    assert_eq!(store.list().unwrap().images, []);
    assert!(matches!(store.remove("two"), Err(Error::NoSuchImage { .. })));
    assert_eq!(fs::read_dir(temp.path().join("deep/store/blobs")).unwrap().count(), 0);
}

#[test]
fn bad_names_are_refused_before_anything_is_read() {
    let temp = tempfile::tempdir().unwrap();
    let store = Store::open(temp.path()).unwrap();
    let error = store
        .import(Path::new("/nowhere"), Some("Bad Name"), &mut |_| {})
        .unwrap_err();
    assert!(matches!(error, Error::BadReference { .. }));
}

#[test]
fn a_name_moves_to_the_image_imported_last() {
    let temp = tempfile::tempdir().unwrap();
    let store = Store::open(&temp.path().join("store")).unwrap();
    let old = store
        .import(&archive(temp.path(), "a", "1"), Some("x"), &mut |_| {})
        .unwrap();
    let new = store
        .import(&archive(temp.path(), "a", "2"), Some("x"), &mut |_| {})
        .unwrap();
    assert_eq!(store.get("x").unwrap().digest, new.digest);
    assert_eq!(store.get(&old.digest).unwrap().names, Vec::<String>::new());
}

#[test]
fn a_docker_archive_brings_its_name_also_compressed() {
    let temp = tempfile::tempdir().unwrap();
    let store = Store::open(&temp.path().join("store")).unwrap();
    let files = Files::docker(
        &[build::layer(&[file("a", "1")])],
        &[build::Store::Plain],
        "registry.test/tool:2",
    );
    for (name, how) in [("a.tar.gz", build::Store::Gzip), ("a.tar.zst", build::Store::Zstd)] {
        let path = temp.path().join(name);
        fs::write(&path, build::compressed(&files.to_tar(), how)).unwrap();
        assert_eq!(
            store.import(&path, None, &mut |_| {}).unwrap().names,
            ["registry.test/tool:2"]
        );
    }
    assert_eq!(store.list().unwrap().images.len(), 1);
}

#[test]
fn progress_ends_where_it_says() {
    let temp = tempfile::tempdir().unwrap();
    let store = Store::open(&temp.path().join("store")).unwrap();
    let mut steps = Vec::new();
    let image = store
        .import(&archive(temp.path(), "a", "1"), None, &mut |step| steps.push(step))
        .unwrap();
    for phase in [Phase::Reading, Phase::Writing] {
        let of_phase: Vec<_> = steps.iter().filter(|step| step.phase == phase).collect();
        assert!(of_phase.is_sorted_by_key(|step| step.done));
        let last = of_phase.last().unwrap();
        assert_eq!((last.done, last.done > 0), (last.total, true));
    }
    assert_eq!(steps.last().unwrap().total, image.size);
}

#[test]
fn what_a_killed_import_left_is_removed_by_the_next() {
    let temp = tempfile::tempdir().unwrap();
    let directory = temp.path().join("store");
    let image = Store::open(&directory)
        .unwrap()
        .import(&archive(temp.path(), "a", "1"), None, &mut |_| {})
        .unwrap();
    let orphan = directory.join("blobs").join(format!("{}.erofs", "0".repeat(64)));
    fs::write(&orphan, "").unwrap();
    fs::write(directory.join("tmp/4711.0"), "").unwrap();
    // Nobody clears while the lock is held, which a process that another test is starting does until its exec.
    let begun = Instant::now();
    let store = loop {
        let store = Store::open(&directory).unwrap();
        if !orphan.exists() {
            break store;
        }
        assert!(begun.elapsed() < Duration::from_secs(90), "it is left");
        thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(fs::read_dir(directory.join("tmp")).unwrap().count(), 0);
    assert_eq!(store.get("a").unwrap(), image);
}

#[test]
fn damage_to_a_stored_image_is_found_and_repaired_by_another_import() {
    let temp = tempfile::tempdir().unwrap();
    let store = Store::open(&temp.path().join("store")).unwrap();
    let path = archive(temp.path(), "a", "1");
    let image = store.import(&path, None, &mut |_| {}).unwrap();
    let whole = fs::read(&image.path).unwrap();
    let mut flipped = whole.clone();
    flipped[1024 + 200] ^= 1;
    for damaged in [&whole[..4096], &flipped, b""] {
        fs::write(&image.path, damaged).unwrap();
        assert!(matches!(store.get("a"), Err(Error::CorruptStored { .. })));
        store.import(&path, None, &mut |_| {}).unwrap();
        assert_eq!(fs::read(&store.get("a").unwrap().path).unwrap(), whole);
    }
    fs::remove_file(&image.path).unwrap();
    assert!(matches!(store.get("a"), Err(Error::CorruptStored { problem, .. }) if problem == "the file is gone"));
}

/// What the errors tell people to do works.
#[test]
fn a_damaged_store_can_be_mended_as_its_errors_say() {
    let temp = tempfile::tempdir().unwrap();
    let directory = temp.path().join("store");
    let store = Store::open(&directory).unwrap();
    let path = archive(temp.path(), "a", "1");
    let image = store.import(&path, None, &mut |_| {}).unwrap();

    fs::write(image.path.with_extension("json"), "{").unwrap();
    assert!(matches!(store.get("a"), Err(Error::CorruptStored { .. })));
    assert_eq!(store.remove("a").unwrap(), image.digest);
    assert_eq!(fs::read_dir(directory.join("blobs")).unwrap().count(), 0);
    assert_eq!(store.list().unwrap().images, []);

    store.import(&path, None, &mut |_| {}).unwrap();
    let names = directory.join("names.json");
    fs::write(&names, "{").unwrap();
    for error in [
        store.get("a").unwrap_err(),
        store.remove("a").unwrap_err(),
        store.import(&path, None, &mut |_| {}).unwrap_err(),
    ] {
        assert!(error.to_string().contains("delete that file"), "{error}");
    }
    fs::remove_file(&names).unwrap();
    store.import(&path, None, &mut |_| {}).unwrap();
    assert_eq!(store.get("a").unwrap().digest, image.digest);
}

/// A damaged image stops nobody who does not need it.
#[test]
fn one_damaged_image_does_not_hide_the_others() {
    let temp = tempfile::tempdir().unwrap();
    let store = Store::open(&temp.path().join("store")).unwrap();
    let import = |name: &str| store.import(&archive(temp.path(), name, name), None, &mut |_| {});
    let (bad, good) = (import("bad").unwrap(), import("good").unwrap());
    fs::write(bad.path.with_extension("json"), "{").unwrap();
    fs::write(good.path.with_file_name("notes.json"), "{").unwrap();

    let listing = store.list().unwrap();
    assert_eq!(listing.images, std::slice::from_ref(&good));
    let [damage] = &listing.damaged[..] else {
        panic!("{listing:?}")
    };
    let command = format!("`basalt rmi {}`", &bad.digest[..12]);
    assert!(damage.to_string().contains(&command), "{damage}");

    assert_eq!(store.get("good").unwrap(), good);
    assert_eq!(store.get(&good.digest[..12]).unwrap(), good);
    import("other").unwrap();
    store.remove("other").unwrap();
    store.remove(&bad.digest[..12]).unwrap();
    assert!(store.list().unwrap().damaged.is_empty());
}

#[test]
fn imports_at_the_same_time_all_succeed() {
    let temp = tempfile::tempdir().unwrap();
    let directory = temp.path().join("store");
    thread::scope(|scope| {
        for index in 0..6 {
            let (temp, directory) = (temp.path(), &directory);
            scope.spawn(move || {
                let path = archive(temp, &format!("i{index}"), &(index / 2).to_string());
                let image = Store::open(directory)
                    .unwrap()
                    .import(&path, None, &mut |_| {})
                    .unwrap();
                assert_eq!(
                    Store::open(directory)
                        .unwrap()
                        .get(&format!("i{index}"))
                        .unwrap()
                        .digest,
                    image.digest
                );
            });
        }
    });
    let images = Store::open(&directory).unwrap().list().unwrap().images;
    assert_eq!(
        images.iter().map(|image| image.names.len()).collect::<Vec<_>>(),
        [2, 2, 2]
    );
}
