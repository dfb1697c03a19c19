//! A PID 1 that is its own client, for a VM without vsock (QEMU): boots as the agent does, prepares a root from
//! `/dev/vda`, runs commands in it, prints what they said and powers off. `docs/agent.md` has the command line.

use std::os::unix::net::UnixStream;
use std::time::{SystemTime, UNIX_EPOCH};

use agent_api::{Connection, DiskName, Error, ExecRequest, PowerAction, Prepare, RootDisk, Shutdown, Tty, WinSize};

const SCRIPT: &str = "id; pwd; hostname; date +%Y; cat /etc/hosts; mount; cat /proc/self/cgroup; \
    ls -l /dev/fd /dev/null /dev/ptmx; ping -c1 127.0.0.1 >/dev/null && echo loopback; touch /new && ls /; \
    grep -E 'VmRSS|RssAnon|Threads' /proc/1/status; ulimit -n; free -k; cat /proc/sys/kernel/random/entropy_avail";

fn main() {
    let started_ns = agent::boottime_ns();
    if std::process::id() != 1 {
        eprintln!("boot_check: this is for PID 1 of a virtual machine");
        return;
    }
    let server = agent::guest::boot(started_ns).unwrap_or_else(|error| agent::fatal(&error));
    let outcome = UnixStream::pair()
        .map_err(|error| error.to_string())
        .and_then(|(near, far)| {
            server.serve_in_thread(far);
            check(near).map_err(|error| error.to_string())
        });
    agent::fatal(&format!("the check is over: {outcome:?}"));
}

fn check(stream: UnixStream) -> Result<(), Error> {
    let mut connection = Connection::new(stream, None)?;
    eprintln!("{:?}", connection.hello()?);
    eprintln!("before: {:?}", connection.exec(&sh("true")).map(|running| running.pid));
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    let mut prepare = Prepare {
        root: RootDisk {
            disk: DiskName::Path("/dev/vda".to_owned()),
            fs: "ext4".to_owned(),
        },
        writable: None,
        overlay_bytes: Some(16 << 20),
        hostname: "checked".to_owned(),
        machine_id: None,
        clock_ns: now.max(1_900_000_000) * 1_000_000_000,
        entropy: vec![7; 64],
        network: None,
        shared_directories: Vec::new(),
        tmpfs: Vec::new(),
        pids_max: None,
        accelerator: None,
    };
    eprintln!("wrong file system: {:?}", connection.prepare(&prepare));
    "erofs".clone_into(&mut prepare.root.fs);
    connection.prepare(&prepare)?;
    eprintln!("again: {:?}", connection.prepare(&prepare));
    for request in [
        sh(SCRIPT),
        ExecRequest {
            user: Some("4711".into()),
            ..sh("id; echo x > /dev/stdout; exit 3")
        },
    ] {
        let result = connection.exec(&request)?.collect()?;
        eprintln!("{:?}\n{}", result.status, String::from_utf8_lossy(&result.stdout));
        eprintln!("stderr: {}", String::from_utf8_lossy(&result.stderr));
    }
    let tty = Tty {
        size: WinSize { rows: 11, cols: 22 },
        term: None,
    };
    let result = connection
        .exec(&ExecRequest {
            tty: Some(tty),
            ..sh("stty size; tty; tail -n1 /proc/mounts")
        })?
        .collect()?;
    eprintln!("{:?} {:?}", result.status, String::from_utf8_lossy(&result.stdout));
    // An orphan, for the reaper; and something that must be killed at the end.
    let result = connection
        .exec(&sh("(sleep 0.2 &) ; sleep 1000 & echo left; sleep 0.5; ps"))?
        .collect()?;
    eprintln!("{:?}\n{}", result.status, String::from_utf8_lossy(&result.stdout));
    connection.shutdown(Shutdown {
        how: PowerAction::PowerOff,
        grace_ms: 0,
    })
}

fn sh(script: &str) -> ExecRequest {
    ExecRequest {
        argv: vec!["sh".into(), "-c".into(), script.into()],
        ..ExecRequest::default()
    }
}
