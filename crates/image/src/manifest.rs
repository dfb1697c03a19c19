//! Which image of a source is meant and what its documents say: OCI image-spec 1.1 (index, manifest, config), and
//! `manifest.json` of docker-archive. Everything a document names by digest is checked against it here, layers apart.
//!
//! The documents are read with our own few fields: what an image does not need is not looked at, and `null`, which
//! Docker writes for empty lists, is an empty list.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::document::{
    Descriptor, INDEX_TYPES, Index, MANIFEST_TYPES, Manifest, hex_digest, hex_digits, parse, wrong_platform,
};
use crate::source::Source;
use crate::stream::Compression;
use crate::{Error, Limits};

/// An index may name other indices; more than this deep is none.
const MAX_INDEX_DEPTH: u32 = 4;
pub(crate) const REF_NAME: &str = "org.opencontainers.image.ref.name";
pub(crate) const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// How an image wants to be run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// The program that every command is an argument to.
    pub entrypoint: Vec<String>,
    /// The command, or the entrypoint's default arguments.
    pub cmd: Vec<String>,
    /// `NAME=value` each.
    pub env: Vec<String>,
    /// `user`, `uid`, `user:group` or `uid:gid`; empty for root.
    pub user: String,
    /// Where commands start; empty for `/`.
    pub working_dir: String,
    /// `port/protocol` each.
    pub exposed_ports: Vec<String>,
    /// Directories that the image wants to be written to.
    pub volumes: Vec<String>,
    /// What to send for a polite stop, e.g. `SIGTERM`.
    pub stop_signal: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
}

/// The image that is meant.
#[derive(Debug)]
pub(crate) struct Selected {
    /// Of its manifest; of a docker-archive, which has none, of its config. In hexadecimal.
    pub(crate) digest: String,
    pub(crate) config: ImageConfig,
    /// RFC 3339.
    pub(crate) created: Option<String>,
    pub(crate) layers: Vec<Layer>,
    /// A name that the source gives it.
    pub(crate) name: Option<String>,
    pub(crate) documents: Documents,
}

/// What the image is described by.
#[derive(Debug)]
pub(crate) enum Documents {
    /// The manifest's descriptor, and what it says.
    Oci { manifest: Descriptor, parts: Box<Manifest> },
    /// A docker-archive has a config alone.
    Docker { config: Vec<u8> },
}

