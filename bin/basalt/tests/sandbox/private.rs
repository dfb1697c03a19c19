//! Cases of what others may see: of the state nothing, of secrets that a sandbox was given nothing but their names.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::daemon::GROUP;
use crate::world::{World, done, text};

/// Each case with its name.
pub(crate) const CASES: &[(&str, fn())] = &[
    ("nobody_else_reads_the_state", nobody_else_reads_the_state),
    (
        "a_group_reaches_the_socket_and_no_more",
        a_group_reaches_the_socket_and_no_more,
    ),
    ("what_was_open_is_closed_at_start", what_was_open_is_closed_at_start),
    (
        "secrets_are_in_the_record_and_nowhere_else",
        secrets_are_in_the_record_and_nowhere_else,
    ),
    ("terminals_obey_no_stranger", terminals_obey_no_stranger),
];

/// Nobody's user and group: not the ones that the tests run as.
const STRANGER: u32 = 65534;

/// The program run by somebody who lets everybody read what he makes.
fn careless(world: &World, args: &[&str]) -> Output {
    let mut command = world.command(args);
    // SAFETY: the closure runs between fork and exec; umask(2) is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            rustix::process::umask(rustix::fs::Mode::empty());
            Ok(())
        });
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    output
}

/// Everything below `directory`, and itself.
fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
    found.push(directory.to_owned());
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match fs::symlink_metadata(&path).unwrap().is_dir() {
            true => walk(&path, found),
            false => found.push(path),
        }
    }
}

