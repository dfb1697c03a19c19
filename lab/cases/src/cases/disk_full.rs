//! The state directory's file system is full: a guest that writes stands still and goes on when there is space, what it wrote is
//! right and its root is not read-only; the daemon starts, lists and removes, and refuses to make anything.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::basalt::{expect_code, expect_refusal};
use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "disk-full",
    limit: Duration::from_secs(120),
    host,
    guest: None,
};

/// Of the file system with the state directory.
const SIZE: u64 = 160 << 20;

/// What is left of it when the guest writes: less than that takes.
const LEFT: u64 = 4 << 20;

/// When it is told to, writes 12 MiB, each of them flushed, and looks at what is there when nothing of it is in memory.
const WRITER: &str = "
import os
print('ready', flush=True)
input()
block = lambda n: bytes([n + 1]) * (1 << 20)
with open('/written', 'wb', buffering=0) as file:
    for number in range(12):
        file.write(block(number))
        os.fsync(file.fileno())
with open('/proc/sys/vm/drop_caches', 'w') as drop:
    drop.write('3')
with open('/written', 'rb') as file:
    for number in range(12):
        assert file.read(1 << 20) == block(number), number
print('all is right', flush=True)
";

/// The command that writes. It runs before space is short: a guest writes by itself, too, and one that stands still runs no
/// command.
struct Writer {
    process: Child,
    said: BufReader<ChildStdout>,
}

impl Writer {
    fn start(daemon: &Daemon<'_>) -> Result<Self> {
        let mut command = daemon.command(&["exec", "writer", "python3", "-c", WRITER]);
        let pipes = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = pipes.spawn()?;
        let said = BufReader::new(process.stdout.take().context("no standard output")?);
        let mut writer = Self { process, said };
        let mut line = String::new();
        writer.said.read_line(&mut line)?;
        match line.as_str() {
            "ready\n" => Ok(writer),
            other => writer.ended().context(format!("it began with {other:?}")),
        }
    }

    fn begin(&mut self) -> Result<()> {
        let mut input = self.process.stdin.take().context("no standard input")?;
        Ok(input.write_all(b"\n")?)
    }

    fn must_run(&mut self) -> Result<()> {
        match self.process.try_wait()? {
            None => Ok(()),
            Some(_) => self.ended(),
        }
    }

    fn must_end_well(&mut self) -> Result<()> {
        let mut rest = String::new();
        self.said.read_to_string(&mut rest)?;
        let right = rest == "all is right\n" && self.process.wait()?.success();
        if right {
            Ok(())
        } else {
            self.ended().context(format!("it said {rest:?}"))
        }
    }

    /// The error of a writer that should not have ended, or not so.
    fn ended<T>(&mut self) -> Result<T> {
        // One that waits for it ends by this.
        drop(self.process.stdin.take());
        let mut errors = String::new();
        if let Some(mut stderr) = self.process.stderr.take() {
            stderr.read_to_string(&mut errors)?;
        }
        bail!("the writer has ended, {}: {errors}", self.process.wait()?)
    }
}

/// A file system in a file, mounted; unmounted whatever becomes of the case.
struct Small {
    path: PathBuf,
}

impl Small {
    fn new(scratch: &Path) -> Result<Self> {
        let (file, path) = (scratch.join("small.img"), scratch.join("small"));
        File::create(&file)?.set_len(SIZE)?;
        fs::create_dir(&path)?;
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&file))?;
        run(Command::new("mount").args(["-n", "-o", "loop"]).arg(&file).arg(&path))?;
        Ok(Self { path })
    }

    fn filling(&self) -> PathBuf {
        self.path.join("filling")
    }

    /// Takes all space but so much.
    fn fill(&self, left: u64) -> Result<()> {
        let mut file = File::create(self.filling())?;
        let block = vec![1; 256 << 10];
        let full = loop {
            if let Err(error) = file.write_all(&block) {
                break error;
            }
        };
        ensure!(full.kind() == ErrorKind::StorageFull, "{full}");
        let length = file.metadata()?.len();
        file.set_len(length.saturating_sub(left))?;
        Ok(file.sync_all()?)
    }

    fn empty(&self) -> Result<()> {
        Ok(fs::remove_file(self.filling())?)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let unmounted = run(Command::new("umount").arg("-n").arg(&self.path));
        if let Err(error) = unmounted {
            eprintln!("{error:#}");
        }
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    expect_code(&output, 0).with_context(|| format!("{command:?}"))
}

