//! A place with an image, assets and the program, and ways to run it: with pipes, and on a terminal.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::json;

#[path = "../support/mod.rs"]
mod support;

#[path = "../support/registry.rs"]
mod registry;

pub(crate) use registry::{CREDENTIALS, Registry};

/// More than any of these cases needs on a machine that does other things, too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

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
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let slave = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        resize(&master, rows, cols);
        let mut command = self.command(&["run", "--rm", "--disk", "0", "-it"]);
        command.args(args).env("TERM", "vt100");
        command
            .stdin(slave.try_clone().unwrap())
            .stdout(slave.try_clone().unwrap())
            .stderr(slave);
        // SAFETY: the closure runs between fork and exec; both calls are async-signal-safe system calls.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        // The command holds the slave's descriptors; the terminal must hang up when the child has gone.
        drop(command);
        Terminal {
            master: File::from(master),
            seen: String::new(),
            child: Running(child),
        }
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

fn resize(master: impl AsFd, rows: u16, cols: u16) {
    tcsetwinsize(
        master,
        Winsize {
            ws_row: rows,
            ws_col: cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        },
    )
    .unwrap();
}

/// A `basalt run` in progress, killed if the test fails.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Reads a line of its standard output, byte by byte: nothing is read ahead.
    pub(crate) fn line(&mut self) -> String {
        let mut line = Vec::new();
        let out = self.0.stdout.as_mut().unwrap();
        let mut byte = [0];
        while out.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for the end; tells the exit code and what was written to standard error.
    pub(crate) fn end(&mut self) -> (Option<i32>, String) {
        let status = wait_for("the end of basalt run", || self.0.try_wait().unwrap());
        let mut stderr = Vec::new();
        if let Some(pipe) = &mut self.0.stderr {
            pipe.read_to_end(&mut stderr).unwrap();
        }
        (status.code(), text(&stderr))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|status| status.is_none()) {
            self.0
                .kill()
                .and_then(|()| self.0.wait())
                .expect("a child that can be killed");
        }
    }
}

/// A `basalt run` on a terminal.
pub(crate) struct Terminal {
    master: File,
    seen: String,
    pub(crate) child: Running,
}

impl Terminal {
    pub(crate) fn type_in(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn resize(&mut self, rows: u16, cols: u16) {
        resize(&self.master, rows, cols);
    }

    /// Reads what the terminal shows until `wanted` is in it; forgets all up to its end.
    pub(crate) fn expect(&mut self, wanted: &str) {
        let mut buffer = [0; 4096];
        loop {
            if let Some(at) = self.seen.find(wanted) {
                self.seen.drain(..at + wanted.len());
                return;
            }
            let mut fds = [PollFd::new(&self.master, PollFlags::IN)];
            let limit = Timespec::try_from(PATIENCE).unwrap();
            assert!(
                poll(&mut fds, Some(&limit)).unwrap() > 0,
                "`{wanted}` did not come in time, but: {:?}",
                self.seen
            );
            // A terminal whose other side is closed reads as EIO.
            let got = self.master.read(&mut buffer).unwrap_or(0);
            assert!(got > 0, "`{wanted}` did not come, but: {:?}", self.seen);
            self.seen.push_str(&String::from_utf8_lossy(&buffer[..got]));
        }
    }
}

/// The process runs, and is no zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Asks until there is an answer.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begun.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
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

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
