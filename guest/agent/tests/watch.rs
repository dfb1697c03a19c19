//! What happens in a directory, as it is told: each kind, directories that come and go, and more than anybody can take.

mod common;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use agent_api::message::{FsRequest, Reply, Request};
use agent_api::{Connection, Duplex, Error, RequestFailureKind, WatchEvent, WatchEventKind as Kind, Watching};
use common::connect;
use common::files::at;
use common::raw::{ask, raw, reply};

/// One write, and not an emptying besides.
fn append(path: &str) {
    let mut file = File::options().append(true).open(path).unwrap();
    file.write_all(b"x").unwrap();
}

fn event(name: &str, kind: Kind) -> WatchEvent {
    WatchEvent {
        name: name.into(),
        kind,
    }
}

/// A connection that is patient, but not for ever.
fn patient() -> Connection<UnixStream> {
    let connection = connect();
    connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    connection
}

/// What is told until something is, which is the last.
fn until(watching: &mut Watching<'_, UnixStream>, last: &WatchEvent) -> Vec<WatchEvent> {
    let mut all = Vec::new();
    while !all.contains(last) {
        all.extend(watching.events().unwrap());
    }
    all
}

#[test]
fn each_kind_is_told_once() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(at(&dir, "sub")).unwrap();
    fs::write(at(&dir, "before"), "").unwrap();
    let mut connection = patient();
    let mut watching = connection.fs_watch(None, at(&dir, ""), false).unwrap();
    File::create(at(&dir, "file")).unwrap();
    assert_eq!(watching.events().unwrap(), [event("file", Kind::Create)]);
    append(&at(&dir, "before"));
    assert_eq!(watching.events().unwrap(), [event("before", Kind::Write)]);
    fs::set_permissions(at(&dir, "file"), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(watching.events().unwrap(), [event("file", Kind::Attributes)]);
    fs::rename(at(&dir, "file"), at(&dir, "other")).unwrap();
    let mut told = until(&mut watching, &event("other", Kind::Create));
    assert_eq!(told, [event("file", Kind::Rename), event("other", Kind::Create)]);
    fs::remove_file(at(&dir, "other")).unwrap();
    assert_eq!(watching.events().unwrap(), [event("other", Kind::Remove)]);
    // Not what happens further down, nor what happens elsewhere.
    fs::write(at(&dir, "sub/file"), "x").unwrap();
    fs::create_dir(at(&dir, "end")).unwrap();
    fs::write(at(&dir, "end/file"), "x").unwrap();
    told = watching.events().unwrap();
    assert_eq!(told, [event("end", Kind::Create)]);
    assert_eq!(watching.end().unwrap(), []);
    // It is over, and the connection is as it was.
    File::create(at(&dir, "later")).unwrap();
    connection.ping().unwrap();
    assert_eq!(connection.fs_stat(None, at(&dir, "later")).unwrap().size, 0);
}

