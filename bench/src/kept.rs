//! What it takes to keep a clone: time and disk of a snapshot, for small guests and large ones, by how much they have changed;
//! and what many idle clones take of the host's memory. All by requests to the daemon.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base::ByteSize;
use node_api::{Client, Reply, Request, Snapshot, SnapshotConfig};

use crate::clone::{asked, clone_of, remove};
use crate::figures::{Bench, tell};
use crate::report::Figure;
use crate::run::{DIRTY, Node};
use crate::stats::{Target, straight};

const SMALL: ByteSize = ByteSize::mib(128);
const LARGE: ByteSize = ByteSize::gib(2);

const OF_SMALL: &str = "Basalt, a snapshot of an idle clone of 128 MiB";
const OF_LARGE: &str = "Basalt, a snapshot of an idle clone of 2 GiB";

/// How much a guest changes between two snapshots, and how large it is.
const CHANGES: [u64; 4] = [1, 16, 64, 256];
const CHANGING: ByteSize = ByteSize::mib(768);

/// So many snapshots of one machine are of its changes alone, less one that is taken first.
const BESIDE: usize = 5;

/// How many idle clones there are, and how long they idle before the host's memory is looked at.
const CLONES: usize = 50;
const IDLE: Duration = Duration::from_secs(60);

const OF_SNAPSHOT: &str = "Basalt, one of 50 idle clones of a snapshot, 128 MiB";
const OF_TEMPLATE: &str =
    "Basalt, one of 50 idle clones of a template, 128 MiB, with the command that each has started";

const CLONE: &str = Node::CLONE;
/// The snapshot that `keep` makes.
pub(crate) const KEPT: &str = "kept";

/// A clone that idles, of a template that is there afterwards.
fn idle(node: &Node, client: &mut Client, name: &str, memory: ByteSize) -> Result<()> {
    let mut config = node.config(name, false)?;
    config.resources.memory = memory;
    let (_, reply) = asked(client, Request::Run(Box::new(config)))?;
    ensure!(matches!(reply, Reply::Started { .. }), "no sandbox: {reply:?}");
    Ok(())
}

/// Milliseconds, and what is known of the snapshot, which stays.
pub(crate) fn keep(client: &mut Client, sandbox: &str) -> Result<(f64, Snapshot)> {
    let make = Request::MakeSnapshot(SnapshotConfig {
        sandbox: sandbox.into(),
        name: Some(KEPT.into()),
        detach_devices: false,
    });
    let (time, reply) = asked(client, make)?;
    let Reply::Snapshot(snapshot) = reply else {
        anyhow::bail!("no snapshot: {reply:?}");
    };
    Ok((time, *snapshot))
}

fn drop_kept(client: &mut Client) -> Result<()> {
    let request = Request::RemoveSnapshot { name: KEPT.into() };
    Ok(client.ask(request).map(drop)?)
}

#[allow(clippy::cast_precision_loss, reason = "far below 2^53 bytes")]
fn mebi(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Bytes that the host could give out.
pub(crate) fn available() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let words = line.and_then(|line| line.split_whitespace().next());
    Ok(words.context("no MemAvailable")?.parse::<u64>()? << 10)
}

