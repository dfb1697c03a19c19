//! Files as their users see them: what is at a path, in a directory and at the end of a link, names that change, files that become one,
//! what is refused and under which name.

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use agent_api::{EntryKind, Error, OsText, RequestFailureKind};
use common::connect;
use common::files::{NOBODY, at, dir, kind_of, names, run};
use tempfile::TempDir;

#[test]
fn what_is_at_a_path_is_told_of_links_too() {
    let dir = dir();
    fs::write(at(&dir, "file"), "12345").unwrap();
    fs::set_permissions(at(&dir, "file"), fs::Permissions::from_mode(0o4711)).unwrap();
    symlink("file", at(&dir, "one")).unwrap();
    symlink(at(&dir, "one"), at(&dir, "two")).unwrap();
    symlink("nowhere", at(&dir, "dangling")).unwrap();
    symlink("circle", at(&dir, "circle")).unwrap();
    let mut connection = connect();
    let file = connection.fs_stat(None, at(&dir, "file")).unwrap();
    let data = fs::metadata(at(&dir, "file")).unwrap();
    assert_eq!((file.kind, file.size, file.mode), (EntryKind::File, 5, data.mode()));
    assert_eq!((file.owner.as_str(), file.group.as_str()), ("root", "root"));
    assert_eq!(file.modified_ns, data.mtime() * 1_000_000_000 + data.mtime_nsec());
    assert_eq!((file.target, file.target_kind), (None, None));
    let link = connection.fs_stat(None, at(&dir, "two")).unwrap();
    assert_eq!((link.kind, link.target_kind), (EntryKind::Link, Some(EntryKind::File)));
    let file = fs::canonicalize(at(&dir, "file")).unwrap();
    assert_eq!(link.target.unwrap().as_os_str(), file.as_os_str());
    for (name, target) in [("dangling", "nowhere"), ("circle", "circle")] {
        let link = connection.fs_stat(None, at(&dir, name)).unwrap();
        assert_eq!((link.kind, link.target_kind), (EntryKind::Link, None));
        assert_eq!(link.target.unwrap(), OsText::from(target));
    }
    assert_eq!(connection.fs_stat(None, "/dev/null").unwrap().kind, EntryKind::Other);
    assert_eq!(connection.fs_stat(None, "/").unwrap().kind, EntryKind::Directory);
    let relative = at(&dir, "sub/../file").trim_start_matches('/').to_owned();
    let found = connection.fs_stat(NOBODY, relative).unwrap();
    assert_eq!(found.path, at(&dir, "file").into());
    connection.ping().unwrap();
}

#[test]
fn what_cannot_be_looked_at_has_a_name_and_the_connection_stays_usable() {
    let dir = dir();
    fs::write(at(&dir, "file"), "").unwrap();
    symlink("circle", at(&dir, "circle")).unwrap();
    let mut connection = connect();
    let long = at(&dir, &"n".repeat(256));
    for (path, kind) in [
        (at(&dir, "missing"), RequestFailureKind::NotFound),
        (at(&dir, "file/below"), RequestFailureKind::NotADirectory),
        (at(&dir, "circle/below"), RequestFailureKind::Invalid),
        (at(&dir, "a\0b"), RequestFailureKind::Invalid),
        (long, RequestFailureKind::Invalid),
        ("/n".repeat(3000), RequestFailureKind::Invalid),
    ] {
        assert_eq!(kind_of(connection.fs_stat(None, path.as_str())), kind, "{path}");
    }
    let stranger = connection.fs_stat(Some("no-such-user"), "/");
    assert_eq!(kind_of(stranger), RequestFailureKind::NotFound);
    connection.ping().unwrap();
}

