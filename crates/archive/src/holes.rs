//! Sparse files: where a file has data, GNU tar's headers that say so (`old GNU format`, tar manual, "Storing Sparse Files"),
//! and writing without the zeroes. Knows no trees.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, ftruncate, seek};
use rustix::io::Errno;
use tar::{EntryType, GnuExtSparseHeader, Header};

/// More parts than this are not worth telling apart; it also bounds the headers of one file.
const MOST_PARTS: usize = 10_000;

/// What is written or left out as a whole; a file system's block.
const BLOCK: usize = 4096;

/// Bytes that are read at once.
pub(crate) const CHUNK: usize = 64 << 10;

/// A stretch of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// The stretches of data of a file of this size; `None` if it has no holes that are worth it.
pub(crate) fn parts(file: &File, size: u64, blocks: u64) -> Result<Option<Vec<Part>>, Errno> {
    if blocks.saturating_mul(512) >= size {
        return Ok(None);
    }
    let mut parts = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < size => start,
            // Nothing but a hole is left.
            Ok(_) | Err(Errno::NXIO) => break,
            // A file system that knows no holes.
            Err(Errno::INVAL) => return Ok(None),
            Err(error) => return Err(error),
        };
        let end = seek(file, SeekFrom::Hole(start))?.min(size);
        parts.push(Part {
            offset: start,
            length: end.saturating_sub(start),
        });
        if end <= start || parts.len() > MOST_PARTS {
            return Ok(None);
        }
        at = end;
    }
    // The last part tells where the file ends.
    parts.push(Part {
        offset: size,
        length: 0,
    });
    Ok(Some(parts))
}

/// Makes `header` one of a sparse file; returns the headers that follow it.
pub(crate) fn describe(header: &mut Header, parts: &[Part], size: u64) -> Vec<u8> {
    header.set_entry_type(EntryType::GNUSparse);
    header.set_size(parts.iter().map(|part| part.length).sum());
    let mut more = Vec::new();
    let Some(gnu) = header.as_gnu_mut() else { return more };
    gnu.set_real_size(size);
    for (slot, part) in gnu.sparse.iter_mut().zip(parts) {
        slot.set_offset(part.offset);
        slot.set_length(part.length);
    }
    let mut left = parts.get(gnu.sparse.len()..).unwrap_or_default().to_vec();
    gnu.set_is_extended(!left.is_empty());
    while !left.is_empty() {
        let mut next = GnuExtSparseHeader::new();
        let count = left.len().min(next.sparse.len());
        for (slot, part) in next.sparse.iter_mut().zip(left.drain(..count)) {
            slot.set_offset(part.offset);
            slot.set_length(part.length);
        }
        next.set_is_extended(!left.is_empty());
        more.extend_from_slice(next.as_bytes());
    }
    more
}

/// Copies all of `source` into an empty file and leaves holes where they are zero; how many came.
pub(crate) fn write(source: &mut impl Read, file: impl AsFd) -> Result<u64, WriteError> {
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    loop {
        let got = match source.read(&mut buffer) {
            Ok(0) => break,
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(WriteError::Source(error)),
        };
        for block in buffer.get(..got).unwrap_or_default().chunks(BLOCK) {
            if block.iter().any(|&byte| byte != 0) {
                write_all(&file, block, at).map_err(WriteError::File)?;
            }
            at += block.len() as u64;
        }
    }
    ftruncate(&file, at).map_err(WriteError::File)?;
    Ok(at)
}

/// Which side failed.
pub(crate) enum WriteError {
    Source(io::Error),
    File(Errno),
}

fn write_all(file: impl AsFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(&file, bytes, at) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => {
                bytes = bytes.get(count..).unwrap_or_default();
                at += count as u64;
            }
            Err(Errno::INTR) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The data of a file, as many bytes as its header says: one that has become shorter is filled up with zeroes, one that has
/// become longer is cut.
pub(crate) struct Data<'f> {
    file: &'f File,
    parts: std::vec::IntoIter<Part>,
    now: Part,
    /// It was shorter.
    pub(crate) changed: bool,
    pub(crate) error: Option<Errno>,
}

impl<'f> Data<'f> {
    pub(crate) fn new(file: &'f File, parts: Vec<Part>) -> Self {
        Self {
            file,
            parts: parts.into_iter(),
            now: Part { offset: 0, length: 0 },
            changed: false,
            error: None,
        }
    }
}

impl Read for Data<'_> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        while self.now.length == 0 {
            match self.parts.next() {
                Some(part) => self.now = part,
                None => return Ok(0),
            }
        }
        let most = usize::try_from(self.now.length).unwrap_or(usize::MAX).min(space.len());
        let space = space.get_mut(..most).unwrap_or_default();
        let got = match rustix::io::pread(self.file, &mut *space, self.now.offset) {
            Ok(0) if most > 0 => {
                self.changed = true;
                space.fill(0);
                most
            }
            Ok(got) => got,
            Err(Errno::INTR) => return Err(io::ErrorKind::Interrupted.into()),
            Err(error) => {
                self.error = Some(error);
                return Err(error.into());
            }
        };
        self.now.offset += got as u64;
        self.now.length -= got as u64;
        Ok(got)
    }
}
