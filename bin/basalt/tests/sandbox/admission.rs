//! What a host has no room for is refused in a sentence before anything is made: memory, disks, descriptors.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use node_api::{Client, Request};
use rustix::process::{Pid, Resource, Rlimit, setrlimit};

use crate::stand_in::limit_open_files;
use crate::world::{PATIENCE, Running, World, done, json, text, wait_for};

pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "two_that_have_no_room_together_are_not_both_accepted",
        two_that_have_no_room_together_are_not_both_accepted,
    ),
    (
        "of_two_at_the_same_time_one_gets_the_last_room",
        of_two_at_the_same_time_one_gets_the_last_room,
    ),
    (
        "disks_are_promised_no_more_than_there_is",
        disks_are_promised_no_more_than_there_is,
    ),
    (
        "a_sandbox_costs_the_daemon_three_descriptors",
        a_sandbox_costs_the_daemon_three_descriptors,
    ),
    (
        "a_daemon_with_few_descriptors_refuses_and_loses_none",
        a_daemon_with_few_descriptors_refuses_and_loses_none,
    ),
    (
        "a_sandbox_goes_on_when_no_descriptor_is_left_for_its_snapshot",
        a_sandbox_goes_on_when_no_descriptor_is_left_for_its_snapshot,
    ),
];

/// Runs a verb on a host that has `memory`; it is the daemon that knows, so the first verb has to say it.
fn on(world: &World, memory: &str, words: &[&str]) -> (Option<i32>, String) {
    let output = world.command(words).env("BASALT_TEST_MEMORY", memory).output().unwrap();
    (output.status.code(), text(&output.stderr))
}

fn large(name: &str) -> Vec<&str> {
    vec![
        "run", "-d", "--disk", "0", "--memory", "5g", "--name", name, "tiny", "--", "sleep", "1000",
    ]
}

fn promised(world: &World, resource: &str) -> u64 {
    let told = json(world, &["daemon"]);
    let all = told["promised"].as_array().unwrap();
    let one = all.iter().find(|one| one["resource"] == resource).unwrap();
    one["promised"].as_u64().unwrap()
}

/// Who has dealt with the last one's end gives its descriptors back a moment later.
fn nothing_is_held(world: &World) {
    wait_for("all descriptors to be given back", || {
        (promised(world, "descriptors") == 0).then_some(())
    });
}

fn two_that_have_no_room_together_are_not_both_accepted() {
    let world = World::new("can be kept");
    let memory = "5734m";
    assert_eq!(on(&world, memory, &large("first")).0, Some(0));
    let refused = |words: &[&str], beginning: &str| {
        let (code, told) = on(&world, memory, words);
        assert_ne!(code, Some(0), "{words:?}");
        assert!(
            told.contains(beginning) && told.contains("that sandboxes can have are not promised to others"),
            "{words:?}: {told}"
        );
        assert!(
            told.contains("raise memory.overcommit (basaltd --memory-overcommit, now 1)"),
            "{told}"
        );
    };
    refused(
        &large("second"),
        "cannot run 'second': it needs 5.1 GiB of memory, and 159.3 MiB of the 5.3 GiB",
    );
    done(&world, &["snapshot", "create", "first", "kept"]);
    refused(
        &["clone", "--name", "twin", "kept"],
        "cannot run 'twin': it needs 5.1 GiB",
    );
    assert_eq!(
        done(&world, &["ps", "-aq"]).lines().count(),
        1,
        "what was refused is not there"
    );
    // One that is put back keeps what it has.
    done(&world, &["rollback", "first", "kept"]);
    let told = done(&world, &["daemon"]);
    let line = told.lines().find(|line| line.starts_with("memory ")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words, ["memory", "5.1", "GiB", "5.3", "GiB", "1"], "{told}");

    // The next daemon counts what runs.
    let daemon = world.daemon().unwrap();
    rustix::process::kill_process(pid(daemon), rustix::process::Signal::KILL).unwrap();
    world.wait_for_no_daemon();
    refused(&large("second"), "cannot run 'second'");

    // One that has ended has no memory, and gets some again if there is any.
    done(&world, &["stop", "--time", "0", "first"]);
    assert_eq!(promised(&world, "memory"), 0);
    assert_eq!(on(&world, memory, &large("second")).0, Some(0));
    refused(&["start", "first"], "cannot start 'first'");
    refused(&["rollback", "first", "kept"], "cannot roll back 'first'");
    assert_eq!(json(&world, &["inspect", "first"])[0]["state"], "exited");
    done(&world, &["rm", "--force", "second"]);
    done(&world, &["start", "first"]);
    done(&world, &["rm", "--force", "first"]);
    assert_eq!(promised(&world, "memory"), 0);
    nothing_is_held(&world);
}

