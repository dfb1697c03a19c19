//! From an opened source to a written image: checks each layer's digests, applies the layers, writes erofs. Knows
//! nothing of names and of where images are kept.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::file::Temp;
use crate::layer::{Applier, Spool};
use crate::manifest::{Layer, Selected, select};
use crate::source::Source;
use crate::stop::StoppableFile;
use crate::stream::Unpacked;
use crate::{Error, Limits, erofs};

/// What an import is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Checking, decompressing and applying layers; bytes are those of the layers as stored.
    Reading,
    /// Writing the image; bytes are the image's.
    Writing,
}

/// How far an import is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Bytes done in this phase.
    pub done: u64,
    /// Bytes to do in this phase.
    pub total: u64,
}

/// Converts an image archive in memory to an erofs image in memory: an import without a store, for tests and fuzzing.
/// The archive itself must not be compressed; its layers may be.
///
/// # Errors
///
/// What is wrong with the archive.
pub fn convert_bytes(archive: &[u8], limits: &Limits) -> Result<Vec<u8>, Error> {
    let memory = Path::new("memory");
    let memfd = |name| {
        let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC);
        fd.map(File::from)
            .map_err(|error| Error::io("create a file in", memory)(error.into()))
    };
    let input = memfd("archive")?;
    (&input).write_all(archive).map_err(Error::io("write to", memory))?;
    let source = Source::archive(input, memory, None, limits)?;
    let selected = select(&source)?;
    let out = memfd("image")?;
    convert(
        &source,
        &selected,
        Spool::new(memfd("spool")?, memory),
        (&out, memory),
        &mut |_| {},
    )?;
    read_all(&out).map_err(Error::io("read from", memory))
}

fn read_all(file: &File) -> std::io::Result<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let len = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    let mut contents = vec![0; len];
    file.read_exact_at(&mut contents, 0)?;
    Ok(contents)
}

/// A spool file in `directory` that has no name.
pub(crate) fn spool(directory: &Path) -> Result<Spool<'_>, Error> {
    Ok(Spool::new(Temp::new(directory)?.into_unnamed()?, directory))
}

/// Writes the selected image to the empty file `out`, with the name that it has in messages; returns its size.
pub(crate) fn convert(
    source: &Source,
    selected: &Selected,
    spool: Spool<'_>,
    out: (&File, &Path),
    progress: &mut dyn FnMut(Progress),
) -> Result<u64, Error> {
    let limits = source.limits();
    let mut applier = Applier::new(spool, limits);
    let blobs = selected
        .layers
        .iter()
        .map(|layer| source.blob(&layer.blob))
        .collect::<Result<Vec<_>, _>>()?;
    // Each layer is read twice: its digest is known to be right before anything in it is looked at.
    let total = blobs.iter().map(|blob| blob.len * 2).sum();
    let mut done = 0;
    let mut step = |bytes| {
        done += bytes;
        progress(Progress {
            phase: Phase::Reading,
            done,
            total,
        });
    };
    let mut used = 0;
    for (layer, blob) in selected.layers.iter().zip(&blobs) {
        let what = match &layer.digest {
            Some(digest) => format!("layer sha256:{digest}"),
            None => format!("layer {}", layer.blob),
        };
        check_size(layer, blob.len, &what)?;
        if let Some(expected) = &layer.digest {
            let found = hex::encode(blob.sha256(&mut step)?);
            check_digest(&what, expected, found)?;
        } else {
            step(blob.len);
        }
        let compression = layer.compression.map_or_else(|| blob.compression(), Ok)?;
        let mut unpacked = Unpacked::new(
            compression.decoder(blob.part()),
            what.clone(),
            used,
            limits.uncompressed,
        )
        .until(source.stop());
        applier.layer(&mut unpacked)?;
        let (len, diff_id) = unpacked.finish()?;
        used += len;
        check_digest(
            &format!("the decompressed {what}"),
            &layer.diff_id,
            hex::encode(diff_id),
        )?;
        step(blob.len);
    }
    let (tree, contents) = applier.finish();
    let mut report = |done, total| {
        progress(Progress {
            phase: Phase::Writing,
            done,
            total,
        })
    };
    let file = StoppableFile {
        file: out.0,
        stop: source.stop(),
    };
    let written = erofs::write(&tree, &contents, uuid(&selected.digest), file, &mut report);
    if written.is_err() {
        source.stop().check()?;
    }
    written.map_err(Error::io("write", out.1))
}

fn check_size(layer: &Layer, found: u64, what: &str) -> Result<(), Error> {
    match layer.size {
        Some(expected) if expected != found => Err(Error::SizeMismatch {
            what: what.to_owned(),
            expected,
            found,
        }),
        _ => Ok(()),
    }
}

fn check_digest(what: &str, expected: &str, found: String) -> Result<(), Error> {
    if expected == found {
        return Ok(());
    }
    Err(Error::DigestMismatch {
        what: what.to_owned(),
        expected: format!("sha256:{expected}"),
        found,
    })
}

/// A volume's UUID is its image's digest, as far as it goes: RFC 9562, version 8.
fn uuid(digest: &str) -> [u8; 16] {
    let mut uuid = [0; 16];
    // A digest that was checked has 64 digits.
    if hex::decode_to_slice(digest.get(..32).unwrap_or_default(), &mut uuid).is_err() {
        return [0; 16];
    }
    uuid[6] = (uuid[6] & 0x0f) | 0x80;
    uuid[8] = (uuid[8] & 0x3f) | 0x80;
    uuid
}
