//! Sandboxes made, listed and ended; commands in them with streams, terminals, signals and exit codes.

use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::program::text;
use crate::world::{World, failed};

pub(crate) const CASES: &[(&str, fn())] = &[
    ("a_command_is_run_and_nothing_stays", a_command_is_run_and_nothing_stays),
    (
        "sandboxes_have_names_labels_and_times",
        sandboxes_have_names_labels_and_times,
    ),
    (
        "commands_have_their_streams_and_codes",
        commands_have_their_streams_and_codes,
    ),
    ("commands_have_what_flags_say", commands_have_what_flags_say),
    ("input_of_megabytes_comes_whole", input_of_megabytes_comes_whole),
    ("signals_reach_the_command", signals_reach_the_command),
    ("time_limits_end_the_command", time_limits_end_the_command),
    (
        "a_reader_that_leaves_ends_the_writer",
        a_reader_that_leaves_ends_the_writer,
    ),
    (
        "a_terminal_has_size_keys_and_interrupt",
        a_terminal_has_size_keys_and_interrupt,
    ),
    ("a_sandbox_is_suspended_and_goes_on", a_sandbox_is_suspended_and_goes_on),
    (
        "snapshots_are_taken_cloned_and_removed",
        snapshots_are_taken_cloned_and_removed,
    ),
    (
        "volumes_networks_templates_and_figures",
        volumes_networks_templates_and_figures,
    ),
    ("logs_are_shown_and_followed", logs_are_shown_and_followed),
];

fn a_command_is_run_and_nothing_stays() {
    let world = World::new();
    assert_eq!(world.done(&["run", "--rm", "base", "--", "echo", "a b"]), "a b\n");
    assert_eq!(
        world
            .verb(&["run", "--rm", "--template", "base", "sh", "-c", "exit 7"])
            .status
            .code(),
        Some(7)
    );
    assert_eq!(world.json(&["ps"]), serde_json::json!([]));
    // Without --rm it stays for a while, and was not made for a day.
    world.done(&["run", "--name", "kept", "base", "true"]);
    let listed = world.json(&["ps"]);
    let (created, ends) = (
        listed[0]["created_ns"].as_u64().unwrap(),
        listed[0]["ends_ns"].as_u64().unwrap(),
    );
    assert!(ends - created <= 301_000_000_000, "{listed}");
    failed(
        &world.verb(&["run", "--rm", "nothing", "true"]),
        125,
        &["nothing", "404"],
    );
}

fn sandboxes_have_names_labels_and_times() {
    let world = World::new();
    let id = world.done(&[
        "run",
        "-d",
        "--name",
        "web",
        "-l",
        "tier=front",
        "--timeout",
        "1h",
        "base",
    ]);
    let id = id.trim();
    world.make("db");
    assert_eq!(world.done(&["ps", "-q", "--label", "tier=front"]), format!("{id}\n"));
    assert_eq!(world.done(&["ps", "-q", "--state", "suspended"]), "");
    let table = world.done(&["ps"]);
    assert!(
        table.starts_with("ID ") && table.contains("web") && table.contains("running"),
        "{table}"
    );
    for name in ["web", id] {
        let one = &world.json(&["inspect", name])[0];
        assert_eq!(
            (one["id"].as_str(), one["name"].as_str()),
            (Some(id), Some("web")),
            "{name}"
        );
        assert_eq!(one["config"]["labels"], serde_json::json!({ "tier": "front" }));
        assert_eq!(one["config"]["image"], "base");
        let time = one["ends_ns"].as_u64().unwrap() - one["created_ns"].as_u64().unwrap();
        assert!((3_599_000_000_000..=3_601_000_000_000).contains(&time), "{time}");
    }
    // Both begin so.
    world.fails(&["inspect", &id[..id.len() - 1]], 1, &["give more of it"]);
    world.fails(&["run", "-d", "--name", "web", "base"], 125, &["there already", id]);
    world.fails(&["rm", "web"], 1, &["--force"]);
    assert_eq!(world.done(&["rm", "-f", "web"]), "web\n");
    // There is one left that begins so.
    let beginning = &id[..id.len() - 1];
    assert_eq!(world.json(&["inspect", beginning])[0]["name"], "db");
    assert_eq!(world.done(&["kill", "db"]), "db\n");
    assert_eq!(world.done(&["ps", "-q"]), "");
    world.fails(&["rm", "-f", "web"], 1, &["no sandbox `web`", "basalt ps"]);
}

