//! Cases of built templates that leave one node as a file or by a registry and come to another. What a file is worth as such is proved
//! with snapshots (`transfer`), by the same code.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use base::points;
use export::Writer;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::builds::{built, names_in, reached, strings, templates};
use crate::cases::kill;
use crate::snapshots::refused;
use crate::transfer::{elsewhere, half_loaded, handed_over, image, with_snapshot};
use crate::world::{CREDENTIALS, Registry, Running, World, done, json, text, wait_for};

/// Each case with its name.
pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "a_saved_template_is_all_that_another_machine_needs",
        a_saved_template_is_all_that_another_machine_needs,
    ),
    (
        "a_template_that_comes_takes_no_place_unasked",
        a_template_that_comes_takes_no_place_unasked,
    ),
    (
        "a_template_that_cannot_be_used_here_is_refused",
        a_template_that_cannot_be_used_here_is_refused,
    ),
    (
        "a_strangers_template_is_not_believed",
        a_strangers_template_is_not_believed,
    ),
    (
        "whoever_dies_while_loading_a_template_leaves_nothing",
        whoever_dies_while_loading_a_template_leaves_nothing,
    ),
    (
        "a_daemon_that_is_killed_has_all_of_a_template_that_came_or_nothing",
        a_daemon_that_is_killed_has_all_of_a_template_that_came_or_nothing,
    ),
    (
        "what_has_come_is_not_taken_for_what_is_built_here",
        what_has_come_is_not_taken_for_what_is_built_here,
    ),
    ("a_template_goes_by_a_registry", a_template_goes_by_a_registry),
];

/// What the memory has in it.
const WORD: &[u8] = b"a template's memory";

/// A node with a built template `web`, and its id.
fn with_template() -> (World, String) {
    let world = World::new("can be kept");
    let words = [
        "--name",
        "web",
        "-m",
        "64m",
        "-e",
        "C=3",
        "--run",
        "true",
        "--run",
        "test 1\t=\t1",
        "--ready",
        "true",
    ];
    let id = built(&world, &words);
    // The stand-in has no memory of its own; what it gets here has no checksums, as that of a former version.
    fs::remove_file(place(&world, &id).join("memory.sums")).unwrap();
    let memory = File::create(place(&world, &id).join("memory")).unwrap();
    memory.set_len(64 << 20).unwrap();
    memory.write_all_at(WORD, 5 << 20).unwrap();
    (world, id)
}

fn place(world: &World, id: &str) -> PathBuf {
    world.path("state/templates").join(id)
}

fn saved(world: &World, name: &str) -> PathBuf {
    let path = world.path("web.basalt");
    done(world, &["template", "save", "-o", path.to_str().unwrap(), name]);
    path
}

fn load(path: &Path) -> [&str; 4] {
    ["template", "load", "-i", path.to_str().unwrap()]
}

