//! Cases of templates: the first sandbox of a kind boots and is kept, the others are cloned of it.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::stand_in::HOST_IS_FULL;
use crate::world::{World, done, json, text, wait_for};

/// Each case with its name.
pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "the_first_is_kept_and_the_next_are_cloned",
        the_first_is_kept_and_the_next_are_cloned,
    ),
    ("what_is_mounted_is_each_clones_own", what_is_mounted_is_each_clones_own),
    (
        "templates_follow_programs_and_images",
        templates_follow_programs_and_images,
    ),
    (
        "a_template_that_is_no_use_goes_and_the_sandbox_boots",
        a_template_that_is_no_use_goes_and_the_sandbox_boots,
    ),
    (
        "who_removes_a_clone_on_its_way_blames_no_template",
        who_removes_a_clone_on_its_way_blames_no_template,
    ),
    (
        "a_host_that_is_full_blames_no_template",
        a_host_that_is_full_blames_no_template,
    ),
    (
        "an_agent_that_holds_on_costs_the_template_only",
        an_agent_that_holds_on_costs_the_template_only,
    ),
    (
        "a_sandbox_that_cannot_be_kept_runs_on",
        a_sandbox_that_cannot_be_kept_runs_on,
    ),
];

/// How long an agent may take for an answer (`node::TimeLimits`).
const ANSWER: Duration = Duration::from_secs(10);

/// The templates' ids.
fn templates(world: &World) -> Vec<String> {
    let listed = json(world, &["template", "ls"]);
    let id = |template: &Value| template["id"].as_str().unwrap().to_owned();
    listed.as_array().unwrap().iter().map(id).collect()
}

/// Waits until there are so many: the last step of making one is nobody's to wait for.
fn wait_for_templates(world: &World, count: usize) -> Vec<String> {
    wait_for("templates", || {
        let found = templates(world);
        (found.len() == count).then_some(found)
    })
}

/// Runs one that lives by itself.
fn detached(world: &World, name: &str, words: &[&str]) {
    let words: Vec<&str> = ["run", "-d", "--disk", "64m", "--name", name]
        .iter()
        .chain(words)
        .copied()
        .collect();
    done(world, &words);
}

/// The template that it was cloned of.
fn template_of(world: &World, name: &str) -> Option<String> {
    let inspected = json(world, &["inspect", name]);
    inspected[0]["template"].as_str().map(str::to_owned)
}

const SLEEP: [&str; 3] = ["tiny", "sleep", "1000"];

fn sleeping<'a>(options: &[&'a str]) -> Vec<&'a str> {
    options.iter().chain(&SLEEP).copied().collect()
}

fn the_first_is_kept_and_the_next_are_cloned() {
    let world = World::new("can be kept");
    detached(&world, "one", &SLEEP);
    let kept = wait_for_templates(&world, 1);
    assert_eq!(template_of(&world, "one"), None);
    assert_eq!(
        done(&world, &["logs", "--console", "one"]),
        "settled\nre-identified as the same -\n"
    );
    // Everything that makes no difference before a command runs.
    let options = ["-e", "A=1", "--user", "0", "-l", "a=b"];
    detached(&world, "two", &sleeping(&options));
    assert_eq!(template_of(&world, "two").as_ref(), kept.first());
    let id = json(&world, &["inspect", "two"])[0]["id"].as_str().unwrap().to_owned();
    let console = done(&world, &["logs", "--console", "two"]);
    let machine_id = console.strip_prefix(&format!("re-identified as {id} ")).unwrap().trim();
    assert_eq!(machine_id.len(), 32, "{console}");
    done(&world, &["exec", "two", "true"]);
    // What the first clone has written the next ones copy before they run.
    detached(&world, "next", &sleeping(&[]));
    let console = done(&world, &["logs", "--console", "next"]);
    assert!(console.starts_with("writes [(1, 2)]\nre-identified as "), "{console}");
    // One that somebody waits for, with everything that its command says.
    let words = [
        "run",
        "--rm",
        "--disk",
        "64m",
        "tiny",
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2; exit 3",
    ];
    let output = world.verb(&words);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(
        (text(&output.stdout), text(&output.stderr)),
        ("out\n".into(), "err\n".into())
    );
    let missing = world.verb(&["run", "--rm", "--disk", "64m", "tiny", "--", "no-such-program"]);
    assert_eq!(missing.status.code(), Some(127));
    // Nothing of it was the template's fault.
    assert_eq!(templates(&world), kept);
    // Another size is another machine; who wants to boot boots.
    detached(&world, "three", &sleeping(&["--memory", "256m"]));
    assert_eq!(template_of(&world, "three"), None);
    wait_for_templates(&world, 2);
    detached(&world, "four", &sleeping(&["--boot"]));
    assert_eq!(template_of(&world, "four"), None);
    // So is another processor; without one it is the daemon's.
    let model = |name| json(&world, &["inspect", name])[0]["config"]["resources"]["cpu_model"].clone();
    detached(&world, "five", &sleeping(&["--cpu-model", "x86-64-v3"]));
    assert_eq!(template_of(&world, "five"), None);
    assert_eq!((model("two"), model("five")), ("x86-64-v2".into(), "x86-64-v3".into()));
    wait_for_templates(&world, 3);
    let unknown = world.verb(&["run", "--cpu-model", "skylake", "tiny"]);
    assert!(text(&unknown.stderr).contains("give host, common, x86-64-v2, x86-64-v3 or x86-64-v4"));
    // One that is started again boots from its disk.
    done(&world, &["kill", "two"]);
    done(&world, &["start", "two"]);
    assert_eq!(template_of(&world, "two"), None);
}

