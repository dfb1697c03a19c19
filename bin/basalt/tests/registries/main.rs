//! Images to and from registries and archives through the program: against Debian's `docker-registry`, without a VM.

mod points;
#[path = "../support/registry.rs"]
mod registry;
#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use registry::{CREDENTIALS, Registry};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::{LAYER, write_layout};

struct World {
    directory: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        // In its own directory, so that no lab is found beside it; by another process, because a descriptor of ours that
        // is open for writing could be inherited by what another test starts just then (ETXTBSY).
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_basalt"))
            .arg(directory.path())
            .status();
        assert!(copied.unwrap().success());
        Self { directory }
    }

    /// With an image `tiny`.
    fn with_image() -> Self {
        let world = Self::new();
        let layout = world.path("layout");
        write_layout(&layout, &json!({ "Cmd": ["x"] }));
        world.does("ours", &["import", "--name", "tiny", layout.to_str().unwrap()]);
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The program, with the state directory of this name, and nobody's credentials.
    fn command(&self, state: &str, args: &[&str]) -> Command {
        let mut command = Command::new(self.path("basalt"));
        command
            .args(args)
            .env("BASALT_STATE", self.path(state))
            .env("HOME", self.path("home"))
            .env_remove("REGISTRY_AUTH_FILE")
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("DOCKER_CONFIG")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, state: &str, args: &[&str]) -> Output {
        self.command(state, args).output().unwrap()
    }

    /// Runs what must succeed; its standard output.
    #[track_caller]
    fn does(&self, state: &str, args: &[&str]) -> String {
        let output = self.run(state, args);
        assert!(output.status.success(), "{args:?}: {}", err(&output));
        out(&output)
    }

    fn json(&self, state: &str, args: &[&str]) -> Value {
        let text = self.does(state, &[&["--json"], args].concat());
        serde_json::from_str(&text).unwrap()
    }

    /// Runs what must fail with code 1 and one sentence.
    #[track_caller]
    fn refuses(&self, state: &str, args: &[&str], words: &[&str]) {
        let output = self.run(state, args);
        let text = err(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        assert!(out(&output).is_empty());
        assert_eq!(text.lines().count(), 1, "{text}");
        for word in words {
            assert!(text.contains(word), "`{word}` is not in: {text}");
        }
    }
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn digest_of(world: &World, state: &str) -> String {
    let images = world.json(state, &["images"]);
    images[0]["digest"].as_str().unwrap().to_owned()
}

#[test]
fn what_is_pushed_comes_back_as_it_was() {
    let world = World::with_image();
    let registry = Registry::start(world.directory.path(), false);
    let (there, digest) = (registry.image("team/tiny:1"), digest_of(&world, "ours"));
    assert_eq!(
        world.does("ours", &["push", "tiny", &there]),
        format!("{there}  {digest}\n")
    );
    let again = world.json("ours", &["push", "tiny", &format!("docker://{there}")]);
    assert_eq!((&again["sent"], &again["digest"]), (&json!(0), &json!(digest)));

    let output = world.run("theirs", &["pull", &there]);
    assert!(output.status.success(), "{}", err(&output));
    let short = &digest["sha256:".len()..][..12];
    assert!(
        out(&output).starts_with(&format!("{there}  {short}  ")),
        "{}",
        out(&output)
    );
    let told = err(&output);
    assert_eq!(told.matches(" fetched (").count(), 2, "config and layer: {told}");
    assert!(told.contains("writing the image") && !told.contains('\x1b'), "{told}");
    assert_eq!(digest_of(&world, "theirs"), digest);

    // With nothing to do it says nothing but the digest.
    let output = world.run("theirs", &["pull", "-q", &there]);
    assert_eq!((out(&output), err(&output)), (format!("{digest}\n"), String::new()));
    let json = world.json("theirs", &["pull", &there]);
    assert_eq!((&json["known"], &json["from"]), (&json!(true), &json!(registry.host())));
    assert_eq!(json["names"], json!([there]));

    // Its name says where it belongs, also where it is short.
    for name in [there.as_str(), "team/tiny:1"] {
        assert!(world.does("theirs", &["push", name]).starts_with(&there), "{name}");
    }
    world.refuses(
        "ours",
        &["push", "tiny"],
        &["names no registry", "basalt push tiny HOST/NAME"],
    );

    let by_digest = registry.image(&format!("team/tiny@{digest}"));
    world.does("third", &["pull", &by_digest]);
    assert_eq!(world.json("third", &["images"])[0]["names"], json!([]));
}

#[test]
fn a_mirror_is_asked_first() {
    let world = World::with_image();
    let mirror = Registry::start(world.directory.path(), false);
    world.does("ours", &["push", "tiny", &mirror.image("cache/team/tiny")]);
    // Nobody is there, nor will be.
    let there = "127.0.0.1:1/team/tiny".to_owned();
    let at = mirror.image("cache");
    let json = world.json("theirs", &["pull", "--mirror", &at, &there]);
    assert_eq!(
        (&json["from"], &json["names"]),
        (&json!(mirror.host()), &json!([format!("{there}:latest")]))
    );
    world.refuses(
        "theirs",
        &["pull", "--mirror", "x", &there],
        &["--mirror \"x\"", "HOST:PORT"],
    );
    world.refuses("theirs", &["pull", &there], &["cannot be reached", "check its name"]);
}

#[test]
fn who_may_not_is_told_in_a_sentence_what_to_do() {
    let world = World::with_image();
    let registry = Registry::start(world.directory.path(), true);
    let there = registry.image("tiny");
    world.refuses(
        "ours",
        &["push", "tiny", &there],
        &["wants credentials", "podman login"],
    );
    world.refuses(
        "ours",
        &["push", "--creds", "basalt:wrong", "tiny", &there],
        &["refuses the credentials", "podman login"],
    );
    let output = world.run("ours", &["push", "--creds", "s3cret-pass", "tiny", &there]);
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
    assert!(err(&output).contains("write USER:PASSWORD"), "{}", err(&output));

    world.does("ours", &["push", "--creds", CREDENTIALS, "tiny", &there]);
    // base64 of the same.
    let auths = json!({ "auths": { registry.host(): { "auth": "YmFzYWx0OnMzY3JldC1wYXNz" } } });
    let file = world.path("auth.json");
    fs::write(&file, auths.to_string()).unwrap();
    world.does("theirs", &["pull", "--authfile", file.to_str().unwrap(), &there]);
    let pulled = world
        .command("third", &["pull", &there])
        .env("REGISTRY_AUTH_FILE", &file)
        .output();
    assert!(pulled.unwrap().status.success());
    world.refuses(
        "theirs",
        &["pull", "--authfile", "/nonexistent/auth.json", &there],
        &["/nonexistent/auth.json does not exist"],
    );
    world.refuses(
        "theirs",
        &["pull", "--cert-dir", "/nonexistent", &there],
        &["/nonexistent is no directory"],
    );
    world.refuses("theirs", &["pull", "tiny"], &["names no registry", "HOST/NAME"]);
    world.refuses(
        "theirs",
        &["pull", "--creds", CREDENTIALS, &registry.image("tiny:2")],
        &["has no image", "check the name and the tag"],
    );
}

#[test]
fn a_run_pulls_what_is_missing_and_nothing_else() {
    let world = World::with_image();
    let registry = Registry::start(world.directory.path(), false);
    let there = registry.image("tiny");
    world.does("ours", &["push", "tiny", &there]);
    let run = |flags: &[&str], image: &str| {
        // Without a lab the run ends where the image has been found.
        let mut command = world.command("theirs", &[&["run"], flags, &[image]].concat());
        let output = command
            .env("BASALT_ENGINE", "lab")
            .env("BASALT_CACHE", world.path("cache"))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(125), "{}", err(&output));
        err(&output)
    };
    let refused = run(&["--pull", "never"], &there);
    assert!(
        refused.contains("there is no image") && refused.contains("basalt pull") && refused.contains("basalt import"),
        "{refused}"
    );
    let short = run(&[], "tiny");
    assert!(
        short.contains("there is no image") && !short.contains("fetching"),
        "{short}"
    );
    let fetched = run(&[], &there);
    assert!(
        fetched.contains("fetching") && fetched.contains("running in the lab"),
        "{fetched}"
    );
    assert!(!run(&[], &there).contains("fetching"));
    assert!(run(&["--pull=always"], &there).contains("fetching"));
    let digest = digest_of(&world, "ours");
    drop(registry);
    // It is here: nobody need be asked.
    let by_digest = run(&[], &format!("{}@{digest}", there));
    assert!(by_digest.contains("running in the lab"), "{by_digest}");
}

#[test]
fn a_signal_ends_a_pull_in_order() {
    let world = World::new();
    // It takes connections, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = format!("{}/tiny", silent.local_addr().unwrap());
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut command = world.command("ours", &["pull", &there]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let (connection, _) = silent.accept().unwrap();
        let begun = Instant::now();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if begun.elapsed() > Duration::from_secs(90) {
                child.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(status.code(), Some(code), "{text}");
        assert!(text.contains("cancelled: what has been downloaded is kept"), "{text}");
        // Before it would give up the registry by itself.
        assert!(begun.elapsed() < Duration::from_secs(29), "{:?}", begun.elapsed());
        drop(connection);
    }
}

#[test]
fn an_image_has_names_and_goes_through_an_archive() {
    let world = World::with_image();
    let digest = digest_of(&world, "ours");
    world.does("ours", &["tag", "tiny", "tiny:2", "r.test/team/tiny"]);
    let names = json!(["tiny:2", "tiny:latest", "r.test/team/tiny:latest"]);
    assert_eq!(world.json("ours", &["images"])[0]["names"], names);
    let output = world.run("ours", &["tag", "tiny", "Not A Name"]);
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
    world.refuses(
        "ours",
        &["tag", "missing", "x"],
        &["there is no image", "basalt images"],
    );
    world.refuses("ours", &["save", "missing"], &["there is no image"]);

    // Through a pipe, and into a file.
    let mut saving = world
        .command("ours", &["save", "tiny"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let imported = world
        .command("theirs", &["import", "-"])
        .stdin(saving.stdout.take().unwrap())
        .output()
        .unwrap();
    assert!(
        saving.wait().unwrap().success() && imported.status.success(),
        "{}",
        err(&imported)
    );
    assert_eq!(digest_of(&world, "theirs"), digest);
    let file = world.path("tiny.tar");
    fs::write(&file, "an older one").unwrap();
    let saved = world.json(
        "ours",
        &["save", "--format", "oci-archive", "-o", file.to_str().unwrap(), "tiny"],
    );
    assert_eq!(saved["bytes"], fs::metadata(&file).unwrap().len());
    world.does("third", &["import", file.to_str().unwrap()]);
    assert_eq!(digest_of(&world, "third"), digest);
    world.refuses(
        "ours",
        &["save", "-o", "/nonexistent/tiny.tar", "tiny"],
        &["cannot be written"],
    );

    // What failed leaves the older file and nothing beside it.
    world.refuses(
        "ours",
        &["save", "-o", file.to_str().unwrap(), "missing"],
        &["there is no image"],
    );
    assert_eq!(saved["bytes"], fs::metadata(&file).unwrap().len());
    let left = fs::read_dir(world.directory.path()).unwrap().flatten();
    let left: Vec<_> = left
        .filter(|entry| entry.file_name().to_string_lossy().contains("partial"))
        .collect();
    assert!(left.is_empty(), "{left:?}");

    // Half an archive is a failure.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut saving = world.command("ours", &["save", "tiny"]);
    let output = saving.stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", err(&output));
    assert!(err(&output).contains("closed its end early"), "{}", err(&output));
}

#[test]
fn pruning_and_removing_go_on_where_one_is_refused() {
    let world = World::with_image();
    world.does("ours", &["tag", "tiny", "other"]);
    let output = world.run("ours", &["rmi", "missing", "other"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(out(&output).starts_with("other  "), "{}", out(&output));
    assert!(
        err(&output).contains("there is no image \"missing\""),
        "{}",
        err(&output)
    );

    let digest = digest_of(&world, "ours");
    assert_eq!(world.json("ours", &["image", "prune"])["images"], json!([]));
    let usage = world.json("ours", &["system", "df"]);
    let pruned = world.json("ours", &["image", "prune", "-a", "-f"]);
    assert_eq!(pruned["images"], json!([digest]));
    assert_eq!(pruned["bytes"], usage["kinds"][0]["reclaimable"]);
    assert!(pruned["bytes"].as_u64().unwrap() > LAYER.len() as u64);
    assert_eq!(world.json("ours", &["images"]), json!([]));
    assert!(world.does("ours", &["image", "prune"]).contains("0 B freed"));
}