fn of_two_at_the_same_time_one_gets_the_last_room() {
    let world = World::new("");
    let names = ["one", "two", "three", "four"];
    // A daemon is there already.
    assert_eq!(on(&world, "5734m", &["ps"]).0, Some(0));
    let mut runs: Vec<Running> = names.map(|name| start(world.command(&large(name)))).into();
    let ended: Vec<_> = runs.iter_mut().map(Running::end).collect();
    let accepted = ended.iter().filter(|(code, _)| *code == Some(0)).count();
    assert_eq!(accepted, 1, "{ended:?}");
    assert!(
        ended
            .iter()
            .all(|(code, told)| *code == Some(0) || told.contains("not promised to others")),
        "{ended:?}"
    );
    assert_eq!(done(&world, &["ps", "-aq"]).lines().count(), 1);
}

fn disks_are_promised_no_more_than_there_is() {
    let world = World::new("");
    let run = |name: &str| {
        let words = [
            "run", "-d", "--disk", "30g", "--memory", "64m", "--name", name, "tiny", "--", "true",
        ];
        world.command(&words).env("BASALT_TEST_DISK", "1g").output().unwrap()
    };
    assert!(run("one").status.success());
    let output = run("two");
    assert_eq!(output.status.code(), Some(125));
    let told = text(&output.stderr);
    assert!(
        told.contains(
            "cannot run 'two': it needs a disk of 30 GiB, and 19.5 GiB of the 49.5 GiB that disks can have together"
        ),
        "{told}"
    );
    assert!(
        told.contains("(1 GiB are free)") && told.contains("raise disk.overcommit (basaltd --disk-overcommit, now 50)"),
        "{told}"
    );
    // Its disk stays when it has ended.
    done(&world, &["wait", "one"]);
    assert!(!run("two").status.success());
    done(&world, &["rm", "one"]);
    assert!(run("two").status.success());
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(i32::try_from(number).unwrap()).unwrap()
}

/// What the daemon has open when nobody asks it anything.
fn open_files(world: &World) -> usize {
    let path = format!("/proc/{}/fd", world.daemon().unwrap());
    let count = || fs::read_dir(&path).unwrap().count();
    // A connection that has just ended, or a template that is being named, takes a moment.
    let mut before = count();
    let begun = Instant::now();
    let mut since = begun;
    while since.elapsed() < Duration::from_millis(300) && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
        let now = count();
        if now != before {
            (before, since) = (now, Instant::now());
        }
    }
    before
}

fn small(name: &str) -> [&str; 10] {
    [
        "run",
        "-d",
        "--disk=0",
        "--memory=64m",
        "--name",
        name,
        "tiny",
        "--",
        "sleep",
        "1000",
    ]
}

/// The daemon has so many files open, when what it verifies in the background after a clone is verified.
fn has_open(world: &World, wanted: usize) {
    let settled = || (open_files(world) == wanted).then_some(());
    wait_for(
        &format!("{wanted} descriptors of the daemon, not {}", open_files(world)),
        settled,
    );
}

/// How many it has open when that has not changed for a while: what is left of a start is over.
fn at_rest(world: &World) -> usize {
    let (mut open, mut since) = (open_files(world), Instant::now());
    wait_for("the daemon's descriptors to stay as many as they are", || {
        let now = open_files(world);
        if now != open {
            (open, since) = (now, Instant::now());
        }
        (since.elapsed() > Duration::from_secs(2)).then_some(open)
    })
}

fn a_sandbox_costs_the_daemon_three_descriptors() {
    let world = World::new("can be kept");
    done(&world, &small("first"));
    let before = at_rest(&world);
    let names = ["a", "b", "c", "d"];
    for name in names {
        done(&world, &small(name));
    }
    has_open(&world, before + 3 * names.len());
    for name in names {
        done(&world, &["rm", "--force", name]);
    }
    has_open(&world, before);
}

fn start(mut command: Command) -> Running {
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    Running(command.spawn().unwrap())
}

