//! A sandbox is suspended and goes on: nothing of it is in the host's memory meanwhile, the next daemon finds it so, and then what runs in it
//! goes on where it was, with its files, its address and the host's time. What cannot be asked of it is refused with what to do. With the way
//! back once taken, nothing is left that it could go back to by mistake. One whose time is over is suspended, or stopped, by itself.

use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use crate::basalt::expect_refusal;
use crate::daemon::{Daemon, PATIENCE, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "suspend",
    limit: Duration::from_secs(300),
    host,
    guest: None,
};

/// So long it is suspended at least, and its clock differs by less from the host's afterwards.
const LONG: Duration = Duration::from_secs(5);

/// The guest's state is in its memory alone: a number that goes up, which is told when it is asked for.
const COUNTS: &str = "import os, socket, threading, time
n = 0
def serve():
    s = socket.create_server(('', 80))
    while True:
        c, _ = s.accept()
        c.sendall(f'{n} {os.getpid()} {time.time():.1f}'.encode())
        c.close()
threading.Thread(target=serve, daemon=True).start()
while True:
    n += 1
    time.sleep(0.02)";

/// What the guest tells by its published port: its number, its process, and its time in seconds since 1970.
fn told() -> Result<(u64, u64, f64)> {
    let mut stream = TcpStream::connect(("127.0.0.1", 8099)).context("its published port")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    let words: Vec<&str> = said.split_whitespace().collect();
    let [number, process, time] = words[..] else {
        anyhow::bail!("it says {said:?}");
    };
    Ok((number.parse()?, process.parse()?, time.parse()?))
}

fn state(daemon: &Daemon<'_>) -> Result<String> {
    let found = daemon.find("web")?.context("it is gone")?;
    Ok(found["state"].as_str().unwrap_or_default().to_owned())
}

/// There is something that a sandbox could go on from.
fn saved(daemon: &Daemon<'_>, id: &str) -> bool {
    daemon.state.join("sandboxes").join(id).join("suspended").exists()
}

/// The daemon looks at the time by itself, and has it in the record.
fn time_is_over(daemon: &Daemon<'_>) -> Result<()> {
    let words = [
        "run",
        "-d",
        "--name",
        "web",
        "--memory",
        "128m",
        "--timeout",
        "2s",
        "--on-timeout",
        "suspend",
    ];
    daemon.ok(&[&words[..], &[daemon.image(), "--", "sleep", "10000"]].concat())?;
    let becomes = |wanted: &str| wait_for(&format!("it to be {wanted}"), || Ok(state(daemon)? == wanted));
    becomes("suspended")?;
    let said = daemon.ok(&["update", "web", "--timeout", "1h"])?;
    ensure!(said == "web may run for 3600s from its next start on\n", "{said:?}");
    daemon.ok(&["resume", "web"])?;
    ensure!(state(daemon)? == "running", "it is {}", state(daemon)?);
    let said = daemon.ok(&["update", "web", "--timeout", "1s", "--on-timeout", "stop"])?;
    ensure!(said == "web may run for 1s from now on\n", "{said:?}");
    becomes("exited")?;
    daemon.ok(&["rm", "web"]).map(drop)
}

fn host(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let run = ["run", "-d", "--name", "web", "--memory", "128m", "-p", "8099:80"];
    let id = daemon.ok(&[&run[..], &[daemon.image(), "--", "python3", "-c", COUNTS]].concat())?;
    let id = id.trim();
    daemon.wait_in("web", "its server", "grep -q ':0050 ' /proc/net/tcp")?;
    daemon.ok(&["exec", "web", "sh", "-c", "echo before > /kept"])?;
    let address = daemon.ok(&["exec", "web", "cat", "/proc/net/fib_trie"])?;
    let before = told()?;
    let cgroup = daemon
        .cgroup()
        .map(|root| Path::new("/sys/fs/cgroup").join(root).join(id))
        .context("the daemon has no cgroup")?;
    ensure!(
        cgroup.exists(),
        "a sandbox that runs has no cgroup {}",
        cgroup.display()
    );

    let begun = Instant::now();
    daemon.ok(&["suspend", "web"])?;
    log::info!("suspended within {:?}", begun.elapsed());
    ensure!(state(&daemon)? == "suspended", "it is {}", state(&daemon)?);
    ensure!(daemon.ok(&["ps"])?.contains("suspended"), "ps does not show it");
    ensure!(daemon.processes("basalt-vmm")?.is_empty(), "it has a VMM still");
    ensure!(!cgroup.exists(), "it has a cgroup still");
    ensure!(saved(&daemon, id), "there is nothing that it could go on from");

    let next = ["web is suspended", "basalt resume", "basalt stop"];
    for words in [
        &["exec", "web", "true"][..],
        &["pause", "web"],
        &["snapshot", "create", "web"],
        &["start", "web"],
    ] {
        let output = daemon.run(words)?;
        let code = if words[0] == "exec" { 125 } else { 1 };
        expect_refusal(&output, code, &next).with_context(|| words.join(" "))?;
    }
    expect_refusal(&daemon.run(&["suspend", "web"])?, 1, &["it is that already"])?;
    expect_refusal(&daemon.run(&["rm", "web"])?, 1, &["web is suspended", "--force"])?;
    ensure!(
        daemon.ok(&["prune"])?.trim().is_empty(),
        "it is taken for one that has ended"
    );

    // Longer than what its clock may differ by.
    std::thread::sleep((LONG + Duration::from_secs(1)).saturating_sub(begun.elapsed()));
    daemon.kill()?;
    ensure!(
        state(&daemon)? == "suspended",
        "the next daemon finds it {}",
        state(&daemon)?
    );
    let begun = Instant::now();
    daemon.ok(&["resume", "web"])?;
    log::info!("resumed within {:?}", begun.elapsed());
    ensure!(!saved(&daemon, id), "what it went on from is there still");
    let after = told()?;
    ensure!(
        after.1 == before.1 && after.0 > before.0 && after.0 < before.0 + 3000,
        "it was {before:?}, and is {after:?}"
    );
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    ensure!(
        (now - after.2).abs() < LONG.as_secs_f64(),
        "its time is {}, and the host's {now}",
        after.2
    );
    ensure!(
        daemon.ok(&["exec", "web", "cat", "/kept"])? == "before\n",
        "its disk is another"
    );
    let here = daemon.ok(&["exec", "web", "cat", "/proc/net/fib_trie"])?;
    ensure!(here == address, "its addresses were {address}, and are {here}");

    // Again, of a machine that came of files; and what is given up is given up.
    daemon.ok(&["suspend", "web"])?;
    daemon.ok(&["resume", "web"])?;
    ensure!(told()?.1 == before.1, "its process is another");
    daemon.ok(&["suspend", "web"])?;
    daemon.ok(&["stop", "web"])?;
    ensure!(
        state(&daemon)? == "exited" && !saved(&daemon, id),
        "it is {}",
        state(&daemon)?
    );
    daemon.ok(&["start", "web"])?;
    ensure!(
        daemon.ok(&["exec", "web", "cat", "/kept"])? == "before\n",
        "its disk is another"
    );
    daemon.ok(&["suspend", "web"])?;
    daemon.ok(&["rm", "--force", "web"])?;
    let left = fs::read_dir(daemon.state.join("sandboxes"))?.count();
    ensure!(left == 0, "{left} directories of sandboxes are left");
    time_is_over(&daemon)?;
    daemon.end()
}
