//! What images came as: manifests, configs and compressed layers, each once by digest, however many images have it.
//! They are kept so that an image can be sent on with the digest that it came with.
//!
//! Knows nothing of registries; what a registry sends gets here as open files ([`Pulled`]).

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use base::points;
use flate2::Compression as Level;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::{Image, Names, Store, read_metadata, remove_file};
use crate::document::{CONFIG_TYPES, Descriptor, MANIFEST_TYPES, Manifest};
use crate::file::{Temp, replace};
use crate::import::Progress;
use crate::manifest::{Documents, Selected, blob_name, select};
use crate::source::{Blob, Source};
use crate::stream::{Compression, Stream as _};
use crate::{Error, Reference};

const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar";

/// The files in `content/` that an image is made of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Content {
    pub(super) manifest: Descriptor,
    pub(super) parts: Manifest,
}

impl Content {
    /// All of it; a layer may be there twice.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        [&self.manifest, &self.parts.config]
            .into_iter()
            .chain(&self.parts.layers)
    }
}

/// An image as a registry has sent it.
#[derive(Debug)]
pub struct Pulled {
    /// The manifest's bytes.
    pub manifest: Vec<u8>,
    /// Its media type.
    pub media_type: String,
    /// The config's bytes.
    pub config: Vec<u8>,
    /// Each layer by the 64 digits of its digest.
    pub layers: HashMap<String, File>,
}