/// A daemon that may have 128 descriptors: it lets 16 in at once, and eight sandboxes run.
fn a_daemon_with_few_descriptors_refuses_and_loses_none() {
    const LIMIT: u64 = 128;
    let world = World::new("can be kept");
    let mut first = world.command(&["ps"]);
    let limit = Rlimit {
        current: Some(LIMIT),
        maximum: Some(LIMIT),
    };
    // SAFETY: the closure runs between fork and exec, and makes one system call.
    unsafe { first.pre_exec(move || Ok(setrlimit(Resource::Nofile, limit)?)) };
    assert!(first.output().unwrap().status.success());
    let before = open_files(&world);

    // Those who ask nothing keep nobody's descriptors: who comes then is told.
    let socket = world.path("state").join(node_api::SOCKET);
    let idle: Vec<Client> = (0..40).map(|_| Client::connect(&socket).unwrap()).collect();
    let told = wait_for("somebody to be turned away", || {
        let told = Client::connect(&socket)
            .unwrap()
            .ask(Request::Info)
            .unwrap_err()
            .to_string();
        told.contains("16 connections").then_some(told)
    });
    assert!(told.contains("LimitNOFILE="), "{told}");
    drop(idle);
    wait_for("room for somebody", || {
        Client::connect(&socket).unwrap().ask(Request::Info).ok()
    });

    // Three at a time, each of whom is told something.
    let begun = Instant::now();
    let names: Vec<String> = (0..18).map(|number| format!("box{number}")).collect();
    let (mut running, mut refused) = (Vec::new(), 0);
    for few in names.chunks(3) {
        let mut runs: Vec<_> = few
            .iter()
            .map(|name| (name, start(world.command(&small(name)))))
            .collect();
        for (name, run) in &mut runs {
            match run.end() {
                (Some(0), _) => running.push(name.clone()),
                (code, told) => {
                    assert_eq!(code, Some(125), "{told}");
                    assert!(
                        told.contains("file descriptors of the daemon") || told.contains("connections"),
                        "{told}"
                    );
                    refused += 1;
                }
            }
        }
    }
    assert!(begun.elapsed() < 3 * PATIENCE, "{:?}", begun.elapsed());
    assert_eq!((running.len(), refused), (8, 10));

    // They run, can be asked, kept and put back.
    for name in &running {
        assert_eq!(done(&world, &["exec", name, "--", "echo", "on"]), "on\n");
    }
    let one = running.first().unwrap();
    done(&world, &["snapshot", "create", one, "kept"]);
    assert_eq!(done(&world, &["exec", one, "--", "echo", "on"]), "on\n");
    done(&world, &["rollback", one, "kept"]);
    let log = fs::read_to_string(world.path("state/basaltd.log")).unwrap();
    assert_eq!(log.matches("Too many open files").count(), 0, "{log}");

    let ends: Vec<(&String, Running)> = running
        .iter()
        .map(|name| (name, start(world.command(&["rm", "--force", name]))))
        .collect();
    for (name, mut end) in ends {
        let (code, told) = end.end();
        if code != Some(0) {
            // On a slow machine the others took all of its time; what it is told to do works.
            assert!(told.contains("; ask again when other requests have ended"), "{told}");
            done(&world, &["rm", "--force", name]);
        }
    }
    nothing_is_held(&world);
    has_open(&world, before);
}

fn a_sandbox_goes_on_when_no_descriptor_is_left_for_its_snapshot() {
    let world = World::new("without descriptors can be kept");
    let words = [
        "run",
        "-d",
        "--boot",
        "--disk=64m",
        "--memory=64m",
        "--name",
        "web",
        "tiny",
        "--",
        "sleep",
        "1000",
    ];
    done(&world, &words);
    let daemon = pid(world.daemon().unwrap());
    let output = world.verb(&["snapshot", "create", "web"]);
    assert_ne!(output.status.code(), Some(0));
    let told = text(&output.stderr);
    assert!(told.contains("Too many open files"), "{told}");

    // Nobody can be let in, which is not said each time.
    let waits = Client::connect(&world.path("state").join(node_api::SOCKET)).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    limit_open_files(Some(daemon), 1024);
    let log = fs::read_to_string(world.path("state/basaltd.log")).unwrap();
    assert_eq!(log.matches("connections cannot be accepted now").count(), 1, "{log}");
    assert!(!log.contains("stands still"), "{log}");
    drop(waits);

    assert_eq!(done(&world, &["exec", "web", "--", "echo", "on"]), "on\n");
    assert_eq!(json(&world, &["inspect", "web"])[0]["state"], "running");
    assert_eq!(json(&world, &["snapshot", "ls"]).as_array().unwrap().len(), 0);
}
