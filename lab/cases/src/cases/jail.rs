//! The jail of a VMM that runs a guest: what the kernel says of its process and threads, and what becomes of it when one
//! of its threads makes a system call that is none of that thread's.

use std::collections::BTreeSet;
use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::time::Duration;

use agent_api::{Connection, VSOCK_PORT};
use anyhow::{Context, Result, ensure};
use vmm_api::devices::{BlockConfig, BlockEngine, BlockLimits};

use super::snapshot_files::Files;
use super::vsock::connect;
use crate::daemon::wait_for;
use crate::intrude::Intruder;
use crate::vm::{Builder, Vm};
use crate::{Case, Host};

pub(crate) const WALLS: Case = Case {
    name: "jail-walls",
    limit: Duration::from_secs(120),
    host: walls,
    guest: None,
};

pub(crate) const CALLS: Case = Case {
    name: "jail-calls",
    limit: Duration::from_secs(400),
    host: calls,
    guest: None,
};

/// A thread of each kind that lives as long as its VM (the loader does not: `bin/vmm/tests/seccomp.rs` has it), and a call
/// that others of them may make, or none.
const INTRUSIONS: [(&str, libc::c_long); 9] = [
    ("basalt-vmm", libc::SYS_getppid),
    ("threads", libc::SYS_getppid),
    ("vcpu0", libc::SYS_clone),
    ("block-q0", libc::SYS_recvmsg),
    ("block-io", libc::SYS_io_uring_enter),
    ("console", libc::SYS_sendmsg),
    ("rng", libc::SYS_io_uring_enter),
    ("vsock", libc::SYS_openat),
    ("vcpu0", libc::SYS_openat),
];

/// A VM with a disk on io_uring and one on threads.
fn builder(host: &Host) -> Result<Builder<'_>> {
    let mut builder = Builder::new(host)?;
    let file = builder.fd(host.image()?);
    let config = BlockConfig {
        file,
        read_only: true,
        queues: 1,
        serial: "threads".into(),
        engine: BlockEngine::Threads,
        limits: BlockLimits::default(),
    };
    builder.device("threads", &config)?;
    Ok(builder)
}

/// One with its agent ready: then all its threads are there.
fn machine(host: &Host, listener: Option<&UnixListener>) -> Result<Vm> {
    let listener = listener.map(UnixListener::try_clone).transpose()?;
    let machine = builder(host)?.start_listening(listener.map(Into::into))?;
    machine.agent()?;
    Ok(machine)
}

/// The threads of a process: name and number.
fn threads(pid: u32) -> Result<Vec<(String, i32)>> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))?;
    tasks
        .map(|task| {
            let path = task?.path();
            let number = path
                .file_name()
                .and_then(|name| name.to_str())
                .context("a thread without a number")?;
            Ok((
                fs::read_to_string(path.join("comm"))?.trim().to_owned(),
                number.parse()?,
            ))
        })
        .collect()
}

