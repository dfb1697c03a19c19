//! The program as people meet it: sentences, exit codes, and what is left behind. Needs no VM and no lab.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The program, in an empty world: no state, no cache, no assets, nothing beside it.
struct World {
    directory: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        // A copy of its own directory: what cargo has built beside the original must not be found.
        let program = self.directory.path().join("basalt");
        if !program.exists() {
            // By another process: a descriptor of ours that is open for writing could be inherited by what another test
            // starts just then, and the program would be busy (ETXTBSY).
            let copied = Command::new("cp")
                .arg(env!("CARGO_BIN_EXE_basalt"))
                .arg(&program)
                .status();
            assert!(copied.unwrap().success());
        }
        let mut command = Command::new(program);
        command
            .args(args)
            .env("BASALT_STATE", self.path().join("state"))
            .env("BASALT_CACHE", self.path().join("cache"))
            .env_remove("BASALT_ASSETS")
            .env_remove("BASALT_ENGINE")
            .env_remove("COLUMNS")
            .stdin(Stdio::null());
        command
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[track_caller]
fn fails(output: &Output, code: i32, sentences: &[&str]) {
    let text = err(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(output.stdout.is_empty(), "{}", out(output));
    for sentence in sentences {
        assert!(text.contains(sentence), "`{sentence}` is not in:\n{text}");
    }
}

#[test]
fn help_has_examples_and_every_verb() {
    let world = World::new();
    let help = world.run(&["--help"]);
    assert!(help.status.success());
    let text = out(&help);
    for word in [
        "run",
        "images",
        "pull",
        "push",
        "tag",
        "save",
        "import",
        "rmi",
        "image",
        "system",
        "doctor",
        "lab",
        "completion",
        "man",
        "version",
        "Examples:",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(!text.contains('\x1b'), "no colour in a pipe");
    let run = out(&world.run(&["run", "--help"]));
    for word in [
        "--cpus",
        "--memory",
        "--env",
        "--workdir",
        "--user",
        "--tty",
        "Exit code:",
        "Examples:",
        "default: 512m",
    ] {
        assert!(run.contains(word), "{word}: {run}");
    }
    for verb in [
        "run",
        "images",
        "pull",
        "push",
        "tag",
        "save",
        "import",
        "rmi",
        "doctor",
        "completion",
        "man",
        "version",
    ] {
        let help = world.run(&[verb, "--help"]);
        assert!(help.status.success(), "{verb}");
        assert_eq!(out(&world.run(&["help", verb])), out(&help), "{verb}");
    }
    assert_eq!(out(&world.run(&["help"])), text);
    fails(&world.run(&["help", "fly"]), 2, &["unrecognized subcommand 'fly'"]);
}

#[test]
fn env_is_the_gateways_to_print() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::new();
    if !Path::new("/usr/sbin/basalt-gateway").exists() {
        fails(&world.run(&["env"]), 1, &["basalt-gateway"]);
    }
    let program = world.path().join("basalt-gateway");
    std::fs::write(&program, "#!/bin/sh\necho \"$@\"\nexit 3\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let ran = world.run(&["--json", "env", "--state", "/s", "--help"]);
    assert_eq!(
        (out(&ran).as_str(), ran.status.code()),
        ("env --json --state /s --help\n", Some(3))
    );
}

#[test]
fn usage_errors_are_125_in_run_and_2_elsewhere() {
    let world = World::new();
    fails(
        &world.run(&["run", "--bogus", "x"]),
        125,
        &["unexpected argument '--bogus'", "--help"],
    );
    fails(&world.run(&["run"]), 125, &["<IMAGE>"]);
    fails(
        &world.run(&["run", "--cpus", "0", "x"]),
        125,
        &["0 CPUs cannot be had: give 1 to 64"],
    );
    fails(
        &world.run(&["run", "--cpus", "1000", "x"]),
        125,
        &["1000 CPUs cannot be had: give 1 to 64"],
    );
    fails(
        &world.run(&["run", "--memory", "1k", "x"]),
        125,
        &["needs at least 32 MiB"],
    );
    fails(
        &world.run(&["images", "--bogus"]),
        2,
        &["unexpected argument '--bogus'"],
    );
    fails(&world.run(&["fly"]), 2, &["unrecognized subcommand 'fly'"]);
    fails(&world.run(&[]), 2, &["Usage:"]);
}

#[test]
fn errors_are_json_for_machines() {
    let world = World::new();
    for (args, code) in [
        (&["--json", "run", "--bogus"][..], 125),
        (&["run", "--json", "nope"], 125),
        (&["--json", "fly"], 2),
    ] {
        let output = world.run(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        let text = err(&output);
        let value: serde_json::Value = serde_json::from_str(text.trim()).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(value["error"].as_str().is_some_and(|s| s.len() > 10), "{text}");
    }
}

#[test]
fn an_image_that_is_not_there_is_125_in_run_and_1_in_rmi() {
    let world = World::new();
    fails(
        &world.run(&["run", "nope", "--", "true"]),
        125,
        &["nope", "basalt import"],
    );
    fails(&world.run(&["rmi", "nope"]), 1, &["nope", "basalt images"]);
    fails(
        &world.run(&["import", "/nonexistent.tar"]),
        1,
        &["/nonexistent.tar", "No such file", "podman save"],
    );
    assert!(
        !world
            .path()
            .join("state/images")
            .read_dir()
            .is_ok_and(|mut d| { d.any(|e| e.is_ok_and(|e| e.path().extension().is_some_and(|x| x == "erofs"))) })
    );
}

#[test]
fn a_bad_environment_is_refused_before_anything_runs() {
    let world = World::new();
    fails(
        &world.run(&["run", "--env", "=x", "nope"]),
        125,
        &["write KEY=VALUE or KEY"],
    );
}

#[test]
fn a_state_directory_that_cannot_be_used_is_named_with_what_chooses_another() {
    let world = World::new();
    for words in [&["images"][..], &["rmi", "x"], &["import", "x"]] {
        let output = world.command(words).env("BASALT_STATE", "/proc/no").output().unwrap();
        fails(&output, 1, &["/proc/no/images", "set BASALT_STATE"]);
    }
}

#[test]
fn no_images_is_an_empty_list() {
    let world = World::new();
    let list = world.run(&["images"]);
    assert!(list.status.success(), "{}", err(&list));
    assert!(out(&list).starts_with("NAME"), "{}", out(&list));
    let json: serde_json::Value = serde_json::from_str(&out(&world.run(&["images", "--json"]))).unwrap();
    assert_eq!(json, serde_json::json!([]));
}

#[test]
fn doctor_says_what_is_missing_and_what_to_do() {
    let world = World::new();
    let output = world.run(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.len() >= 10, "{report}");
    let assets = checks.iter().find(|check| check["name"] == "assets").unwrap();
    assert_eq!(assets["status"], "fail");
    assert!(assets["next"].as_str().unwrap().contains("make run"));
    let text = world.run(&["doctor"]);
    assert_eq!(text.status.code(), output.status.code());
    if report["verdict"]["engine"] == "lab" {
        // No KVM, and in this empty world no lab either.
        assert_eq!(output.status.code(), Some(1));
        let reason = report["verdict"]["reason"].as_str().unwrap();
        assert!(out(&text).contains(reason), "{reason}");
        let failed = checks.iter().filter(|check| check["status"] == "fail");
        assert!(failed.clone().count() >= 2);
        assert!(failed.into_iter().all(|check| check["next"].is_string()), "{report}");
    }
}

#[test]
fn completions_and_man_pages_know_every_flag_of_run() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = out(&world.run(&["completion", shell]));
        assert!(script.contains("env-file"), "{shell}");
    }
    // `help` completes the verbs.
    assert!(out(&world.run(&["completion", "bash"])).contains("basalt__subcmd__help__subcmd__run"));
    fails(&world.run(&["completion", "csh"]), 2, &["csh"]);
    let man = world.path().join("man");
    let output = world.run(&["man", man.to_str().unwrap()]);
    assert!(output.status.success(), "{}", err(&output));
    let page = std::fs::read_to_string(man.join("basalt-run.1")).unwrap();
    assert!(page.contains("env\\-file") && page.contains("Exit code"), "{page}");
    for page in [
        "basalt",
        "basalt-import",
        "basalt-pull",
        "basalt-image-prune",
        "basalt-system-df",
    ] {
        assert!(man.join(format!("{page}.1")).exists(), "{page}");
    }
    // One for each verb and one for all of them; `help` has none, as it only shows others' texts.
    let pages = std::fs::read_dir(&man).unwrap().count();
    assert_eq!(
        out(&output),
        format!("{pages} man pages written to {}\n", man.display())
    );
    assert!(!man.join("basalt-help.1").exists());
    fails(
        &world.run(&["man", "/proc/no"]),
        1,
        &["man pages cannot be written to /proc/no", "give a directory"],
    );
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let world = World::new();
    let mut child = world
        .command(&["completion", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(err(&output), "");
}

#[test]
fn the_lab_without_its_program_says_so() {
    let world = World::new();
    fails(&world.run(&["lab", "status"]), 1, &["basalt-lab", "make run"]);
}

#[test]
fn version_is_one_line_or_json() {
    let world = World::new();
    assert_eq!(
        out(&world.run(&["version"])),
        format!("basalt {}\n", env!("CARGO_PKG_VERSION"))
    );
    let json: serde_json::Value = serde_json::from_str(&out(&world.run(&["version", "--json"]))).unwrap();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        out(&world.run(&["--version"])),
        format!("basalt {}\n", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn a_wrong_engine_is_named() {
    let world = World::new();
    let output = world
        .command(&["run", "nope"])
        .env("BASALT_ENGINE", "warp")
        .output()
        .unwrap();
    fails(&output, 125, &["BASALT_ENGINE is `warp`: set it to `kvm` or `lab`"]);
}
