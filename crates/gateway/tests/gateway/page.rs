//! The page: its files as a browser gets them, and the way of its terminal to a sandbox.

use axum::body::Body;
use http::{Request, Response, StatusCode};
use serde_json::{Value, json};

use crate::support::Bed;

async fn ask(bed: &Bed, method: &str, path: &str, tag: Option<&str>) -> (Response<()>, Vec<u8>) {
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "127.0.0.1:3000");
    if let Some(tag) = tag {
        request = request.header("if-none-match", tag);
    }
    let (head, body) = bed
        .service
        .answer(request.body(Body::empty()).unwrap())
        .await
        .into_parts();
    let bytes = axum::body::to_bytes(body, 4 << 20).await.unwrap();
    (Response::from_parts(head, ()), bytes.to_vec())
}

fn header<'a>(response: &'a Response<()>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

#[tokio::test]
async fn files_come_with_their_types_and_a_policy() {
    let bed = Bed::new();
    for (path, kind) in [
        ("/ui/", "text/html"),
        ("/ui/index.html", "text/html"),
        ("/ui/js/app.js", "text/javascript"),
        ("/ui/vendor/xterm/xterm.mjs", "text/javascript"),
        ("/ui/css/page.css", "text/css"),
        ("/ui/icon.svg", "image/svg+xml"),
        ("/ui/vendor/xterm/LICENSE", "text/plain"),
    ] {
        let (head, body) = ask(&bed, "GET", path, None).await;
        assert_eq!(head.status(), 200, "{path}");
        assert!(header(&head, "content-type").starts_with(kind), "{path}: {head:?}");
        let policy = header(&head, "content-security-policy");
        assert!(
            policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"),
            "{policy}"
        );
        let scripts = policy
            .split(';')
            .find(|part| part.trim().starts_with("script-src"))
            .unwrap();
        assert_eq!(scripts.trim(), "script-src 'self'");
        for (name, value) in [
            ("x-frame-options", "DENY"),
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cross-origin-opener-policy", "same-origin"),
            ("cache-control", "no-cache"),
        ] {
            assert_eq!(header(&head, name), value, "{path}");
        }
        assert!(head.headers().get("set-cookie").is_none() && !body.is_empty());
    }
}

#[tokio::test]
async fn what_a_browser_has_it_is_not_sent_again() {
    let bed = Bed::new();
    let (head, body) = ask(&bed, "GET", "/ui/js/app.js", None).await;
    let tag = header(&head, "etag").to_owned();
    assert!(tag.len() == 34 && tag.starts_with('"'), "{tag}");
    for shown in [tag.clone(), format!("W/{tag}"), format!("\"other\", {tag}")] {
        let (head, none) = ask(&bed, "GET", "/ui/js/app.js", Some(&shown)).await;
        assert_eq!((head.status(), none.len()), (StatusCode::NOT_MODIFIED, 0), "{shown}");
        assert_eq!(header(&head, "etag"), tag);
    }
    let (head, again) = ask(&bed, "GET", "/ui/js/app.js", Some("\"other\"")).await;
    assert_eq!((head.status(), &again), (StatusCode::OK, &body));
    // Another file has another one.
    let (head, _) = ask(&bed, "GET", "/ui/js/api.js", Some(&tag)).await;
    assert_eq!(head.status(), 200);
    let (head, none) = ask(&bed, "HEAD", "/ui/js/app.js", None).await;
    assert_eq!((head.status(), none.len()), (StatusCode::OK, 0));
    assert_eq!(header(&head, "content-length"), body.len().to_string());
}

#[tokio::test]
async fn nothing_but_the_page_is_below_its_path() {
    let bed = Bed::new();
    for path in [
        "/ui/../Cargo.toml",
        "/ui/%2e%2e/Cargo.toml",
        "/ui/..%2f..%2fCargo.toml",
        "/ui/js/../../Cargo.toml",
        "/ui//etc/passwd",
        "/ui/%2fetc%2fpasswd",
        "/ui/js",
        "/ui/js/",
        "/ui/index.html/",
        "/ui/INDEX.HTML",
        "/ui/README.md",
        "/ui/vendor/xterm/README.md",
        "/ui/x/index.html",
        "/ui/js/../index.html",
        "/ui/js/app.js%00",
    ] {
        let (head, body) = ask(&bed, "GET", path, None).await;
        assert_eq!(head.status(), 404, "{path}");
        assert_eq!(header(&head, "content-type"), "application/json", "{path}");
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["code"], 404);
    }
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        assert_eq!(
            ask(&bed, method, "/ui/js/app.js", None).await.0.status(),
            405,
            "{method}"
        );
    }
    for (path, to) in [("/", "/ui/"), ("/ui", "/ui/")] {
        let (head, _) = ask(&bed, "GET", path, None).await;
        assert!(head.status().is_redirection(), "{path}");
        assert_eq!(header(&head, "location"), to);
    }
}

#[tokio::test]
async fn a_terminal_reaches_processes_and_nothing_else() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    for method in ["Start", "Connect", "SendInput", "SendSignal", "Update"] {
        let (head, body) = ask(&bed, "POST", &format!("/ui/process/{id}/{method}?path=/x"), None).await;
        assert_eq!(head.status(), 200);
        let told: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (&told["id"], &told["path"]),
            (&json!(id), &json!(format!("/process.Process/{method}")))
        );
        // A browser takes it for no page, whatever a guest has made of it.
        assert!(header(&head, "content-security-policy").ends_with("sandbox"));
        assert_eq!(header(&head, "x-content-type-options"), "nosniff");
        assert_eq!(header(&head, "cache-control"), "no-store");
    }
    for path in [
        format!("/ui/process/{id}/List"),
        format!("/ui/process/{id}/..%2f..%2ffiles"),
        format!("/ui/process/{id}/"),
        "/ui/process/x/Start".to_owned(),
    ] {
        let (head, _) = ask(&bed, "POST", &path, None).await;
        assert!(matches!(head.status().as_u16(), 404 | 405), "{path}: {}", head.status());
    }
    assert_eq!(
        ask(&bed, "GET", &format!("/ui/process/{id}/Start"), None)
            .await
            .0
            .status(),
        405
    );
    assert_eq!(
        ask(&bed, "POST", "/ui/process/0123456789ab/Start", None)
            .await
            .0
            .status(),
        502
    );
}

#[tokio::test]
async fn a_terminal_wants_the_sandboxs_token() {
    let bed = Bed::with_envd(std::sync::Arc::new(gateway::Facade::default()));
    let id = bed.make(Value::Null).await;
    let other = bed.make(Value::Null).await;
    let token = async |id: &str| {
        let told = bed.get(&format!("/sandboxes/{id}")).await.is(200);
        told["envdAccessToken"].as_str().unwrap().to_owned()
    };
    let call = async |token: Option<&str>| {
        let mut request = Request::post(format!("/ui/process/{id}/Update"))
            .header("host", "127.0.0.1:3000")
            .header("content-type", "application/json")
            .header("x-api-key", &bed.key);
        if let Some(token) = token {
            request = request.header("x-access-token", token);
        }
        let body = Body::from(json!({"process": {"pid": 1}}).to_string());
        bed.send(request.body(body).unwrap()).await.status
    };
    for bad in [None, Some("x"), Some(&*token(&other).await)] {
        assert_eq!(call(bad).await, StatusCode::UNAUTHORIZED, "{bad:?}");
    }
    assert_ne!(call(Some(&token(&id).await)).await, StatusCode::UNAUTHORIZED);
}