/// What its agent was told.
fn console(world: &World, name: &str) -> String {
    done(world, &["logs", "--console", name])
}

fn what_is_mounted_is_each_clones_own() {
    let world = World::new("can be kept");
    // The first one is kept before it has anything that others should not have.
    detached(&world, "one", &sleeping(&["--tmpfs", "/one"]));
    let kept = wait_for_templates(&world, 1);
    assert_eq!(template_of(&world, "one"), None);
    assert_eq!(
        console(&world, "one"),
        "settled\nre-identified as the same -\nre-identified as the same - tmpfs /one\n"
    );
    detached(&world, "two", &sleeping(&["--tmpfs", "/two", "--tmpfs", "/a"]));
    assert_eq!(template_of(&world, "two").as_ref(), kept.first());
    let told = console(&world, "two");
    assert!(told.ends_with(" tmpfs /two tmpfs /a\n"), "{told}");
    detached(&world, "three", &SLEEP);
    assert_eq!(template_of(&world, "three").as_ref(), kept.first());
    assert!(!console(&world, "three").contains("tmpfs"));
    // So are directories of the host, for which a machine that has some has two devices, and others none.
    detached(&world, "volumes", &sleeping(&["-v", "/usr:/x"]));
    assert_eq!(template_of(&world, "volumes"), None);
    let both = wait_for_templates(&world, 2);
    let other = both.iter().find(|id| !kept.contains(id));
    for (name, volumes, told) in [
        (
            "four",
            &["-v", "/usr:/four:ro", "-v", "kept:/b"][..],
            " volume0 /four ro=true volume1 /b ro=false\n",
        ),
        ("five", &["-v", "/etc:/five"], " volume0 /five ro=false\n"),
    ] {
        detached(&world, name, &sleeping(volumes));
        assert_eq!(template_of(&world, name).as_ref(), other, "{name}");
        assert!(console(&world, name).ends_with(told), "{}", console(&world, name));
        let volumes = json(&world, &["inspect", name])[0]["volumes"].take();
        assert_eq!(
            volumes.as_array().unwrap().len(),
            told.matches(" ro=").count(),
            "{volumes}"
        );
    }
    let many = ["-v", "/usr:/a", "-v", "/usr:/b", "-v", "/usr:/c"];
    detached(&world, "many", &sleeping(&many));
    assert_eq!(template_of(&world, "many"), None);
    // A directory that is not there is nobody's fault but the asker's.
    let refused = world.verb(&["run", "--disk", "64m", "-v", "/nowhere:/x", "tiny", "true"]);
    assert!(
        text(&refused.stderr).contains("is not there"),
        "{}",
        text(&refused.stderr)
    );
    // What cannot be mounted is not the template's fault: the sandbox boots, and fails or not by itself.
    detached(&world, "six", &sleeping(&["--tmpfs", "/refused"]));
    assert_eq!(template_of(&world, "six"), None);
    assert_eq!(templates(&world), both);
    // One that is started again has what it had, and boots.
    done(&world, &["kill", "four"]);
    done(&world, &["start", "four"]);
    assert_eq!(template_of(&world, "four"), None);
    // A sandbox with volumes is the first of its kind.
    detached(&world, "first", &sleeping(&["--memory", "256m", "-v", "kept:/x"]));
    wait_for_templates(&world, 3);
    assert!(console(&world, "first").ends_with("the same - volume0 /x ro=false\n"));
    detached(&world, "second", &sleeping(&["--memory", "256m", "-v", "/usr:/y"]));
    assert!(template_of(&world, "second").is_some());
}

