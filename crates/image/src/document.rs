//! The two documents by which an OCI image names its parts, index and manifest (OCI image-spec 1.1; Docker's schema 2
//! says the same with other media types). A registry's answers and a layout's blobs are both read here.
//!
//! Knows neither where a document comes from nor where its parts are.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::stream::Compression;
use crate::{Error, Limits};

/// Media types of a manifest, OCI's first.
pub const MANIFEST_TYPES: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
/// Media types of an index, OCI's first.
pub const INDEX_TYPES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
pub(crate) const CONFIG_TYPES: [&str; 2] = [
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
];
const LAYER_TYPES: [&str; 4] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
];

/// What one document says of another or of a blob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    #[serde(default)]
    pub media_type: String,
    /// `sha256:` and 64 digits, once [`Descriptor::hex`] has said so.
    pub digest: String,
    /// Its length in bytes.
    pub size: u64,
    /// What it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Notes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

/// What machine an image is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// `amd64`.
    pub architecture: String,
    /// `linux`.
    pub os: String,
}

/// An index: manifests for several platforms.
#[derive(Debug, Clone, Deserialize)]
pub struct Index {
    /// They, and indices inside this one.
    pub manifests: Vec<Descriptor>,
}

/// A manifest: one image.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// The config.
    pub config: Descriptor,
    /// Its layers, the base's first.
    pub layers: Vec<Descriptor>,
}

/// Either.
#[derive(Debug, Clone)]
pub enum Document {
    /// An index.
    Index(Index),
    /// A manifest.
    Manifest(Manifest),
}

impl Descriptor {
    /// The digest's 64 digits.
    ///
    /// # Errors
    ///
    /// It is no SHA-256 in hexadecimal.
    pub fn hex(&self) -> Result<&str, Error> {
        hex_digest(&self.digest)
    }

    /// Whether it may be for this machine: Linux on x86-64, or it does not say.
    pub(crate) fn suits(&self) -> bool {
        self.platform
            .as_ref()
            .is_none_or(|platform| platform.os == "linux" && platform.architecture == "amd64")
    }

    pub(crate) fn compression(&self) -> Result<Compression, Error> {
        let suffix = LAYER_TYPES
            .iter()
            .find_map(|prefix| self.media_type.strip_prefix(prefix));
        match suffix {
            Some("") => Ok(Compression::None),
            Some("+gzip" | ".gzip") => Ok(Compression::Gzip),
            Some("+zstd" | ".zstd") => Ok(Compression::Zstd),
            _ => Err(unsupported(format!("layer {}", self.digest), &self.media_type)),
        }
    }
}

impl Document {
    /// Reads `contents`, which came with the media type `media_type`; `what` is its name in messages. A manifest is also
    /// [checked](Manifest::check).
    ///
    /// # Errors
    ///
    /// It is neither, or does not say what it must.
    pub fn parse(what: &str, media_type: &str, contents: &[u8], limits: &Limits) -> Result<Self, Error> {
        Limits::check(|| format!("the size of {what}"), contents.len() as u64, limits.document)?;
        if INDEX_TYPES.contains(&media_type) {
            return Ok(Self::Index(parse(what, contents)?));
        }
        if MANIFEST_TYPES.contains(&media_type) {
            let manifest: Manifest = parse(what, contents)?;
            manifest.check(limits)?;
            return Ok(Self::Manifest(manifest));
        }
        Err(unsupported(what.to_owned(), media_type))
    }
}

impl Index {
    /// What to follow for linux/amd64: the first manifest for it, else the first that does not say what it is for.
    ///
    /// # Errors
    ///
    /// There is none; the error names what there is.
    pub fn for_this_machine(&self) -> Result<&Descriptor, Error> {
        let mut suiting: Vec<_> = self.manifests.iter().filter(|entry| entry.suits()).collect();
        suiting.sort_by_key(|entry| entry.platform.is_none());
        let others = || {
            let platforms = self.manifests.iter().filter_map(|entry| entry.platform.as_ref());
            platforms
                .map(|platform| format!("{}/{}", platform.os, platform.architecture))
                .collect()
        };
        suiting.first().copied().ok_or_else(|| wrong_platform(others()))
    }
}

impl Manifest {
    /// Whether every part is one that can be used: its media type, its digest's kind, the number of layers.
    ///
    /// # Errors
    ///
    /// What cannot be used.
    pub fn check(&self, limits: &Limits) -> Result<(), Error> {
        if !CONFIG_TYPES.contains(&self.config.media_type.as_str()) {
            return Err(unsupported(
                format!("config {}", self.config.digest),
                &self.config.media_type,
            ));
        }
        Limits::check(
            || "the number of layers".to_owned(),
            self.layers.len() as u64,
            limits.layers,
        )?;
        Limits::check(
            || "the size of the config".to_owned(),
            self.config.size,
            limits.document,
        )?;
        self.config.hex()?;
        for layer in &self.layers {
            layer.hex()?;
            layer.compression()?;
        }
        Ok(())
    }
}

fn unsupported(what: String, media_type: &str) -> Error {
    const LONGEST: usize = 200;
    let media_type = media_type.chars().take(LONGEST).collect();
    Error::UnsupportedMediaType { what, media_type }
}

pub(crate) fn wrong_platform(found: BTreeSet<String>) -> Error {
    // Build attestations are manifests for unknown/unknown.
    let mut found: Vec<_> = found
        .into_iter()
        .filter(|platform| platform != "unknown/unknown")
        .collect();
    if found.is_empty() {
        found.push("no platform at all".to_owned());
    }
    Error::WrongPlatform {
        found: found.join(", "),
    }
}

pub(crate) fn hex_digits(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

pub(crate) fn hex_digest(text: &str) -> Result<&str, Error> {
    let digits = text.strip_prefix("sha256:").filter(|digits| hex_digits(digits));
    digits.ok_or_else(|| Error::UnsupportedDigest {
        text: text.chars().take(100).collect(),
    })
}

pub(crate) fn parse<T: DeserializeOwned>(document: &str, contents: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(contents).map_err(|source| Error::BadJson {
        document: document.to_owned(),
        source,
    })
}
