//! Where a sparse file has data, in blocks. Knows nothing of what is in it.

use std::fs::File;
use std::io;
use std::ops::Range;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// Runs of blocks of `block` bytes within `range` that have data, and begin at multiples of it in the file; the last one may end
/// within a block, where the range does. It costs a system call a block with data, and moves the file's offset.
///
/// # Errors
/// The file system cannot tell.
pub fn blocks_with_data(file: &File, range: Range<u64>, block: u64) -> io::Result<Vec<Range<u64>>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    let mut place = range.start;
    while place < range.end {
        let data = match seek(file, SeekFrom::Data(place)) {
            Ok(data) if data < range.end => data,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let start = (data - data % block).max(range.start);
        let end = start.saturating_add(block).min(range.end);
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = end,
            _ => runs.push(start..end),
        }
        place = end;
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn blocks_that_follow_each_other_are_one_run() {
        const BLOCK: u64 = 1 << 20;
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 * BLOCK + 5).unwrap();
        let found = |range| blocks_with_data(&file, range, BLOCK).unwrap();
        assert_eq!(found(0..8 * BLOCK + 5), []);
        for place in [BLOCK + 70_000, 2 * BLOCK - 1, 2 * BLOCK, 5 * BLOCK, 8 * BLOCK + 1] {
            file.write_all_at(b"x", place).unwrap();
        }
        assert_eq!(
            found(0..8 * BLOCK + 5),
            [BLOCK..3 * BLOCK, 5 * BLOCK..6 * BLOCK, 8 * BLOCK..8 * BLOCK + 5]
        );
        assert_eq!(
            found(2 * BLOCK..6 * BLOCK),
            [2 * BLOCK..3 * BLOCK, 5 * BLOCK..6 * BLOCK]
        );
        assert_eq!(found(6 * BLOCK..7 * BLOCK), []);
    }
}