fn with<'w>(words: &[&'w str], more: &[&'w str]) -> Vec<&'w str> {
    [words, more].concat()
}

/// The template is what was saved, and sandboxes are cloned of it.
#[track_caller]
fn is_whole(world: &World, id: &str, name: &str) {
    let shown = &json(world, &["template", "inspect", "--show-secrets", name])[0];
    assert_eq!((&shown["id"], &shown["usable"]), (&json!(id), &json!(true)));
    assert_eq!(shown["recipe"]["commands"], json!(["true", "test 1\t=\t1"]));
    assert_eq!(
        (&shown["recipe"]["ready"], &shown["recipe"]["env"]),
        (&json!("true"), &json!(["C=3"]))
    );
    let memory = File::open(place(world, id).join("memory")).unwrap();
    let mut word = [0; WORD.len()];
    memory.read_exact_at(&mut word, 5 << 20).unwrap();
    assert_eq!((&word[..], memory.metadata().unwrap().len()), (WORD, 64 << 20));
    let run = ["run", "-d", "--template", name, "--name", "of-it", "sleep", "1000"];
    done(world, &run);
    assert_eq!(json(world, &["inspect", "of-it"])[0]["template"], id);
    done(world, &["exec", "of-it", "true"]);
    done(world, &["rm", "--force", "of-it"]);
}

/// A node that has nothing but what its daemon keeps of `kept`.
#[track_caller]
fn has_only(world: &World, kept: &[String]) {
    let all = || (names_in(world, "templates") == kept).then_some(());
    wait_for("what was begun to go", all);
    let listed: Vec<String> = templates(world).into_iter().map(|(id, _)| id).collect();
    assert_eq!(listed, kept);
}

fn a_saved_template_is_all_that_another_machine_needs() {
    let (here, id) = with_template();
    let path = saved(&here, "web");
    // By the beginning of its id it is the same one.
    let again = here.path("again.basalt");
    let words = ["--json", "template", "save", "-o", again.to_str().unwrap(), &id[..9]];
    let told: Value = serde_json::from_str(&done(&here, &words)).unwrap();
    assert_eq!((&told["template"], told.get("snapshot")), (&json!(&id[..9]), None));
    assert_eq!(fs::read(&again).unwrap(), fs::read(&path).unwrap());
    // Where it is from, with everything removed, and where nothing of it was.
    done(&here, &["template", "rm", "web"]);
    done(&here, &["rmi", "tiny"]);
    let there = elsewhere();
    for world in [&here, &there] {
        assert_eq!(done(world, &load(&path)), format!("{id}\n"));
        is_whole(world, &id, "web");
        assert!(done(world, &["images"]).contains("<none>"), "a file has named an image");
        // The next daemon knows it as well.
        done(world, &["daemon", "--stop"]);
        assert_eq!(templates(world), [(id.clone(), strings(&["web"]))]);
        is_whole(world, &id, "web");
    }
    // From hand to hand.
    done(&there, &["template", "rm", "web"]);
    let template = handed_over((&here, &["template", "save", "web"]), &there);
    assert_eq!((&template["id"], &template["names"]), (&json!(id), &json!(["again"])));
    assert_eq!(template["taken"], json!([]));
    is_whole(&there, &id, "again");
    // What `run` makes by itself is not for others, nor is what is not there.
    done(&here, &["run", "-d", "--name", "one", &image(&here), "sleep", "1000"]);
    let own = wait_for("a template", || {
        let all = json(&here, &["template", "ls"]);
        let own = all.as_array().unwrap().iter().find(|one| one["recipe"].is_null())?;
        Some(own["id"].as_str().unwrap().to_owned())
    });
    let out = here.path("own.basalt");
    for (name, says) in [
        (own.as_str(), "only those of `basalt template build` are saved"),
        ("no", "there is no template `no`"),
    ] {
        let told = refused(&here, &["template", "save", "-o", out.to_str().unwrap(), name]);
        assert!(told.contains(says) && !out.exists(), "{told}");
    }
    fs::remove_file(place(&here, &id).join("state")).unwrap();
    let told = refused(&here, &["template", "save", "-o", out.to_str().unwrap(), "web"]);
    assert!(told.contains("its files are damaged"), "{told}");
}

fn a_template_that_comes_takes_no_place_unasked() {
    let (here, id) = with_template();
    let path = saved(&here, "web");
    let there = World::new("can be kept");
    let other = built(&there, &["--name", "web", "--run", "exit 0"]);
    let told = refused(&there, &load(&path));
    assert!(
        told.contains("there is a template `web`: choose another name with --name"),
        "{told}"
    );
    has_only(&there, std::slice::from_ref(&other));
    let told = refused(&there, &with(&load(&path), &["--name", "a/b"]));
    assert!(told.contains("cannot be a template's name"), "{told}");
    done(&there, &with(&load(&path), &["--name", "again"]));
    let mut both = [(id.clone(), strings(&["again"])), (other.clone(), strings(&["web"]))];
    both.sort();
    assert_eq!(templates(&there), both);
    is_whole(&there, &id, "again");
    // The same one is there, whatever it is to be called.
    for words in [load(&path).to_vec(), with(&load(&path), &["--name", "third"])] {
        let told = refused(&there, &words);
        assert!(told.contains("there is the same template already, `again`"), "{told}");
        assert_eq!(templates(&there), both);
    }
    // It is asked for: the other one has no name left, and the same one keeps those that it had.
    fs::write(place(&there, &id).join("memory"), "something else").unwrap();
    let output = there.verb(&with(&load(&path), &["--force"]));
    assert_eq!(text(&output.stdout), format!("{id}\n"));
    let told = text(&output.stderr);
    for line in [
        format!("the template {} is called again, web\n", &id[..12]),
        format!("the template {} was called web until now, and is gone\n", &other[..12]),
    ] {
        assert!(told.contains(&line), "{line} is not in {told}");
    }
    assert_eq!(templates(&there), [(id.clone(), strings(&["again", "web"]))]);
    has_only(&there, std::slice::from_ref(&id));
    is_whole(&there, &id, "web");
    // For machines, and where the other one keeps a name.
    let other = built(&there, &["--name", "web", "--run", "exit 0"]);
    built(&there, &["--name", "www", "--run", "exit 0"]);
    let told = done(&there, &with(&["--json"], &with(&load(&path), &["--force"])));
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["names"], json!(["again", "web"]));
    assert_eq!(told["taken"], json!([{ "name": "web", "from": other, "gone": false }]));
    let output = there.verb(&with(&load(&path), &["--force", "--name", "www"]));
    let told = text(&output.stderr);
    assert!(told.contains("was called www until now, and is gone"), "{told}");
}

