//! A place with an image, assets and the program, and ways to run it: with pipes, and on a terminal.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

#[path = "../support/mod.rs"]
mod support;

#[path = "../support/registry.rs"]
mod registry;

#[path = "../support/program.rs"]
mod program;

pub(crate) use program::{PATIENCE, Running, Terminal, text, wait_for};
pub(crate) use registry::{CREDENTIALS, Registry};

pub(crate) struct World {
    directory: tempfile::TempDir,
}

impl World {
    /// `play` is what the stand-in for the VMM is to do.
    pub(crate) fn new(play: &str) -> Self {
        Self::prepared(play, |_| ())
    }

    /// The same in a directory where something is done before there is a state directory.
    pub(crate) fn prepared(play: &str, prepare: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let world = Self { directory };
        prepare(world.directory.path());
        let assets = world.path("basalt-assets");
        fs::create_dir(&assets).unwrap();
        fs::write(assets.join("vmlinux"), play).unwrap();
        fs::write(assets.join("initramfs.cpio"), "").unwrap();
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), assets.join("basalt-vmm")).unwrap();
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), world.path("basaltd")).unwrap();
        support::write_layout(
            &world.path("layout"),
            &json!({ "Cmd": ["sh", "-c", "echo the image; pwd; echo $A$B"], "Env": ["A=1", "B=2"], "WorkingDir": "/usr" }),
        );
        let output = world
            .command(&["import", "--name", "tiny", world.path("layout").to_str().unwrap()])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_basalt"));
        command
            .args(args)
            .env("BASALT_STATE", self.path("state"))
            .env("BASALT_ASSETS", self.path("basalt-assets"))
            .env("BASALT_ENGINE", "kvm")
            // The stand-in does nothing with the device that it is given.
            .env("BASALT_KVM", "/dev/null")
            .env("BASALT_DAEMON", self.path("basaltd"))
            .stdin(Stdio::null());
        command
    }

    /// Runs a verb to its end.
    pub(crate) fn verb(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Processes whose command line holds `text`, by their numbers.
    fn processes(&self, text: &str) -> Vec<u32> {
        let text = self.path(text).display().to_string();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let words = fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
            if words.contains(&text) && pid != std::process::id() && is_alive(pid) {
                found.push(pid);
            }
        }
        found
    }

    /// The processes that stand in for VMMs.
    pub(crate) fn vmms(&self) -> Vec<u32> {
        self.processes("basalt-assets/basalt-vmm")
    }

    /// The process that stands in for the VMM.
    pub(crate) fn vmm(&self) -> u32 {
        wait_for("the VMM", || self.vmms().first().copied())
    }

    /// The daemon.
    pub(crate) fn daemon(&self) -> Option<u32> {
        self.processes("state").first().copied()
    }

    /// Waits until it is gone. Of one that was killed the socket still listens for a moment when /proc has its command line no more.
    pub(crate) fn wait_for_no_daemon(&self) {
        let socket = self.path("state").join(node_api::SOCKET);
        wait_for("the daemon to be gone", || {
            (self.daemon().is_none() && node_api::Client::connect(&socket).is_err()).then_some(())
        });
    }

    /// Runs a command in a sandbox and waits for it.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        let mut command = self.command(&["run", "--rm", "--disk", "0"]);
        command.args(args).output().unwrap()
    }

    /// Starts a command in a sandbox, with pipes.
    pub(crate) fn start(&self, args: &[&str]) -> Running {
        let mut command = self.command(&["run", "--rm", "--disk", "0"]);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Running(command.spawn().unwrap())
    }

    /// Starts a command in a sandbox on a new terminal of this size.
    pub(crate) fn start_on_terminal(&self, args: &[&str], rows: u16, cols: u16) -> Terminal {
        let mut command = self.command(&["run", "--rm", "--disk", "0", "-it"]);
        command.args(args);
        Terminal::start(command, rows, cols)
    }
}

impl Drop for World {
    /// The daemon and what it has outlive a test, also one that fails.
    fn drop(&mut self) {
        let begun = Instant::now();
        // Again until there are none: several daemons may have been started at once, and wait for each other's lock.
        while begun.elapsed() < PATIENCE {
            let mut pids = self.processes("state");
            pids.extend(self.vmms());
            if pids.is_empty() {
                break;
            }
            for pid in pids {
                if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
                    // It may end by itself just now.
                    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap_or_default();
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
        let Some(root) = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2")) else {
            return;
        };
        let root = root.split(' ').nth(1).unwrap_or_default();
        remove_cgroups(&Path::new(root).join(node::instance(&self.path("state"))));
    }
}

/// Removes a cgroup and those below; a killed process leaves its own a moment later.
fn remove_cgroups(base: &Path) {
    let begun = Instant::now();
    while base.exists() && begun.elapsed() < PATIENCE {
        for entry in fs::read_dir(base).into_iter().flatten().flatten() {
            // What a stand-in has started outlives it, as no guest's command does. Files of a cgroup are no directories,
            // and need not be removed.
            fs::write(entry.path().join("cgroup.kill"), "1").unwrap_or_default();
            for below in directories(&entry.path()) {
                directories(&below)
                    .iter()
                    .for_each(|path| fs::remove_dir(path).unwrap_or_default());
                fs::remove_dir(below).unwrap_or_default();
            }
            fs::remove_dir(entry.path()).unwrap_or_default();
        }
        if fs::remove_dir(base).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn directories(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// The process runs, and is no zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// A verb that must be done; what it prints.
#[track_caller]
pub(crate) fn done(world: &World, words: &[&str]) -> String {
    let output = world.verb(words);
    assert_eq!(output.status.code(), Some(0), "{words:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// The same of a verb that tells machines.
#[track_caller]
pub(crate) fn json(world: &World, words: &[&str]) -> serde_json::Value {
    let words: Vec<&str> = ["--json"].iter().chain(words).copied().collect();
    serde_json::from_str(&done(world, &words)).unwrap()
}