/// One line of a `status` file of /proc.
fn status(directory: &str, key: &str) -> Result<String> {
    let text = fs::read_to_string(format!("{directory}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    Ok(line
        .with_context(|| format!("{directory}/status has no {key}"))?
        .trim()
        .to_owned())
}

fn walls(host: &Host) -> Result<()> {
    let machine = machine(host, None)?;
    let pid = machine.vmm.pid();
    let own = format!("/proc/{pid}");
    for kind in ["user", "pid", "mnt", "net", "ipc", "uts"] {
        let (theirs, ours) = (
            fs::read_link(format!("{own}/ns/{kind}"))?,
            fs::read_link(format!("/proc/self/ns/{kind}"))?,
        );
        ensure!(theirs != ours, "it shares our {kind} namespace");
    }
    ensure!(
        !status(&own, "Uid")?.split_whitespace().any(|uid| uid == "0"),
        "it is root outside"
    );
    let named: BTreeSet<String> = threads(pid)?.into_iter().map(|(name, _)| name).collect();
    for (name, _) in INTRUSIONS {
        ensure!(named.contains(name), "there is no thread {name} in {named:?}");
    }
    for (name, thread) in threads(pid)? {
        let task = format!("{own}/task/{thread}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            let set_is = status(&task, set)?;
            ensure!(set_is.bytes().all(|digit| digit == b'0'), "{name} has {set} {set_is}");
        }
        ensure!(status(&task, "NoNewPrivs")? == "1", "{name} can gain privileges");
        let filters: u32 = status(&task, "Seccomp_filters")?.parse()?;
        ensure!(filters >= filters_of(&name), "{name} has {filters} filters");
    }
    let root = fs::read_dir(format!("{own}/root"))?.count();
    ensure!(root == 0, "its root has {root} entries");
    let mounts = fs::read_to_string(format!("{own}/mounts"))?;
    ensure!(
        mounts.lines().count() == 1 && mounts.contains(" ro,"),
        "its mounts are:\n{mounts}"
    );
    let addresses = fs::read_to_string(format!("{own}/net/route"))?;
    ensure!(addresses.lines().count() <= 1, "it has a network:\n{addresses}");
    descriptors(&own)
}

/// Every descriptor is of a kind that was handed over or is the VMM's own; nothing leads to a directory.
fn descriptors(own: &str) -> Result<()> {
    for entry in fs::read_dir(format!("{own}/fd"))? {
        let path = entry?.path();
        let target = fs::read_link(&path)?;
        ensure!(
            !fs::metadata(&path)?.is_dir(),
            "it has the directory {} open",
            target.display()
        );
        let is = |start: &str| target.starts_with(Path::new(start));
        // Its own page map, which snapshots need, and of no other process: a path within the file system of processes.
        let pagemap = own.replace("/proc", "") + "/pagemap";
        let named = target.is_absolute() && target != Path::new(&pagemap);
        ensure!(
            !named || is("/dev/null") || is("/dev/kvm") || is("/var/lib/basalt") || is("/opt/basalt") || is("/tmp"),
            "it has {} open",
            target.display()
        );
    }
    Ok(())
}

/// One thread of each kind makes its call in a VM of its own: the first one has booted, the others are restored from what was kept
/// of it, which have the same threads and filters and are there ten times as soon.
fn calls(host: &Host) -> Result<()> {
    let address = SocketAddr::from_abstract_name(format!("basalt-case-jail-{}", std::process::id()))?;
    let listener = UnixListener::bind_addr(&address)?;
    let mut booted = machine(host, Some(&listener))?;
    let mut files = Files::new(host, "kept");
    booted.vmm.client.pause()?;
    files.take(&mut booted)?;
    booted.vmm.client.resume()?;
    let restored = || -> Result<Vm> {
        let (state, memory) = files.open()?;
        let mut machine = builder(host)?.restore(listener.try_clone()?.into(), state, memory)?;
        machine.vmm.client.resume()?;
        // Its guest goes on: its devices are at work.
        Connection::new(connect(&address, VSOCK_PORT)?, None)?;
        Ok(machine)
    };
    let mut booted = Some(booted);
    for (name, call) in INTRUSIONS {
        let mut machine = booted.take().map_or_else(restored, Ok)?;
        let (pid, thread) = (machine.vmm.pid(), thread(&machine, name)?);
        Intruder::seize(pid, thread)?
            .make(call)
            .with_context(|| format!("in {name}"))?;
        let ended = machine.vmm.wait_status(Duration::from_secs(20));
        let ended = ended.with_context(|| format!("{name} has made call {call}, and lives"))?;
        ensure!(
            ended.terminating_signal() == Some(libc::SIGSYS),
            "{name} made call {call}, and its process ended so: {ended:?}"
        );
    }
    // A call that is allowed does not kill: it is the filter, not the intrusion.
    let mut machine = restored()?;
    let thread = thread(&machine, "rng")?;
    Intruder::seize(machine.vmm.pid(), thread)?.make(libc::SYS_getpid)?;
    std::thread::sleep(Duration::from_millis(500));
    machine.vmm.client.info()?;
    Ok(())
}

/// How many filters a thread of this name has at least.
fn filters_of(name: &str) -> u32 {
    if name == "threads" { 1 } else { 2 }
}

/// The number of the thread of this name, when it has begun: it has its filters, and waits. A call in place of one that it makes before
/// would be looked at by another's filter, and what it makes of the answer is not what is tested here.
fn thread(machine: &Vm, name: &str) -> Result<i32> {
    let pid = machine.vmm.pid();
    let found = threads(pid)?.into_iter().find(|(found, _)| found == name);
    let (_, thread) = found.with_context(|| format!("there is no thread {name}"))?;
    let task = format!("/proc/{pid}/task/{thread}");
    wait_for("a thread to have begun", || {
        let filters: u32 = status(&task, "Seccomp_filters")?.parse()?;
        let waits = status(&task, "State")?.starts_with('S') || name.starts_with("vcpu");
        Ok(waits && filters >= filters_of(name))
    })
    .with_context(|| name.to_owned())?;
    Ok(thread)
}