fn a_template_that_cannot_be_used_here_is_refused() {
    let (here, id) = with_template();
    let path = saved(&here, "web");
    // Without its image it waits for that.
    let bare = here.path("bare.basalt");
    done(
        &here,
        &[
            "template",
            "save",
            "--without-image",
            "-o",
            bare.to_str().unwrap(),
            "web",
        ],
    );
    let there = elsewhere();
    let output = there.verb(&load(&bare));
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert!(
        told.contains("its image sha256:") && told.contains("is not here"),
        "{told}"
    );
    let told = refused(&there, &["run", "--rm", "--template", "web", "true"]);
    assert!(told.contains("the image of the template web is gone"), "{told}");
    done(&there, &["import", here.path("layout").to_str().unwrap()]);
    is_whole(&there, &id, "web");
    done(&there, &["template", "rm", "web"]);
    done(&there, &["rmi", &image(&there)]);
    // A file of another kind belongs to another verb.
    let snapshot = with_snapshot();
    let kept = snapshot.path("mine.basalt");
    done(&snapshot, &["snapshot", "save", "-o", kept.to_str().unwrap(), "mine"]);
    let told = refused(&there, &load(&kept));
    assert!(
        told.contains("it is a snapshot file and no template file: `basalt snapshot load` reads it"),
        "{told}"
    );
    let told = refused(&there, &["snapshot", "load", "-i", path.to_str().unwrap()]);
    assert!(
        told.contains("it is a template file and no snapshot file: `basalt template load` reads it"),
        "{told}"
    );
    has_only(&there, &[]);
    // Other programs make another template.
    fs::write(there.path("basalt-assets/vmlinux"), "another one that can be kept").unwrap();
    let told = refused(&there, &load(&path));
    assert!(
        told.contains("another VMM, kernel or agent") && told.contains("build it here"),
        "{told}"
    );
    assert_eq!(told.lines().count(), 1, "{told}");
    has_only(&there, &[]);
    assert_eq!(done(&there, &["images"]).lines().count(), 1, "an image is left");
}

