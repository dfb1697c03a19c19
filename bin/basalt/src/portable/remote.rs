//! `basalt snapshot push` and `pull`: a snapshot as an OCI artifact. Its record is the config, each of its files a blob; its image
//! goes its own way. docs/snapshot-file.md has the media types.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};

use anyhow::{Context, Result, anyhow, bail};
use bundle::Reader;
use image::{Descriptor, Part};
use node_api::Snapshot;
use registry::{Artifact, ArtifactManifest, PulledArtifact};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::{Coming, Goal, KIND, Loaded, Origin, Piece, RECORD, Side, flat, is_file_name, keep, snapshot_of};
use crate::bar::Bar;
use crate::cli::{PullSnapshotArgs, PushSnapshotArgs};
use crate::images::{self, Steps, Way};
use crate::interrupt::until_signal;
use crate::output::Output;

/// The artifact's type.
const ARTIFACT: &str = "application/vnd.basalt.snapshot.v1";

/// The media type of its record.
const RECORD_TYPE: &str = "application/vnd.basalt.snapshot.record.v1+json";

/// The media type of each file.
const FILE_TYPE: &str = "application/vnd.basalt.snapshot.file.v1.tar+zstd";

/// The annotation with a file's name, to which [`SUFFIX`] is put (OCI image specification, "Pre-Defined Annotation Keys").
const TITLE: &str = "org.opencontainers.image.title";
const SUFFIX: &str = ".tar.zst";

/// What was sent, for machines.
#[derive(Debug, Serialize)]
struct Pushed {
    destination: String,
    /// The manifest's.
    digest: String,
    /// Blobs that were not there.
    sent: usize,
}

/// `basalt snapshot push`.
pub(super) fn push(args: &PushSnapshotArgs, side: &Side, output: &Output) -> Result<u8> {
    let way = Way::new(&args.destination, &args.registry, &[])?;
    let pushed = until_signal(|cancel| {
        let packed = artifact(&args.name, side, output, &|| cancel.is_cancelled());
        let artifact = packed.map_err(|error| flat(error, &format!("snapshot {} cannot be packed", args.name)))?;
        let steps = Steps::new(output, "sent", !args.quiet);
        let tell = |step| steps.show(step);
        Ok(registry::push_artifact(
            &artifact,
            &way.location,
            &way.options(cancel),
            &tell,
        )?)
    })?;
    let result = Pushed {
        destination: way.location.to_string(),
        digest: pushed.digest,
        sent: pushed.sent,
    };
    output.result(&result, || match args.quiet {
        true => format!("{}\n", result.digest),
        false => format!("{}  {}\n", result.destination, result.digest),
    })?;
    Ok(0)
}

/// A snapshot as blobs in files without names: a registry wants to know a blob's digest before it takes it.
fn artifact(name: &str, side: &Side, output: &Output, stop: &dyn Fn() -> bool) -> Result<Artifact> {
    let (origin, record) = Origin::open(side, name, output)?;
    let snapshot = snapshot_of(&record)?;
    let total = origin.bytes()?;
    let (mut bar, mut done) = (Bar::new(output), 0);
    let mut config = Blob::new(stop)?;
    config.write_all(&record)?;
    let mut blobs = Vec::new();
    origin.rest(&mut |piece| {
        let mut blob = Blob::new(stop)?;
        let name = match piece {
            Piece::File(name, file) => {
                bundle::write_blob(&mut blob, name, file, &mut |bytes| {
                    done += bytes;
                    bar.show("packing", done, total);
                })?;
                name.to_owned()
            }
            Piece::Member(entry, reader) => {
                reader.pass_to_blob(&mut blob)?;
                entry.name.clone()
            }
        };
        let title = BTreeMap::from([(TITLE.to_owned(), format!("{name}{SUFFIX}"))]);
        blobs.push(blob.into_part(FILE_TYPE, Some(title)));
        Ok(())
    })?;
    let notes = [
        ("org.opencontainers.image.base.name", snapshot.config.image.clone()),
        (
            "org.opencontainers.image.base.digest",
            format!("sha256:{}", snapshot.digest),
        ),
    ];
    Ok(Artifact {
        artifact_type: ARTIFACT.to_owned(),
        config: config.into_part(RECORD_TYPE, None),
        blobs,
        annotations: notes.map(|(key, value)| (key.to_owned(), value)).into(),
    })
}

