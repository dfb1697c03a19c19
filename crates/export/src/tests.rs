//! There and back; by GNU tar, which must understand the same; and what is broken on purpose.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Stdio};

use crate::{Entry, Error, Reader, Writer, data_bytes, write_blob};

const MIB: u64 = 1 << 20;
const MOST: u64 = 1 << 50;

/// A file of this size with something at some places.
fn sparse(size: u64, data: &[(u64, &[u8])]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(size).unwrap();
    for (offset, bytes) in data {
        file.write_all_at(bytes, *offset).unwrap();
    }
    file
}

fn text(file: &File, offset: u64, length: usize) -> String {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// A record, a memory with a terabyte of holes, and a plain file.
fn written() -> Vec<u8> {
    let memory = sparse(1 << 40, &[(5 * MIB, b"five"), ((1 << 40) - 4, b"last")]);
    let state = sparse(0, &[(0, b"the state")]);
    let mut writer = Writer::new(Vec::new(), "snapshot").unwrap();
    writer.bytes("record.json", b"{}").unwrap();
    let mut moved = 0;
    writer.file("memory", &memory, &mut |bytes| moved += bytes).unwrap();
    assert_eq!(moved, data_bytes(&memory).unwrap());
    writer.file("state", &state, &mut |_| ()).unwrap();
    writer.file("nothing", &sparse(0, &[]), &mut |_| ()).unwrap();
    writer.file("a-hole", &sparse(MIB, &[]), &mut |_| ()).unwrap();
    writer.stream("image.tar", 5, |out| out.write_all(b"image")).unwrap();
    writer.finish().unwrap()
}

/// The archive without zstd, and with it again.
fn plain(export: &[u8]) -> Vec<u8> {
    zstd::decode_all(export).unwrap()
}

fn packed(archive: &[u8]) -> Vec<u8> {
    zstd::encode_all(archive, 1).unwrap()
}

fn entry(reader: &mut Reader<&[u8]>) -> Entry {
    reader.next_entry().unwrap().unwrap()
}

/// Reads all of it, and takes everything that there is.
fn read_all(bytes: &[u8]) -> Result<Vec<String>, Error> {
    let mut reader = Reader::new(bytes, "snapshot")?;
    let mut names = Vec::new();
    while let Some(entry) = reader.next_entry()? {
        reader.extract(&tempfile::tempfile().unwrap(), MOST)?;
        names.push(entry.name);
    }
    Ok(names)
}

#[test]
fn everything_comes_back_with_its_holes() {
    let bytes = written();
    assert!(bytes.len() < 4096, "{} bytes: the holes are in it", bytes.len());
    let mut reader = Reader::new(&bytes[..], "snapshot").unwrap();
    assert_eq!(entry(&mut reader).name, "record.json");
    assert_eq!(reader.contents(2).unwrap(), b"{}");
    let memory = entry(&mut reader);
    assert_eq!((memory.name.as_str(), memory.size), ("memory", 1 << 40));
    let file = tempfile::tempfile().unwrap();
    reader.extract(&file, 1 << 40).unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), 1 << 40);
    assert!(
        metadata.blocks() < 64,
        "{} blocks: the holes are filled",
        metadata.blocks()
    );
    assert_eq!(
        (text(&file, 5 * MIB, 4), text(&file, (1 << 40) - 4, 4)),
        ("five".into(), "last".into())
    );
    // What is not asked for is passed over, and checked all the same.
    for (name, size) in [("state", 9), ("nothing", 0), ("a-hole", MIB), ("image.tar", 5)] {
        let entry = entry(&mut reader);
        assert_eq!((entry.name.as_str(), entry.size), (name, size));
    }
    let mut out = Vec::new();
    reader.copy(&mut out, 5).unwrap();
    assert_eq!(out, b"image");
    assert_eq!(reader.next_entry().unwrap(), None);
    assert_eq!(reader.next_entry().unwrap(), None);
}

#[test]
fn the_same_files_give_the_same_bytes_and_pass_through_unchanged() {
    let bytes = written();
    assert_eq!(bytes, written());
    let mut reader = Reader::new(&bytes[..], "snapshot").unwrap();
    let mut writer = Writer::new(Vec::new(), "snapshot").unwrap();
    while reader.next_entry().unwrap().is_some() {
        reader.pass_to(&mut writer).unwrap();
    }
    assert_eq!(plain(&writer.finish().unwrap()), plain(&bytes));
}