/// What may not stand in a record: where, what, and what is said of it.
fn not_to_be_said() -> Vec<(&'static str, Value, &'static str)> {
    let zeroes = json!("0".repeat(64));
    vec![
        ("/template/names", json!(["../web"]), "cannot be a template's name"),
        ("/template/names", json!(vec!["x"; 65]), "more names"),
        ("/template/names", json!(["0123456789ab"]), "looks like an id"),
        ("/template/id", json!("../../x"), "no id of a template"),
        (
            "/template/id",
            zeroes.clone(),
            "its id is not that of what it was made of",
        ),
        ("/template/digest", json!("../../x"), "names no image by a digest"),
        ("/template/digest", zeroes.clone(), "another shape"),
        ("/template/programs/kernel", zeroes, "another VMM, kernel or agent"),
        ("/template/programs/kernel", json!("x"), "hash that is none"),
        ("/template/resources/cpus", json!(0), "no machine has"),
        (
            "/template/recipe",
            Value::Null,
            "it was not built by `basalt template build`",
        ),
        ("/template/recipe/commands", json!(["\u{1b}[2J"]), "control characters"),
        (
            "/template/recipe/commands",
            json!(["x".repeat(200_000)]),
            "the limit is",
        ),
        (
            "/template/recipe/env",
            json!(["C=4"]),
            "its id is not that of what it was made of",
        ),
        ("/template/networked", json!(true), "this node has none"),
        ("/shape/share_slots", json!(3), "devices for volumes"),
        ("/shape/share_slots", json!(1), "its id is not that"),
        (
            "/template/host/vendor",
            json!("AnotherVendor"),
            "it was made on a host with another processor (AnotherVendor; here",
        ),
        (
            "/shape/command_line",
            json!("init=/bin/sh"),
            "other options of the kernel",
        ),
        (
            "/shape/network",
            json!({"addresses": [], "gateways": [], "dns": [], "search": [], "mtu": 9}),
            "another guest network",
        ),
    ]
}

fn a_strangers_template_is_not_believed() {
    let (here, id) = with_template();
    let record: Value = serde_json::from_slice(&fs::read(place(&here, &id).join("record.json")).unwrap()).unwrap();
    let there = elsewhere();
    let path = there.path("strange");
    let write = |record: &Value, members: &[(&str, &[u8])]| {
        let mut writer = Writer::new(File::create(&path).unwrap(), "template").unwrap();
        writer
            .bytes("record.json", &serde_json::to_vec(record).unwrap())
            .unwrap();
        for (name, bytes) in members {
            writer.bytes(name, bytes).unwrap();
        }
        writer.finish().unwrap();
    };
    let state = fs::read(place(&here, &id).join("state")).unwrap();
    let all: [(&str, &[u8]); 3] = [("state", &state), ("memory", b"x"), ("disk", b"x")];
    let refuse = |record: &Value, members: &[(&str, &[u8])], says: &str| {
        write(record, members);
        let told = refused(&there, &with(&load(&path), &["--force"]));
        assert!(told.contains(says), "{says}: {told}");
        has_only(&there, &[]);
    };
    let large = vec![1; (64 << 20) + 1];
    refuse(
        &record,
        &[("passwd", b"x")],
        "passwd is no file that this template can have",
    );
    refuse(&record, &[("memory", &large)], "where 67108864 are the most");
    refuse(&record, &all[..2], "a file of it is missing");
    refuse(&json!({}), &all, "its record cannot be used");
    let [_, memory, disk] = all;
    refuse(&record, &[("state", b"x"), memory, disk], "its state cannot be used");
    refuse(
        &record,
        &[all[0], memory, ("memory.2", b"x"), disk],
        "of its 2 memory files one is missing",
    );
    refuse(
        &record,
        &[all[0], memory, ("memory.1", b"x"), disk],
        "of memory files its state names 1, and 2 have come",
    );
    for (at, value, says) in not_to_be_said() {
        let mut changed = record.clone();
        *changed.pointer_mut(at).unwrap() = value;
        refuse(&changed, &all, says);
    }
    // What was right is of no use any more when its programs change, like any other.
    let kernel = there.path("basalt-assets/vmlinux");
    done(&there, &["import", here.path("layout").to_str().unwrap()]);
    write(&record, &all);
    done(&there, &load(&path));
    assert_eq!(json(&there, &["template", "inspect", "web"])[0]["usable"], true);
    fs::write(kernel, "another one that can be kept").unwrap();
    assert_eq!(json(&there, &["template", "inspect", "web"])[0]["usable"], false);
}

