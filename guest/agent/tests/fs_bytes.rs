//! Bytes of files there and back: whole, in ranges, broken off, more than there is room for; and whose the files are that come of it.

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use agent_api::{Connection, Entry, EntryKind, Error, RequestFailureKind};
use common::connect;
use common::files::{NOBODY, at, dir, kind_of, run};
use tempfile::TempDir;

fn write(connection: &mut Connection<UnixStream>, path: &str, bytes: &[u8]) -> Result<Entry, Error> {
    connection.fs_write(None, path, None, BTreeMap::new(), &mut &*bytes)
}

fn read(connection: &mut Connection<UnixStream>, path: &str, offset: u64, length: Option<u64>) -> Vec<u8> {
    let mut reading = connection.fs_read(None, path, offset, length).unwrap();
    let (mut bytes, announced) = (Vec::new(), reading.bytes);
    reading.read_to_end(&mut bytes).unwrap();
    reading.finish().unwrap();
    assert_eq!(u64::try_from(bytes.len()).unwrap(), announced);
    bytes
}

fn wait_until(mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "it does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Gives some bytes, then fails.
struct Breaking(usize);

impl Read for Breaking {
    fn read(&mut self, space: &mut [u8]) -> std::io::Result<usize> {
        if self.0 == 0 {
            return Err(std::io::Error::other("broken"));
        }
        let count = self.0.min(space.len());
        space[..count].fill(b'x');
        self.0 -= count;
        Ok(count)
    }
}

/// A small file system.
struct Small(TempDir);

impl Small {
    fn new() -> Self {
        let dir = dir();
        run(&["mount", "-t", "tmpfs", "-o", "size=1m", "small", &at(&dir, "")]);
        Self(dir)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        run(&["umount", self.0.path().to_str().unwrap()]);
    }
}

#[test]
fn bytes_come_back_as_they_went_whole_and_in_ranges() {
    let dir = dir();
    let bytes: Vec<u8> = (0..10_000_019_u32)
        .map(|number| u8::try_from(number % 251).unwrap())
        .collect();
    let mut connection = connect();
    let path = at(&dir, "a/file");
    let entry = write(&mut connection, &path, &bytes).unwrap();
    assert_eq!(
        (entry.kind, entry.size, entry.mode & 0o7777),
        (EntryKind::File, 10_000_019, 0o644)
    );
    assert!(fs::read(&path).unwrap() == bytes);
    assert!(read(&mut connection, &path, 0, None) == bytes);
    for (offset, length) in [(0, 1), (7, 100_000), (9_999_999, 20), (10_000_018, 100), (5, 0)] {
        let part = read(&mut connection, &path, offset, Some(length));
        let wanted = bytes.iter().skip(usize::try_from(offset).unwrap());
        assert!(
            part.iter().eq(wanted.take(usize::try_from(length).unwrap())),
            "{offset} {length}"
        );
    }
    assert!(read(&mut connection, &path, 10_000_019, None).is_empty());
    assert!(read(&mut connection, &path, u64::MAX, Some(u64::MAX)).is_empty());
    // Small ones are read otherwise.
    write(&mut connection, &path, b"small").unwrap();
    assert_eq!(read(&mut connection, &path, 0, None), b"small");
    assert_eq!(read(&mut connection, &path, 2, Some(2)), b"al");
    assert!(read(&mut connection, &path, 9, None).is_empty());
    write(&mut connection, &path, b"").unwrap();
    assert!(read(&mut connection, &path, 0, None).is_empty());
}

#[test]
fn only_regular_files_are_read_and_the_kernels_too() {
    let dir = dir();
    let pipe = at(&dir, "pipe");
    run(&["mkfifo", &pipe]);
    symlink("/proc/self/status", at(&dir, "link")).unwrap();
    let mut connection = connect();
    for path in [pipe.as_str(), "/dev/zero", "/dev/tty"] {
        let refused = connection.fs_read(None, path, 0, None).map(drop);
        assert_eq!(kind_of(refused), RequestFailureKind::Invalid, "{path}");
        let refused = write(&mut connection, path, b"data");
        assert_eq!(kind_of(refused), RequestFailureKind::Invalid, "{path}");
    }
    for (path, kind) in [
        (at(&dir, ""), RequestFailureKind::IsADirectory),
        (at(&dir, "missing"), RequestFailureKind::NotFound),
        ("/proc/self/status/x".to_owned(), RequestFailureKind::NotADirectory),
    ] {
        let refused = connection.fs_read(None, path.as_str(), 0, None).map(drop);
        assert_eq!(kind_of(refused), kind, "{path}");
    }
    // Neither of both says how long it is.
    for path in ["/proc/self/status", at(&dir, "link").as_str()] {
        let status = read(&mut connection, path, 0, None);
        assert!(status.starts_with(b"Name:") && status.len() > 500, "{path}");
        assert_eq!(read(&mut connection, path, 1, Some(3)), b"ame");
    }
    let online = read(&mut connection, "/sys/devices/system/cpu/online", 0, None);
    assert!(online.starts_with(b"0"), "{online:?}");
}

#[test]
fn a_file_that_becomes_shorter_breaks_off_and_the_connection_stays_usable() {
    let dir = dir();
    let path = at(&dir, "sparse");
    File::create(&path).unwrap().set_len(256 << 20).unwrap();
    let mut connection = connect();
    let mut reading = connection.fs_read(None, path.as_str(), 0, None).unwrap();
    assert_eq!(reading.bytes, 256 << 20);
    // What is under way fits into the sockets' buffers.
    File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    let mut bytes = Vec::new();
    reading.read_to_end(&mut bytes).unwrap_err();
    assert!(bytes.len() < 256 << 20);
    assert_eq!(kind_of(reading.finish()), RequestFailureKind::Other);
    connection.ping().unwrap();
}

#[test]
fn new_files_are_the_users_and_others_keep_what_they_are() {
    let dir = dir();
    let mut connection = connect();
    let mut write = |name: &str, mode| {
        let path = at(&dir, name);
        connection.fs_write(NOBODY, path, mode, BTreeMap::new(), &mut &b"data"[..])
    };
    let made = write("new/file", Some(0o600)).unwrap();
    assert_eq!(
        (made.owner.as_str(), made.group.as_str(), made.mode & 0o7777),
        ("4242", "4343", 0o600)
    );
    assert_eq!(fs::metadata(at(&dir, "new")).unwrap().uid(), 4242);
    fs::write(at(&dir, "there"), "a longer text").unwrap();
    fs::set_permissions(at(&dir, "there"), fs::Permissions::from_mode(0o751)).unwrap();
    let inode = fs::metadata(at(&dir, "there")).unwrap().ino();
    let there = write("there", None).unwrap();
    assert_eq!(
        (there.owner.as_str(), there.mode & 0o7777, there.size),
        ("root", 0o751, 4)
    );
    assert_eq!(fs::metadata(at(&dir, "there")).unwrap().ino(), inode, "in its place");
    assert_eq!(write("there", Some(0o4755)).unwrap().mode & 0o7777, 0o4755);
    // By a link, also to where nothing is yet.
    symlink("there", at(&dir, "link")).unwrap();
    symlink("made", at(&dir, "dangling")).unwrap();
    assert_eq!(write("link", None).unwrap().path, at(&dir, "link").into());
    write("dangling", None).unwrap();
    let data = fs::symlink_metadata(at(&dir, "made")).unwrap();
    assert_eq!((data.len(), data.uid()), (4, 4242));
    symlink("circle", at(&dir, "circle")).unwrap();
    for (name, kind) in [
        ("", RequestFailureKind::IsADirectory),
        ("there/below", RequestFailureKind::NotADirectory),
        ("circle", RequestFailureKind::Invalid),
    ] {
        assert_eq!(kind_of(write(name, None)), kind, "{name}");
    }
    assert_eq!(
        kind_of(connection.fs_write(None, "/", None, BTreeMap::new(), &mut &b""[..])),
        RequestFailureKind::Invalid
    );
    connection.ping().unwrap();
}

#[test]
fn metadata_is_what_was_given_last() {
    let dir = dir();
    let path = at(&dir, "file");
    let mut connection = connect();
    let notes = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    };
    let two = notes(&[("a", "1"), ("b c", "zwölf")]);
    let entry = connection
        .fs_write(None, path.as_str(), None, two.clone(), &mut &b"x"[..])
        .unwrap();
    assert_eq!(entry.metadata, two);
    rustix::fs::setxattr(path.as_str(), "user.other", b"stays", rustix::fs::XattrFlags::empty()).unwrap();
    assert_eq!(connection.fs_stat(None, path.as_str()).unwrap().metadata, two);
    assert_eq!(
        connection
            .fs_list(None, at(&dir, ""), 1)
            .unwrap()
            .first()
            .unwrap()
            .metadata,
        two
    );
    let reading = connection.fs_read(None, path.as_str(), 0, None).unwrap();
    assert_eq!(reading.entry.metadata, two);
    reading.finish().unwrap();
    let one = notes(&[("a", "2")]);
    let entry = connection
        .fs_write(None, path.as_str(), None, one.clone(), &mut &b""[..])
        .unwrap();
    assert_eq!(entry.metadata, one);
    for wrong in [
        notes(&[("", "x")]),
        notes(&[("a\0b", "x")]),
        notes(&[(&"n".repeat(300), "x")]),
    ] {
        let refused = connection.fs_write(None, path.as_str(), None, wrong, &mut &b"new"[..]);
        assert_eq!(kind_of(refused), RequestFailureKind::Invalid);
    }
    assert_eq!(fs::read(&path).unwrap(), b"", "nothing was written");
    assert!(write(&mut connection, &path, b"").unwrap().metadata.is_empty());
    let mut value = [0; 8];
    assert_eq!(rustix::fs::getxattr(path.as_str(), "user.other", &mut value[..]), Ok(5));

    // Where there is no such thing, only who wants it is refused.
    let before = fs::read("/proc/self/comm").unwrap();
    let refused = connection.fs_write(None, "/proc/self/comm", None, one, &mut &b"changed"[..]);
    assert_eq!(kind_of(refused), RequestFailureKind::Invalid);
    assert_eq!(fs::read("/proc/self/comm").unwrap(), before);
    assert!(connection.fs_stat(None, "/proc/self/comm").unwrap().metadata.is_empty());
}

