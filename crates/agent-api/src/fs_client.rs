//! The client of what is asked about files and ports: every call waits for its answer. Knows neither which user's requests these are nor
//! what is in a file.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read};

use crate::client::{Connection, WITH_FILES, done, send_request, timed, unexpected};
use crate::fs::{Entry, FsRequest, MAX_ENTRIES, WatchEvent};
use crate::message::{DATA_CHUNK, Reply, Request, kind};
use crate::{Duplex, Error, OsText};

/// The most bytes of answers that a list may take here. Whoever is to take longer ones reads them by parts.
const LIST_BYTES: usize = 256 << 20;

/// Each as [`FsRequest`] says. `user` is whose request it is: `name|uid[:group|gid]`, `None` is root.
impl<S: Duplex> Connection<S> {
    /// What is at a path.
    pub fn fs_stat(&mut self, user: Option<&str>, path: impl Into<OsText>) -> Result<Entry, Error> {
        self.ask_entry(user, FsRequest::Stat { path: path.into() })
    }

    /// What is in a directory.
    pub fn fs_list(&mut self, user: Option<&str>, path: impl Into<OsText>, depth: u32) -> Result<Vec<Entry>, Error> {
        let path = path.into();
        self.send_fs(user, FsRequest::List { path, depth })?;
        let (mut all, mut bytes) = (Vec::new(), 0);
        loop {
            match self.answer()? {
                Reply::Entries { entries, more } => {
                    all.extend(entries);
                    bytes += self.reader.last_payload().len();
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected(other)),
            }
            if all.len() > MAX_ENTRIES || bytes > LIST_BYTES {
                // The rest would have to be read to go on.
                self.stream().close();
                return Err(Error::LongList {
                    entries: all.len(),
                    bytes,
                });
            }
        }
    }

    /// Makes a directory, and those above it.
    pub fn fs_make_dir(&mut self, user: Option<&str>, path: impl Into<OsText>) -> Result<Entry, Error> {
        self.ask_entry(user, FsRequest::MakeDir { path: path.into() })
    }

    /// Gives something another name.
    pub fn fs_rename(
        &mut self,
        user: Option<&str>,
        from: impl Into<OsText>,
        to: impl Into<OsText>,
    ) -> Result<Entry, Error> {
        let (from, to) = (from.into(), to.into());
        self.ask_entry(user, FsRequest::Rename { from, to })
    }

    /// Removes a file, or a directory with all that is in it.
    pub fn fs_remove(&mut self, user: Option<&str>, path: impl Into<OsText>) -> Result<(), Error> {
        self.send_fs(user, FsRequest::Remove { path: path.into() })?;
        self.answer().and_then(done)
    }

    /// Makes a file of several.
    pub fn fs_compose(
        &mut self,
        user: Option<&str>,
        sources: Vec<OsText>,
        path: impl Into<OsText>,
    ) -> Result<Entry, Error> {
        let path = path.into();
        self.ask_entry(user, FsRequest::Compose { sources, path })
    }

    /// Reads a file, or `length` bytes of it from `offset` on.
    pub fn fs_read(
        &mut self,
        user: Option<&str>,
        path: impl Into<OsText>,
        offset: u64,
        length: Option<u64>,
    ) -> Result<Reading<'_, S>, Error> {
        let path = path.into();
        self.send_fs(user, FsRequest::Read { path, offset, length })?;
        match self.answer()? {
            Reply::Reading { entry, bytes } => Ok(Reading {
                connection: self,
                entry: *entry,
                bytes,
                left: bytes,
                at: 0,
                length: 0,
                end: None,
                ended: false,
            }),
            other => Err(unexpected(other)),
        }
    }

    /// Writes all of `source` to a file. Where the agent says no in the midst of it, the rest of `source` is not read.
    pub fn fs_write(
        &mut self,
        user: Option<&str>,
        path: impl Into<OsText>,
        mode: Option<u32>,
        metadata: BTreeMap<String, String>,
        source: &mut impl Read,
    ) -> Result<Entry, Error> {
        let path = path.into();
        self.send_fs(user, FsRequest::Write { path, mode, metadata })?;
        self.answer().and_then(done)?;
        let mut buffer = vec![0; DATA_CHUNK];
        // Before the end only a failure is said.
        while !self.stream().has_input() {
            match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(got) => self.writer.send(kind::FILE, 0, buffer.get(..got).unwrap_or_default())?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => {
                    // An end would make a whole file of what is a part.
                    self.stream().close();
                    return Err(Error::Local {
                        what: "reading what is to be written",
                        source,
                    });
                }
            }
        }
        self.writer.send(kind::FILE, 0, &[])?;
        self.entry()
    }

    /// Watches a directory, from the moment when this returns.
    pub fn fs_watch(
        &mut self,
        user: Option<&str>,
        path: impl Into<OsText>,
        recursive: bool,
    ) -> Result<Watching<'_, S>, Error> {
        let path = path.into();
        self.send_fs(user, FsRequest::Watch { path, recursive })?;
        self.answer().and_then(done)?;
        Ok(Watching {
            connection: self,
            ended: false,
        })
    }

    /// Connects to a port of the machine's loopback addresses: the stream is the port's from then on. Its ends are passed on, each
    /// direction's by itself.
    pub fn connect_port(mut self, port: u16) -> Result<S, Error> {
        self.require(WITH_FILES)?;
        let reply = self.ask(&Request::Connect { port })?;
        done(reply)?;
        Ok(self.into_stream())
    }

    fn send_fs(&mut self, user: Option<&str>, request: FsRequest) -> Result<(), Error> {
        self.require(WITH_FILES)?;
        let user = user.map(str::to_owned);
        send_request(&self.writer, &Request::Fs { user, request })
    }

    fn ask_entry(&mut self, user: Option<&str>, request: FsRequest) -> Result<Entry, Error> {
        self.send_fs(user, request)?;
        self.entry()
    }

    fn entry(&mut self) -> Result<Entry, Error> {
        match self.answer()? {
            Reply::Entry(entry) => Ok(*entry),
            other => Err(unexpected(other)),
        }
    }
}