impl Bench<'_> {
    /// Snapshots of clones.
    pub(crate) fn snapshot(&mut self) -> Result<()> {
        let node = Node::new(self.world)?;
        node.originate()?;
        let mut client = Client::connect(&node.socket())?;
        // The first of its size boots, and is the template's.
        idle(&node, &mut client, CLONE, LARGE)?;
        node.wait_for_templates(2)?;
        remove(&mut client, CLONE)?;
        let mut times = Figure::new("A snapshot, from the request to its name", "ms");
        let mut sizes = Figure::new("A snapshot on the disk", "MiB");
        for (who, memory) in [(OF_SMALL, SMALL), (OF_LARGE, LARGE)] {
            let (mut milliseconds, mut mebibytes) = (Vec::new(), Vec::new());
            for number in 0..self.runs {
                let (time, snapshot) = self.again("snapshot", who, || {
                    drop((remove(&mut client, CLONE), drop_kept(&mut client)));
                    idle(&node, &mut client, CLONE, memory)?;
                    thread::sleep(Duration::from_secs(1));
                    keep(&mut client, CLONE)
                })?;
                tell("snapshot", number, who, time, "ms");
                milliseconds.push(time);
                mebibytes.push(mebi(snapshot.bytes));
            }
            times.add(who, milliseconds);
            sizes.add(who, mebibytes);
        }
        remove(&mut client, CLONE)?;
        drop_kept(&mut client)?;
        times.ratio(OF_LARGE, OF_SMALL, Target::AtMost(1.3));
        self.report.figures.extend([times, sizes]);
        self.changes(&node, &mut client)
    }

    /// Each snapshot is of what has changed since the one before.
    fn changes(&mut self, node: &Node, client: &mut Client) -> Result<()> {
        let mut times = Figure::new(
            "A snapshot of a guest that has changed so many MiB since the last",
            "ms",
        );
        let mut sizes = Figure::new("Its memory on the disk", "MiB");
        let (mut all_times, mut all_sizes) = (Vec::new(), Vec::new());
        for changed in CHANGES {
            let who = format!("Basalt, {changed} MiB changed");
            let (mut milliseconds, mut mebibytes) = (Vec::new(), Vec::new());
            for number in 0..self.runs {
                // A new one whenever the files of the one that there is begin to be too many for changes alone.
                if number % BESIDE == 0 {
                    drop(remove(client, CLONE));
                    idle(node, client, CLONE, CHANGING)?;
                    keep(client, CLONE)?;
                    drop_kept(client)?;
                }
                node.ok(&["exec", CLONE, "/say", DIRTY, &changed.to_string()])?;
                let (time, _) = keep(client, CLONE)?;
                tell("snapshot", number, &who, time, "ms");
                milliseconds.push(time);
                mebibytes.push(mebi(node.newest_memory(KEPT)?));
                drop_kept(client)?;
            }
            times.add(&who, milliseconds);
            sizes.add(&who, mebibytes);
            let point = |figure: &Figure| Some((mebi(changed << 20), figure.median(&who)?));
            all_times.extend(point(&times));
            all_sizes.extend(point(&sizes));
        }
        remove(client, CLONE)?;
        for (figure, points) in [(&mut times, &all_times), (&mut sizes, &all_sizes)] {
            let (slope, fit) = straight(points).context("no line goes through them")?;
            figure.judge("for each MiB more", slope, Target::AtLeast(0.0));
            figure.judge(
                "how much of it a straight line explains (R²)",
                fit,
                Target::AtLeast(0.98),
            );
        }
        self.report.figures.extend([times, sizes]);
        Ok(())
    }

    /// Many idle clones: of a snapshot whose command idles, and of a template, which start one that does.
    pub(crate) fn density(&mut self) -> Result<()> {
        let node = Node::new(self.world)?;
        node.originate()?;
        let mut client = Client::connect(&node.socket())?;
        keep(&mut client, Node::ORIGIN)?;
        let mut figure = Figure::new("MemAvailable that is gone after 60 s", "MiB");
        let of_snapshot = |client: &mut Client, name: &str| asked(client, clone_of(KEPT, name)).map(drop);
        let of_template = |client: &mut Client, name: &str| idle(&node, client, name, SMALL);
        let taken = crowd(&mut client, of_snapshot)?;
        figure.add(OF_SNAPSHOT, vec![mebi(taken)]);
        let taken = crowd(&mut client, of_template)?;
        figure.add(OF_TEMPLATE, vec![mebi(taken)]);
        for who in [OF_SNAPSHOT, OF_TEMPLATE] {
            figure.absolute(who, Target::AtMost(2.5e6 / f64::from(1 << 20)));
        }
        self.report.figures.push(figure);
        drop_kept(&mut client)
    }
}

/// Bytes of the host's memory that one of many idle clones takes.
fn crowd(client: &mut Client, start: impl Fn(&mut Client, &str) -> Result<()>) -> Result<u64> {
    let name = |number: usize| format!("{CLONE}-{number}");
    // Whatever the first one has the host read and make.
    start(client, &name(0))?;
    remove(client, &name(0))?;
    thread::sleep(Duration::from_secs(5));
    let before = available()?;
    for number in 0..CLONES {
        start(client, &name(number))?;
    }
    thread::sleep(IDLE);
    let taken = before.saturating_sub(available()?);
    for number in 0..CLONES {
        remove(client, &name(number))?;
    }
    Ok(taken / CLONES as u64)
}
