//! How the state of a forwarded accelerator is saved with its sandbox: the node asks the accelerator's server by a unix socket, while the
//! machine stands still.
//!
//! ```text
//!   node ── PREPARE ──▶ server                while the machine runs; PREPARED says that what takes long is done
//!   node ── SAVE, milliseconds ──▶ server
//!   node ◀── BYTES, place and bytes of a file; as many as there are ── SAVED, or REFUSED with the reason ── server
//!   node hangs up: the server's clients go on
//! ```
//! The node writes the file, as it trusts nothing of the server: neither where it writes nor how much. Knows nothing of what is in it.

use std::io::{Read, Write};
use std::time::Duration;

use wire::{FrameReader, FrameWriter};

use crate::Error;

/// Kinds of frames.
const SAVE: u16 = 1;
const BYTES: u16 = 2;
const SAVED: u16 = 3;
const REFUSED: u16 = 4;
const PREPARE: u16 = 5;
const PREPARED: u16 = 6;

/// Bytes of a file that travel together at most.
pub const CHUNK: usize = 64 << 10;

/// What a node asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// What can be done while the machine runs.
    Prepare,
    /// The state; the server has that long to stop its clients between two calls and their commands to end.
    Save(Duration),
}

/// What a server says.
#[derive(Debug, PartialEq, Eq)]
pub enum Said<'a> {
    /// What it was asked to prepare is.
    Prepared,
    /// These bytes of the file are there.
    Bytes(u64, &'a [u8]),
    /// That was all.
    Saved,
    /// It cannot be saved, and why.
    Refused(String),
}

/// The node asks.
///
/// # Errors
/// The stream's.
pub fn ask<W: Write>(writer: &FrameWriter<W>, asked: Asked) -> Result<(), Error> {
    let sent = match asked {
        Asked::Prepare => writer.send(PREPARE, 0, &[]),
        Asked::Save(patience) => {
            let millis = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
            writer.send(SAVE, 0, &millis.to_le_bytes())
        }
    };
    Ok(sent?)
}

/// The server is asked; nothing at the stream's end.
///
/// # Errors
/// The stream's, or that it is no question.
pub fn asked<R: Read>(reader: &mut FrameReader<R>) -> Result<Option<Asked>, Error> {
    let Some(frame) = reader.read()? else { return Ok(None) };
    match (frame.kind, frame.payload.first_chunk()) {
        (PREPARE, _) => Ok(Some(Asked::Prepare)),
        (SAVE, Some(millis)) => Ok(Some(Asked::Save(Duration::from_millis(u64::from_le_bytes(*millis))))),
        (kind, _) => Err(Error::UnexpectedFrame(kind)),
    }
}

/// The server tells bytes, at most [`CHUNK`] of them.
///
/// # Errors
/// The stream's.
pub fn tell_bytes<W: Write>(writer: &FrameWriter<W>, at: u64, bytes: &[u8]) -> Result<(), Error> {
    let mut payload = Vec::with_capacity(8 + bytes.len());
    payload.extend(at.to_le_bytes());
    payload.extend(bytes);
    Ok(writer.send(BYTES, 0, &payload)?)
}

/// The server tells that it is prepared.
///
/// # Errors
/// The stream's.
pub fn tell_prepared<W: Write>(writer: &FrameWriter<W>) -> Result<(), Error> {
    Ok(writer.send(PREPARED, 0, &[])?)
}

/// The server tells how it ended: a reason if it was refused.
///
/// # Errors
/// The stream's.
pub fn tell_end<W: Write>(writer: &FrameWriter<W>, refused: Option<&str>) -> Result<(), Error> {
    let sent = match refused {
        None => writer.send(SAVED, 0, &[]),
        Some(reason) => writer.send(REFUSED, 0, reason.as_bytes()),
    };
    Ok(sent?)
}

/// The node hears the next of what a server says; nothing at the stream's end.
///
/// # Errors
/// The stream's, or that it is none of this.
pub fn hear<'r, R: Read>(reader: &'r mut FrameReader<R>) -> Result<Option<Said<'r>>, Error> {
    let Some(frame) = reader.read()? else { return Ok(None) };
    match (frame.kind, frame.payload.split_first_chunk()) {
        (BYTES, Some((at, bytes))) => Ok(Some(Said::Bytes(u64::from_le_bytes(*at), bytes))),
        (PREPARED, _) => Ok(Some(Said::Prepared)),
        (SAVED, _) => Ok(Some(Said::Saved)),
        (REFUSED, _) => Ok(Some(Said::Refused(String::from_utf8_lossy(frame.payload).into_owned()))),
        (kind, _) => Err(Error::UnexpectedFrame(kind)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_and_nothing_else() {
        let mut bytes = Vec::new();
        let writer = FrameWriter::new(&mut bytes);
        ask(&writer, Asked::Prepare).unwrap();
        ask(&writer, Asked::Save(Duration::from_millis(1500))).unwrap();
        tell_prepared(&writer).unwrap();
        tell_bytes(&writer, 77, b"part").unwrap();
        tell_end(&writer, None).unwrap();
        tell_end(&writer, Some("a kernel runs")).unwrap();
        writer.send(BYTES, 0, b"short").unwrap();
        let mut reader = FrameReader::new(&bytes[..]);
        assert_eq!(asked(&mut reader).unwrap(), Some(Asked::Prepare));
        let save = Asked::Save(Duration::from_millis(1500));
        assert_eq!(asked(&mut reader).unwrap(), Some(save));
        assert_eq!(hear(&mut reader).unwrap(), Some(Said::Prepared));
        assert_eq!(hear(&mut reader).unwrap(), Some(Said::Bytes(77, b"part")));
        assert_eq!(hear(&mut reader).unwrap(), Some(Said::Saved));
        assert_eq!(
            hear(&mut reader).unwrap(),
            Some(Said::Refused("a kernel runs".to_owned()))
        );
        assert!(hear(&mut reader).is_err(), "no place");
        assert_eq!(hear(&mut reader).unwrap(), None);
        // Behind the two questions.
        assert!(
            asked(&mut FrameReader::new(&bytes[8 + 8 + 8 + 8..])).is_err(),
            "no question"
        );
    }
}