#[test]
fn directories_that_come_later_are_watched_with_what_is_in_them() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::create_dir_all(at(&dir, "a/b")).unwrap();
    fs::create_dir_all(at(&elsewhere, "tree/sub")).unwrap();
    fs::write(at(&elsewhere, "tree/sub/file"), "").unwrap();
    let mut connection = patient();
    let mut watching = connection.fs_watch(None, at(&dir, ""), true).unwrap();
    fs::write(at(&dir, "a/b/file"), "x").unwrap();
    let told = until(&mut watching, &event("a/b/file", Kind::Write));
    assert_eq!(told, [event("a/b/file", Kind::Create), event("a/b/file", Kind::Write)]);

    // In one go: what is in it may be there before anybody watches it.
    fs::create_dir_all(at(&dir, "new/deep")).unwrap();
    File::create(at(&dir, "new/deep/file")).unwrap();
    let told = until(&mut watching, &event("new/deep/file", Kind::Create));
    let wanted = ["new", "new/deep", "new/deep/file"].map(|name| event(name, Kind::Create));
    assert_eq!(told, wanted, "each once, parents first");
    append(&at(&dir, "new/deep/file"));
    assert_eq!(watching.events().unwrap(), [event("new/deep/file", Kind::Write)]);

    // A tree that is moved here, and one that is moved away.
    fs::rename(at(&elsewhere, "tree"), at(&dir, "tree")).unwrap();
    let told = until(&mut watching, &event("tree/sub/file", Kind::Create));
    let wanted = ["tree", "tree/sub", "tree/sub/file"].map(|name| event(name, Kind::Create));
    assert_eq!(told, wanted);
    fs::rename(at(&dir, "tree"), at(&elsewhere, "tree")).unwrap();
    assert_eq!(watching.events().unwrap(), [event("tree", Kind::Rename)]);
    fs::write(at(&elsewhere, "tree/sub/file"), "x").unwrap();
    // Within, it has its new name at once.
    fs::rename(at(&dir, "new"), at(&dir, "newer")).unwrap();
    let told = until(&mut watching, &event("newer/deep/file", Kind::Create));
    assert_eq!(
        told.first(),
        Some(&event("new", Kind::Rename)),
        "nothing of what is elsewhere"
    );
    append(&at(&dir, "newer/deep/file"));
    assert_eq!(
        watching.events().unwrap().first(),
        Some(&event("newer/deep/file", Kind::Write))
    );
    fs::remove_dir_all(at(&dir, "newer")).unwrap();
    let told = until(&mut watching, &event("newer", Kind::Remove));
    let removed: Vec<_> = told.into_iter().filter(|event| event.kind == Kind::Remove).collect();
    let wanted = ["newer/deep/file", "newer/deep", "newer"].map(|name| event(name, Kind::Remove));
    assert_eq!(removed, wanted);
    // The same name, again.
    fs::create_dir(at(&dir, "newer")).unwrap();
    assert_eq!(watching.events().unwrap(), [event("newer", Kind::Create)]);
    File::create(at(&dir, "newer/file")).unwrap();
    assert_eq!(watching.events().unwrap(), [event("newer/file", Kind::Create)]);
    watching.end().unwrap();
}

#[test]
fn files_that_come_while_a_directory_is_looked_into_are_told_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut connection = patient();
    let mut watching = connection.fs_watch(None, at(&dir, ""), true).unwrap();
    let base = dir.path().to_owned();
    let maker = std::thread::spawn(move || {
        for round in 0..50 {
            let path = base.join(format!("{round}"));
            fs::create_dir(&path).unwrap();
            for number in 0..20 {
                File::create(path.join(format!("{number}"))).unwrap();
            }
        }
        File::create(base.join("end")).unwrap();
    });
    let told = until(&mut watching, &event("end", Kind::Create));
    maker.join().unwrap();
    let mut names: Vec<_> = told.iter().map(|event| event.name.to_string()).collect();
    assert_eq!(names.len(), 50 * 21 + 1);
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 50 * 21 + 1, "nothing twice");
    watching.end().unwrap();
}

#[test]
fn the_directory_itself_may_change_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let path = at(&dir, "watched");
    fs::create_dir_all(at(&dir, "watched/sub")).unwrap();
    let mut connection = patient();
    let mut watching = connection.fs_watch(None, path.as_str(), true).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(watching.events().unwrap(), [event(".", Kind::Attributes)]);
    fs::set_permissions(at(&dir, "watched/sub"), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(watching.events().unwrap(), [event("sub", Kind::Attributes)]);
    fs::rename(&path, at(&dir, "moved")).unwrap();
    assert_eq!(watching.events().unwrap(), [event(".", Kind::Rename)]);
    // What is in its place is another matter.
    fs::create_dir(&path).unwrap();
    File::create(at(&dir, "moved/file")).unwrap();
    assert_eq!(watching.end().unwrap(), []);
    let mut watching = connection.fs_watch(None, path.as_str(), true).unwrap();
    fs::remove_dir(&path).unwrap();
    let told = until(&mut watching, &event(".", Kind::Remove));
    assert!(told.iter().all(|event| event.name == ".".into()), "{told:?}");
    watching.end().unwrap();
}

