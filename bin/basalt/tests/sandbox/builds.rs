//! Cases of templates that somebody builds: what becomes of commands that succeed, fail and run on, and of names.

use std::fs;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use base::points;
use serde_json::Value;

use crate::world::{Running, World, done, json, text, wait_for};

/// Each case with its name.
pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "commands_are_run_and_what_they_made_is_cloned",
        commands_are_run_and_what_they_made_is_cloned,
    ),
    (
        "the_same_is_built_once_and_names_go_from_one_to_the_other",
        the_same_is_built_once_and_names_go_from_one_to_the_other,
    ),
    (
        "another_size_is_built_when_it_is_wanted",
        another_size_is_built_when_it_is_wanted,
    ),
    ("those_that_run_makes_are_others", those_that_run_makes_are_others),
    ("a_build_that_fails_leaves_nothing", a_build_that_fails_leaves_nothing),
    (
        "what_runs_on_is_kept_when_it_is_ready",
        what_runs_on_is_kept_when_it_is_ready,
    ),
    ("who_builds_may_be_killed", who_builds_may_be_killed),
    (
        "a_daemon_that_is_killed_leaves_all_of_a_build_or_nothing",
        a_daemon_that_is_killed_leaves_all_of_a_build_or_nothing,
    ),
];

const BUILD: [&str; 6] = ["template", "build", "--from", "tiny", "--disk", "64m"];

pub(crate) fn build(world: &World, words: &[&str]) -> Output {
    world.verb(&[&BUILD, words].concat())
}

/// One that must be built; its id.
#[track_caller]
pub(crate) fn built(world: &World, words: &[&str]) -> String {
    let output = build(world, words);
    assert_eq!(output.status.code(), Some(0), "{words:?}: {}", text(&output.stderr));
    let id = text(&output.stdout).trim().to_owned();
    assert_eq!(id.len(), 64, "{id}");
    id
}

/// A verb that must fail; what it says.
#[track_caller]
pub(crate) fn refusal(world: &World, words: &[&str]) -> String {
    let output = world.verb(words);
    assert_ne!(output.status.code(), Some(0), "{words:?}");
    text(&output.stderr)
}

/// Those that were built: their ids, and their names.
pub(crate) fn templates(world: &World) -> Vec<(String, Vec<String>)> {
    let listed = json(world, &["template", "ls"]);
    let built = listed
        .as_array()
        .unwrap()
        .iter()
        .filter(|template| !template["recipe"].is_null());
    let texts = |names: &Value| -> Vec<String> { serde_json::from_value(names.clone()).unwrap() };
    let mut found: Vec<_> = built
        .map(|template| (template["id"].as_str().unwrap().to_owned(), texts(&template["names"])))
        .collect();
    found.sort();
    found
}

