//! A sandbox is kept, saved to a file and removed with everything; what is loaded from the file goes on where it was: a counter in its
//! memory, a file on its disk, and no boot. The same with a template that was built, of which `run --template` clones.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::basalt::expect_refusal;
use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "snapshot-file",
    limit: Duration::from_secs(600),
    host,
    guest: None,
};

/// Counts in a variable, and tells the count with a word that only this process knows. Its first line counts boots.
const SCRIPT: &str = "echo boot >> /boots; word=$(cat /proc/sys/kernel/random/uuid); i=0; \
                      while :; do i=$((i+1)); echo $word $i > /tmp/new; mv /tmp/new /tmp/count; sleep 0.4; done";

/// The sandbox's memory, and its disk.
const MEMORY: u64 = 128 << 20;

fn host(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let image = host.digest.as_str();
    let run = [
        "run", "-d", "--boot", "--name", "origin", "--memory", "128m", "--disk", "128m", image, "--", "sh", "-c",
        SCRIPT,
    ];
    daemon.ok(&run)?;
    wait_for("the count", || {
        Ok(count(&daemon, "origin").is_ok_and(|(_, count)| count > 2))
    })?;
    daemon.ok(&[
        "exec",
        "origin",
        "sh",
        "-c",
        "head -c 1000000 /dev/urandom > /noise; sha256sum /noise > /sum; sync",
    ])?;
    let before = count(&daemon, "origin")?;
    daemon.ok(&["snapshot", "create", "origin", "kept"])?;
    let after = count(&daemon, "origin")?;

    let path = host.scratch.join("kept.basalt");
    let file = path.to_str().context("a path of UTF-8")?;
    // The lab has images in their converted form only.
    let save = ["snapshot", "save", "-o", file, "kept"];
    expect_refusal(&daemon.run(&save)?, 1, &["--without-image", "leaves it out"])?;
    ensure!(!path.exists(), "something was written all the same");
    let begun = Instant::now();
    daemon.ok(&["snapshot", "save", "--without-image", "-o", file, "kept"])?;
    let saving = begun.elapsed();
    let sizes = |name: &str| fs::metadata(daemon.state.join("snapshots/kept").join(name));
    let (memory, disk) = (sizes("memory")?, sizes("disk")?);
    let taken = (memory.blocks() + disk.blocks()) * 512;
    let length = fs::metadata(&path)?.len();
    ensure!(
        length < taken,
        "the file has {length} bytes, memory and disk take {taken}"
    );

    // All of it goes.
    daemon.ok(&["rm", "--force", "origin"])?;
    daemon.ok(&["snapshot", "rm", "kept"])?;
    broken(&daemon, &path)?;
    let begun = Instant::now();
    let name = daemon.ok(&["snapshot", "load", "-i", file])?;
    ensure!(name == "kept\n", "it is called {name:?}");
    let loaded = sizes("memory")?;
    log::info!(
        "{taken} bytes of memory and disk became {length} in {saving:?}, and {} bytes of memory in {:?}",
        loaded.blocks() * 512,
        begun.elapsed()
    );
    ensure!(
        loaded.len() == memory.len() && memory.len() == MEMORY,
        "the memory has {} bytes",
        loaded.len()
    );
    // A file system's own notes of where the parts are count, too.
    ensure!(
        loaded.blocks() <= memory.blocks() + memory.blocks() / 16,
        "the holes are filled: {} blocks became {}",
        memory.blocks(),
        loaded.blocks()
    );
    daemon.ok(&["snapshot", "load", "-i", file, "--name", "again"])?;
    for (clone, snapshot) in [("one", "kept"), ("two", "again")] {
        daemon.ok(&["clone", "--name", clone, snapshot])?;
        goes_on(&daemon, clone, &before, &after)?;
        daemon.ok(&["rm", "--force", clone])?;
    }
    template(&daemon, host)?;
    daemon.ok(&["template", "prune", "--all"])?;
    daemon.end()
}

