//! One sandbox is kept and goes on twice more: a counter in its memory counts on without a boot, and what must differ
//! differs, and connections to the outside end. Then a sandbox is put back.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::TcpStream;
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::clones_connections as connections;
use super::network::{WORLD4, World};
use crate::basalt::expect_refusal;
use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "clones",
    limit: Duration::from_secs(900),
    host,
    guest: None,
};

/// Counts in a variable, and tells the count with a word that only this process knows. Its first line counts boots. It starts no program
/// for that: four machines would otherwise start more than the emulated host can.
const SCRIPT: &str = "echo boot >> /boots; word=$(cat /proc/sys/kernel/random/uuid); i=0; mkfifo /tmp/never; exec 3<>/tmp/never; \
                      while :; do i=$((i+1)); printf '%s %09d\\n' $word $i 1<>/tmp/count; read -t 0.4 -u 3; done";

/// A server in the guest that was there before the snapshot. It says the host's name, and what it draws from the kernel.
const SERVER: &str = "import os, socket\ns = socket.create_server(('', 80))\nwhile True:\n c, _ = s.accept()\n \
                      c.sendall((socket.gethostname() + ' ' + os.getrandom(16).hex()).encode())\n c.close()\n";

/// A hook, which notes for whom it has run.
const HOOK: &str = "mkdir -p /etc/basalt/on-clone.d; cd /etc/basalt/on-clone.d; \
                    printf '#!/bin/sh\\necho $BASALT_CLONE_ID $(cat /proc/sys/kernel/random/boot_id) >> /hooked\\n' > 10-note; \
                    chmod 755 10-note";

/// What must differ from one machine to the other: a line each.
const IDENTITY: &str = "cat /proc/sys/kernel/random/boot_id /etc/machine-id /etc/hostname; hostname; \
                        head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n'; echo; \
                        cat /proc/sys/kernel/random/uuid";

/// Which devices the kernel's driver of the generation ID has, and how often it has reseeded itself because that was another.
const FORKS: &str =
    "cd /sys/bus/acpi/drivers/vmgenid; echo *:*; dmesg | grep -c 'crng reseeded due to virtual machine fork'; true";

/// Goes out to the world.
const OUTWARDS: &str = "exec 3<>/dev/tcp/$0/7000 && echo connected";

fn host(host: &Host) -> Result<()> {
    let world = World::new()?;
    let _server = world.serve(&["[::]:7000"])?;
    let daemon = Daemon::with_templates(host)?;
    let image = host.digest.as_str();
    let run = [
        "run", "-d", "--name", "origin", "--memory", "128m", "-p", "18080:80", image, "--", "bash", "-c", SCRIPT,
    ];
    daemon.ok(&run)?;
    daemon.ok(&["exec", "--detach", "origin", "python3", "-c", SERVER])?;
    counts_beyond(&daemon, "origin", 2)?;
    wait_for("the server", || Ok(answer(18080).is_ok()))?;
    daemon.ok(&["exec", "origin", "sh", "-c", HOOK])?;
    connections::begin(&daemon, "origin")?;
    let before = count(&daemon, "origin")?;
    let uptime = uptime(&daemon, "origin")?;
    daemon.ok(&["snapshot", "create", "origin", "kept"])?;
    // The original goes on, too.
    counts_beyond(&daemon, "origin", before.1 + 2)?;
    connections::go_on(&daemon, "origin")?;
    has_forked(&daemon, "origin", 0)?;

    let mut machines = vec![("origin", 18080)];
    for (name, port) in [("one", 18081), ("two", 18082)] {
        let published = format!("{port}:80");
        daemon.ok(&["clone", "--name", name, "-p", &published, "kept"])?;
        connections::were_inherited(&daemon, name)?;
        has_forked(&daemon, name, 1)?;
        machines.push((name, port));
    }
    // None of them was told of another's end.
    connections::go_on(&daemon, "origin")?;
    for (name, port) in &machines {
        is_a_clone(&daemon, name, &before, uptime)?;
        let outwards = daemon.ok(&["exec", name, "bash", "-c", OUTWARDS, WORLD4])?;
        ensure!(outwards == "connected\n", "{name} reaches the world as {outwards:?}");
        let (inwards, _) = answer(*port)?;
        let own = daemon.ok(&["exec", name, "hostname"])?;
        ensure!(inwards == own.trim(), "at {name}'s port answers {inwards}");
        if *name != "origin" {
            has_run_its_hook(&daemon, name)?;
        }
    }
    let mut said = differ(&daemon, &machines)?;
    let own = daemon.ok(&["exec", "origin", "hostname"])?;
    // In place twice, and by another VMM.
    for ended in [false, false, true] {
        put_back(&daemon, (&before, &own), ended, &mut said)?;
    }
    refuses_anothers(&daemon)?;
    kept_again(&daemon, &before, uptime)?;

    // What is kept outlives whom it is of, and those who run from it outlive it.
    daemon.ok(&["rm", "--force", "origin"])?;
    daemon.ok(&["clone", "--name", "three", "kept"])?;
    daemon.ok(&["snapshot", "rm", "kept"])?;
    for name in ["one", "three"] {
        is_a_clone(&daemon, name, &before, uptime)?;
    }
    expect_refusal(&daemon.run(&["clone", "kept"])?, 1, &["no snapshot `kept`"])?;
    // A clone that has ended boots like any other.
    daemon.ok(&["kill", "one"])?;
    daemon.ok(&["start", "one"])?;
    daemon.wait_in("one", "its second boot", "cat /boots; test $(wc -l < /boots) -eq 2")?;
    daemon.end()
}

