//! Reads tar: ustar and v7 headers, PAX records (path, linkpath, size, uid, gid, mtime, SCHILY.xattr.*), GNU long
//! names and base-256 numbers. Names are bytes and are not looked at here.
//!
//! Formats: POSIX.1-2017 `pax`, "ustar Interchange Format" and "pax Extended Header"; GNU tar manual, "Basic Tar Format".
//! It is ours, not a crate's, because every length in it is an allegation that must meet a limit before memory is
//! taken for it, and because contents are wanted by position. Sparse files are refused: no image tool writes them.

use std::collections::BTreeMap;

use crate::stream::Stream;
use crate::{Error, Limits};

/// Size of a header, and what contents are padded to.
const BLOCK: usize = 512;
const SCHILY_XATTR: &[u8] = b"SCHILY.xattr.";

/// What an entry is: the header's `typeflag`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    HardLink,
    Symlink,
    Char,
    Block,
    Directory,
    Fifo,
    Other(u8),
}

/// One entry; contents follow it in the stream.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: i64,
    pub(crate) mtime_nsec: u32,
    pub(crate) size: u64,
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// What PAX records and GNU headers say about the entry after them.
#[derive(Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    xattr_bytes: u64,
}

/// Entries of a tar, one after the other.
pub(crate) struct Reader<'a, S> {
    stream: &'a mut S,
    limits: &'a Limits,
    /// Contents of the current entry not yet read, and the padding after them.
    left: u64,
    padding: u64,
    /// Where the current header starts.
    header_at: u64,
}

impl<'a, S: Stream> Reader<'a, S> {
    pub(crate) fn new(stream: &'a mut S, limits: &'a Limits) -> Self {
        Self {
            stream,
            limits,
            left: 0,
            padding: 0,
            header_at: 0,
        }
    }

    /// Where in the stream the current entry's contents begin, if nothing of them has been read.
    pub(crate) fn position(&self) -> u64 {
        self.stream.position()
    }

    /// Reads some of the current entry's contents; 0 at their end.
    pub(crate) fn read(&mut self, buf: &mut [u8]) -> Result<usize, Error> {
        let want = usize::try_from(self.left).unwrap_or(usize::MAX).min(buf.len());
        let got = self.stream.fill(&mut buf[..want])?;
        self.left -= got as u64;
        if got < want {
            Err(self.stream.truncated(self.left))
        } else {
            Ok(got)
        }
    }

