//! What goes wrong with a lab, without a lab: a script stands in for the emulator and writes what a console would show.
//! Each case wants one clear sentence, the exit code, and nothing left behind.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use agent_api::message::{PROTOCOL, Reply, kind};
use wire::{FrameReader, FrameWriter, Token};

/// Behaves like `qemu -daemonize` as far as `basalt-lab` sees. A file of the tree, because one that is written just before
/// it is run may be found open for writing, in a process that another test has just forked.
const EMULATOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/emulator.sh");

/// A directory with a link to the program, a cache with a stand-in for each part, and a state.
struct Fixture {
    directory: PathBuf,
}

impl Fixture {
    /// `behaviour` is what the emulator does after it has read its arguments.
    fn new(name: &str, behaviour: &str) -> Self {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
        let fixture = Self { directory };
        for part in ["bin", "cache/emulator/current", "cache/lab-host/current", "state"] {
            fs::create_dir_all(fixture.path(part)).unwrap();
        }
        fs::hard_link(env!("CARGO_BIN_EXE_basalt-lab"), fixture.path("bin/basalt-lab")).unwrap();
        // As much of a static program as is looked at: an ELF header without program headers.
        let mut init = b"\x7fELF\x02\x01\x01".to_vec();
        init.resize(64, 0);
        fs::write(fixture.path("bin/basalt-lab-init"), init).unwrap();
        for part in ["vmlinuz", "base.cpio", "rootfs.erofs"] {
            fs::write(fixture.path("cache/lab-host/current").join(part), "").unwrap();
        }
        let emulator = fixture.path("cache/emulator/current");
        symlink(EMULATOR, emulator.join("qemu-system-x86_64")).unwrap();
        fs::write(emulator.join("behaviour"), behaviour).unwrap();
        fixture
    }

    fn path(&self, below: &str) -> PathBuf {
        self.directory.join(below)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path("bin/basalt-lab"));
        command
            .args(arguments)
            .env("BASALT_CACHE", self.path("cache"))
            .env("BASALT_LAB_STATE", self.path("state"))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs, wants failure with this code, and gives the error's first line.
    fn fails(&self, arguments: &[&str], code: i32) -> String {
        let output = self.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        said.lines()
            .find(|line| line.starts_with("basalt-lab: "))
            .unwrap_or_else(|| panic!("{said}"))
            .to_owned()
    }

