//! Real cgroups with real processes. Needs root and a cgroup v2 hierarchy, controllers or none.

use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

const LIMIT: Duration = Duration::from_secs(90);

/// A root of the test's own, removed at its end.
struct Stage(Option<Root>);

impl Stage {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(Some(
            Root::open(&format!("basalt-test-{}-{count}", std::process::id())).unwrap(),
        ))
    }

    fn root(&self) -> &Root {
        self.0.as_ref().unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let root = self.0.take().unwrap();
        for id in root.list().unwrap() {
            let cgroup = root.find(&id).unwrap().unwrap();
            cgroup.kill().unwrap();
            cgroup.wait_empty(LIMIT).unwrap();
            root.remove(&id).unwrap();
        }
        root.remove_root().unwrap();
    }
}

fn sleeper(cgroup: &Cgroup) -> Child {
    let child = Command::new("sleep").arg("1000").spawn().unwrap();
    cgroup.directory.write("cgroup.procs", &child.id().to_string()).unwrap();
    child
}

#[test]
fn a_cgroup_is_made_populated_killed_and_removed_and_each_twice() {
    let stage = Stage::new();
    let root = stage.root();
    let cgroup = root.create("one", &Limits::default()).unwrap();
    assert_eq!(root.create("one", &Limits::default()).unwrap().path(), cgroup.path());
    assert!(!cgroup.populated().unwrap());
    cgroup.wait_empty(Duration::ZERO).unwrap();

    let mut child = sleeper(&cgroup);
    assert!(cgroup.populated().unwrap());
    assert_eq!(cgroup.processes().unwrap(), [child.id()]);
    assert_eq!(root.list().unwrap(), ["one"]);
    let error = cgroup.wait_empty(Duration::from_millis(30)).unwrap_err();
    assert!(matches!(error, Error::StillPopulated { processes: 1, .. }), "{error}");
    assert!(root.remove("one").is_err(), "it is not removed under its process");

    cgroup.kill().unwrap();
    cgroup.kill().unwrap();
    child.wait().unwrap();
    cgroup.wait_empty(LIMIT).unwrap();
    root.remove("one").unwrap();
    root.remove("one").unwrap();
    assert!(root.find("one").unwrap().is_none());
    assert!(cgroup.populated().is_err(), "what is gone does not look empty");
    assert!(root.list().unwrap().is_empty());
}

#[test]
fn a_waiter_is_woken_by_the_end_of_the_last_process() {
    let stage = Stage::new();
    let cgroup = stage.root().create("watched", &Limits::default()).unwrap();
    // The safety net takes as long every time, a busy machine does not.
    let woken = (0..10).any(|_| {
        let mut child = sleeper(&cgroup);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                cgroup.kill().unwrap();
                child.wait().unwrap();
            });
            cgroup.wait_empty(LIMIT).unwrap();
        });
        begun.elapsed() < LOOK_AGAIN
    });
    assert!(woken, "it was the safety net that woke it");
}

#[test]
fn frozen_processes_stand_still_and_are_killed_nevertheless() {
    let stage = Stage::new();
    let cgroup = stage.root().create("cold", &Limits::default()).unwrap();
    let mut child = sleeper(&cgroup);
    assert!(cgroup.freeze(LIMIT).unwrap());
    cgroup.thaw().unwrap();
    assert!(cgroup.wait_event("frozen", false, LIMIT).unwrap());
    assert!(cgroup.freeze(LIMIT).unwrap());
    cgroup.kill().unwrap();
    child.wait().unwrap();
    cgroup.wait_empty(LIMIT).unwrap();
}

#[test]
fn usage_grows_with_work() {
    let stage = Stage::new();
    let cgroup = stage.root().create("busy", &Limits::default()).unwrap();
    let before = cgroup.usage().unwrap().cpu_usec;
    let procs = cgroup.path().join("cgroup.procs");
    let work = format!(
        "echo 0 > {}; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done",
        procs.display()
    );
    assert!(Command::new("sh").args(["-c", &work]).status().unwrap().success());
    assert!(cgroup.usage().unwrap().cpu_usec > before);
}

#[test]
fn a_limit_is_set_or_its_controller_is_named() {
    let stage = Stage::new();
    let root = stage.root();
    let limits = Limits {
        pids_max: Some(17),
        ..Limits::default()
    };
    match root.create("limited", &limits) {
        Ok(cgroup) => {
            assert!(root.missing().iter().all(|missing| missing.controller != "pids"));
            assert_eq!(cgroup.directory.read("pids.max").unwrap().trim(), "17");
        }
        Err(Error::NoController { controller, .. }) => {
            assert_eq!(controller, "pids");
            assert!(root.missing().iter().any(|missing| missing.controller == "pids"));
            assert!(root.find("limited").unwrap().is_none(), "the failed one is left behind");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn names_are_single_plain_components() {
    for name in ["", ".", "..", "a/b", ".hidden", "-x", "a b", "ä", &"x".repeat(201)] {
        assert!(matches!(check_name(name), Err(Error::Name(_))), "{name}");
    }
    for name in ["basalt", "basalt-1f", "01J8Z.b_c"] {
        check_name(name).unwrap();
    }
}

#[test]
fn the_usual_mount_is_preferred() {
    let other = "30 24 0:26 / /mnt/cg rw - cgroup2 cgroup2 rw\n";
    let usual = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
    let old = "32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
    assert_eq!(find_mount(&format!("{old}{other}{usual}")), Some("/sys/fs/cgroup"));
    assert_eq!(find_mount(&format!("{old}{other}")), Some("/mnt/cg"));
    assert_eq!(find_mount(old), None);
}
