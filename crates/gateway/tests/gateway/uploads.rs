//! Uploads for builds: to whom they are promised, what is taken, and that nothing is left of what was not whole.

use std::time::Duration;

use axum::body::{Body, Bytes};
use control::{Files, StoredFile};
use gateway::LimitsConfig;
use http::Request;
use serde_json::{Value, json};

use crate::support::{Bed, Got, request, until};

pub(crate) const HASH: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A template that waits for its build: its id, and the build's.
pub(crate) async fn requested(bed: &Bed, body: Value) -> (String, String) {
    let made = bed.post("/v3/templates", body).await.is(202);
    let text = |key: &str| made[key].as_str().unwrap().to_owned();
    (text("templateID"), text("buildID"))
}

/// Where files of this hash are to be sent: the path.
pub(crate) async fn link(bed: &Bed, template: &str, hash: &str) -> (bool, String) {
    let told = bed.get(&format!("/templates/{template}/files/{hash}")).await.is(201);
    let url = told["url"].as_str().unwrap();
    let path = url.strip_prefix("http://127.0.0.1:3000").expect(url);
    (told["present"].as_bool().unwrap(), path.to_owned())
}

pub(crate) async fn put(bed: &Bed, path: &str, length: Option<usize>, body: Body) -> Got {
    let mut request = Request::put(path).header("host", "127.0.0.1:3000");
    if let Some(length) = length {
        request = request.header("content-length", length.to_string());
    }
    bed.send(request.body(body).unwrap()).await
}

#[tokio::test]
async fn files_are_taken_by_an_address_that_is_good_for_them_alone() {
    let bed = Bed::new();
    let (template, _) = requested(&bed, json!({"name": "web"})).await;
    let (present, path) = link(&bed, &template, HASH).await;
    assert!(!present);
    let other = "f".repeat(64);
    for bad in [
        path.replace(HASH, &other),
        path.replace("/one/", "/two/"),
        path.replace("expires=", "expires=1"),
        path.replace("signature=", "signature=0"),
        path.split('?').next().unwrap().to_owned(),
    ] {
        put(&bed, &bad, Some(1), Body::from("x")).await.is(403);
    }
    assert!(bed.uploads("one").is_empty() && bed.uploads("two").is_empty());
    put(&bed, &path, Some(5), Body::from("hello")).await.is(200);
    assert!(link(&bed, &template, HASH).await.0);
    assert_eq!(bed.uploads("one"), [HASH]);
    // Once more, as `force_upload` wants it.
    put(&bed, &path, Some(3), Body::from("bye")).await.is(200);
    let kept = bed.directory.path().join("state/uploads/one").join(HASH);
    assert_eq!(std::fs::read(&kept).unwrap(), b"bye");
    let mode = |path: &std::path::Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).unwrap().mode() & 0o777
    };
    assert_eq!((mode(&kept), mode(kept.parent().unwrap())), (0o600, 0o700));
    // Another tenant neither finds the template nor has the file.
    let foreign = request(
        "GET",
        &format!("/templates/{template}/files/{HASH}"),
        Some(&bed.other_key),
        Value::Null,
    );
    bed.send(foreign).await.is(404);
    let theirs = bed
        .send(request(
            "POST",
            "/v3/templates",
            Some(&bed.other_key),
            json!({"name": "web"}),
        ))
        .await
        .is(202);
    let path = format!("/templates/{}/files/{HASH}", theirs["templateID"].as_str().unwrap());
    let told = bed
        .send(request("GET", &path, Some(&bed.other_key), Value::Null))
        .await
        .is(201);
    assert_eq!(told["present"], false);
    for bad in ["x", "..%2f..%2fetc%2fpasswd", &HASH.to_uppercase()] {
        bed.get(&format!("/templates/{template}/files/{bad}")).await.is(400);
    }
}