    /// The next entry. The end is two zero blocks, or the end of the stream between entries, as other readers have it.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, Error> {
        let mut extension = Extension::default();
        loop {
            self.stream.skip(self.left + self.padding)?;
            self.set_left(0);
            self.header_at = self.stream.position();
            let mut header = [0; BLOCK];
            match self.stream.fill(&mut header)? {
                0 => return Ok(None),
                BLOCK => {}
                got => return Err(self.stream.truncated((BLOCK - got) as u64)),
            }
            if header == [0; BLOCK] {
                return Ok(None);
            }
            self.check_sum(&header)?;
            let size = self.number(&header[124..136], "size")?;
            match header[156] {
                b'x' => {
                    let records = self.document(size)?;
                    self.pax(&records, &mut extension)?;
                }
                b'g' => {
                    self.document(size)?;
                }
                b'L' => extension.path = Some(until_nul(&self.document(size)?).to_vec()),
                b'K' => extension.link = Some(until_nul(&self.document(size)?).to_vec()),
                b'S' => return Err(self.bad("a sparse file, which is not supported")),
                _ => return self.entry(&header, size, extension).map(Some),
            }
        }
    }

    fn entry(&mut self, header: &[u8; BLOCK], size: u64, extension: Extension) -> Result<Entry, Error> {
        let path = extension.path.unwrap_or_else(|| header_path(header));
        let kind = match header[156] {
            // Before ustar a directory was a file whose name ends in a slash.
            0 | b'0' | b'7' if path.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::Char,
            b'4' => Kind::Block,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            other => Kind::Other(other),
        };
        // Types 1 to 6 have no contents whatever their size field says.
        let size = match kind {
            Kind::File | Kind::Other(_) => extension.size.unwrap_or(size),
            _ => 0,
        };
        let (mtime, mtime_nsec) = match extension.mtime {
            Some(time) => time,
            None => (self.signed(&header[136..148], "mtime")?, 0),
        };
        let devices = matches!(kind, Kind::Char | Kind::Block);
        let device = |range: std::ops::Range<usize>, field| {
            if devices {
                self.number32(&header[range], field)
            } else {
                Ok(0)
            }
        };
        let entry = Entry {
            kind,
            link: extension.link.unwrap_or_else(|| until_nul(&header[157..257]).to_vec()),
            mode: self.number32(&header[100..108], "mode")?,
            uid: extension
                .uid
                .map_or_else(|| self.number32(&header[108..116], "uid"), Ok)?,
            gid: extension
                .gid
                .map_or_else(|| self.number32(&header[116..124], "gid"), Ok)?,
            mtime,
            mtime_nsec,
            size,
            major: device(329..337, "devmajor")?,
            minor: device(337..345, "devminor")?,
            xattrs: extension.xattrs,
            path,
        };
        for name in [&entry.path, &entry.link] {
            Limits::check(
                || format!("the length of {:?}", Error::show(name)),
                name.len() as u64,
                self.limits.path,
            )?;
        }
        self.set_left(size);
        Ok(entry)
    }

    fn set_left(&mut self, size: u64) {
        self.left = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
    }

    /// Contents that the reader itself needs.
    fn document(&mut self, size: u64) -> Result<Vec<u8>, Error> {
        let what = || format!("the size of an extended header in {}", self.stream.what());
        Limits::check(what, size, self.limits.document)?;
        let mut contents = vec![0; usize::try_from(size).map_err(|_| self.bad("an extended header's size"))?];
        self.stream.exact(&mut contents)?;
        self.set_left(size);
        self.left = 0;
        Ok(contents)
    }

    /// PAX records: `LENGTH KEY=VALUE\n`, where LENGTH counts the whole record.
    fn pax(&self, mut records: &[u8], extension: &mut Extension) -> Result<(), Error> {
        while !records.is_empty() {
            let bad = || self.bad("a PAX record's length");
            let space = records.iter().take(20).position(|&byte| byte == b' ').ok_or_else(bad)?;
            let len: usize = parse(&records[..space]).ok_or_else(bad)?;
            if len <= space + 1 || len > records.len() || records[len - 1] != b'\n' {
                return Err(bad());
            }
            let record = &records[space + 1..len - 1];
            let equals = record
                .iter()
                .position(|&byte| byte == b'=')
                .ok_or_else(|| self.bad("a PAX record's key"))?;
            self.record(&record[..equals], &record[equals + 1..], extension)?;
            records = &records[len..];
        }
        Ok(())
    }

    fn record(&self, key: &[u8], value: &[u8], extension: &mut Extension) -> Result<(), Error> {
        // An empty value takes the record back (POSIX); of an attribute it is an empty attribute.
        let given = !value.is_empty();
        match key {
            b"path" => extension.path = given.then(|| value.to_vec()),
            b"linkpath" => extension.link = given.then(|| value.to_vec()),
            b"size" => extension.size = self.pax_number(value, "size")?,
            b"uid" => extension.uid = self.pax_number(value, "uid")?,
            b"gid" => extension.gid = self.pax_number(value, "gid")?,
            b"mtime" if !given => extension.mtime = None,
            b"mtime" => extension.mtime = Some(pax_time(value).ok_or_else(|| self.bad("a PAX mtime"))?),
            _ if key.starts_with(b"GNU.sparse.") => return Err(self.bad("a sparse file, which is not supported")),
            _ => {
                if let Some(name) = key.strip_prefix(SCHILY_XATTR) {
                    self.xattr(name, value, extension)?;
                }
            }
        }
        Ok(())
    }

    fn xattr(&self, name: &[u8], value: &[u8], extension: &mut Extension) -> Result<(), Error> {
        let what = || format!("the length of the extended attribute {:?}", Error::show(name));
        Limits::check(what, value.len() as u64, self.limits.xattr_value)?;
        extension.xattr_bytes += (name.len() + value.len()) as u64;
        let what = || {
            format!(
                "the length of all extended attributes of one file in {}",
                self.stream.what()
            )
        };
        Limits::check(what, extension.xattr_bytes, self.limits.xattrs)?;
        extension.xattrs.insert(name.to_vec(), value.to_vec());
        Ok(())
    }

    fn pax_number<T: std::str::FromStr>(&self, value: &[u8], field: &str) -> Result<Option<T>, Error> {
        if value.is_empty() {
            return Ok(None);
        }
        parse(value)
            .map(Some)
            .ok_or_else(|| self.bad(&format!("a PAX {field} of {:?}", Error::show(value))))
    }

    /// The sum of the header's bytes with the checksum field as blanks. Some old writers summed signed bytes.
    fn check_sum(&self, header: &[u8; BLOCK]) -> Result<(), Error> {
        let stated = self.number(&header[148..156], "checksum")?;
        let bytes = || {
            header
                .iter()
                .enumerate()
                .map(|(at, &byte)| if (148..156).contains(&at) { b' ' } else { byte })
        };
        let unsigned: u64 = bytes().map(u64::from).sum();
        let signed: i64 = bytes().map(|byte| i64::from(byte.cast_signed())).sum();
        if stated == unsigned || i64::try_from(stated) == Ok(signed) {
            return Ok(());
        }
        Err(self.bad(&format!("checksum {stated}, but its bytes sum to {unsigned}")))
    }

    fn number(&self, field: &[u8], name: &str) -> Result<u64, Error> {
        let signed = self.signed(field, name)?;
        u64::try_from(signed).map_err(|_| self.bad(&format!("a negative {name} of {signed}")))
    }

    fn number32(&self, field: &[u8], name: &str) -> Result<u32, Error> {
        let value = self.number(field, name)?;
        u32::try_from(value).map_err(|_| self.bad(&format!("{name} {value}, which is over 32 bits")))
    }

    fn signed(&self, field: &[u8], name: &str) -> Result<i64, Error> {
        number(field).ok_or_else(|| self.bad(&format!("{name} {:?}", Error::show(field))))
    }

    fn bad(&self, problem: &str) -> Error {
        Error::BadTar {
            what: self.stream.what().to_owned(),
            at: self.header_at,
            problem: problem.to_owned(),
        }
    }
}