fn commands_have_their_streams_and_codes() {
    let world = World::new();
    world.make("web");
    let output = world.verb(&[
        "exec",
        "web",
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2; printf '\\000\\377'; exit 3",
    ]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(
        (&output.stdout[..], &output.stderr[..]),
        (&b"out\n\0\xff"[..], &b"err\n"[..])
    );
    assert_eq!(
        world
            .verb(&["exec", "web", "--", "sh", "-c", "kill -9 $$"])
            .status
            .code(),
        Some(137)
    );
    world.fails(&["exec", "web", "no-such-program"], 127, &["no-such-program"]);
    world.fails(&["exec", "web", "/etc"], 126, &["/etc"]);
    // Nobody waits for it.
    let marker = world.path("marker");
    let script = format!("sleep 0.2; echo done > {}", marker.display());
    world.done(&["exec", "-d", "web", "sh", "-c", &script]);
    crate::program::wait_for("what was left alone", || marker.exists().then_some(()));
}

fn commands_have_what_flags_say() {
    let world = World::new();
    world.done(&["run", "-d", "--name", "web", "-e", "OF_SANDBOX=1", "base"]);
    let script = "echo $OF_SANDBOX $OF_COMMAND $FROM_HERE; pwd";
    let mut command = world.command(&[
        "exec",
        "-e",
        "OF_COMMAND=2",
        "-e",
        "FROM_HERE",
        "-w",
        "/tmp",
        "web",
        "sh",
        "-c",
        script,
    ]);
    let output = command.env("FROM_HERE", "3 4").output().unwrap();
    assert_eq!(text(&output.stdout), "1 2 3 4\n/tmp\n", "{}", text(&output.stderr));
    let output = world.command(&["exec", "-i=false", "web", "cat"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(0), 0));
}

fn input_of_megabytes_comes_whole() {
    let world = World::new();
    world.make("web");
    let mut command = world.command(&["exec", "web", "--", "sh", "-c", "sleep 0.3; cat"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // No two pieces of it are the same.
    let sent: Vec<u8> = (0..8_000_000_u32)
        .map(|n| u8::try_from((n / 7 + n % 241) % 251).unwrap())
        .collect();
    let mut stdin = child.stdin.take().unwrap();
    let copy = sent.clone();
    let writes = std::thread::spawn(move || stdin.write_all(&copy));
    let output = child.wait_with_output().unwrap();
    writes.join().unwrap().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout == sent, "{} bytes of {}", output.stdout.len(), sent.len());
}

fn signals_reach_the_command() {
    let world = World::new();
    world.make("web");
    let script = "trap 'echo int; exit 9' INT; trap 'echo term; exit 8' TERM; echo ready; while :; do sleep 0.02; done";
    for (signal, says, code) in [(Signal::INT, "int", 9), (Signal::TERM, "term", 8)] {
        let mut run = world.start(&["exec", "web", "sh", "-c", script]);
        assert_eq!(run.line(), "ready");
        run.signal(signal);
        assert_eq!(run.line(), says);
        assert_eq!(run.end().0, Some(code));
    }
}

fn time_limits_end_the_command() {
    let world = World::new();
    let begun = Instant::now();
    world.fails(
        &["run", "--rm", "--timeout", "500ms", "base", "sleep", "100"],
        124,
        &["--timeout"],
    );
    world.fails(
        &[
            "run",
            "--rm",
            "--timeout",
            "500ms",
            "base",
            "--",
            "sh",
            "-c",
            "trap '' TERM; while :; do sleep 0.1; done",
        ],
        124,
        &["--timeout"],
    );
    assert!(begun.elapsed() < Duration::from_secs(60));
    assert_eq!(world.done(&["ps", "-q"]), "");
}

fn a_reader_that_leaves_ends_the_writer() {
    let world = World::new();
    world.make("web");
    let mut run = world.start(&["exec", "web", "yes"]);
    assert_eq!(run.line(), "y");
    drop(run.0.stdout.take());
    assert_eq!(run.end().0, Some(141));
}

fn a_terminal_has_size_keys_and_interrupt() {
    let world = World::new();
    let mut terminal = world.start_on_terminal(&["run", "--rm", "-it", "base", "--", "sh"], 40, 100);
    terminal.type_in("stty size; echo $TERM\n");
    terminal.expect("40 100");
    terminal.expect("vt100");
    terminal.resize(50, 120);
    terminal.type_in("until test \"$(stty size)\" = '50 120'; do sleep 0.01; done; echo it''fits\n");
    terminal.expect("itfits");
    terminal.type_in("PS1=ready'':\n");
    terminal.expect("ready:");
    terminal.type_in("sh -c 'echo go; exec sleep 100'\n");
    terminal.expect("\ngo");
    terminal.type_in("\x03");
    terminal.expect("ready:");
    terminal.type_in("exit 7\n");
    assert_eq!(terminal.child.end().0, Some(7));
    assert_eq!(world.done(&["ps", "-q"]), "");
}

fn a_sandbox_is_suspended_and_goes_on() {
    let world = World::new();
    world.make("web");
    assert_eq!(world.done(&["suspend", "web"]), "web\n");
    assert_eq!(world.json(&["ps"])[0]["state"], "suspended");
    world.fails(&["exec", "web", "true"], 125, &["suspended", "basalt resume web"]);
    world.fails(&["suspend", "web"], 1, &["409"]);
    assert_eq!(world.done(&["resume", "web"]), "web\n");
    assert_eq!(world.done(&["exec", "web", "echo", "again"]), "again\n");
    world.done(&["suspend", "web"]);
    // Nothing runs in it that --force would be needed for.
    world.done(&["rm", "web"]);
}

fn snapshots_are_taken_cloned_and_removed() {
    let world = World::new();
    world.make("web");
    assert_eq!(world.done(&["snapshot", "create", "web", "ready"]), "ready\n");
    let listed = world.json(&["snapshot", "ls"]);
    assert_eq!(listed[0]["names"], serde_json::json!(["ready"]));
    let id = world.done(&["clone", "--name", "again", "ready"]);
    assert_eq!(world.json(&["inspect", "again"])[0]["id"], id.trim());
    assert_eq!(world.done(&["run", "--rm", "ready", "echo", "of it"]), "of it\n");
    // Templates are not meant, although the API removes them by the same words.
    world.fails(&["snapshot", "rm", "base"], 1, &["no snapshot `base`"]);
    world.fails(&["template", "rm", "ready"], 1, &["no template `ready`"]);
    assert_eq!(world.done(&["snapshot", "rm", "ready"]), "ready\n");
    assert_eq!(world.json(&["snapshot", "ls"]), serde_json::json!([]));
}

fn volumes_networks_templates_and_figures() {
    let world = World::new();
    assert_eq!(world.done(&["volume", "create", "data"]), "data\n");
    assert_eq!(world.done(&["volume", "create", "data"]), "data\n");
    assert_eq!(world.json(&["volume", "ls"])[0]["name"], "data");
    world.done(&["run", "-d", "--name", "web", "-v", "data:/data", "base"]);
    assert_eq!(
        world.json(&["inspect", "web"])[0]["config"]["volumes"][0]["path"],
        "/data"
    );
    world.fails(&["volume", "rm", "data"], 1, &["409"]);
    let says = world.done(&["network", "update", "web", "--egress-deny", "10.0.0.0/8"]);
    assert_eq!(says, "web does not reach 10.0.0.0/8\n");
    assert_eq!(
        world.json(&["inspect", "web"])[0]["config"]["egress"]["denyOut"][0],
        "10.0.0.0/8"
    );
    let templates = world.json(&["template", "ls"]);
    assert!(
        templates
            .as_array()
            .unwrap()
            .iter()
            .any(|one| one["names"][0] == "base"),
        "{templates}"
    );
    world.fails(&["template", "rm", "base"], 1, &["403"]);
    let used = world.json(&["stats", "--no-stream"]);
    assert_eq!(used[0]["name"], "web");
    assert!(used[0]["memory_limit"].as_u64().unwrap() > 0, "{used}");
    world.done(&["rm", "-f", "web"]);
    world.fails(
        &["volume", "rm", "--tenant", "x", "data"],
        1,
        &["--tenant", "over --host"],
    );
    world.fails(&["volume", "ls", "--tenants"], 1, &["--tenants", "over --host"]);
    assert_eq!(world.done(&["volume", "rm", "data"]), "data\n");
}

fn logs_are_shown_and_followed() {
    let mut world = World::new();
    world.make("web");
    world.set_log("written");
    assert_eq!(world.done(&["logs", "web"]), "written\n");
    assert_eq!(world.done(&["logs", "-n", "0", "web"]), "");
    assert!(world.done(&["logs", "-t", "web"]).starts_with("2025-11-21T07:38:47"));
    let mut follows = world.start(&["logs", "-f", "web"]);
    assert_eq!(follows.line(), "written");
    world.done(&["rm", "-f", "web"]);
    assert_eq!(follows.end().0, Some(0));
}
