//! Cases of snapshots: what the daemon does with a VM that can be kept.

use std::fs;
use std::path::PathBuf;

use crate::cases::kill;
use crate::daemons::{detached, wait_for_state};
use crate::stand_in::shape_of;
use crate::world::{World, done, json, text, wait_for};

/// A verb that must be refused; what it says.
#[track_caller]
pub(crate) fn refused(world: &World, words: &[&str]) -> String {
    let output = world.verb(words);
    assert_ne!(output.status.code(), Some(0), "{words:?}");
    text(&output.stderr)
}

/// What is in the directory of snapshots.
pub(crate) fn files(world: &World) -> Vec<String> {
    let entries = fs::read_dir(world.path("state/snapshots")).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub(crate) fn a_sandbox_is_kept_and_goes_on() {
    let world = World::new("can be kept");
    let script = "while :; do echo x; sleep 0.02; done";
    let words = [
        "run", "-d", "--boot", "--disk", "64m", "--name", "web", "tiny", "--", "sh", "-c", script,
    ];
    let id = done(&world, &words).trim().to_owned();
    fs::write(
        world.path("state/sandboxes").join(&id).join("disk"),
        "what it has written",
    )
    .unwrap();
    assert_eq!(done(&world, &["snapshot", "create", "web"]), "web-1\n");
    assert_eq!(done(&world, &["snapshot", "create", "web", "mine"]), "mine\n");
    assert_eq!(done(&world, &["snapshot", "create", &id[..5]]), "web-2\n");
    // It was frozen and re-identified three times, and is the same.
    let told = done(&world, &["logs", "--console", "web"]);
    assert_eq!(told, "settled\nre-identified as the same -\n".repeat(3));
    let count = || world.verb(&["logs", "web"]).stdout.len();
    let before = count();
    wait_for("its command to go on", || (count() > before).then_some(()));
    done(&world, &["exec", "web", "true"]);

    let place = world.path("state/snapshots/mine");
    let read = |name: &str| fs::read_to_string(place.join(name)).unwrap();
    assert_eq!(read("disk"), "what it has written");
    assert_eq!(read("memory"), "memory");
    let shape = shape_of(&fs::read(place.join("state")).unwrap()).unwrap();
    assert!(text(&shape).contains("writable block"), "{}", text(&shape));
    let inspected = done(&world, &["--json", "snapshot", "inspect", "mine"]);
    let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
    let mine = &inspected[0];
    assert_eq!(
        (mine["name"].as_str(), mine["sandbox"].as_str()),
        (Some("mine"), Some(id.as_str()))
    );
    for program in ["vmm", "kernel", "initramfs"] {
        assert_eq!(mine["programs"][program].as_str().map(str::len), Some(64), "{program}");
    }
    let listed = done(&world, &["snapshot", "ls"]);
    assert!(listed.starts_with("NAME") && listed.lines().count() == 4, "{listed}");

    // It outlives its sandbox, and its image with it.
    done(&world, &["rm", "-f", "web"]);
    assert_eq!(done(&world, &["snapshot", "rm", "web-1", "web-2"]), "web-1\nweb-2\n");
    let kept = refused(&world, &["rmi", "tiny"]);
    assert!(
        kept.contains("used by mine: remove that first (`basalt snapshot rm mine`)"),
        "{kept}"
    );
    done(&world, &["snapshot", "rm", "mine"]);
    assert!(files(&world).is_empty());
    done(&world, &["rmi", "tiny"]);
}

pub(crate) fn what_cannot_be_kept_is_refused_in_a_sentence() {
    let world = World::new("can be kept");
    let told = refused(&world, &["snapshot", "create", "web"]);
    assert!(told.contains("there is no sandbox `web`"), "{told}");
    detached(&world, "web", "sleep 1000");
    let told = refused(&world, &["snapshot", "create", "web", "../x"]);
    assert!(told.contains("cannot be a snapshot's name"), "{told}");
    done(&world, &["snapshot", "create", "web", "mine"]);
    let told = refused(&world, &["snapshot", "create", "web", "mine"]);
    assert!(
        told.contains("there is a snapshot `mine`: choose another name"),
        "{told}"
    );
    done(&world, &["pause", "web"]);
    let told = refused(&world, &["snapshot", "create", "web"]);
    assert!(told.contains("web is paused: let it go on"), "{told}");
    done(&world, &["unpause", "web"]);
    let shared = world.path("shared");
    fs::create_dir(&shared).unwrap();
    let volume = format!("{}:/x", shared.display());
    done(
        &world,
        &[
            "run", "-d", "--boot", "--disk", "0", "--name", "sharing", "-v", &volume, "tiny", "--", "sleep", "1000",
        ],
    );
    // What is in its volumes stays here, and so does it.
    done(&world, &["snapshot", "create", "sharing", "shared"]);
    done(&world, &["clone", "--name", "twin", "shared"]);
    let twin = &json(&world, &["inspect", "twin"])[0];
    assert_eq!(twin["volumes"][0]["directory"], shared.display().to_string());
    let told = refused(&world, &["snapshot", "save", "-o", "/nowhere", "shared"]);
    assert!(
        told.contains("the snapshot `shared` stays on this host") && told.contains("a volume at /x"),
        "{told}"
    );
    fs::remove_dir(&shared).unwrap();
    let told = refused(&world, &["clone", "shared"]);
    assert!(told.contains("is not there: make it first"), "{told}");
    done(&world, &["snapshot", "rm", "shared"]);
    for verb in [&["snapshot", "rm", "no"][..], &["snapshot", "inspect", "no"]] {
        let told = refused(&world, verb);
        assert!(
            told.contains("there is no snapshot `no`: `basalt snapshot ls`"),
            "{told}"
        );
    }
    assert_eq!(files(&world), ["mine"]);
}

pub(crate) fn a_snapshot_that_fails_leaves_a_sandbox_that_runs() {
    let world = World::new("cannot be kept");
    detached(&world, "web", "while :; do echo x; sleep 0.02; done");
    let told = refused(&world, &["snapshot", "create", "web"]);
    assert!(told.contains("the state cannot be written"), "{told}");
    assert!(files(&world).is_empty());
    let count = || world.verb(&["logs", "web"]).stdout.len();
    let before = count();
    wait_for("its command to go on", || (count() > before).then_some(()));
    done(&world, &["exec", "web", "true"]);
    done(&world, &["snapshot", "ls"]);
}

pub(crate) fn clones_go_on_with_names_of_their_own() {
    let world = World::new("can be kept");
    let words = [
        "run", "-d", "--boot", "--disk", "64m", "--name", "web", "-l", "a=1", "tiny", "--", "sleep", "1000",
    ];
    let id = done(&world, &words).trim().to_owned();
    let disk = |id: &str| world.path("state/sandboxes").join(id).join("disk");
    fs::write(disk(&id), "what it has written").unwrap();
    done(&world, &["snapshot", "create", "web", "mine"]);
    fs::write(disk(&id), "what it writes later").unwrap();
    let one = done(&world, &["clone", "--name", "one", "mine"]).trim().to_owned();
    let two = done(
        &world,
        &["clone", "--name", "two", "--hostname", "second", "-l", "b=2", "mine"],
    );
    let two = two.trim().to_owned();
    // Not of their sandbox any more, and not even of the snapshot.
    done(&world, &["rm", "-f", "web"]);
    done(&world, &["snapshot", "rm", "mine"]);
    let mut ids = Vec::new();
    for (name, id, hostname) in [("one", &one, one.as_str()), ("two", &two, "second")] {
        let console = done(&world, &["logs", "--console", name]);
        let reidentified = console.lines().find(|line| !line.starts_with("writes ")).unwrap();
        let words: Vec<&str> = reidentified.split_whitespace().collect();
        assert_eq!(words[..3], ["re-identified", "as", hostname], "{console}");
        assert_eq!((words.len(), words[3].len()), (4, 32), "{console}");
        ids.push(words[3].to_owned());
        assert_eq!(fs::read_to_string(disk(id)).unwrap(), "what it has written");
        done(&world, &["exec", name, "true"]);
        let inspected: serde_json::Value = serde_json::from_str(&done(&world, &["--json", "inspect", name])).unwrap();
        assert_eq!(inspected[0]["clone_of"], "mine");
        assert_eq!(inspected[0]["config"]["labels"]["a"], "1");
    }
    assert_ne!(ids[0], ids[1], "both have one machine id");
    // They begin as any other does when they have ended.
    done(&world, &["kill", "one"]);
    done(&world, &["start", "one"]);
    done(&world, &["exec", "one", "true"]);
    let told = refused(&world, &["clone", "mine"]);
    assert!(told.contains("there is no snapshot `mine`"), "{told}");
    let told = refused(&world, &["clone", "--name", "two", "no"]);
    assert!(told.contains("there is no snapshot `no`"), "{told}");
    assert_eq!(done(&world, &["ps", "-aq"]).lines().count(), 2);
}

pub(crate) fn a_sandbox_is_put_back() {
    let world = World::new("can be kept");
    let id = done(
        &world,
        &[
            "run", "-d", "--boot", "--disk", "64m", "--name", "web", "tiny", "--", "sleep", "1000",
        ],
    );
    let id = id.trim();
    let disk = world.path("state/sandboxes").join(id).join("disk");
    fs::write(&disk, "what it has written").unwrap();
    done(&world, &["snapshot", "create", "web", "mine"]);
    fs::write(&disk, "what it writes later").unwrap();
    let before = world.vmm();
    assert_eq!(done(&world, &["rollback", "web", "mine"]).trim(), id);
    // It goes on from the snapshot's memory since that was taken: the same VMM puts it back.
    assert_eq!(world.vmm(), before);
    assert_eq!(fs::read_to_string(&disk).unwrap(), "what it has written");
    done(&world, &["exec", "web", "true"]);
    let console = done(&world, &["logs", "--console", "web"]);
    assert_eq!(
        console,
        "settled\nre-identified as the same -\nre-identified as the same -\n"
    );
    // Of what has ended, too, and again.
    done(&world, &["kill", "web"]);
    done(&world, &["rollback", "web", "mine"]);
    done(&world, &["exec", "web", "true"]);
    done(&world, &["pause", "web"]);
    done(&world, &["rollback", "web", "mine"]);
    done(&world, &["exec", "web", "true"]);
    detached(&world, "other", "sleep 1000");
    let told = refused(&world, &["rollback", "other", "mine"]);
    assert!(
        told.contains("`mine` is of web, not of other: `basalt clone mine`"),
        "{told}"
    );
    done(&world, &["exec", "other", "true"]);
    // Of another memory, and so by another VMM.
    done(&world, &["snapshot", "create", "web", "later"]);
    let before = world.vmms();
    done(&world, &["rollback", "web", "mine"]);
    assert_ne!(world.vmms(), before);
    done(&world, &["exec", "web", "true"]);
    done(&world, &["rollback", "web", "later"]);
    // One that cannot be restored has ended, and can be started.
    fs::write(world.path("state/snapshots/mine/state"), "another machine").unwrap();
    let told = refused(&world, &["rollback", "web", "mine"]);
    assert!(told.contains("these are not the devices"), "{told}");
    wait_for_state(&world, "web", "exited");
    let told = refused(&world, &["clone", "--name", "twin", "mine"]);
    assert!(told.contains("these are not the devices"), "{told}");
    assert_eq!(
        done(&world, &["ps", "-aq"]).lines().count(),
        2,
        "something is left of the clone"
    );
    done(&world, &["start", "web"]);
    done(&world, &["exec", "web", "true"]);
}

pub(crate) fn a_rollback_that_fails_costs_as_little_as_it_can() {
    let world = World::new("can be kept");
    let words = [
        "run", "-d", "--boot", "--disk", "64m", "--name", "web", "tiny", "--", "sleep", "1000",
    ];
    let id = done(&world, &words);
    let disk = world.path("state/sandboxes").join(id.trim()).join("disk");
    done(&world, &["snapshot", "create", "web", "mine"]);
    fs::write(&disk, "what it writes later").unwrap();
    let place = world.path("state/snapshots/mine");
    // What can be seen before is seen before, and the sandbox runs on.
    fs::rename(place.join("memory"), place.join("elsewhere")).unwrap();
    let told = refused(&world, &["rollback", "web", "mine"]);
    assert!(told.contains("a file beside it is missing"), "{told}");
    done(&world, &["exec", "web", "true"]);
    fs::rename(place.join("elsewhere"), place.join("memory")).unwrap();
    // So is what the VMM sees, if its memory is the snapshot's.
    let state = fs::read(place.join("state")).unwrap();
    fs::write(place.join("state"), "something else").unwrap();
    let told = refused(&world, &["rollback", "web", "mine"]);
    assert!(told.contains("these are not the devices of the snapshot"), "{told}");
    wait_for_state(&world, "web", "running");
    done(&world, &["exec", "web", "true"]);
    assert_eq!(fs::read_to_string(&disk).unwrap(), "what it writes later");
    fs::write(place.join("state"), state).unwrap();
    // What only another VMM could see costs the machine that ran, but no file.
    done(&world, &["snapshot", "create", "web", "later"]);
    fs::write(place.join("state"), "something else").unwrap();
    let told = refused(&world, &["rollback", "web", "mine"]);
    assert!(told.contains("these are not the devices of the snapshot"), "{told}");
    wait_for_state(&world, "web", "exited");
    assert_eq!(fs::read_to_string(&disk).unwrap(), "what it writes later");
    let beside = disk.with_extension("partial");
    assert!(!beside.exists());
    done(&world, &["start", "web"]);
    // What a daemon leaves that dies on the way is removed by the next.
    fs::write(&beside, "the snapshot's").unwrap();
    kill(world.daemon().unwrap());
    world.wait_for_no_daemon();
    // Its socket may be there for a moment longer than it.
    wait_for("another daemon", || {
        world.verb(&["exec", "web", "true"]).status.success().then_some(())
    });
    assert!(!beside.exists());
    assert_eq!(fs::read_to_string(&disk).unwrap(), "what it writes later");
}

/// At each of these the daemon is killed; the next one must find the sandbox running, and the snapshot whole or not at all.
const POINTS: &[(&str, bool)] = &[
    ("snapshot.begun", false),
    ("snapshot.held", false),
    ("snapshot.frozen", false),
    ("snapshot.paused", false),
    ("snapshot.saved", false),
    ("snapshot.disk", false),
    ("snapshot.resumed", false),
    ("snapshot.thawed", false),
    ("snapshot.written", false),
    ("snapshot.kept", true),
];

pub(crate) fn a_daemon_that_is_killed_on_the_way_leaves_a_sandbox_that_runs() {
    let world = World::new("can be kept");
    let points: PathBuf = world.path("points");
    fs::create_dir(&points).unwrap();
    let held = |words: &[&str]| {
        let mut command = world.command(words);
        command.env(base::points::VARIABLE, &points);
        command
            .stderr(std::process::Stdio::null())
            .stdout(std::process::Stdio::null());
        command
    };
    let status = held(&[
        "run",
        "-d",
        "--disk",
        "64m",
        "--name",
        "web",
        "tiny",
        "--",
        "sh",
        "-c",
        "while :; do echo x; sleep 0.02; done",
    ])
    .status();
    assert!(status.unwrap().success());
    for (point, kept) in POINTS {
        assert!(base::points::SANDBOX.contains(point), "{point}");
        fs::write(points.join(point), "").unwrap();
        let mut client = held(&["snapshot", "create", "web", "mine"]).spawn().unwrap();
        wait_for(point, || points.join(format!("{point}.reached")).exists().then_some(()));
        kill(world.daemon().unwrap());
        fs::remove_file(points.join(point)).unwrap();
        client.wait().unwrap();
        world.wait_for_no_daemon();
        assert!(held(&["exec", "web", "true"]).status().unwrap().success(), "{point}");
        wait_for_state(&world, "web", "running");
        let count = || world.verb(&["logs", "web"]).stdout.len();
        let before = count();
        wait_for(&format!("its command to go on after {point}"), || {
            (count() > before).then_some(())
        });
        assert_eq!(files(&world), if *kept { vec!["mine"] } else { vec![] }, "{point}");
    }
}

pub(crate) fn memory_comes_as_it_is_asked_for() {
    let world = World::new("can be kept");
    let words = [
        "run", "-d", "--boot", "--disk", "64m", "--name", "web", "tiny", "--", "sleep", "1000",
    ];
    done(&world, &words);
    done(&world, &["snapshot", "create", "web", "mine"]);
    let clone = |name: &str, paging: &str| {
        done(&world, &["clone", "--name", name, "--paging", paging, "mine"]);
        let console = done(&world, &["logs", "--console", name]);
        let (told, _) = console.split_once("re-identified as ").unwrap();
        told.to_owned()
    };
    // Whoever is the first of its kind teaches the next.
    assert_eq!(clone("one", "on-demand"), "on demand []\n");
    assert_eq!(clone("two", "eager"), "eager\n");
    assert_eq!(clone("three", "on-demand"), "on demand [(7, 1)]\n");
    assert_eq!(clone("four", "mapped"), "");
    assert_eq!(clone("five", "eager"), "writes [(1, 2)]\neager\n");
    assert_eq!(clone("six", "mapped"), "writes [(1, 2)]\n");
    let said = refused(&world, &["clone", "--paging", "lazy", "mine"]);
    assert!(said.contains("give mapped, eager or on-demand"), "{said}");
}
