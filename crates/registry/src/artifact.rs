//! What is no image, in a registry all the same: an artifact of the OCI image specification 1.1, a manifest with a type, one document
//! (its config) and blobs. Fetched and sent by the same code as an image's parts.
//!
//! Does not know what an artifact is, nor what is in its blobs: whoever asks for one says which type it must have, and looks at
//! config and manifest before a blob is fetched.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;

use image::{Descriptor, Part, Staged, Store};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::blob::{Report, fetch};
use crate::job::{Job, Options, Peer};
use crate::progress::Progress;
use crate::pull::{document, from_any};
use crate::push::{Push, check_tag, put_manifest, send_all};
use crate::session::{Session, bad_answer};
use crate::{Error, Location};

/// The media type of its manifest.
const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";

/// More blobs has none.
const MOST_BLOBS: usize = 128;

/// The longest config.
const MOST_CONFIG: u64 = 1 << 20;

/// Says what is wrong with a config and a manifest.
pub type Look<'l> = &'l dyn Fn(&[u8], &ArtifactManifest) -> Result<(), String>;

/// An artifact on its way out.
#[derive(Debug)]
pub struct Artifact {
    /// Its type, a media type.
    pub artifact_type: String,
    /// Its document.
    pub config: Part,
    /// Its blobs.
    pub blobs: Vec<Part>,
    /// Notes for people.
    pub annotations: BTreeMap<String, String>,
}

/// What its manifest says.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ArtifactManifest {
    schema_version: u32,
    #[serde(default)]
    media_type: String,
    /// Its type.
    #[serde(default)]
    pub artifact_type: String,
    /// Its document.
    pub config: Descriptor,
    /// Its blobs.
    #[serde(default)]
    pub layers: Vec<Descriptor>,
    /// Notes for people.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// An artifact that has come, every blob with the right digest.
#[derive(Debug)]
pub struct PulledArtifact {
    /// The manifest's digest, `sha256:` and 64 digits.
    pub digest: String,
    /// Who has sent it: the registry or a mirror.
    pub from: String,
    /// Its document.
    pub config: Vec<u8>,
    /// Its blobs in the manifest's order, open.
    pub blobs: Vec<(Descriptor, File)>,
    manifest: ArtifactManifest,
}

impl PulledArtifact {
    /// It is not needed any more: its downloads go. If that fails, the next sweep tries again.
    pub fn forget(self, store: &Store) {
        // Whoever holds them keeps them.
        drop(self.blobs);
        forget(store, &self.manifest);
    }
}

