//! What images cost on disk, and the removal of those that nobody needs.
//!
//! Does not know what uses an image: the caller says so by digest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use super::content::Content;
use super::{Store, read_metadata};
use crate::Error;

/// What `prune` takes for needless.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prune {
    /// Images without a name.
    Nameless,
    /// All images that are not in use, and all interrupted downloads.
    Unused,
}

/// What `prune` removed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Digests of images.
    pub images: Vec<String>,
    /// Bytes that are free now, those of layers and downloads included.
    pub bytes: u64,
}

/// What one image costs.
#[derive(Debug, PartialEq, Eq)]
pub struct Usage {
    /// The image.
    pub digest: String,
    /// Its names.
    pub names: Vec<String>,
    /// Bytes of the erofs image, which is always its own.
    pub image: u64,
    /// Bytes of manifest, config and layers that no other image has: what removing it would free beside the image.
    pub unique: u64,
    /// Bytes of layers that others have too.
    pub shared: u64,
}

/// What all images cost.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of all images, each layer once.
    pub images: u64,
    /// Those of them that [`Store::prune`] of all that is unused would free.
    pub needless: u64,
    /// Bytes of downloads that are interrupted or running.
    pub downloads: u64,
}

impl Usage {
    /// What removing it would free.
    pub fn reclaimable(&self) -> u64 {
        self.image + self.unique
    }
}

impl Store {
    /// Removes images that nobody needs, never one whose digest is in `in_use`; and layers that no image refers to, and
    /// old downloads.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn prune(&self, in_use: &BTreeSet<String>, what: Prune) -> Result<Pruned, Error> {
        let _lock = self.lock()?;
        let mut names = self.names()?;
        let mut pruned = Pruned::default();
        for digest in self.digests()? {
            let named = names.values().any(|named| *named == digest);
            if in_use.contains(&digest) || (named && what == Prune::Nameless) {
                continue;
            }
            if named {
                names.retain(|_, named| *named != digest);
                self.set_names(&names)?;
            }
            let (path, _) = self.paths(&digest);
            pruned.bytes += on_disk(&path);
            self.remove_metadata(&digest)?;
            pruned.images.push(digest);
        }
        pruned.bytes += self.collect()?;
        for digest in &pruned.images {
            self.remove_orphan(digest)?;
        }
        pruned.bytes += match what {
            Prune::Nameless => self.sweep()?,
            Prune::Unused => self.sweep_older(Duration::ZERO, 0)?,
        };
        Ok(pruned)
    }

    /// Removes what interrupted operations have left, old downloads included; its bytes. No image is touched.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn clear_leftovers(&self) -> Result<u64, Error> {
        let _lock = self.lock()?;
        self.clean()?;
        Ok(self.collect()? + self.sweep()?)
    }

    /// What all images cost, and how much of that is for others than those whose digests are in `in_use`.
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub fn footprint(&self, in_use: &BTreeSet<String>) -> Result<Footprint, Error> {
        let mut footprint = Footprint::default();
        let (mut needed, mut unknown) = (BTreeSet::new(), false);
        for digest in self.digests()? {
            let (path, json) = self.paths(&digest);
            let size = on_disk(&path);
            footprint.images += size;
            if !in_use.contains(&digest) {
                footprint.needless += size;
            } else if let Ok(metadata) = read_metadata(&json) {
                let parts = metadata.content.iter().flat_map(Content::descriptors);
                needed.extend(parts.map(|part| part.digest.trim_start_matches("sha256:").to_owned()));
            } else {
                // Nobody knows what it refers to: no layer would be removed.
                unknown = true;
            }
        }
        for (name, size) in sizes(&self.content())? {
            footprint.images += size;
            if !unknown && !needed.contains(&name) {
                footprint.needless += size;
            }
        }
        footprint.downloads = sizes(&self.partial())?.into_iter().map(|(_, size)| size).sum();
        Ok(footprint)
    }

    /// What each image costs, and last what interrupted and running downloads do.
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub fn usage(&self) -> Result<(Vec<Usage>, u64), Error> {
        let names = self.names()?;
        let mut of_image = Vec::new();
        let mut owners = BTreeMap::<String, u32>::new();
        for digest in self.digests()? {
            // One that is damaged is told by `list`; its layers count for nobody then.
            let Ok(metadata) = read_metadata(&self.paths(&digest).1) else {
                continue;
            };
            let parts: BTreeMap<_, _> = metadata
                .content
                .iter()
                .flat_map(Content::descriptors)
                // Of an image that was brought here converted the rest is elsewhere.
                .filter(|part| self.has_part(part))
                .map(|part| (part.digest.clone(), part.size))
                .collect();
            for part in parts.keys() {
                *owners.entry(part.clone()).or_default() += 1;
            }
            of_image.push((digest, parts));
        }
        let usage = of_image.into_iter().map(|(digest, parts)| {
            let (unique, shared): (Vec<_>, Vec<_>) = parts.into_iter().partition(|(part, _)| owners[part] == 1);
            let sum = |parts: Vec<(String, u64)>| parts.into_iter().map(|(_, size)| size).sum();
            let of = names.iter().filter(|(_, named)| **named == digest);
            Usage {
                names: of.map(|(name, _)| name.clone()).collect(),
                image: on_disk(&self.paths(&digest).0),
                unique: sum(unique),
                shared: sum(shared),
                digest,
            }
        });
        let usage = usage.collect();
        let downloads = sizes(&self.partial())?.into_iter().map(|(_, size)| size).sum();
        Ok((usage, downloads))
    }
}

/// The files of a directory, and their bytes.
fn sizes(directory: &Path) -> Result<Vec<(String, u64)>, Error> {
    let entries = fs::read_dir(directory).map_err(Error::io("list", directory))?;
    let sized = entries.flatten().map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        (name, on_disk(&entry.path()))
    });
    Ok(sized.collect())
}

/// Bytes of a file; none if it is gone.
fn on_disk(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.len())
}