impl Store {
    /// Makes an image of what was pulled, and gives it `name`. Everything is checked against its digest again. What is
    /// stored already is not stored again.
    ///
    /// # Errors
    ///
    /// What is wrong with the image or the disk; then nothing but the downloads is left behind.
    pub fn commit(
        &self,
        pulled: Pulled,
        name: Option<&Reference>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Image, Error> {
        let digest = hex::encode(Sha256::digest(&pulled.manifest));
        let index = json!({ "schemaVersion": 2, "manifests": [{
            "mediaType": pulled.media_type, "digest": format!("sha256:{digest}"), "size": pulled.manifest.len(),
        }]});
        let documents = [
            ("oci-layout".to_owned(), b"{}".to_vec()),
            ("index.json".to_owned(), index.to_string().into_bytes()),
            (blob_name(&digest), pulled.manifest),
            (blob_name(&hex::encode(Sha256::digest(&pulled.config))), pulled.config),
        ];
        let blobs = pulled
            .layers
            .into_iter()
            .map(|(digest, file)| (blob_name(&digest), file));
        let _lock = self.lock()?;
        let source = Source::parts(documents.into(), blobs.collect(), &self.directory, &self.limits).until(&self.stop);
        self.adopt(&source, &select(&source)?, progress)?;
        self.name_digest(&digest, name)
    }

    /// The whole image with this manifest, if it is here with all that it came as; it gets `name`.
    ///
    /// # Errors
    ///
    /// The store cannot be read or written.
    pub fn known(&self, digest: &str, name: Option<&Reference>) -> Result<Option<Image>, Error> {
        let _lock = self.lock()?;
        let image = match self.load(digest, &Names::new()) {
            Err(Error::NoSuchImage { .. } | Error::CorruptStored { .. }) => return Ok(None),
            loaded => loaded?,
        };
        let (_, json) = self.paths(digest);
        let content = read_metadata(&json)?.content;
        if super::verify(&image).is_err() || !content.is_some_and(|content| self.has_content(&content)) {
            return Ok(None);
        }
        self.name_digest(digest, name).map(Some)
    }

    fn name_digest(&self, digest: &str, name: Option<&Reference>) -> Result<Image, Error> {
        let mut names = self.names()?;
        if let Some(name) = name
            && names.get(&name.to_string()).is_none_or(|named| named != digest)
        {
            names.insert(name.to_string(), digest.to_owned());
            self.set_names(&names)?;
            self.steps.at(points::IMAGE_NAMED);
        }
        self.load(digest, &names)
    }

    pub(super) fn content_path(&self, digest: &str) -> PathBuf {
        self.content().join(digest.trim_start_matches("sha256:"))
    }

    /// Whether every file of it is there in its length.
    pub(super) fn has_content(&self, content: &Content) -> bool {
        content.descriptors().all(|part| self.has_part(part))
    }

    pub(super) fn has_part(&self, part: &Descriptor) -> bool {
        fs::metadata(self.content_path(&part.digest)).is_ok_and(|meta| meta.len() == part.size)
    }

    /// Keeps what `source` has of the selected image. The lock is held, and all digests have been checked.
    pub(super) fn keep(&self, source: &Source, selected: &Selected) -> Result<Content, Error> {
        match &selected.documents {
            Documents::Oci { manifest, parts } => {
                for document in [manifest, &parts.config] {
                    self.keep_document(document, &source.document(&blob_name(document.hex()?))?)?;
                }
                for layer in &parts.layers {
                    self.keep_layer(layer, source)?;
                }
                Ok(Content {
                    // Names and platforms are an index's matter.
                    manifest: bare(&manifest.media_type, manifest.hex()?, manifest.size),
                    parts: Manifest::clone(parts),
                })
            }
            Documents::Docker { config } => self.keep_docker(source, selected, config),
        }
    }

    fn keep_document(&self, descriptor: &Descriptor, contents: &[u8]) -> Result<(), Error> {
        if self.has_part(descriptor) {
            return Ok(());
        }
        if self.take_download(descriptor)? {
            return Ok(());
        }
        replace(&self.content_path(&descriptor.digest), contents, &self.temporary())
    }

    /// Whether the part was among the downloads: then it costs a rename.
    fn take_download(&self, part: &Descriptor) -> Result<bool, Error> {
        let (from, to) = (self.partial().join(part.hex()?), self.content_path(&part.digest));
        if fs::metadata(&from).is_ok_and(|meta| meta.len() == part.size) {
            match fs::rename(&from, &to) {
                // Another image has it by now.
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
                renamed => renamed.map_err(Error::io("write", &to))?,
            }
            return Ok(true);
        }
        Ok(false)
    }

    fn keep_layer(&self, layer: &Descriptor, source: &Source) -> Result<(), Error> {
        if self.has_part(layer) || self.take_download(layer)? {
            return Ok(());
        }
        let to = self.content_path(&layer.digest);
        let blob = source.blob(&blob_name(layer.hex()?))?;
        let temp = Temp::new(&self.temporary())?;
        copy(&blob, &mut temp.file(), &to)?;
        temp.persist(&to)
    }

    /// A docker-archive has neither a manifest nor, as a rule, compressed layers: both are made.
    fn keep_docker(&self, source: &Source, selected: &Selected, config: &[u8]) -> Result<Content, Error> {
        let config_part = bare(CONFIG_TYPES[0], &selected.digest, config.len() as u64);
        self.keep_document(&config_part, config)?;
        let mut layers = Vec::new();
        for layer in &selected.layers {
            self.stop.check()?;
            layers.push(self.keep_compressed(&source.blob(&layer.blob)?)?);
        }
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST_TYPES[0], "config": config_part, "layers": layers,
        });
        let document = manifest.to_string().into_bytes();
        let digest = hex::encode(Sha256::digest(&document));
        let manifest = bare(MANIFEST_TYPES[0], &digest, document.len() as u64);
        self.keep_document(&manifest, &document)?;
        let parts = Manifest {
            config: config_part,
            layers,
        };
        Ok(Content { manifest, parts })
    }

    /// A layer that is not compressed is, by gzip, which every registry and engine knows. The same layer gives the same
    /// bytes as long as the compressor does.
    fn keep_compressed(&self, blob: &Blob) -> Result<Descriptor, Error> {
        let temp = Temp::new(&self.temporary())?;
        let (mut counted, content) = (Counted::new(temp.file()), self.content());
        let suffix = match blob.compression()? {
            Compression::None => {
                let mut encoder = GzEncoder::new(&mut counted, Level::fast());
                copy(blob, &mut encoder, &content)?;
                encoder.finish().map_err(Error::io("write", &content))?;
                "+gzip"
            }
            compression => {
                copy(blob, &mut counted, &content)?;
                if compression == Compression::Gzip {
                    "+gzip"
                } else {
                    "+zstd"
                }
            }
        };
        let (digest, size) = (hex::encode(counted.hash.finalize()), counted.len);
        let layer = bare(&format!("{LAYER_TYPE}{suffix}"), &digest, size);
        if !self.has_part(&layer) {
            temp.persist(&self.content_path(&digest))?;
        }
        Ok(layer)
    }

    /// Removes what no image refers to; its bytes. While an image's metadata are damaged nobody knows what it refers to,
    /// and everything stays. The lock is held.
    pub(super) fn collect(&self) -> Result<u64, Error> {
        let mut referred = BTreeSet::new();
        for digest in self.digests()? {
            match read_metadata(&self.paths(&digest).1) {
                Ok(metadata) => {
                    let content = metadata.content.iter().flat_map(Content::descriptors);
                    referred.extend(content.map(|part| part.digest.trim_start_matches("sha256:").to_owned()));
                }
                Err(Error::NoSuchImage { .. }) => {}
                Err(error) => {
                    log::warn!("kept all layers that came with images: {error}");
                    return Ok(0);
                }
            }
        }
        let directory = self.content();
        let mut freed = 0;
        for entry in fs::read_dir(&directory).map_err(Error::io("list", &directory))? {
            let entry = entry.map_err(Error::io("list", &directory))?;
            if !referred.contains(&*entry.file_name().to_string_lossy()) {
                freed += entry.metadata().map_or(0, |meta| meta.len());
                remove_file(&entry.path())?;
            }
        }
        Ok(freed)
    }
}

/// A descriptor that says no more than it must.
fn bare(media_type: &str, hex: &str, size: u64) -> Descriptor {
    Descriptor {
        media_type: media_type.to_owned(),
        digest: format!("sha256:{hex}"),
        size,
        platform: None,
        annotations: None,
    }
}

fn copy(blob: &Blob, out: &mut impl Write, to: &std::path::Path) -> Result<(), Error> {
    let (mut part, mut buf) = (blob.part(), vec![0; 1 << 20]);
    loop {
        let got = part.fill(&mut buf)?;
        out.write_all(&buf[..got]).map_err(Error::io("write", to))?;
        if got < buf.len() {
            return Ok(());
        }
    }
}

/// Counts and hashes what goes into a file.
struct Counted<'a> {
    file: &'a File,
    hash: Sha256,
    len: u64,
}

impl<'a> Counted<'a> {
    fn new(file: &'a File) -> Self {
        Self {
            file,
            hash: Sha256::new(),
            len: 0,
        }
    }
}

impl Write for Counted<'_> {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        let count = self.file.write(buf)?;
        self.hash.update(&buf[..count]);
        self.len += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}
