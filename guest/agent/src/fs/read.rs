//! A file's bytes to the client. Only of regular files: others may never end, or wait for somebody. Small ones are read whole before they are
//! announced, since the kernel's own say other lengths than they have: none in proc, a page in sysfs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use agent_api::message::{DATA_CHUNK, Reply, kind};
use agent_api::{Duplex, Entry, RequestFailure, RequestFailureKind};
use wire::FrameWriter;

use super::entries::Looker;
use super::fail;
use super::failure::{Result, failed, invalid};
use crate::{Error, send_reply};

/// The most that is read of a file that says it has nothing.
const MOST_UNANNOUNCED: u64 = 4 << 20;

/// Opens a regular file for reading.
pub(super) fn open_regular(path: &Path) -> Result<File> {
    // First, since what is no regular file may do something when it is opened.
    check(path, &fs::metadata(path).map_err(failed("looking at", path))?)?;
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path).map_err(failed("opening", path))?;
    // Again, since another may be there now.
    check(path, &file.metadata().map_err(failed("looking at", path))?)?;
    Ok(file)
}

/// It is a regular file.
pub(super) fn check(path: &Path, data: &fs::Metadata) -> Result<()> {
    if data.is_file() {
        return Ok(());
    }
    if data.is_dir() {
        return Err(RequestFailure {
            kind: RequestFailureKind::IsADirectory,
            message: format!("{} is a directory", path.display()),
        });
    }
    Err(invalid(format!(
        "{} is a device, pipe or socket: only regular files are read and written here; use a command for others",
        path.display()
    )))
}

/// What is about to be sent.
struct Source {
    file: File,
    entry: Box<Entry>,
    from: u64,
    bytes: u64,
    /// Its bytes, if they were read already.
    whole: Option<Vec<u8>>,
}

/// The dialogue of a read. An error is returned only for the connection itself.
pub(super) fn send<S: Duplex>(
    path: &Path,
    offset: u64,
    length: Option<u64>,
    writer: &FrameWriter<S>,
) -> std::result::Result<(), Error> {
    let source = match open(path, offset, length.unwrap_or(u64::MAX)) {
        Ok(source) => source,
        Err(failure) => return fail(writer, failure),
    };
    let Source {
        file,
        entry,
        from,
        bytes,
        whole,
    } = source;
    send_reply(writer, &Reply::Reading { entry, bytes })?;
    if let Some(whole) = whole {
        for chunk in whole.chunks(DATA_CHUNK) {
            writer.send(kind::FILE, 0, chunk)?;
        }
        return send_reply(writer, &Reply::Done);
    }
    let mut buffer = vec![0; DATA_CHUNK];
    let mut sent = 0;
    while sent < bytes {
        let most = usize::try_from(bytes - sent).unwrap_or(DATA_CHUNK).min(DATA_CHUNK);
        let space = buffer.get_mut(..most).unwrap_or_default();
        match file.read_at(space, from + sent) {
            Ok(0) => {
                let shorter = io::Error::new(ErrorKind::UnexpectedEof, "it became shorter meanwhile");
                return break_off(writer, shorter, path);
            }
            Ok(got) => {
                writer.send(kind::FILE, 0, buffer.get(..got).unwrap_or_default())?;
                sent += u64::try_from(got).unwrap_or(0);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return break_off(writer, error, path),
        }
    }
    send_reply(writer, &Reply::Done)
}

/// Fewer bytes came than were announced.
fn break_off<S: Duplex>(writer: &FrameWriter<S>, error: io::Error, path: &Path) -> std::result::Result<(), Error> {
    writer.send(kind::FILE, 0, &[])?;
    fail(writer, failed("reading", path)(error))
}

fn open(path: &Path, offset: u64, length: u64) -> Result<Source> {
    let file = open_regular(path)?;
    let entry = Box::new(Looker::new().look_at_open(path, &file)?);
    let size = file.metadata().map_err(failed("looking at", path))?.size();
    let mut source = Source {
        file,
        entry,
        from: offset,
        bytes: length.min(size.saturating_sub(offset)),
        whole: None,
    };
    if size <= DATA_CHUNK as u64 {
        let whole = read_whole(&source.file, size).map_err(failed("reading", path))?;
        let part = part(whole, offset, length);
        source.bytes = u64::try_from(part.len()).unwrap_or(0);
        source.whole = Some(part);
    }
    Ok(source)
}

/// As much as there is, but not more than a file with this size is taken for.
fn read_whole(file: &File, size: u64) -> io::Result<Vec<u8>> {
    let most = if size == 0 { MOST_UNANNOUNCED } else { size };
    let mut whole = Vec::new();
    match file.take(most).read_to_end(&mut whole) {
        // Files of the kernel that would have one wait for more: what there is now is all of it.
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
        _ => Ok(whole),
    }
}

fn part(mut whole: Vec<u8>, offset: u64, length: u64) -> Vec<u8> {
    let from = usize::try_from(offset).unwrap_or(usize::MAX).min(whole.len());
    whole.drain(..from);
    whole.truncate(usize::try_from(length).unwrap_or(usize::MAX));
    whole
}