/// The word and the count of the process that counts.
fn count(daemon: &Daemon<'_>, name: &str) -> Result<(String, u64)> {
    let text = daemon.ok(&["exec", name, "cat", "/tmp/count"])?;
    let (word, count) = text.trim().split_once(' ').context("no count yet")?;
    Ok((word.to_owned(), count.parse()?))
}

/// Waits until it has counted beyond that.
fn counts_beyond(daemon: &Daemon<'_>, name: &str, last: u64) -> Result<()> {
    let condition = format!("read -r word i < /tmp/count && echo $i && test $i -gt {last}");
    daemon.wait_in(name, "the count", &condition).map(drop)
}

/// Seconds since the boot.
fn uptime(daemon: &Daemon<'_>, name: &str) -> Result<f64> {
    let text = daemon.ok(&["exec", name, "cat", "/proc/uptime"])?;
    Ok(text.split(' ').next().context("no uptime")?.parse()?)
}

/// It has the memory that was kept, goes on from there, and has booted once, before.
fn is_a_clone(daemon: &Daemon<'_>, name: &str, before: &(String, u64), booted: f64) -> Result<()> {
    let first = count(daemon, name)?;
    ensure!(
        first.0 == before.0 && first.1 >= before.1,
        "{name} counts {first:?}, not on from {before:?}"
    );
    counts_beyond(daemon, name, first.1)?;
    let boots = daemon.ok(&["exec", name, "cat", "/boots"])?;
    ensure!(boots == "boot\n", "{name} has booted as {boots:?}");
    let uptime = uptime(daemon, name)?;
    ensure!(
        uptime >= booted,
        "{name} is up since {uptime} s, the snapshot was since {booted} s"
    );
    if name != "origin" {
        let console = daemon.ok(&["logs", "--console", name])?;
        ensure!(
            !console.contains("Linux version"),
            "{name} has booted a kernel: {console}"
        );
    }
    Ok(())
}

/// Its kernel has been told so often by the VMM that it goes on from a state of before.
fn has_forked(daemon: &Daemon<'_>, name: &str, times: u32) -> Result<()> {
    let expected = format!("BSLTVGID:00\n{times}\n");
    // It is told by an interrupt, and does what follows in a thread of its own.
    let condition = format!(
        "said=$({FORKS}); echo \"$said\"; test \"$said\" = \"{}\"",
        expected.trim_end()
    );
    daemon.wait_in(name, "the kernel to hear of it", &condition).map(drop)
}

/// It has, once, and saw what the machine is now.
fn has_run_its_hook(daemon: &Daemon<'_>, name: &str) -> Result<()> {
    let seen = "cat /hooked; echo $(cat /etc/machine-id /proc/sys/kernel/random/boot_id)";
    let text = daemon.ok(&["exec", name, "sh", "-c", seen])?;
    let lines: Vec<_> = text.lines().collect();
    ensure!(lines.len() == 2 && lines[0] == lines[1], "{name}'s hook wrote {text:?}");
    Ok(())
}

/// None of them says what another one says; all that was said by new processes, and by one that was there.
fn differ(daemon: &Daemon<'_>, machines: &[(&str, u16)]) -> Result<BTreeSet<String>> {
    let mut said = Vec::new();
    for (name, port) in machines {
        let text = daemon.ok(&["exec", name, "sh", "-c", IDENTITY])?;
        log::info!("{name} says {text:?}");
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        // The original was made without a machine id; its image may have none.
        ensure!(lines.len() >= 5, "{name} says {lines:?}");
        lines.push(answer(*port)?.1);
        said.push(lines);
    }
    let all: Vec<&String> = said
        .iter()
        .flat_map(|lines| lines.iter().collect::<BTreeSet<_>>())
        .collect();
    let different: BTreeSet<_> = all.iter().collect();
    ensure!(all.len() == different.len(), "something is said twice: {said:?}");
    // A clone's host name is its id, in the file and by the kernel.
    for lines in &said[1..] {
        ensure!(lines[2] == lines[3] && lines[1].len() == 32, "a clone says {lines:?}");
    }
    Ok(said.into_iter().flatten().collect())
}