#[tokio::test]
async fn what_is_too_large_or_not_whole_leaves_nothing() {
    let bed = Bed::with_builds(LimitsConfig::default(), |builds| {
        (builds.upload, builds.uploads) = (100, 150);
    });
    let (template, _) = requested(&bed, json!({"name": "web"})).await;
    let path = link(&bed, &template, HASH).await.1;
    put(&bed, &path, Some(101), Body::from(vec![0; 101])).await.is(413);
    put(&bed, &path, None, Body::from("x")).await.is(400);
    put(&bed, &path, Some(10), Body::from("short")).await.is(400);
    put(&bed, &path, Some(2), Body::from("long")).await.is(400);
    assert!(bed.uploads("one").is_empty(), "{:?}", bed.uploads("one"));
    assert!(!link(&bed, &template, HASH).await.0);
    put(&bed, &path, Some(100), Body::from(vec![0; 100])).await.is(200);
    let second = link(&bed, &template, &"f".repeat(64)).await.1;
    put(&bed, &second, Some(51), Body::from(vec![0; 51])).await.is(507);
    put(&bed, &second, Some(50), Body::from(vec![0; 50])).await.is(200);
    // The one in its place is not counted with it.
    put(&bed, &path, Some(99), Body::from(vec![0; 99])).await.is(200);
    assert_eq!(bed.uploads("one").len(), 2);
}

#[tokio::test]
async fn a_client_that_vanishes_leaves_nothing() {
    let bed = Bed::with_builds(LimitsConfig::default(), |builds| builds.uploads = 15);
    let (template, _) = requested(&bed, json!({"name": "web"})).await;
    let path = link(&bed, &template, HASH).await.1;
    let (send, body) = tokio::sync::mpsc::channel::<Result<Bytes, std::io::Error>>(1);
    let body = Body::from_stream(futures_util::stream::unfold(body, async |mut body| {
        let next = body.recv().await?;
        Some((next, body))
    }));
    let sends = put(&bed, &path, Some(10), body);
    let mut sends = std::pin::pin!(sends);
    send.send(Ok(Bytes::from_static(b"half"))).await.unwrap();
    let part = async || match bed.uploads("one").as_slice() {
        [one] => one.ends_with(".part"),
        _ => false,
    };
    until("a part", async || {
        let step = tokio::time::timeout(Duration::from_millis(5), sends.as_mut());
        assert!(step.await.is_err(), "it is not whole");
        part().await
    })
    .await;
    // While it is coming its bytes are taken.
    let second = link(&bed, &template, &"f".repeat(64)).await.1;
    put(&bed, &second, Some(10), Body::from(vec![0; 10])).await.is(507);
    send.send(Err(std::io::Error::other("gone"))).await.unwrap();
    sends.await.is(400);
    assert!(bed.uploads("one").is_empty());
    put(&bed, &second, Some(10), Body::from(vec![0; 10])).await.is(200);
}

/// Rows of so many empty files, of use just now.
fn fill(bed: &Bed, count: usize) {
    for number in 0..count {
        let file = StoredFile {
            tenant: "one".into(),
            hash: format!("{number:064x}"),
            bytes: 0,
            used: 1 << 40,
        };
        bed.store.put_file(&file).unwrap();
    }
}

#[tokio::test]
async fn uploads_are_counted_also_where_they_are_empty() {
    let bed = Bed::new();
    let (template, _) = requested(&bed, json!({"name": "web"})).await;
    fill(&bed, 999);
    let path = link(&bed, &template, HASH).await.1;
    put(&bed, &path, Some(0), Body::empty()).await.is(200);
    let one_more = link(&bed, &template, &"f".repeat(64)).await.1;
    put(&bed, &one_more, Some(0), Body::empty()).await.is(507);
    put(&bed, &path, Some(0), Body::empty()).await.is(200);
}