/// A blob on its way into a file.
struct Blob<'s> {
    file: File,
    hash: Sha256,
    size: u64,
    stop: &'s dyn Fn() -> bool,
}

impl<'s> Blob<'s> {
    fn new(stop: &'s dyn Fn() -> bool) -> Result<Self> {
        // Also makes the directory that the file is in.
        images::store()?;
        Ok(Self {
            file: images::nameless()?,
            hash: Sha256::new(),
            size: 0,
            stop,
        })
    }

    fn into_part(self, media_type: &str, annotations: Option<BTreeMap<String, String>>) -> Part {
        let descriptor = Descriptor {
            media_type: media_type.to_owned(),
            digest: format!("sha256:{}", hex::encode(self.hash.finalize())),
            size: self.size,
            platform: None,
            annotations,
        };
        let file = self.file;
        Part { descriptor, file }
    }
}

impl Write for Blob<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if (self.stop)() {
            return Err(io::Error::other("interrupted"));
        }
        let written = self.file.write(bytes)?;
        self.hash.update(bytes.get(..written).unwrap_or_default());
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `basalt snapshot pull`.
pub(super) fn pull(args: &PullSnapshotArgs, side: &Side, output: &Output) -> Result<u8> {
    let way = Way::new(&args.reference, &args.registry, &args.mirror)?;
    let store = images::store()?;
    let loaded = until_signal(|cancel| {
        let steps = Steps::new(output, "fetched", !args.quiet);
        let (options, tell) = (way.options(cancel), |step| steps.show(step));
        let pulled = registry::pull_artifact(&store, &way.location, (ARTIFACT, &look), &options, &tell)?;
        drop(steps);
        let loaded = unpack(&pulled, args.name.as_deref(), side, output);
        pulled.forget(&store);
        loaded.map_err(|error| flat(error, &format!("{} cannot be kept", way.location)))
    })?;
    loaded.show(output)
}

/// What is wrong with a record and a manifest, before anything large is fetched.
fn look(record: &[u8], manifest: &ArtifactManifest) -> Result<(), String> {
    let snapshot = Snapshot::of_record(record).map_err(|error| format!("its record is none: {error}"))?;
    let mut names = BTreeSet::new();
    for blob in &manifest.layers {
        let name = name_of(blob).filter(|name| *name != RECORD && is_file_name(name));
        let name = name.ok_or("a blob has the name of no file")?;
        // Compression makes nothing much larger.
        let most = snapshot
            .most_bytes(name)
            .map(|most| most.saturating_add(most / 128).saturating_add(1 << 20));
        if !names.insert(name) || blob.media_type != FILE_TYPE || most.is_none_or(|most| blob.size > most) {
            return Err(format!("its {name} is there twice, of another kind, or too large"));
        }
    }
    Ok(())
}

fn name_of(blob: &Descriptor) -> Option<&str> {
    blob.annotations.as_ref()?.get(TITLE)?.strip_suffix(SUFFIX)
}

fn unpack(pulled: &PulledArtifact, name: Option<&str>, side: &Side, output: &Output) -> Result<Loaded> {
    let snapshot = snapshot_of(&pulled.config)?;
    let coming = Coming::new(&snapshot, output)?;
    let mut goal = Goal::begin(side, name, &pulled.config, output)?;
    for (descriptor, file) in &pulled.blobs {
        let name = name_of(descriptor).context("a blob without a name")?;
        let most = snapshot
            .most_bytes(name)
            .with_context(|| format!("{name} is no file of it"))?;
        let mut file = file;
        file.seek(SeekFrom::Start(0))?;
        let mut reader = Reader::of_blob(file, KIND)?;
        let entry = reader.next_entry()?.context("a blob with nothing in it")?;
        if entry.name != name {
            bail!("the blob of {name} has {} in it", entry.name);
        }
        goal.take(&mut reader, &entry, most)?;
        if reader.next_entry()?.is_some() {
            return Err(anyhow!("the blob of {name} has more than that in it"));
        }
    }
    keep(goal, snapshot, coming)
}