pub(crate) fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// What there is in a directory of the state directory.
pub(crate) fn names_in(world: &World, directory: &str) -> Vec<String> {
    let entries = fs::read_dir(world.path("state").join(directory)).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Neither a sandbox nor a template, nor anything half made.
#[track_caller]
pub(crate) fn nothing_is_left(world: &World) {
    // The daemon, which may have to be started, puts right what one before it has left.
    let listed: Vec<String> = templates(world).into_iter().map(|(id, _)| id).collect();
    assert_eq!(names_in(world, "templates"), listed, "something is half made");
    assert_eq!(json(world, &["ps", "--all"]), serde_json::json!([]));
    assert!(names_in(world, "sandboxes").is_empty() && names_in(world, "run").is_empty());
    wait_for("the VMM's end", || world.vmms().is_empty().then_some(()));
}

/// What is mounted is this sandbox's, and was not there when it was built.
fn a_clone_has_mounts(world: &World) {
    let options = ["run", "-d", "--name", "mounted", "--template", "web"];
    let mounts = ["--tmpfs", "/x", "-v", "/usr:/usr:ro", "sleep", "1000"];
    done(world, &[options, mounts].concat());
    let console = done(world, &["logs", "--console", "mounted"]);
    assert!(console.ends_with(" tmpfs /x volume0 /usr ro=true\n"), "{console}");
}

fn commands_are_run_and_what_they_made_is_cloned() {
    let world = World::new("can be kept");
    let file = world.path("made");
    let first = format!("echo $A$B $C; pwd; echo one > {}", file.display());
    let second = format!("cat {}; echo two >&2", file.display());
    let words = [
        "--name", "web", "-e", "C=3", "-w", "/tmp", "--run", &first, "--run", &second,
    ];
    let output = build(&world, &words);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    for line in ["1 of 2: echo", "12 3\n", "/tmp\n", "2 of 2: cat", "one\n", "two\n"] {
        assert!(said.contains(line), "{line:?} is not in {said}");
    }
    let id = text(&output.stdout).trim().to_owned();
    assert_eq!(templates(&world), [(id.clone(), strings(&["web"]))]);
    nothing_is_left(&world);
    // By its name and by its id: the command is the image's, or what is asked for, with the image's environment.
    for wanted in ["web", &id[..10]] {
        let output = world.verb(&["run", "--rm", "--template", wanted]);
        assert_eq!(
            text(&output.stdout),
            "the image\n/usr\n12\n",
            "{}",
            text(&output.stderr)
        );
    }
    let options = ["run", "-d", "--name", "one", "--hostname", "other", "-l", "a=b"];
    let command = ["--template", "web", "--", "sh", "-c", "echo $A$C; sleep 1000"];
    done(&world, &[options.as_slice(), &command].concat());
    let one = &json(&world, &["inspect", "one"])[0];
    assert_eq!(one["template"], *id);
    wait_for("its command", || {
        (done(&world, &["logs", "one"]) == "1\n").then_some(())
    });
    let console = done(&world, &["logs", "--console", "one"]);
    assert!(console.contains("\nre-identified as other "), "{console}");
    let output = world.verb(&[
        "run",
        "--rm",
        "--template",
        "web",
        "-e",
        "A=5",
        "--",
        "sh",
        "-c",
        "echo $A; exit 3",
    ]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(3), "5\n".into()));
    // Its size is the template's, whether that is said or not.
    done(
        &world,
        &[
            "run",
            "--rm",
            "--template",
            "web",
            "--cpus",
            "1",
            "--disk",
            "64m",
            "true",
        ],
    );
    for (flags, next) in [
        (
            &["-v", "/usr:/a", "-v", "/usr:/b", "-v", "/usr:/c"][..],
            "can have 2 volumes",
        ),
        (&["--boot"], "--template"),
    ] {
        let said = refusal(
            &world,
            &[&["run", "--rm", "--template", "web"], flags, &["true"]].concat(),
        );
        assert!(said.contains(next), "{said}");
    }
    a_clone_has_mounts(&world);
    let said = refusal(&world, &["run", "--template", "none", "true"]);
    assert!(said.contains("there is no template `none`"), "{said}");
    let shown = &json(&world, &["template", "inspect", "web"])[0];
    assert_eq!(shown["usable"], true);
    assert_eq!(shown["recipe"]["commands"], serde_json::json!([first, second]));
    assert_eq!(shown["recipe"]["env"], serde_json::json!(["C=<redacted>"]));
}

fn the_same_is_built_once_and_names_go_from_one_to_the_other() {
    let world = World::new("can be kept");
    let counter = world.path("counter");
    let count = format!("echo x >> {}", counter.display());
    let builds = || fs::read_to_string(&counter).unwrap().lines().count();
    let id = built(&world, &["--name", "web", "--run", &count]);
    let output = build(&world, &["--name", "www", "--run", &count]);
    assert!(text(&output.stderr).contains("there is the same template already"));
    assert_eq!((text(&output.stdout).trim(), builds()), (id.as_str(), 1));
    assert_eq!(templates(&world), [(id.clone(), strings(&["web", "www"]))]);
    // A name wins over an id that begins so; what looks like an id is no name.
    let short = &id[..4];
    let alike = built(&world, &["--name", short, "--run", "true"]);
    let of = |wanted: &str| json(&world, &["template", "inspect", wanted])[0]["id"].clone();
    assert_eq!(
        (of(short), of(&id[..5])),
        (Value::from(alike), Value::from(id.as_str()))
    );
    done(&world, &["template", "rm", short]);
    assert_eq!(of(short), id.as_str());
    let said = refusal(&world, &[&BUILD[..], &["--name", &id[..12]]].concat());
    assert!(said.contains("it looks like an id"), "{said}");
    // What is running of it has it for as long as it runs, whatever takes its place.
    done(
        &world,
        &["run", "-d", "--name", "old", "--template", "web", "sleep", "1000"],
    );
    assert_eq!(built(&world, &["--force", "--run", &count]), id);
    assert_eq!((builds(), names_in(&world, "templates").len()), (2, 1));
    assert_eq!(templates(&world), [(id.clone(), strings(&["web", "www"]))]);
    // Something else gets one of the names.
    let other = built(&world, &["--name", "web", "--run", &count, "--run", "true"]);
    let mut both = [(id.clone(), strings(&["www"])), (other.clone(), strings(&["web"]))];
    both.sort();
    assert_eq!(templates(&world), both);
    // The next daemon knows it as well.
    done(&world, &["daemon", "--stop"]);
    assert_eq!(templates(&world), both);
    // And the other one, which then is called nothing, and goes.
    built(&world, &["--name", "www", "--run", &count, "--run", "true"]);
    assert_eq!(templates(&world), [(other.clone(), strings(&["web", "www"]))]);
    done(&world, &["exec", "old", "true"]);
    assert_eq!(done(&world, &["template", "rm", "web"]), "web\n");
    assert_eq!(templates(&world), [(other.clone(), strings(&["www"]))]);
    // `prune` takes what nobody has built; `--all` takes all.
    assert_eq!(done(&world, &["template", "prune"]), "");
    assert_eq!(templates(&world).len(), 1);
    done(&world, &["template", "rm", "www"]);
    assert!(names_in(&world, "templates").is_empty());
    built(&world, &[]);
    assert_ne!(done(&world, &["template", "prune", "--all"]), "");
    assert!(names_in(&world, "templates").is_empty());
}