#[test]
fn a_blob_is_one_member() {
    let memory = sparse(1 << 40, &[(5 * MIB, b"five")]);
    let blob = write_blob(Vec::new(), "memory", &memory, &mut |_| ()).unwrap();
    let mut reader = Reader::of_blob(&blob[..], "snapshot").unwrap();
    assert_eq!(entry(&mut reader).size, 1 << 40);
    let file = tempfile::tempfile().unwrap();
    reader.extract(&file, 1 << 40).unwrap();
    assert_eq!(text(&file, 5 * MIB, 4), "five");
    assert_eq!(reader.next_entry().unwrap(), None);
    // The same out of an export.
    let export = written();
    let mut reader = Reader::new(&export[..], "snapshot").unwrap();
    while entry(&mut reader).name != "memory" {}
    let other = reader.pass_to_blob(Vec::new()).unwrap();
    let mut reader = Reader::of_blob(&other[..], "snapshot").unwrap();
    entry(&mut reader);
    reader.extract(&file, 1 << 40).unwrap();
    assert_eq!(text(&file, (1 << 40) - 4, 4), "last");
    assert!(matches!(Reader::new(&blob[..], "snapshot"), Err(Error::Foreign { .. })));
}

#[test]
fn gnu_tar_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    let memory = sparse(64 * MIB, &[(5 * MIB, b"five"), (64 * MIB - 4, b"last")]);
    let mut writer = Writer::new(Vec::new(), "snapshot").unwrap();
    writer.file("memory", &memory, &mut |_| ()).unwrap();
    let archive = plain(&writer.finish().unwrap());
    let tar = Command::new("tar")
        .arg("-xC")
        .arg(directory.path())
        .stdin(Stdio::piped())
        .spawn();
    let mut tar = tar.unwrap();
    tar.stdin.take().unwrap().write_all(&archive).unwrap();
    assert!(tar.wait().unwrap().success());
    let file = File::open(directory.path().join("memory")).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 64 * MIB);
    assert_eq!(
        (text(&file, 5 * MIB, 4), text(&file, 64 * MIB - 4, 4)),
        ("five".into(), "last".into())
    );
    let mut head = String::new();
    File::open(directory.path().join("bundle.json"))
        .unwrap()
        .read_to_string(&mut head)
        .unwrap();
    assert_eq!(head, r#"{"format":1,"kind":"snapshot"}"#);
}

#[test]
fn very_many_holes_are_taken_for_data() {
    // Data in every other block.
    let file = tempfile::tempfile().unwrap();
    for block in 0..64 {
        file.write_all_at(b"x", block * 8192).unwrap();
    }
    file.set_len(64 * 8192).unwrap();
    let size = 64 * 8192;
    assert_eq!(crate::sparse::parts(&file, size, 64).unwrap().len(), 64);
    let few = crate::sparse::parts(&file, size, 63).unwrap();
    assert!(few.len() < 64 && few.iter().all(|part| part.length >= 4096), "{few:?}");
    assert_eq!(few[0].offset, 0);
}

#[test]
fn what_ends_early_is_refused_wherever_it_ends() {
    let bytes = written();
    assert_eq!(read_all(&bytes).unwrap().len(), 6);
    for length in 0..bytes.len() {
        let error = read_all(&bytes[..length]).unwrap_err();
        assert!(
            matches!(error, Error::Truncated),
            "{length} of {}: {error}",
            bytes.len()
        );
    }
    let archive = plain(&bytes);
    for blocks in 1..archive.len() / 512 {
        let error = read_all(&packed(&archive[..blocks * 512])).unwrap_err();
        assert!(
            matches!(error, Error::Truncated | Error::Foreign { .. }),
            "{blocks}: {error}"
        );
    }
}

#[test]
fn an_archive_without_sums_is_not_whole() {
    let archive = plain(&written());
    // The last member is a header and a block or more, then two blocks are the end.
    let at = archive.windows(9).rposition(|bytes| bytes == b"sums.json").unwrap();
    let mut without = archive[..at].to_vec();
    without.extend([0; 1024]);
    let error = read_all(&packed(&without)).unwrap_err();
    assert!(matches!(error, Error::Truncated), "{error}");
}