#[test]
fn a_directory_is_listed_in_order_and_as_deep_as_wanted() {
    let dir = dir();
    for path in ["b/x/deep", "a", "c"] {
        fs::create_dir_all(at(&dir, path)).unwrap();
    }
    fs::write(at(&dir, "b/file"), "").unwrap();
    symlink("b", at(&dir, "link")).unwrap();
    let mut connection = connect();
    let mut list = |path: &str, depth| connection.fs_list(None, at(&dir, path), depth);
    let level = names(&list("", 1).unwrap(), &dir);
    assert_eq!(level, ["a", "b", "c", "link"]);
    assert_eq!(names(&list("", 0).unwrap(), &dir), level);
    let whole = names(&list("", u32::MAX).unwrap(), &dir);
    assert_eq!(whole, ["a", "b", "b/file", "b/x", "b/x/deep", "c", "link"]);
    assert_eq!(
        names(&list("", 2).unwrap(), &dir),
        whole
            .iter()
            .filter(|name| *name != "b/x/deep")
            .cloned()
            .collect::<Vec<_>>()
    );
    // Only the path's own link is followed.
    assert_eq!(names(&list("link", 1).unwrap(), &dir), ["link/file", "link/x"]);
    assert_eq!(list("a", 1).unwrap(), []);
    assert_eq!(kind_of(list("b/file", 1)), RequestFailureKind::NotADirectory);
    assert_eq!(kind_of(list("missing", 1)), RequestFailureKind::NotFound);
}

#[test]
fn large_directories_and_deep_trees_are_listed_whole_and_removed() {
    let dir = dir();
    for number in 0..20_000 {
        File::create(at(&dir, &format!("{number:05}"))).unwrap();
    }
    let mut connection = connect();
    let list = names(&connection.fs_list(None, at(&dir, ""), 1).unwrap(), &dir);
    assert_eq!(list.len(), 20_000);
    assert!(list.is_sorted());
    let deep = vec!["d"; 1500].join("/");
    fs::create_dir_all(at(&dir, &format!("deep/{deep}"))).unwrap();
    let list = connection.fs_list(None, at(&dir, "deep"), u32::MAX).unwrap();
    assert_eq!(list.len(), 1500);
    let path = dir.path().to_owned();
    connection.fs_remove(None, at(&dir, "")).unwrap();
    assert!(!path.exists());
    connection.fs_remove(None, path.to_str().unwrap()).unwrap();
}

#[test]
fn directories_are_made_with_those_above_and_are_the_users() {
    let dir = dir();
    fs::write(at(&dir, "file"), "").unwrap();
    let mut connection = connect();
    let made = connection.fs_make_dir(NOBODY, at(&dir, "a/b/c")).unwrap();
    assert_eq!((made.kind, made.path), (EntryKind::Directory, at(&dir, "a/b/c").into()));
    assert_eq!((made.owner.as_str(), made.group.as_str()), ("4242", "4343"));
    for name in ["a", "a/b"] {
        let data = fs::metadata(at(&dir, name)).unwrap();
        assert_eq!((data.uid(), data.gid(), data.mode() & 0o777), (4242, 4343, 0o755));
    }
    assert_eq!(fs::metadata(dir.path()).unwrap().uid(), 0);
    for (name, kind) in [
        ("a/b/c", RequestFailureKind::AlreadyExists),
        ("file", RequestFailureKind::NotADirectory),
        ("file/x", RequestFailureKind::NotADirectory),
    ] {
        assert_eq!(kind_of(connection.fs_make_dir(None, at(&dir, name))), kind, "{name}");
    }
    let refused = connection.fs_make_dir(None, "/proc/no-such-directory");
    assert!(matches!(
        kind_of(refused),
        RequestFailureKind::NotFound | RequestFailureKind::PermissionDenied
    ));
}

#[test]
fn a_name_is_changed_and_what_is_there_replaced() {
    let dir = dir();
    fs::create_dir_all(at(&dir, "tree/sub")).unwrap();
    fs::create_dir_all(at(&dir, "full/sub")).unwrap();
    fs::write(at(&dir, "one"), "one").unwrap();
    fs::write(at(&dir, "two"), "two").unwrap();
    let mut connection = connect();
    let mut rename = |from: &str, to: &str| connection.fs_rename(NOBODY, at(&dir, from), at(&dir, to));
    let entry = rename("one", "two").unwrap();
    assert_eq!((entry.size, entry.owner.as_str()), (3, "root"));
    assert_eq!(fs::read_to_string(at(&dir, "two")).unwrap(), "one");
    rename("tree", "new/place").unwrap();
    assert!(Path::new(&at(&dir, "new/place/sub")).is_dir());
    assert_eq!(fs::metadata(at(&dir, "new")).unwrap().uid(), 4242);
    rename("two", "two").unwrap();
    for (from, to, kind) in [
        ("missing", "other/x", RequestFailureKind::NotFound),
        ("new/place", "new/place/sub/x", RequestFailureKind::Invalid),
        ("new/place", "full", RequestFailureKind::AlreadyExists),
        ("two", "full", RequestFailureKind::IsADirectory),
        ("full", "two", RequestFailureKind::NotADirectory),
        ("full", "two/x", RequestFailureKind::NotADirectory),
    ] {
        assert_eq!(kind_of(rename(from, to)), kind, "{from} {to}");
    }
    assert!(!Path::new(&at(&dir, "other")).exists());
    assert_eq!(
        kind_of(connection.fs_rename(None, "/", at(&dir, "x"))),
        RequestFailureKind::Invalid
    );
}