/// A number field: octal digits between blanks and NULs, or GNU's base-256 (first bit set, two's complement).
fn number(field: &[u8]) -> Option<i64> {
    if field[0] & 0x80 != 0 {
        // 0x80 starts a positive number and 0xff a negative one.
        let negative = field[0] & 0x40 != 0;
        let first = i128::from(field[0] & 0x7f) - if negative { 0x80 } else { 0 };
        let value = field[1..].iter().try_fold(first, |value, &byte| {
            value.checked_mul(256).map(|value| value + i128::from(byte))
        })?;
        return i64::try_from(value).ok();
    }
    let digits = until_nul(field).trim_ascii();
    digits.iter().try_fold(0i64, |value, &digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(digit - b'0')),
        _ => None,
    })
}

/// ustar splits a long name at a slash into `prefix` and `name`. GNU's own format ("ustar  ") uses the field otherwise.
fn header_path(header: &[u8; BLOCK]) -> Vec<u8> {
    let name = until_nul(&header[..100]);
    let prefix = until_nul(&header[345..500]);
    if &header[257..263] == b"ustar\0" && !prefix.is_empty() {
        [prefix, b"/", name].concat()
    } else {
        name.to_vec()
    }
}

/// Seconds and nanoseconds of a decimal number of seconds; nanoseconds count forward also before 1970.
fn pax_time(value: &[u8]) -> Option<(i64, u32)> {
    let (negative, value) = match value.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, value),
    };
    let dot = value.iter().position(|&byte| byte == b'.').unwrap_or(value.len());
    let seconds: i64 = parse(&value[..dot])?;
    let fraction = value.get(dot + 1..).unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digits = fraction.iter().copied().chain(std::iter::repeat(b'0')).take(9);
    let nanos = digits.fold(0u32, |nanos, digit| nanos * 10 + u32::from(digit - b'0'));
    match (negative, nanos) {
        (false, _) => Some((seconds, nanos)),
        (true, 0) => Some((-seconds, 0)),
        (true, _) => Some((-seconds - 1, 1_000_000_000 - nanos)),
    }
}

fn parse<T: std::str::FromStr>(digits: &[u8]) -> Option<T> {
    if digits.first()?.is_ascii_digit() {
        std::str::from_utf8(digits).ok()?.parse().ok()
    } else {
        None
    }
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_base_256() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"\0\0\0\0\0\0\0\0"), Some(0));
        assert_eq!(number(b"0000648\0"), None);
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]), Some(0x0102_0304));
        assert_eq!(number(&[0xff; 12]), Some(-1));
        assert_eq!(number(&[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), None);
    }

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        assert_eq!(pax_time(b"1700000000.25"), Some((1_700_000_000, 250_000_000)));
        assert_eq!(pax_time(b"-1.25"), Some((-2, 750_000_000)));
        assert_eq!(pax_time(b"-3"), Some((-3, 0)));
        assert_eq!(pax_time(b"7.1234567899"), Some((7, 123_456_789)));
        assert_eq!(pax_time(b"x"), None);
        assert_eq!(pax_time(b"1.x"), None);
    }
}
