//! Connections that break, stop or are never made, disks that are full, and operations that are ended.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use registry::{BlobState, Cancel, Error, Options, Progress};

use crate::kit::{PATIENCE, Place, fill, location, names_in, options, pull, push, refused};
use crate::server::Registry;
use crate::wire::{Fake, Proxy, Rules};

const MIB: usize = 1 << 20;

/// A registry with the image `x` of one layer, which is so long.
fn with_layer(place: &Place, len: usize) -> (Registry, String, u64) {
    let registry = Registry::start(place);
    let (ours, _) = place.with_image("ours", &[(1, len)]);
    push(&ours, &format!("{}/x", registry.host()), &options()).unwrap();
    let export = ours.export("x").unwrap();
    (
        registry,
        export.layers[0].hex().to_owned(),
        export.layers[0].descriptor.size,
    )
}

fn rules(after: u64, cuts: i64) -> Rules {
    let rules = Rules::default();
    rules.after.store(after, Ordering::SeqCst);
    rules.cuts.store(cuts, Ordering::SeqCst);
    rules
}

#[test]
fn a_broken_download_goes_on_where_it_broke() {
    let place = Place::new();
    let (registry, layer, size) = with_layer(&place, 8 * MIB);
    let proxy = Proxy::start(registry.port, rules(3 * MIB as u64, 2));
    pull(&place.store("theirs"), &format!("{}/x", proxy.host()), &options()).unwrap();
    assert_eq!(proxy.rules.cuts.load(Ordering::SeqCst).max(0), 0, "all cuts were made");
    assert_eq!(registry.gets(&layer, &["206"], 2), 2);
    // What was on its way when the connection broke, buffers included, is lost; what had come is not sent again.
    let received = proxy.rules.received.load(Ordering::SeqCst);
    assert!(received < size + 3 * MIB as u64, "{received} bytes for {size}");
}

/// The manifest goes last: the registry has the whole image or does not know it.
#[test]
fn a_broken_upload_is_made_again_or_leaves_no_image() {
    let place = Place::new();
    let registry = Registry::start(&place);
    let (ours, image) = place.with_image("ours", &[(1, 4 * MIB), (2, 1000)]);
    let few = Options {
        attempts: 3,
        ..options()
    };
    let cutting = |cuts| {
        let rules = Rules::default();
        rules.upload_cuts.store(cuts, Ordering::SeqCst);
        Proxy::start(registry.port, rules)
    };
    let error = push(&ours, &format!("{}/x", cutting(i64::MAX).host()), &few).unwrap_err();
    assert!(matches!(error, Error::Broken { attempts: 3, .. }), "{error}");
    let error = refused(&place, &format!("{}/x", registry.host()), &few);
    assert!(matches!(error, Error::NoSuchImage { .. }), "{error}");

    let proxy = cutting(2);
    push(&ours, &format!("{}/x", proxy.host()), &few).unwrap();
    assert!(
        proxy.rules.upload_cuts.load(Ordering::SeqCst) <= 0,
        "all cuts were made"
    );
    let pulled = pull(&place.store("theirs"), &format!("{}/x", registry.host()), &options()).unwrap();
    assert_eq!(pulled.image.digest, image.digest);
}

