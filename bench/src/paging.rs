//! How a clone's memory gets to its guest: mapped, eagerly, or on demand in a recorded order; with its files in the page cache, and on
//! the disk alone.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, bail};
use node_api::{Client, CloneConfig, Paging, Reply, Request};
use rustix::fs::{Advice, fadvise};

use crate::clone::{asked, remove};
use crate::figures::{Bench, tell};
use crate::kept::{KEPT, keep};
use crate::report::Figure;
use crate::run::Node;
use crate::stats::Target;

const CLONE: &str = Node::CLONE;

/// Which way memory takes.
type Way = (&'static str, Paging);

const CACHED: [Way; 3] = [
    ("Basalt, mapped, from the page cache", Paging::Mapped),
    ("Basalt, eager, from the page cache", Paging::Eager),
    ("Basalt, on demand in order, from the page cache", Paging::OnDemand),
];

const FROM_DISK: [Way; 3] = [
    ("Basalt, mapped, from the disk", Paging::Mapped),
    ("Basalt, eager, from the disk", Paging::Eager),
    ("Basalt, on demand in order, from the disk", Paging::OnDemand),
];

/// Has the page cache forget a file that nobody has mapped.
fn forget(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

fn start(client: &mut Client, paging: Paging) -> Result<f64> {
    let config = CloneConfig {
        snapshot: KEPT.into(),
        name: Some(CLONE.into()),
        paging,
        ..CloneConfig::default()
    };
    match asked(client, Request::Clone(config))? {
        (time, Reply::Started { .. }) => Ok(time),
        (_, other) => bail!("no clone: {other:?}"),
    }
}

impl Bench<'_> {
    /// Ways of a clone's memory.
    pub(crate) fn paging(&mut self) -> Result<()> {
        let node = Node::new(self.world)?;
        // Starts the daemon, too.
        node.originate()?;
        let mut client = Client::connect(&node.socket())?;
        keep(&mut client, Node::ORIGIN)?;
        // Whoever has its files mapped would keep them in the page cache.
        remove(&mut client, Node::ORIGIN)?;
        for paging in [Paging::Mapped, Paging::OnDemand] {
            // The first clone teaches the others.
            start(&mut client, paging)?;
            remove(&mut client, CLONE)?;
        }
        let files = node.snapshot_files(KEPT)?;
        let mut figure = Figure::new("A clone, by how its memory gets to the guest", "ms");
        // What was forgotten comes back in part only: those that have all of it in the cache are before.
        for (ways, forgotten) in [(CACHED, &[][..]), (FROM_DISK, &files)] {
            let mut samples = ways.map(|_| Vec::new());
            for number in 0..self.runs {
                for ((who, paging), samples) in ways.into_iter().zip(&mut samples) {
                    let time = self.again("paging", who, || {
                        drop(remove(&mut client, CLONE));
                        forgotten.iter().try_for_each(|file| forget(file))?;
                        start(&mut client, paging)
                    })?;
                    tell("paging", number, who, time, "ms");
                    samples.push(time);
                }
            }
            for ((who, _), samples) in ways.into_iter().zip(samples) {
                figure.add(who, samples);
            }
        }
        remove(&mut client, CLONE)?;
        let [(mapped, _), (eager, _), (on_demand, _)] = FROM_DISK;
        let median = |who| figure.median(who).context("no median");
        let of_mapped = [
            (eager, median(eager)? / median(mapped)?),
            (on_demand, median(on_demand)? / median(mapped)?),
        ];
        for (who, ratio) in of_mapped {
            figure.judge(&format!("{who} / mapped"), ratio, Target::AtMost(1.0));
        }
        self.report.figures.push(figure);
        Ok(())
    }
}