/// A clone is kept, twice: each time with what has changed alone, and a clone of that is one of the first snapshot, too.
fn kept_again(daemon: &Daemon<'_>, before: &(String, u64), booted: f64) -> Result<()> {
    let bytes = |name: &str| -> Result<u64> {
        let text = daemon.ok(&["--json", "snapshot", "inspect", name])?;
        let all: serde_json::Value = serde_json::from_str(&text)?;
        all[0]["bytes"].as_u64().context("a snapshot without a size")
    };
    let whole = bytes("kept")?;
    for (name, of) in [("again", "one"), ("once-more", "one")] {
        daemon.ok(&["exec", of, "sh", "-c", "echo changed >> /changed"])?;
        daemon.ok(&["snapshot", "create", of, name])?;
        let changes = bytes(name)?;
        log::info!("{whole} bytes are kept of the whole machine, {changes} of its changes");
        // The first has all that was done in it since it was cloned, which a slow host makes more; the second next to nothing.
        let most = if name == "again" { whole } else { whole / 2 };
        ensure!(
            changes < most,
            "{name}: {changes} bytes are kept of changes, {whole} of the whole"
        );
    }
    // Nobody needs the one in between to be there.
    daemon.ok(&["snapshot", "rm", "again"])?;
    daemon.ok(&["clone", "--name", "later", "once-more"])?;
    is_a_clone(daemon, "later", before, booted)?;
    let changed = daemon.ok(&["exec", "later", "cat", "/changed"])?;
    ensure!(changed == "changed\nchanged\n", "a clone of a clone has {changed:?}");
    daemon.ok(&["rm", "--force", "later"])?;
    daemon.ok(&["snapshot", "rm", "once-more"]).map(drop)
}

/// The original becomes again what it was, but for what must not be said twice: it is added to what was `said` before. One that is to
/// have `ended` by then gets another VMM.
fn put_back(
    daemon: &Daemon<'_>,
    (before, own): (&(String, u64), &str),
    ended: bool,
    said: &mut BTreeSet<String>,
) -> Result<()> {
    let (after, open) = leave_something(daemon)?;
    if ended {
        daemon.ok(&["kill", "origin"])?;
    }
    daemon.ok(&["rollback", "origin", "kept"])?;
    let back = count(daemon, "origin")?;
    ensure!(
        back.0 == before.0 && back.1 >= before.1 && back.1 < after,
        "put back it counts {back:?}; it was kept after {before:?} and put back after {after}"
    );
    let began = Instant::now();
    let output = open.wait_with_output()?;
    ensure!(
        ended || output.status.code() == Some(125) && String::from_utf8_lossy(&output.stderr).contains("rolled back"),
        "a command that ran in it when it was put back: {output:?}"
    );
    ensure!(
        began.elapsed() < Duration::from_secs(5),
        "a command that ran in it when it was put back has ended {:?} later",
        began.elapsed()
    );
    connections::were_inherited(daemon, "origin")?;
    has_forked(daemon, "origin", 1)?;
    has_run_its_hook(daemon, "origin")?;
    let text = daemon.ok(&["exec", "origin", "sh", "-c", IDENTITY])?;
    let lines: Vec<_> = text.lines().collect();
    let random = answer(18080)?.1;
    // Its machine id and its name stay.
    let news = [0, lines.len() - 2, lines.len() - 1].map(|line| lines[line].to_owned());
    for new in news.into_iter().chain([random]) {
        ensure!(said.insert(new.clone()), "put back it says {new} again: {text:?}");
    }
    let kept = daemon.run(&["exec", "origin", "test", "-e", "/later"])?;
    ensure!(
        kept.status.code() == Some(1),
        "what it has written later is still there"
    );
    ensure!(
        daemon.ok(&["exec", "origin", "hostname"])? == own,
        "its host name is another"
    );
    ensure!(answer(18080)?.0 == own.trim(), "nobody answers at its port");
    Ok(())
}

/// What the snapshot does not have: a file, a higher count, and a command that somebody waits for.
fn leave_something(daemon: &Daemon<'_>) -> Result<(u64, Child)> {
    daemon.ok(&["exec", "origin", "sh", "-c", "echo later > /later; sync"])?;
    let mut open = daemon.start(&["exec", "origin", "sh", "-c", "echo up; exec sleep 1000"])?;
    open.stdout.as_mut().context("no output")?.read_exact(&mut [0; 3])?;
    Ok((count(daemon, "origin")?.1, open))
}

fn refuses_anothers(daemon: &Daemon<'_>) -> Result<()> {
    expect_refusal(
        &daemon.run(&["rollback", "one", "kept"])?,
        1,
        &["is of origin", "basalt clone kept"],
    )
}

/// What the server at a published port says: a host's name, and something random.
fn answer(port: u16) -> Result<(String, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (name, random) = text
        .split_once(' ')
        .with_context(|| format!("at port {port} answers {text:?}"))?;
    Ok((name.to_owned(), random.to_owned()))
}