/// A layer's blob and what it must be.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) blob: String,
    /// Of the blob as stored, where the source says so.
    pub(crate) digest: Option<String>,
    pub(crate) size: Option<u64>,
    /// By media type; `None`: by its first bytes.
    pub(crate) compression: Option<Compression>,
    /// Of the decompressed layer.
    pub(crate) diff_id: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerManifest {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Config {
    architecture: String,
    os: String,
    created: Option<String>,
    config: Option<RunConfig>,
    rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RunConfig {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    exposed_ports: Option<BTreeMap<String, serde_json::Value>>,
    volumes: Option<BTreeMap<String, serde_json::Value>>,
    stop_signal: Option<String>,
    labels: Option<BTreeMap<String, String>>,
}

/// The one linux/amd64 image in `source`. An OCI layout is preferred where an archive is both (as `docker save` makes).
pub(crate) fn select(source: &Source) -> Result<Selected, Error> {
    if !(source.has("oci-layout") && source.has("index.json")) {
        return select_docker(source);
    }
    let index: Index = parse("index.json", &source.document("index.json")?)?;
    let mut candidates = Candidates::default();
    candidates.collect(source, index, None, 0)?;
    let mut images: Vec<_> = candidates.found.into_values().collect();
    match (images.pop(), images.is_empty()) {
        (Some(image), true) => Ok(image),
        (None, _) => Err(wrong_platform(candidates.others)),
        (Some(last), false) => {
            images.push(last);
            let names: Vec<_> = images
                .iter()
                .map(|image| image.name.clone().unwrap_or(image.digest.clone()))
                .collect();
            Err(Error::SeveralImages {
                count: images.len(),
                names: names.join(", "),
                path: source.path().to_owned(),
            })
        }
    }
}

/// Manifests below an index, by digest, and the platforms that others are for.
#[derive(Default)]
struct Candidates {
    found: BTreeMap<String, Selected>,
    others: BTreeSet<String>,
}

impl Candidates {
    fn collect(&mut self, source: &Source, index: Index, name: Option<&String>, depth: u32) -> Result<(), Error> {
        Limits::check(
            || "the depth of the image's indices".to_owned(),
            depth.into(),
            MAX_INDEX_DEPTH.into(),
        )?;
        for descriptor in index.manifests {
            if let (false, Some(platform)) = (descriptor.suits(), &descriptor.platform) {
                // Build attestations are manifests for unknown/unknown.
                self.others.insert(format!("{}/{}", platform.os, platform.architecture));
                continue;
            }
            let annotations = descriptor.annotations.as_ref();
            let own = annotations.and_then(|map| map.get(CONTAINERD_NAME).or_else(|| map.get(REF_NAME)));
            let name = own.or(name);
            let what = format!("manifest {}", descriptor.digest);
            match descriptor.media_type.as_str() {
                media_type if MANIFEST_TYPES.contains(&media_type) => {
                    self.manifest(source, &descriptor, name)?;
                }
                media_type if INDEX_TYPES.contains(&media_type) => {
                    let inner = parse(&what, &checked(source, &descriptor, &what)?)?;
                    self.collect(source, inner, name, depth + 1)?;
                }
                other => {
                    return Err(Error::UnsupportedMediaType {
                        what,
                        media_type: other.to_owned(),
                    });
                }
            }
        }
        Ok(())
    }

    fn manifest(&mut self, source: &Source, descriptor: &Descriptor, name: Option<&String>) -> Result<(), Error> {
        let what = format!("manifest {}", descriptor.digest);
        let manifest: Manifest = parse(&what, &checked(source, descriptor, &what)?)?;
        let what = format!("config {}", manifest.config.digest);
        manifest.check(source.limits())?;
        let config: Config = parse(&what, &checked(source, &manifest.config, &what)?)?;
        if config.os != "linux" || config.architecture != "amd64" {
            self.others.insert(format!("{}/{}", config.os, config.architecture));
            return Ok(());
        }
        let (config, created, diff_ids) = taken(config, manifest.layers.len(), &what, source.limits())?;
        let layers = manifest.layers.iter().zip(diff_ids).map(|(layer, diff_id)| {
            let digest = layer.hex()?.to_owned();
            Ok(Layer {
                blob: blob_name(&digest),
                digest: Some(digest),
                size: Some(layer.size),
                compression: Some(layer.compression()?),
                diff_id,
            })
        });
        let layers = layers.collect::<Result<_, Error>>()?;
        let digest = descriptor.hex()?.to_owned();
        self.found.insert(
            digest.clone(),
            Selected {
                digest,
                config,
                created,
                layers,
                name: name.cloned(),
                documents: Documents::Oci {
                    manifest: descriptor.clone(),
                    parts: Box::new(manifest),
                },
            },
        );
        Ok(())
    }
}

impl Manifest {
    /// Whether its config, of which `contents` are all bytes, is of a linux/amd64 image with so many layers.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn check_config(&self, contents: &[u8], limits: &Limits) -> Result<(), Error> {
        let what = format!("config {}", self.config.digest);
        let config: Config = parse(&what, contents)?;
        if config.os != "linux" || config.architecture != "amd64" {
            return Err(wrong_platform(
                [format!("{}/{}", config.os, config.architecture)].into(),
            ));
        }
        taken(config, self.layers.len(), &what, limits).map(drop)
    }
}

pub(crate) fn select_docker(source: &Source) -> Result<Selected, Error> {
    let mut images: Vec<DockerManifest> = parse("manifest.json", &source.document("manifest.json")?)?;
    let (Some(image), true) = (images.pop(), images.is_empty()) else {
        let names = images
            .iter()
            .map(|image| image.config.clone())
            .collect::<Vec<_>>()
            .join(", ");
        return Err(match images.len() {
            0 => Error::BadDocument {
                document: "manifest.json".to_owned(),
                problem: "it names no image".to_owned(),
            },
            count => Error::SeveralImages {
                count: count + 1,
                names,
                path: source.path().to_owned(),
            },
        });
    };
    let what = format!("config {}", image.config);
    let document = source.document(&image.config)?;
    let digest = hex::encode(Sha256::digest(&document));
    // The file is named by its digest, with `.json` or as an OCI blob.
    let stem = image
        .config
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .trim_end_matches(".json");
    if hex_digits(stem) && stem != digest {
        return Err(Error::DigestMismatch {
            what,
            expected: format!("sha256:{stem}"),
            found: digest,
        });
    }
    let config: Config = parse(&what, &document)?;
    if config.os != "linux" || config.architecture != "amd64" {
        return Err(wrong_platform(
            [format!("{}/{}", config.os, config.architecture)].into(),
        ));
    }
    let (config, created, diff_ids) = taken(config, image.layers.len(), &what, source.limits())?;
    let layers = image.layers.into_iter().zip(diff_ids).map(|(blob, diff_id)| {
        let name = blob.rsplit('/').next().unwrap_or_default();
        let digest = (blob.starts_with("blobs/sha256/") && hex_digits(name)).then(|| name.to_owned());
        Layer {
            blob,
            digest,
            size: None,
            compression: None,
            diff_id,
        }
    });
    let name = image.repo_tags.unwrap_or_default().into_iter().next();
    Ok(Selected {
        digest,
        config,
        created,
        layers: layers.collect(),
        name,
        documents: Documents::Docker { config: document },
    })
}

/// What of a config is kept, and its diff_ids, one for each layer.
fn taken(
    config: Config,
    layers: usize,
    what: &str,
    limits: &Limits,
) -> Result<(ImageConfig, Option<String>, Vec<String>), Error> {
    let diff_ids = config.rootfs.diff_ids.unwrap_or_default();
    Limits::check(|| "the number of layers".to_owned(), layers as u64, limits.layers)?;
    if diff_ids.len() != layers {
        let problem = format!("{} diff_ids for {layers} layers", diff_ids.len());
        return Err(Error::BadDocument {
            document: what.to_owned(),
            problem,
        });
    }
    let diff_ids = diff_ids
        .iter()
        .map(|text| hex_digest(text).map(str::to_owned))
        .collect::<Result<_, _>>()?;
    let run = config.config.unwrap_or_default();
    let keys = |map: Option<BTreeMap<String, _>>| map.unwrap_or_default().into_keys().collect();
    let image = ImageConfig {
        entrypoint: run.entrypoint.unwrap_or_default(),
        cmd: run.cmd.unwrap_or_default(),
        env: run.env.unwrap_or_default(),
        user: run.user.unwrap_or_default(),
        working_dir: run.working_dir.unwrap_or_default(),
        exposed_ports: keys(run.exposed_ports),
        volumes: keys(run.volumes),
        stop_signal: run.stop_signal.filter(|signal| !signal.is_empty()),
        labels: run.labels.unwrap_or_default(),
    };
    Ok((image, config.created, diff_ids))
}

/// A document with the size and digest that its descriptor states.
fn checked(source: &Source, descriptor: &Descriptor, what: &str) -> Result<Vec<u8>, Error> {
    let expected = hex_digest(&descriptor.digest)?;
    let document = source.document(&blob_name(expected))?;
    if document.len() as u64 != descriptor.size {
        let (expected, found) = (descriptor.size, document.len() as u64);
        return Err(Error::SizeMismatch {
            what: what.to_owned(),
            expected,
            found,
        });
    }
    let found = hex::encode(Sha256::digest(&document));
    if found != expected {
        return Err(Error::DigestMismatch {
            what: what.to_owned(),
            expected: descriptor.digest.clone(),
            found,
        });
    }
    Ok(document)
}

pub(crate) fn blob_name(digest: &str) -> String {
    format!("blobs/sha256/{digest}")
}