    /// Nothing of a start is left: no file but disks, logs and records, and no process.
    fn assert_clean(&self) {
        let mut left: Vec<_> = fs::read_dir(self.path("state"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.retain(|name| !["disks", "logs", "synced.json"].iter().any(|kept| name == kept));
        assert!(left.is_empty(), "left behind: {left:?}");
        assert_eq!(self.processes(), Vec::<u32>::new(), "processes left behind");
    }

    /// The emulator is a daemon by now: it alone is left of what was started, and it has written something.
    fn is_booting(&self) -> bool {
        let written = fs::read_to_string(self.path("state/logs/console.log")).is_ok_and(|text| !text.is_empty());
        let daemon = fs::read_to_string(self.path("state/qemu.pid"))
            .ok()
            .and_then(|text| text.trim().parse().ok());
        written && daemon.is_some_and(|daemon: u32| self.processes() == [daemon])
    }

    /// Processes that were started with this fixture's pid file.
    fn processes(&self) -> Vec<u32> {
        let mark = self.path("state/qemu.pid");
        let of = |entry: fs::DirEntry| {
            let pid = entry.file_name().to_str()?.parse::<u32>().ok()?;
            let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let is_ours = line
                .split(|byte| *byte == 0)
                .any(|word| word == mark.as_os_str().as_encoded_bytes());
            is_ours.then_some(pid)
        };
        fs::read_dir("/proc").unwrap().flatten().filter_map(of).collect()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for pid in self.processes() {
            drop(Command::new("kill").args(["-9", &pid.to_string()]).status());
        }
        drop(fs::remove_dir_all(&self.directory));
    }
}

fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(90);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn signal(child: &Child, name: &str) {
    assert!(
        Command::new("kill")
            .args([name, &child.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
}

#[test]
fn a_missing_emulator_is_named_with_what_makes_it() {
    let fixture = Fixture::new("missing", "");
    fs::remove_dir_all(fixture.path("cache/emulator")).unwrap();
    let said = fixture.fails(&["up"], 125);
    assert!(
        said.contains("emulator is missing") && said.contains("make run"),
        "{said}"
    );
    fixture.assert_clean();
}

#[test]
fn a_missing_host_system_is_named_with_what_makes_it() {
    let fixture = Fixture::new("nohost", "");
    fs::remove_file(fixture.path("cache/lab-host/current/rootfs.erofs")).unwrap();
    let said = fixture.fails(&["up"], 125);
    assert!(
        said.contains("rootfs.erofs does not exist") && said.contains("lab/host/recipe.sh"),
        "{said}"
    );
    fixture.assert_clean();
}

#[test]
fn a_port_that_is_taken_is_said_and_tried_once_if_it_was_asked_for() {
    let taken = r#"echo "qemu-system-x86_64: -netdev $net: Could not set up host forwarding rule '$net'" >&2
        echo tried >>"$(dirname "$0")/tried"; exit 1"#;
    let fixture = Fixture::new("port", taken);
    let said = fixture.fails(&["up", "--port", "4711"], 125);
    assert!(
        said.contains("a TCP port is taken") && said.contains("127.0.0.1:4711-:1024"),
        "{said}"
    );
    let tried = || {
        fs::read_to_string(fixture.path("cache/emulator/current/tried"))
            .unwrap()
            .lines()
            .count()
    };
    assert_eq!(tried(), 1);
    // A port of our own choice may be lost to another program meanwhile: then another one is tried, but not for ever.
    let said = fixture.fails(&["up"], 125);
    assert!(said.contains("a TCP port is taken"), "{said}");
    assert_eq!(tried(), 6);
    fixture.assert_clean();
}

#[test]
fn a_kernel_panic_is_tried_once_more_and_then_shown() {
    let panic = r#"daemon "printf '[ 1.0] Kernel panic - not syncing: no init\r\n' >>$console""#;
    let fixture = Fixture::new("panic", panic);
    let output = fixture.run(&["up"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.contains("trying once more"), "{said}");
    assert!(
        said.contains("basalt-lab: the lab's kernel panicked: no init; the console's last lines:"),
        "{said}"
    );
    fixture.assert_clean();
}

#[test]
fn a_lab_that_stands_still_is_ended() {
    let fixture = Fixture::new("still", r#"daemon "echo 'lab-init: kernel is up [1.00 s]' >>$console""#);
    let said = fixture.fails(&["up", "--timeout", "1"], 125);
    assert!(said.contains("did not answer within 1 seconds"), "{said}");
    fixture.assert_clean();
}

#[test]
fn an_emulator_that_ends_is_noticed() {
    let fixture = Fixture::new("ends", r#"daemon "echo booting >>$console; exit 0""#);
    let said = fixture.fails(&["up"], 125);
    assert!(said.contains("the emulator ended"), "{said}");
    fixture.assert_clean();
}

#[test]
fn a_failed_step_is_the_reason_and_is_not_tried_again() {
    let failed = r#"daemon "echo 'lab-init: failed: the disk did not appear [1.00 s]' >>$console""#;
    let fixture = Fixture::new("failed", failed);
    let said = fixture.fails(&["up"], 125);
    assert!(
        said.contains("the lab's start failed: the disk did not appear"),
        "{said}"
    );
    fixture.assert_clean();
}

#[test]
fn an_interrupted_start_leaves_nothing() {
    let fixture = Fixture::new("int", r#"daemon "echo booting >>$console""#);
    for (name, code) in [("-INT", 130), ("-TERM", 143)] {
        let mut child = fixture.command(&["up"]).stderr(Stdio::null()).spawn().unwrap();
        wait_for("the start", || fixture.is_booting());
        signal(&child, name);
        assert_eq!(child.wait().unwrap().code(), Some(code));
        fixture.assert_clean();
    }
}

#[test]
fn what_a_killed_start_left_is_cleaned_by_the_next_and_by_down() {
    let fixture = Fixture::new("killed", r#"daemon "echo booting >>$console""#);
    let start_and_kill = || {
        let mut child = fixture.command(&["up"]).stderr(Stdio::null()).spawn().unwrap();
        wait_for("the start", || fixture.is_booting());
        signal(&child, "-KILL");
        child.wait().unwrap();
    };
    start_and_kill();
    let left = fixture.processes();
    assert!(!left.is_empty());
    fixture.fails(&["up", "--timeout", "1"], 125);
    assert!(
        !left.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()),
        "{left:?} still runs"
    );
    fixture.assert_clean();
    start_and_kill();
    assert!(fixture.run(&["down"]).status.success());
    fixture.assert_clean();
}

#[test]
fn too_little_space_is_said_with_the_numbers() {
    let fixture = Fixture::new("space", "exit 1");
    let script = "mount -t tmpfs -o size=32m tmpfs \"$BASALT_LAB_STATE\" && exec \"$0\" up";
    let unshare = if is_root() {
        vec!["--mount"]
    } else {
        vec!["--mount", "--map-root-user"]
    };
    let output = Command::new("unshare")
        .args(unshare)
        .args(["sh", "-c", script])
        .arg(fixture.path("bin/basalt-lab"))
        .env("BASALT_CACHE", fixture.path("cache"))
        .env("BASALT_LAB_STATE", fixture.path("state"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(125), "{said}");
    assert!(said.contains("32 MiB are free") && said.contains("needs 512"), "{said}");
    fixture.assert_clean();
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn without_a_lab_every_command_says_how_to_get_one() {
    let fixture = Fixture::new("none", "exit 1");
    for arguments in [
        &["exec", "--", "true"][..],
        &["sync"],
        &["push", "/etc/hostname", "/tmp"],
    ] {
        let said = fixture.fails(arguments, 125);
        assert!(
            said.contains("the lab does not run; start it with `basalt-lab up`"),
            "{said}"
        );
    }
    assert_eq!(fixture.run(&["status"]).status.code(), Some(3));
    let output = fixture.run(&["status", "--json"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        r#"{"running":false,"stale":false}"#
    );
    assert!(fixture.run(&["down"]).status.success());
    fixture.assert_clean();
}

#[test]
fn a_lab_that_dies_during_a_command_is_said() {
    let fixture = Fixture::new("dies", "exit 1");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    fs::write(fixture.path("state/token"), "07".repeat(32)).unwrap();
    let pid_file = fixture.path("state/qemu.pid");
    let mut emulator = Command::new("sh")
        .args(["-c", "while sleep 0.1; do :; done", "emulator", "-pidfile"])
        .arg(&pid_file)
        .spawn()
        .unwrap();
    fs::write(&pid_file, emulator.id().to_string()).unwrap();
    let lab = format!(
        r#"{{"address":"{address}","token_file":{:?},"pid":{},"started":1,"cpus":2,"memory_mib":1024,"made_of":""}}"#,
        fixture.path("state/token"),
        emulator.id()
    );
    fs::write(fixture.path("state/lab.json"), lab).unwrap();
    wait_for("the stand-in", || fixture.processes() == [emulator.id()]);
    let agent = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        wire::accept(&mut stream, PROTOCOL, Some(&Token::new([7; 32]))).unwrap();
        let mut reader = FrameReader::new(stream.try_clone().unwrap());
        assert_eq!(reader.read().unwrap().unwrap().kind, kind::CONTROL);
        let started = serde_json::to_vec(&Reply::Started { pid: 2 }).unwrap();
        FrameWriter::new(stream).send(kind::CONTROL, 0, &started).unwrap();
    });
    let said = fixture.fails(&["exec", "--", "sleep", "60"], 125);
    agent.join().unwrap();
    assert!(
        said.contains("the lab ended while the command ran") && said.contains("basalt-lab logs"),
        "{said}"
    );
    emulator.kill().unwrap();
    emulator.wait().unwrap();
    // Its emulator is dead now: the state is stale, and `down` cleans it.
    assert_eq!(fixture.run(&["status"]).status.code(), Some(3));
    assert!(fixture.run(&["down"]).status.success());
    fixture.assert_clean();
}
