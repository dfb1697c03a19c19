//! What goes wrong between the program and a gateway, and what cannot be had: each is a sentence that says what to do.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use crate::world::{World, failed};

pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "a_gateway_that_vanishes_ends_the_command_here",
        a_gateway_that_vanishes_ends_the_command_here,
    ),
    (
        "by_names_and_tls_with_its_own_authority",
        by_names_and_tls_with_its_own_authority,
    ),
    ("keys_come_by_the_environment_alone", keys_come_by_the_environment_alone),
    ("addresses_that_lead_to_no_gateway", addresses_that_lead_to_no_gateway),
    (
        "who_asks_too_often_is_told_when_to_ask_again",
        who_asks_too_often_is_told_when_to_ask_again,
    ),
    ("what_cannot_be_had_says_what_can", what_cannot_be_had_says_what_can),
];

fn a_gateway_that_vanishes_ends_the_command_here() {
    let mut world = World::new();
    world.make("web");
    let mut run = world.start(&["exec", "web", "--", "sh", "-c", "echo ready; exec sleep 100"]);
    assert_eq!(run.line(), "ready");
    world.vanish();
    let (code, said) = run.end();
    assert_eq!(code, Some(125), "{said}");
    assert!(
        said.contains("connection to http://127.0.0.1") && said.contains("may run on"),
        "{said}"
    );
}

fn by_names_and_tls_with_its_own_authority() {
    let world = World::new();
    let by_names = |args: &[&str]| {
        let mut command = world.command(&[&["--host", &world.by_names], args].concat());
        command.env_remove("BASALT_HOST");
        command
    };
    let trusted = |args: &[&str]| by_names(args).env("SSL_CERT_FILE", &world.authority).output().unwrap();
    let output = trusted(&["run", "--rm", "base", "--", "sh", "-c", "echo by its name; exit 4"]);
    assert_eq!(
        (output.status.code(), &output.stdout[..]),
        (Some(4), &b"by its name\n"[..]),
        "{output:?}"
    );
    let file = world.path("file");
    trusted(&["run", "-d", "--name", "web", "base"]);
    let copied = trusted(&[
        "cp",
        world.authority.to_str().unwrap(),
        &format!("web:{}", file.display()),
    ]);
    assert!(copied.status.success() && file.exists(), "{copied:?}");
    failed(
        &by_names(&["ps"]).output().unwrap(),
        1,
        &["not trusted", "SSL_CERT_FILE", "basalt-gateway ca"],
    );
    let missing = by_names(&["ps"])
        .env("SSL_CERT_FILE", world.path("missing"))
        .output()
        .unwrap();
    failed(&missing, 1, &["missing", "cannot be used"]);
}

fn keys_come_by_the_environment_alone() {
    let world = World::new();
    let with = |name: &str, key: &str| {
        let mut command = world.command(&["ps"]);
        command.env_remove("BASALT_API_KEY").env(name, key);
        command.output().unwrap()
    };
    assert!(with("E2B_API_KEY", &world.key).status.success());
    failed(
        &with("UNUSED", ""),
        1,
        &["BASALT_API_KEY", "basalt-gateway keys create"],
    );
    failed(
        &with("BASALT_API_KEY", "e2b_0000"),
        1,
        &["does not take the API key", "BASALT_API_KEY"],
    );
    failed(&with("BASALT_API_KEY", "a\nb"), 1, &["characters that no key has"]);
}

fn addresses_that_lead_to_no_gateway() {
    let world = World::new();
    let ask = |url: &str| world.command(&["--host", url, "ps"]).output().unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    failed(&ask(&format!("http://{closed}")), 1, &["does not answer"]);
    failed(&ask("gateway.example"), 1, &["https://api.DOMAIN"]);
    failed(&ask("http://gateway.example"), 1, &["could read the key"]);
    // Another server, whose text tries to speak to the terminal.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", other.local_addr().unwrap());
    let full = r#"{"code":507,"message":"\u001b[31mfull\u0007"}"#;
    let answers = [("404 Not Found", "nope"), ("200 OK", "<html>"), ("507 Full", full)];
    let serves = thread::spawn(move || {
        for (status, body) in answers {
            let (mut stream, _) = other.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            let length = body.len();
            write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            )
            .unwrap();
        }
    });
    failed(&ask(&url), 1, &["no gateway answers"]);
    failed(&ask(&url), 1, &["no gateway answers"]);
    failed(&ask(&url), 1, &["[31mfull", "507", "remove sandboxes"]);
    serves.join().unwrap();
}

fn who_asks_too_often_is_told_when_to_ask_again() {
    let world = World::new();
    let names: Vec<String> = (0..250).map(|n| format!("none-{n}")).collect();
    let mut args = vec!["rm", "-f"];
    args.extend(names.iter().map(String::as_str));
    world.fails(&args, 1, &["try again in 1 s"]);
}

fn what_cannot_be_had_says_what_can() {
    let world = World::new();
    world.make("web");
    for (args, says) in [
        (&["stop", "web"][..], "basalt suspend"),
        (&["start", "web"], "basalt resume"),
        (&["pause", "web"], "basalt suspend"),
        (&["wait", "web"], "basalt exec"),
        (&["events"], "basalt ps"),
        (&["rollback", "web", "snapshot"], "basalt clone"),
        (&["images"], "BASALT_HOST"),
        (&["pull", "registry.example/image"], "--host"),
        (&["daemon"], "gateway's own machine"),
        (&["device", "ls"], "gateway's own machine"),
        (&["update", "web", "--memory", "1g"], "gateway's own machine"),
        (
            &["template", "build", "--from", "base", "--name", "mine"],
            "own-template.md",
        ),
        (&["logs", "--console", "web"], "--console"),
        (&["kill", "-s", "TERM", "web"], "basalt exec SANDBOX kill"),
    ] {
        world.fails(args, 1, &[says, "--host"]);
    }
    for (args, says) in [
        (&["run", "--memory", "1g", "base", "true"][..], "--memory"),
        (&["run", "-p", "80:80", "base", "true"], "--publish"),
        (&["run", "-d", "--rm", "base"], "--timeout"),
        (&["run", "base"], "command is missing"),
        (&["run", "-v", "/etc:/etc", "base", "true"], "basalt cp"),
        (&["run", "-u", "1:2", "base", "true"], "--user"),
    ] {
        world.fails(args, 125, &[says]);
    }
    // What is about this machine alone goes on.
    assert!(world.done(&["version"]).contains("basalt"));
    assert!(world.done(&["completion", "bash"]).contains("--host"));
}
