//! `basalt system df`: what everything takes on this host's disk, so that it adds up to all of the state directory.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Result;
use base::ByteSize;
use node_api::recovery::QUARANTINE;
use node_api::{Sandbox, State};
use serde::Serialize;

use super::removal::Known;
use super::{short_digest, short_name, store};
use crate::cli::DfArgs;
use crate::output::{Output, table};
use crate::places;

/// The unit of stat's blocks, whatever the file system's is (stat(2)).
const STAT_BLOCK: u64 = 512;

/// One kind of things.
#[derive(Debug, Serialize)]
struct Kind {
    kind: &'static str,
    total: usize,
    /// Those that something uses, or that run.
    active: usize,
    bytes: u64,
    /// What can be had back without a loss to what is active.
    reclaimable: u64,
}

/// An image by itself.
#[derive(Debug, Serialize)]
struct OneImage {
    names: Vec<String>,
    digest: String,
    /// What removing it alone would free.
    own: u64,
    /// Layers that others have too.
    shared: u64,
    sandboxes: usize,
}

/// A sandbox by itself.
#[derive(Debug, Serialize)]
struct OneSandbox {
    id: String,
    name: String,
    state: State,
    bytes: u64,
}

/// All of it.
#[derive(Debug, Serialize)]
struct Usage {
    kinds: Vec<Kind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    images: Option<Vec<OneImage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandboxes: Option<Vec<OneSandbox>>,
}

/// `basalt system df`.
pub(crate) fn df(args: &DfArgs, output: &Output) -> Result<u8> {
    let state = places::state()?;
    let store = store()?;
    let asked = Known::ask()?;
    let (known, in_use) = (&asked.sandboxes, asked.digests());
    let footprint = store.footprint(&in_use)?;
    let (used, _) = store.usage()?;
    let all = Disk::default().bytes(&state);
    // A file that several have counts for the first.
    let mut disk = Disk::default();
    let of_images = disk.bytes(&state.join("images"));
    let built = asked.templates.iter();
    let built = built.map(|built| disk.bytes(&state.join("templates").join(&built.id)));
    let of_built: u64 = built.sum();
    let of_templates = of_built + disk.bytes(&state.join("templates"));
    let of_snapshots = disk.bytes(&state.join("snapshots"));
    let one_sandbox = |sandbox: &Sandbox| OneSandbox {
        id: sandbox.id.clone(),
        name: sandbox.name.clone(),
        state: sandbox.state,
        bytes: disk.clone().bytes(&state.join("sandboxes").join(&sandbox.id)),
    };
    let sandboxes: Vec<OneSandbox> = known.iter().map(one_sandbox).collect();
    let of_sandboxes = disk.bytes(&state.join("sandboxes"));
    let quarantine = state.join(QUARANTINE);
    let of_quarantine = disk.bytes(&quarantine);
    let ended = sandboxes.iter().filter(|sandbox| sandbox.state == State::Exited);
    let kinds = vec![
        Kind {
            kind: "images",
            total: used.len(),
            active: used.iter().filter(|image| in_use.contains(&image.digest)).count(),
            bytes: of_images.saturating_sub(footprint.downloads),
            reclaimable: footprint.needless,
        },
        Kind {
            kind: "downloads",
            total: fs::read_dir(state.join("images/partial"))?.count(),
            active: 0,
            bytes: footprint.downloads,
            reclaimable: footprint.downloads,
        },
        Kind {
            kind: "sandboxes",
            total: sandboxes.len(),
            active: sandboxes.iter().filter(|sandbox| sandbox.state.has_vm()).count(),
            bytes: of_sandboxes,
            reclaimable: ended.map(|sandbox| sandbox.bytes).sum(),
        },
        Kind {
            kind: "snapshots",
            total: asked.snapshots.len(),
            active: 0,
            bytes: of_snapshots,
            reclaimable: 0,
        },
        Kind {
            kind: "templates",
            total: count(&state.join("templates")),
            active: 0,
            bytes: of_templates,
            // What was built takes its builder's time to have it again.
            reclaimable: of_templates.saturating_sub(of_built),
        },
        Kind {
            kind: "quarantine",
            total: count(&quarantine),
            active: 0,
            bytes: of_quarantine,
            // Whether anybody needs it nobody but a person can tell.
            reclaimable: 0,
        },
        Kind {
            kind: "daemon",
            total: 0,
            active: 0,
            bytes: all.saturating_sub(of_images + of_sandboxes + of_snapshots + of_templates + of_quarantine),
            reclaimable: 0,
        },
    ];
    let one_image = |image: image::Usage| OneImage {
        own: image.reclaimable(),
        shared: image.shared,
        sandboxes: known.iter().filter(|sandbox| sandbox.digest == image.digest).count(),
        names: image.names.iter().map(|name| short_name(name).to_owned()).collect(),
        digest: format!("sha256:{}", image.digest),
    };
    let usage = Usage {
        kinds,
        images: args.verbose.then(|| used.into_iter().map(one_image).collect()),
        sandboxes: args.verbose.then_some(sandboxes),
    };
    output.result(&usage, || text(&usage))?;
    Ok(0)
}

fn text(usage: &Usage) -> String {
    let row = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
    let mut rows = vec![row(&["TYPE", "TOTAL", "ACTIVE", "SIZE", "RECLAIMABLE"])];
    for kind in &usage.kinds {
        let count = |number: usize| {
            if kind.kind == "daemon" {
                "-".into()
            } else {
                number.to_string()
            }
        };
        rows.push(vec![
            kind.kind.to_owned(),
            count(kind.total),
            count(kind.active),
            ByteSize(kind.bytes).to_string(),
            ByteSize(kind.reclaimable).to_string(),
        ]);
    }
    let mut text = table(&rows);
    if let Some(images) = &usage.images {
        let mut rows = vec![row(&["IMAGE", "DIGEST", "OWN", "SHARED", "SANDBOXES"])];
        rows.extend(images.iter().map(|image| {
            vec![
                image.names.first().cloned().unwrap_or_else(|| "<none>".into()),
                short_digest(&image.digest).to_owned(),
                ByteSize(image.own).to_string(),
                ByteSize(image.shared).to_string(),
                image.sandboxes.to_string(),
            ]
        }));
        text.push('\n');
        text.push_str(&table(&rows));
    }
    if let Some(sandboxes) = &usage.sandboxes {
        let mut rows = vec![row(&["SANDBOX", "NAME", "STATE", "SIZE"])];
        rows.extend(sandboxes.iter().map(|sandbox| {
            vec![
                sandbox.id.clone(),
                sandbox.name.clone(),
                sandbox.state.to_string(),
                ByteSize(sandbox.bytes).to_string(),
            ]
        }));
        text.push('\n');
        text.push_str(&table(&rows));
    }
    text
}

/// How many there are in a directory; what is being made does not count.
fn count(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."))
        .count()
}

/// What was counted already: several snapshots can have one file.
#[derive(Clone, Debug, Default)]
struct Disk(BTreeSet<(u64, u64)>);

impl Disk {
    /// Bytes that a file takes, or a directory with all that is in it, and that were not counted before: holes take none. What
    /// is gone meanwhile takes none either.
    fn bytes(&mut self, path: &Path) -> u64 {
        let Ok(meta) = fs::symlink_metadata(path) else {
            return 0;
        };
        if !self.0.insert((meta.dev(), meta.ino())) {
            return 0;
        }
        let mut bytes = meta.blocks() * STAT_BLOCK;
        if meta.is_dir() {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            bytes += entries.map(|entry| self.bytes(&entry.path())).sum::<u64>();
        }
        bytes
    }
}