#[test]
fn a_silent_registry_is_left_and_asked_again() {
    let place = Place::new();
    let (registry, layer, _) = with_layer(&place, 2 * MIB);
    let silent = |cuts| Rules {
        silent: true,
        ..rules(MIB as u64, cuts)
    };
    let proxy = Proxy::start(registry.port, silent(1));
    let soon = Options {
        stall: Duration::from_secs(10),
        attempts: 2,
        ..options()
    };
    pull(&place.store("theirs"), &format!("{}/x", proxy.host()), &soon).unwrap();
    assert_eq!(registry.gets(&layer, &["206"], 1), 1);

    // Always silent: it ends, with what to do.
    let mute = Fake::start(|asked| {
        if asked.line != "GET /v2/" {
            std::thread::sleep(Duration::from_secs(600));
        }
        (200, Vec::new(), Vec::new())
    });
    let begun = Instant::now();
    let error = refused(&place, &format!("{}/x", mute.host()), &soon);
    assert!(matches!(error, Error::Broken { attempts: 2, .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(300));
}

#[test]
fn what_was_cancelled_is_gone_on_with_the_next_time() {
    let place = Place::new();
    let (registry, layer, size) = with_layer(&place, 8 * MIB);
    let proxy = Proxy::start(
        registry.port,
        Rules {
            delay: Duration::from_millis(5),
            ..Rules::default()
        },
    );
    let name = format!("{}/x", proxy.host());
    let store = place.store("theirs");
    let cancel = Cancel::default();
    let options_with = Options {
        cancel: cancel.clone(),
        ..options()
    };
    let mut at = None;
    let moment = std::sync::Mutex::new(&mut at);
    let ended = registry::pull(&store, &location(&name), &options_with, &|step| {
        if let Progress::Blob {
            state: BlobState::Moving,
            done,
            total,
            ..
        } = step
            && total == size
            && done > 3 * MIB as u64
        {
            cancel.cancel();
            moment.lock().unwrap().get_or_insert(Instant::now());
        }
    });
    assert!(matches!(ended, Err(Error::Cancelled)), "{ended:?}");
    assert!(at.unwrap().elapsed() < PATIENCE);
    assert_eq!(
        names_in(&place.path("theirs/partial")).len(),
        2,
        "the config and a part of the layer"
    );

    let before = proxy.rules.received.load(Ordering::SeqCst);
    pull(&store, &name, &options()).unwrap();
    let received = proxy.rules.received.load(Ordering::SeqCst) - before;
    assert!(received < size - 3 * MIB as u64 + 100_000, "{received} bytes");
    assert_eq!(registry.gets(&layer, &["206"], 1), 1);
    assert_eq!(names_in(&place.path("theirs/partial")).len(), 0);
}

#[test]
fn the_deadline_ends_everything() {
    let place = Place::new();
    let (registry, _, _) = with_layer(&place, 4 * MIB);
    let proxy = Proxy::start(
        registry.port,
        Rules {
            delay: Duration::from_millis(50),
            ..Rules::default()
        },
    );
    let soon = Options {
        deadline: Duration::from_secs(2),
        ..options()
    };
    let begun = Instant::now();
    let error = refused(&place, &format!("{}/x", proxy.host()), &soon);
    assert!(matches!(error, Error::Deadline { seconds: 2 }), "{error}");
    assert!(begun.elapsed() < PATIENCE);
}

/// As where a registry keeps its blobs with somebody else: what is asked for there is the rest, too.
#[test]
fn a_redirected_download_goes_on_too() {
    let place = Place::new();
    let (registry, layer, size) = with_layer(&place, 2 * MIB);
    let ours = place.store("ours");
    let part = &ours.export("x").unwrap().layers[0];
    let mut partial = match place.store("theirs").claim(&part.descriptor.digest, size).unwrap() {
        image::Claim::Mine(partial) => *partial,
        other => panic!("{other:?}"),
    };
    partial
        .write(&fs::read(place.path("ours/content").join(&layer)).unwrap()[..MIB])
        .unwrap();
    drop(partial);
    let to = registry.host();
    let redirecting = Fake::start(move |asked| {
        let path = asked.line.trim_start_matches("GET ");
        (
            307,
            vec![("location".to_owned(), format!("http://{to}{path}"))],
            Vec::new(),
        )
    });
    pull(&place.store("theirs"), &format!("{}/x", redirecting.host()), &options()).unwrap();
    assert_eq!(
        (registry.gets(&layer, &["206"], 1), registry.gets(&layer, &["200"], 0)),
        (1, 0)
    );
}

/// Neither does a pull wait for ever for another operation on the store, here for a lock that the test holds.
#[test]
fn the_deadline_ends_waiting_for_the_store() {
    let place = Place::new();
    let (registry, _, _) = with_layer(&place, 1000);
    let store = place.store("theirs");
    let held = fs::File::options().write(true).open(place.path("theirs/lock")).unwrap();
    held.lock().unwrap();
    let soon = Options {
        deadline: Duration::from_secs(1),
        ..options()
    };
    let begun = Instant::now();
    let ended = pull(&store, &format!("{}/x", registry.host()), &soon);
    assert!(matches!(ended, Err(Error::Deadline { seconds: 1 })), "{ended:?}");
    assert!(begun.elapsed() < PATIENCE);
}

#[test]
fn a_download_damaged_on_this_disk_is_fetched_anew() {
    let place = Place::new();
    let (registry, layer, _) = with_layer(&place, MIB);
    let store = place.store("theirs");
    let partial = place.path("theirs/partial").join(format!("{layer}.part"));
    fs::write(&partial, vec![7; 1000]).unwrap();
    pull(&store, &format!("{}/x", registry.host()), &options()).unwrap();
    assert_eq!(
        (registry.gets(&layer, &["206"], 1), registry.gets(&layer, &["200"], 1)),
        (1, 1)
    );
}

#[test]
fn a_busy_registry_is_asked_again_when_it_says() {
    let place = Place::new();
    let (registry, _, _) = with_layer(&place, 1000);
    let count = std::sync::atomic::AtomicU64::new(0);
    let busy = Fake::start(
        move |asked| match (asked.line.as_str(), count.fetch_add(1, Ordering::SeqCst)) {
            ("GET /v2/", _) => (200, Vec::new(), Vec::new()),
            (_, 0..2) => (429, vec![("retry-after".to_owned(), "3".to_owned())], Vec::new()),
            (_, 2..4) => (503, Vec::new(), Vec::new()),
            _ => (
                404,
                Vec::new(),
                br#"{"errors":[{"code":"X","message":"no such\nthing"}]}"#.to_vec(),
            ),
        },
    );
    let begun = Instant::now();
    let error = refused(&place, &format!("{}/x", busy.host()), &options());
    assert!(
        matches!(&error, Error::NoSuchImage { detail, .. } if detail == " (no suchthing)"),
        "{error}"
    );
    assert!(begun.elapsed() >= Duration::from_secs(3));
    assert_eq!(busy.lines().len(), 5);

    let broken = Fake::start(|_| (502, Vec::new(), Vec::new()));
    let few = Options {
        attempts: 3,
        ..options()
    };
    let error = refused(&place, &format!("{}/x", broken.host()), &few);
    assert!(matches!(error, Error::Status { status: 502, .. }), "{error}");
    drop(registry);
}

#[test]
fn nobody_there_is_said_soon() {
    let place = Place::new();
    let begun = Instant::now();
    let error = refused(&place, "127.0.0.1:1/x", &options());
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    let error = refused(&place, "host.invalid/x", &options());
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    // Sooner than the deadline of it all.
    assert!(begun.elapsed() < Duration::from_secs(100));
}

/// A file system of its own for a store; unmounted when dropped.
struct Disk(PathBuf);

impl Disk {
    /// `None`: not root, who alone can mount.
    fn new(place: &Place, mib: usize) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not tested: mounting needs root");
            return None;
        }
        let path = place.path("disk");
        fs::create_dir(&path).unwrap();
        let size = format!("size={mib}m");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(&path)
            .status();
        assert!(mounted.unwrap().success());
        Some(Self(path))
    }

    /// Bytes in files of the store, its documents aside.
    fn used(&self) -> u64 {
        let directories = ["blobs", "content", "partial", "tmp"].map(|name| self.0.join("store").join(name));
        let files = directories
            .iter()
            .flat_map(|directory| fs::read_dir(directory).unwrap());
        files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

#[test]
fn a_full_disk_is_an_error_that_leaves_nothing() {
    let place = Place::new();
    let (registry, _, size) = with_layer(&place, 4 * MIB);
    let name = format!("{}/x", registry.host());
    let proxy = Proxy::start(
        registry.port,
        Rules {
            delay: Duration::from_millis(2),
            ..Rules::default()
        },
    );
    let slow = format!("{}/x", proxy.host());
    let Some(disk) = Disk::new(&place, 12) else { return };
    let store = image::Store::open(&disk.0.join("store")).unwrap();

    // In the middle of the download: somebody else has filled it.
    let filler = disk.0.join("filler");
    let error = registry::pull(&store, &location(&slow), &options(), &|step| {
        if let Progress::Blob {
            state: BlobState::Moving,
            done,
            total,
            ..
        } = step
            && total == size
            && done > 0
            && !filler.exists()
        {
            fill(&filler);
        }
    });
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Image(image::Error::NoSpace { .. })), "{error}");
    assert_eq!(disk.used(), 0);

    // Known before anything is fetched.
    let before = registry.log().len();
    let error = pull(&store, &name, &options()).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Image(image::Error::NoRoom { .. } | image::Error::NoSpace { .. })
        ),
        "{error}"
    );
    assert_eq!(disk.used(), 0);
    assert!(registry.log().len() >= before);

    // The layer fits, what is made of it does not.
    fs::remove_file(&filler).unwrap();
    fs::write(&filler, vec![1; 5 * MIB]).unwrap();
    let error = pull(&store, &name, &options()).unwrap_err();
    assert!(matches!(error, Error::Image(image::Error::NoSpace { .. })), "{error}");
    assert_eq!(disk.used(), 0);

    fs::remove_file(&filler).unwrap();
    let tight = place.store("roomy");
    pull(&tight, &name, &options()).unwrap();
}
