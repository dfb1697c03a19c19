//! Members become a stream, one after the other.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;

use sha2::{Digest as _, Sha256};
use zstd::stream::write::Encoder;

use crate::head::{self, BLOCK, Described};
use crate::sparse::{self, MOST_PARTS, Part};
use crate::{CHUNK, Error, FORMAT, HEAD, Head, SUMS, Sum, Sums};

/// zstd's own default: a level more costs twice the time for a twentieth of the size (docs/snapshot-file.md).
const LEVEL: i32 = 3;

/// An export on its way out. Unless it is finished there is none.
pub struct Writer<W: Write> {
    out: Encoder<'static, W>,
    sums: Sums,
}

impl<W: Write> Writer<W> {
    /// Begins an export of this kind.
    ///
    /// # Errors
    /// `out` does not take it.
    pub fn new(out: W, kind: &str) -> Result<Self, Error> {
        let mut writer = Self {
            out: encoder(out)?,
            sums: Sums::default(),
        };
        let head = Head {
            format: FORMAT,
            kind: kind.to_owned(),
        };
        writer.bytes(HEAD, &json(&head)?)?;
        Ok(writer)
    }

    /// Adds a file with its holes. `moved` hears of each step's bytes.
    ///
    /// # Errors
    /// The file cannot be read or has changed, or `out` does not take it.
    pub fn file(&mut self, name: &str, file: &File, moved: &mut dyn FnMut(u64)) -> Result<(), Error> {
        let sum = write_file(&mut self.out, name, file, moved)?;
        self.sums.members.push(sum);
        Ok(())
    }

    /// Adds a member of bytes.
    ///
    /// # Errors
    /// `out` does not take it.
    pub fn bytes(&mut self, name: &str, mut bytes: &[u8]) -> Result<(), Error> {
        self.stream(name, bytes.len() as u64, |out| io::copy(&mut bytes, out).map(drop))
    }

    /// Adds a member of `size` bytes, which `write` writes.
    ///
    /// # Errors
    /// `write` fails, or writes more or less, or `out` does not take it.
    pub fn stream(
        &mut self,
        name: &str,
        size: u64,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), Error> {
        let described = Described {
            name: name.to_owned(),
            packed: size,
            sparse: None,
        };
        self.member(&described, write)
    }

    /// Adds what a reader has of one.
    pub(crate) fn member(
        &mut self,
        described: &Described,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), Error> {
        let sum = write_member(&mut self.out, described, write)?;
        self.sums.members.push(sum);
        Ok(())
    }

    /// Says what all of it was; what it was written to.
    ///
    /// # Errors
    /// `out` does not take it.
    pub fn finish(mut self) -> Result<W, Error> {
        let sums = json(&self.sums)?;
        self.bytes(SUMS, &sums)?;
        finish(self.out)
    }
}

/// Writes a file as a blob: an export's form with this one member and nothing else.
///
/// # Errors
/// The file cannot be read or has changed, or `out` does not take it.
pub fn write_blob<W: Write>(out: W, name: &str, file: &File, moved: &mut dyn FnMut(u64)) -> Result<W, Error> {
    let mut out = encoder(out)?;
    write_file(&mut out, name, file, moved)?;
    finish(out)
}

/// The same of what a reader has.
pub(crate) fn write_blob_of<W: Write>(
    out: W,
    described: &Described,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<W, Error> {
    let mut out = encoder(out)?;
    write_member(&mut out, described, write)?;
    finish(out)
}

fn encoder<W: Write>(out: W) -> Result<Encoder<'static, W>, Error> {
    let mut encoder = Encoder::new(out, LEVEL).map_err(Error::Stream)?;
    encoder.include_checksum(true).map_err(Error::Stream)?;
    Ok(encoder)
}

/// The archive's end, and zstd's.
fn finish<W: Write>(mut out: Encoder<'static, W>) -> Result<W, Error> {
    let ended = out.write_all(&[0; 2 * BLOCK]).and_then(|()| out.finish());
    let mut out = ended.map_err(Error::Stream)?;
    out.flush().map_err(Error::Stream)?;
    Ok(out)
}

fn json(value: &impl serde::Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(value).map_err(|error| Error::Stream(error.into()))
}

fn write_member<W: Write>(
    out: &mut Encoder<'static, W>,
    described: &Described,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<Sum, Error> {
    head::write(out, described).map_err(Error::Stream)?;
    let mut hashed = Hashed {
        out,
        hash: Sha256::new(),
        left: described.packed,
    };
    write(&mut hashed).map_err(Error::Stream)?;
    if hashed.left != 0 {
        let short = format!("{} is {} bytes short", described.name, hashed.left);
        return Err(Error::Stream(io::Error::other(short)));
    }
    let hash = hashed.hash;
    head::pad(out, described.packed).map_err(Error::Stream)?;
    Ok(Sum {
        name: described.name.clone(),
        bytes: described.packed,
        sha256: hex::encode(hash.finalize()),
    })
}

fn write_file<W: Write>(
    out: &mut Encoder<'static, W>,
    name: &str,
    file: &File,
    moved: &mut dyn FnMut(u64),
) -> Result<Sum, Error> {
    let failed = || Error::file("reading", name);
    let size = file.metadata().map_err(failed())?.len();
    let parts = sparse::parts(file, size, MOST_PARTS).map_err(failed())?;
    let data: u64 = parts.iter().map(|part| part.length).sum();
    // A file without holes needs no map.
    let map = if data == size { Vec::new() } else { sparse::map(&parts) };
    let described = Described {
        name: name.to_owned(),
        packed: map.len() as u64 + data,
        sparse: (data != size).then_some(size),
    };
    let mut unreadable = None;
    let sum = write_member(out, &described, |out| {
        out.write_all(&map)?;
        let mut buffer = vec![0; CHUNK];
        parts.iter().try_for_each(|part| {
            copy_part(file, *part, &mut buffer, &mut |bytes| {
                moved(bytes.len() as u64);
                out.write_all(bytes)
            })
            .map_err(|error| match error {
                Copying::Read(error) => {
                    unreadable = Some(error);
                    io::ErrorKind::Other.into()
                }
                Copying::Write(error) => error,
            })
        })
    });
    match unreadable {
        Some(error) => Err(failed()(error)),
        None => sum,
    }
}

/// Which side failed.
enum Copying {
    Read(io::Error),
    Write(io::Error),
}

fn copy_part(
    file: &File,
    part: Part,
    buffer: &mut [u8],
    write: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> Result<(), Copying> {
    let (mut at, mut left) = (part.offset, part.length);
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let space = buffer.get_mut(..most).unwrap_or_default();
        let got = match file.read_at(space, at) {
            Ok(0) => return Err(Copying::Read(io::Error::other("it has become shorter meanwhile"))),
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Copying::Read(error)),
        };
        write(space.get(..got).unwrap_or_default()).map_err(Copying::Write)?;
        at += got as u64;
        left -= got as u64;
    }
    Ok(())
}

/// Hashes what passes, and lets no more pass than was announced.
struct Hashed<'o, W: Write> {
    out: &'o mut Encoder<'static, W>,
    hash: Sha256,
    left: u64,
}

impl<W: Write> Write for Hashed<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        let left = self.left.checked_sub(written as u64);
        self.left = left.ok_or_else(|| io::Error::other("a member is longer than was said"))?;
        self.hash.update(bytes.get(..written).unwrap_or_default());
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// All of a reader, into a writer.
pub(crate) fn pass(from: &mut impl Read, to: &mut dyn Write) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(got) => to.write_all(buffer.get(..got).unwrap_or_default())?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
    }
}
