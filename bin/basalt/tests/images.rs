//! Images through the program, and what `run` does before any VM: with an image made here, a stand-in for `basalt-lab`,
//! and no KVM needed.

mod support;

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use agent_api::message::{FileInfo, PROTOCOL, Reply, kind};
use serde_json::json;
use support::{LAYER, sha256, write_layout};
use wire::{FrameReader, FrameWriter, Token};

struct World {
    directory: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        // By another process: a descriptor of ours that is open for writing could be inherited by what another test
        // starts just then, and the program would be busy (ETXTBSY).
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_basalt"))
            .arg(directory.path())
            .status();
        assert!(copied.unwrap().success());
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.path("basalt"));
        command
            .args(args)
            .env("BASALT_STATE", self.path("state"))
            .env("BASALT_CACHE", self.path("cache"))
            .env_remove("BASALT_ASSETS")
            .env_remove("BASALT_ENGINE")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Imports an image with one empty layer and this configuration.
    fn import(&self, name: &str, config: serde_json::Value) {
        let layout = self.path("layout");
        write_layout(&layout, &config);
        let output = self.run(&["import", "--name", name, layout.to_str().unwrap()]);
        assert!(output.status.success(), "{}", err(&output));
    }

    /// A program beside `basalt` that is taken for the lab's.
    fn fake_lab(&self, script: &str) {
        // By another process, for the reason above.
        const WRITE: &str = r#"printf '#!/bin/sh\n%s\n' "$1" > "$0"; chmod 755 "$0""#;
        let written = Command::new("sh")
            .arg("-c")
            .arg(WRITE)
            .arg(self.path("basalt-lab"))
            .arg(script)
            .status();
        assert!(written.unwrap().success());
    }

    fn run_in_lab(&self) -> Output {
        self.command(&["run", "tiny", "--", "true"])
            .env("BASALT_ENGINE", "lab")
            .output()
            .unwrap()
    }
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[track_caller]
fn fails(output: &Output, code: i32, sentences: &[&str]) {
    let text = err(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    for sentence in sentences {
        assert!(text.contains(sentence), "`{sentence}` is not in:\n{text}");
    }
}

#[test]
fn an_image_is_imported_listed_and_removed() {
    let world = World::new();
    world.import("tiny", json!({ "Cmd": ["x"] }));
    let list = out(&world.run(&["images"]));
    assert!(
        list.lines()
            .nth(1)
            .is_some_and(|line| line.starts_with("tiny:latest  ") && line.ends_with("2026-01-02")),
        "{list}"
    );
    let json: serde_json::Value = serde_json::from_str(&out(&world.run(&["images", "--json"]))).unwrap();
    assert_eq!(json[0]["names"], json!(["tiny:latest"]));
    assert_eq!(json[0]["config"]["cmd"], json!(["x"]));
    let digest = json[0]["digest"].as_str().unwrap().to_owned();
    assert!(world.run(&["rmi", &digest]).status.success());
    assert_eq!(out(&world.run(&["images", "--json"])).trim(), "[]");
    assert_eq!(fs::read_dir(world.path("state/images/blobs")).unwrap().count(), 0);
}

#[test]
fn a_damaged_layer_is_refused_and_leaves_nothing() {
    let world = World::new();
    let layout = world.path("layout");
    write_layout(&layout, &json!({}));
    fs::write(layout.join("blobs/sha256").join(sha256(&LAYER)), [1; 1024]).unwrap();
    fails(
        &world.run(&["import", layout.to_str().unwrap()]),
        1,
        &["digest", "export it again"],
    );
    assert_eq!(fs::read_dir(world.path("state/images/blobs")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(world.path("state/images/tmp")).unwrap().count(), 0);
}

#[test]
fn a_damaged_image_is_refused_by_run_and_can_be_removed_as_the_error_says() {
    let world = World::new();
    world.import("tiny", json!({ "Cmd": ["x"] }));
    for entry in fs::read_dir(world.path("state/images/blobs")).unwrap() {
        fs::write(entry.unwrap().path(), "{").unwrap();
    }
    fails(&world.run(&["run", "tiny"]), 125, &["is damaged", "basalt rmi"]);
    let output = world.run(&["rmi", "--json", "tiny"]);
    assert!(output.status.success(), "{}", err(&output));
    let json: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    assert_eq!(json[0]["reference"], "tiny");
    assert_eq!(fs::read_dir(world.path("state/images/blobs")).unwrap().count(), 0);
    fails(&world.run(&["run", "tiny"]), 125, &["there is no image"]);
}

#[test]
fn a_damaged_image_is_a_warning_in_the_list_of_the_others() {
    let world = World::new();
    world.import("broken", json!({ "Cmd": ["x"] }));
    let blobs = world.path("state/images/blobs");
    for entry in fs::read_dir(&blobs).unwrap() {
        fs::write(entry.unwrap().path(), "{").unwrap();
    }
    let damaged = out(&world.run(&["images", "--json"]));
    assert_eq!(damaged.trim(), "[]");
    world.import("tiny", json!({ "Cmd": ["y"] }));

    let output = world.run(&["images"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(
        out(&output).contains("tiny:latest") && !out(&output).contains("broken"),
        "{output:?}"
    );
    let text = err(&output);
    assert!(text.starts_with("basalt: warning: the stored image"), "{text}");
    let removal = text.split('`').nth(1).unwrap();

    let output = world.run(&["images", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let list: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    assert_eq!(
        (list.as_array().unwrap().len(), &list[0]["names"]),
        (1, &json!(["tiny:latest"]))
    );
    let warning: serde_json::Value = serde_json::from_str(&err(&output)).unwrap();
    assert!(
        warning["warning"].as_str().is_some_and(|it| it.contains(removal)),
        "{warning}"
    );

    // The command in the warning mends it.
    let words: Vec<&str> = removal.split(' ').collect();
    assert_eq!(words[..2], ["basalt", "rmi"]);
    assert!(world.run(&words[1..]).status.success());
    assert_eq!(err(&world.run(&["images"])), "");
    assert_eq!(fs::read_dir(&blobs).unwrap().count(), 2);
}

#[test]
fn help_for_the_lab_is_the_labs_own() {
    let world = World::new();
    world.fake_lab(r#"echo "the lab was given: $*""#);
    for words in [&["lab", "--help"][..], &["help", "lab"]] {
        assert_eq!(out(&world.run(words)), "the lab was given: --help\n", "{words:?}");
    }
}

#[test]
fn a_bad_name_is_refused_before_anything_is_read() {
    let world = World::new();
    fails(
        &world.run(&["import", "--name", "Not A Name", "/nonexistent"]),
        2,
        &["is not an image name"],
    );
}

#[test]
fn what_cannot_be_run_is_refused_on_the_near_side() {
    let world = World::new();
    world.import("tiny", json!({}));
    fails(&world.run(&["run", "--entrypoint", "[", "tiny"]), 125, &["JSON array"]);
    fails(
        &world.run(&["run", "--env-file", "/nonexistent", "tiny", "x"]),
        125,
        &["/nonexistent cannot be read"],
    );
}

#[test]
fn a_lab_that_does_not_start_is_one_clear_failure() {
    let world = World::new();
    world.import("tiny", json!({}));
    fails(
        &world.run_in_lab(),
        125,
        &["running in the lab", "basalt-lab is not beside this one", "make run"],
    );
    world.fake_lab(r#"case $1 in ready) echo '{"running":false}'; exit 3;; up) echo no luck >&2; exit 125;; esac"#);
    fails(
        &world.run_in_lab(),
        125,
        &[
            "starting the lab",
            "no luck",
            "`basalt lab up` failed",
            "basalt lab logs",
        ],
    );
    world.fake_lab("exit 1");
    fails(
        &world.run_in_lab(),
        125,
        &["`basalt lab ready` failed", "basalt lab down"],
    );
}

#[test]
fn a_lab_that_does_not_answer_is_named_with_its_address() {
    let world = World::new();
    world.import("tiny", json!({}));
    // Nobody is there, nor will be.
    let address = "127.0.0.1:1";
    fs::write(world.path("token"), "00".repeat(32)).unwrap();
    let status = json!({ "running": true, "lab": { "address": address, "token_file": world.path("token") } });
    world.fake_lab(&format!("case $1 in ready) echo '{status}';; esac"));
    fails(
        &world.run_in_lab(),
        125,
        &[address, "does not answer", "run the command again"],
    );
    fs::write(world.path("token"), "short").unwrap();
    fails(&world.run_in_lab(), 125, &["is not 64 hexadecimal digits"]);
}

#[test]
fn a_lab_that_dies_during_a_run_is_one_clear_failure() {
    let world = World::new();
    world.import("tiny", json!({}));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    fs::write(world.path("token"), "07".repeat(32)).unwrap();
    let status = json!({ "running": true, "lab": { "address": address, "token_file": world.path("token") } });
    world.fake_lab(&format!("case $1 in ready) echo '{status}';; esac"));
    let blobs: Vec<u64> = ["json", "erofs"]
        .map(|kind| {
            let entries = fs::read_dir(world.path("state/images/blobs")).unwrap();
            let mut paths = entries.map(|entry| entry.unwrap().path());
            let path = paths.find(|path| path.extension().is_some_and(|it| it == kind));
            fs::metadata(path.unwrap()).unwrap().len()
        })
        .to_vec();
    // Its agent has the image, starts the command, and is gone like an emulator that was killed.
    let agent = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        wire::accept(&mut stream, PROTOCOL, Some(&Token::new([7; 32]))).unwrap();
        let mut reader = FrameReader::new(stream.try_clone().unwrap());
        let writer = FrameWriter::new(stream);
        let there = blobs.into_iter().map(|size| {
            let (mode, sha256) = (0o644, None);
            Reply::File(Some(FileInfo { size, mode, sha256 }))
        });
        for reply in there.chain([Reply::Started { pid: 2 }]) {
            assert_eq!(reader.read().unwrap().unwrap().kind, kind::CONTROL);
            writer
                .send(kind::CONTROL, 0, &serde_json::to_vec(&reply).unwrap())
                .unwrap();
        }
    });
    let output = world.run_in_lab();
    agent.join().unwrap();
    fails(
        &output,
        125,
        &[
            "the lab does not answer any more",
            "run the command again",
            "basalt lab logs",
        ],
    );
}
