//! Trees there and back, and streams of those who mean no good.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

use crate::{Error, Owner, Packed, ROOT, Target, Unpacked, measure, pack, unpack};

fn packed(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    assert_eq!(pack(path, ROOT.as_ref(), &mut bytes).unwrap(), Packed::default());
    bytes
}

fn scene() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("target");
    fs::create_dir(&target).unwrap();
    (directory, target)
}

/// A stream with one entry of some kind.
fn entry(kind: EntryType, name: &str, link: &str) -> Vec<u8> {
    stream(&[(kind, name, link)])
}

/// A stream whose names are written as they are, which an honest writer would refuse to.
fn stream(entries: &[(EntryType, &str, &str)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (kind, name, link) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o4755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        header.set_size(if *kind == EntryType::Regular { 4 } else { 0 });
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        let data: &[u8] = if *kind == EntryType::Regular { b"evil" } else { b"" };
        builder.append(&header, data).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Everything below, with kinds and contents.
fn listing(path: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![path.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let here = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&here).unwrap();
            let name = here.strip_prefix(path).unwrap().display().to_string();
            let mode = metadata.mode() & 0o7777;
            if metadata.is_symlink() {
                found.push(format!("{name} -> {}", fs::read_link(&here).unwrap().display()));
            } else if metadata.is_dir() {
                found.push(format!("{name}/ {mode:o} {}", metadata.mtime()));
                open.push(here);
            } else {
                let bytes = fs::read(&here).unwrap();
                found.push(format!("{name} {mode:o} {} {bytes:?}", metadata.mtime()));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_tree_comes_back_as_it_was() {
    let (directory, target) = scene();
    let tree = directory.path().join("tree");
    let long = "n".repeat(150);
    fs::create_dir_all(tree.join("a/empty")).unwrap();
    fs::create_dir(tree.join("closed")).unwrap();
    fs::write(tree.join("closed/file"), "in a directory that cannot be written").unwrap();
    fs::write(tree.join("a/file"), "text").unwrap();
    fs::write(tree.join(&long), "long").unwrap();
    fs::hard_link(tree.join("a/file"), tree.join("second name")).unwrap();
    symlink("../nowhere", tree.join("link")).unwrap();
    symlink("x".repeat(200), tree.join("long link")).unwrap();
    fs::set_permissions(tree.join("a/file"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::set_permissions(tree.join("closed"), fs::Permissions::from_mode(0o555)).unwrap();
    let file = File::options().write(true).open(tree.join("a/file")).unwrap();
    let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    file.set_modified(old).unwrap();

    let measured = measure(&tree).unwrap();
    assert!(measured.directory && measured.bytes > 0, "{measured:?}");
    let bytes = packed(&tree);
    let copy = target.join("copy");
    let done = unpack(bytes.as_slice(), &Target::Root(copy.clone()), Owner::Mine).unwrap();
    assert_eq!(
        done,
        Unpacked {
            entries: 10,
            left_out: 0
        }
    );
    assert_eq!(listing(&copy), listing(&tree));
    let inode = |name: &str| fs::metadata(copy.join(name)).unwrap().ino();
    assert_eq!(inode("a/file"), inode("second name"));
    // Again, into what is there: directories stay, files are replaced.
    fs::write(copy.join("a/file"), "changed").unwrap();
    fs::write(copy.join("a/more"), "stays").unwrap();
    unpack(bytes.as_slice(), &Target::Into(copy.clone()), Owner::Mine).unwrap();
    assert_eq!(fs::read(copy.join("a/file")).unwrap(), b"text");
    assert_eq!(fs::read(copy.join("a/more")).unwrap(), b"stays");
}

#[test]
fn one_file_and_one_link_are_trees_too() {
    let (directory, target) = scene();
    let (file, link) = (directory.path().join("file"), directory.path().join("link"));
    fs::write(&file, "text").unwrap();
    symlink("file", &link).unwrap();
    assert!(!measure(&link).unwrap().directory);
    // What is in the place is replaced, a link included: it is not followed.
    symlink("/nonexistent", target.join("new")).unwrap();
    unpack(packed(&file).as_slice(), &Target::Root(target.join("new")), Owner::Mine).unwrap();
    assert!(fs::symlink_metadata(target.join("new")).unwrap().is_file());
    unpack(packed(&link).as_slice(), &Target::Root(target.join("new")), Owner::Mine).unwrap();
    assert_eq!(fs::read_link(target.join("new")).unwrap(), Path::new("file"));
    let error = unpack(packed(&file).as_slice(), &Target::Root(target.clone()), Owner::Mine).unwrap_err();
    assert!(
        error.to_string().contains("is a directory and cannot become a file"),
        "{error}"
    );
    let error = unpack(packed(&target).as_slice(), &Target::Root(file), Owner::Mine).unwrap_err();
    assert!(
        error.to_string().contains("is no directory and cannot become one"),
        "{error}"
    );
    assert_eq!(listing(&target).len(), 1, "{:?}", listing(&target));
}

#[test]
fn holes_are_neither_sent_nor_written() {
    let (directory, target) = scene();
    let source = directory.path().join("sparse");
    let file = File::create(&source).unwrap();
    file.set_len(64 << 20).unwrap();
    // More parts than there is room for in the first header, and a hole at the end.
    for at in 0..40 {
        file.write_all_at(b"data", at << 20).unwrap();
    }
    file.sync_all().unwrap();
    let bytes = packed(&source);
    let copy = target.join("copy");
    unpack(bytes.as_slice(), &Target::Root(copy.clone()), Owner::Mine).unwrap();
    let (was, is) = (fs::metadata(&source).unwrap(), fs::metadata(&copy).unwrap());
    assert_eq!(is.len(), was.len());
    assert_eq!(fs::read(&copy).unwrap(), fs::read(&source).unwrap());
    if was.blocks() * 512 < was.len() / 2 {
        assert!(bytes.len() < 4 << 20, "{} bytes were sent", bytes.len());
        assert!(is.blocks() * 512 < is.len() / 2, "{} blocks", is.blocks());
    }
}

#[test]
fn what_is_no_file_is_left_out() {
    let (directory, target) = scene();
    let tree = directory.path().join("tree");
    fs::create_dir(&tree).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();
    let mut bytes = Vec::new();
    assert_eq!(pack(&tree, "x".as_ref(), &mut bytes).unwrap().left_out, 1);
    assert!(matches!(measure(&tree.join("socket")), Err(Error::Special(_))));
    // The kernel's own: nothing of it is read.
    assert_eq!(pack(Path::new("/proc"), "x".as_ref(), &mut bytes).unwrap().left_out, 1);
    for kind in [EntryType::Block, EntryType::Char, EntryType::Fifo] {
        let done = unpack(
            entry(kind, "dev", "").as_slice(),
            &Target::Below(target.clone()),
            Owner::Kept,
        )
        .unwrap();
        assert_eq!(
            done,
            Unpacked {
                entries: 0,
                left_out: 1
            }
        );
    }
    assert!(listing(&target).is_empty());
}

#[test]
fn nothing_leads_out_of_the_target() {
    let (directory, target) = scene();
    let outside = directory.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(directory.path().join("secret"), "secret").unwrap();
    let absolute = outside.display().to_string();
    let regular = EntryType::Regular;
    let up: [&[(EntryType, &str, &str)]; 8] = [
        &[(regular, "../outside/a", "")],
        &[(regular, "a/../../outside/a", "")],
        &[(EntryType::Symlink, "l", "../outside"), (regular, "l/a", "")],
        &[(EntryType::Symlink, "l", &absolute), (regular, "l/a", "")],
        &[(EntryType::Symlink, "l", &absolute), (EntryType::Directory, "l/a", "")],
        &[
            (EntryType::Directory, "d", ""),
            (EntryType::Symlink, "d/l", "../../outside"),
            (regular, "d/l/a", ""),
        ],
        &[(EntryType::Link, "h", "../secret")],
        &[(EntryType::Symlink, "l", ".."), (EntryType::Link, "h", "l/secret")],
    ];
    for entries in up {
        let error = unpack(stream(entries).as_slice(), &Target::Below(target.clone()), Owner::Mine).unwrap_err();
        assert!(matches!(error, Error::Outside(_)), "{entries:?}: {error}");
    }
    assert!(listing(&outside).is_empty(), "{:?}", listing(&outside));
    assert!(!target.join("h").exists());
    // A name that begins with a slash is taken as if it did not.
    let name = format!("{absolute}/b");
    unpack(
        entry(regular, &name, "").as_slice(),
        &Target::Below(target.clone()),
        Owner::Mine,
    )
    .unwrap();
    assert!(target.join(name.trim_start_matches('/')).is_file() && listing(&outside).is_empty());
}

#[test]
fn a_tree_is_all_that_a_tree_may_be() {
    let (directory, target) = scene();
    let outside = directory.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let copy = target.join("copy");
    let absolute = outside.display().to_string();
    let hostile: [&[(EntryType, &str, &str)]; 6] = [
        &[(EntryType::Regular, "other", "")],
        &[(EntryType::Regular, "root", ""), (EntryType::Regular, "root/a", "")],
        &[
            (EntryType::Symlink, "root", &absolute),
            (EntryType::Regular, "root/a", ""),
        ],
        &[(EntryType::Directory, "root", ""), (EntryType::Regular, "copied", "")],
        &[(EntryType::Directory, "root", ""), (EntryType::Directory, "root", "")],
        &[(EntryType::Regular, "root/../x", "")],
    ];
    for entries in hostile {
        let error = unpack(stream(entries).as_slice(), &Target::Root(copy.clone()), Owner::Mine).unwrap_err();
        assert!(matches!(error, Error::Outside(_)), "{entries:?}: {error}");
        match fs::symlink_metadata(&copy) {
            Ok(left) if left.is_dir() => fs::remove_dir_all(&copy).unwrap(),
            Ok(_) => fs::remove_file(&copy).unwrap(),
            Err(_) => (),
        }
    }
    // A link that an earlier copy has left in the place is not followed by the next.
    symlink(&outside, &copy).unwrap();
    let tree: &[(EntryType, &str, &str)] = &[(EntryType::Directory, "root", ""), (EntryType::Regular, "root/a", "")];
    assert!(unpack(stream(tree).as_slice(), &Target::Root(copy.clone()), Owner::Mine).is_err());
    assert!(listing(&outside).is_empty());
    assert_eq!(listing(&target).len(), 1, "{:?}", listing(&target));
}

#[test]
fn set_user_id_bits_are_only_kept_with_their_owner() {
    let (_directory, target) = scene();
    let bytes = entry(EntryType::Regular, "tool", "");
    unpack(bytes.as_slice(), &Target::Below(target.clone()), Owner::Mine).unwrap();
    assert_eq!(fs::metadata(target.join("tool")).unwrap().mode() & 0o7777, 0o755);
    if rustix::process::geteuid().is_root() {
        unpack(bytes.as_slice(), &Target::Below(target.clone()), Owner::Kept).unwrap();
        assert_eq!(fs::metadata(target.join("tool")).unwrap().mode() & 0o7777, 0o4755);
    }
}

#[test]
fn a_stream_that_breaks_off_leaves_whole_files_only() {
    let (directory, target) = scene();
    let tree = directory.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("a"), vec![1; 5000]).unwrap();
    fs::write(tree.join("b"), vec![2; 200_000]).unwrap();
    let bytes = packed(&tree);
    let cut = bytes.get(..100_000).unwrap();
    let copy = target.join("copy");
    let error = unpack(cut, &Target::Root(copy.clone()), Owner::Mine).unwrap_err();
    assert!(error.is_of_stream(), "{error}");
    let found: Vec<_> = fs::read_dir(&copy)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(found, ["a"]);
    assert_eq!(fs::read(copy.join("a")).unwrap(), vec![1; 5000]);
    assert!(matches!(
        unpack(&b""[..], &Target::Root(copy), Owner::Mine),
        Err(Error::Empty)
    ));
    let error = unpack(&[7; 4096][..], &Target::Below(target), Owner::Mine).unwrap_err();
    assert!(matches!(error, Error::Stream(_)), "{error}");
}

#[test]
fn a_header_without_end_is_cut_off() {
    struct Endless(u64);
    impl Read for Endless {
        fn read(&mut self, space: &mut [u8]) -> std::io::Result<usize> {
            space.fill(b'x');
            self.0 += space.len() as u64;
            assert!(self.0 < 64 << 20, "it was read without end");
            Ok(space.len())
        }
    }
    let (_directory, target) = scene();
    for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader] {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(1 << 33);
        header.set_cksum();
        let mut bytes = Vec::new();
        bytes.write_all(header.as_bytes()).unwrap();
        let stream = bytes.as_slice().chain(Endless(0));
        let error = unpack(stream, &Target::Below(target.clone()), Owner::Mine).unwrap_err();
        assert!(error.to_string().contains("no end"), "{kind:?}: {error}");
    }
}

#[test]
fn other_programs_streams_are_understood() {
    let (directory, target) = scene();
    let tree = directory.path().join("tree");
    fs::create_dir_all(tree.join("d")).unwrap();
    fs::write(tree.join("d/file"), "text").unwrap();
    for format in ["gnu", "pax", "ustar"] {
        let output = std::process::Command::new("tar")
            .args(["-c", &format!("--format={format}"), "-C"])
            .arg(&tree)
            .arg(".")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let place = target.join(format);
        fs::create_dir(&place).unwrap();
        unpack(output.stdout.as_slice(), &Target::Below(place.clone()), Owner::Mine).unwrap();
        assert_eq!(fs::read(place.join("d/file")).unwrap(), b"text");
    }
    // And the other way round.
    let place = target.join("by-tar");
    fs::create_dir(&place).unwrap();
    let mut child = std::process::Command::new("tar")
        .args(["-x", "-C"])
        .arg(&place)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&packed(&tree)).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read(place.join("root/d/file")).unwrap(), b"text");
}