#[test]
fn zeroes_that_were_written_become_holes() {
    let mut writer = Writer::new(Vec::new(), "snapshot").unwrap();
    writer.bytes("memory", &vec![0; 1 << 20]).unwrap();
    let bytes = writer.finish().unwrap();
    let mut reader = Reader::new(&bytes[..], "snapshot").unwrap();
    entry(&mut reader);
    let file = tempfile::tempfile().unwrap();
    reader.extract(&file, MIB).unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!((metadata.len(), metadata.blocks()), (MIB, 0));
}

#[test]
fn a_flipped_bit_anywhere_is_noticed() {
    let bytes = written();
    let archive = plain(&bytes);
    for at in 0..bytes.len() {
        let mut broken = bytes.clone();
        broken[at] ^= 0x10;
        // A few bits of zstd's header say nothing of the content (RFC 8878, 3.1.1.1).
        let same = zstd::decode_all(&broken[..]).is_ok_and(|broken| broken == archive);
        assert!(same || read_all(&broken).is_err(), "byte {at} of {}", bytes.len());
    }
    // Also where zstd has no say; a header's checksum has several ways to be written.
    for at in (0..archive.len())
        .step_by(7)
        .filter(|at| !(148..156).contains(&(at % 512)))
    {
        let mut broken = archive.clone();
        broken[at] ^= 0x10;
        assert!(read_all(&packed(&broken)).is_err(), "byte {at} of {}", archive.len());
    }
}

#[test]
fn something_else_is_told_from_what_is_broken() {
    let foreign = |bytes: &[u8]| matches!(Reader::new(bytes, "snapshot"), Err(Error::Foreign { .. }));
    assert!(foreign(b"no such thing, and longer than a header is"));
    assert!(foreign(&packed(&[7; 1024])));
    let of = |kind| Writer::new(Vec::new(), kind).unwrap().finish().unwrap();
    assert!(foreign(&of("rm -rf")), "a stranger's word is repeated");
    for (kind, wanted) in [("template", "snapshot"), ("snapshot", "template")] {
        let told = Reader::new(&of(kind)[..], wanted).err().unwrap().to_string();
        assert!(told.contains(&format!("`basalt {kind} load` reads it")), "{told}");
    }
    let newer = plain(&written());
    let at = newer.windows(11).position(|bytes| bytes == b"\"format\":1,").unwrap();
    let mut newer = newer;
    newer[at + 9] = b'2';
    let error = Reader::new(&packed(&newer)[..], "snapshot").err().unwrap();
    assert!(
        error.to_string().contains("layout 2, and this Basalt reads layout 1"),
        "{error}"
    );
    let mut longer = written();
    longer.extend(written());
    let error = read_all(&longer).unwrap_err();
    assert!(error.to_string().contains("something comes after its end"), "{error}");
}

#[test]
fn no_more_is_written_than_is_allowed() {
    let bytes = written();
    let mut reader = Reader::new(&bytes[..], "snapshot").unwrap();
    while entry(&mut reader).name != "memory" {}
    let mut file = tempfile::tempfile().unwrap();
    let error = reader.extract(&file, (1 << 40) - 1).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), 0);
}

#[test]
fn a_map_that_lies_is_refused() {
    let read = |map: &str, size, data: u64| {
        let mut bytes = map.as_bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        let packed = bytes.len() as u64 + data;
        crate::sparse::read_map(&mut &bytes[..], size, packed)
    };
    assert_eq!(read("2\n0\n5\n10\n5\n", 15, 10).unwrap().0.len(), 2);
    // As GNU tar writes the end of a file.
    assert_eq!(read("2\n0\n5\n15\n0\n", 15, 5).unwrap().0.len(), 2);
    for (map, size, data) in [
        ("2\n10\n5\n0\n5\n", 15, 10),
        ("2\n0\n5\n4\n5\n", 15, 10),
        ("1\n10\n6\n", 15, 6),
        ("1\n0\n5\n", 15, 4),
        ("1\n18446744073709551615\n2\n", 15, 2),
        ("1\n99999999999999999999999\n2\n", 15, 2),
        ("99999999\n", 15, 0),
        ("1\n-1\n5\n", 15, 5),
        ("\n", 15, 0),
        ("2\n0\n0\n0\n0\n", 15, 0),
    ] {
        assert!(read(map, size, data).is_err(), "{map:?}");
    }
}
