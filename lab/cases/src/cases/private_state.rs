//! What other users of the host see of the state of real sandboxes: nothing is read, written, listed or connected to, and a
//! secret that a sandbox was given is in no command line, log or output.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "private-state",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

/// Nobody's user and group.
const STRANGER: u32 = 65534;

const SECRET: &str = "hunter2-and-more";

fn host(host: &Host) -> Result<()> {
    let daemon = Daemon::new(host)?;
    // Only the state itself is in the stranger's way.
    let mut above = Some(daemon.state.as_path());
    let mut before = Vec::new();
    while let Some(parent) = above.and_then(Path::parent) {
        let mode = fs::metadata(parent)?.permissions();
        before.push((parent.to_owned(), mode.clone()));
        fs::set_permissions(parent, fs::Permissions::from_mode(mode.mode() | 0o055))?;
        above = Some(parent);
    }
    let result = life(host, &daemon).and_then(|()| daemon.end());
    for (path, mode) in before {
        fs::set_permissions(path, mode)?;
    }
    result
}

fn life(host: &Host, daemon: &Daemon<'_>) -> Result<()> {
    let image = host.digest.as_str();
    let run = [
        "run",
        "-d",
        "--name",
        "web",
        "--memory",
        "128m",
        "--disk",
        "64m",
        "-v",
        "kept:/kept",
        "--env",
        "PASSWORD",
        image,
        "--",
        "sh",
        "-c",
        "echo begun; touch /kept/file; test -n \"$PASSWORD\" && sleep 10000",
    ];
    let mut command = daemon.command(&run);
    let output = command.env("PASSWORD", SECRET).output()?;
    crate::basalt::expect_code(&output, 0)?;
    let mut seen = command_lines()?;
    let plain = [
        "run", "-d", "--name", "plain", "--memory", "128m", image, "--", "sleep", "10000",
    ];
    daemon.ok(&plain)?;
    daemon.ok(&["snapshot", "create", "plain"])?;
    daemon.ok(&["clone", "plain-1", "--name", "clone"])?;
    for words in [
        &["inspect", "web"][..],
        &["--json", "ps"],
        &["--json", "inspect", "web"],
        &["daemon", "metrics"],
    ] {
        seen += &daemon.ok(words)?;
    }
    seen += &fs::read_to_string(daemon.state.join("basaltd.log"))?;
    ensure!(!seen.contains(SECRET), "the secret is seen: {seen}");
    ensure!(
        daemon.ok(&["inspect", "--show-secrets", "web"])?.contains(SECRET),
        "the sandbox has no secret"
    );

    let mut all = Vec::new();
    for entry in fs::read_dir(&daemon.state)? {
        let path = entry?.path();
        // The case's own, and the lab's images.
        if path != daemon.points && !path.is_symlink() {
            walk(&path, &mut all)?;
        }
    }
    for needed in [
        "node.db",
        "/disk",
        "/log",
        "/control",
        "/vsock",
        "plain-1/memory",
        "basaltd.sock",
    ] {
        let there = all.iter().any(|path| path.to_string_lossy().contains(needed));
        ensure!(there, "the state has no {needed}: {all:?}");
    }
    for path in &all {
        let Some(mode) = mode(path)? else { continue };
        let in_volume = path.components().any(|part| part.as_os_str() == "_data");
        ensure!(in_volume || mode & 0o077 == 0, "{} has mode {mode:o}", path.display());
    }
    all.push(daemon.state.clone());
    let reached = reached(&all)?;
    ensure!(reached.is_empty(), "another user reaches:\n{reached}");
    Ok(())
}

/// Everything below a directory. What the daemon, which is at work on a template, takes away meanwhile is not there.
fn walk(path: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    found.push(path.to_owned());
    if !path.is_symlink() && path.is_dir() {
        let entries = match fs::read_dir(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            walk(&entry?.path(), found)?;
        }
    }
    Ok(())
}

/// Its mode, if it is still there.
fn mode(path: &Path) -> Result<Option<u32>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        metadata => Ok(Some(metadata?.mode())),
    }
}

/// What of these a stranger can read, write or pass through, as `test` of sh says.
fn reached(paths: &[PathBuf]) -> Result<String> {
    let script = "for path; do for how in r w x; do test -$how \"$path\" && echo \"$how $path\"; done; done; true";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).args(paths);
    command
        .current_dir("/")
        .uid(STRANGER)
        .gid(STRANGER)
        .stdin(Stdio::null());
    let output = command.output()?;
    crate::basalt::expect_code(&output, 0)?;
    Ok(String::from_utf8(output.stdout)?)
}

fn command_lines() -> Result<String> {
    let mut lines = String::new();
    for entry in fs::read_dir("/proc")? {
        // Those that have ended meanwhile have none.
        let words = fs::read(entry?.path().join("cmdline")).unwrap_or_default();
        lines += &String::from_utf8_lossy(&words);
        lines.push('\n');
    }
    Ok(lines)
}
