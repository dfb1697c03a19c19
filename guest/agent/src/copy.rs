//! Trees from and for the client, as tar streams: the dialogue, and the stream in frames. What is in a stream is the business
//! of `archive`.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use agent_api::message::{DATA_CHUNK, Reply, kind};
use agent_api::{Duplex, OsText, UnpackTarget};
use archive::{Owner, Target};
use wire::{FrameReader, FrameWriter};

use crate::{Error, send_reply};

fn absolute(path: &OsText) -> Result<PathBuf, Error> {
    let path = PathBuf::from(path.as_os_str());
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(Error::Refused(format!("{} is not an absolute path", path.display())))
    }
}

fn refuse<S: Duplex>(writer: &FrameWriter<S>, error: &dyn std::fmt::Display) -> Result<(), Error> {
    let message = error.to_string();
    send_reply(writer, &Reply::Refused { message })
}

/// Sends the tree at `path`. An error is returned only for the connection itself.
pub(crate) fn pack<S: Duplex>(path: &OsText, name: &OsText, writer: &FrameWriter<S>) -> Result<(), Error> {
    let measured = absolute(path).and_then(|path| {
        let measured = archive::measure(&path).map_err(|error| Error::Refused(error.to_string()))?;
        Ok((path, measured))
    });
    let (path, measured) = match measured {
        Ok(measured) => measured,
        Err(error) => return refuse(writer, &error),
    };
    let announced = Reply::Packing {
        directory: measured.directory,
        bytes: measured.bytes,
    };
    send_reply(writer, &announced)?;
    let mut sink = Sink {
        writer,
        waiting: Vec::with_capacity(DATA_CHUNK),
    };
    match archive::pack(&path, name.as_os_str(), &mut sink) {
        Ok(packed) => send_reply(
            writer,
            &Reply::Copied {
                left_out: packed.left_out,
                changed: packed.changed,
            },
        ),
        Err(error) => refuse(writer, &error),
    }
}

/// A stream to the client; small pieces are gathered.
struct Sink<'w, S: Duplex> {
    writer: &'w FrameWriter<S>,
    waiting: Vec<u8>,
}

impl<S: Duplex> Write for Sink<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = DATA_CHUNK.saturating_sub(self.waiting.len());
        let part = bytes.get(..bytes.len().min(room)).unwrap_or_default();
        self.waiting.extend_from_slice(part);
        if self.waiting.len() >= DATA_CHUNK {
            self.flush()?;
        }
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.waiting.is_empty() {
            self.writer
                .send(kind::FILE, 0, &self.waiting)
                .map_err(io::Error::other)?;
            self.waiting.clear();
        }
        Ok(())
    }
}

/// Unpacks the stream that follows. An error is returned only for the connection itself.
pub(crate) fn unpack<S: Duplex>(
    path: &OsText,
    target: UnpackTarget,
    keep_owner: bool,
    reader: &mut FrameReader<S>,
    writer: &FrameWriter<S>,
) -> Result<(), Error> {
    let path = match absolute(path) {
        Ok(path) => path,
        Err(error) => return refuse(writer, &error),
    };
    let target = match target {
        UnpackTarget::Root => Target::Root(path),
        UnpackTarget::Into => Target::Into(path),
        UnpackTarget::Below => Target::Below(path),
    };
    if let Err(error) = look(&target) {
        return refuse(writer, &error);
    }
    send_reply(writer, &Reply::Done)?;
    let owner = if keep_owner { Owner::Kept } else { Owner::Mine };
    let mut source = Source {
        reader,
        at: 0,
        length: 0,
        ended: false,
        failure: None,
    };
    let result = archive::unpack(&mut source, &target, owner);
    if let Err(error) = &result
        && source.failure.is_none()
    {
        // At once: there may be much to come, for nothing.
        refuse(writer, error)?;
    }
    while !source.ended && source.failure.is_none() {
        source.next_frame();
    }
    match (source.failure, result) {
        (Some(error), _) => Err(error),
        (None, Ok(unpacked)) => send_reply(
            writer,
            &Reply::Copied {
                left_out: unpacked.left_out,
                changed: 0,
            },
        ),
        (None, Err(_)) => Ok(()),
    }
}

/// The directory that must be there is there.
fn look(target: &Target) -> Result<(), Error> {
    let directory = match target {
        Target::Root(path) => path.parent().unwrap_or(Path::new("/")),
        Target::Into(path) | Target::Below(path) => path,
    };
    let metadata =
        std::fs::metadata(directory).map_err(Error::system(format!("looking at {}", directory.display())))?;
    if metadata.is_dir() {
        return Ok(());
    }
    Err(Error::Refused(format!("{} is no directory", directory.display())))
}

/// The stream from the client, until its empty frame.
struct Source<'r, S: Duplex> {
    reader: &'r mut FrameReader<S>,
    /// What was read of the frame that came last.
    at: usize,
    length: usize,
    ended: bool,
    /// Of the connection.
    failure: Option<Error>,
}

impl<S: Duplex> Source<'_, S> {
    fn next_frame(&mut self) {
        (self.at, self.length) = (0, 0);
        match self.reader.read() {
            Ok(Some(frame)) if frame.kind == kind::FILE => {
                self.length = frame.payload.len();
                self.ended = self.length == 0;
            }
            Ok(Some(frame)) => {
                self.failure = Some(Error::UnexpectedFrame {
                    kind: frame.kind,
                    length: frame.payload.len(),
                });
            }
            Ok(None) => {
                self.failure = Some(Error::Wire(wire::Error::Truncated {
                    what: "a stream of files",
                    got: 0,
                    want: 1,
                }));
            }
            Err(error) => self.failure = Some(Error::Wire(error)),
        }
    }
}

impl<S: Duplex> Read for Source<'_, S> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        if self.at == self.length && !self.ended && self.failure.is_none() {
            self.next_frame();
        }
        if self.failure.is_some() {
            return Err(io::Error::other("the client is gone"));
        }
        let left = self.reader.last_payload().get(self.at..self.length).unwrap_or_default();
        let count = left.len().min(space.len());
        let (Some(to), Some(from)) = (space.get_mut(..count), left.get(..count)) else {
            return Ok(0);
        };
        to.copy_from_slice(from);
        self.at += count;
        Ok(count)
    }
}
