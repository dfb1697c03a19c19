//! Cases of templates that are of no use any more: made with other programs, damaged, or on another host.

use std::fs;

use serde_json::Value;

use crate::builds::{build, built, names_in, nothing_is_left, refusal, templates};
use crate::world::{World, done, json, text, wait_for};

/// Each case with its name.
pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "a_template_of_other_programs_is_built_again",
        a_template_of_other_programs_is_built_again,
    ),
    (
        "a_template_of_another_host_is_built_again",
        a_template_of_another_host_is_built_again,
    ),
    (
        "one_of_another_host_that_nobody_has_built_goes",
        one_of_another_host_that_nobody_has_built_goes,
    ),
];

/// The template `web` is, before a sandbox is cloned of it, for this reason.
fn is_built_again(world: &World, why: &str) {
    let output = world.verb(&["run", "--rm", "--template", "web", "echo", "out"]);
    let said = text(&output.stderr);
    assert_eq!(
        (output.status.code(), text(&output.stdout)),
        (Some(0), "out\n".into()),
        "{said}"
    );
    assert!(
        said.contains(&format!("the template web is built again, as {why}")),
        "{said}"
    );
}

fn a_template_of_other_programs_is_built_again() {
    let world = World::new("can be kept");
    let counter = world.path("counter");
    let count = format!("echo $X >> {}", counter.display());
    let first = built(&world, &["--name", "web", "-e", "X=7", "--run", &count]);
    let kernel = world.path("basalt-assets/vmlinux");
    fs::write(&kernel, "this one can be kept").unwrap();
    assert_eq!(json(&world, &["template", "inspect", "web"])[0]["usable"], false);
    // It is nobody's to remove but its builder's.
    assert_eq!(done(&world, &["template", "prune"]), "");
    is_built_again(&world, "it was made with another VMM");
    assert_eq!(fs::read_to_string(&counter).unwrap(), "7\n7\n");
    let found = templates(&world);
    assert!(
        found.len() == 1 && found[0].0 != first && found[0].1 == ["web"],
        "{found:?}"
    );
    assert_eq!(names_in(&world, "templates").len(), 1);
    let output = world.verb(&["run", "--rm", "--template", "web", "true"]);
    assert_eq!(text(&output.stderr), "");
    // What is damaged is built again, too.
    fs::remove_file(world.path("state/templates").join(&found[0].0).join("memory")).unwrap();
    done(&world, &["run", "--rm", "--template", "web", "true"]);
    assert_eq!(templates(&world), found);
    // Its image is in use.
    let said = refusal(&world, &["rmi", "tiny"]);
    assert!(
        said.contains("is used by web") && said.contains("`basalt template rm web`"),
        "{said}"
    );
    assert_eq!(
        json(&world, &["image", "prune", "--all"])["images"],
        serde_json::json!([])
    );
    let df = json(&world, &["system", "df"]);
    let kind = df["kinds"]
        .as_array()
        .unwrap()
        .iter()
        .find(|kind| kind["kind"] == "templates");
    let kind = kind.unwrap();
    assert!(kind["total"] == 1 && kind["bytes"].as_u64() > Some(0), "{kind}");
    done(&world, &["rmi", "--force", "tiny"]);
    for _ in 0..2 {
        let said = refusal(&world, &["run", "--rm", "--template", "web", "true"]);
        assert!(said.contains("the image of the template web is gone"), "{said}");
        assert_eq!(templates(&world), found);
        // The next daemon keeps it as well.
        done(&world, &["daemon", "--stop"]);
    }
    done(&world, &["template", "rm", "web"]);
    nothing_is_left(&world);
}

/// Has the daemon find another record of a template when it starts.
fn rewrite(world: &World, id: &str, change: impl FnOnce(&mut Value)) {
    done(world, &["daemon", "--stop"]);
    let path = world.path("state/templates").join(id).join("record.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut record["template"]);
    fs::write(&path, serde_json::to_vec(&record).unwrap()).unwrap();
}

fn a_template_of_another_host_is_built_again() {
    let world = World::new("can be kept");
    let host = ["--name", "web", "--cpu-model", "host", "--run", "true"];
    let id = built(&world, &host);
    let model = built(&world, &["--name", "any", "--run", "true"]);
    let usable = |name| {
        let shown = json(&world, &["template", "inspect", name])[0].take();
        let listed = json(&world, &["template", "ls"]);
        let mut listed = listed.as_array().unwrap().iter();
        let listed = listed.find(|one| one["names"] == serde_json::json!([name])).unwrap();
        assert_eq!(
            (&listed["outdated"], &listed["host"]),
            (&shown["outdated"], &shown["host"])
        );
        assert_eq!(shown["usable"], shown["outdated"].is_null());
        shown["outdated"].as_str().map(str::to_owned)
    };
    assert_eq!((usable("web"), usable("any")), (None, None));
    // The host has another kernel now: of a CPU model that makes no difference.
    let older = |template: &mut Value| template["host"]["kernel"] = "5.4.0".into();
    for id in [&id, &model] {
        rewrite(&world, id, older);
    }
    let why = usable("web").unwrap();
    assert!(
        why.starts_with("it was made on a host with another kernel (5.4.0; here "),
        "{why}"
    );
    assert_eq!(usable("any"), None);
    let table = done(&world, &["template", "ls"]);
    let words = |name| -> Vec<&str> {
        let line = table.lines().find(|line| line.contains(name)).unwrap();
        line.split_whitespace().collect()
    };
    // Neither has a network; the other one is usable.
    let refusals = |name| words(name).iter().filter(|word| **word == "no").count();
    assert_eq!(
        (refusals("web"), refusals("any"), words("USABLE").len()),
        (2, 1, 10),
        "{table}"
    );
    is_built_again(&world, "it was made on a host with another kernel");
    assert_eq!(usable("web"), None);
    // A build does not take it for its own either.
    rewrite(&world, &id, older);
    let output = build(&world, &host);
    assert!(
        text(&output.stderr).contains("keeping it as a template"),
        "{}",
        text(&output.stderr)
    );
    // Of one that an older daemon has made nobody knows.
    rewrite(&world, &id, |template| template["host"] = Value::Null);
    assert_eq!(usable("web"), None);
}

fn one_of_another_host_that_nobody_has_built_goes() {
    let world = World::new("can be kept");
    // One that goes on until it has been kept.
    let run = || {
        done(
            &world,
            &[
                "run",
                "-d",
                "--disk",
                "64m",
                "--cpu-model",
                "host",
                "tiny",
                "sleep",
                "1000",
            ],
        )
    };
    let all = || json(&world, &["template", "ls"]).as_array().unwrap().clone();
    let made = || {
        wait_for("a template", || {
            all().pop().map(|one| one["id"].as_str().unwrap().to_owned())
        })
    };
    run();
    let id = made();
    // Another daemon finds it again.
    rewrite(&world, &id, |_| ());
    assert_eq!(made(), id);
    rewrite(&world, &id, |template| template["host"]["kernel"] = "5.4.0".into());
    assert!(all().is_empty());
    // The next is this host's own, of the same name.
    run();
    assert_eq!(made(), id);
}
