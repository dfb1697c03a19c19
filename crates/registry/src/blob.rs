//! One blob from a registry into the store's downloads: claimed, waited for, gone on with, checked.
//!
//! Knows no manifest.

use std::io::Read;
use std::time::{Duration, Instant};

use image::{Claim, Descriptor, Partial, Staged, Store};
use ureq::http::Method;
use ureq::http::header::CONTENT_RANGE;

use crate::Error;
use crate::job::{Failure, TICK};
use crate::progress::{BlobState, Progress};
use crate::session::{Ask, Session};

/// Progress is told no more often, a blob's beginning and end aside.
const REPORT: Duration = Duration::from_millis(100);
/// Of a read from the connection.
const CHUNK: usize = 128 << 10;

/// Where progress goes; called by several threads.
pub(crate) type Report<'a> = &'a (dyn Fn(Progress) + Sync);

/// Fetches the blob, unless it is there or somebody else is fetching it.
pub(crate) fn fetch(
    session: &Session<'_>,
    store: &Store,
    blob: &Descriptor,
    report: Report<'_>,
) -> Result<Staged, Error> {
    let tell = |state, done| {
        report(Progress::Blob {
            digest: blob.digest.clone(),
            state,
            done,
            total: blob.size,
        });
    };
    let mut waited = None;
    loop {
        session.job.stopped()?;
        match store.claim(&blob.digest, blob.size)? {
            Claim::Whole(staged) => {
                let state = if waited.is_some() {
                    BlobState::Done
                } else {
                    BlobState::Present
                };
                tell(state, blob.size);
                return Ok(staged);
            }
            Claim::Busy(done) => {
                if waited.replace(done) != Some(done) {
                    tell(BlobState::Waiting, done);
                }
                session.job.wait(TICK)?;
            }
            Claim::Mine(partial) => {
                let staged = download(session, *partial, blob, &tell)?;
                tell(BlobState::Done, blob.size);
                return Ok(staged);
            }
        }
    }
}

fn download(
    session: &Session<'_>,
    mut partial: Partial,
    blob: &Descriptor,
    tell: &dyn Fn(BlobState, u64),
) -> Result<Staged, Error> {
    let what = format!("blob {}", blob.digest);
    let mut resumed = !partial.is_empty();
    let mut furthest = partial.len();
    loop {
        tell(BlobState::Moving, partial.len());
        session.job.retry(
            |progress| {
                let received = receive(session, &mut partial, &what, tell);
                // The same bytes again and again are no progress.
                *progress = partial.len() > furthest;
                furthest = furthest.max(partial.len());
                received
            },
            |attempts, error| broken(session, &what, attempts, error),
        )?;
        if resumed && !partial.is_right() {
            // What was there from another time may be what is wrong.
            log::warn!("what was left of {what} is damaged, it is fetched anew");
            partial.restart()?;
            resumed = false;
            continue;
        }
        return partial.finish().map_err(|error| from_registry(session, error));
    }
}

/// One request's worth of the blob, from where it stopped.
fn receive(
    session: &Session<'_>,
    partial: &mut Partial,
    what: &str,
    tell: &dyn Fn(BlobState, u64),
) -> Result<(), Failure> {
    if partial.is_complete() {
        return Ok(());
    }
    let path = format!("/blobs/{}", partial.digest());
    let range = format!("bytes={}-", partial.len());
    let ask = Ask {
        method: Method::GET,
        path: &path,
        headers: if partial.is_empty() {
            &[]
        } else {
            &[("range", range.as_str())]
        },
        understood: &[416],
        what,
    };
    let response = session.ask(&ask, None)?;
    match response.status().as_u16() {
        206 => {
            let header = response
                .headers()
                .get(CONTENT_RANGE)
                .and_then(|header| header.to_str().ok());
            if header.and_then(range_start) != Some(partial.len()) {
                let problem = format!("it sends {:?} for {range}", header.unwrap_or_default());
                partial.restart()?;
                return Err(Failure::Transient(session.bad(what, &problem), None));
            }
        }
        // It does not know ranges, or not this one: from the beginning.
        416 => {
            partial.restart()?;
            return Err(Failure::Transient(
                session.bad(what, &"it does not have the rest"),
                None,
            ));
        }
        _ => partial.restart()?,
    }
    let mut reader = response.into_body().into_reader();
    let (mut buf, mut told) = (vec![0; CHUNK], Instant::now());
    while !partial.is_complete() {
        let got = match reader.read(&mut buf) {
            Ok(0) => return Err(session.failure(&closed(), what)),
            Ok(got) => got,
            Err(error) => return Err(session.failure(&ureq::Error::from(error), what)),
        };
        partial
            .write(&buf[..got])
            .map_err(|error| from_registry(session, error))?;
        if told.elapsed() >= REPORT {
            tell(BlobState::Moving, partial.len());
            told = Instant::now();
        }
    }
    Ok(())
}

fn closed() -> ureq::Error {
    ureq::Error::Io(std::io::ErrorKind::UnexpectedEof.into())
}

/// Where a `Content-Range: bytes FIRST-LAST/LENGTH` begins (RFC 9110, 14.4).
fn range_start(header: &str) -> Option<u64> {
    header
        .trim()
        .strip_prefix("bytes ")?
        .split_once('-')?
        .0
        .trim()
        .parse()
        .ok()
}

/// After the last attempt: what never began says so itself.
pub(crate) fn broken(session: &Session<'_>, what: &str, attempts: u32, error: Error) -> Error {
    match error {
        Error::Unreachable { problem, .. } => Error::Broken {
            host: session.host.clone(),
            what: what.to_owned(),
            attempts,
            problem,
        },
        error => error,
    }
}

/// What the store finds wrong with a blob is the registry's doing.
pub(crate) fn from_registry(session: &Session<'_>, error: image::Error) -> Error {
    let host = session.host.clone();
    match error {
        image::Error::DigestMismatch { what, expected, found } => Error::WrongDigest {
            host,
            what,
            expected,
            found,
        },
        image::Error::SizeMismatch { what, expected, found } => Error::WrongSize {
            host,
            what,
            expected,
            found,
        },
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_begins_where_it_says() {
        assert_eq!(range_start("bytes 5-9/10"), Some(5));
        assert_eq!(range_start("bytes 5-9/*"), Some(5));
        for header in ["", "bytes */10", "bytes=5-9", "5-9/10", "bytes x-9/10"] {
            assert_eq!(range_start(header), None, "{header:?}");
        }
    }
}
