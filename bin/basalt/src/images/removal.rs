//! `basalt rmi` and `basalt image prune`, which take nothing away from a sandbox, a snapshot or a template that somebody has built;
//! and what these use.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::Result;
use base::ByteSize;
use image::Prune;
use node_api::message::Item;
use node_api::{ListConfig, Request, Sandbox, Snapshot, Template};
use serde::Serialize;

use super::{short_digest, store};
use crate::cli::{PruneArgs, RmiArgs};
use crate::daemon;
use crate::output::Output;
use crate::{snapshots, templates};

/// What there may be images for.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(super) sandboxes: Vec<Sandbox>,
    pub(super) snapshots: Vec<Snapshot>,
    /// Those that somebody has built; the others are in no image's way.
    pub(super) templates: Vec<Template>,
}

impl Known {
    /// All of this host. The daemon is started if it does not run and there may be some: sandboxes that have ended use their
    /// images, too.
    pub(crate) fn ask() -> Result<Self> {
        let mut found = Self::default();
        let some = |state: &Path| {
            ["sandboxes", "snapshots", "templates"].iter().any(|name| {
                let entries = fs::read_dir(state.join(name));
                entries.is_ok_and(|mut entries| entries.next().is_some())
            })
        };
        let Some(mut client) = daemon::connect_if_needed(some)? else {
            return Ok(found);
        };
        client.ask_each(Request::List(ListConfig::all()), &mut |item| {
            if let Item::Sandbox(sandbox) = item {
                found.sandboxes.push(*sandbox);
            }
        })?;
        found.snapshots = snapshots::all(&mut client)?;
        found.templates = templates::all(&mut client)?;
        found.templates.retain(|template| template.recipe.is_some());
        Ok(found)
    }

    /// The images that they use.
    pub(crate) fn digests(&self) -> BTreeSet<String> {
        let of_sandboxes = self.sandboxes.iter().map(|sandbox| &sandbox.digest);
        let of_snapshots = self.snapshots.iter().map(|snapshot| &snapshot.digest);
        let of_templates = self.templates.iter().map(|template| &template.digest);
        of_sandboxes.chain(of_snapshots).chain(of_templates).cloned().collect()
    }
}

/// The names of what uses an image.
#[derive(Debug, Default)]
struct Users {
    sandboxes: Vec<String>,
    snapshots: Vec<String>,
    templates: Vec<String>,
}

impl Users {
    /// Of each image, by its digest.
    fn ask() -> Result<BTreeMap<String, Self>> {
        let mut users = BTreeMap::<String, Self>::new();
        let known = Known::ask()?;
        for sandbox in known.sandboxes {
            users.entry(sandbox.digest).or_default().sandboxes.push(sandbox.name);
        }
        for snapshot in known.snapshots {
            users.entry(snapshot.digest).or_default().snapshots.push(snapshot.name);
        }
        for template in known.templates {
            let name = template.name().to_owned();
            users.entry(template.digest).or_default().templates.push(name);
        }
        Ok(users)
    }

    /// Why the image cannot be removed.
    fn refusal(&self, reference: &str) -> anyhow::Error {
        let command = |verb: &str, names: &[String]| match names {
            [] => None,
            names => Some(format!("`basalt {verb} {}`", names.join(" "))),
        };
        let commands = [
            command("rm", &self.sandboxes),
            command("snapshot rm", &self.snapshots),
            command("template rm", &self.templates),
        ];
        let names: Vec<&str> = self
            .sandboxes
            .iter()
            .chain(&self.snapshots)
            .chain(&self.templates)
            .map(String::as_str)
            .collect();
        anyhow::anyhow!(
            "the image {reference:?} is used by {}: remove that first ({}), or force it (`basalt rmi --force {reference}`)",
            names.join(", "),
            commands.into_iter().flatten().collect::<Vec<_>>().join(", ")
        )
    }
}

/// An image that is gone, for machines.
#[derive(Debug, Serialize)]
struct Removed<'a> {
    reference: &'a str,
    digest: String,
}

/// `basalt rmi`. Goes on where one is refused.
pub(crate) fn remove(args: &RmiArgs, output: &Output) -> Result<u8> {
    let store = store()?;
    let users = if args.force { BTreeMap::new() } else { Users::ask()? };
    let in_use = users.keys().cloned().collect();
    let mut removed = Vec::new();
    let mut code = 0;
    for reference in &args.images {
        let error = match store.remove_unless(reference, &in_use) {
            Ok(digest) => {
                let digest = format!("sha256:{digest}");
                removed.push(Removed { reference, digest });
                continue;
            }
            Err(error @ image::Error::InUse { .. }) => {
                let digest = store.get(reference).map(|image| image.digest).unwrap_or_default();
                // Without users it is damaged, or its user has gone just now.
                let refusal = users.get(&digest).map(|users| users.refusal(reference));
                refusal.unwrap_or_else(|| error.into())
            }
            Err(error) => error.into(),
        };
        output.error(&error);
        code = 1;
    }
    if !removed.is_empty() {
        output.result(&removed, || {
            removed
                .iter()
                .map(|image| format!("{}  {}\n", image.reference, short_digest(&image.digest)))
                .collect()
        })?;
        templates::follow_images()?;
    }
    Ok(code)
}

/// What was pruned, for machines.
#[derive(Debug, Serialize)]
struct Pruned {
    images: Vec<String>,
    bytes: u64,
}

/// `basalt image prune`.
pub(crate) fn prune(args: &PruneArgs, output: &Output) -> Result<u8> {
    let store = store()?;
    let in_use = Known::ask()?.digests();
    let what = if args.all { Prune::Unused } else { Prune::Nameless };
    let pruned = store.prune(&in_use, what)?;
    if !pruned.images.is_empty() {
        templates::follow_images()?;
    }
    let pruned = Pruned {
        images: pruned.images.iter().map(|digest| format!("sha256:{digest}")).collect(),
        bytes: pruned.bytes,
    };
    output.result(&pruned, || {
        let lines = pruned.images.iter().map(|digest| format!("{}\n", short_digest(digest)));
        let freed = format!("{} freed\n", ByteSize(pruned.bytes));
        lines.chain([freed]).collect()
    })?;
    Ok(0)
}