#[test]
fn an_upload_that_breaks_off_leaves_no_new_file() {
    let dir = dir();
    fs::write(at(&dir, "there"), "old").unwrap();
    let (new, there) = (at(&dir, "new"), at(&dir, "there"));
    for path in [&new, &there] {
        let result = connect().fs_write(None, path.as_str(), None, BTreeMap::new(), &mut Breaking(300_000));
        assert!(matches!(result, Err(Error::Local { .. })), "{result:?}");
    }
    wait_until(|| !Path::new(&new).exists());
    // Of one that was there before, what came is there.
    wait_until(|| fs::read(&there).unwrap() == [b'x'; 300_000]);
}

#[test]
fn a_full_disk_is_told_in_the_midst_and_the_rest_is_not_sent() {
    let small = Small::new();
    let mut connection = connect();
    let mut source = Breaking(1 << 30);
    let result = connection.fs_write(None, at(&small.0, "file"), None, BTreeMap::new(), &mut source);
    assert_eq!(kind_of(result), RequestFailureKind::NoSpace);
    assert!(source.0 > 1 << 29, "most of it was not read");
    assert_eq!(fs::read_dir(small.0.path()).unwrap().count(), 0);
    connection.ping().unwrap();
    // The same in a copy from another file system, which stays.
    let dir = dir();
    fs::write(at(&dir, "large"), vec![1; 2 << 20]).unwrap();
    let refused = connection.fs_rename(None, at(&dir, "large"), at(&small.0, "large"));
    assert_eq!(kind_of(refused), RequestFailureKind::NoSpace);
    let refused = connection.fs_compose(None, vec![at(&dir, "large").into()], at(&small.0, "large"));
    assert_eq!(kind_of(refused), RequestFailureKind::NoSpace);
    assert_eq!(fs::metadata(at(&dir, "large")).unwrap().len(), 2 << 20);
    assert_eq!(fs::read_dir(small.0.path()).unwrap().count(), 0);
}
