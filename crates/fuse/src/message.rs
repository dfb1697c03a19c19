//! Requests taken apart, replies put together. What a request says is an allegation; nothing here panics for it. Knows no
//! file.

use std::ffi::CStr;

use rustix::io::Errno;

use crate::abi::{IN_HEADER, OUT_HEADER, op};

/// The most bytes that one request reads or writes.
pub const MAX_IO: usize = 512 << 10;

/// The longest request: a write's header and data, with room for the longest name and value.
pub const MAX_REQUEST: usize = MAX_IO + (4 << 10);

/// The longest reply.
pub const MAX_REPLY: usize = MAX_IO + OUT_HEADER;

/// What a request is about, and who made it (`struct fuse_in_header`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) node: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Header {
    /// Whether anybody waits for an answer, if only to learn of a failure.
    pub(crate) fn wants_reply(&self) -> bool {
        !matches!(self.opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT)
    }
}

/// The rest of a request.
#[derive(Clone, Debug)]
pub(crate) struct Body<'a>(&'a [u8]);

/// Takes the header off. `None` for what is too short to be answered at all.
pub(crate) fn parse(request: &[u8]) -> Option<(Header, Result<Body<'_>, Errno>)> {
    let (head, rest) = request.split_at_checked(IN_HEADER)?;
    let mut head = Body(head);
    let length = head.u32().ok()?;
    let header = Header {
        opcode: head.u32().ok()?,
        unique: head.u64().ok()?,
        node: head.u64().ok()?,
        uid: head.u32().ok()?,
        gid: head.u32().ok()?,
    };
    let whole = usize::try_from(length) == Ok(request.len()) && request.len() <= MAX_REQUEST;
    Some((header, whole.then_some(Body(rest)).ok_or(Errno::INVAL)))
}

impl<'a> Body<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (array, rest) = self.0.split_first_chunk().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(*array)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Errno> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Errno> {
        self.array().map(u64::from_le_bytes)
    }

    /// Passes over fields that mean nothing here.
    pub(crate) fn skip(&mut self, count: usize) -> Result<(), Errno> {
        self.bytes(count).map(drop)
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Errno> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(bytes)
    }

    /// A string up to its null byte.
    pub(crate) fn string(&mut self) -> Result<&'a CStr, Errno> {
        let string = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        self.0 = self.0.get(string.count_bytes() + 1..).unwrap_or_default();
        Ok(string)
    }

    /// The name of one thing in a directory: nothing that leads anywhere else.
    pub(crate) fn name(&mut self) -> Result<&'a CStr, Errno> {
        let name = self.string()?;
        match name.to_bytes() {
            b"" | b"." | b".." => Err(Errno::INVAL),
            bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
            bytes if bytes.len() > 255 => Err(Errno::NAMETOOLONG),
            _ => Ok(name),
        }
    }
}

/// A reply under construction, in memory that is kept for the next one.
#[derive(Debug)]
pub struct Reply {
    buffer: Box<[u8]>,
    used: usize,
    room: usize,
}

impl Default for Reply {
    fn default() -> Self {
        Self {
            // Pages that no reply touches take no memory.
            buffer: vec![0; MAX_REPLY].into_boxed_slice(),
            used: 0,
            room: 0,
        }
    }
}

impl Reply {
    /// The whole reply; empty when there is none.
    pub fn as_bytes(&self) -> &[u8] {
        self.buffer.get(..self.used).unwrap_or_default()
    }

    /// A reply of this length, to be filled from elsewhere; `None` if there is no such reply.
    pub(crate) fn take(&mut self, length: usize) -> Option<&mut [u8]> {
        self.none();
        let space = self.buffer.get_mut(..length)?;
        self.used = length;
        Some(space)
    }

    /// The refusal of a request, if it wants a reply at all.
    pub fn refuse(&mut self, request: &[u8], room: usize, error: Errno) {
        self.none();
        if let Some((header, _)) = parse(request).filter(|(header, _)| header.wants_reply()) {
            self.begin(room);
            self.finish(header.unique, Err(error));
        }
    }

    /// No reply.
    pub(crate) fn none(&mut self) {
        self.used = 0;
    }

    /// Begins one of at most `room` bytes.
    pub(crate) fn begin(&mut self, room: usize) {
        self.used = OUT_HEADER;
        self.room = room.min(MAX_REPLY);
    }

    /// Writes the header: the reply is complete, or there is none for want of room.
    pub(crate) fn finish(&mut self, unique: u64, result: Result<(), Errno>) {
        if self.room < OUT_HEADER {
            return self.none();
        }
        let error = match result {
            Ok(()) => 0,
            Err(error) => {
                self.used = OUT_HEADER;
                -error.raw_os_error()
            }
        };
        let length = u32::try_from(self.used).unwrap_or(0);
        let mut header = [0; OUT_HEADER];
        header[..4].copy_from_slice(&length.to_le_bytes());
        header[4..8].copy_from_slice(&error.to_le_bytes());
        header[8..].copy_from_slice(&unique.to_le_bytes());
        if let Some(head) = self.buffer.first_chunk_mut() {
            *head = header;
        }
    }

    /// How much more fits.
    pub(crate) fn left(&self) -> usize {
        self.room.saturating_sub(self.used)
    }

    /// The next `count` bytes, to be filled; [`Reply::advance`] makes them part of the reply.
    pub(crate) fn space(&mut self, count: usize) -> Result<&mut [u8], Errno> {
        if count > self.left() {
            return Err(Errno::RANGE);
        }
        self.buffer.get_mut(self.used..self.used + count).ok_or(Errno::RANGE)
    }

    pub(crate) fn advance(&mut self, count: usize) {
        self.used += count;
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        self.space(bytes.len())?.copy_from_slice(bytes);
        self.advance(bytes.len());
        Ok(())
    }

    pub(crate) fn u16(&mut self, value: u16) -> Result<(), Errno> {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> Result<(), Errno> {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> Result<(), Errno> {
        self.bytes(&value.to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(bytes: &[u8]) -> Body<'_> {
        Body(bytes)
    }

    #[test]
    fn names_lead_nowhere_else() {
        assert_eq!(body(b"file\0rest").name(), Ok(c"file"));
        assert_eq!(body(b"...\0").name(), Ok(c"..."));
        for bad in [
            &b"\0"[..],
            b".\0",
            b"..\0",
            b"a/b\0",
            b"/\0",
            b"/etc/passwd\0",
            b"no end",
            b"",
        ] {
            assert_eq!(body(bad).name(), Err(Errno::INVAL), "{bad:?}");
        }
        let long = [b'x'; 256].into_iter().chain([0]).collect::<Vec<_>>();
        assert_eq!(body(&long).name(), Err(Errno::NAMETOOLONG));
    }

    #[test]
    fn a_header_must_tell_the_truth_about_the_length() {
        let mut request = vec![0; IN_HEADER + 8];
        request[0] = 48;
        assert!(parse(&request).unwrap().1.is_ok());
        request[0] = 47;
        assert_eq!(parse(&request).unwrap().1.unwrap_err(), Errno::INVAL);
        assert!(parse(&request[..39]).is_none());
    }

    #[test]
    fn a_reply_stays_in_its_room() {
        let mut reply = Reply::default();
        reply.begin(24);
        reply.u64(7).unwrap();
        assert_eq!(reply.u32(1), Err(Errno::RANGE));
        reply.finish(9, Ok(()));
        assert_eq!(reply.as_bytes().len(), 24);
        reply.begin(15);
        reply.finish(9, Err(Errno::IO));
        assert!(reply.as_bytes().is_empty());
    }
}
