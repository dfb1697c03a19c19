//! Where a file has data, and how a member says so: a map of decimal lines in whole blocks before the data (GNU tar manual, "PAX
//! Format, Versions 1.0").

use std::fs::File;
use std::io::{self, Read};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::Error;
use crate::head::padding;

/// A map has no more parts; that also bounds what a reader keeps of one.
pub(crate) const MOST_PARTS: usize = 1 << 20;

/// The least hole at first, a file system's block.
const LEAST_HOLE: u64 = 4096;

/// The longest line: a number of 20 digits and its end.
const LONGEST_LINE: usize = 21;

/// A stretch of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// The stretches of data of a file. Of one with very many the smallest holes are taken for data.
pub(crate) fn parts(file: &File, size: u64, most: usize) -> io::Result<Vec<Part>> {
    let mut least = LEAST_HOLE;
    loop {
        if let Some(parts) = parts_between(file, size, most, least)? {
            return Ok(parts);
        }
        least = least.saturating_mul(2);
    }
}

/// The stretches between holes of at least `least` bytes; `None` if there are too many.
fn parts_between(file: &File, size: u64, most: usize, least: u64) -> io::Result<Option<Vec<Part>>> {
    let mut parts: Vec<Part> = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < size => start,
            // Nothing but a hole is left.
            Ok(_) | Err(Errno::NXIO) => break,
            // A file system that knows no holes.
            Err(Errno::INVAL) => at,
            Err(error) => return Err(error.into()),
        };
        let end = match seek(file, SeekFrom::Hole(start)) {
            Ok(end) => end.clamp(start + 1, size),
            Err(Errno::INVAL) => size,
            Err(error) => return Err(error.into()),
        };
        match parts.last_mut() {
            Some(last) if start - (last.offset + last.length) < least => last.length = end - last.offset,
            _ => parts.push(Part {
                offset: start,
                length: end - start,
            }),
        }
        if parts.len() > most {
            return Ok(None);
        }
        at = end;
    }
    Ok(Some(parts))
}

/// Bytes of data that a file has.
///
/// # Errors
/// The file cannot be looked at.
pub fn data_bytes(file: &File) -> io::Result<u64> {
    let parts = parts(file, file.metadata()?.len(), MOST_PARTS)?;
    Ok(parts.iter().map(|part| part.length).sum())
}

/// The map as it stands in the archive, with the zeroes up to a whole block.
pub(crate) fn map(parts: &[Part]) -> Vec<u8> {
    let mut text = format!("{}\n", parts.len());
    for part in parts {
        text.push_str(&format!("{}\n{}\n", part.offset, part.length));
    }
    let mut bytes = text.into_bytes();
    bytes.resize(bytes.len() + padding(bytes.len() as u64), 0);
    bytes
}

/// Reads a map of a file of this size, and how many bytes it took.
pub(crate) fn read_map(input: &mut impl Read, size: u64, packed: u64) -> Result<(Vec<Part>, u64), Error> {
    let bad = || Error::damaged("the map of a sparse file is none");
    let mut lines = Lines {
        input,
        taken: 0,
        packed,
    };
    let count = usize::try_from(lines.number()?).unwrap_or(usize::MAX);
    if count > MOST_PARTS {
        return Err(bad());
    }
    let mut parts = Vec::new();
    let (mut end, mut data) = (0, 0_u64);
    for _ in 0..count {
        let part = Part {
            offset: lines.number()?,
            length: lines.number()?,
        };
        let next = part.offset.checked_add(part.length).filter(|&next| next <= size);
        if part.offset < end || (part.length == 0 && part.offset != size) {
            return Err(bad());
        }
        end = next.ok_or_else(bad)?;
        data += part.length;
        parts.push(part);
    }
    let taken = lines.finish()?;
    match taken.checked_add(data) == Some(packed) {
        true => Ok((parts, taken)),
        false => Err(bad()),
    }
}

/// Numbers, a line each.
struct Lines<'r, R> {
    input: &'r mut R,
    taken: u64,
    /// There can be no more than this.
    packed: u64,
}

impl<R: Read> Lines<'_, R> {
    fn byte(&mut self) -> Result<u8, Error> {
        if self.taken >= self.packed {
            return Err(Error::damaged("the map of a sparse file has no end"));
        }
        let mut byte = [0];
        self.input.read_exact(&mut byte).map_err(Error::decoding)?;
        self.taken += 1;
        Ok(byte[0])
    }

    fn number(&mut self) -> Result<u64, Error> {
        let bad = || Error::damaged("the map of a sparse file has something else than numbers");
        let mut number: Option<u64> = None;
        for _ in 0..LONGEST_LINE {
            match self.byte()? {
                b'\n' => return number.ok_or_else(bad),
                digit @ b'0'..=b'9' => {
                    let before = number.unwrap_or(0);
                    let next = before.checked_mul(10);
                    number = Some(
                        next.and_then(|next| next.checked_add(u64::from(digit - b'0')))
                            .ok_or_else(bad)?,
                    );
                }
                _ => return Err(bad()),
            }
        }
        Err(bad())
    }

    /// The zeroes after the last line.
    fn finish(mut self) -> Result<u64, Error> {
        for _ in 0..padding(self.taken) {
            if self.byte()? != 0 {
                return Err(Error::damaged("the map of a sparse file is longer than it says"));
            }
        }
        Ok(self.taken)
    }
}
