//! Checksums of a sparse file, chunk by chunk, kept in a small file beside it: which part of a large file is damaged is found without
//! a second copy of it. They find damage, not malice. Knows neither what is in the file nor where either of the two is kept.
//!
//! All numbers are little-endian. Chunks that are in no run hold nothing but zeroes, as holes do.
//!
//! ```text
//!   0  8  "BSLTSUMS"                    24   8  number of runs
//!   8  4  format                        32   8  number of chunks in all runs
//!  12  4  bytes of a chunk              40  16  each run: its first chunk, 8, and how many, 8
//!  16  8  bytes of the file             ...  4  each chunk of the runs: its CRC-32
//!                                       end  4  CRC-32 of everything before
//! ```

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use base::sparse::blocks_with_data;

use crate::StateError;

const MAGIC: &[u8; 8] = b"BSLTSUMS";

/// The version of the format.
pub const SUMS_FORMAT: u32 = 1;

/// Bytes of a chunk: small enough to name what is damaged, and large enough for the sums to be a sixteen-thousandth of the file.
pub const CHUNK: u64 = CHUNK_BYTES as u64;
const CHUNK_BYTES: u32 = 64 << 10;

/// What is read at a time.
const PIECE: u64 = PIECE_BYTES as u64;
const PIECE_BYTES: usize = 1 << 20;

const HEADER: usize = 40;
const RUN: usize = 16;
const CRC: usize = 4;

/// What a file held when it was summed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// Bytes of the file.
    bytes: u64,
    /// Chunks with content that follow each other, by rising numbers: the first one, and how many.
    runs: Vec<(u64, u64)>,
    /// CRC-32 of each of them.
    sums: Vec<u32>,
}

/// A file as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// What it holds, as far as it can be read.
    pub sums: Sums,
    /// Bytes that the disk does not give (EIO).
    pub unreadable: Vec<Range<u64>>,
}

/// How a file differs from what was summed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// It is longer or shorter.
    Length {
        /// Bytes that it had.
        summed: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// These bytes, whole chunks, are others.
    Content(Range<u64>),
    /// The disk does not give these bytes.
    Unreadable(Range<u64>),
}

impl Sums {
    /// How many bytes have content, in whole chunks.
    pub fn content(&self) -> u64 {
        self.sums.len() as u64 * CHUNK
    }

    /// Adds a chunk behind all others.
    fn add(&mut self, chunk: u64, bytes: &[u8]) {
        if is_zero(bytes) {
            return;
        }
        match self.runs.last_mut() {
            Some((first, count)) if *first + *count == chunk => *count += 1,
            _ => self.runs.push((chunk, 1)),
        }
        self.sums.push(crc32fast::hash(bytes));
    }

    /// Each chunk with content, and its sum.
    fn chunks(&self) -> impl Iterator<Item = (u64, u32)> {
        let numbers = self.runs.iter().flat_map(|&(first, count)| first..first + count);
        numbers.zip(self.sums.iter().copied())
    }