fn host(host: &Host) -> Result<()> {
    let small = Small::new(&host.scratch)?;
    let daemon = Daemon::at(host, &small.path.join("state"))?;
    std::os::unix::fs::symlink("/var/lib/basalt/images", daemon.state.join("images"))?;
    let result = life(host, &daemon, &small);
    if small.filling().exists() {
        small.empty()?;
    }
    let ended = daemon.end();
    result.and(ended)
}

fn life(host: &Host, daemon: &Daemon<'_>, small: &Small) -> Result<()> {
    let image = host.digest.as_str();
    let idle = [
        "run", "-d", "--boot", "--memory", "128m", "--disk", "1g", "--name", "writer", image, "--", "sleep", "10000",
    ];
    daemon.ok(&idle)?;
    ensure!(daemon.state.join("reserve").exists(), "no room is held for records");
    let mut writer = Writer::start(daemon)?;
    small.fill(LEFT)?;
    writer.begin()?;
    wait_for_state(daemon, "paused (no space)")?;
    writer.must_run()?;

    // What needs a guest that runs, or space, is refused with the reason.
    let no_space = ["no space left", "`basalt prune`"];
    expect_refusal(&daemon.run(&["exec", "writer", "true"])?, 125, &no_space)?;
    expect_refusal(&daemon.run(&["snapshot", "create", "writer"])?, 1, &no_space)?;
    let another = ["run", "-d", "--boot", "--memory", "128m", image, "--", "true"];
    expect_refusal(
        &daemon.run(&another)?,
        125,
        &["no space left for a sandbox", "needed", "free in"],
    )?;

    // The next daemon finds it as it is, and lets it go on only when there is space.
    daemon.kill()?;
    wait_for_state(daemon, "paused (no space)")?;
    let known = daemon.find("writer")?.context("it is gone")?;
    ensure!(known["pause_reason"] == "no-space", "inspect: {known}");
    small.empty()?;
    wait_for_state(daemon, "running")?;
    writer.must_end_well()?;
    let root = "echo still > /etc/still && cat /etc/still && ! grep -q ' / .*[ ,]ro[, ]' /proc/mounts";
    ensure!(
        daemon.ok(&["exec", "writer", "sh", "-c", root])? == "still\n",
        "its root cannot be written"
    );

    // Full to the last block: what is there can be listed and removed, by a daemon that starts now, too.
    daemon.kill()?;
    small.fill(0)?;
    ensure!(daemon.list()?.len() == 1, "it is not listed");
    daemon.ok(&["rm", "--force", "writer"])?;
    ensure!(
        daemon.ok(&["prune"])?.is_empty() && daemon.list()?.is_empty(),
        "something is left"
    );
    Ok(())
}

/// As `basalt ps` shows it.
fn wait_for_state(daemon: &Daemon<'_>, wanted: &str) -> Result<()> {
    let mut shown = String::new();
    let waited = wait_for(wanted, || {
        shown = daemon.ok(&["ps"])?;
        Ok(shown
            .lines()
            .any(|line| line.contains("writer") && line.contains(wanted)))
    });
    match waited {
        Ok(()) => Ok(()),
        Err(error) => {
            let log = fs::read_to_string(daemon.state.join("basaltd.log")).unwrap_or_default();
            bail!("{error:#}: basalt ps shows\n{shown}\nthe daemon says\n{log}")
        }
    }
}