/// A file that is being read. Read to its end, [`Reading::finish`] tells how it went.
#[derive(Debug)]
pub struct Reading<'c, S: Duplex> {
    connection: &'c mut Connection<S>,
    /// The file.
    pub entry: Entry,
    /// How many bytes come. If it breaks off, fewer do.
    pub bytes: u64,
    left: u64,
    /// What was read of the frame that came last.
    at: usize,
    length: usize,
    /// The answer that came behind the last frame.
    end: Option<Result<(), Error>>,
    /// It has come.
    ended: bool,
}

impl<S: Duplex> Reading<'_, S> {
    /// The agent's last word, after the end.
    pub fn finish(mut self) -> Result<(), Error> {
        let mut rest = [0; 4096];
        while self.end.is_none() {
            // What fails is the end.
            drop(self.read(&mut rest));
        }
        self.end.take().unwrap_or(Err(Error::Closed("a file was read")))
    }

    /// Waits for the next frame with something in it; false at the end.
    fn advance(&mut self) -> Result<bool, Error> {
        loop {
            let frame = self.connection.reader.read().map_err(timed)?;
            let frame = frame.ok_or(Error::Closed("a file was read"))?;
            match frame.kind {
                kind::FILE => {
                    let length = frame.payload.len();
                    let bytes = u64::try_from(length).unwrap_or(u64::MAX);
                    self.left = self.left.checked_sub(bytes).ok_or(Error::UnexpectedFrame(kind::FILE))?;
                    (self.at, self.length) = (0, length);
                    if length > 0 {
                        return Ok(true);
                    }
                }
                kind::CONTROL => {
                    let reply = serde_json::from_slice(frame.payload).map_err(Error::Malformed)?;
                    self.ended = true;
                    self.end = Some(match reply {
                        Reply::Done if self.left == 0 => Ok(()),
                        Reply::RequestFailed(failure) => Err(failure.into()),
                        other => Err(unexpected(other)),
                    });
                    return Ok(false);
                }
                other => return Err(Error::UnexpectedFrame(other)),
            }
        }
    }
}

/// What was not read would be taken for the next answer.
impl<S: Duplex> Drop for Reading<'_, S> {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.stream().close();
        }
    }
}

/// At the end of a file that broke off this is an error.
impl<S: Duplex> Read for Reading<'_, S> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        if space.is_empty() {
            return Ok(0);
        }
        if self.at == self.length && self.end.is_none() {
            if let Err(error) = self.advance() {
                let again = io::Error::other(error.to_string());
                self.end = Some(Err(error));
                return Err(again);
            }
            if let Some(Err(error)) = &self.end {
                return Err(io::Error::other(error.to_string()));
            }
        }
        let payload = self.connection.reader.last_payload();
        let left = payload.get(self.at..self.length).unwrap_or_default();
        let count = left.len().min(space.len());
        if self.end.is_some() || count == 0 {
            return Ok(0);
        }
        let (Some(to), Some(from)) = (space.get_mut(..count), left.get(..count)) else {
            return Ok(0);
        };
        to.copy_from_slice(from);
        self.at += count;
        Ok(count)
    }
}

/// A directory that is being watched. It takes the connection until [`Watching::end`].
#[derive(Debug)]
pub struct Watching<'c, S: Duplex> {
    connection: &'c mut Connection<S>,
    ended: bool,
}

/// What comes on would be taken for the next answer.
impl<S: Duplex> Drop for Watching<'_, S> {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.stream().close();
        }
    }
}

impl<S: Duplex> Watching<'_, S> {
    /// Waits until something happens, for as long as an answer may take
    /// ([`set_read_timeout`](Connection::set_read_timeout)).
    pub fn events(&mut self) -> Result<Vec<WatchEvent>, Error> {
        match self.connection.answer()? {
            Reply::Watched(events) => Ok(events),
            other => Err(unexpected(other)),
        }
    }

    /// Ends it; what happened until then and was not read yet.
    pub fn end(mut self) -> Result<Vec<WatchEvent>, Error> {
        send_request(&self.connection.writer, &Request::Detach)?;
        let mut rest = Vec::new();
        loop {
            match self.connection.answer()? {
                Reply::Watched(events) if rest.len() < MAX_ENTRIES => rest.extend(events),
                Reply::Done => {
                    self.ended = true;
                    return Ok(rest);
                }
                other => return Err(unexpected(other)),
            }
        }
    }
}