#[test]
fn what_cannot_be_watched_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(at(&dir, "file"), "").unwrap();
    let mut connection = connect();
    for (path, kind) in [
        (at(&dir, "missing"), RequestFailureKind::NotFound),
        (at(&dir, "file"), RequestFailureKind::NotADirectory),
        ("/a\0b".to_owned(), RequestFailureKind::Invalid),
    ] {
        match connection.fs_watch(None, path.as_str(), true).map(drop) {
            Err(Error::RequestFailed(failure)) => assert_eq!(failure.kind, kind, "{path}"),
            other => panic!("{other:?}"),
        }
    }
    // The kernel's own files take no watches: there are many.
    let watching = connection.fs_watch(None, "/proc/sys", true).unwrap();
    watching.end().unwrap();
    connection.ping().unwrap();
}

#[test]
fn directories_that_change_places_are_watched_where_they_are() {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let dir = tempfile::tempdir().unwrap();
    for path in ["a/x", "b/y"] {
        fs::create_dir_all(at(&dir, path)).unwrap();
    }
    let mut connection = patient();
    let mut watching = connection.fs_watch(None, at(&dir, ""), true).unwrap();
    for _ in 0..2 {
        renameat_with(CWD, at(&dir, "a"), CWD, at(&dir, "b"), RenameFlags::EXCHANGE).unwrap();
    }
    renameat_with(CWD, at(&dir, "a"), CWD, at(&dir, "b"), RenameFlags::EXCHANGE).unwrap();
    fs::write(at(&dir, "end"), "").unwrap();
    let told = until(&mut watching, &event("end", Kind::Create));
    for name in ["a", "b"] {
        assert!(
            told.contains(&event(name, Kind::Rename)) && told.contains(&event(name, Kind::Create)),
            "{told:?}"
        );
    }
    // Each of them, and what is in them, by the names that they have now.
    for path in ["a/1", "b/2", "b/x/3", "a/y/4"] {
        fs::write(at(&dir, path), "").unwrap();
        assert_eq!(watching.events().unwrap(), [event(path, Kind::Create)]);
    }
    // With a file that is in its place then there is one directory.
    renameat_with(CWD, at(&dir, "a"), CWD, at(&dir, "end"), RenameFlags::EXCHANGE).unwrap();
    until(&mut watching, &event("a", Kind::Create));
    fs::write(at(&dir, "end/y/5"), "").unwrap();
    until(&mut watching, &event("end/y/5", Kind::Create));
    assert_eq!(watching.end().unwrap(), []);
}

fn watch(path: &str) -> Request {
    let request = FsRequest::Watch {
        path: path.into(),
        recursive: true,
    };
    Request::Fs { user: None, request }
}

#[test]
fn a_flood_is_bounded_and_says_that_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (mut reader, writer) = raw();
    ask(&writer, &watch(&at(&dir, "")));
    assert_eq!(reply(&mut reader), Reply::Done);
    // Nobody reads: the socket is full, then the kernel's queue.
    let queue = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
    let many = queue.trim().parse::<usize>().unwrap() * 2;
    let long = "n".repeat(200);
    for number in 0..many {
        let path = at(&dir, &format!("{long}{}", number % 64));
        File::create(&path).unwrap();
        fs::remove_file(path).unwrap();
    }
    // Was not seen by anybody, and is watched nevertheless.
    fs::create_dir(at(&dir, "later")).unwrap();
    let mut lost = false;
    while !lost {
        let Reply::Watched(events) = reply(&mut reader) else {
            panic!("no events");
        };
        lost = events.iter().any(|event| event.kind == Kind::Lost);
    }
    File::create(at(&dir, "later/file")).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    let wanted = event("later/file", Kind::Create);
    loop {
        assert!(Instant::now() < end);
        match reply(&mut reader) {
            Reply::Watched(events) if events.contains(&wanted) => break,
            Reply::Watched(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn other_requests_are_refused_meanwhile_and_a_client_that_leaves_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut reader, writer) = raw();
    ask(&writer, &watch(&at(&dir, "")));
    assert_eq!(reply(&mut reader), Reply::Done);
    ask(&writer, &Request::Hello);
    assert!(matches!(reply(&mut reader), Reply::Refused { .. }));
    File::create(at(&dir, "file")).unwrap();
    assert_eq!(reply(&mut reader), Reply::Watched(vec![event("file", Kind::Create)]));
    reader.get_ref().close_writing();
    assert!(reader.read().unwrap().is_none(), "the agent leaves too");
}
