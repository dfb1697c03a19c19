//! Reads a log that grows at its end while its beginning is freed (`base::FileBound`): a part of a sparse file, line by line, in constant
//! memory. Knows neither what the lines say nor who shows them.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

use anyhow::Result;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// Read at once.
const CHUNK: usize = 64 << 10;

/// A longer line is passed over. The agent writes a record for each piece that it reads, at most 64 KiB; a guest may write anything.
const MOST_LINE: usize = 1 << 20;

/// A log, and how far it has been read.
pub(crate) struct Reader {
    file: File,
    at: u64,
    chunk: Vec<u8>,
    /// The beginning of a line whose end has not been read.
    partial: Vec<u8>,
    /// The line that is being read is passed over: it is too long, or its beginning is gone.
    skipping: bool,
}

impl Reader {
    pub(crate) fn new(file: File) -> Self {
        Self {
            file,
            at: 0,
            chunk: vec![0; CHUNK],
            partial: Vec::new(),
            skipping: false,
        }
    }

    /// Where the log ends now.
    pub(crate) fn end(&self) -> Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Goes on from here, where a line begins.
    pub(crate) fn go_to(&mut self, at: u64) {
        self.at = at;
        self.partial.clear();
        self.skipping = false;
    }

    /// Gives each line that ends before `end`, and where it begins.
    pub(crate) fn lines_until(&mut self, end: u64, line: &mut dyn FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        while let Some(got) = self.read_before(end)? {
            let mut begins = self.at - got as u64 - self.partial.len() as u64;
            let mut rest = &self.chunk[..got];
            while let Some(length) = rest.iter().position(|&byte| byte == b'\n') {
                let (piece, behind) = (&rest[..length], &rest[length + 1..]);
                let whole = (self.partial.len() + length) as u64;
                if !std::mem::take(&mut self.skipping) {
                    match self.partial.is_empty() {
                        true => line(begins, piece)?,
                        false => {
                            self.partial.extend_from_slice(piece);
                            line(begins, &self.partial)?;
                        }
                    }
                }
                self.partial.clear();
                begins += whole + 1;
                rest = behind;
            }
            if self.skipping || self.partial.len() + rest.len() > MOST_LINE {
                self.skipping = true;
                self.partial.clear();
            } else {
                self.partial.extend_from_slice(rest);
            }
        }
        Ok(())
    }

    /// Copies what there is before `end`.
    pub(crate) fn copy_until(&mut self, end: u64, out: &mut dyn Write) -> Result<()> {
        while let Some(got) = self.read_before(end)? {
            out.write_all(&self.chunk[..got])?;
        }
        Ok(out.flush()?)
    }

    /// Reads the next piece that is no hole; `None` where there is none before `end`.
    fn read_before(&mut self, end: u64) -> Result<Option<usize>> {
        // A file system without holes: the log has started anew (`base::FileBound`).
        if self.at > self.end()? {
            self.go_to(0);
        }
        let data = match seek(&self.file, SeekFrom::Data(self.at)) {
            // Nothing has been written, or nothing more.
            Err(Errno::NXIO) => return Ok(None),
            found => found?,
        };
        if data > self.at {
            // The end of a line whose beginning is gone.
            (self.at, self.skipping) = (data, true);
            self.partial.clear();
        }
        let most = usize::try_from(end.saturating_sub(self.at)).map_or(CHUNK, |left| left.min(CHUNK));
        let got = self.file.read_at(&mut self.chunk[..most], self.at)?;
        self.at += got as u64;
        Ok((got > 0).then_some(got))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::FileBound;
    use rustix::fs::{FallocateFlags, fallocate};

    /// A log with this text, in which is to be written by the first and read by the second.
    fn log(text: &str) -> (File, Reader) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut file = File::options().append(true).create_new(true).open(&path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        (file, Reader::new(File::open(&path).unwrap()))
    }

    fn lines(reader: &mut Reader) -> Vec<String> {
        let mut found = Vec::new();
        let end = reader.end().unwrap();
        let mut take = |_, line: &[u8]| {
            found.push(String::from_utf8_lossy(line).into_owned());
            Ok(())
        };
        reader.lines_until(end, &mut take).unwrap();
        found
    }

    #[test]
    fn a_growing_log_is_read_line_by_line() {
        let (mut file, mut reader) = log("one\ntw");
        assert_eq!(lines(&mut reader), ["one"]);
        file.write_all(b"o\nthree\n").unwrap();
        assert_eq!(lines(&mut reader), ["two", "three"]);
    }

    #[test]
    fn a_log_that_grows_faster_than_it_is_read_has_an_end() {
        let (mut file, mut reader) = log("one\ntwo\nthr");
        let (end, mut found) = (reader.end().unwrap(), Vec::new());
        let mut take = |begins, _: &[u8]| {
            assert!(found.len() < 100, "it does not end");
            found.push(begins);
            Ok(file.write_all(&[b'\n'; 1000])?)
        };
        reader.lines_until(end, &mut take).unwrap();
        assert_eq!(found, [0, 4]);
        reader.go_to(4);
        assert_eq!(lines(&mut reader)[..2], ["two", "thr"]);
        let mut copied = Vec::new();
        reader.go_to(0);
        reader.copy_until(end, &mut copied).unwrap();
        assert_eq!(copied, b"one\ntwo\nthr");
    }

    #[test]
    fn what_was_freed_is_passed_over_with_the_rest_of_its_last_line() {
        let (mut file, mut reader) = log("");
        let mut bound = FileBound::new(1 << 20);
        for number in 0..40_000 {
            let line = format!("line {number:>93}\n");
            file.write_all(line.as_bytes()).unwrap();
            bound.wrote(&file, line.len() as u64).unwrap();
        }
        let found = lines(&mut reader);
        assert!((10_400..12_000).contains(&found.len()), "{} lines", found.len());
        assert!(found.iter().all(|line| line.len() == 98 && line.starts_with("line  ")));
        assert!(found.last().unwrap().ends_with(" 39999"));
        reader.go_to(0);
        let mut copied = Vec::new();
        let end = reader.end().unwrap();
        reader.copy_until(end, &mut copied).unwrap();
        assert!(
            !copied.contains(&0) && copied.len() < (1 << 20) + (1 << 18),
            "{} bytes",
            copied.len()
        );
    }

    #[test]
    fn a_log_that_is_freed_while_it_is_read_goes_on_with_a_whole_line() {
        let (mut file, mut reader) = log("first\nsecond and");
        assert_eq!(lines(&mut reader), ["first"]);
        file.write_all(&[b'x'; 8192]).unwrap();
        file.write_all(b"\nlast\n").unwrap();
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 8192).unwrap();
        assert_eq!(lines(&mut reader), ["last"]);
        // A file system without holes.
        file.set_len(0).unwrap();
        file.write_all(b"anew\n").unwrap();
        assert_eq!(lines(&mut reader), ["anew"]);
    }

    #[test]
    fn a_line_without_an_end_takes_no_memory() {
        let (mut file, mut reader) = log("first\n");
        for _ in 0..64 {
            file.write_all(&[b'x'; 256 << 10]).unwrap();
        }
        file.write_all(b"\nlast\n").unwrap();
        assert_eq!(lines(&mut reader), ["first", "last"]);
        assert!(
            reader.partial.capacity() <= 2 * MOST_LINE,
            "{} bytes",
            reader.partial.capacity()
        );
    }
}
