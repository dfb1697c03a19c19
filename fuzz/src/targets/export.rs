//! Exports from strangers, which saved snapshots are. Most changes of one break zstd's frame, so there is a target for the archive in
//! it, too.

use std::fs::File;
use std::os::unix::fs::FileExt;

use export::{Error, Reader, Writer};

use super::image::with_right_sums;
use crate::run::{Target, outcome};

/// What each member may have.
const MOST: u64 = 1 << 20;

/// Whole files.
pub(crate) fn streams() -> Target {
    Target {
        name: "export-stream",
        seeds: vec![seed(), Vec::new()],
        parse: |input| told(read(input)),
    }
}

/// What is in zstd's frame, with headers whose checksums are right.
pub(crate) fn archives() -> Target {
    Target {
        name: "export-archive",
        seeds: vec![zstd::decode_all(&seed()[..]).expect("a frame of ours")],
        parse: |input| {
            let packed = zstd::encode_all(&with_right_sums(input)[..], 1).expect("memory");
            told(read(&packed))
        },
    }
}

fn file() -> File {
    let fd = rustix::fs::memfd_create("export", rustix::fs::MemfdFlags::CLOEXEC);
    fd.expect("a file in memory").into()
}

fn seed() -> Vec<u8> {
    let sparse = file();
    sparse.set_len(MOST).expect("room");
    for place in [8192, 65536, MOST - 5] {
        sparse.write_all_at(b"words", place).expect("room");
    }
    let written = || -> Result<Vec<u8>, Error> {
        let mut writer = Writer::new(Vec::new(), "snapshot")?;
        writer.bytes("record.json", b"{}")?;
        writer.file("memory", &sparse, &mut |_| ())?;
        writer.bytes("state", b"a state")?;
        writer.finish()
    };
    written().expect("an export of ours")
}

/// Takes every member, as a load does.
fn read(bytes: &[u8]) -> Result<usize, Error> {
    let mut reader = Reader::new(bytes, "snapshot")?;
    let mut count = 0;
    while let Some(entry) = reader.next_entry()? {
        assert!(
            !entry.name.contains('/') && !entry.name.starts_with('.'),
            "{:?}",
            entry.name
        );
        let file = file();
        let extracted = reader.extract(&file, MOST);
        let length = file.metadata().expect("a file of ours").len();
        assert!(length <= MOST, "{length} bytes were written");
        extracted?;
        count += 1;
    }
    Ok(count)
}

fn told(result: Result<usize, Error>) -> u64 {
    match result {
        Ok(count) => outcome(format!("{} members", "x".repeat(count))),
        Err(error) => outcome(error),
    }
}