/// Pushes an artifact to `location`. The manifest goes last, so that the registry never has one that is not whole.
///
/// # Errors
///
/// Why it could not.
pub fn push_artifact(
    artifact: &Artifact,
    location: &Location,
    options: &Options,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Push, Error> {
    check_tag(location)?;
    let manifest = ArtifactManifest {
        schema_version: 2,
        media_type: MANIFEST_TYPE.to_owned(),
        artifact_type: artifact.artifact_type.clone(),
        config: artifact.config.descriptor.clone(),
        layers: artifact.blobs.iter().map(|part| part.descriptor.clone()).collect(),
        annotations: artifact.annotations.clone(),
    };
    let json = |source| image::Error::BadJson {
        document: "the manifest".to_owned(),
        source,
    };
    let manifest = serde_json::to_vec(&manifest).map_err(json)?;
    Job::run(options, |job| {
        let (host, peer) = (location.host(), &options.registry);
        let session = Session::open(job, host, peer, &location.repository, "pull,push")?;
        let blobs: Vec<&Part> = artifact.blobs.iter().chain([&artifact.config]).collect();
        let sent = send_all(&session, &blobs, progress)?;
        put_manifest(&session, MANIFEST_TYPE, &manifest, location.reference())?;
        Ok(Push {
            digest: format!("sha256:{}", hex::encode(Sha256::digest(&manifest))),
            sent,
        })
    })
}

/// Pulls the artifact of this type at `location`; its blobs come by way of the store's downloads, and an interrupted one goes on
/// there. `look` says what is wrong with a config and a manifest before any blob is fetched.
///
/// # Errors
///
/// Why it could not.
pub fn pull_artifact(
    store: &Store,
    location: &Location,
    (artifact_type, look): (&str, Look<'_>),
    options: &Options,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<PulledArtifact, Error> {
    store.sweep()?;
    Job::run(options, |job| {
        let store = &store.until(job.stop());
        from_any(job, location, options, |peer| {
            from_peer((job, store), location, (artifact_type, look), peer, progress)
        })
    })
}

fn from_peer<'a>(
    (job, store): (&'a Job<'a>, &Store),
    location: &Location,
    (artifact_type, look): (&str, Look<'_>),
    (host, peer): (&str, &Peer),
    report: Report<'_>,
) -> Result<PulledArtifact, Error> {
    let session = Session::open(job, host, peer, &location.repository, "pull")?;
    let (media_type, bytes, digest) = document(&session, location.reference())?;
    let manifest = parse(&session.host, &media_type, &bytes, (location, artifact_type))?;
    let bad = |problem: String| session.bad(&format!("manifest {}", location.reference()), &problem);
    let config = fetch(&session, store, &manifest.config, report)?.contents()?;
    look(&config, &manifest).map_err(bad)?;
    let gathered = gather(&session, store, &manifest, report).inspect_err(|error| {
        if error.is_disk_full() {
            forget(store, &manifest);
        }
    })?;
    Ok(PulledArtifact {
        digest: format!("sha256:{digest}"),
        from: session.host.clone(),
        config,
        blobs: gathered,
        manifest,
    })
}

/// A manifest of the type that is wanted, as `host` has sent it.
pub(crate) fn parse(
    host: &str,
    media_type: &str,
    bytes: &[u8],
    (location, wanted): (&Location, &str),
) -> Result<ArtifactManifest, Error> {
    let bad = |problem: &dyn Display| bad_answer(host, &format!("manifest {}", location.reference()), problem);
    let else_is = |found: &str| Error::SomethingElse {
        location: location.to_string(),
        wanted: wanted.to_owned(),
        found: match found {
            "" => "an image".to_owned(),
            found => found.chars().take(100).filter(char::is_ascii_graphic).collect(),
        },
    };
    if media_type != MANIFEST_TYPE {
        return Err(else_is(media_type));
    }
    let manifest: ArtifactManifest = serde_json::from_slice(bytes).map_err(|error| bad(&error))?;
    if manifest.artifact_type != wanted {
        return Err(else_is(&manifest.artifact_type));
    }
    if manifest.config.size > MOST_CONFIG || manifest.layers.len() > MOST_BLOBS {
        return Err(bad(&"its config is too large, or it has too many blobs"));
    }
    // They become names of files.
    for part in manifest.layers.iter().chain([&manifest.config]) {
        part.hex()?;
    }
    Ok(manifest)
}

fn gather(
    session: &Session<'_>,
    store: &Store,
    manifest: &ArtifactManifest,
    report: Report<'_>,
) -> Result<Vec<(Descriptor, File)>, Error> {
    let missing = manifest.layers.iter().map(|blob| store.missing(blob));
    store.check_room(missing.fold(0, u64::saturating_add))?;
    let mut queue: Vec<&Descriptor> = Vec::new();
    for blob in manifest.layers.iter().rev() {
        if queue.iter().all(|queued| queued.digest != blob.digest) {
            queue.push(blob);
        }
    }
    let fetched: Vec<(String, Staged)> = session.job.in_parallel(queue, |blob| {
        let staged = fetch(session, store, blob, report)?;
        Ok((blob.digest.clone(), staged))
    })?;
    let fetched: BTreeMap<String, Staged> = fetched.into_iter().collect();
    let mut blobs = Vec::new();
    for blob in &manifest.layers {
        if let Some(staged) = fetched.get(&blob.digest) {
            blobs.push((blob.clone(), staged.file()?));
        }
    }
    Ok(blobs)
}

/// Removes the downloads.
fn forget(store: &Store, manifest: &ArtifactManifest) {
    let blobs = manifest.layers.iter().chain([&manifest.config]);
    if let Err(error) = store.forget(blobs.map(|blob| blob.digest.as_str())) {
        log::warn!("{error}");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_no_digest_is_refused_before_its_file_is_looked_for() {
        let place: Location = "r.test/x:1".parse().unwrap();
        let good = format!("sha256:{}", "0".repeat(64));
        let parsed = |config: &str, layer: &str| {
            let part = |digest: &str| json!({"mediaType": "a/b", "digest": digest, "size": 7});
            let manifest =
                json!({"schemaVersion": 2, "artifactType": "a/b", "config": part(config), "layers": [part(layer)]});
            parse(
                "r.test",
                MANIFEST_TYPE,
                manifest.to_string().as_bytes(),
                (&place, "a/b"),
            )
        };
        parsed(&good, &good).unwrap();
        for bad in ["/etc/passwd", "sha256:../../x", ""] {
            for parsed in [parsed(bad, &good), parsed(&good, bad)] {
                assert!(
                    matches!(parsed, Err(Error::Image(image::Error::UnsupportedDigest { .. }))),
                    "{parsed:?}"
                );
            }
        }
    }
}
