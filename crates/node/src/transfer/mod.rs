//! Snapshots and built templates on their way out of a node and into one, as open files. Whoever has them packs or unpacks them
//! elsewhere, however long that takes; what is being loaded belongs to one connection, and goes with it until it is whole and has its
//! name. Knows no archive and no registry. What comes in is from strangers: a record is looked at (`record`) before anything
//! believes it.

pub(crate) mod memory;
pub(crate) mod record;
mod template;

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use base::points;
use node_api::message::LoadStep;
use node_api::transfer::{Kind, is_file_name};
use node_api::{Reply, Resources, Snapshot};
use serde::Serialize;

use crate::Error;
use crate::node::Node;
use crate::operations::build_template::outdated;
use crate::saved::checksums;
use crate::saved::memory_files;
use crate::saved::snapshots::{Begun, Place, Record};

/// What travels with one packet.
const MOST_FILES: usize = wire::packet::MAX_FDS;

/// A snapshot or a template that somebody is bringing.
#[derive(Debug)]
pub(crate) struct Loading {
    begun: Begun,
    kind: Kind,
    name: Option<String>,
    /// In place of what is here.
    force: bool,
}

/// The names of the files in a place that belong to what is stored there, the record first.
fn names_in(place: &Place) -> Result<Vec<String>, Error> {
    let directory = place.directory();
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(Error::file("read", directory))? {
        let entry = entry.map_err(Error::file("read", directory))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && is_file_name(&name) {
            names.push(name);
        }
    }
    names.sort_by_key(|name| (name != "record.json", name.clone()));
    match names.len() <= MOST_FILES {
        true => Ok(names),
        false => Err(Error::Invalid(format!(
            "{} files are too many to travel at once",
            names.len()
        ))),
    }
}

impl Node {
    /// The files of a snapshot or a template, open for reading, and their names; whatever comes to its name, these belong together.
    pub(crate) fn open_files(self: &Arc<Self>, kind: Kind, name: &str) -> Result<(Vec<String>, Vec<OwnedFd>), Error> {
        let (place, resources) = match kind {
            Kind::Snapshot => self.snapshot_to_send(name)?,
            Kind::Template => self.template_to_send(name)?,
        };
        if !place.is_whole(&resources) {
            return Err(match kind {
                Kind::Snapshot => checksums::record_damaged(&place.record(), "a file beside it is missing"),
                Kind::Template => outdated(name, "its files are damaged"),
            });
        }
        self.verify_before_sending(kind, name)?;
        let names = names_in(&place)?;
        let open = |name: &String| {
            let path = place.directory().join(name);
            File::open(&path).map(OwnedFd::from).map_err(Error::file("open", &path))
        };
        let files = names.iter().map(open).collect::<Result<_, _>>()?;
        Ok((names, files))
    }

    fn snapshot_to_send(&self, name: &str) -> Result<(Place, Resources), Error> {
        let (place, record) = self.snapshots.get(name)?;
        let config = record.snapshot.config;
        match config.volumes.first() {
            None => Ok((place, config.resources)),
            Some(volume) => Err(Error::Invalid(format!(
                "the snapshot `{name}` stays on this host, as its sandbox has a volume at {}, which is a directory here and no part of \
                 it: keep a sandbox without volumes",
                volume.target
            ))),
        }
    }

    /// One step of loading something; `loading` is what this asker has begun.
    pub(crate) fn load(&self, loading: &mut Option<Loading>, step: LoadStep) -> Result<(Reply, Vec<OwnedFd>), Error> {
        let none = || Error::Invalid("nothing is being loaded on this connection: begin first".into());
        match step {
            LoadStep::Begin { kind, name, force } => {
                *loading = Some(self.begin_load(kind, name, force)?);
                Ok((Reply::Done, Vec::new()))
            }
            LoadStep::File { name } => {
                let file = loading.as_ref().ok_or_else(none)?.file(&name)?;
                Ok((Reply::Done, vec![file.into()]))
            }
            LoadStep::Keep => {
                let loading = loading.take().ok_or_else(none)?;
                let saved = match loading.kind {
                    Kind::Snapshot => Reply::Snapshot(Box::new(self.save_loaded_snapshot(loading)?)),
                    Kind::Template => Reply::LoadedTemplate(Box::new(self.save_loaded_template(loading)?)),
                };
                Ok((saved, Vec::new()))
            }
        }
    }

    /// Where those of a kind are.
    fn home(&self, kind: Kind) -> &Path {
        match kind {
            Kind::Snapshot => self.snapshots.directory(),
            Kind::Template => self.templates.directory(),
        }
    }

    fn begin_load(&self, kind: Kind, name: Option<String>, force: bool) -> Result<Loading, Error> {
        match (kind, &name) {
            (Kind::Snapshot, Some(name)) => self.snapshots.check_free(name)?,
            (Kind::Template, Some(name)) => self.check_template_name(name, force)?,
            (_, None) => (),
        }
        let begun = Begun::new(self.home(kind))?;
        self.points.at(points::LOAD_BEGUN);
        Ok(Loading {
            begun,
            kind,
            name,
            force,
        })
    }

    /// Gives it its name, if it is what it should be.
    fn save_loaded_snapshot(&self, loading: Loading) -> Result<Snapshot, Error> {
        let Loading { begun, name, .. } = loading;
        let record: Record = record::checked(&begun.place, |record: &mut Record| {
            record.snapshot.name = name.unwrap_or_else(|| record.snapshot.name.clone());
            // It is found out here, or not at all.
            record.snapshot.damaged = None;
        })?;
        let name = record.snapshot.name.clone();
        self.snapshots.check_free(&name)?;
        begun.reaches_disk()?;
        self.points.at(points::LOAD_SUMMED);
        begun.describe_loaded(&record)?;
        self.points.at(points::LOAD_WRITTEN);
        if !begun.save_as(&name)? {
            return Err(Error::SnapshotTaken(name));
        }
        self.points.at(points::LOAD_KEPT);
        self.inspect_snapshot(&name)
    }
}

impl Loading {
    /// An empty file of it.
    fn file(&self, name: &str) -> Result<File, Error> {
        if !is_file_name(name) || names_in(&self.begun.place)?.len() >= MOST_FILES {
            let kind = self.kind;
            let why = format!("{name:?} is no file of a {kind}, or one too many");
            return Err(Error::NotToBeLoaded(kind, why));
        }
        let place = &self.begun.place;
        place.create(&place.directory().join(name))
    }
}

impl Begun {
    /// Waits until what came has reached the disk, and has its memory in the page cache as clones want it. However large that is, nobody
    /// may wait for it.
    fn reaches_disk(&self) -> Result<(), Error> {
        // Of what has just come, and was compared with the sums that it came with.
        self.sum()?;
        self.sync()?;
        memory_files::read_in_huge_pages(self.place.directory());
        Ok(())
    }

    /// Writes what is to be known of it in place of what came, and waits until that has reached the disk.
    fn describe_loaded(&self, record: &impl Serialize) -> Result<(), Error> {
        let path = self.place.record();
        fs::remove_file(&path).map_err(Error::file("replace", &path))?;
        self.describe(record)?;
        self.sync()
    }
}