fn whoever_dies_while_loading_a_template_leaves_nothing() {
    let (here, id) = with_template();
    // Noise, so that the first half has the record and a part of the memory.
    let memory = File::options()
        .write(true)
        .open(place(&here, &id).join("memory"))
        .unwrap();
    let mut noise = vec![0; 4 << 20];
    rustix::rand::getrandom(&mut noise, rustix::rand::GetRandomFlags::empty()).unwrap();
    memory.write_all_at(&noise, 8 << 20).unwrap();
    let bytes = fs::read(saved(&here, "web")).unwrap();
    let half = &bytes[..bytes.len() / 2];
    let there = elsewhere();
    let nothing = || {
        has_only(&there, &[]);
        assert_eq!(done(&there, &["images"]).lines().count(), 1, "an image is left");
    };
    let mut child = half_loaded(&there, "template", half);
    child.kill().unwrap();
    child.wait().unwrap();
    nothing();
    let mut child = half_loaded(&there, "template", half);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    nothing();
    // The daemon: the next one clears what is left.
    let mut child = half_loaded(&there, "template", half);
    kill(there.daemon().unwrap());
    there.wait_for_no_daemon();
    let rest = &bytes[bytes.len() / 2..];
    child.stdin.take().unwrap().write_all(rest).unwrap_or_default();
    let output = child.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("the daemon cannot be reached any more"), "{told}");
    done(&there, &["template", "ls"]);
    nothing();
    // A bit that is another one.
    let mut changed = bytes.clone();
    changed[bytes.len() / 2] ^= 0x40;
    let path = there.path("file");
    fs::write(&path, changed).unwrap();
    let told = refused(&there, &load(&path));
    assert!(told.contains("copy it once more, or save it again"), "{told}");
    nothing();
    // Nobody stands in the way of the next.
    fs::write(&path, &bytes).unwrap();
    done(&there, &load(&path));
    is_whole(&there, &id, "web");
}

