//! Files as their users see them: one dialogue for each kind of [`FsRequest`]. Knows neither who may ask nor when; the server does. What whole
//! files and trees a host brings and takes as root is in `files.rs` and `copy.rs`.

mod attributes;
mod compose;
mod entries;
mod failure;
mod names;
mod paths;
mod read;
mod remove;
mod rename;
mod tree;
mod watch;
mod write;

use std::path::{Path, PathBuf};

use agent_api::message::Reply;
use agent_api::{Duplex, Entry, FsRequest, RequestFailure, RequestFailureKind};
use wire::{FrameReader, FrameWriter};

use self::entries::{Lister, Looker};
use self::failure::Result;
use self::paths::User;
use crate::{Error, send_reply};

/// How large the entries or events of one message may be as JSON, about; well below [`wire::MAX_PAYLOAD`], since one more may be large.
const MESSAGE_BYTES: usize = 128 << 10;

/// Answers a request of `user`. An error is returned only for the connection itself.
pub(crate) fn answer<S: Duplex>(
    user: Option<&str>,
    request: &FsRequest,
    reader: &mut FrameReader<S>,
    writer: &FrameWriter<S>,
) -> std::result::Result<(), Error> {
    let (user, path) = match resolve(user, request) {
        Ok(resolved) => resolved,
        Err(failure) => return fail(writer, failure),
    };
    let result = match request {
        FsRequest::Stat { .. } => look(&path),
        FsRequest::MakeDir { .. } => make_directory(&user, &path).and_then(|()| look(&path)),
        FsRequest::Rename { from, .. } => user
            .path(from)
            .and_then(|from| rename::rename(&user, &from, &path))
            .and_then(|()| look(&path)),
        FsRequest::Remove { .. } => remove::remove_tree(&path).map(|()| Reply::Done),
        FsRequest::Compose { sources, .. } => sources
            .iter()
            .map(|source| user.path(source))
            .collect::<Result<Vec<_>>>()
            .and_then(|sources| compose::compose(&user, &sources, &path))
            .and_then(|()| look(&path)),
        FsRequest::List { depth, .. } => return list(&path, *depth, writer),
        FsRequest::Read { offset, length, .. } => return read::send(&path, *offset, *length, writer),
        FsRequest::Write { mode, metadata, .. } => {
            let wanted = write::Wanted {
                path: &path,
                mode: *mode,
                metadata,
            };
            return write::receive(&user, &wanted, reader, writer);
        }
        FsRequest::Watch { recursive, .. } => return watch::run(&path, *recursive, reader, writer),
    };
    match result {
        Ok(reply) => send_reply(writer, &reply),
        Err(failure) => fail(writer, failure),
    }
}

/// Whose request it is, and the path that it is about; of a rename, the new one.
fn resolve(user: Option<&str>, request: &FsRequest) -> Result<(User, PathBuf)> {
    let user = User::resolve(user)?;
    let path = match request {
        FsRequest::Stat { path }
        | FsRequest::List { path, .. }
        | FsRequest::MakeDir { path }
        | FsRequest::Rename { to: path, .. }
        | FsRequest::Remove { path }
        | FsRequest::Read { path, .. }
        | FsRequest::Write { path, .. }
        | FsRequest::Compose { path, .. }
        | FsRequest::Watch { path, .. } => path,
    };
    let path = user.path(path)?;
    Ok((user, path))
}

fn look(path: &Path) -> Result<Reply> {
    Looker::new().look(path).map(|entry| Reply::Entry(Box::new(entry)))
}

fn make_directory(user: &User, path: &Path) -> Result<()> {
    if path.is_dir() {
        return Err(RequestFailure {
            kind: RequestFailureKind::AlreadyExists,
            message: format!("{} is a directory already", path.display()),
        });
    }
    user.make_directories(path)
}

/// Sends what is in a directory, in as many messages as it takes.
fn list<S: Duplex>(path: &Path, depth: u32, writer: &FrameWriter<S>) -> std::result::Result<(), Error> {
    let lister = match Lister::new(path, depth) {
        Ok(lister) => lister,
        Err(failure) => return fail(writer, failure),
    };
    let (mut entries, mut size) = (Vec::new(), 0);
    for entry in lister {
        let entry = match entry {
            Ok(entry) => entry,
            Err(failure) => return fail(writer, failure),
        };
        size += size_of_entry(&entry);
        entries.push(entry);
        if size >= MESSAGE_BYTES {
            let entries = std::mem::take(&mut entries);
            send_reply(writer, &Reply::Entries { entries, more: true })?;
            size = 0;
        }
    }
    send_reply(writer, &Reply::Entries { entries, more: false })
}

/// As JSON, at most: six bytes for one that has to be escaped, and the names of the fields.
fn size_of_entry(entry: &Entry) -> usize {
    let target = entry.target.as_ref().map_or(0, |target| target.as_bytes().len());
    let metadata = entry.metadata.iter().map(|(name, value)| name.len() + value.len() + 1);
    let texts = entry.path.as_bytes().len() + target + entry.owner.len() + entry.group.len();
    256 + 6 * (texts + metadata.sum::<usize>())
}

fn fail<S: Duplex>(writer: &FrameWriter<S>, failure: RequestFailure) -> std::result::Result<(), Error> {
    send_reply(writer, &Reply::RequestFailed(failure))
}
