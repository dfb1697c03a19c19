//! Clones whose memory comes from the snapshot's files in each way that there is, from the disk: a process finds in its memory what it had
//! there. Whoever gets it on demand teaches the next one in which order, is kept with what has not come yet, and is put back.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::daemon::{Daemon, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "clones-paging",
    limit: std::time::Duration::from_secs(900),
    host,
    guest: None,
};

/// Holds bytes that nobody else has, and says what they are whenever it is asked: by a sum that looks at each of them, and is cheap in
/// an emulated processor.
const KEEPER: &str = "import zlib, os, time\ndata = os.urandom(12 << 20)\nwhile True:\n word = '%08x' % zlib.crc32(data)\n \
                      with open('/tmp/new', 'w') as f:\n  f.write(word)\n os.rename('/tmp/new', '/tmp/word')\n \
                      while os.path.exists('/tmp/word'):\n  time.sleep(0.1)\n";

/// Of its guest's memory.
const PAGES: u64 = 128 << 8;

/// What it holds, in KiB.
const HELD: u64 = 12 << 10;

/// What a VMM has of its guest's memory.
struct Memory {
    /// Its own pages, in KiB.
    own: u64,
    /// All that is mapped, in KiB.
    all: u64,
    /// There is a thread that brings pages.
    paged: bool,
}

fn host(host: &Host) -> Result<()> {
    let daemon = Daemon::new(host)?;
    let image = host.digest.as_str();
    let run = [
        "run", "-d", "--name", "origin", "--memory", "128m", image, "--", "python3", "-c", KEEPER,
    ];
    daemon.ok(&run)?;
    let word = daemon.wait_in("origin", "the word", "cat /tmp/word")?;
    daemon.ok(&["snapshot", "create", "origin", "kept"])?;
    daemon.ok(&["rm", "--force", "origin"])?;

    let mapped = from_the_disk(&daemon, "mapped", &word)?;
    let eager = from_the_disk(&daemon, "eager", &word)?;
    for (paging, memory) in [("mapped", &mapped), ("eager", &eager)] {
        let Memory { own, paged, .. } = memory;
        ensure!(
            !paged && *own < HELD,
            "a clone whose memory is {paging} has {own} KiB of its own"
        );
    }
    ensure!(
        eager.all > mapped.all.max(HELD),
        "an eager clone begins with {} KiB, a mapped one with {}",
        eager.all,
        mapped.all
    );

    let path = daemon.state.join("snapshots/kept/page-order.json");
    ensure!(!path.exists(), "there is an order, and nobody has asked for a page");
    let first = from_the_disk(&daemon, "on-demand", &word)?;
    let Memory { all, paged, .. } = first;
    ensure!(paged && all < HELD, "{all} KiB came before they were asked for");
    let mut order: Vec<(u64, u64)> = serde_json::from_slice(&fs::read(&path)?)?;
    let pages: u64 = order.iter().map(|(_, pages)| pages).sum();
    let runs = order.len();
    ensure!(pages > 200 && runs > 20, "an order of {pages} pages in {runs} runs");
    // What is in an order comes by itself: everything, which nobody has asked for on his way, and what is in no memory does not.
    order.extend([(0, PAGES), (PAGES, 1)]);
    fs::write(&path, serde_json::to_vec(&order)?)?;
    begin(&daemon, "on-demand")?;
    wait_for("all of the memory", || Ok(memory(&daemon)?.own > HELD))?;
    end(&daemon, &word)?;

    goes_on(&daemon, &word)?;
    templates(&daemon, image)?;
    daemon.end()
}

/// Makes a clone of what is on the disk; what its VMM has at first.
fn from_the_disk(daemon: &Daemon<'_>, paging: &str, word: &str) -> Result<Memory> {
    begin(daemon, paging)?;
    let memory = memory(daemon)?;
    end(daemon, word)?;
    Ok(memory)
}