    /// As they are kept.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.runs.len() * RUN + self.sums.len() * CRC + CRC);
        bytes.extend(MAGIC);
        bytes.extend(SUMS_FORMAT.to_le_bytes());
        bytes.extend(CHUNK_BYTES.to_le_bytes());
        for number in [self.bytes, self.runs.len() as u64, self.sums.len() as u64] {
            bytes.extend(number.to_le_bytes());
        }
        for (first, count) in &self.runs {
            bytes.extend(first.to_le_bytes());
            bytes.extend(count.to_le_bytes());
        }
        bytes.extend(self.sums.iter().flat_map(|sum| sum.to_le_bytes()));
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    /// Reads what [`Sums::to_bytes`] wrote.
    ///
    /// # Errors
    /// They are no sums, of a later format, or damaged.
    pub fn parse(bytes: &[u8]) -> Result<Self, StateError> {
        let wrong = |why| StateError::Sums { why };
        let (body, sum) = bytes.split_last_chunk::<CRC>().ok_or(wrong("it is too short"))?;
        if !body.starts_with(MAGIC) {
            return Err(wrong("it does not begin as one"));
        }
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return Err(wrong("its own checksum differs"));
        }
        let (header, rest) = body.split_at_checked(HEADER).ok_or(wrong("it is too short"))?;
        let small = |at: usize| header[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        let large = |at: usize| header[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if small(8) != SUMS_FORMAT || u64::from(small(12)) != CHUNK {
            return Err(StateError::Version {
                kind: "checksums".to_owned(),
                found: small(8),
                known: SUMS_FORMAT,
            });
        }
        let contradiction = || wrong("its numbers contradict each other");
        let count = |at: usize, size: usize| {
            let count = usize::try_from(large(at)).ok()?;
            Some((count, count.checked_mul(size)?))
        };
        let (_, in_runs) = count(24, RUN).ok_or_else(contradiction)?;
        let (chunks, in_sums) = count(32, CRC).ok_or_else(contradiction)?;
        let (runs, sums) = rest.split_at_checked(in_runs).ok_or_else(contradiction)?;
        if sums.len() != in_sums {
            return Err(contradiction());
        }
        let bytes = large(16);
        let (mut end, mut all, mut read) = (0, 0, Vec::new());
        for run in runs.as_chunks::<8>().0.chunks_exact(2) {
            let [first, count] = [u64::from_le_bytes(run[0]), u64::from_le_bytes(run[1])];
            let last = first.checked_add(count).filter(|last| *last <= bytes.div_ceil(CHUNK));
            match last {
                Some(last) if count > 0 && first >= end => end = last,
                _ => return Err(contradiction()),
            }
            all += count;
            read.push((first, count));
        }
        if all != chunks as u64 {
            return Err(contradiction());
        }
        Ok(Self {
            bytes,
            runs: read,
            sums: sums
                .as_chunks::<CRC>()
                .0
                .iter()
                .map(|sum| u32::from_le_bytes(*sum))
                .collect(),
        })
    }

    /// How a file differs from what was summed, by rising offsets. Where its length does, only what both have is compared.
    pub fn differences(&self, found: &Scan) -> Vec<Difference> {
        let mut differences = Vec::new();
        let mut whole = u64::MAX;
        if found.sums.bytes != self.bytes {
            differences.push(Difference::Length {
                summed: self.bytes,
                found: found.sums.bytes,
            });
            // The last chunk of the shorter one is another one in the longer.
            whole = self.bytes.min(found.sums.bytes) / CHUNK;
        }
        let mut others: Vec<Range<u64>> = Vec::new();
        let bytes = self.bytes.min(found.sums.bytes);
        let mut note = |chunk: u64| {
            let range = chunk * CHUNK..((chunk + 1) * CHUNK).min(bytes);
            let is_unreadable = found.unreadable.iter().any(|no| no.contains(&range.start));
            if chunk >= whole || is_unreadable {
                return;
            }
            match others.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => others.push(range),
            }
        };
        let (mut were, mut are) = (self.chunks().peekable(), found.sums.chunks().peekable());
        loop {
            match (were.peek().copied(), are.peek().copied()) {
                (Some((was, before)), Some((is, now))) if was == is => {
                    if before != now {
                        note(was);
                    }
                    were.next();
                    are.next();
                }
                (Some((was, _)), is) if is.is_none_or(|(is, _)| was < is) => {
                    note(was);
                    were.next();
                }
                (_, Some((is, _))) => {
                    note(is);
                    are.next();
                }
                (_, None) => break,
            }
        }
        differences.extend(others.into_iter().map(Difference::Content));
        differences.extend(found.unreadable.iter().cloned().map(Difference::Unreadable));
        differences
    }
}

