//! Volumes: whose they are, what is done with their files and by whom, and what sandboxes have of them.

use axum::body::Body;
use bytes::Bytes;
use control::{AuditLog, Quota, Tenants};
use futures_util::stream;
use gateway::{LimitsConfig, VolumesConfig};
use http::Request;
use node_api::VolumeSource;
use serde_json::{Value, json};

use crate::support::{Bed, Got, request, until};

/// A new volume's token.
async fn make(bed: &Bed, name: &str) -> String {
    let made = bed.post("/volumes", json!({"name": name})).await.is(201);
    assert_eq!(
        (made["name"].as_str(), made["volumeID"].as_str()),
        (Some(name), Some(name))
    );
    made["token"].as_str().unwrap().to_owned()
}

/// A request about files, which shows a token.
async fn content(bed: &Bed, token: &str, method: &str, path: &str, body: impl Into<Body>) -> Got {
    let request = Request::builder()
        .method(method)
        .uri(format!("/volumecontent/{path}"))
        .header("host", "127.0.0.1:3000")
        .header("authorization", format!("Bearer {token}"));
    bed.send(request.body(body.into()).unwrap()).await
}

#[tokio::test]
async fn a_volume_is_made_found_listed_and_removed() {
    let bed = Bed::new();
    let token = make(&bed, "data").await;
    bed.post("/volumes", json!({"name": "data"})).await.is(409);
    for name in ["", "../x", "a b", ".x"] {
        bed.post("/volumes", json!({"name": name})).await.is(400);
    }
    bed.post("/volumes", json!({})).await.is(400);
    make(&bed, "more").await;
    let list = bed.get("/volumes").await.is(200);
    assert_eq!(
        list,
        json!([{"volumeID": "data", "name": "data"}, {"volumeID": "more", "name": "more"}])
    );
    let found = bed.get("/volumes/data").await.is(200);
    assert_eq!(found, json!({"volumeID": "data", "name": "data", "token": token}));
    // Others have none of this.
    let other = |method, path| bed.send(request(method, path, Some(&bed.other_key), Value::Null));
    assert_eq!(other("GET", "/volumes").await.is(200), json!([]));
    other("GET", "/volumes/data").await.is(404);
    other("DELETE", "/volumes/data").await.is(404);
    bed.get("/volumes/none").await.is(404);
    bed.get("/volumes/..%2Fx").await.is(404);
    bed.ask("DELETE", "/volumes/none", Value::Null).await.is(404);
    bed.ask("DELETE", "/volumes/data", Value::Null).await.is(204);
    bed.get("/volumes/data").await.is(404);
}

#[tokio::test]
async fn a_tenant_has_so_many() {
    let bed = Bed::with_volumes(VolumesConfig {
        most: 2,
        ..VolumesConfig::default()
    });
    make(&bed, "a").await;
    make(&bed, "b").await;
    bed.post("/volumes", json!({"name": "c"})).await.is(409);
}

#[tokio::test]
async fn a_tenants_quota_bounds_its_volumes_by_number_and_size() {
    let bed = Bed::with_volumes(VolumesConfig {
        most: 1,
        ..VolumesConfig::default()
    });
    let set = |volumes, space| {
        let quota = Quota {
            volumes,
            volume_space: space,
            ..Quota::default()
        };
        bed.store.set_quota("one", quota).unwrap();
    };
    // In place of what everybody may have.
    set(Some(3), None);
    make(&bed, "a").await;
    make(&bed, "b").await;
    let told = |got: Got| {
        assert_eq!(got.header("should-retry"), Some("false"));
        got.is(429)["message"].as_str().unwrap().to_owned()
    };
    set(None, Some((5 << 30) / 2));
    bed.post("/volumes", json!({"name": "a"})).await.is(409);
    set(Some(3), Some((5 << 30) / 2));
    let why = told(bed.post("/volumes", json!({"name": "c"})).await);
    assert!(why.contains("3072 MiB of volumes") && why.contains("2560"), "{why}");
    set(Some(2), None);
    let why = told(bed.post("/volumes", json!({"name": "c"})).await);
    assert!(why.contains("3 volumes") && why.contains("quota is 2"), "{why}");
    // What is limited of volumes is not of sandboxes.
    bed.make(Value::Null).await;
    bed.ask("DELETE", "/volumes/a", Value::Null).await.is(204);
    make(&bed, "c").await;
}