fn templates_follow_programs_and_images() {
    let world = World::new("can be kept");
    detached(&world, "one", &SLEEP);
    let first = wait_for_templates(&world, 1);
    // The next daemon finds it.
    done(&world, &["daemon", "--stop"]);
    assert_eq!(templates(&world), first);
    // The same kernel in another file is the same kernel.
    let kernel = world.path("basalt-assets/vmlinux");
    let replace = |content: &str| {
        let new = world.path("new");
        fs::write(&new, content).unwrap();
        fs::rename(&new, &kernel).unwrap();
    };
    replace("can be kept");
    detached(&world, "two", &SLEEP);
    assert_eq!(template_of(&world, "two").as_ref(), first.first());
    replace("this one can be kept");
    detached(&world, "three", &SLEEP);
    assert_eq!(template_of(&world, "three"), None);
    let second = wait_for("another template", || {
        let found = templates(&world);
        (found.len() == 1 && found != first).then_some(found)
    });
    detached(&world, "four", &SLEEP);
    assert_eq!(template_of(&world, "four").as_ref(), second.first());
    let short = &second[0][..12];
    assert_eq!(done(&world, &["template", "prune"]), "");
    assert!(done(&world, &["template", "ls"]).contains(short));
    // It is in nobody's way, and goes with its image.
    for name in ["one", "two", "three", "four"] {
        done(&world, &["rm", "-f", name]);
    }
    done(&world, &["rmi", "tiny"]);
    assert!(templates(&world).is_empty());
    assert_eq!(fs::read_dir(world.path("state/templates")).unwrap().count(), 0);
}

fn a_template_that_is_no_use_goes_and_the_sandbox_boots() {
    let world = World::new("can be kept");
    detached(&world, "one", &SLEEP);
    let first = wait_for_templates(&world, 1);
    let place = world.path("state/templates").join(&first[0]);
    fs::write(place.join("state"), "something else").unwrap();
    fs::write(place.join("disk"), "no disk of a booted machine").unwrap();
    detached(&world, "two", &SLEEP);
    assert_eq!(template_of(&world, "two"), None);
    done(&world, &["exec", "two", "true"]);
    let id = json(&world, &["inspect", "two"])[0]["id"].as_str().unwrap().to_owned();
    let disk = fs::metadata(world.path("state/sandboxes").join(id).join("disk")).unwrap();
    assert_eq!(disk.len(), 64 << 20, "it has the template's disk");
    // What was damaged has made room for another, of the same name.
    let again = wait_for_templates(&world, 1);
    assert_eq!(again, first);
    detached(&world, "three", &SLEEP);
    assert_eq!(template_of(&world, "three").as_ref(), again.first());
    assert_eq!(
        done(&world, &["template", "rm", &again[0][..8]]),
        format!("{}\n", &again[0][..8])
    );
    let refused = world.verb(&["template", "rm", "abc"]);
    assert!(
        text(&refused.stderr).contains("there is no template `abc`"),
        "{}",
        text(&refused.stderr)
    );
    // What cannot be read is worth no daemon that does not start.
    wait_for("the last one's end", || templates(&world).is_empty().then_some(()));
    detached(&world, "four", &SLEEP);
    let last = wait_for_templates(&world, 1);
    // The second one of a kind that is no use is the last, until somebody wants to know again.
    fs::write(
        world.path("state/templates").join(&last[0]).join("state"),
        "something else",
    )
    .unwrap();
    detached(&world, "five", &SLEEP);
    detached(&world, "six", &SLEEP);
    assert!(templates(&world).is_empty() && template_of(&world, "six").is_none());
    done(&world, &["template", "prune"]);
    detached(&world, "seven", &SLEEP);
    assert_eq!(wait_for_templates(&world, 1), last);
    done(&world, &["daemon", "--stop"]);
    fs::write(world.path("state/templates").join(&last[0]).join("record.json"), "{").unwrap();
    assert!(templates(&world).is_empty());
    done(&world, &["exec", "four", "true"]);
}

/// Waits until the daemon verifies nothing in the background any more.
fn wait_for_verification(world: &World) {
    let tasks = format!("/proc/{}/task", world.daemon().unwrap());
    let is_verifying = || {
        let threads = fs::read_dir(&tasks).unwrap().flatten();
        let mut names = threads.map(|thread| fs::read_to_string(thread.path().join("comm")).unwrap_or_default());
        names.any(|name| name.trim() == "verify")
    };
    wait_for("the end of verification", || (!is_verifying()).then_some(()));
}

