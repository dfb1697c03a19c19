//! What the integration tests share: one server in the test's process, and connections to it.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod files;
pub(crate) mod kept;
pub(crate) mod raw;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Once, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use agent::{Cgroups, Reaper, Server, ServerConfig};
use agent_api::{Connection, ExecRequest, ExitStatus, Token};

/// The one reaper of this process.
pub(crate) fn reaper() -> Reaper {
    static REAPER: OnceLock<Reaper> = OnceLock::new();
    REAPER.get_or_init(|| Reaper::start().unwrap()).clone()
}

/// Where cgroup2 may be mounted, and in it this process's own corner: another test program must not sweep it.
fn corners() -> [PathBuf; 2] {
    let own = format!("basalt-agent-test-{}", std::process::id());
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(|mount| Path::new(mount).join(&own))
}

/// The corner that [`cgroups`] has found.
pub(crate) fn corner() -> PathBuf {
    let found = corners()
        .into_iter()
        .find(|corner| corner.join("cgroup.procs").exists());
    found.expect("a corner of a cgroup2 file system")
}

/// The cgroup2 file system of this machine, if it has one. What is empty of it is removed when the process ends.
pub(crate) fn cgroups() -> Option<Cgroups> {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(register_sweep);
    corners().iter().find_map(|corner| {
        // Where this is no cgroup2 file system, it cannot be made, or is refused and swept.
        drop(std::fs::create_dir(corner));
        Cgroups::at(corner).ok()
    })
}

#[allow(unsafe_code, reason = "the test harness has no end that Rust code could wait for")]
fn register_sweep() {
    // SAFETY: `sweep` is a function that stays and does not unwind.
    let result = unsafe { libc::atexit(sweep) };
    assert_eq!(result, 0, "atexit");
}

/// Removes this process's cgroups once they are empty.
extern "C" fn sweep() {
    let end = Instant::now() + Duration::from_secs(3);
    for corner in corners() {
        let base = corner.join("basalt");
        while corner.exists() && Instant::now() < end {
            for entry in std::fs::read_dir(&base).into_iter().flatten().flatten() {
                // Files of a cgroup cannot be removed and need not be.
                drop(std::fs::remove_dir(entry.path()));
            }
            drop(std::fs::remove_dir(&base));
            if std::fs::remove_dir(&corner).is_err() {
                thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// A server with root `/`.
pub(crate) fn server_with(token: Option<Token>, cgroups: Option<Cgroups>) -> Server {
    let config = ServerConfig {
        token,
        cgroups,
        ..ServerConfig::in_place()
    };
    Server::new(config, reaper())
}

/// The same with cgroups where this machine has them.
pub(crate) fn server(token: Option<Token>) -> Server {
    server_with(token, cgroups())
}

/// A new connection to `server`.
pub(crate) fn connect_to(server: &Server) -> Connection<UnixStream> {
    let (near, far) = UnixStream::pair().unwrap();
    server.serve_in_thread(far);
    Connection::new(near, None).unwrap()
}

/// A new connection to the server that all tests of a process share.
pub(crate) fn connect() -> Connection<UnixStream> {
    static SERVER: OnceLock<Server> = OnceLock::new();
    connect_to(SERVER.get_or_init(|| server(None)))
}

/// A shell script.
pub(crate) fn sh(script: &str) -> ExecRequest {
    ExecRequest {
        argv: vec!["/bin/sh".into(), "-c".into(), script.into()],
        ..ExecRequest::default()
    }
}

/// Text that must be UTF-8.
pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Writes a program that can be started at once: by another process, because a descriptor of ours that is open for
/// writing could be inherited by what another test starts just then, and the program would be busy (ETXTBSY).
pub(crate) fn write_program(path: &Path, text: &str) {
    const WRITE: &str = r#"printf '%s\n' "$1" >"$0" && chmod 755 "$0""#;
    let mut command = Command::new("sh");
    command.arg("-c").arg(WRITE).arg(path).arg(text);
    assert_eq!(reaper().spawn(&mut command).unwrap().wait(), ExitStatus::Code(0));
}

/// Whether a process goes away in time.
pub(crate) fn gone(pid: u32, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        if !Path::new(&format!("/proc/{pid}")).exists() {
            return true;
        }
        thread::sleep(Duration::from_millis(10));
    }
    false
}
