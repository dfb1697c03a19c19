//! From a location to an image in the store: the manifest for this machine, its blobs, the conversion. Each mirror is tried
//! before the registry itself; what one has given is kept for the next.
//!
//! Does not know how requests are made.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use image::{Document, INDEX_TYPES, Image, Limits, MANIFEST_TYPES, Manifest, Pulled, Staged, Store};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use ureq::http::Method;
use ureq::http::header::CONTENT_TYPE;

use crate::blob::{Report, broken, fetch};
use crate::job::{Job, Options, Peer};
use crate::location::is_digest;
use crate::progress::Progress;
use crate::session::{Ask, Session};
use crate::{Error, Location};

/// An index may name other indices; more than this deep is none.
const MAX_INDEX_DEPTH: usize = 4;
/// The media types of manifests and indices, as a registry is asked for them.
const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json";

/// What was pulled.
#[derive(Debug)]
pub struct Pull {
    /// The image.
    pub image: Image,
    /// It was here before, and nothing but its manifest has come.
    pub known: bool,
    /// Who has sent it: the registry or a mirror.
    pub from: String,
}

/// Pulls the linux/amd64 image at `location` into `store`, where it gets the location's name. `progress` is called by
/// several threads, and while the store is locked: it must not ask anything of the store.
///
/// # Errors
///
/// Why it could not. Of an image that is not complete only downloads are left, and of a full disk nothing.
pub fn pull(
    store: &Store,
    location: &Location,
    options: &Options,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Pull, Error> {
    store.sweep()?;
    Job::run(options, |job| {
        let store = &store.until(job.stop());
        from_any(job, location, options, |peer| {
            from_peer(job, store, location, peer, progress)
        })
    })
}

/// Asks each mirror, then the registry itself, as long as another one may do what one could not.
pub(crate) fn from_any<T>(
    job: &Job<'_>,
    location: &Location,
    options: &Options,
    ask: impl Fn((&str, &Peer)) -> Result<T, Error>,
) -> Result<T, Error> {
    let mirrors = options.mirrors.iter().map(|mirror| (mirror.host.as_str(), mirror));
    let mut last = None;
    for (host, peer) in mirrors.chain([(location.host(), &options.registry)]) {
        job.begin_again();
        match ask((host, peer)) {
            Err(error) if error.another_may_do() => {
                log::info!("{location} does not come from {host}: {error}");
                last = Some(error);
            }
            ended => return ended,
        }
    }
    // The registry itself is the last that was asked.
    Err(last.unwrap_or(Error::Cancelled))
}

fn from_peer<'a>(
    job: &'a Job<'a>,
    store: &Store,
    location: &Location,
    (host, peer): (&str, &Peer),
    report: Report<'_>,
) -> Result<Pull, Error> {
    let session = Session::open(job, host, peer, &location.repository, "pull")?;
    let found = find(&session, location)?;
    let name = location.name();
    let from = session.host.clone();
    if let Some(image) = store.known(&found.digest, name.as_ref())? {
        return Ok(Pull {
            image,
            known: true,
            from,
        });
    }
    let mut blobs = BTreeMap::new();
    let gathered = gather(&session, store, &found.manifest, report, &mut blobs).and_then(|config| {
        let pulled = Pulled {
            manifest: found.bytes,
            media_type: found.media_type,
            config,
            layers: layers(&found.manifest, &mut blobs)?,
        };
        job.over()?;
        let mut converting = |step| report(Progress::Converting(step));
        store
            .commit(pulled, name.as_ref(), &mut converting)
            .map_err(Error::from)
    });
    let image = gathered.inspect_err(|error| {
        if error.is_disk_full() {
            // Downloads that cannot become an image are no reason for a disk to stay full.
            blobs.clear();
            let parts = [&found.manifest.config].into_iter().chain(&found.manifest.layers);
            if let Err(error) = store.forget(parts.map(|part| part.digest.as_str())) {
                log::warn!("{error}");
            }
        }
    })?;
    Ok(Pull {
        image,
        known: false,
        from,
    })
}

/// A manifest that was found.
struct Found {
    /// 64 digits.
    digest: String,
    media_type: String,
    bytes: Vec<u8>,
    manifest: Manifest,
}