#[tokio::test]
async fn files_are_written_and_read_by_the_volumes_token() {
    let bed = Bed::new();
    let token = make(&bed, "data").await;
    let ask = |method, path: &str, body: &'static str| {
        let path = path.to_owned();
        let (bed, token) = (&bed, &token);
        async move { content(bed, token, method, &path, body).await }
    };
    let made = ask("PUT", "data/file?path=/a.txt&mode=384", "hello").await.is(201);
    assert_eq!(
        (made["name"].as_str(), made["type"].as_str()),
        (Some("a.txt"), Some("file"))
    );
    assert_eq!(
        (made["path"].as_str(), made["size"].as_u64(), made["mode"].as_u64()),
        (Some("/a.txt"), Some(5), Some(0o600))
    );
    for field in ["atime", "mtime", "ctime"] {
        assert!(made[field].as_str().unwrap().starts_with("20"), "{made}");
    }
    ask("PUT", "data/file?path=/a.txt", "x").await.is(409);
    ask("PUT", "data/file?path=/a.txt&force=true", "longer text")
        .await
        .is(201);
    let got = ask("GET", "data/file?path=a.txt", "").await;
    assert_eq!(got.header("content-length"), Some("11"));
    assert_eq!(got.is(200), "longer text");
    ask("GET", "data/file?path=/none", "").await.is(404);
    ask("PUT", "data/file?path=/d/e", "x").await.is(404);
    ask("POST", "data/dir?path=/d/e", "").await.is(404);
    let made = ask("POST", "data/dir?path=/d/e&force=true", "").await.is(201);
    assert_eq!(
        (made["type"].as_str(), made["mode"].as_u64()),
        (Some("directory"), Some(0o755))
    );
    ask("POST", "data/dir?path=/d/e", "").await.is(409);
    ask("GET", "data/file?path=/d", "").await.is(400);
    let names = |list: Value| -> Vec<String> {
        let all = list.as_array().unwrap().iter();
        all.map(|one| one["path"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(ask("GET", "data/dir?path=/", "").await.is(200)), ["/a.txt", "/d"]);
    assert_eq!(
        names(ask("GET", "data/dir?path=/&depth=2", "").await.is(200)),
        ["/a.txt", "/d", "/d/e"]
    );
    ask("GET", "data/dir?path=/&depth=65", "").await.is(400);
    ask("GET", "data/dir?path=/none", "").await.is(404);
    ask("GET", "data/dir", "").await.is(400);
    let changed = ask("PATCH", "data/path?path=/a.txt", r#"{"mode": 292}"#).await.is(200);
    assert_eq!(changed["mode"], 0o444);
    ask("PATCH", "data/path?path=/none", "{}").await.is(404);
    ask("PATCH", "data/path?path=/a.txt", r#"{"mode": "rw"}"#).await.is(400);
    assert_eq!(ask("GET", "data/path?path=/a.txt", "").await.is(200)["mode"], 0o444);
    ask("GET", "data/path?path=/../x", "").await.is(400);
    ask("DELETE", "data/path?path=/d", "").await.is(204);
    ask("DELETE", "data/path?path=/d", "").await.is(404);
    ask("DELETE", "data/path?path=/", "").await.is(400);
    assert_eq!(names(ask("GET", "data/dir?path=/", "").await.is(200)), ["/a.txt"]);
}

#[tokio::test]
async fn files_are_large_and_come_in_pieces() {
    let bed = Bed::new();
    let token = make(&bed, "data").await;
    let piece = |byte: u8| Ok::<_, std::io::Error>(Bytes::from(vec![byte; 1 << 20]));
    let body = Body::from_stream(stream::iter([piece(b'a'), piece(b'b'), piece(b'c')]));
    let made = content(&bed, &token, "PUT", "data/file?path=/big", body).await.is(201);
    assert_eq!(made["size"], 3 << 20);
    let got = content(&bed, &token, "GET", "data/file?path=/big", Body::empty()).await;
    let text = got.is(200);
    let text = text.as_str().unwrap();
    assert!(text.len() == 3 << 20 && text.starts_with('a') && text.ends_with('c'));
    // One that breaks off is told.
    let broken = Body::from_stream(stream::iter([piece(b'a'), Err(std::io::Error::other("gone"))]));
    content(&bed, &token, "PUT", "data/file?path=/broken", broken)
        .await
        .is(400);
    let empty = content(&bed, &token, "PUT", "data/file?path=/empty", Body::empty())
        .await
        .is(201);
    assert_eq!(empty["size"], 0);
    let got = content(&bed, &token, "GET", "data/file?path=/empty", Body::empty()).await;
    assert_eq!(got.header("content-length"), Some("0"));
}

#[tokio::test]
async fn no_token_opens_another_volume() {
    let bed = Bed::new();
    let (token, other) = (make(&bed, "data").await, make(&bed, "more").await);
    content(&bed, &token, "PUT", "data/file?path=/secret", "x")
        .await
        .is(201);
    for shown in [other.as_str(), "", "x", &bed.key, &token.replace('~', "")] {
        for (method, path) in [
            ("GET", "file"),
            ("GET", "path"),
            ("GET", "dir"),
            ("DELETE", "path"),
            ("PUT", "file"),
            ("POST", "dir"),
            ("PATCH", "path"),
        ] {
            let path = format!("data/{path}?path=/secret&force=true");
            let refused = content(&bed, shown, method, &path, Body::empty()).await.is(401);
            assert!(
                refused["message"].as_str().unwrap().contains("token of this volume"),
                "{refused}"
            );
        }
    }
    bed.get("/volumecontent/data/path?path=/secret").await.is(401);
    content(&bed, &token, "GET", "data/file?path=/secret", Body::empty())
        .await
        .is(200);
    // Nor a later one of the same name.
    bed.ask("DELETE", "/volumes/data", Value::Null).await.is(204);
    content(&bed, &token, "GET", "data/path?path=/", Body::empty())
        .await
        .is(404);
    assert_ne!(make(&bed, "data").await, token);
    content(&bed, &token, "GET", "data/path?path=/", Body::empty())
        .await
        .is(404);
}

#[tokio::test]
async fn requests_about_files_are_bounded_and_changes_written_down() {
    let bed = Bed::with_burst(3);
    let token = make(&bed, "data").await;
    content(&bed, &token, "PUT", "data/file?path=/a", "x").await.is(201);
    content(&bed, &token, "DELETE", "data/path?path=/none", "")
        .await
        .is(404);
    content(&bed, &token, "GET", "data/path?path=/a", "").await.is(200);
    content(&bed, &token, "GET", "data/path?path=/a", "").await.is(429);
    let rows = bed.store.audited(Some("one"), 10).unwrap();
    let row = |action: &str| rows.iter().find(|row| row.action.starts_with(action)).unwrap();
    let (put, delete) = (row("PUT of /volumecontent"), row("DELETE of /volumecontent"));
    assert_eq!(
        (put.object.as_str(), put.outcome, put.tenant.as_str()),
        ("data /a", 201, "one")
    );
    assert_eq!(delete.outcome, 404);
}

/// As an API's changes are: whoever leaves in the midst of one leaves no change that nobody knows of.
#[tokio::test]
async fn a_change_is_written_down_also_if_its_client_leaves() {
    let bed = Bed::new();
    let token = make(&bed, "data").await;
    let go_on = bed.node.hold("volume");
    let asked = content(&bed, &token, "POST", "data/dir?path=/d", "");
    let waits = tokio::time::timeout(std::time::Duration::from_millis(50), asked).await;
    assert!(waits.is_err(), "it is held");
    go_on.send(()).unwrap();
    until("the row", async || {
        let rows = bed.store.audited(Some("one"), 10).unwrap();
        rows.iter().any(|row| row.object == "data /d" && row.outcome == 201)
    })
    .await;
    content(&bed, &token, "GET", "data/path?path=/d", "").await.is(200);
}

#[tokio::test]
async fn sandboxes_have_volumes() {
    let bed = Bed::with(LimitsConfig::default());
    make(&bed, "data").await;
    let mounts = json!([{"name": "data", "path": "/mnt/data"}]);
    let id = bed.make(json!({"volumeMounts": mounts})).await;
    let made = bed.node.sandbox(&id).unwrap().config.volumes;
    assert_eq!((made.len(), &made[0].source), (1, &VolumeSource::Tenant("data".into())));
    assert_eq!((made[0].target.as_str(), made[0].read_only), ("/mnt/data", false));
    let told = bed.get(&format!("/sandboxes/{id}")).await.is(200);
    assert_eq!(told["volumeMounts"], mounts);
    bed.ask("DELETE", "/volumes/data", Value::Null).await.is(409);
    // Of what goes on from a snapshot too.
    let plain = bed.make(json!({})).await;
    let snapshot = bed
        .post(&format!("/sandboxes/{plain}/snapshots"), json!({}))
        .await
        .is(201);
    let clone = bed
        .make(json!({"templateID": snapshot["snapshotID"], "volumeMounts": mounts}))
        .await;
    assert_eq!(bed.node.sandbox(&clone).unwrap().config.volumes, made);
    let told = bed.get(&format!("/sandboxes/{plain}")).await.is(200);
    assert_eq!(told["volumeMounts"], Value::Null);
}
