//! An image on its way out: its parts as open files, and one tar that is an OCI layout and a docker-archive at once, as
//! `docker save` writes it since Docker 25 and `podman load` and our own import read it.
//!
//! Knows nothing of registries.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::json;

use super::{Names, Store, read_metadata};
use crate::document::Descriptor;
use crate::manifest::{CONTAINERD_NAME, REF_NAME, blob_name};
use crate::{Error, Limits};

/// The document that says that it is a layout.
const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;

/// The unit of a tar archive.
const BLOCK: u64 = 512;

/// All that makes an image, to be sent on.
#[derive(Debug)]
pub struct Export {
    /// Its digest in this store.
    pub digest: String,
    /// Its names.
    pub names: Vec<String>,
    /// The manifest, which for an image from a registry or an OCI layout is what it came with.
    pub manifest: Part,
    /// The config.
    pub config: Part,
    /// Its layers, the base's first; a blob may be there twice.
    pub layers: Vec<Part>,
}

/// One document or blob.
#[derive(Debug)]
pub struct Part {
    /// What it is.
    pub descriptor: Descriptor,
    /// Its bytes, from its beginning on.
    pub file: File,
}

impl Store {
    /// The parts of the image `reference`; they stay readable if it is removed meanwhile.
    ///
    /// # Errors
    ///
    /// There is no such image, or only its converted form is here.
    pub fn export(&self, reference: &str) -> Result<Export, Error> {
        let _lock = self.lock()?;
        let names = self.names()?;
        let digest = self.resolve(reference, &names)?;
        let lacks = |problem: String| Error::NoContent {
            reference: reference.to_owned(),
            problem,
        };
        let content = read_metadata(&self.paths(&digest).1)?.content;
        let content = content.ok_or_else(|| lacks("only its converted form is here".to_owned()))?;
        let part = |descriptor: &Descriptor| {
            let path = self.content_path(&descriptor.digest);
            let file = File::open(&path).map_err(|error| lacks(format!("{}: {error}", path.display())))?;
            let len = file.metadata().map_err(Error::io("read", &path))?.len();
            if len != descriptor.size {
                return Err(lacks(format!(
                    "{} has {len} bytes instead of {}",
                    path.display(),
                    descriptor.size
                )));
            }
            let descriptor = descriptor.clone();
            Ok(Part { descriptor, file })
        };
        Ok(Export {
            manifest: part(&content.manifest)?,
            config: part(&content.parts.config)?,
            layers: content.parts.layers.iter().map(part).collect::<Result<_, _>>()?,
            names: of(&names, &digest),
            digest,
        })
    }

    /// Writes the image `reference` to `out`, which `to` names in messages.
    ///
    /// # Errors
    ///
    /// There is no such image, only its converted form is here, or `out` refuses.
    pub fn save(&self, reference: &str, out: &mut dyn Write, to: &Path) -> Result<(), Error> {
        let export = self.export(reference)?;
        archive(&export, out).map_err(Error::io("write", to))
    }
}

impl Export {
    /// Writes it to `out` as an archive.
    ///
    /// # Errors
    ///
    /// `out` refuses, or a part cannot be read.
    pub fn write_archive(&self, out: &mut dyn Write) -> io::Result<()> {
        archive(self, out)
    }

    /// How long that archive is.
    pub fn archive_bytes(&self) -> u64 {
        let documents = [LAYOUT.len(), index(self).len(), docker_manifest(self).len()];
        let blobs = self.blobs().into_iter().map(|part| part.descriptor.size);
        let members = documents.into_iter().map(|length| length as u64).chain(blobs);
        // Each has a header, and is filled up to a whole block; two blocks are the end.
        members.map(|size| BLOCK + size.next_multiple_of(BLOCK)).sum::<u64>() + 2 * BLOCK
    }

