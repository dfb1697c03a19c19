//! Whole files by HTTP, who may ask, and the rest of envd's plain HTTP, in the real agent.

mod common;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use common::{Gone, call, guarded, http, request, sandbox, whole};
use envd::{Access, Memory, Sandbox};
use serde_json::{Value, json};

const BINARY: (&str, &str) = ("content-type", "application/octet-stream");

/// The address of a file; the names of the tests need no escapes.
fn at(path: &Path) -> String {
    format!("/files?path={}", path.to_str().unwrap())
}

fn json_of(bytes: &Bytes) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// Half a file goes away.
async fn gone(path: &Path) {
    common::eventually("the end of half a file", async || (!path.exists()).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_written_and_read_as_it_comes() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let file = directory.path().join("new/a.bin");
    let bytes: Vec<u8> = (0..1_500_000_u32).flat_map(u32::to_le_bytes).collect();
    let chunks: Vec<Result<Bytes, std::io::Error>> = bytes
        .chunks(77_777)
        .map(|chunk| Ok(Bytes::copy_from_slice(chunk)))
        .collect();
    let body = Body::from_stream(futures_util::stream::iter(chunks));
    let (status, answer) = http(&sandbox, "POST", &at(&file), &[BINARY], body).await;
    assert_eq!(status, 200, "{answer:?}");
    assert_eq!(
        json_of(&answer),
        json!([{"path": file.to_str().unwrap(), "name": "a.bin", "type": "file"}])
    );
    assert_eq!(fs::read(&file).unwrap(), bytes);

    let (status, headers, got) = whole(sandbox.handle(request("GET", &at(&file), &[], Body::empty())).await).await;
    assert_eq!(status, 200);
    assert_eq!(got, bytes);
    assert_eq!(headers["content-length"], bytes.len().to_string());
    assert_eq!(headers["content-disposition"], "inline; filename=\"a.bin\"");
    assert_eq!(headers["content-type"], "application/octet-stream");
    assert!(headers["last-modified"].to_str().unwrap().ends_with(" GMT"));
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_of_a_file_are_read() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let file = directory.path().join("a");
    fs::write(&file, "0123456789").unwrap();
    let ask = async |range: &str| {
        let answer = sandbox
            .handle(request("GET", &at(&file), &[("range", range)], Body::empty()))
            .await;
        let (status, headers, bytes) = whole(answer).await;
        let range = headers
            .get("content-range")
            .map(|value| value.to_str().unwrap().to_owned());
        (status, range, String::from_utf8(bytes.to_vec()).unwrap())
    };
    let part = |range: &str, text: &str| (206, Some(range.to_owned()), text.to_owned());
    assert_eq!(ask("bytes=2-4").await, part("bytes 2-4/10", "234"));
    assert_eq!(ask("bytes=7-").await, part("bytes 7-9/10", "789"));
    assert_eq!(ask("bytes=-2").await, part("bytes 8-9/10", "89"));
    assert_eq!(ask("bytes=0-1,4-5").await, (200, None, "0123456789".to_owned()));
    let (status, range, _) = ask("bytes=10-").await;
    assert_eq!((status, range.as_deref()), (416, Some("bytes */10")));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_says_why() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    for (address, status) in [
        (at(&directory.path().join("none")), 404),
        (at(directory.path()), 400),
        (at(Path::new("/dev/null")), 400),
        ("/files".to_owned(), 400),
        (format!("{}&username=no-such-user", at(directory.path())), 401),
        (format!("{}&username=a:b", at(directory.path())), 401),
    ] {
        let (got, answer) = http(&sandbox, "GET", &address, &[], "").await;
        assert_eq!(got, status, "{address}: {answer:?}");
        let answer = json_of(&answer);
        assert_eq!(answer["code"], status);
        assert!(!answer["message"].as_str().unwrap().is_empty());
    }
    assert_eq!(http(&sandbox, "PUT", "/files?path=a", &[], "").await.0, 405);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_form_writes_several_files() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let part = |name: &str, file: &str, text: &str| {
        format!("--xx\r\ncontent-disposition: form-data; name=\"{name}\"; filename=\"{file}\"\r\n\r\n{text}\r\n")
    };
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let form = [
        part("file", &path("a"), "one"),
        part("other", "x", "left out"),
        part("file", &path("sub/b"), ""),
        "--xx--\r\n".to_owned(),
    ];
    let header = [
        ("content-type", "multipart/form-data; boundary=xx"),
        ("x-metadata-K", "v"),
    ];
    let (status, answer) = http(&sandbox, "POST", "/files", &header, form.concat()).await;
    assert_eq!(status, 200, "{answer:?}");
    let answer = json_of(&answer);
    assert_eq!(
        (&answer[0]["path"], &answer[1]["name"]),
        (&json!(path("a")), &json!("b"))
    );
    assert_eq!(answer.as_array().unwrap().len(), 2);
    assert_eq!(fs::read_to_string(path("a")).unwrap(), "one");
    assert_eq!(fs::read_to_string(path("sub/b")).unwrap(), "");

    // The address says where the one file goes.
    let form = [part("file", "elsewhere", "two"), "--xx--\r\n".to_owned()].concat();
    let (status, _) = http(&sandbox, "POST", &at(Path::new(&path("c"))), &header, form).await;
    assert_eq!(
        (status, fs::read_to_string(path("c")).unwrap()),
        (200, "two".to_owned())
    );

    let twice = [
        part("file", &path("d"), "1"),
        part("file", &path("d"), "2"),
        "--xx--\r\n".to_owned(),
    ];
    assert_eq!(http(&sandbox, "POST", "/files", &header, twice.concat()).await.0, 400);
    // A form is not held whole to find its beginning, or the end of a part's header.
    let endless = "x".repeat(8 << 20);
    for form in [endless.clone(), format!("--xx\r\ncontent-disposition: {endless}")] {
        assert_eq!(http(&sandbox, "POST", "/files", &header, form).await.0, 400);
    }
    let large = [part("file", &path("large"), &endless), "--xx--\r\n".to_owned()];
    assert_eq!(http(&sandbox, "POST", "/files", &header, large.concat()).await.0, 200);
    assert_eq!(fs::metadata(path("large")).unwrap().len(), 8 << 20);
    let cut = [part("file", &path("e"), "1")];
    assert_eq!(http(&sandbox, "POST", "/files", &header, cut.concat()).await.0, 400);
    gone(Path::new(&path("e"))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_compressed_is_written_as_it_was() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let file = directory.path().join("a");
    let text = "hello ".repeat(100_000);
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    let packed = encoder.finish().unwrap();
    let headers = [BINARY, ("content-encoding", "gzip")];
    assert_eq!(
        http(&sandbox, "POST", &at(&file), &headers, packed.clone()).await.0,
        200
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
    let cut = packed[..packed.len() / 2].to_vec();
    let other = directory.path().join("b");
    assert_eq!(http(&sandbox, "POST", &at(&other), &headers, cut).await.0, 400);
    gone(&other).await;
    let unknown = [BINARY, ("content-encoding", "br")];
    assert_eq!(http(&sandbox, "POST", &at(&file), &unknown, "").await.0, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_written_says_why() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let file = directory.path().join("a");
    for (address, headers, status) in [
        (at(directory.path()), vec![BINARY], 400),
        ("/files".to_owned(), vec![BINARY], 400),
        (at(&file), vec![("content-type", "text/plain")], 400),
        (at(&file), vec![], 400),
        (at(&file), vec![("content-type", "multipart/form-data")], 400),
        (at(&file), vec![BINARY, ("x-metadata-a", "ü")], 400),
        (format!("{}&username=no-such-user", at(&file)), vec![BINARY], 401),
    ] {
        let (got, answer) = http(&sandbox, "POST", &address, &headers, "x".repeat(200_000)).await;
        assert_eq!(got, status, "{address} {headers:?}: {answer:?}");
        assert_eq!(json_of(&answer)["code"], status);
    }
    assert!(!file.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn several_files_become_one() {
    let (sandbox, directory) = (sandbox(), tempfile::tempdir().unwrap());
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("a"), "one ").unwrap();
    fs::write(path("b"), "two").unwrap();
    let compose = async |sources: Value, to: &str| {
        let body = json!({"source_paths": sources, "destination": to}).to_string();
        http(
            &sandbox,
            "POST",
            "/files/compose",
            &[("content-type", "application/json")],
            body,
        )
        .await
    };
    let (status, answer) = compose(json!([path("a"), path("b")]), &path("c")).await;
    assert_eq!(
        (status, json_of(&answer)),
        (200, json!({"path": path("c"), "name": "c", "type": "file"}))
    );
    assert_eq!(fs::read_to_string(path("c")).unwrap(), "one two");
    assert!(!Path::new(&path("a")).exists());
    assert_eq!(compose(json!([path("a")]), &path("d")).await.0, 404);
    assert_eq!(compose(json!([]), &path("d")).await.0, 400);
    assert_eq!(compose(json!([path("c")]), &path("c")).await.0, 400);
    assert_eq!(http(&sandbox, "POST", "/files/compose", &[], "{").await.0, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_those_are_answered_who_may_ask() {
    let (sandbox, directory) = (guarded(), tempfile::tempdir().unwrap());
    let file = directory.path().join("a");
    fs::write(&file, "x").unwrap();
    let token = ("x-access-token", "secret");
    let ask =
        async |method: &str, uri: &str, headers: &[(&str, &str)]| http(&sandbox, method, uri, headers, "{}").await.0;
    assert_eq!(ask("GET", "/health", &[]).await, 204);
    for (method, uri) in [
        ("GET", "/metrics"),
        ("GET", "/envs"),
        ("POST", "/files/compose"),
        ("GET", &at(&file)),
    ] {
        assert_eq!(ask(method, uri, &[]).await, 401, "{uri}");
        assert_eq!(ask(method, uri, &[("x-access-token", "wrong")]).await, 401, "{uri}");
    }
    assert_eq!(ask("GET", "/envs", &[token]).await, 200);
    assert_eq!(ask("GET", &at(&file), &[token]).await, 200);
    let json_media = ("content-type", "application/json");
    for (headers, status) in [(vec![json_media], 401), (vec![json_media, token], 200)] {
        assert_eq!(ask("POST", "/process.Process/List", &headers).await, status);
    }
    let stream = ("content-type", "application/connect+json");
    let answer = sandbox
        .handle(request("POST", "/process.Process/Start", &[stream], ""))
        .await;
    let (status, _, bytes) = whole(answer).await;
    assert!(status == 200 && bytes[0] == 2 && bytes.windows(15).any(|text| text == b"unauthenticated"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_for_outsiders_is_refused() {
    let sandbox = sandbox();
    for path in ["/init", "/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse"] {
        for method in ["POST", "GET"] {
            let (status, answer) = http(&sandbox, method, path, &[], "").await;
            assert_eq!((status, &json_of(&answer)["code"]), (403, &json!(403)), "{path}");
        }
    }
    assert_eq!(http(&sandbox, "GET", "/else", &[], "").await.0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_says_what_it_is() {
    let sandbox = sandbox();
    let (status, answer) = http(&sandbox, "GET", "/envs", &[], "").await;
    assert_eq!((status, &json_of(&answer)["FROM"]), (200, &json!("sandbox")));
    let (status, answer) = http(&sandbox, "GET", "/metrics", &[], "").await;
    let answer = json_of(&answer);
    assert_eq!(status, 200);
    for name in [
        "ts",
        "cpu_count",
        "mem_total",
        "mem_used",
        "mem_total_mib",
        "disk_total",
        "disk_used",
    ] {
        assert!(answer[name].as_u64().unwrap() > 0, "{name}: {answer}");
    }
    assert!(answer["mem_used"].as_u64() < answer["mem_total"].as_u64());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_origin_may_ask() {
    let sandbox = guarded();
    let asked = [
        ("origin", "https://app.example"),
        ("access-control-request-headers", "x-access-token"),
    ];
    let answer = sandbox
        .handle(request("OPTIONS", "/process.Process/List", &asked, ""))
        .await;
    let (status, headers, _) = whole(answer).await;
    assert_eq!(status, 204);
    assert_eq!(headers["access-control-allow-origin"], "*");
    assert_eq!(headers["access-control-allow-headers"], "x-access-token");
    let answer = sandbox.handle(request("GET", "/envs", &[], "")).await;
    assert_eq!(answer.headers()["access-control-allow-origin"], "*");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_does_not_run_says_so_as_the_sdks_expect() {
    let sandbox = Sandbox::new("abc123", Arc::new(Gone), Access::default(), Memory::default().share());
    let gone = json!({"sandboxId": "abc123", "message": "The sandbox was not found", "code": 502});
    let (status, answer) = http(&sandbox, "GET", "/health", &[], "").await;
    assert_eq!((status, json_of(&answer)), (502, gone.clone()));
    assert_eq!(
        call(&sandbox, "process.Process/List", json!({})).await,
        (502, gone.clone())
    );
    assert_eq!(
        call(&sandbox, "filesystem.Filesystem/Stat", json!({"path": "/"})).await,
        (502, gone.clone())
    );
    let headers = [("content-type", "application/connect+json")];
    let start = common::envelope(&json!({"process": {"cmd": "true"}}));
    let (status, answer) = http(&sandbox, "POST", "/process.Process/Start", &headers, start).await;
    assert_eq!((status, json_of(&answer)), (502, gone.clone()));
    let (status, answer) = http(&sandbox, "POST", "/files?path=a", &[BINARY], "x").await;
    assert_eq!((status, json_of(&answer)), (502, gone));
}
