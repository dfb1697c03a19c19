//! What a case may not leave behind, found by asking the kernel, not ourselves.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;

/// Programs of ours that live only as long as a command; the daemon that is there already stays.
const PROGRAMS: [&str; 4] = ["basalt", "basaltd", "basalt-vmm", "qemu-system-x86"];

/// Directories in which nothing new may be.
const DIRECTORIES: [&str; 9] = [
    "/tmp",
    "/run",
    "/run/netns",
    "/sys/class/net",
    "/var/lib/basalt",
    "/var/lib/basalt/images",
    "/var/lib/basalt/sandboxes",
    "/var/lib/basalt/run",
    "/sys/fs/cgroup/basalt-node",
];

/// What exists at one moment.
pub(crate) struct Snapshot(BTreeSet<String>);

impl Snapshot {
    /// Looks at processes, mounts, loop devices, named sockets, files, links, network namespaces and tables of packet filters.
    pub(crate) fn take() -> Result<Self> {
        let mut found = BTreeSet::new();
        for (pid, name) in processes()? {
            found.insert(format!("process {name} ({pid})"));
        }
        for line in fs::read_to_string("/proc/mounts")?.lines() {
            // What `ip netns` makes of this directory at its first use, once.
            if line.split(' ').nth(1) == Some("/run/netns") {
                continue;
            }
            found.insert(format!("mount {line}"));
        }
        for line in fs::read_to_string("/proc/net/unix")?.lines().skip(1) {
            if let Some(name) = line.split_whitespace().nth(7) {
                found.insert(format!("socket {name}"));
            }
        }
        for entry in fs::read_dir("/sys/block")? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let backing = Path::new("/sys/block").join(&name).join("loop/backing_file");
            if backing.exists() {
                found.insert(format!("loop device {name}"));
            }
        }
        let tables = Command::new("nft").args(["list", "tables"]).output()?;
        for table in String::from_utf8_lossy(&tables.stdout).lines() {
            found.insert(format!("nft {table}"));
        }
        for directory in DIRECTORIES {
            let Ok(entries) = fs::read_dir(directory) else { continue };
            for entry in entries {
                found.insert(format!("file {}", entry?.path().display()));
            }
        }
        Ok(Self(found))
    }

    /// What is there now and was not then; waits so long for it to go, as killed processes take their time.
    pub(crate) fn compare_within(&self, limit: Duration) -> Result<Vec<String>> {
        let deadline = Instant::now() + limit;
        loop {
            let now = Self::take()?;
            let new: Vec<_> = now.0.difference(&self.0).cloned().collect();
            if new.is_empty() || Instant::now() >= deadline {
                return Ok(new);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn processes() -> Result<Vec<(i32, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process that has gone meanwhile is none.
        let Ok(name) = fs::read_to_string(format!("/proc/{pid}/comm")) else {
            continue;
        };
        let name = name.trim_end();
        if PROGRAMS.contains(&name) {
            found.push((pid, name.to_owned()));
        }
    }
    Ok(found)
}

/// Kills what a case that was killed has left running.
pub(crate) fn kill_left_over() -> Result<()> {
    for (pid, _) in processes()? {
        if let Some(pid) = rustix::process::Pid::from_raw(pid) {
            match rustix::process::kill_process(pid, rustix::process::Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => (),
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}
