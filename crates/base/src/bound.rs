//! A file that only ever grows at its end and keeps only its end: what is older goes back to the file system as a hole.
//!
//! For logs whose writer may be hostile. Offsets never change, so readers need no word with the writer, and several
//! writers may share one file. Does not know what is written.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{FallocateFlags, fallocate, fstat, ftruncate};
use rustix::io::Errno;

/// Holes are made in steps of this share of the limit.
const STEPS: u64 = 8;

/// A file's blocks are freed in whole pages.
const PAGE: u64 = 4096;

/// How much of a file is kept.
#[derive(Clone, Copy, Debug)]
pub struct FileBound {
    limit: u64,
    /// Bytes written since the file was last looked at.
    since: u64,
}

impl FileBound {
    /// Keeps the last `limit` bytes, and an eighth more at times.
    pub fn new(limit: u64) -> Self {
        Self {
            limit,
            // The first look is at once: the file may have been written to before.
            since: limit,
        }
    }

    /// Says that `count` bytes were appended to `file`, and frees what is older than the limit.
    ///
    /// # Errors
    /// The file cannot be looked at or cut; what was written is there.
    pub fn wrote(&mut self, file: impl AsFd, count: u64) -> io::Result<()> {
        self.since = self.since.saturating_add(count);
        if self.since < self.limit / STEPS {
            return Ok(());
        }
        self.since = 0;
        let size = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        let hole = size.saturating_sub(self.limit) & !(PAGE - 1);
        if hole == 0 {
            return Ok(());
        }
        match fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, hole) {
            // A file system without holes: its log starts anew instead.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(ftruncate(&file, 0)?),
            result => Ok(result?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn only_the_end_takes_room_and_offsets_stay() {
        let path = std::env::temp_dir().join(format!("basalt-bound-{}", std::process::id()));
        let mut file = File::options()
            .append(true)
            .read(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut bound = FileBound::new(64 << 10);
        let mut written = 0_u64;
        for number in 0..10_000_u64 {
            let line = format!("line {number:>58}\n");
            file.write_all(line.as_bytes()).unwrap();
            written += 64;
            bound.wrote(&file, 64).unwrap();
        }
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), written);
        assert!(
            metadata.blocks() * 512 <= (64 + 8 + 4) << 10,
            "{} blocks",
            metadata.blocks()
        );
        let mut last = [0; 64];
        file.read_exact_at(&mut last, written - 64).unwrap();
        assert!(last.ends_with(b"9999\n"));
        let mut first = [1; 64];
        file.read_exact_at(&mut first, 0).unwrap();
        assert_eq!(first, [0; 64], "the beginning is a hole");
    }
}
