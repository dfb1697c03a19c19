//! A daemon that zeroes memory ahead: it is there soon after its start, charged to a cgroup of its own, and nothing is left of it when the daemon
//! has ended, in whichever way.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base::ByteSize;
use host::cgroup::Root;
use node_api::{Client, NodeInfo, Reply, Request, SOCKET, ZeroedMemory};

const PIECE: ByteSize = node::ZEROED_PIECE;

/// The cgroup of what is zeroed.
const ZEROED: &str = "zeroed-memory";

/// More than anything here takes.
const PATIENCE: Duration = Duration::from_secs(90);

struct Daemon {
    directory: tempfile::TempDir,
    process: Child,
}

impl Daemon {
    /// `None`, with the reason on standard error, where nobody can have such memory.
    fn start(pieces: u64) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root may make a tmpfs");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_basaltd"))
            .arg("--state")
            .arg(directory.path())
            .args(["--no-users", "--zeroed-memory", &(pieces * PIECE.bytes()).to_string()])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { directory, process })
    }

    fn client(&self) -> Client {
        let socket = self.directory.path().join(SOCKET);
        until("the daemon listens", || Client::connect(&socket).ok())
    }

    fn told(&self) -> ZeroedMemory {
        let (Reply::Info(NodeInfo { zeroed_memory, .. }), _) = self.client().ask(Request::Info).unwrap() else {
            panic!("no answer to `info`")
        };
        zeroed_memory.unwrap()
    }

    /// Waits until all of it is ready, or the host cannot have it; whether it is.
    fn is_ready(&self) -> bool {
        let told = until("memory is zeroed", || {
            Some(self.told()).filter(|told| told.ready == told.size || told.failed.is_some())
        });
        if let Some(why) = &told.failed {
            eprintln!("this host has none: {why}");
        }
        told.failed.is_none()
    }

    /// The node's cgroups, where it has some.
    fn cgroups(&self) -> Option<Root> {
        let root = Root::open(&node::instance(self.directory.path()));
        root.inspect_err(|error| eprintln!("without cgroups: {error}")).ok()
    }
}

/// One whose test has failed does not go on.
impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

fn until<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes of shared memory that are charged to the cgroup of what is zeroed, where the host counts them.
fn shared(root: &Root) -> Option<u64> {
    let stat = std::fs::read_to_string(root.path().join(ZEROED).join("memory.stat"));
    let stat = stat
        .inspect_err(|error| eprintln!("what is charged is not known: {error}"))
        .ok()?;
    let value = stat.lines().find_map(|line| line.strip_prefix("shmem "))?;
    value.parse().ok()
}

#[test]
fn it_is_ready_soon_and_a_daemon_that_cleans_up_leaves_nothing() {
    let Some(mut daemon) = Daemon::start(2) else { return };
    let is_ready = daemon.is_ready();
    let root = daemon.cgroups();
    if let Some(root) = &root {
        let its = root.find(ZEROED).unwrap().unwrap();
        assert!(its.usage().unwrap().cpu_usec > 0, "nobody has worked in it");
        if let Some(bytes) = shared(root).filter(|_| is_ready) {
            assert_eq!(bytes, 2 * PIECE.bytes());
        }
    }
    daemon.client().ask(Request::Quit { clean: true }).unwrap();
    assert!(daemon.process.wait().unwrap().success());
    if let Some(root) = root {
        assert!(!root.path().exists(), "{} is left", root.path().display());
    }
}

#[test]
fn a_daemon_that_is_killed_leaves_no_memory_and_nobody_who_fills_some() {
    let Some(mut daemon) = Daemon::start(1) else { return };
    let is_ready = daemon.is_ready();
    daemon.process.kill().unwrap();
    daemon.process.wait().unwrap();
    let Some(root) = daemon.cgroups() else { return };
    let zeroed = root.find(ZEROED).unwrap().unwrap();
    zeroed.wait_empty(PATIENCE).unwrap();
    if is_ready {
        // What was charged is given back a little later.
        until("it is free", || (shared(&root).unwrap_or(0) == 0).then_some(()));
    }
    for name in root.list().unwrap() {
        root.remove(&name).unwrap();
    }
    root.remove_root().unwrap();
}
