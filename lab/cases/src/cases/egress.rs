//! What a sandbox may reach of the world, with real guests: all of it without a policy, nothing and little with one, from the beginning, while
//! it runs, in clones, with another daemon and after it was suspended. A connection that is open to whom it may not reach any more ends.
//!
//! The world is that of the case `network`, with one more address.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::network::{WORLD4, WORLD6, World, ip};
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "egress",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

/// Another one in the world.
const OTHER4: &str = "203.0.113.5";

/// Everything, as it is denied.
const ALL: &str = "0.0.0.0/0";

/// Says which of some addresses a TCP connection comes about to, or a datagram is answered from: all are tried at once.
const REACH: &str = "
import socket, sys, threading
reached = set()
def tcp(address, family):
    s = socket.socket(family, socket.SOCK_STREAM)
    s.settimeout(5)
    s.connect((address, 7000))
    if s.recv(1): reached.add(address)
def udp(address, family):
    s = socket.socket(family, socket.SOCK_DGRAM)
    s.settimeout(5)
    s.connect((address, 7000))
    s.send(b'hello')
    if s.recv(99): reached.add(address)
def quiet(work, address):
    try: work(address, socket.AF_INET6 if ':' in address else socket.AF_INET)
    except OSError: pass
threads = [threading.Thread(target=quiet, args=(w, a)) for w in (tcp, udp) for a in sys.argv[1:]]
for t in threads: t.start()
for t in threads: t.join()
print(*sorted(reached))";

/// Talks over one connection until that is silent, and says so in a file.
const TALK: &str = "
import socket, sys, time
s = socket.create_connection((sys.argv[1], 7000))
while s.recv(1) != b'\\n': pass
s.settimeout(5)
try:
    while True:
        s.sendall(b'x')
        if s.recv(1) != b'x': break
        open('/talks', 'w').write('yes')
        time.sleep(0.2)
except OSError: pass
open('/cut', 'w').write('yes')";

/// What answers it is this, and nothing else.
fn reaches(daemon: &Daemon<'_>, name: &str, wanted: &[&str]) -> Result<()> {
    let words = ["exec", name, "python3", "-c", REACH, WORLD4, OTHER4, WORLD6];
    let said = daemon.ok(&words)?;
    let reached: Vec<&str> = said.split_whitespace().collect();
    ensure!(
        reached == wanted,
        "{name} reaches {reached:?}, and may reach {wanted:?}"
    );
    Ok(())
}

fn update(daemon: &Daemon<'_>, flags: &[&str]) -> Result<()> {
    daemon
        .ok(&[&["network", "update", "web"][..], flags].concat())
        .map(drop)
}

fn run(daemon: &Daemon<'_>, name: &str, flags: &[&str]) -> Result<()> {
    let words = ["run", "-d", "--memory", "128m", "--name", name];
    let command = [daemon.image(), "--", "sleep", "10000"];
    daemon.ok(&[&words[..], flags, &command].concat()).map(drop)
}

fn host(host: &Host) -> Result<()> {
    let world = World::new()?;
    ip(&format!("-n case-world address add {OTHER4}/32 dev lo"))?;
    // It goes with its link.
    ip(&format!("route add {OTHER4}/32 via {WORLD4} dev case0"))?;
    let _server = world.serve(&["[::]:7000"])?;
    let daemon = Daemon::with_templates(host)?;
    run(&daemon, "free", &[])?;
    run(&daemon, "web", &["--egress-deny", ALL])?;
    reaches(&daemon, "free", &[WORLD4, WORLD6, OTHER4])?;
    reaches(&daemon, "web", &[])?;
    let only_other = ["--egress-deny", ALL, "--egress-allow", OTHER4];
    update(&daemon, &only_other)?;
    reaches(&daemon, "web", &[OTHER4])?;
    is_cut(&daemon)?;
    // The daemon that comes next, and another machine of it.
    daemon.kill()?;
    reaches(&daemon, "web", &[])?;
    update(&daemon, &only_other)?;
    daemon.ok(&["suspend", "web"])?;
    daemon.ok(&["resume", "web"])?;
    reaches(&daemon, "web", &[OTHER4])?;
    let shown = daemon.ok(&["inspect", "web"])?;
    ensure!(
        shown.contains("egress") && shown.contains(OTHER4),
        "it is shown as {shown}"
    );
    clones(&daemon)?;
    reaches(&daemon, "free", &[WORLD4, WORLD6, OTHER4])?;
    daemon.end()
}

/// A connection ends to whom the sandbox may not reach any more; until then it talks.
fn is_cut(daemon: &Daemon<'_>) -> Result<()> {
    daemon.ok(&["exec", "-d", "web", "python3", "-c", TALK, OTHER4])?;
    daemon.wait_in("web", "a connection", "cat /talks")?;
    let over = daemon.run(&["exec", "web", "cat", "/cut"])?;
    ensure!(!over.status.success(), "it is cut before anybody has said so");
    update(daemon, &["--egress-deny", ALL])?;
    daemon.wait_in("web", "its end", "cat /cut").context("what was open")?;
    Ok(())
}

fn clones(daemon: &Daemon<'_>) -> Result<()> {
    daemon.ok(&["snapshot", "create", "web", "ready"])?;
    // Its origin's is another one by now.
    update(daemon, &["--clear"])?;
    reaches(daemon, "web", &[WORLD4, WORLD6, OTHER4])?;
    daemon.ok(&["clone", "--name", "same", "ready"])?;
    reaches(daemon, "same", &[OTHER4])?;
    daemon.ok(&["clone", "--name", "other", "--egress-deny", OTHER4, "ready"])?;
    reaches(daemon, "other", &[WORLD4, WORLD6])
}
