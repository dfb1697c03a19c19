//! A state directory on a full file system: what is there is listed and removed, nothing is made, and a VM that its VMM has
//! stopped is shown so and goes on when there is space.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::process::Stdio;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::world::{Running, World, done, json, text, wait_for};

pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "a_full_disk_is_cleared_by_a_daemon_that_starts_there",
        a_full_disk_is_cleared_by_a_daemon_that_starts_there,
    ),
    (
        "a_guest_without_space_is_shown_so_and_goes_on",
        a_guest_without_space_is_shown_so_and_goes_on,
    ),
];

/// A world whose state directory is a file system of 64 MiB in memory.
struct Small(World);

impl Small {
    fn new(play: &str) -> Self {
        Self(World::prepared(play, |top| {
            let state = top.join("state");
            fs::create_dir(&state).unwrap();
            mount("tmpfs", &state, "tmpfs", MountFlags::empty(), c"size=64m").unwrap();
        }))
    }

    fn fill(&self) {
        let mut file = File::create(self.0.path("state/filling")).unwrap();
        let full = loop {
            if let Err(error) = file.write_all(&[1; 4096]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::StorageFull);
    }

    fn empty(&self) {
        fs::remove_file(self.0.path("state/filling")).unwrap();
    }

    fn kill_daemon(&self) {
        let daemon = wait_for("the daemon", || self.0.daemon());
        let pid = rustix::process::Pid::from_raw(i32::try_from(daemon).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        self.0.wait_for_no_daemon();
    }

    fn run(&self, name: &str, command: &[&str]) {
        let words = ["run", "-d", "--disk", "0", "--name", name, "tiny", "--"];
        done(&self.0, &[&words, command].concat());
    }

    /// A verb that is refused; what it says.
    #[track_caller]
    fn refused(&self, words: &[&str]) -> String {
        let output = self.0.verb(words);
        assert!(!output.status.success(), "{words:?} was done");
        text(&output.stderr)
    }

    #[track_caller]
    fn wait_for_state(&self, wanted: &str) {
        wait_for(wanted, || done(&self.0, &["ps"]).contains(wanted).then_some(()));
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Whoever has files open there is ended when the world goes.
        unmount(self.0.path("state"), UnmountFlags::DETACH).unwrap();
    }
}

fn a_full_disk_is_cleared_by_a_daemon_that_starts_there() {
    let small = Small::new("can be kept");
    small.run("idle", &["sleep", "1000"]);
    small.run("ended", &["true"]);
    wait_for("an end", || {
        done(&small.0, &["ps", "--all"]).contains("exited (0)").then_some(())
    });
    done(&small.0, &["snapshot", "create", "idle", "kept"]);
    small.fill();
    for words in [
        &["run", "--disk", "0", "tiny", "--", "true"][..],
        &["clone", "kept"],
        &["snapshot", "create", "idle"],
    ] {
        let said = small.refused(words);
        for part in ["no space left for a s", "needed", "free in", "`basalt prune`"] {
            assert!(said.contains(part), "{words:?}: {said}");
        }
    }
    let there = json(&small.0, &["ps", "--all"]);
    assert_eq!(there.as_array().unwrap().len(), 2, "nothing was made: {there}");

    // With everything taken, the reserve too, and no daemon that has anything open.
    small.kill_daemon();
    fs::remove_file(small.0.path("state/reserve")).unwrap();
    small.empty();
    small.fill();
    let there = json(&small.0, &["ps", "--all"]);
    let states: Vec<_> = there
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["state"].clone())
        .collect();
    assert_eq!(states, ["running", "exited"], "{there}");
    done(&small.0, &["exec", "idle", "true"]);
    done(&small.0, &["snapshot", "rm", "kept"]);
    done(&small.0, &["prune"]);
    done(&small.0, &["rm", "--force", "idle"]);
    done(&small.0, &["template", "prune", "--all"]);
    done(&small.0, &["rmi", "tiny"]);
    for verb in [&["ps", "--all"][..], &["snapshot", "ls"], &["images"]] {
        assert_eq!(json(&small.0, verb), serde_json::json!([]), "{verb:?}");
    }
    small.kill_daemon();
    assert_eq!(json(&small.0, &["ps", "--all"]), serde_json::json!([]));
    small.empty();
    wait_for("the reserve", || small.0.path("state/reserve").exists().then_some(()));
}

fn a_guest_without_space_is_shown_so_and_goes_on() {
    let small = Small::new("no space");
    small.run("writer", &["sleep", "1000"]);
    let mut events = small.0.command(&["events"]);
    let mut events = Running(events.stdout(Stdio::piped()).spawn().unwrap());
    let mut told = BufReader::new(events.0.stdout.take().unwrap()).lines();
    small.fill();
    // Whoever asks the stand-in for its metrics has it stop.
    let stop = || {
        done(&small.0, &["stats", "--no-stream", "writer"]);
        small.wait_for_state("paused (no space)");
    };
    stop();
    assert_eq!(json(&small.0, &["inspect", "writer"])[0]["pause_reason"], "no-space");
    for words in [&["exec", "writer", "true"][..], &["snapshot", "create", "writer"]] {
        let said = small.refused(words);
        assert!(
            said.contains("sandbox writer is paused, as there is no space left"),
            "{said}"
        );
    }
    // The next daemon finds it so, and lets it go on when there is space and not before.
    small.kill_daemon();
    small.wait_for_state("paused (no space)");
    small.empty();
    small.wait_for_state("running");
    done(&small.0, &["exec", "writer", "true"]);

    // One that somebody has paused stays so.
    small.fill();
    stop();
    done(&small.0, &["pause", "writer"]);
    assert!(!done(&small.0, &["ps"]).contains("no space"));
    small.empty();
    std::thread::sleep(std::time::Duration::from_secs(3));
    small.wait_for_state("paused");
    done(&small.0, &["unpause", "writer"]);
    small.wait_for_state("running");

    // One that is stopped so can be ended.
    small.fill();
    stop();
    done(&small.0, &["stop", "writer"]);
    done(&small.0, &["rm", "writer"]);
    let mut kinds = Vec::new();
    while kinds.last().is_none_or(|kind| kind != "pause") && kinds.len() < 8 {
        let Some(Ok(line)) = told.next() else { break };
        kinds.extend(line.split(' ').nth(1).map(str::to_owned));
    }
    // The daemon that told them was killed: its last word is the first stop.
    assert_eq!(kinds, ["no-space"], "events");
}