#[tokio::test]
async fn uploads_of_a_tenant_do_not_take_all_connections() {
    let bed = Bed::new();
    let (template, _) = requested(&bed, json!({"name": "web"})).await;
    let path = link(&bed, &template, HASH).await.1;
    let held = (0..64).map(|_| put(&bed, &path, Some(1), never()));
    let mut held = std::pin::pin!(futures_util::future::join_all(held));
    let step = tokio::time::timeout(Duration::from_millis(300), held.as_mut());
    assert!(step.await.is_err(), "none of them comes");
    put(&bed, &path, Some(1), Body::from("x")).await.is(503);
}

/// A body of which nothing comes, and which has no end.
fn never() -> Body {
    Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>())
}

#[tokio::test]
async fn an_upload_waits_for_its_turn_and_not_for_ever() {
    let bed = Bed::with_builds(LimitsConfig::default(), |builds| {
        builds.upload_turn = Duration::from_millis(400);
    });
    let (template, _) = requested(&bed, json!({"name": "web"})).await;
    let path = link(&bed, &template, HASH).await.1;
    // As many as are taken at once.
    let held = (0..4).map(|_| put(&bed, &path, Some(1), never()));
    let mut held = Box::pin(futures_util::future::join_all(held));
    let step = tokio::time::timeout(Duration::from_millis(200), held.as_mut());
    assert!(step.await.is_err(), "none of them comes");
    let late = put(&bed, &path, Some(1), Body::from("x"));
    let (late, _) = tokio::join!(late, tokio::time::timeout(Duration::from_secs(2), held.as_mut()));
    let told = late.is(503);
    assert!(told["message"].as_str().unwrap().contains("uploads"), "{told}");
    // One that ends makes place for it.
    let waits = put(&bed, &path, Some(1), Body::from("x"));
    let ends = async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        drop(held);
    };
    tokio::join!(waits, ends).0.is(200);
}

#[tokio::test]
async fn an_upload_that_takes_too_long_is_given_up() {
    let bed = Bed::with_builds(LimitsConfig::default(), |builds| {
        builds.upload_limit = Duration::from_secs(1);
    });
    let (template, _) = requested(&bed, json!({"name": "web"})).await;
    let path = link(&bed, &template, HASH).await.1;
    // It comes bit by bit, so that it is never silent for long.
    let drops = futures_util::stream::unfold((), async |()| {
        tokio::time::sleep(Duration::from_millis(50)).await;
        Some((Ok::<_, std::io::Error>(Bytes::from_static(b"x")), ()))
    });
    let told = put(&bed, &path, Some(1 << 20), Body::from_stream(drops)).await.is(400);
    assert!(told["message"].as_str().unwrap().contains("may take 1 s"), "{told}");
    assert!(bed.uploads("one").is_empty());
    put(&bed, &path, Some(1), Body::from("x")).await.is(200);
}

#[tokio::test]
async fn what_a_build_needs_stays() {
    let bed = Bed::with_builds(LimitsConfig::default(), |builds| builds.uploads = 15);
    let (template, build) = requested(&bed, json!({"name": "web"})).await;
    let path = link(&bed, &template, HASH).await.1;
    put(&bed, &path, Some(10), Body::from(vec![0; 10])).await.is(200);
    let copy = json!({"type": "COPY", "args": ["a", "/a"], "filesHash": HASH});
    let steps = json!([crate::builds::run("sleep 100"), copy]);
    crate::builds::start(
        &bed,
        &template,
        &build,
        json!({"fromImage": "python:3", "steps": steps}),
    )
    .await;
    let long_ago = StoredFile {
        tenant: "one".into(),
        hash: HASH.into(),
        bytes: 10,
        used: 1,
    };
    bed.store.put_file(&long_ago).unwrap();
    let other = link(&bed, &template, &"f".repeat(64)).await.1;
    put(&bed, &other, Some(10), Body::from(vec![0; 10])).await.is(507);
    bed.ask("DELETE", "/templates/web", Value::Null).await.is(204);
    until("space", async || {
        let got = put(&bed, &other, Some(10), Body::from(vec![0; 10])).await;
        got.status == 200
    })
    .await;
    assert_eq!(bed.uploads("one"), ["f".repeat(64)]);
}
