//! What images are to be, by `e2fsck`, `debugfs` and (where it can mount them) the kernel.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;

use super::*;

const MIB: u64 = 1 << 20;

/// What a library is in tests: it ends within a block.
const LIBRARY: u64 = 1_000_001;

fn contents(length: u64) -> Vec<u8> {
    (0..length).map(|byte| (byte % 251) as u8).collect()
}

/// An image in memory, as a window has it, with two files and all slots.
fn made(size: u64) -> (File, Layout) {
    let layout = Layout::new(size, &[("library.so", 0o644, LIBRARY), ("empty", 0o600, 0)]).unwrap();
    let file = base::memfd::sized("image", size).unwrap();
    write(&file, &layout, &[&contents(LIBRARY), &[]]).unwrap();
    (file, layout)
}

/// What other programs find a memfd of this one by.
fn path(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// A program of e2fsprogs: its exit code and its standard output.
fn run(program: &str, arguments: &[&str]) -> (Option<i32>, Vec<u8>) {
    let output = Command::new(program)
        .args(arguments)
        .env("LC_ALL", "C")
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .output();
    let output = output.unwrap_or_else(|error| panic!("{program} (Debian's package e2fsprogs) cannot be run: {error}"));
    (output.status.code(), output.stdout)
}

fn debugfs(file: &File, request: &str) -> Vec<u8> {
    let (code, answer) = run("debugfs", &["-R", request, &path(file)]);
    assert_eq!(code, Some(0), "debugfs {request}");
    answer
}

fn e2fsck(file: &File) -> (Option<i32>, String) {
    let (code, said) = run("e2fsck", &["-fn", &path(file)]);
    (code, String::from_utf8(said).unwrap())
}

/// A layout of these files is one run of files, little that is free, and slots as they are to be.
fn check(layout: &Layout, files: &[(&str, u32, u64)]) {
    let (size, slots, free) = (layout.size(), layout.slots(), layout.free());
    assert!(slots.len() >= 3 && slots.len() <= 10, "{size}");
    assert!(slots.is_sorted_by_key(|slot| u64::MAX - slot.length), "{size}");
    let mut end = layout.root() * BLOCK + BLOCK;
    for (entry, (name, mode, length)) in layout.files().iter().zip(files) {
        assert_eq!((&*entry.name, entry.mode, entry.length), (*name, *mode, *length));
        assert!(entry.offset.is_multiple_of(BLOCK) && entry.offset >= end, "{size}");
        end = entry.offset + entry.length;
    }
    let begin = slots[0].offset;
    assert!(end <= free.start * BLOCK && free.start <= free.end, "{size}");
    assert!(free.end * BLOCK == begin && begin - end <= UNIT + 13 * BLOCK, "{size}");
    end = begin;
    for slot in slots {
        let whole = slot.length.is_multiple_of(UNIT) && slot.offset.is_multiple_of(UNIT);
        assert!(whole && slot.length > 0 && slot.extents() <= LEAF_EXTENTS, "{size}");
        assert_eq!((slot.offset, slot.mode), (end, 0o600), "{size}");
        end += slot.length;
    }
    assert_eq!(end, size);
    let (half, quarter) = ((size - begin) / 2, (size - begin) / 4);
    assert!(
        half - slots[0].length < UNIT && quarter - slots[1].length < UNIT,
        "{size}"
    );
}

#[test]
fn slots_are_aligned_apart_and_all_of_what_is_left_at_every_size() {
    for size in (LEAST / UNIT..=MOST / UNIT).map(|units| units * UNIT) {
        let none = Layout::new(size, &[]).unwrap();
        check(&none, &[]);
        // To the brim of what precedes the first slot, and a library beside others.
        let brim = UNIT - none.first_file() * BLOCK % UNIT;
        let others = [("a", 0o644, 3 * MIB + 1), ("b", 0o600, 0), ("c", 0o600, 1)];
        for files in [&[("library.so", 0o755, brim)][..], &others] {
            check(&Layout::new(size, files).unwrap(), files);
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    for size in [0, LEAST - UNIT, LEAST + 4096, MOST + UNIT, u64::MAX] {
        assert!(matches!(Layout::new(size, &[]), Err(Error::ImageSize { .. })), "{size}");
    }
    let long = "n".repeat(256);
    for (name, mode) in [
        ("", 0),
        (".", 0),
        ("..", 0),
        ("a/b", 0),
        ("a\0", 0),
        ("slot-9", 0),
        (&*long, 0),
        ("a", 0o100_644),
        ("x", 0),
    ] {
        let refused = Layout::new(LEAST, &[("x", 0, 0), (name, mode, 1)]);
        assert!(matches!(refused, Err(Error::ImageFile { .. })), "{name}: {refused:?}");
    }
    assert!(matches!(
        Layout::new(MOST, &[("x", 0, 43 << 30)]),
        Err(Error::ImageFile { .. })
    ));
    let many: Vec<String> = (0..33).map(|number| number.to_string()).collect();
    let long: Vec<String> = (0..20).map(|number| format!("{number:0200}")).collect();
    for names in [many, long] {
        let files: Vec<_> = names.iter().map(|name| (name.as_str(), 0, 1)).collect();
        let refused = Layout::new(LEAST, &files);
        assert!(matches!(refused, Err(Error::ImageFile { .. })), "{refused:?}");
        assert!(Layout::new(LEAST, &files[..16]).is_ok());
    }
    let full = Layout::new(LEAST, &[("x", 0, 24 * MIB)]).unwrap_err();
    let Error::ImageFull { needed, .. } = full else {
        panic!("{full}")
    };
    assert!(Layout::new(needed, &[("x", 0, 24 * MIB)]).is_ok());
    assert!(Layout::new(needed - UNIT, &[("x", 0, 24 * MIB)]).is_err());

    let (file, layout) = made(LEAST);
    let library = contents(LIBRARY);
    assert!(matches!(
        write(&file, &layout, &[&library, &[]]),
        Err(Error::ImageFresh { .. })
    ));
    let file = base::memfd::sized("image", LEAST + UNIT).unwrap();
    assert!(matches!(
        write(&file, &layout, &[&library, &[]]),
        Err(Error::ImageFresh { .. })
    ));
    assert!(matches!(write(&file, &layout, &[&library]), Err(Error::ImageContents)));
    assert!(matches!(
        write(&file, &layout, &[&library, b"x"]),
        Err(Error::ImageContents)
    ));
}

/// Names and inodes to the brim: what the layout lets through must fit.
fn crowded() -> (File, Layout) {
    let names: Vec<String> = (0..32).map(|number| format!("{number:095}")).collect();
    let files: Vec<_> = names.iter().map(|name| (name.as_str(), 0o600, 1)).collect();
    let layout = Layout::new(4098 * MIB, &files).unwrap();
    let file = base::memfd::sized("image", layout.size()).unwrap();
    write(&file, &layout, &[b"x".as_slice(); 32]).unwrap();
    (file, layout)
}

#[test]
fn e2fsck_finds_nothing_and_the_image_is_sparse() {
    // The last group is whole, of one unit, or neither; slots have their extents in the inode or in a block beside it.
    let sizes = [LEAST, 128 * MIB, 130 * MIB, 256 * MIB, 1 << 30, 9 << 30, MOST];
    for (file, layout) in sizes.map(made).into_iter().chain([crowded()]) {
        let (code, said) = e2fsck(&file);
        assert_eq!(code, Some(0), "{} MiB: {said}", layout.size() / MIB);
        let (written, groups) = (file.metadata().unwrap().blocks() * 512, layout.groups());
        assert!(
            written <= LIBRARY + (2 * groups + 64) * BLOCK,
            "{} MiB: {written}",
            layout.size() / MIB
        );
    }
}

#[test]
fn e2fsck_finds_a_bit_of_a_bitmap_that_is_wrong() {
    for bitmap in [Layout::block_bitmaps, Layout::inode_bitmaps] {
        let (file, layout) = made(256 * MIB);
        let at = (bitmap(&layout) + 1) * BLOCK;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        let (code, said) = e2fsck(&file);
        assert!(
            code == Some(4) && said.contains("bitmap differences"),
            "{code:?} {said}"
        );
    }
}

#[test]
fn the_superblock_says_how_the_device_is_found_and_what_is_free() {
    let (file, layout) = made(256 * MIB);
    let said = String::from_utf8(debugfs(&file, "show_super_stats -h")).unwrap();
    let value = |name: &str| {
        said.lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    assert_eq!(value("Filesystem volume name:"), "basalt-accel");
    assert_eq!(value("Filesystem UUID:"), "42534c54-4143-4357-8000-000065787434");
    let free = layout.free();
    assert_eq!(value("Free blocks:"), (free.end - free.start).to_string());
    // Of 64 in each of two groups, 10 are reserved, and 12 are files.
    assert_eq!(value("Free inodes:"), "106");
}

/// The rows of `debugfs`' table of extents that are no indexes: file blocks, device blocks and flags.
fn rows(table: &str) -> Vec<(u64, u64, u64, u64, &str)> {
    let numbers = |row: &str| -> Vec<u64> {
        row.split(['-', '/', ' '])
            .filter_map(|word| word.parse().ok())
            .collect()
    };
    let rows = table
        .lines()
        .skip(1)
        .map(|row| (numbers(row), row.get(58..).unwrap_or_default().trim()));
    rows.filter(|(numbers, _)| numbers[0] == numbers[1])
        .map(|(row, flags)| (row[4], row[5], row[6], row[7], flags))
        .collect()
}

#[test]
fn every_block_of_a_file_is_mapped_as_written_and_where_the_layout_says() {
    for (file, layout) in [LEAST, 256 * MIB, 9 << 30, MOST].map(made) {
        for entry in layout.entries() {
            let table = String::from_utf8(debugfs(&file, &format!("dump_extents {}", entry.name))).unwrap();
            let mut block = 0;
            for (first, last, device, end, flags) in rows(&table) {
                assert_eq!(
                    (first, device, flags),
                    (block, entry.offset / BLOCK + block, ""),
                    "{table}"
                );
                assert_eq!(last - first, end - device, "{table}");
                block = last + 1;
            }
            assert_eq!(block, entry.blocks(), "{}: {table}", entry.name);
            let stat = String::from_utf8(debugfs(&file, &format!("stat {}", entry.name))).unwrap();
            assert!(stat.contains(&format!("Mode:  0{:o}", entry.mode)), "{stat}");
            assert!(stat.contains(&format!("Size: {}\n", entry.length)), "{stat}");
        }
        assert_eq!(debugfs(&file, "cat library.so"), contents(LIBRARY));
    }
}

#[test]
fn the_kernel_sees_what_is_written_at_a_slots_offset_and_the_other_way_round() {
    let layout = Layout::new(2 << 30, &[("library.so", 0o644, LIBRARY)]).unwrap();
    let (image, point) = (tempfile::NamedTempFile::new().unwrap(), tempfile::tempdir().unwrap());
    let file = image.as_file();
    file.set_len(layout.size()).unwrap();
    write(file, &layout, &[&contents(LIBRARY)]).unwrap();
    let slots = layout.slots();
    for slot in slots {
        file.write_all_at(slot.name.as_bytes(), slot.offset + slot.length - 6)
            .unwrap();
    }
    // An image of mke2fs tells whether this machine can mount any. The mounts are the program's own: they end with it, however it does.
    let script = r#"mke2fs -q -F "$3" 4M && mount -t ext4 -o loop "$3" "$2" && umount "$2" || exit 99
        mount -t ext4 -o loop "$1" "$2" || exit 98
        cd "$2" && tail -qc 6 slot-* && cat library.so || exit 97
        printf guest | dd of=slot-0 bs=1 seek=805306368 conv=notrunc status=none && cd / && umount "$2" || exit 96"#;
    let control = tempfile::NamedTempFile::new().unwrap();
    let paths = [image.path(), point.path(), control.path()].map(|path| path.to_str().unwrap());
    let (code, seen) = run("unshare", &[&["--mount", "sh", "-c", script, "-"], &paths[..]].concat());
    if matches!(code, Some(1 | 99)) {
        return eprintln!("not compared with the kernel's view: it mounts no file here ({code:?})");
    }
    assert_eq!(code, Some(0), "{}", String::from_utf8_lossy(&seen));
    let names: String = slots.iter().map(|slot| slot.name.as_str()).collect();
    assert!(
        seen == [names.as_bytes(), &contents(LIBRARY)].concat(),
        "{} bytes",
        seen.len()
    );
    let mut word = [0; 5];
    assert!(slots[0].has_leaf() && !slots[1].has_leaf());
    file.read_exact_at(&mut word, slots[0].offset + (768 << 20)).unwrap();
    assert_eq!(&word, b"guest");
}
