//! Requests and replies over a stream, for a directory on another machine: one at a time, each with its length before it.
//! Does not know what the stream is, nor how whoever is at its other end was found to be the right one.
//!
//! ```text
//!  u32 room, u32 length, request  ─▶
//!                                 ◀─  u32 length, reply; a length of 0 where there is none
//! ```
//! All numbers are little-endian.

use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use crate::Error;
use crate::known::Known;
use crate::message::{MAX_REPLY, MAX_REQUEST, Reply};
use crate::server::Server;

/// Who answers requests.
pub trait Answer: Send + Sync {
    /// Answers one. `room` is how long the reply may be; there is none for requests that want none, and for what is no
    /// request at all.
    fn answer(&self, request: &[u8], room: usize, reply: &mut Reply);

    /// [`Server::known`].
    ///
    /// # Errors
    /// That, or [`Error::Elsewhere`].
    fn known(&self) -> Result<Known, Error>;

    /// [`Server::know`].
    ///
    /// # Errors
    /// That, or [`Error::Elsewhere`].
    fn know(&self, known: &Known) -> Result<usize, Error>;
}

impl Answer for Server {
    fn answer(&self, request: &[u8], room: usize, reply: &mut Reply) {
        Server::answer(self, request, room, reply);
    }

    fn known(&self) -> Result<Known, Error> {
        Server::known(self)
    }

    fn know(&self, known: &Known) -> Result<usize, Error> {
        Server::know(self, known)
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn number(stream: &mut impl Read) -> io::Result<usize> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    usize::try_from(u32::from_le_bytes(bytes)).map_err(|_| malformed("a number is too large"))
}

fn prefix(length: usize) -> io::Result<[u8; 4]> {
    let length = u32::try_from(length).map_err(|_| malformed("a message is too long"))?;
    Ok(length.to_le_bytes())
}

/// Answers what comes until the stream ends between two requests.
///
/// # Errors
/// The stream failed, or what came is no request.
pub fn serve(server: &Server, stream: &mut (impl Read + Write)) -> io::Result<()> {
    let mut request = vec![0; MAX_REQUEST];
    let mut reply = Reply::default();
    let mut frame = Vec::new();
    loop {
        let room = match number(stream) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        };
        let length = number(stream)?;
        let request = request
            .get_mut(..length)
            .ok_or_else(|| malformed("a request is too long"))?;
        stream.read_exact(request)?;
        server.answer(request, room, &mut reply);
        frame.clear();
        frame.extend(prefix(reply.as_bytes().len())?);
        frame.extend(reply.as_bytes());
        stream.write_all(&frame)?;
    }
}

/// A directory that is served at the other end of a stream. Once that fails everything does, as `EIO`.
#[derive(Debug)]
pub struct Remote<S>(Mutex<Option<S>>);

impl<S: Read + Write> Remote<S> {
    /// Asks over `stream`, whose reads and writes should not wait for ever.
    pub fn new(stream: S) -> Self {
        Self(Mutex::new(Some(stream)))
    }
}

fn ask(stream: &mut (impl Read + Write), request: &[u8], room: usize, reply: &mut Reply) -> io::Result<()> {
    let room = room.min(MAX_REPLY);
    let frame = [&prefix(room)?, &prefix(request.len())?, request].concat();
    stream.write_all(&frame)?;
    let length = number(stream)?;
    if length > room {
        return Err(malformed("the reply is longer than its room"));
    }
    let space = reply.take(length).ok_or_else(|| malformed("the reply is too long"))?;
    stream.read_exact(space)
}

impl<S: Read + Write + Send> Answer for Remote<S> {
    fn answer(&self, request: &[u8], room: usize, reply: &mut Reply) {
        // One request at a time; a thread that panicked in between has left half a message.
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = stream.as_mut() {
            match ask(open, request, room, reply) {
                Ok(()) => return,
                Err(error) => {
                    log::warn!("a shared directory is lost, as its server cannot be reached: {error}");
                    *stream = None;
                }
            }
        }
        reply.refuse(request, room, Errno::IO);
    }

    fn known(&self) -> Result<Known, Error> {
        Err(Error::Elsewhere)
    }

    fn know(&self, _known: &Known) -> Result<usize, Error> {
        Err(Error::Elsewhere)
    }
}