/// What of these a user with this group can read, write, list or pass through; as `test` of sh says.
fn reached(paths: &[PathBuf], group: u32) -> Vec<String> {
    let script =
        "while read -r path; do for how in r w x; do test -$how \"$path\" && echo \"$how $path\"; done; done; true";
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir("/").uid(STRANGER).gid(group);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines: String = paths.iter().map(|path| format!("{}\n", path.display())).collect();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    text(&output.stdout).lines().map(str::to_owned).collect()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Everybody may pass through what lies above the state.
fn let_pass(world: &World) {
    fs::set_permissions(world.path(""), fs::Permissions::from_mode(0o755)).unwrap();
}

/// One of each: images, sandboxes with disk, log and volume, a snapshot, templates, a clone.
fn a_whole_scenario(world: &World) {
    let_pass(world);
    let layout = world.path("layout");
    careless(world, &["import", "--name", "again", layout.to_str().unwrap()]);
    let run = [
        "run",
        "-d",
        "--name",
        "web",
        "--disk",
        "64m",
        "-v",
        "kept:/kept",
        "tiny",
        "--",
        "sleep",
        "1000",
    ];
    careless(world, &run);
    careless(world, &["exec", "web", "true"]);
    careless(world, &["run", "--rm", "--disk", "0", "tiny", "--", "true"]);
    careless(world, &["run", "--rm", "--disk", "0", "tiny", "--", "true"]);
    careless(
        world,
        &[
            "run", "-d", "--name", "plain", "--disk", "64m", "--boot", "tiny", "--", "sleep", "1000",
        ],
    );
    careless(world, &["snapshot", "create", "plain"]);
    careless(world, &["clone", "plain-1", "--name", "clone"]);
    let build = [
        "template", "build", "--name", "t", "--from", "tiny", "--disk", "64m", "--run", "true",
    ];
    careless(world, &build);
    careless(world, &["volume", "create", "other"]);
}

fn nobody_else_reads_the_state() {
    let world = World::new("can be kept");
    a_whole_scenario(&world);
    let state = world.path("state");
    let mut all = Vec::new();
    walk(&state, &mut all);
    let volume = state.join("volumes/kept/_data");
    for path in &all {
        let metadata = fs::symlink_metadata(path).unwrap();
        let closed = metadata.mode() & 0o077 == 0;
        // What is in a volume has the modes that guests have given it, and is behind a directory that is closed.
        assert!(
            closed || path.ends_with("_data"),
            "{}: {:o}",
            path.display(),
            metadata.mode()
        );
    }
    assert_eq!(fs::metadata(&volume).unwrap().mode() & 0o777, 0o755);
    let has = |name: &str| all.iter().any(|path| path.to_string_lossy().contains(name));
    for name in [
        "node.db",
        "basaltd.log",
        "/disk",
        "/log",
        "record.json",
        "snapshots/plain-1/memory",
        "templates/",
        "images/blobs",
    ] {
        assert!(has(name), "the scenario made no {name}");
    }
    let sockets = all
        .iter()
        .filter(|path| fs::symlink_metadata(path).unwrap().file_type().is_socket());
    assert!(sockets.count() >= 6, "two of the daemon's, two of each VMM's");
    if is_root() {
        assert_eq!(reached(&all, STRANGER), [] as [&str; 0]);
    }
    // What is written for its user has the modes that he wants.
    let saved = world.path("saved.tar");
    careless(&world, &["save", "-o", saved.to_str().unwrap(), "tiny"]);
    assert_eq!(fs::metadata(&saved).unwrap().mode() & 0o777, 0o666);
}

fn a_group_reaches_the_socket_and_no_more() {
    let world = World::new("");
    let_pass(&world);
    let started = world.command(&["daemon"]).env(GROUP, "1").output().unwrap();
    assert!(started.status.success(), "{}", text(&started.stderr));
    let (state, socket) = (world.path("state"), world.path("state").join(node_api::SOCKET));
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!((mode(&state), mode(&socket)), (0o710, 0o660));
    let group = rustix::process::getegid().as_raw();
    assert_eq!(
        (
            fs::metadata(&state).unwrap().gid(),
            fs::metadata(&socket).unwrap().gid()
        ),
        (group, group)
    );
    if is_root() {
        let mut all = Vec::new();
        walk(&state, &mut all);
        let expected = [
            format!("r {}", socket.display()),
            format!("w {}", socket.display()),
            format!("x {}", state.display()),
        ];
        let mut found = reached(&all, group);
        found.sort();
        assert_eq!(found, expected);
        assert_eq!(reached(&all, STRANGER), [] as [&str; 0]);
    }
    // The next one is for its user alone again.
    done(&world, &["daemon", "--stop"]);
    done(&world, &["daemon"]);
    assert_eq!((mode(&state), mode(&socket)), (0o700, 0o600));
}

fn what_was_open_is_closed_at_start() {
    let world = World::new("");
    done(
        &world,
        &[
            "run", "-d", "--disk", "0", "--name", "web", "tiny", "--", "sleep", "1000",
        ],
    );
    done(&world, &["daemon", "--stop"]);
    let state = world.path("state");
    let mut all = Vec::new();
    walk(&state, &mut all);
    for path in &all {
        let open = if path.is_dir() { 0o755 } else { 0o644 };
        fs::set_permissions(path, fs::Permissions::from_mode(open)).unwrap();
    }
    done(&world, &["ps"]);
    let mut now = Vec::new();
    walk(&state, &mut now);
    for path in now {
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o077, 0, "{}", path.display());
    }
    let log = fs::read_to_string(state.join("basaltd.log")).unwrap();
    let told = log.lines().filter(|line| line.contains("were open to other users"));
    assert_eq!(told.count(), 1, "{log}");
}

/// A password.
const SECRET: &str = "hunter2-and-more";

/// What the command line is told without having it among its own words.
fn with_secret(world: &World, args: &[&str]) -> Output {
    let output = world.command(args).env("PASSWORD", SECRET).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    output
}

/// The command lines of all processes.
fn command_lines() -> String {
    let mut lines = String::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        // Those that have ended meanwhile have none.
        lines += &text(&fs::read(entry.path().join("cmdline")).unwrap_or_default());
        lines.push('\n');
    }
    lines
}