    /// Each blob once, in the order in which it is written.
    fn blobs(&self) -> Vec<&Part> {
        let mut blobs: Vec<&Part> = Vec::new();
        for part in [&self.manifest, &self.config].into_iter().chain(&self.layers) {
            if blobs.iter().all(|written| written.hex() != part.hex()) {
                blobs.push(part);
            }
        }
        blobs
    }
}

impl Part {
    /// Its 64 digits.
    pub fn hex(&self) -> &str {
        self.descriptor.digest.trim_start_matches("sha256:")
    }

    /// All of a document.
    ///
    /// # Errors
    ///
    /// It cannot be read, or is larger than a document may be.
    pub fn document(&self) -> Result<Vec<u8>, Error> {
        use std::os::unix::fs::FileExt;
        let what = || format!("the size of {}", self.descriptor.digest);
        Limits::check(what, self.descriptor.size, Limits::default().document)?;
        let mut contents = vec![0; usize::try_from(self.descriptor.size).unwrap_or(usize::MAX)];
        let read = self.file.read_exact_at(&mut contents, 0);
        read.map_err(Error::io("read", Path::new(&self.descriptor.digest)))?;
        Ok(contents)
    }
}

fn of(names: &Names, digest: &str) -> Vec<String> {
    let named = names.iter().filter(|(_, named)| *named == digest);
    named.map(|(name, _)| name.clone()).collect()
}

fn archive(export: &Export, out: &mut dyn Write) -> io::Result<()> {
    let mut tar = tar::Builder::new(out);
    // The documents first, so that a reader that cannot seek knows what to expect.
    entry(&mut tar, "oci-layout", LAYOUT)?;
    entry(&mut tar, "index.json", index(export).as_bytes())?;
    entry(&mut tar, "manifest.json", docker_manifest(export).as_bytes())?;
    for part in export.blobs() {
        let blob = At { part, position: 0 };
        append(&mut tar, &blob_name(part.hex()), blob, part.descriptor.size)?;
    }
    tar.into_inner()?.flush()
}

fn index(export: &Export) -> String {
    let Descriptor {
        media_type,
        digest,
        size,
        ..
    } = &export.manifest.descriptor;
    let bare = json!({ "mediaType": media_type, "digest": digest, "size": size });
    let named = export.names.iter().map(|name| {
        let mut named = bare.clone();
        named["annotations"] = json!({ CONTAINERD_NAME: name, REF_NAME: name });
        named
    });
    let mut manifests: Vec<_> = named.collect();
    if manifests.is_empty() {
        manifests.push(bare);
    }
    json!({ "schemaVersion": 2, "manifests": manifests }).to_string()
}

/// `manifest.json` as `docker load` wants it.
fn docker_manifest(export: &Export) -> String {
    let layers: Vec<_> = export.layers.iter().map(|layer| blob_name(layer.hex())).collect();
    json!([{ "Config": blob_name(export.config.hex()), "RepoTags": export.names, "Layers": layers }]).to_string()
}

fn entry(tar: &mut tar::Builder<&mut dyn Write>, name: &str, contents: &[u8]) -> io::Result<()> {
    append(tar, name, contents, contents.len() as u64)
}

fn append(tar: &mut tar::Builder<&mut dyn Write>, name: &str, contents: impl io::Read, size: u64) -> io::Result<()> {
    // No owner, no time: the same image gives the same archive.
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(size);
    tar.append_data(&mut header, name, contents)
}

/// Reads a part from its beginning without moving the position that others may share.
struct At<'a> {
    part: &'a Part,
    position: u64,
}

impl io::Read for At<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        use std::os::unix::fs::FileExt;
        let left = usize::try_from(self.part.descriptor.size.saturating_sub(self.position)).unwrap_or(usize::MAX);
        let want = buf.len().min(left);
        let got = self.part.file.read_at(&mut buf[..want], self.position)?;
        if got == 0 && want > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.position += got as u64;
        Ok(got)
    }
}