impl Scan {
    /// Reads a file; holes are not read. `each` is told of bytes that were read, and ends it by an error.
    ///
    /// # Errors
    /// The file cannot be read, but for parts that the disk does not give; or the one of `each`.
    pub fn of(file: &File, each: &mut dyn FnMut(u64) -> io::Result<()>) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let mut scan = Self::default();
        scan.sums.bytes = length;
        let mut buffer = vec![0; PIECE_BYTES];
        for run in blocks_with_data(file, 0..length, PIECE)? {
            for start in run.clone().step_by(PIECE_BYTES) {
                let end = (start + PIECE).min(run.end);
                let bytes = usize::try_from(end - start).unwrap_or(PIECE_BYTES);
                scan.piece(file, start, &mut buffer[..bytes])?;
                each(end - start)?;
            }
        }
        Ok(scan)
    }

    fn piece(&mut self, file: &File, start: u64, piece: &mut [u8]) -> io::Result<()> {
        let whole = file.read_exact_at(piece, start);
        for (chunk, bytes) in (start / CHUNK..).zip(piece.chunks_mut(CHUNK_BYTES as usize)) {
            let at = chunk * CHUNK;
            let read = match &whole {
                Ok(()) => Ok(()),
                Err(_) => file.read_exact_at(bytes, at),
            };
            match read {
                Ok(()) => self.sums.add(chunk, bytes),
                Err(error) if error.raw_os_error() == Some(EIO) => {
                    self.unreadable.push(at..at + bytes.len() as u64);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Input/output error (errno(3)): what a read of a bad sector gives.
const EIO: i32 = 5;

/// Sixteen bytes at a time: most chunks of a guest's memory are empty.
fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom};

    use super::*;

    const GOLDEN: &[u8] = include_bytes!("../golden/checksums-v1.bin");

    /// Data in the chunks 0, 1, 5 and in the last one, which is short.
    fn file() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(40 * CHUNK + 100).unwrap();
        for chunk in [0, 1, 5, 40] {
            file.write_all_at(format!("in chunk {chunk}").as_bytes(), chunk * CHUNK + 7)
                .unwrap();
        }
        file
    }

    fn scan(file: &File) -> Scan {
        Scan::of(file, &mut |_| Ok(())).unwrap()
    }

    #[test]
    fn sums_are_kept_as_they_always_were() {
        let sums = scan(&file()).sums;
        assert_eq!(sums.runs, [(0, 2), (5, 1), (40, 1)]);
        assert_eq!(sums.to_bytes(), GOLDEN);
        assert_eq!(Sums::parse(GOLDEN).unwrap(), sums);
        assert_eq!(sums.differences(&scan(&file())), []);
        assert_eq!(sums.content(), 4 * CHUNK);
    }

    #[test]
    fn every_kind_of_damage_is_found_where_it_is() {
        let sums = scan(&file()).sums;
        let found = |damage: &dyn Fn(&File)| {
            let file = file();
            damage(&file);
            sums.differences(&scan(&file))
        };
        let flip = |file: &File, at: u64| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
        };
        let of = |chunk: u64| Difference::Content(chunk * CHUNK..(chunk + 1) * CHUNK);
        // A bit in data, in zeroes beside data, and in a hole.
        assert_eq!(found(&|file| flip(file, CHUNK + 8)), [of(1)]);
        assert_eq!(found(&|file| flip(file, 6 * CHUNK - 1)), [of(5)]);
        assert_eq!(found(&|file| flip(file, 20 * CHUNK)), [of(20)]);
        assert_eq!(
            found(&|file| flip(file, 40 * CHUNK + 99)),
            [Difference::Content(40 * CHUNK..40 * CHUNK + 100)]
        );
        // What follows each other is one part.
        let both = |file: &File| {
            flip(file, 1);
            flip(file, CHUNK + 1);
            flip(file, 5 * CHUNK);
        };
        assert_eq!(found(&both), [Difference::Content(0..2 * CHUNK), of(5)]);
        // A hole where data was; zeroes that were written are none.
        assert_eq!(
            found(&|file| file.write_all_at(&vec![0; CHUNK_BYTES as usize], 5 * CHUNK).unwrap()),
            [of(5)]
        );
        assert_eq!(found(&|file| file.write_all_at(&[0; 4096], 30 * CHUNK).unwrap()), []);
        let length = |found| Difference::Length {
            summed: 40 * CHUNK + 100,
            found,
        };
        assert_eq!(
            found(&|file| file.set_len(40 * CHUNK + 50).unwrap()),
            [length(40 * CHUNK + 50)]
        );
        assert_eq!(found(&|file| file.set_len(5 * CHUNK).unwrap()), [length(5 * CHUNK)]);
        assert_eq!(found(&|file| file.set_len(50 * CHUNK).unwrap()), [length(50 * CHUNK)]);
        assert_eq!(found(&|file| file.set_len(0).unwrap()), [length(0)]);
    }

    #[test]
    fn what_the_disk_does_not_give_is_named_once() {
        let sums = scan(&file()).sums;
        let mut now = scan(&file());
        now.sums.runs = vec![(0, 2), (40, 1)];
        now.sums.sums.remove(2);
        now.unreadable.push(5 * CHUNK..6 * CHUNK);
        assert_eq!(sums.differences(&now), [Difference::Unreadable(5 * CHUNK..6 * CHUNK)]);
    }

    #[test]
    fn whoever_waits_is_told_and_can_end_it() {
        let mut file = file();
        file.seek(SeekFrom::Start(3)).unwrap();
        let mut read = Vec::new();
        let full = Scan::of(&file, &mut |bytes| {
            read.push(bytes);
            Ok(())
        });
        full.unwrap();
        assert_eq!(read, [PIECE, PIECE / 2 + 100]);
        Scan::of(&file, &mut |_| Err(io::ErrorKind::Interrupted.into())).unwrap_err();
    }

    #[test]
    fn damaged_sums_are_no_sums() {
        for at in 0..GOLDEN.len() {
            let mut damaged = GOLDEN.to_vec();
            damaged[at] ^= 0x01;
            Sums::parse(&damaged).unwrap_err();
            Sums::parse(&GOLDEN[..at]).unwrap_err();
        }
        // What somebody has made up with the right checksum.
        let made_up = |at: usize, value: u8| {
            let mut bytes = GOLDEN[..GOLDEN.len() - CRC].to_vec();
            bytes[at] = value;
            bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
            Sums::parse(&bytes).unwrap_err().to_string()
        };
        assert!(made_up(8, 2).contains("version 2"), "{}", made_up(8, 2));
        for (at, value) in [
            (16, 0),
            (18, 0),
            (24, 2),
            (31, 0xff),
            (32, 5),
            (48, 9),
            (56, 0),
            (56, 1),
            (79, 0xff),
        ] {
            assert!(made_up(at, value).contains("contradict"), "{at} {value}");
        }
    }
}