fn secrets_are_in_the_record_and_nowhere_else() {
    let world = World::new("can be kept");
    let file = world.path("secrets.env");
    fs::write(&file, format!("FROM_FILE={SECRET}\n")).unwrap();
    let file = file.to_str().unwrap();
    let given = ["--env", "PASSWORD", "--env-file", file];
    // The daemon says all that it has to say.
    done(&world, &["--log-level", "trace", "daemon"]);
    let mut seen = Vec::new();
    let mut said = |words: &[&str]| {
        let words = [&["--log-level", "trace"], words].concat();
        let output = with_secret(&world, &words);
        seen.push((format!("{words:?}"), text(&output.stdout) + &text(&output.stderr)));
        seen.push(("processes".to_owned(), command_lines()));
    };
    let run = ["--json", "run", "-d", "--boot", "--disk", "64m", "--name", "web"];
    said(
        &[
            &run[..],
            &given,
            &["tiny", "--", "sh", "-c", "test -n \"$PASSWORD\" && sleep 1000"],
        ]
        .concat(),
    );
    said(&[&["exec"], &given[..], &["web", "sh", "-c", "test -n \"$FROM_FILE\""]].concat());
    for words in [
        &["ps"][..],
        &["--json", "ps"],
        &["inspect", "web"],
        &["--json", "inspect", "web"],
        &["--json", "snapshot", "create", "web"],
        &["--json", "snapshot", "ls"],
        &["snapshot", "inspect", "web-1"],
        &["--json", "snapshot", "inspect", "web-1"],
        &["--json", "clone", "web-1", "--name", "clone"],
        &["--json", "rollback", "web", "web-1"],
        &["stats", "--no-stream"],
        &["daemon", "metrics"],
    ] {
        said(words);
    }
    let build = [
        "--json", "template", "build", "--name", "t", "--from", "tiny", "--disk", "0", "--run", "true",
    ];
    said(&[&build[..], &given].concat());
    said(
        &[
            &["run", "--trace", "--rm", "--disk", "0"],
            &given[..],
            &["tiny", "--", "true"],
        ]
        .concat(),
    );
    for words in [
        &["--json", "template", "ls"][..],
        &["template", "inspect", "t"],
        &["--json", "template", "inspect", "t"],
    ] {
        said(words);
    }
    for (what, text) in seen {
        assert!(!text.contains(SECRET), "{what}: {text}");
    }
    // The names are told, and the values to whoever wants them.
    let inspected = done(&world, &["inspect", "web"]);
    assert!(
        inspected.contains("PASSWORD=<redacted>") && inspected.contains("FROM_FILE=<redacted>"),
        "{inspected}"
    );
    for of in [
        &["inspect", "web"][..],
        &["snapshot", "inspect", "web-1"],
        &["template", "inspect", "t"],
    ] {
        let words = [of, &["--show-secrets"]].concat();
        assert!(
            done(&world, &words).contains(&format!("PASSWORD={SECRET}")),
            "{words:?}"
        );
    }
    let mut all = Vec::new();
    walk(&world.path("state"), &mut all);
    let mut holders = 0;
    for path in all.iter().filter(|path| path.is_file()) {
        let holds = text(&fs::read(path).unwrap()).contains(SECRET);
        assert!(
            !holds || fs::metadata(path).unwrap().mode() & 0o077 == 0,
            "{}",
            path.display()
        );
        assert!(!holds || !path.ends_with("basaltd.log"), "the log has it");
        holders += usize::from(holds && path.ends_with("record.json"));
    }
    // The sandbox's, its clone's, the snapshot's and the template's.
    assert!(holders >= 4, "{holders} records");
}

fn terminals_obey_no_stranger() {
    let world = World::new("");
    let evil = "\x1b]0;title\x07";
    done(
        &world,
        &[
            "run",
            "-d",
            "--disk",
            "0",
            "--name",
            "web",
            "tiny",
            "--",
            "sh",
            "-c",
            "sleep 1000",
            evil,
        ],
    );
    let table = done(&world, &["ps"]);
    assert!(table.contains("sleep 1000") && !table.contains('\x1b'), "{table:?}");
    let output = world.verb(&["inspect", evil]);
    let said = text(&output.stderr);
    assert!(
        said.contains("title") && !said.contains('\x1b') && !said.contains('\x07'),
        "{said:?}"
    );
}