/// A template with the same in it, which leaves and comes back.
fn template(daemon: &Daemon<'_>, host: &Host) -> Result<()> {
    let image = host.digest.as_str();
    let noise = "head -c 1000000 /dev/urandom > /noise; sha256sum /noise > /sum";
    let ready = "test $(cut -d' ' -f2 /tmp/count) -gt 2";
    let build = [
        "template", "build", "--from", image, "--name", "counter", "--memory", "128m", "--disk", "128m", "--run",
        noise, "--run", SCRIPT, "--ready", ready,
    ];
    let id = daemon.ok(&build)?;
    let id = id.trim();
    let run = |name| {
        let words = [
            "run",
            "-d",
            "--name",
            name,
            "--template",
            "counter",
            "--",
            "sleep",
            "10000",
        ];
        daemon.ok(&words).map(drop)
    };
    run("before")?;
    let before = count(daemon, "before")?;
    goes_on(daemon, "before", &before, &before)?;
    daemon.ok(&["rm", "--force", "before"])?;

    let path = host.scratch.join("counter.basalt");
    let file = path.to_str().context("a path of UTF-8")?;
    daemon.ok(&["template", "save", "--without-image", "-o", file, "counter"])?;
    daemon.ok(&["template", "rm", "counter"])?;
    expect_refusal(
        &daemon.run(&["run", "--template", "counter", "true"])?,
        125,
        &["there is no template `counter`"],
    )?;
    ensure!(
        !daemon.state.join("templates").join(id).exists(),
        "a removed template has files"
    );
    let loaded = daemon.ok(&["template", "load", "-i", file])?;
    ensure!(loaded.trim() == id, "it is {loaded:?} and was {id}");
    let shown: Vec<Value> = serde_json::from_str(&daemon.ok(&["--json", "template", "inspect", "counter"])?)?;
    ensure!(
        shown[0]["usable"] == true && shown[0]["brought"] == true,
        "what was loaded is {shown:?}"
    );
    // All clones begin where it was kept: neither much before nor after the first one's.
    for name in ["after", "again"] {
        run(name)?;
        goes_on(daemon, name, &(before.0.clone(), 3), &before)?;
        daemon.ok(&["rm", "--force", name])?;
    }
    daemon.expect_no_strangers(&[])
}

/// A copy with one other bit is refused, and nothing of it stays.
fn broken(daemon: &Daemon<'_>, path: &std::path::Path) -> Result<()> {
    let mut bytes = fs::read(path)?;
    let middle = bytes.len() / 2;
    let byte = bytes.get_mut(middle).context("an empty file")?;
    *byte ^= 1;
    let other = path.with_extension("broken");
    fs::write(&other, bytes)?;
    let load = ["snapshot", "load", "-i", other.to_str().context("a path of UTF-8")?];
    expect_refusal(&daemon.run(&load)?, 1, &["copy it once more"])?;
    wait_for("what was begun to go", || {
        Ok(fs::read_dir(daemon.state.join("snapshots"))?.count() == 0)
    })
}

/// A clone has the memory that was kept, counts on from there, has its disk, and has booted once, before.
fn goes_on(daemon: &Daemon<'_>, name: &str, before: &(String, u64), after: &(String, u64)) -> Result<()> {
    let first = count(daemon, name)?;
    ensure!(
        first.0 == before.0 && first.1 >= before.1 && first.1 < after.1 + 100,
        "{name} counts {first:?}, not on from {before:?}"
    );
    wait_for("a clone to count on", || Ok(count(daemon, name)?.1 > first.1))?;
    let boots = daemon.ok(&["exec", name, "cat", "/boots"])?;
    ensure!(boots == "boot\n", "{name} has booted as {boots:?}");
    let sum = daemon.ok(&["exec", name, "sha256sum", "-c", "/sum"])?;
    ensure!(sum == "/noise: OK\n", "{name}'s disk says {sum:?}");
    let console = daemon.ok(&["logs", "--console", name])?;
    ensure!(
        !console.contains("Linux version"),
        "{name} has booted a kernel: {console}"
    );
    Ok(())
}

/// The word and the count of the process that counts.
fn count(daemon: &Daemon<'_>, name: &str) -> Result<(String, u64)> {
    let text = daemon.ok(&["exec", name, "cat", "/tmp/count"])?;
    let (word, count) = text.trim().split_once(' ').context("no count yet")?;
    Ok((word.to_owned(), count.parse()?))
}
