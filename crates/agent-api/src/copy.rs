//! The client's side of copies: tar streams to the agent and from it. Does not look into them.

use std::io::{self, Read, Write};

use crate::client::{done, timed, unexpected};
use crate::message::{DATA_CHUNK, Reply, Request, UnpackTarget, kind};
use crate::{Connection, Duplex, Error, OsText};

/// What was copied, and what was not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Devices, pipes and sockets.
    pub left_out: u64,
    /// Files that became shorter while they were read.
    pub changed: u64,
}

impl<S: Duplex> Connection<S> {
    /// Asks for the tree at `path`, called `name` in the stream.
    pub fn pack(&mut self, path: impl Into<OsText>, name: impl Into<OsText>) -> Result<Packing<'_, S>, Error> {
        let request = Request::Pack {
            path: path.into(),
            name: name.into(),
        };
        match self.ask(&request)? {
            Reply::Packing { directory, bytes } => Ok(Packing {
                connection: self,
                directory,
                bytes,
                at: 0,
                length: 0,
                end: None,
            }),
            other => Err(unexpected(other)),
        }
    }

    /// Has the agent unpack what `write` writes. What `write` fails with ends the connection.
    pub fn unpack<E: From<Error>>(
        &mut self,
        path: impl Into<OsText>,
        target: UnpackTarget,
        keep_owner: bool,
        write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
    ) -> Result<Copied, E> {
        let request = Request::Unpack {
            path: path.into(),
            target,
            keep_owner,
        };
        self.ask(&request).and_then(done)?;
        let mut sink = Sink {
            connection: self,
            refused: false,
        };
        let written = write(&mut sink);
        if sink.refused {
            // What it says counts, not that we stopped. The stream has no end, so this connection has one.
            let refusal = self.copied();
            self.reader.get_ref().close();
            return Ok(refusal?);
        }
        if let Err(error) = written {
            self.reader.get_ref().close();
            return Err(error);
        }
        self.writer.send(kind::FILE, 0, &[]).map_err(Error::Wire)?;
        Ok(self.copied()?)
    }

    fn copied(&mut self) -> Result<Copied, Error> {
        match self.answer()? {
            Reply::Copied { left_out, changed } => Ok(Copied { left_out, changed }),
            other => Err(unexpected(other)),
        }
    }
}

/// The stream to the agent.
struct Sink<'c, S: Duplex> {
    connection: &'c Connection<S>,
    /// The agent has said something in the midst of it, which can only be no.
    refused: bool,
}

impl<S: Duplex> Write for Sink<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // An empty frame would be the end.
        let part = bytes.get(..bytes.len().min(DATA_CHUNK)).unwrap_or_default();
        if self.connection.stream().has_input() {
            self.refused = true;
            return Err(io::Error::other("the agent takes no more"));
        }
        if !part.is_empty() {
            self.connection
                .writer
                .send(kind::FILE, 0, part)
                .map_err(io::Error::other)?;
        }
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A stream from the agent. Read to its end, [`Packing::finish`] tells how it went.
#[derive(Debug)]
pub struct Packing<'c, S: Duplex> {
    connection: &'c mut Connection<S>,
    /// The tree is a directory. The agent says so; it may lie.
    pub directory: bool,
    /// Bytes in its files, about. The same holds.
    pub bytes: u64,
    /// What was read of the frame that came last.
    at: usize,
    length: usize,
    /// The answer that came instead of a frame.
    end: Option<Result<Copied, Error>>,
}

impl<S: Duplex> Packing<'_, S> {
    /// The agent's last word, after the end of the stream.
    pub fn finish(mut self) -> Result<Copied, Error> {
        let mut rest = [0; 4096];
        while self.end.is_none() {
            self.read(&mut rest).map_err(|source| Error::Local {
                what: "reading the stream of files",
                source,
            })?;
        }
        self.end.unwrap_or(Err(Error::Closed("files were copied")))
    }

    fn next(&mut self) -> Result<Option<usize>, Error> {
        let frame = self.connection.reader.read().map_err(timed)?;
        let frame = frame.ok_or(Error::Closed("files were copied"))?;
        match frame.kind {
            kind::FILE => Ok(Some(frame.payload.len())),
            kind::CONTROL => {
                self.end = Some(match serde_json::from_slice(frame.payload).map_err(Error::Malformed)? {
                    Reply::Copied { left_out, changed } => Ok(Copied { left_out, changed }),
                    Reply::Refused { message } => Err(Error::Refused(message)),
                    other => Err(unexpected(other)),
                });
                Ok(None)
            }
            other => Err(Error::UnexpectedFrame(other)),
        }
    }
}

impl<S: Duplex> Read for Packing<'_, S> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        while self.at == self.length {
            if self.end.is_some() || space.is_empty() {
                return Ok(0);
            }
            match self.next() {
                Ok(Some(length)) => (self.at, self.length) = (0, length),
                Ok(None) => return Ok(0),
                Err(error) => {
                    let again = io::Error::other(error.to_string());
                    self.end = Some(Err(error));
                    return Err(again);
                }
            }
        }
        let payload = self.connection.reader.last_payload();
        let left = payload.get(self.at..self.length).unwrap_or_default();
        let count = left.len().min(space.len());
        let (Some(to), Some(from)) = (space.get_mut(..count), left.get(..count)) else {
            return Ok(0);
        };
        to.copy_from_slice(from);
        self.at += count;
        Ok(count)
    }
}
