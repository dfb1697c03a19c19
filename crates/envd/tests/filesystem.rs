//! Files and directories, as the SDKs ask for them, in the real agent.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use common::{call_with, eventually, fails, ok, sandbox, stream};
use serde_json::{Value, json};

const STAT: &str = "filesystem.Filesystem/Stat";
const LIST: &str = "filesystem.Filesystem/ListDir";
const MAKE: &str = "filesystem.Filesystem/MakeDir";
const MOVE: &str = "filesystem.Filesystem/Move";
const REMOVE: &str = "filesystem.Filesystem/Remove";
const WATCH: &str = "filesystem.Filesystem/WatchDir";
const CREATE: &str = "filesystem.Filesystem/CreateWatcher";
const EVENTS: &str = "filesystem.Filesystem/GetWatcherEvents";
const DROP: &str = "filesystem.Filesystem/RemoveWatcher";

fn path(path: &Path) -> Value {
    json!({"path": path.to_str().unwrap()})
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_there_is_told() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let file = directory.path().join("a.txt");
    fs::write(&file, "hello").unwrap();
    fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
    let entry = ok(&sandbox, STAT, path(&file)).await["entry"].take();
    assert!(entry["modifiedTime"].as_str().unwrap().ends_with('Z'), "{entry}");
    let mut rest = entry;
    rest.as_object_mut().unwrap().remove("modifiedTime");
    let expected = json!({
        "name": "a.txt", "type": "FILE_TYPE_FILE", "path": file.to_str().unwrap(), "size": "5", "mode": 0o640,
        "permissions": "-rw-r-----", "owner": "root", "group": "root",
    });
    assert_eq!(rest, expected);

    let link = directory.path().join("link");
    symlink("a.txt", &link).unwrap();
    let entry = ok(&sandbox, STAT, path(&link)).await["entry"].take();
    assert_eq!(entry["type"], "FILE_TYPE_FILE");
    assert_eq!(entry["symlinkTarget"], file.canonicalize().unwrap().to_str().unwrap());
    assert_eq!(
        (&entry["isSymlink"], &entry["permissions"]),
        (&json!(true), &json!("Lrwxrwxrwx"))
    );

    let (code, message) = fails(&sandbox, STAT, path(&directory.path().join("none"))).await;
    assert_eq!(code, "not_found");
    assert!(message.contains("none"), "{message}");
    // The home of the user who asks, and one who is not there.
    assert_eq!(ok(&sandbox, STAT, json!({"path": ""})).await["entry"]["path"], "/root");
    let nobody = [("authorization", "Basic bm8tc3VjaC11c2VyOg==")];
    let (status, answer) = call_with(&sandbox, STAT, &nobody, path(&file)).await;
    assert_eq!((status, &answer["code"]), (401, &json!("unauthenticated")), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_are_listed_as_deep_as_asked() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    fs::create_dir_all(directory.path().join("a/b/c")).unwrap();
    fs::write(directory.path().join("z"), "").unwrap();
    let names = async |depth: Option<u32>| {
        let mut request = path(directory.path());
        if let Some(depth) = depth {
            request["depth"] = json!(depth);
        }
        let listed = ok(&sandbox, LIST, request).await;
        let entries = listed["entries"].as_array().unwrap();
        let name = |entry: &Value| entry["name"].as_str().unwrap().to_owned();
        entries.iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(names(None).await, ["a", "z"]);
    assert_eq!(names(Some(1)).await, ["a", "z"]);
    assert_eq!(names(Some(2)).await, ["a", "b", "z"]);
    assert_eq!(names(Some(99)).await, ["a", "b", "c", "z"]);
    let empty = ok(&sandbox, LIST, path(&directory.path().join("a/b/c"))).await;
    assert_eq!(empty, json!({}));
    assert_eq!(
        fails(&sandbox, LIST, path(&directory.path().join("z"))).await.0,
        "invalid_argument"
    );
    assert_eq!(
        fails(&sandbox, LIST, path(&directory.path().join("y"))).await.0,
        "not_found"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn many_entries_come_in_one_list() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    for n in 0..3000 {
        fs::write(
            directory
                .path()
                .join(format!("a-file-with-a-name-of-some-length-{n:04}")),
            "",
        )
        .unwrap();
    }
    let listed = ok(&sandbox, LIST, path(directory.path())).await;
    assert_eq!(listed["entries"].as_array().unwrap().len(), 3000);
}

#[tokio::test(flavor = "multi_thread")]
async fn things_are_made_moved_and_removed() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let (made, moved) = (directory.path().join("a/b"), directory.path().join("c/d"));
    let entry = ok(&sandbox, MAKE, path(&made)).await["entry"].take();
    assert_eq!(
        (&entry["type"], &entry["name"]),
        (&json!("FILE_TYPE_DIRECTORY"), &json!("b"))
    );
    assert!(made.is_dir());
    assert_eq!(fails(&sandbox, MAKE, path(&made)).await.0, "already_exists");
    fs::write(made.join("file"), "x").unwrap();
    assert_eq!(
        fails(&sandbox, MAKE, path(&made.join("file"))).await.0,
        "invalid_argument"
    );

    let both = json!({"source": made.to_str().unwrap(), "destination": moved.to_str().unwrap()});
    let entry = ok(&sandbox, MOVE, both.clone()).await["entry"].take();
    assert_eq!(entry["path"], moved.to_str().unwrap());
    assert!(moved.join("file").exists() && !made.exists());
    assert_eq!(fails(&sandbox, MOVE, both).await.0, "not_found");
    assert_eq!(
        fails(&sandbox, MOVE, json!({"source": "a"})).await.0,
        "invalid_argument"
    );

    assert_eq!(ok(&sandbox, REMOVE, path(&moved)).await, json!({}));
    assert!(!moved.exists());
    ok(&sandbox, REMOVE, path(&moved)).await;
    // Not the whole home, by a slip.
    assert_eq!(fails(&sandbox, REMOVE, json!({})).await.0, "invalid_argument");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_in_a_directory_is_streamed() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    fs::create_dir(directory.path().join("sub")).unwrap();
    let mut request = path(directory.path());
    request["recursive"] = json!(true);
    request["includeEntry"] = json!(true);
    let mut events = stream(&sandbox, WATCH, &[], request).await;
    assert_eq!(events.message().await, json!({"start": {}}));
    fs::write(directory.path().join("sub/a"), "hello").unwrap();
    let created = events.message().await["filesystem"].take();
    assert_eq!(
        (&created["name"], &created["type"]),
        (&json!("sub/a"), &json!("EVENT_TYPE_CREATE"))
    );
    assert_eq!(created["entry"]["type"], "FILE_TYPE_FILE");
    fs::remove_file(directory.path().join("sub/a")).unwrap();
    loop {
        let event = events.message().await["filesystem"].take();
        if event["type"] == "EVENT_TYPE_REMOVE" {
            assert_eq!((&event["name"], event.get("entry")), (&json!("sub/a"), None));
            break;
        }
    }
    for (missing, code) in [("none", "not_found"), ("file", "invalid_argument")] {
        fs::write(directory.path().join("file"), "").unwrap();
        let end = stream(&sandbox, WATCH, &[], path(&directory.path().join(missing)))
            .await
            .end()
            .await;
        assert_eq!(end["error"]["code"], code);
        assert_eq!(
            fails(&sandbox, CREATE, path(&directory.path().join(missing))).await.0,
            code
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_in_a_directory_is_kept_until_it_is_asked_for() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let id = ok(&sandbox, CREATE, path(directory.path())).await["watcherId"].take();
    let watcher = json!({"watcherId": id});
    assert_eq!(ok(&sandbox, EVENTS, watcher.clone()).await, json!({}));
    fs::write(directory.path().join("a"), "x").unwrap();
    let events = eventually("an event", async || {
        ok(&sandbox, EVENTS, watcher.clone()).await.get("events").cloned()
    })
    .await;
    assert_eq!(events[0], json!({"name": "a", "type": "EVENT_TYPE_CREATE"}));
    // Another sandbox's watchers are not this one's.
    assert_eq!(fails(&common::sandbox(), EVENTS, watcher.clone()).await.0, "not_found");
    assert_eq!(ok(&sandbox, DROP, watcher.clone()).await, json!({}));
    assert_eq!(fails(&sandbox, EVENTS, watcher.clone()).await.0, "not_found");
    assert_eq!(fails(&sandbox, DROP, watcher).await.0, "not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_has_so_many_watchers() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let mut ids = Vec::new();
    for _ in 0..64 {
        ids.push(ok(&sandbox, CREATE, path(directory.path())).await["watcherId"].take());
    }
    assert_eq!(
        fails(&sandbox, CREATE, path(directory.path())).await.0,
        "resource_exhausted"
    );
    ok(&sandbox, DROP, json!({"watcherId": ids[0]})).await;
    ok(&sandbox, CREATE, path(directory.path())).await;
}
