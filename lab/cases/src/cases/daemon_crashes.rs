//! `kill -9` at points of a sandbox's life: of the daemon, and of the VMM. Afterwards the sandbox is whole or gone, its
//! neighbour runs on, and nothing belongs to nobody.
//!
//! One point of each kind of operation, unless `BASALT_EVERY_POINT` is set: what the daemon makes of each point of each way is
//! tested with a VMM that is simulated (`crates/node/src/sim`), and here it is real processes, sockets, cgroups, TAPs and files
//! that are found again, which are the same at all points of a kind. With the variable it is every point, of
//! `base::points::SANDBOX` and of a way that a sandbox can come to it; one that no operation here comes to fails the case. That
//! takes some twenty minutes, and `--patience 4`.

use std::collections::BTreeSet;
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use base::points;

use crate::basalt::expect_code;
use crate::daemon::{Daemon, PATIENCE, wait_for};
use crate::{Case, Host};

pub(crate) const DAEMON: Case = Case {
    name: "kill-daemon-at-points",
    limit: Duration::from_secs(600),
    host: daemon_dies,
    guest: None,
};

pub(crate) const VMM: Case = Case {
    name: "kill-vmm-at-points",
    limit: Duration::from_secs(400),
    host: vmm_dies,
    guest: None,
};

/// The sandbox that things are done to, and the one beside it.
const VICTIM: &str = "victim";
const NEIGHBOUR: &str = "neighbour";

/// A template that is built.
const BUILT: &str = "built";

/// A snapshot of the first.
const KEPT: &str = "kept";

/// What brings a daemon to a point: the verb, and whether the victim must run before.
fn operation(point: &str) -> Option<&'static [&'static str]> {
    Some(match point.split_once('.')?.0 {
        "create" | "start" => &[],
        "exec" => &["exec", VICTIM, "true"],
        "pause" if point == points::PAUSE_RESUMED => &["unpause", VICTIM],
        "pause" => &["pause", VICTIM],
        "suspend" => &["suspend", VICTIM],
        "resume" => &["resume", VICTIM],
        "snapshot" if point == points::SNAPSHOT_HIDDEN => &["snapshot", "rm", KEPT],
        "snapshot" => &["snapshot", "create", VICTIM, KEPT],
        "rollback" | "restore" => &["rollback", VICTIM, KEPT],
        "move" => &["move", "--class", "dedicated", VICTIM],
        "stop" => &["stop", "--time", "1s", VICTIM],
        "end" => &["kill", VICTIM],
        "remove" => &["rm", "--force", VICTIM],
        "network" => &["network", "update", VICTIM, "--egress-deny", "0.0.0.0/0"],
        _ => return None,
    })
}

/// Points that somebody comes to who builds a template, besides those of its sandbox.
fn is_of_builds(point: &str) -> bool {
    point.starts_with("build.")
}

/// Brings somebody to the point who builds a template: the second of this content and name.
fn approach_build(daemon: &Daemon<'_>, host: &Host, point: &str) -> Result<Child> {
    let words = [
        "template",
        "build",
        "--memory",
        "128m",
        "--from",
        &host.digest,
        "--name",
        BUILT,
    ];
    let words = [words.as_slice(), &["--force", "--run", "true"]].concat();
    daemon.ok(&words)?;
    daemon.hold(point)?;
    daemon.start(&words)
}

/// Brings somebody to the point, in the background.
fn approach(daemon: &Daemon<'_>, host: &Host, point: &str) -> Result<Child> {
    if is_of_builds(point) {
        return approach_build(daemon, host, point);
    }
    if point == points::ROLLBACK_ENDED {
        // One that runs is put back in place.
        return approach_ended(daemon, point);
    }
    let words = operation(point).with_context(|| format!("no operation comes to the point {point}"))?;
    if words.is_empty() {
        daemon.hold(point)?;
        return run(daemon, host, &["--boot"]);
    }
    daemon.idle(VICTIM)?;
    let of_one = words[0] == "rollback" || point == points::SNAPSHOT_HIDDEN;
    if of_one {
        daemon.ok(&["snapshot", "create", VICTIM, KEPT])?;
    }
    if point == points::PAUSE_RESUMED {
        daemon.ok(&["pause", VICTIM])?;
    }
    if words[0] == "resume" {
        daemon.ok(&["suspend", VICTIM])?;
    }
    daemon.hold(point)?;
    daemon.start(words)
}

