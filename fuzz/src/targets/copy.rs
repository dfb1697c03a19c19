//! Tar streams of `basalt cp`, unpacked: whatever they say, nothing may change but the destination.
//!
//! Each input has a directory of its own with the destination and, beside it, what must stay as it is.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use archive::{Owner, Target as Place};

use super::image::{layer, with_right_sums};
use crate::run::{Target, outcome};

/// A file may have so many pieces; one that is all hole has no end.
const MOST_PIECES: u64 = 1000;

/// Streams.
pub(crate) fn streams() -> Target {
    Target {
        name: "copy-stream",
        seeds: vec![layer(), Vec::new()],
        parse: |input| unpack(&with_right_sums(input)),
    }
}

fn unpack(stream: &[u8]) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let directory = std::env::temp_dir().join(format!("basalt-fuzz-copy-{}-{number}", std::process::id()));
    let (target, beside) = (directory.join("target"), directory.join("beside"));
    for made in [&target, &beside] {
        fs::create_dir_all(made).expect("a directory");
    }
    let pieces = AtomicU64::new(0);
    let stop = || pieces.fetch_add(1, Ordering::Relaxed) > MOST_PIECES;
    let result = archive::unpack(stream, &Place::Below(target), Owner::Mine, &stop);
    let names = |path| fs::read_dir(path).expect("a directory").count();
    let (around, aside) = (names(&directory), names(&beside));
    fs::remove_dir_all(&directory).expect("a directory that can be removed");
    assert_eq!((around, aside), (2, 0), "something was written beside the destination");
    match result {
        Ok(unpacked) => outcome(format!("{} {}", unpacked.entries, unpacked.left_out)),
        // Messages name the directory, which is another each time.
        Err(error) => outcome(error.to_string().replace(&number.to_string(), "")),
    }
}
