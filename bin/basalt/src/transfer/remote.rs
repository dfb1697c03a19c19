//! `push` and `pull`: a snapshot or a template as an OCI artifact. Its record is the config, each of its files a blob; its image
//! goes its own way. docs/snapshot-file.md has the media types.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};

use anyhow::{Context, Result, anyhow, bail};
use export::Reader;
use image::{Descriptor, Part};
use node_api::transfer::{Kind, Transferred, is_file_name};
use registry::{Artifact, ArtifactManifest, PulledArtifact};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::{Coming, Goal, Ground, Loaded, Origin, Piece, RECORD, flat, keep, told_of};
use crate::bar::Bar;
use crate::cli::{PullFrom, PushTo, Wish};
use crate::images::{self, Steps};
use crate::interrupt::until_signal;

/// The media types of what is of one kind.
struct Types {
    artifact: String,
    record: String,
    /// Of each file.
    file: String,
}

impl Types {
    fn of(kind: Kind) -> Self {
        Self {
            artifact: format!("application/vnd.basalt.{kind}.v1"),
            record: format!("application/vnd.basalt.{kind}.record.v1+json"),
            file: format!("application/vnd.basalt.{kind}.file.v1.tar+zstd"),
        }
    }
}

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

/// `push`.
pub(super) fn push(name: &str, to: &PushTo, ground: Ground<'_>) -> Result<u8> {
    let Ground { kind, output, .. } = ground;
    let way = images::Way::new(&to.destination, &to.registry, &[])?;
    let pushed = until_signal(|cancel| {
        let packed = artifact(name, ground, &|| cancel.is_cancelled());
        let artifact = packed.map_err(|error| flat(error, &format!("{kind} {name} cannot be packed")))?;
        let steps = Steps::new(output, "sent", !to.quiet);
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
    output.result(&result, || match to.quiet {
        true => format!("{}\n", result.digest),
        false => format!("{}  {}\n", result.destination, result.digest),
    })?;
    Ok(0)
}

/// Its files as blobs in files without names: a registry wants to know a blob's digest before it takes it.
fn artifact(name: &str, ground: Ground<'_>, stop: &dyn Fn() -> bool) -> Result<Artifact> {
    let (origin, record) = Origin::open(ground, name)?;
    let types = Types::of(ground.kind);
    let told = told_of(ground.kind, &record)?;
    let total = origin.bytes()?;
    let (mut bar, mut done) = (Bar::new(ground.output), 0);
    let mut config = Blob::new(stop)?;
    config.write_all(&record)?;
    let mut blobs = Vec::new();
    origin.rest(&mut |piece| {
        let mut blob = Blob::new(stop)?;
        let name = match piece {
            Piece::File(name, file) => {
                export::write_blob(&mut blob, name, file, &mut |bytes| {
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
        blobs.push(blob.into_part(&types.file, Some(title)));
        Ok(())
    })?;
    let notes = [
        ("org.opencontainers.image.base.name", told.image()),
        (
            "org.opencontainers.image.base.digest",
            format!("sha256:{}", told.digest()),
        ),
    ];
    Ok(Artifact {
        artifact_type: types.artifact,
        config: config.into_part(&types.record, None),
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

/// `pull`.
pub(super) fn pull(wish: Wish<'_>, from: &PullFrom, ground: Ground<'_>) -> Result<u8> {
    let Ground { kind, output, .. } = ground;
    let way = images::Way::new(&from.reference, &from.source.registry, &from.source.mirror)?;
    let store = images::store()?;
    let types = Types::of(kind);
    let look = |record: &[u8], manifest: &ArtifactManifest| look(kind, record, manifest);
    let loaded = until_signal(|cancel| {
        let steps = Steps::new(output, "fetched", !from.quiet);
        let (options, tell) = (way.options(cancel), |step| steps.show(step));
        let pulled = registry::pull_artifact(&store, &way.location, (&types.artifact, &look), &options, &tell);
        let pulled = pulled.map_err(|error| of_kind(error, kind))?;
        drop(steps);
        let loaded = unpack(&pulled, wish, ground);
        pulled.forget(&store);
        loaded.map_err(|error| flat(error, &format!("cannot save {}", way.location)))
    })?;
    loaded.show(output)
}

/// Something of ours that lies there is fetched by its own verb.
fn of_kind(error: registry::Error, kind: Kind) -> anyhow::Error {
    let other = kind.other();
    match &error {
        registry::Error::SomethingElse { location, found, .. } if *found == Types::of(other).artifact => {
            anyhow!("{location} in its registry is a {other} and no {kind}: `basalt {other} pull` fetches it")
        }
        _ => error.into(),
    }
}

/// What is wrong with a record and a manifest, before anything large is fetched.
fn look(kind: Kind, record: &[u8], manifest: &ArtifactManifest) -> Result<(), String> {
    let told = Transferred::of_record(kind, record).map_err(|error| format!("its record is none: {error}"))?;
    let file_type = Types::of(kind).file;
    let mut names = BTreeSet::new();
    for blob in &manifest.layers {
        let name = name_of(blob).filter(|name| *name != RECORD && is_file_name(name));
        let name = name.ok_or("a blob has the name of no file")?;
        // Compression makes nothing much larger.
        let most = told
            .most_bytes(name)
            .map(|most| most.saturating_add(most / 128).saturating_add(1 << 20));
        if !names.insert(name) || blob.media_type != file_type || most.is_none_or(|most| blob.size > most) {
            return Err(format!("its {name} is there twice, of another kind, or too large"));
        }
    }
    Ok(())
}

fn name_of(blob: &Descriptor) -> Option<&str> {
    blob.annotations.as_ref()?.get(TITLE)?.strip_suffix(SUFFIX)
}

fn unpack(pulled: &PulledArtifact, wish: Wish<'_>, ground: Ground<'_>) -> Result<Loaded> {
    let told = told_of(ground.kind, &pulled.config)?;
    let coming = Coming::new(&told, ground.output)?;
    let mut goal = Goal::begin(ground, wish, &pulled.config)?;
    for (descriptor, file) in &pulled.blobs {
        let name = name_of(descriptor).context("a blob without a name")?;
        let most = told
            .most_bytes(name)
            .with_context(|| format!("{name} is no file of it"))?;
        let mut file = file;
        file.seek(SeekFrom::Start(0))?;
        let mut reader = Reader::of_blob(file, ground.kind.word())?;
        let entry = reader.next_entry()?.context("a blob with nothing in it")?;
        if entry.name != name {
            bail!("the blob of {name} has {} in it", entry.name);
        }
        goal.take(&mut reader, &entry, most)?;
        if reader.next_entry()?.is_some() {
            return Err(anyhow!("the blob of {name} has more than that in it"));
        }
    }
    keep(goal, told, coming)
}