#[test]
fn a_tree_moves_to_another_file_system_whole_or_not_at_all() {
    let (dir, other) = (dir(), tempfile::tempdir_in("/dev/shm").unwrap());
    let device = |dir: &TempDir| fs::metadata(dir.path()).unwrap().dev();
    assert_ne!(
        device(&dir),
        device(&other),
        "/dev/shm is to be another file system than the temporary directory"
    );
    fs::create_dir(at(&dir, "tree")).unwrap();
    let mut connection = connect();
    let note = BTreeMap::from([("note".to_owned(), "kept".to_owned())]);
    let mut bytes: &[u8] = b"text";
    connection
        .fs_write(NOBODY, at(&dir, "tree/sub/file"), Some(0o640), note.clone(), &mut bytes)
        .unwrap();
    symlink("sub/file", at(&dir, "tree/link")).unwrap();
    // Many, so that a pipe is filled.
    for number in 0..300 {
        fs::write(at(&dir, &format!("tree/{number}")), vec![b'x'; 1000]).unwrap();
    }
    let entry = connection
        .fs_rename(None, at(&dir, "tree"), at(&other, "above/moved"))
        .unwrap();
    assert_eq!(entry.kind, EntryKind::Directory);
    assert!(!Path::new(&at(&dir, "tree")).exists());
    let file = connection.fs_stat(None, at(&other, "above/moved/sub/file")).unwrap();
    assert_eq!((file.owner.as_str(), file.mode & 0o7777, file.size), ("4242", 0o640, 4));
    assert_eq!(file.metadata, note);
    assert_eq!(
        fs::read_link(at(&other, "above/moved/link")).unwrap(),
        Path::new("sub/file")
    );
    assert_eq!(fs::read_dir(at(&other, "above/moved")).unwrap().count(), 302);

    // A file back, over another.
    fs::write(at(&dir, "file"), "old").unwrap();
    connection
        .fs_rename(None, at(&other, "above/moved/sub/file"), at(&dir, "file"))
        .unwrap();
    assert_eq!(fs::read_to_string(at(&dir, "file")).unwrap(), "text");
    // What cannot be copied stays where it is, all of it.
    let pipe = at(&other, "above/moved/pipe");
    run(&["mkfifo", &pipe]);
    let refused = connection.fs_rename(None, at(&other, "above/moved"), at(&dir, "moved"));
    assert_eq!(kind_of(refused), RequestFailureKind::Invalid);
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing but the file");
    fs::create_dir_all(at(&dir, "full/sub")).unwrap();
    fs::remove_file(&pipe).unwrap();
    let refused = connection.fs_rename(None, at(&other, "above/moved"), at(&dir, "full"));
    assert_eq!(kind_of(refused), RequestFailureKind::AlreadyExists);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn what_links_lead_to_is_not_removed_and_the_root_is_not_either() {
    let dir = dir();
    fs::create_dir_all(at(&dir, "kept/sub")).unwrap();
    fs::create_dir(at(&dir, "tree")).unwrap();
    symlink("../kept", at(&dir, "tree/link")).unwrap();
    symlink("tree", at(&dir, "link")).unwrap();
    let mut connection = connect();
    connection.fs_remove(None, at(&dir, "link")).unwrap();
    assert!(Path::new(&at(&dir, "tree/link")).is_symlink());
    connection.fs_remove(None, at(&dir, "tree")).unwrap();
    assert!(Path::new(&at(&dir, "kept/sub")).exists() && !Path::new(&at(&dir, "tree")).exists());
    connection.fs_remove(None, at(&dir, "missing/below")).unwrap();
    for path in ["/", "/x/..", "~"] {
        assert_eq!(
            kind_of(connection.fs_remove(NOBODY, path)),
            RequestFailureKind::Invalid,
            "{path}"
        );
    }
    let refused = kind_of(connection.fs_remove(None, "/proc/self/status"));
    assert_eq!(refused, RequestFailureKind::PermissionDenied);
}

#[test]
fn files_become_one_in_order() {
    let (dir, other) = (dir(), tempfile::tempdir_in("/dev/shm").unwrap());
    let parts = [at(&dir, "1"), at(&other, "2"), at(&dir, "3")];
    let lengths = [100_000, 70_001, 3];
    let mut whole = Vec::new();
    for ((path, length), byte) in parts.iter().zip(lengths).zip(*b"abc") {
        let bytes = vec![byte; length];
        fs::write(path, &bytes).unwrap();
        whole.extend(bytes);
    }
    fs::write(at(&dir, "there"), "old").unwrap();
    let mut connection = connect();
    let sources = || parts.iter().map(|path| path.as_str().into()).collect::<Vec<OsText>>();
    let mut missing = sources();
    missing.push(at(&dir, "missing").into());
    let refused = connection.fs_compose(NOBODY, missing, at(&dir, "there"));
    assert_eq!(kind_of(refused), RequestFailureKind::NotFound);
    assert_eq!(fs::read(at(&dir, "there")).unwrap(), b"old");
    let entry = connection.fs_compose(NOBODY, sources(), at(&dir, "there")).unwrap();
    assert_eq!(
        (entry.owner.as_str(), entry.size, entry.mode & 0o7777),
        ("4242", 170_004, 0o644)
    );
    assert!(fs::read(at(&dir, "there")).unwrap() == whole);
    assert!(parts.iter().all(|path| !Path::new(path).exists()));

    // Into one of them, and one twice.
    fs::write(&parts[0], "1").unwrap();
    fs::write(&parts[2], "3").unwrap();
    let sources = [&parts[2], &parts[0], &parts[2]].map(|path| path.as_str().into());
    connection
        .fs_compose(None, sources.to_vec(), parts[0].as_str())
        .unwrap();
    assert_eq!(fs::read(&parts[0]).unwrap(), b"313");
    assert!(!Path::new(&parts[2]).exists());
    for (sources, kind) in [
        (vec![], RequestFailureKind::Invalid),
        (vec![at(&dir, "").into()], RequestFailureKind::IsADirectory),
        (vec!["/dev/zero".into()], RequestFailureKind::Invalid),
    ] {
        assert_eq!(kind_of(connection.fs_compose(None, sources, at(&dir, "x"))), kind);
    }
    fs::create_dir(at(&dir, "directory")).unwrap();
    let refused = connection.fs_compose(None, vec![parts[0].as_str().into()], at(&dir, "directory"));
    assert_eq!(kind_of(refused), RequestFailureKind::IsADirectory);
    assert_eq!(fs::read(&parts[0]).unwrap(), b"313");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "1, there and directory");
}

