//! An image from the store to a registry: blobs that it lacks, then the manifest, under the tag of the location.
//!
//! Does not know how requests are made.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use image::{Part, Store};
use ureq::http::Method;
use ureq::http::header::LOCATION;

use crate::blob::{Report, broken};
use crate::job::{Failure, Job, Options, TICK};
use crate::progress::{BlobState, Progress};
use crate::session::{Ask, Session};
use crate::{Error, Location};

/// What was pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push {
    /// The manifest's digest in the registry, `sha256:` and 64 digits.
    pub digest: String,
    /// Blobs that were sent; the others were there.
    pub sent: usize,
}

/// Pushes the image `reference` of `store` to `location`.
///
/// # Errors
///
/// Why it could not. The registry gets the manifest last, so that it never has an image that is not whole.
pub fn push(
    store: &Store,
    reference: &str,
    location: &Location,
    options: &Options,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Push, Error> {
    check_tag(location)?;
    Job::run(options, |job| {
        let export = store.until(job.stop()).export(reference)?;
        let session = Session::open(
            job,
            location.host(),
            &options.registry,
            &location.repository,
            "pull,push",
        )?;
        let blobs: Vec<&Part> = export.layers.iter().chain([&export.config]).collect();
        let sent = send_all(&session, &blobs, progress)?;
        let media_type = &export.manifest.descriptor.media_type;
        put_manifest(&session, media_type, &export.manifest.document()?, location.reference())?;
        Ok(Push {
            digest: export.manifest.descriptor.digest.clone(),
            sent,
        })
    })
}

/// What is pushed has a digest of its own already.
pub(crate) fn check_tag(location: &Location) -> Result<(), Error> {
    match location.digest {
        None => Ok(()),
        Some(_) => Err(Error::BadLocation {
            text: location.to_string(),
            problem: "one pushes to a tag, not to a digest".to_owned(),
        }),
    }
}

/// Sends the blobs that are not there, each once; how many.
pub(crate) fn send_all(session: &Session<'_>, blobs: &[&Part], report: Report<'_>) -> Result<usize, Error> {
    let mut queue: Vec<&Part> = Vec::new();
    for part in blobs {
        if queue.iter().all(|queued| queued.hex() != part.hex()) {
            queue.push(part);
        }
    }
    let sent = session.job.in_parallel(queue, |part| send(session, part, report))?;
    Ok(sent.into_iter().filter(|&sent| sent).count())
}

/// Whether the blob had to be sent.
fn send(session: &Session<'_>, part: &Part, report: Report<'_>) -> Result<bool, Error> {
    let what = format!("blob {}", part.descriptor.digest);
    let tell = |state, done| {
        report(Progress::Blob {
            digest: part.descriptor.digest.clone(),
            state,
            done,
            total: part.descriptor.size,
        });
    };
    let failed = |attempts, error| broken(session, &what, attempts, error);
    if session.job.retry(|_| has(session, part, &what), failed)? {
        tell(BlobState::Present, part.descriptor.size);
        return Ok(false);
    }
    tell(BlobState::Moving, 0);
    let file = Arc::new(part.file.try_clone().map_err(|error| unreadable(&what, error))?);
    let moved = Arc::new(AtomicU64::new(0));
    thread::scope(|scope| {
        let uploading = scope.spawn(|| {
            session
                .job
                .retry(|_| upload(session, part, &file, &moved, &what), failed)
        });
        // The body is read by the one that sends it, which cannot tell anybody.
        let mut told = 0;
        while !uploading.is_finished() {
            let done = moved.load(Ordering::Relaxed);
            if done != told {
                tell(BlobState::Moving, done);
                told = done;
            }
            thread::sleep(TICK);
        }
        uploading.join().unwrap_or(Err(Error::Cancelled))
    })?;
    tell(BlobState::Done, part.descriptor.size);
    Ok(true)
}

fn has(session: &Session<'_>, part: &Part, what: &str) -> Result<bool, Failure> {
    let path = format!("/blobs/{}", part.descriptor.digest);
    let ask = Ask {
        method: Method::HEAD,
        path: &path,
        headers: &[],
        understood: &[404],
        what,
    };
    Ok(session.ask(&ask, None)?.status().is_success())
}

/// POST for a place, PUT the blob there.
fn upload(
    session: &Session<'_>,
    part: &Part,
    file: &Arc<File>,
    moved: &Arc<AtomicU64>,
    what: &str,
) -> Result<(), Failure> {
    let ask = Ask {
        method: Method::POST,
        path: "/blobs/uploads/",
        headers: &[("content-length", "0")],
        understood: &[],
        what,
    };
    let response = session.ask(&ask, None)?;
    let place = response.headers().get(LOCATION).and_then(|header| header.to_str().ok());
    let place = session
        .place(place.unwrap_or_default())
        .ok_or_else(|| session.bad(what, &"no place to upload to"))?;
    drop(response);
    let separator = if place.contains('?') { '&' } else { '?' };
    let path = format!("{place}{separator}digest={}", part.descriptor.digest);
    let size = part.descriptor.size.to_string();
    let body = || -> Box<dyn Read> {
        moved.store(0, Ordering::Relaxed);
        Box::new(Upload {
            file: Arc::clone(file),
            position: 0,
            left: part.descriptor.size,
            moved: Arc::clone(moved),
        })
    };
    let ask = Ask {
        method: Method::PUT,
        path: &path,
        headers: &[("content-type", "application/octet-stream"), ("content-length", &size)],
        understood: &[],
        what,
    };
    session.ask(&ask, Some(&body)).map(drop)
}

pub(crate) fn put_manifest(session: &Session<'_>, media_type: &str, document: &[u8], tag: &str) -> Result<(), Error> {
    let what = format!("manifest {tag}");
    let path = format!("/manifests/{tag}");
    let size = document.len().to_string();
    let body = || -> Box<dyn Read> { Box::new(io::Cursor::new(document.to_vec())) };
    let headers = [("content-type", media_type), ("content-length", &size)];
    let ask = Ask {
        method: Method::PUT,
        path: &path,
        headers: &headers,
        understood: &[],
        what: &what,
    };
    session.job.retry(
        |_| session.ask(&ask, Some(&body)).map(drop),
        |attempts, error| broken(session, &what, attempts, error),
    )
}

fn unreadable(what: &str, source: io::Error) -> Error {
    Error::Image(image::Error::Io {
        action: "read",
        path: what.into(),
        source,
    })
}

/// A blob's bytes on their way out.
struct Upload {
    file: Arc<File>,
    position: u64,
    left: u64,
    moved: Arc<AtomicU64>,
}

impl Read for Upload {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let want = buf.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let got = self.file.read_at(&mut buf[..want], self.position)?;
        if got == 0 && want > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.position += got as u64;
        self.left -= got as u64;
        self.moved.store(self.position, Ordering::Relaxed);
        Ok(got)
    }
}