/// The manifest of the location, through indices.
fn find(session: &Session<'_>, location: &Location) -> Result<Found, Error> {
    let mut reference = location.reference().to_owned();
    let mut size = None;
    for _ in 0..=MAX_INDEX_DEPTH {
        let (media_type, bytes, digest) = document(session, &reference)?;
        let what = format!("manifest {reference}");
        if let Some(expected) = size.filter(|size| *size != bytes.len() as u64) {
            return Err(Error::WrongSize {
                host: session.host.clone(),
                what,
                expected,
                found: bytes.len() as u64,
            });
        }
        match Document::parse(&what, &media_type, &bytes, &Limits::default())? {
            Document::Manifest(manifest) => {
                return Ok(Found {
                    digest,
                    media_type,
                    bytes,
                    manifest,
                });
            }
            Document::Index(index) => {
                let next = index.for_this_machine()?;
                next.hex()?;
                reference.clone_from(&next.digest);
                size = Some(next.size);
            }
        }
    }
    Err(session.bad("the manifest", &format!("indices more than {MAX_INDEX_DEPTH} deep")))
}

/// A manifest or index, its media type and the 64 digits of its digest, which is the one that was asked for.
pub(crate) fn document(session: &Session<'_>, reference: &str) -> Result<(String, Vec<u8>, String), Error> {
    let (media_type, bytes) = manifest(session, reference)?;
    let digest = hex::encode(Sha256::digest(&bytes));
    if is_digest(reference) && reference != format!("sha256:{digest}") {
        return Err(Error::WrongDigest {
            host: session.host.clone(),
            what: format!("manifest {reference}"),
            expected: reference.to_owned(),
            found: digest,
        });
    }
    Ok((media_type, bytes, digest))
}

/// A manifest or index, and its media type.
fn manifest(session: &Session<'_>, reference: &str) -> Result<(String, Vec<u8>), Error> {
    let what = format!("manifest {reference}");
    let path = format!("/manifests/{reference}");
    let ask = Ask {
        method: Method::GET,
        path: &path,
        headers: &[("accept", ACCEPT)],
        understood: &[],
        what: &what,
    };
    let fetched = session.job.retry(
        |_| {
            let response = session.ask(&ask, None)?;
            let header = response
                .headers()
                .get(CONTENT_TYPE)
                .and_then(|header| header.to_str().ok());
            let media_type = header.unwrap_or_default().to_owned();
            Ok((media_type, session.text(response, &what, Limits::default().document)?))
        },
        |attempts, error| broken(session, &what, attempts, error),
    );
    let (header, bytes) = fetched.map_err(|error| match error {
        Error::Status {
            status: 404,
            host,
            detail,
            ..
        } => Error::NoSuchImage {
            host,
            repository: session.repository.clone(),
            reference: if is_digest(reference) {
                format!("the digest {reference}")
            } else {
                format!("the tag {reference:?}")
            },
            detail,
        },
        error => error,
    })?;
    Ok((media_type(&header, &bytes), bytes))
}

/// What the header says, unless that means nothing: then what the document says.
pub(crate) fn media_type(header: &str, bytes: &[u8]) -> String {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Typed {
        media_type: Option<String>,
    }
    let header = header.split(';').next().unwrap_or_default().trim();
    let known = MANIFEST_TYPES.contains(&header) || INDEX_TYPES.contains(&header);
    let inside = serde_json::from_slice::<Typed>(bytes)
        .ok()
        .and_then(|typed| typed.media_type);
    match inside {
        Some(inside) if !known => inside,
        _ => header.to_owned(),
    }
}

/// Brings config and layers here; the config's bytes.
fn gather(
    session: &Session<'_>,
    store: &Store,
    manifest: &Manifest,
    report: Report<'_>,
    blobs: &mut BTreeMap<String, Staged>,
) -> Result<Vec<u8>, Error> {
    // It is small, and may say that all the rest is for another machine.
    let config = fetch(session, store, &manifest.config, report)?;
    let contents = config.contents().map_err(Error::from)?;
    blobs.insert(manifest.config.digest.clone(), config);
    manifest.check_config(&contents, &Limits::default())?;
    let layers: BTreeMap<_, _> = manifest
        .layers
        .iter()
        .map(|layer| (layer.digest.as_str(), layer))
        .collect();
    let missing: u64 = layers.values().map(|layer| store.missing(layer)).sum();
    store.check_room(missing)?;
    let mut queue: Vec<_> = manifest.layers.iter().rev().collect();
    let mut seen = BTreeSet::new();
    queue.retain(|layer| seen.insert(layer.digest.as_str()));
    let fetched = session.job.in_parallel(queue, |layer| {
        let staged = fetch(session, store, layer, report)?;
        Ok((layer.digest.clone(), staged))
    });
    blobs.extend(fetched?);
    Ok(contents)
}

fn layers(manifest: &Manifest, blobs: &mut BTreeMap<String, Staged>) -> Result<HashMap<String, std::fs::File>, Error> {
    let mut files = HashMap::new();
    for layer in &manifest.layers {
        if let Some(staged) = blobs.get(&layer.digest) {
            files.insert(layer.hex()?.to_owned(), staged.file()?);
        }
    }
    Ok(files)
}