#[test]
fn the_agent_says_how_much_there_is() {
    let info = connect().hello().unwrap();
    let root = rustix::fs::statvfs("/").unwrap();
    assert_eq!(info.disk_total_bytes, root.f_blocks * root.f_frsize);
    assert!(info.disk_used_bytes > 0 && info.disk_used_bytes <= info.disk_total_bytes);
    assert!(info.cpus > 0 && info.mem_cached_kib > 0 && info.mem_cached_kib < info.mem_total_kib);
}

#[test]
fn nothing_is_done_before_there_is_a_root() {
    let config = agent::ServerConfig {
        root: agent::RootMode::Prepared(Box::new(|_| Ok(()))),
        ..agent::ServerConfig::in_place()
    };
    let server = agent::Server::new(config, common::reaper());
    let refusal = |result: Result<(), Error>| match result {
        Err(Error::Refused(message)) => assert!(message.contains("Prepare"), "{message}"),
        other => panic!("{other:?}"),
    };
    let mut connection = common::connect_to(&server);
    refusal(connection.fs_stat(None, "/").map(drop));
    refusal(
        connection
            .fs_write(None, "/x", None, BTreeMap::new(), &mut &b"x"[..])
            .map(drop),
    );
    refusal(connection.fs_watch(None, "/", false).map(drop));
    connection.ping().unwrap();
    refusal(connection.connect_port(1).map(drop));
}