fn a_daemon_that_is_killed_has_all_of_a_template_that_came_or_nothing() {
    let (here, id) = with_template();
    let path = saved(&here, "web");
    let there = World::new("can be kept");
    let points = there.path("points");
    fs::create_dir(&points).unwrap();
    for (point, is_new) in [
        (points::BUILD_WRITTEN, false),
        (points::BUILD_KEPT, true),
        (points::BUILD_NAMED, true),
    ] {
        let other = built(&there, &["--name", "web", "--run", "exit 0"]);
        done(&there, &["daemon", "--stop"]);
        fs::write(points.join(point), "").unwrap();
        let mut command = there.command(&with(&load(&path), &["--force"]));
        command.env(points::VARIABLE, &points);
        let mut client = Running(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
        reached(&there, point);
        kill(there.daemon().unwrap());
        fs::remove_file(points.join(point)).unwrap();
        let (code, told) = client.end();
        assert!(
            code == Some(1) && told.contains("the daemon cannot be reached any more"),
            "{point}: {told}"
        );
        // The next daemon.
        let kept = if is_new { id.clone() } else { other };
        assert_eq!(templates(&there), [(kept.clone(), strings(&["web"]))], "{point}");
        has_only(&there, std::slice::from_ref(&kept));
        done(&there, &["run", "--rm", "--template", "web", "true"]);
        done(&there, &["template", "rm", "web"]);
    }
}

fn what_has_come_is_not_taken_for_what_is_built_here() {
    let here = World::new("can be kept");
    let counter = here.path("counter");
    let count = format!("echo x >> {}", counter.display());
    let builds = || fs::read_to_string(&counter).unwrap().lines().count();
    let words = ["--name", "web", "--run", &count];
    let id = built(&here, &words);
    let path = saved(&here, "web");
    let brought = |wanted| assert_eq!(json(&here, &["template", "inspect", "web"])[0]["brought"], wanted);
    brought(false);
    built(&here, &words);
    assert_eq!(builds(), 1);
    // The same id, but what is in it is somebody else's word: it can be cloned, and is built anew by whoever builds.
    done(&here, &["template", "rm", "web"]);
    done(&here, &with(&load(&path), &["--name", "again"]));
    assert_eq!(json(&here, &["template", "inspect", "again"])[0]["brought"], true);
    done(&here, &["run", "--rm", "--template", "again", "true"]);
    assert_eq!((built(&here, &words), builds()), (id.clone(), 2));
    assert_eq!(templates(&here), [(id.clone(), strings(&["again", "web"]))]);
    brought(false);
    assert_eq!((built(&here, &words), builds()), (id.clone(), 2));
    // Where it was brought from says nothing of where it is.
    done(&here, &with(&load(&path), &["--force"]));
    brought(true);
    let again = saved(&here, "web");
    done(&here, &["template", "prune", "--all"]);
    done(&here, &load(&again));
    brought(true);
    // The next daemon knows it as well.
    done(&here, &["daemon", "--stop"]);
    brought(true);
}

fn a_template_goes_by_a_registry() {
    let (here, id) = with_template();
    let registry = Registry::start(&here.path("."), true);
    let reference = registry.image("team/web:1");
    let push = ["--json", "template", "push", "--creds", CREDENTIALS, "web", &reference];
    let pushed: Value = serde_json::from_str(&done(&here, &push)).unwrap();
    // Record, state, memory and disk.
    assert_eq!(pushed["sent"], 4, "{pushed}");
    let there = elsewhere();
    let pull = |kind: &'static str| [kind, "pull", "--quiet", "--creds", CREDENTIALS, &reference];
    let told = refused(&there, &pull("snapshot"));
    assert!(
        told.contains("is a template and no snapshot: `basalt template pull` fetches it"),
        "{told}"
    );
    let output = there.verb(&pull("template"));
    let told = text(&output.stderr);
    assert_eq!(
        (output.status.code(), text(&output.stdout)),
        (Some(0), format!("{id}\n")),
        "{told}"
    );
    assert!(
        told.contains("its image sha256:") && told.contains("is not here"),
        "{told}"
    );
    assert!(told.contains(" is called web\n"), "{told}");
    done(&there, &["import", here.path("layout").to_str().unwrap()]);
    is_whole(&there, &id, "web");
    let told = refused(&there, &pull("template"));
    assert!(told.contains("there is the same template already, `web`"), "{told}");
    done(&there, &with(&pull("template"), &["--force", "--name", "again"]));
    assert_eq!(templates(&there), [(id.clone(), strings(&["again", "web"]))]);
    assert_eq!(
        names_in(&there, "images/partial"),
        strings(&[]),
        "something is kept twice"
    );
    // And the other way round.
    let snapshot = with_snapshot();
    let reference = registry.image("team/mine:1");
    done(
        &snapshot,
        &["snapshot", "push", "--creds", CREDENTIALS, "mine", &reference],
    );
    let told = refused(&there, &["template", "pull", "--creds", CREDENTIALS, &reference]);
    assert!(
        told.contains("is a snapshot and no template: `basalt snapshot pull` fetches it"),
        "{told}"
    );
    // Other programs than those that it was made with.
    done(&there, &["template", "prune", "--all"]);
    fs::write(there.path("basalt-assets/vmlinux"), "another one that can be kept").unwrap();
    let told = refused(&there, &pull("template"));
    assert!(told.contains("another VMM, kernel or agent"), "{told}");
    has_only(&there, &[]);
}