/// Makes one when nothing of the snapshot is in memory.
fn begin(daemon: &Daemon<'_>, paging: &str) -> Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3")?;
    daemon.ok(&["clone", "--name", "clone", "--paging", paging, "kept"])?;
    Ok(())
}

fn end(daemon: &Daemon<'_>, word: &str) -> Result<()> {
    holds(daemon, "clone", word)?;
    daemon.ok(&["rm", "--force", "clone"])?;
    Ok(())
}

fn holds(daemon: &Daemon<'_>, name: &str, word: &str) -> Result<()> {
    // It looks at all of them once more.
    daemon.ok(&["exec", name, "rm", "/tmp/word"])?;
    let found = daemon.wait_in(name, "the word", "cat /tmp/word")?;
    ensure!(found == word, "{name} holds {found}, not {word}");
    Ok(())
}

/// Of the one VMM that there is.
fn memory(daemon: &Daemon<'_>) -> Result<Memory> {
    let vmms = daemon.processes("basalt-vmm")?;
    let [vmm] = vmms.as_slice() else {
        anyhow::bail!("{} VMMs run", vmms.len())
    };
    let process = format!("/proc/{vmm}");
    let sum = fs::read_to_string(format!("{process}/smaps_rollup"))?;
    let field = |name: &str| -> Result<u64> {
        let line = sum.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        Ok(number.with_context(|| format!("no {name} in {sum}"))?.parse()?)
    };
    let mut paged = false;
    for thread in fs::read_dir(format!("{process}/task"))? {
        paged |= fs::read_to_string(thread?.path().join("comm"))?.trim() == "pager";
    }
    Ok(Memory {
        own: field("Anonymous:")?,
        all: field("Rss:")?,
        paged,
    })
}

/// One whose memory comes on demand is kept before all of it has come, and put back.
fn goes_on(daemon: &Daemon<'_>, word: &str) -> Result<()> {
    daemon.ok(&["clone", "--name", "early", "--paging", "on-demand", "kept"])?;
    daemon.ok(&["snapshot", "create", "early", "again"])?;
    // From here on it is mapped from what was kept, like any other.
    ensure!(!memory(daemon)?.paged, "pages are brought that are there");
    holds(daemon, "early", word)?;
    daemon.ok(&["exec", "early", "touch", "/tmp/later"])?;
    daemon.ok(&["rollback", "early", "again"])?;
    ensure!(
        daemon.ok(&["exec", "early", "test", "-e", "/tmp/later"]).is_err(),
        "it was not put back"
    );
    holds(daemon, "early", word)?;
    daemon.ok(&["rm", "--force", "early"])?;
    daemon.ok(&["clone", "--name", "late", "again"])?;
    holds(daemon, "late", word)?;
    daemon.ok(&["rm", "--force", "late"])?;
    // One that is put back by another VMM, as its own cannot, gets its memory as it did before.
    daemon.ok(&["clone", "--name", "back", "--paging", "on-demand", "kept"])?;
    daemon.ok(&["snapshot", "create", "back", "first"])?;
    daemon.ok(&["snapshot", "create", "back", "second"])?;
    daemon.ok(&["rollback", "back", "first"])?;
    ensure!(memory(daemon)?.paged, "nobody brings its pages");
    holds(daemon, "back", word)?;
    daemon.ok(&["rm", "--force", "back"])?;
    Ok(())
}

fn templates(daemon: &Daemon<'_>, image: &str) -> Result<()> {
    let run = |paging| daemon.traced(&["--paging", paging, "--memory", "128m", image, "--", "echo", "here"]);
    ensure!(daemon.templates()?.len() == 1, "there is no template");
    for paging in ["on-demand", "eager", "on-demand"] {
        let (said, booted) = run(paging)?;
        ensure!(
            said == "here\n" && !booted,
            "{paging}: it says {said:?}, booted: {booted}"
        );
    }
    Ok(())
}