fn a_host_that_is_full_blames_no_template() {
    let world = World::new("can be kept");
    detached(&world, "one", &SLEEP);
    let kept = wait_for_templates(&world, 1);
    let memory = world.path("state/templates").join(&kept[0]).join("memory");
    let before = fs::read(&memory).unwrap();
    fs::write(&memory, HOST_IS_FULL).unwrap();
    // More often than a template is given another try.
    for name in ["two", "three", "four"] {
        detached(&world, name, &SLEEP);
        assert_eq!(template_of(&world, name), None);
        assert_eq!(templates(&world), kept, "it is removed for what the host lacks");
    }
    fs::write(&memory, before).unwrap();
    detached(&world, "five", &SLEEP);
    assert_eq!(template_of(&world, "five").as_ref(), kept.first());
    // What is written next is not to be found damaged: that it was cloned has its files verified.
    wait_for_verification(&world);
    // Unless it never ends: the template may be why after all.
    fs::write(&memory, HOST_IS_FULL).unwrap();
    for number in 0..8 {
        assert_eq!(templates(&world), kept, "after {number} in a row");
        done(&world, &["rm", "--force", "five"]);
        detached(&world, "five", &SLEEP);
    }
    assert_eq!(template_of(&world, "five"), None);
    // It has become another one by then, or goes.
    wait_for("another template", || {
        (fs::read(&memory).unwrap_or_default() != HOST_IS_FULL.as_bytes()).then_some(())
    });
}

fn an_agent_that_holds_on_costs_the_template_only() {
    let world = World::new("holds on and can be kept");
    detached(&world, "one", &sleeping(&["--tmpfs", "/x"]));
    done(&world, &["exec", "one", "true"]);
    assert_eq!(console(&world, "one"), "re-identified as the same - tmpfs /x\n");
    assert!(templates(&world).is_empty());
    // Nobody tries again, nor waits for it.
    let begun = Instant::now();
    detached(&world, "two", &SLEEP);
    assert!(begun.elapsed() < ANSWER, "{:?}", begun.elapsed());
    assert_eq!(console(&world, "two"), "");
    assert_eq!(fs::read_dir(world.path("state/templates")).unwrap().count(), 0);
}

fn a_sandbox_that_cannot_be_kept_runs_on() {
    let world = World::new("cannot be kept");
    detached(&world, "one", &SLEEP);
    done(&world, &["exec", "one", "true"]);
    assert!(templates(&world).is_empty());
    // It has stood still, and was told who it is when it went on; nobody tries again.
    let told = "settled\nre-identified as the same -\n";
    assert_eq!(done(&world, &["logs", "--console", "one"]), told);
    detached(&world, "two", &SLEEP);
    assert_eq!(done(&world, &["logs", "--console", "two"]), "");
    assert_eq!(fs::read_dir(world.path("state/templates")).unwrap().count(), 0);
}

fn who_removes_a_clone_on_its_way_blames_no_template() {
    let world = World::new("can be kept");
    let points = world.path("points");
    fs::create_dir(&points).unwrap();
    let with_points = |words: &[&str]| {
        let mut command = world.command(words);
        command.env(base::points::VARIABLE, &points);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let words = ["run", "-d", "--disk", "64m", "--name", "one", "tiny", "sleep", "1000"];
    assert!(with_points(&words).status().unwrap().success());
    let kept = wait_for_templates(&world, 1);
    let point = base::points::RESTORE_MADE;
    fs::write(points.join(point), "").unwrap();
    let words = ["run", "-d", "--disk", "64m", "--name", "two", "tiny", "sleep", "1000"];
    let mut client = with_points(&words).spawn().unwrap();
    wait_for(point, || points.join(format!("{point}.reached")).exists().then_some(()));
    let mut removal = with_points(&["rm", "--force", "two"]).spawn().unwrap();
    wait_for("it to be stopped", || {
        let state = json(&world, &["inspect", "two"])[0]["state"] != "starting";
        state.then_some(())
    });
    fs::remove_file(points.join(point)).unwrap();
    assert!(!client.wait().unwrap().success());
    assert!(removal.wait().unwrap().success());
    // It has not booted meanwhile, and the next one is a clone again.
    assert_ne!(world.verb(&["inspect", "two"]).status.code(), Some(0));
    assert_eq!(templates(&world), kept);
    detached(&world, "three", &SLEEP);
    assert_eq!(template_of(&world, "three").as_ref(), kept.first());
}
