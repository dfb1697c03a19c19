//! The headers of members: ustar, with a pax header before each sparse file (GNU tar manual, "PAX Format, Versions 1.0"). What
//! nobody needs has no form here: links, directories, owners and times.

use std::io::{self, Read, Write};

use tar::{EntryType, Header};

use crate::Error;

/// The unit of a tar archive.
pub(crate) const BLOCK: usize = 512;

/// Four short records; more is no header of ours.
const MOST_PAX: u64 = 4096;

/// The longest name.
const MOST_NAME: usize = 64;

/// Where GNU tar puts the file when it does not know the pax header.
const SPARSE_DIRECTORY: &str = "GNUSparseFile.0";

/// What stands before a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) name: String,
    /// Bytes in the archive.
    pub(crate) packed: u64,
    /// The file's own size, if a map comes before its data.
    pub(crate) sparse: Option<u64>,
}

/// A name that is a file's and nothing else's.
pub(crate) fn is_name(name: &str) -> bool {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase());
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b".-".contains(&byte);
    first && name.len() <= MOST_NAME && name.bytes().all(is_plain)
}

/// Bytes up to the next block.
pub(crate) fn padding(length: u64) -> usize {
    let over = usize::try_from(length % BLOCK as u64).unwrap_or(0);
    (BLOCK - over) % BLOCK
}

pub(crate) fn write(out: &mut impl Write, described: &Described) -> io::Result<()> {
    let Some(size) = described.sparse else {
        return block(out, &described.name, EntryType::Regular, described.packed);
    };
    let records: String = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", &described.name),
        ("GNU.sparse.realsize", &size.to_string()),
    ]
    .iter()
    .map(|(key, value)| record(key, value))
    .collect();
    let length = records.len() as u64;
    let name = format!("PaxHeaders/{}", described.name);
    block(out, &name, EntryType::XHeader, length)?;
    out.write_all(records.as_bytes())?;
    pad(out, length)?;
    let name = format!("{SPARSE_DIRECTORY}/{}", described.name);
    block(out, &name, EntryType::Regular, described.packed)
}

pub(crate) fn pad(out: &mut impl Write, length: u64) -> io::Result<()> {
    out.write_all([0; BLOCK].get(..padding(length)).unwrap_or_default())
}

/// Nobody's file without a time: the same members give the same bytes.
fn block(out: &mut impl Write, name: &str, kind: EntryType, size: u64) -> io::Result<()> {
    let mut header = Header::new_ustar();
    header.set_path(name)?;
    header.set_entry_type(kind);
    header.set_mode(0o600);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header.set_cksum();
    out.write_all(header.as_bytes())
}

/// `LENGTH KEY=VALUE\n`, where LENGTH counts its own digits, too.
fn record(key: &str, value: &str) -> String {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    format!("{length} {key}={value}\n")
}

/// The next header; `None` at the archive's end, whose first block has been read then.
pub(crate) fn read(input: &mut impl Read) -> Result<Option<Described>, Error> {
    let Some((name, kind, size)) = read_block(input)? else {
        return Ok(None);
    };
    let described = match kind {
        EntryType::Regular => Described {
            name,
            packed: size,
            sparse: None,
        },
        EntryType::XHeader => {
            let (name, real) = read_records(input, size)?;
            match read_block(input)? {
                Some((_, EntryType::Regular, packed)) => Described {
                    name,
                    packed,
                    sparse: Some(real),
                },
                _ => return Err(Error::damaged("a sparse file's header describes no file")),
            }
        }
        other => {
            let kind = other.as_byte();
            return Err(Error::damaged(format!(
                "a member of kind {kind:#x}, which no export has"
            )));
        }
    };
    if !is_name(&described.name) {
        return Err(Error::damaged("a member with a name that no export has"));
    }
    Ok(Some(described))
}

fn read_block(input: &mut impl Read) -> Result<Option<(String, EntryType, u64)>, Error> {
    let mut bytes = [0; BLOCK];
    input.read_exact(&mut bytes).map_err(Error::decoding)?;
    if bytes == [0; BLOCK] {
        return Ok(None);
    }
    let header = Header::from_byte_slice(&bytes);
    // The checksum's own field counts as eight spaces.
    let (before, after) = (&bytes[..148], &bytes[156..]);
    let sum: u32 = before.iter().chain(after).map(|&byte| u32::from(byte)).sum::<u32>() + 8 * u32::from(b' ');
    if header.as_ustar().is_none() || header.cksum().ok() != Some(sum) {
        return Err(Error::damaged("a header is none"));
    }
    let name = String::from_utf8_lossy(&header.path_bytes()).into_owned();
    let size = header.entry_size().map_err(|_| Error::damaged("a size is no number"))?;
    Ok(Some((name, header.entry_type(), size)))
}

/// The name and the size that a pax header tells of a sparse file.
fn read_records(input: &mut impl Read, size: u64) -> Result<(String, u64), Error> {
    let bad = || Error::damaged("a sparse file's header is not of version 1.0");
    if size > MOST_PAX {
        return Err(bad());
    }
    let mut text = vec![0; usize::try_from(size).unwrap_or(0)];
    input.read_exact(&mut text).map_err(Error::decoding)?;
    skip_padding(input, size)?;
    let text = String::from_utf8(text).map_err(|_| bad())?;
    let (mut version, mut name, mut real) = ((None, None), None, None);
    for line in text.lines() {
        let (length, rest) = line.split_once(' ').ok_or_else(bad)?;
        if length.parse() != Ok(line.len() + 1) {
            return Err(bad());
        }
        match rest.split_once('=').ok_or_else(bad)? {
            ("GNU.sparse.major", value) => version.0 = Some(value),
            ("GNU.sparse.minor", value) => version.1 = Some(value),
            ("GNU.sparse.name", value) => name = Some(value),
            ("GNU.sparse.realsize", value) => real = value.parse().ok(),
            _ => return Err(bad()),
        }
    }
    match (version, name, real) {
        ((Some("1"), Some("0")), Some(name), Some(real)) => Ok((name.to_owned(), real)),
        _ => Err(bad()),
    }
}

pub(crate) fn skip_padding(input: &mut impl Read, length: u64) -> Result<(), Error> {
    let mut block = [0; BLOCK];
    let space = block.get_mut(..padding(length)).unwrap_or_default();
    input.read_exact(space).map_err(Error::decoding)?;
    match space.iter().all(|&byte| byte == 0) {
        true => Ok(()),
        false => Err(Error::damaged("there is something between two members")),
    }
}