fn another_size_is_built_when_it_is_wanted() {
    let world = World::new("can be kept");
    let counter = world.path("counter");
    let count = format!("echo x >> {}", counter.display());
    let builds = || fs::read_to_string(&counter).unwrap().lines().count();
    built(&world, &["--name", "web", "--run", &count]);
    let run = |flags: &[&str]| {
        let output = world.verb(&[&["run", "--rm", "--template", "web"], flags, &["true"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    let said = run(&["--cpus", "2"]);
    assert!(said.contains("the template web is built for 2 CPUs, 512 MiB"), "{said}");
    assert!(!run(&["--cpus", "2"]).contains("is built"), "it is there");
    assert_eq!((builds(), templates(&world).len()), (2, 2));
    let said = run(&["--disk", "0"]);
    assert!(said.contains("and no disk"), "{said}");
    // Made with another kernel both are built again, each when it is wanted.
    fs::write(world.path("basalt-assets/vmlinux"), "another one that can be kept").unwrap();
    run(&["--cpus", "2"]);
    assert_eq!((builds(), templates(&world).len()), (5, 3));
    // One that somebody asks for stays when the other goes.
    let size = ["--cpus", "2", "--name", "large", "--run", &count];
    let output = build(&world, &size);
    assert!(text(&output.stderr).contains("there is the same template already"));
    // Also where it had to be built again for somebody who asks for the size alone.
    let large = json(&world, &["template", "inspect", "large"])[0]["id"].clone();
    let place = world.path("state/templates").join(large.as_str().unwrap());
    fs::remove_file(place.join("state")).unwrap();
    assert!(run(&["--cpus", "2"]).contains("is built"));
    assert_eq!(json(&world, &["template", "inspect", "large"])[0]["sized"], false);
    done(&world, &["template", "rm", "web"]);
    let left = templates(&world);
    assert!(left.iter().any(|(_, names)| *names == ["large"]), "{left:?}");
    done(&world, &["template", "rm", "large"]);
    assert!(templates(&world).is_empty(), "another size of nothing is kept");
    assert!(names_in(&world, "templates").is_empty());
    // What cannot be built so is said to be that.
    let once = world.path("once");
    built(
        &world,
        &["--name", "picky", "--run", &format!("mkdir {}", once.display())],
    );
    let said = refusal(&world, &["run", "--template", "picky", "--cpus", "2", "true"]);
    assert!(said.contains("picky cannot be built in another size"), "{said}");
}

fn those_that_run_makes_are_others() {
    let world = World::new("can be kept");
    // More than are kept of those that nobody has built.
    let scripts: Vec<String> = (0..33).map(|number| format!("test {number}")).collect();
    scripts
        .iter()
        .for_each(|script| drop(built(&world, &["--run", script])));
    let run = |name: &str| {
        let words = ["run", "-d", "--disk", "64m", "--name", name, "tiny", "sleep", "1000"];
        done(&world, &words);
        json(&world, &["inspect", name])[0]["template"].clone()
    };
    assert_eq!(run("one"), Value::Null, "it was cloned of one that was built");
    let all = || json(&world, &["template", "ls"]).as_array().unwrap().len();
    wait_for("a template", || (all() == 34).then_some(()));
    let own = run("two").as_str().unwrap().to_owned();
    let ids: Vec<String> = templates(&world).into_iter().map(|(id, _)| id).collect();
    assert!(ids.len() == 33 && !ids.contains(&own));
    // It can be named by its id as well.
    done(&world, &["run", "--rm", "--template", &own[..16], "true"]);
    let said = refusal(&world, &["run", "--rm", "--template", &own, "-v", "/usr:/x", "true"]);
    assert!(said.contains("can have no volumes: leave --volume out"), "{said}");
    // The next of its kind takes its place, and nobody else's.
    fs::write(world.path("basalt-assets/vmlinux"), "another one that can be kept").unwrap();
    assert_eq!(run("three"), Value::Null);
    wait_for("another template", || {
        let found = json(&world, &["template", "ls"]);
        let known = found.as_array().unwrap().iter().any(|template| template["id"] == *own);
        (!known).then_some(())
    });
    wait_for("all of them", || (all() == 34).then_some(()));
}

fn a_build_that_fails_leaves_nothing() {
    let world = World::new("can be kept");
    let failing = |words: &[&str], wanted: &str| {
        let said = refusal(&world, &[&BUILD, words].concat());
        assert!(said.contains(wanted), "{words:?}: {said}");
        nothing_is_left(&world);
    };
    failing(
        &["--run", "true", "--run", "exit 3", "--run", "echo no"],
        "`exit 3` ended with code 3",
    );
    failing(&["--run", "kill -9 $$"], "`kill -9 $$` was ended by signal 9");
    failing(&["--workdir", "/no/such", "--run", "true"], "/no/such");
    failing(&["--run", " "], "nothing that `sh -c` could run");
    failing(&["--run", "exit 4", "--ready", "false"], "`exit 4` ended with code 4");
    let begun = Instant::now();
    let never = [
        "--run",
        "sleep 1000",
        "--ready",
        "echo not yet; exit 7",
        "--timeout",
        "1s",
    ];
    failing(&never, "ended with code 7 the last time and said: not yet");
    failing(
        &["--ready", "sleep 1000", "--timeout", "1s"],
        "`sleep 1000` did not end",
    );
    assert!(begun.elapsed() < Duration::from_secs(60));
    let said = refusal(&world, &["template", "build", "--from", "none", "--run", "true"]);
    assert!(said.contains("none"), "{said}");
    assert_eq!(templates(&world), []);
    // One that cannot be kept.
    let world = World::new("cannot be kept");
    let said = refusal(&world, &[&BUILD[..], &["--run", "true"]].concat());
    assert!(said.contains("the state cannot be written"), "{said}");
    nothing_is_left(&world);
}

fn what_runs_on_is_kept_when_it_is_ready() {
    let world = World::new("can be kept");
    let (asked, beat) = (world.path("asked"), world.path("beat"));
    let server = format!("while :; do echo beat >> {}; sleep 0.1; done", beat.display());
    let check = format!("echo x >> {0}; test $(wc -l < {0}) -ge 3", asked.display());
    let output = build(
        &world,
        &["--name", "server", "--run", "true", "--run", &server, "--ready", &check],
    );
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("ready after"), "{said}");
    assert_eq!(fs::read_to_string(&asked).unwrap().lines().count(), 3);
    assert!(beat.exists());
    nothing_is_left(&world);
    // Asked about nothing but itself, and by one that has ended well.
    built(&world, &["--run", "true", "--ready", "true"]);
    built(&world, &["--ready", "true"]);
    assert_eq!(templates(&world).len(), 3);
}

/// A build that somebody can hold at a point.
fn begin(world: &World, words: &[&str]) -> Running {
    let mut command = world.command(&[&BUILD, words].concat());
    command.env(points::VARIABLE, world.path("points"));
    Running(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
}

fn who_builds_may_be_killed() {
    let world = World::new("can be kept");
    let started = world.path("started");
    let script = format!("touch {}; sleep 1000", started.display());
    for signal in [rustix::process::Signal::KILL, rustix::process::Signal::INT] {
        let mut client = begin(&world, &["--run", &script]);
        wait_for("the command", || started.exists().then_some(()));
        client.signal(signal);
        assert_eq!(client.end().0, None, "it ends by the signal");
        wait_for("the sandbox's end", || {
            names_in(&world, "sandboxes").is_empty().then_some(())
        });
        nothing_is_left(&world);
        fs::remove_file(&started).unwrap();
    }
    // Whoever removes the sandbox ends the build.
    let mut client = begin(&world, &["--run", &script]);
    wait_for("the command", || started.exists().then_some(()));
    let id = json(&world, &["ps"])[0]["id"].as_str().unwrap().to_owned();
    done(&world, &["rm", "--force", &id]);
    let (code, said) = client.end();
    assert!(code == Some(1) && said.contains("has ended"), "{code:?} {said}");
    nothing_is_left(&world);
    a_daemon_that_is_told_to_end_leaves_no_build(&world, &script, &started);
    // While it is kept: nobody is there any more who wants it.
    let points = world.path("points");
    fs::create_dir(&points).unwrap();
    done(&world, &["daemon", "--stop"]);
    fs::write(points.join(points::BUILD_SETTLED), "").unwrap();
    let mut client = begin(&world, &["--name", "web", "--run", "true"]);
    reached(&world, points::BUILD_SETTLED);
    let id = json(&world, &["ps"])[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(done(&world, &["logs", "--console", &id]), "shed\n");
    client.signal(rustix::process::Signal::KILL);
    client.end();
    fs::remove_file(points.join(points::BUILD_SETTLED)).unwrap();
    wait_for("the sandbox's end", || {
        names_in(&world, "sandboxes").is_empty().then_some(())
    });
    nothing_is_left(&world);
    assert_eq!(templates(&world), []);
}

fn a_daemon_that_is_told_to_end_leaves_no_build(world: &World, script: &str, started: &std::path::Path) {
    fs::remove_file(started).unwrap();
    let mut client = begin(world, &["--run", script]);
    wait_for("the command", || started.exists().then_some(()));
    done(world, &["daemon", "--stop"]);
    // No other daemon puts it right.
    assert_eq!(world.daemon(), None);
    wait_for("the VMM's end", || world.vmms().is_empty().then_some(()));
    assert!(names_in(world, "sandboxes").is_empty());
    let (code, said) = client.end();
    assert_eq!(code, Some(1), "{said}");
    nothing_is_left(world);
}

pub(crate) fn reached(world: &World, point: &str) {
    let file = world.path("points").join(format!("{point}.reached"));
    wait_for(point, || file.exists().then_some(()));
    fs::remove_file(file).unwrap();
}

fn a_daemon_that_is_killed_leaves_all_of_a_build_or_nothing() {
    let world = World::new("can be kept");
    let points = world.path("points");
    fs::create_dir(&points).unwrap();
    let with_points = |words: &[&str]| {
        let mut command = world.command(words);
        command.env(points::VARIABLE, &points);
        let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        assert!(status.unwrap().success(), "{words:?}");
    };
    let file = world.path("file");
    // What it takes the place of, of the same content and by its name.
    let same = format!("test ! -e {}", file.display());
    let old = built(&world, &["--name", "web", "--run", "true"]);
    let whole = built(&world, &["--name", "same", "--run", &same]);
    done(&world, &["daemon", "--stop"]);
    for (point, is_new) in [
        (points::START_RUNNING, false),
        (points::SNAPSHOT_PAUSED, false),
        (points::BUILD_SETTLED, false),
        (points::BUILD_WRITTEN, false),
        (points::BUILD_KEPT, true),
        (points::BUILD_NAMED, true),
    ] {
        assert!(points::SANDBOX.contains(&point), "{point}");
        fs::write(points.join(point), "").unwrap();
        let mut client = begin(&world, &["--force", "--name", "web", "--run", &same]);
        reached(&world, point);
        let daemon = i32::try_from(world.daemon().unwrap()).unwrap();
        let daemon = rustix::process::Pid::from_raw(daemon).unwrap();
        rustix::process::kill_process(daemon, rustix::process::Signal::KILL).unwrap();
        fs::remove_file(points.join(point)).unwrap();
        assert_ne!(client.end().0, Some(0), "{point}");
        // The next daemon.
        nothing_is_left(&world);
        let mut wanted = match is_new {
            false => vec![(old.clone(), strings(&["web"])), (whole.clone(), strings(&["same"]))],
            true => vec![(whole.clone(), strings(&["same", "web"]))],
        };
        wanted.sort();
        assert_eq!(templates(&world), wanted, "{point}");
        let clone = ["run", "--rm", "--template", "web", "true"];
        with_points(&clone);
        if is_new {
            with_points(&["template", "rm", "web"]);
            assert_eq!(built(&world, &["--name", "web", "--run", "true"]), old);
        }
        done(&world, &["daemon", "--stop"]);
    }
}