/// Runs the victim, in the background.
fn run(daemon: &Daemon<'_>, host: &Host, options: &[&str]) -> Result<Child> {
    let mut words = Daemon::idle_arguments(VICTIM, &host.digest);
    words.splice(1..1, options.iter().map(|&option| option.to_owned()));
    daemon.start(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Points that a clone comes to on its way, its VMM first; the others are those of any start.
const OF_CLONES: &[&str] = &[
    points::START_SPAWNED,
    points::START_RECORDED,
    points::CREATE_DISK,
    points::START_NETWORK,
    points::START_SOCKETS,
    points::RESTORE_MADE,
    points::RESTORE_RESUMED,
    points::RESTORE_REIDENTIFIED,
];

/// Brings somebody to the point with a clone for a victim.
fn approach_clone(daemon: &Daemon<'_>, point: &str) -> Result<Child> {
    const ORIGIN: &str = "origin";
    daemon.idle(ORIGIN)?;
    daemon.ok(&["snapshot", "create", ORIGIN, KEPT])?;
    daemon.ok(&["rm", "--force", ORIGIN])?;
    daemon.hold(point)?;
    daemon.start(&["clone", "--name", VICTIM, KEPT])
}

/// Points that a sandbox comes to which has ended and is put back: another VMM does it.
const OF_ENDED: &[&str] = &[points::ROLLBACK_DISK, points::RESTORE_MADE];

/// Brings somebody to the point who puts a victim back that has ended.
fn approach_ended(daemon: &Daemon<'_>, point: &str) -> Result<Child> {
    daemon.idle(VICTIM)?;
    daemon.ok(&["snapshot", "create", VICTIM, KEPT])?;
    daemon.ok(&["kill", VICTIM])?;
    daemon.hold(point)?;
    daemon.start(&["rollback", VICTIM, KEPT])
}

/// Points that a sandbox comes to which is cloned of a template.
const OF_TEMPLATES: &[&str] = &[
    points::START_RECORDED,
    points::RESTORE_MADE,
    points::RESTORE_REIDENTIFIED,
];

/// Points that a sandbox comes to of which a template is made.
const OF_NEW_TEMPLATES: &[&str] = &[points::SNAPSHOT_PAUSED, points::SNAPSHOT_THAWED];

/// How somebody comes to a point.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// By the verb that is meant.
    Verb,
    /// With a clone for a victim.
    Clone,
    /// With one that has ended and is put back.
    Ended,
    /// With one that is cloned of a template.
    Template,
    /// With the first one, of which a template is made.
    NewTemplate,
}

impl Way {
    fn approach(self, daemon: &Daemon<'_>, host: &Host, point: &str) -> Result<Child> {
        match self {
            Self::Verb => approach(daemon, host, point),
            Self::Clone => approach_clone(daemon, point),
            Self::Ended => approach_ended(daemon, point),
            Self::Template => {
                daemon.wait_for_templates(1)?;
                daemon.hold(point)?;
                run(daemon, host, &[])
            }
            Self::NewTemplate => {
                daemon.ok(&["template", "prune", "--all"])?;
                daemon.hold(point)?;
                run(daemon, host, &[])
            }
        }
    }
}

/// The victim is whole (it answers, or can be started) or gone; then it is removed, and nothing is left.
fn examine(daemon: &Daemon<'_>, neighbour: &str, point: &str) -> Result<()> {
    expect_code(&daemon.run(&["exec", NEIGHBOUR, "true"])?, 0).context("the neighbour does not run on")?;
    let found = daemon.find(VICTIM)?;
    let state = found
        .as_ref()
        .and_then(|found| found["state"].as_str())
        .unwrap_or("gone");
    log::info!("after the point {point} the sandbox is {state}");
    match state {
        "gone" => (),
        "running" => expect_code(&daemon.run(&["exec", VICTIM, "true"])?, 0)?,
        "paused" => {
            daemon.ok(&["unpause", VICTIM])?;
            expect_code(&daemon.run(&["exec", VICTIM, "true"])?, 0)?;
        }
        "suspended" => {
            daemon.ok(&["resume", VICTIM])?;
            expect_code(&daemon.run(&["exec", VICTIM, "true"])?, 0)?;
        }
        "exited" => {
            daemon.ok(&["start", VICTIM])?;
            expect_code(&daemon.run(&["exec", VICTIM, "true"])?, 0)?;
        }
        other => bail!("the sandbox is stuck as {other}"),
    }
    if state != "gone" {
        daemon.ok(&["rm", "--force", VICTIM])?;
    }
    if is_of_builds(point) {
        // The first one or the second, but one of them.
        expect_code(&daemon.run(&["run", "--template", BUILT, "true"])?, 0)?;
        daemon.ok(&["template", "rm", BUILT])?;
    }
    whole_or_gone(daemon)?;
    daemon.expect_no_strangers(&[neighbour])
}

/// A snapshot that is there can be used, and nothing is left of one that is not. Then it is removed.
fn whole_or_gone(daemon: &Daemon<'_>) -> Result<()> {
    let places: Vec<String> = std::fs::read_dir(daemon.state.join("snapshots"))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    for name in &places {
        ensure!(name == KEPT, "the snapshots' directory has {name}");
        for file in ["record.json", "state", "memory", "disk"] {
            let path = daemon.state.join("snapshots").join(name).join(file);
            ensure!(std::fs::metadata(&path)?.len() > 0, "{} is empty", path.display());
        }
        daemon.ok(&["snapshot", "rm", name])?;
    }
    // What was not finished is gone, and what is there can be used: the next victim is made of it. The neighbour's may still be
    // on its way to the disk.
    let (mut templates, mut listed) = (Vec::new(), Vec::new());
    let whole = wait_for("the templates' directory to have what is listed", || {
        templates = std::fs::read_dir(daemon.state.join("templates"))?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<Vec<String>>>()?;
        listed = daemon.templates()?;
        Ok(templates.len() == listed.len() && listed.iter().all(|id| templates.contains(id)))
    });
    whole.with_context(|| format!("it has {templates:?}, of which {listed:?} are listed"))
}

/// A point, and how somebody comes to it.
type Place = (&'static str, Way);

/// Where the daemon dies: one place of each kind of operation, where most of it is there and least of it is written down.
const SAMPLE: &[Place] = &[
    // A boot: a VMM runs of which only its cgroup tells.
    (points::START_SPAWNED, Way::Verb),
    // A clone: its machine runs, its commands stand still.
    (points::RESTORE_RESUMED, Way::Clone),
    // A template of the first sandbox: that one is held, paused, and has to go on.
    (points::SNAPSHOT_PAUSED, Way::NewTemplate),
    // A snapshot: all that the VMM writes is there, the disk is not; the sandbox stands still.
    (points::SNAPSHOT_SAVED, Way::Verb),
    // A rollback in place: the disk is the snapshot's, the memory is not.
    (points::ROLLBACK_DISK, Way::Verb),
    // A move: there is no machine, only what it was saved to.
    (points::MOVE_ENDED, Way::Verb),
    // Suspended, and its VMM is there still.
    (points::SUSPEND_SAVED, Way::Verb),
    // A resume: its machine is there, and there is no way back to what was saved.
    (points::RESUME_SPENT, Way::Verb),
    // A build: the template is whole and has no name.
    (points::BUILD_WRITTEN, Way::Verb),
    // A stop: the command has been asked, and nobody counts its grace period any more.
    (points::STOP_SIGNALLED, Way::Verb),
    // A removal: nothing of a VM is left, its files are.
    (points::REMOVE_CLEARED, Way::Verb),
];

/// Whether it is to be each of them.
fn every_point() -> bool {
    std::env::var_os("BASALT_EVERY_POINT").is_some()
}

fn places(sets: &[(&'static [&'static str], Way)]) -> Vec<Place> {
    let sets = sets.iter();
    sets.flat_map(|(points, way)| points.iter().map(|point| (*point, *way)))
        .collect()
}

fn daemon_dies(host: &Host) -> Result<()> {
    let daemon = Daemon::new(host)?;
    let neighbour = daemon.idle(NEIGHBOUR)?;
    let mut reached = BTreeSet::new();
    let all = if every_point() {
        places(&[
            (points::SANDBOX, Way::Verb),
            (OF_CLONES, Way::Clone),
            (OF_ENDED, Way::Ended),
            (OF_TEMPLATES, Way::Template),
            (OF_NEW_TEMPLATES, Way::NewTemplate),
        ])
    } else {
        SAMPLE.to_vec()
    };
    for (point, way) in all {
        let step = || -> Result<()> {
            let mut client = way.approach(&daemon, host, point)?;
            daemon.reached(&mut client, point)?;
            daemon.kill()?;
            daemon.release(point)?;
            finish(&mut client)?;
            examine(&daemon, &neighbour, point)
        };
        step().with_context(|| format!("the daemon was killed at {point} ({way:?})"))?;
        reached.insert(point);
    }
    let least = if every_point() {
        points::SANDBOX.len()
    } else {
        SAMPLE.len()
    };
    ensure!(reached.len() == least, "{} points, not {least}", reached.len());
    daemon.end()
}

/// The points at which the victim has a VMM.
const WITH_VMM: &[&str] = &[
    "start.spawned",
    "start.recorded",
    "start.created",
    "start.started",
    "start.agent",
    "start.prepared",
    "start.command",
    "start.running",
    "exec.connected",
    "pause.paused",
    "pause.resumed",
    "network.recorded",
    "suspend.written",
    "suspend.saved",
    "resume.restored",
    "resume.spent",
    "snapshot.begun",
    "snapshot.held",
    "snapshot.frozen",
    "snapshot.paused",
    "snapshot.saved",
    "snapshot.disk",
    "snapshot.resumed",
    "snapshot.thawed",
    "snapshot.written",
    "rollback.begun",
    "rollback.disk",
    "build.settled",
    "restore.made",
    "restore.resumed",
    "restore.reidentified",
    "stop.recorded",
    "stop.signalled",
    "remove.recorded",
];

/// The same of clones, whose VMM waits while everything else is made.
const OF_CLONES_WITH_VMM: &[&str] = &[
    points::CREATE_DISK,
    points::START_SOCKETS,
    points::RESTORE_MADE,
    points::RESTORE_RESUMED,
];

/// Where the VMM dies, as [`SAMPLE`] says for the daemon: while it boots, is restored, is saved, is put back and is stopped.
const VMM_SAMPLE: &[Place] = &[
    (points::START_STARTED, Way::Verb),
    (points::RESTORE_MADE, Way::Clone),
    (points::SNAPSHOT_PAUSED, Way::Verb),
    (points::ROLLBACK_DISK, Way::Verb),
    (points::STOP_SIGNALLED, Way::Verb),
];

fn vmm_dies(host: &Host) -> Result<()> {
    let daemon = Daemon::new(host)?;
    let neighbour = daemon.idle(NEIGHBOUR)?;
    let before = daemon.descriptors()?;
    let all = if every_point() {
        places(&[
            (WITH_VMM, Way::Verb),
            (OF_CLONES_WITH_VMM, Way::Clone),
            (&[points::RESTORE_MADE], Way::Ended),
            (OF_NEW_TEMPLATES, Way::NewTemplate),
        ])
    } else {
        VMM_SAMPLE.to_vec()
    };
    for (point, way) in all {
        let step = || -> Result<()> {
            ensure!(points::SANDBOX.contains(&point), "there is no such point");
            let mut client = way.approach(&daemon, host, point)?;
            daemon.reached(&mut client, point)?;
            let mut killed = false;
            for pid in daemon.processes("basalt-vmm")? {
                let cgroup = std::fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_nonzero()))?;
                if !cgroup.contains(neighbour.as_str()) {
                    crate::daemon::kill(pid)?;
                    killed = true;
                }
            }
            // On the way to its removal the VMM has been killed already.
            ensure!(killed || point.starts_with("remove."), "there was no VMM to kill");
            daemon.release(point)?;
            finish(&mut client)?;
            settle(&daemon)?;
            examine(&daemon, &neighbour, point)
        };
        step().with_context(|| format!("the VMM was killed at {point} ({way:?})"))?;
    }
    // Threads that served connections may take a moment.
    let mut after = 0;
    let held = wait_for("the daemon to close what it had open", || {
        after = daemon.descriptors()?;
        Ok(after <= before)
    });
    held.with_context(|| format!("it has {after} descriptors open, before there were {before}"))?;
    daemon.end()
}

/// Waits for the client's end, whatever it is: it must not hang.
fn finish(client: &mut Child) -> Result<()> {
    let mut ended = None;
    let waited = wait_for("the client's end", || {
        ended = client.try_wait()?;
        Ok(ended.is_some())
    });
    if waited.is_err() {
        client.kill()?;
        client.wait()?;
    }
    waited
}

/// The end of a VMM is noticed soon.
fn settle(daemon: &Daemon<'_>) -> Result<()> {
    let end = std::time::Instant::now() + PATIENCE;
    loop {
        let state = daemon
            .find(VICTIM)?
            .map(|found| found["state"].as_str().unwrap_or_default().to_owned());
        if matches!(state.as_deref(), None | Some("exited")) {
            return Ok(());
        }
        ensure!(
            std::time::Instant::now() < end,
            "the VMM is dead and the sandbox is {state:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
