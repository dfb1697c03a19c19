//! Bytes of the client into a file, in its place. A file that is made for it and does not become whole is removed again; of one that was
//! there before, what came is there then.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use agent_api::Duplex;
use agent_api::message::{Reply, kind};
use wire::{FrameReader, FrameWriter};

use super::entries::Looker;
use super::failure::{Result, failed};
use super::paths::{User, follow, parent};
use super::read::check;
use super::{attributes, fail};
use crate::{Error, send_reply};

/// What a client wants to write.
pub(super) struct Wanted<'a> {
    /// Where to, as it was asked for.
    pub(super) path: &'a Path,
    /// Permission bits, if they are given.
    pub(super) mode: Option<u32>,
    /// All `user.e2b.NAME`.
    pub(super) metadata: &'a BTreeMap<String, String>,
}

/// A file that is being written.
struct Target {
    file: File,
    path: PathBuf,
    /// It is removed again.
    remove: bool,
}

impl Target {
    /// Opens or makes the file, empties it, and gives it all but its bytes.
    fn open(user: &User, wanted: &Wanted<'_>) -> Result<Self> {
        user.make_directories(parent(wanted.path)?)?;
        let path = follow(wanted.path)?;
        let target = match fs::metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Self::create(user, path)?,
            data => {
                check(wanted.path, &data.map_err(failed("looking at", &path))?)?;
                Self {
                    file: open(OpenOptions::new().write(true), &path)?,
                    path,
                    remove: false,
                }
            }
        };
        // Again, since another may be there now.
        let data = target.file.metadata().map_err(failed("looking at", &target.path))?;
        check(wanted.path, &data)?;
        // What can fail does before anything is lost.
        attributes::replace(&target.file, wanted.path, wanted.metadata)?;
        if let Some(mode) = wanted.mode {
            let mode = Permissions::from_mode(mode & 0o7777);
            let changed = target.file.set_permissions(mode);
            changed.map_err(failed("changing the permissions of", wanted.path))?;
        }
        // Whoever watches is to see nothing happen to what is empty already.
        if data.len() > 0 {
            target.file.set_len(0).map_err(failed("emptying", wanted.path))?;
        }
        Ok(target)
    }

    fn create(user: &User, path: PathBuf) -> Result<Self> {
        let file = open(OpenOptions::new().write(true).create_new(true).mode(0o644), &path)?;
        let target = Self {
            file,
            path,
            remove: true,
        };
        user.own(&target.file, &target.path)?;
        Ok(target)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(failed("writing", &self.path))
    }

    fn finish(mut self, wanted: &Wanted<'_>) -> Result<Reply> {
        let entry = Looker::new().look_at_open(wanted.path, &self.file)?;
        self.remove = false;
        Ok(Reply::Entry(Box::new(entry)))
    }

    /// The file that was made is still what is there.
    fn is_in_place(&self) -> bool {
        let ours = self.file.metadata().map(|data| (data.dev(), data.ino()));
        let there = fs::symlink_metadata(&self.path).map(|data| (data.dev(), data.ino()));
        matches!((ours, there), (Ok(ours), Ok(there)) if ours == there)
    }
}

fn open(options: &mut OpenOptions, path: &Path) -> Result<File> {
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    options.open(path).map_err(failed("opening", path))
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.remove
            && self.is_in_place()
            && let Err(error) = fs::remove_file(&self.path)
        {
            crate::say(format_args!("{} is left over: {error}", self.path.display()));
        }
    }
}

/// The dialogue of a write. An error is returned only for the connection itself.
pub(super) fn receive<S: Duplex>(
    user: &User,
    wanted: &Wanted<'_>,
    reader: &mut FrameReader<S>,
    writer: &FrameWriter<S>,
) -> std::result::Result<(), Error> {
    let mut target = match Target::open(user, wanted) {
        Ok(target) => Some(target),
        Err(failure) => return fail(writer, failure),
    };
    send_reply(writer, &Reply::Done)?;
    loop {
        let frame = reader.read()?.ok_or(wire::Error::Truncated {
            what: "a file that is written",
            got: 0,
            want: 1,
        })?;
        match (frame.kind, frame.payload) {
            (kind::FILE, []) => break,
            (kind::FILE, bytes) => {
                if let Some(Err(failure)) = target.as_mut().map(|target| target.write(bytes)) {
                    // Removed, if it is to be, before anybody hears of it. The rest is read for nothing.
                    target = None;
                    fail(writer, failure)?;
                }
            }
            (kind, bytes) => {
                return Err(Error::UnexpectedFrame {
                    kind,
                    length: bytes.len(),
                });
            }
        }
    }
    match target.map(|target| target.finish(wanted)) {
        // The failure was told.
        None => Ok(()),
        Some(Ok(reply)) => send_reply(writer, &reply),
        Some(Err(failure)) => fail(writer, failure),
    }
}
