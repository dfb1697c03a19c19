//! `basalt rmi` and `basalt image prune`, which take nothing away from a sandbox; and what sandboxes use.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::Result;
use base::ByteSize;
use image::{Prune, Store};
use node_api::message::Item;
use node_api::{Request, Sandbox};
use serde::Serialize;

use super::{short_digest, store};
use crate::cli::{PruneArgs, RmiArgs};
use crate::daemon;
use crate::output::Output;

/// All sandboxes of this host. The daemon is started if it does not run and there may be some: those that have ended use
/// their images, too.
pub(super) fn sandboxes() -> Result<Vec<Sandbox>> {
    let mut found = Vec::new();
    let Some(mut client) = daemon::connect_if_needed(|state| {
        let entries = fs::read_dir(state.join("sandboxes"));
        entries.is_ok_and(|mut entries| entries.next().is_some())
    })?
    else {
        return Ok(found);
    };
    client.ask_each(Request::List { all: true }, &mut |item| {
        if let Item::Sandbox(sandbox) = item {
            found.push(*sandbox);
        }
    })?;
    Ok(found)
}

/// The names of the sandboxes of each image, by its digest.
#[derive(Debug)]
struct Users(BTreeMap<String, Vec<String>>);

impl Users {
    fn ask() -> Result<Self> {
        let mut users = BTreeMap::<String, Vec<String>>::new();
        for sandbox in sandboxes()? {
            users.entry(sandbox.digest).or_default().push(sandbox.name);
        }
        Ok(Self(users))
    }

    fn digests(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }

    /// Why the image cannot be removed.
    fn refusal(&self, store: &Store, reference: &str, error: image::Error) -> anyhow::Error {
        let digest = store.get(reference).map(|image| image.digest).unwrap_or_default();
        match self.0.get(&digest) {
            Some(names) => anyhow::anyhow!(
                "the image {reference:?} is used by {}: remove that first (`basalt rm {}`), or force it (`basalt rmi --force \
                 {reference}`)",
                names.join(", "),
                names.join(" ")
            ),
            // It is damaged, or its user has gone just now.
            None => error.into(),
        }
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
    let users = if args.force {
        Users(BTreeMap::new())
    } else {
        Users::ask()?
    };
    let in_use = users.digests();
    let mut removed = Vec::new();
    let mut code = 0;
    for reference in &args.images {
        let error = match store.remove_unless(reference, &in_use) {
            Ok(digest) => {
                let digest = format!("sha256:{digest}");
                removed.push(Removed { reference, digest });
                continue;
            }
            Err(error @ image::Error::InUse { .. }) => users.refusal(&store, reference, error),
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
    let in_use = Users::ask()?.digests();
    let what = if args.all { Prune::Unused } else { Prune::Nameless };
    let pruned = store.prune(&in_use, what)?;
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
