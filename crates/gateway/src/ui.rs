//! The page for people at `/ui/`: files that are part of this program, and the way of its terminal to a sandbox's processes. The page asks
//! the API as everybody does, with a key that its user gives it; what is here needs none. Knows no endpoint.
//!
//! Nothing that a guest has made is ever a document of this origin: of port 49983 only calls of `process.Process` pass, which answer in
//! JSON, and their answers are told to be no page.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri, header};
use sha2::{Digest, Sha256};

use crate::Error;
use crate::api::sandbox_id;
use crate::gateway::Gateway;
use crate::ports;

/// Where the page's terminal asks.
const PROCESS: &str = "/ui/process/{id}/{method}";

/// What a terminal needs of a sandbox's processes.
const METHODS: [&str; 5] = ["Start", "Connect", "SendInput", "SendSignal", "Update"];

/// What a browser may do with the page: load what is here, and ask this gateway. The terminal colours text by attributes.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src 'self'; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The same for answers that are no page.
const NO_PAGE: &str = "default-src 'none'; frame-ancestors 'none'; sandbox";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const IMAGE: &str = "image/svg+xml";
const TEXT: &str = "text/plain; charset=utf-8";

/// A file of the page.
struct File {
    path: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

macro_rules! files {
    ($($path:literal: $kind:ident,)*) => {
        [$(File { path: $path, kind: $kind, bytes: include_bytes!(concat!("../ui/", $path)) }),*]
    };
}

/// All of them.
static FILES: &[File] = &files![
    "index.html": HTML,
    "icon.svg": IMAGE,
    "css/base.css": STYLE,
    "css/page.css": STYLE,
    "js/api.js": SCRIPT,
    "js/app.js": SCRIPT,
    "js/chart.js": SCRIPT,
    "js/dom.js": SCRIPT,
    "js/format.js": SCRIPT,
    "js/list.js": SCRIPT,
    "js/login.js": SCRIPT,
    "js/logs.js": SCRIPT,
    "js/pools.js": SCRIPT,
    "js/process.js": SCRIPT,
    "js/sandbox.js": SCRIPT,
    "js/snapshots.js": SCRIPT,
    "js/templates.js": SCRIPT,
    "js/terminal.js": SCRIPT,
    "js/trace.js": SCRIPT,
    "vendor/xterm/LICENSE": TEXT,
    "vendor/xterm/LICENSE.addon-fit": TEXT,
    "vendor/xterm/addon-fit.mjs": SCRIPT,
    "vendor/xterm/xterm.css": STYLE,
    "vendor/xterm/xterm.mjs": SCRIPT,
];

/// The page's routes.
pub(crate) fn routes() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/", get(async || Redirect::to("/ui/")))
        .route("/ui", get(async || Redirect::permanent("/ui/")))
        .route("/ui/", get(async |headers: HeaderMap| file("index.html", &headers)))
        .route(
            "/ui/{*path}",
            get(async |Path(path): Path<String>, headers: HeaderMap| file(&path, &headers)),
        )
        .route(PROCESS, post(process))
}

/// The name of each file's content.
fn tags() -> &'static [HeaderValue] {
    static TAGS: OnceLock<Vec<HeaderValue>> = OnceLock::new();
    TAGS.get_or_init(|| {
        let tag = |file: &File| {
            let sum = hex::encode(Sha256::digest(file.bytes));
            HeaderValue::from_str(&format!("\"{}\"", sum.get(..32).unwrap_or(&sum)))
        };
        let none = HeaderValue::from_static("\"0\"");
        FILES
            .iter()
            .map(|file| tag(file).unwrap_or_else(|_| none.clone()))
            .collect()
    })
}

/// A file, unless whoever asks has it already. A path is looked for as it is: nothing here is a path of the host.
fn file(path: &str, asked: &HeaderMap) -> Response {
    let Some((file, tag)) = FILES.iter().zip(tags()).find(|(file, _)| file.path == path) else {
        return Error::NotFound {
            what: "file of the page",
            name: path.chars().take(100).collect(),
        }
        .into_response();
    };
    let has_it = asked
        .get(header::IF_NONE_MATCH)
        .and_then(|tags| tags.to_str().ok())
        .is_some_and(|tags| tags.split(',').any(|one| one.trim().trim_start_matches("W/") == tag));
    let mut response = match has_it {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => file.bytes.into_response(),
    };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(file.kind));
    headers.insert(header::ETAG, tag.clone());
    // Looked at each time: a gateway that was replaced has other files.
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    protect(headers, POLICY);
    response
}

fn protect(headers: &mut HeaderMap, policy: &'static str) {
    const OPENER: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
    const RESOURCE: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
    const PERMISSIONS: HeaderName = HeaderName::from_static("permissions-policy");
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (OPENER, "same-origin"),
        (RESOURCE, "same-origin"),
        (PERMISSIONS, "camera=(), geolocation=(), microphone=()"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

/// A call of a sandbox's processes, as at its port 49983: with the token that the API tells of the sandbox. It is here because the page
/// has one origin, whatever the sandboxes' names are.
async fn process(
    State(gateway): State<Arc<Gateway>>,
    Path((id, method)): Path<(String, String)>,
    mut request: Request<Body>,
) -> Response {
    let method = METHODS.into_iter().find(|known| *known == method);
    let Some((id, method)) = sandbox_id(&id).zip(method) else {
        return Error::NoEndpoint.into_response();
    };
    let path = format!("/process.Process/{method}");
    let Ok(uri) = Uri::try_from(path) else {
        return Error::NoEndpoint.into_response();
    };
    *request.uri_mut() = uri;
    let mut response = ports::serve(&gateway, id, envd::PORT, request).await;
    let headers = response.headers_mut();
    headers.remove(header::ACCESS_CONTROL_ALLOW_ORIGIN);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    protect(headers, NO_PAGE);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is in the directory is served, and nothing else is there.
    #[test]
    fn every_file_is_in_the_table() {
        fn walk(directory: &std::path::Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => walk(&path, found),
                    false => found.push(path.to_str().unwrap().to_owned()),
                }
            }
        }
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/ui/");
        let mut found = Vec::new();
        walk(root.as_ref(), &mut found);
        let mut found: Vec<&str> = found.iter().map(|path| path.strip_prefix(root).unwrap()).collect();
        found.retain(|path| !path.ends_with(".md"));
        found.sort_unstable();
        let mut listed: Vec<&str> = FILES.iter().map(|file| file.path).collect();
        listed.sort_unstable();
        assert_eq!(found, listed);
    }

    /// The policy would refuse it, and nobody would notice before a browser does.
    #[test]
    fn nothing_is_inline_or_of_another_origin() {
        for file in FILES.iter().filter(|file| !file.path.starts_with("vendor/")) {
            let text = std::str::from_utf8(file.bytes).unwrap();
            for bad in [
                "<style",
                " style=\"",
                " onclick",
                "javascript:",
                "https://",
                "innerHTML",
                "insertAdjacentHTML",
                "eval(",
            ] {
                assert!(!text.contains(bad), "{} has {bad}", file.path);
            }
            assert!(
                text.matches("<script").count() == text.matches("<script type=\"module\" src=\"").count(),
                "{}",
                file.path
            );
        }
    }

    /// A module is loaded by its path: one that is not in the table is a page that does nothing.
    #[test]
    fn modules_that_are_imported_are_there() {
        for file in FILES.iter().filter(|file| file.path.starts_with("js/")) {
            let text = std::str::from_utf8(file.bytes).unwrap();
            for import in text.split("from '").skip(1) {
                let name = import.split('\'').next().unwrap();
                let path = match name.strip_prefix("../") {
                    Some(path) => path.to_owned(),
                    None => format!("js/{}", name.strip_prefix("./").unwrap()),
                };
                assert!(
                    FILES.iter().any(|file| file.path == path),
                    "{} imports {name}",
                    file.path
                );
            }
        }
    }
}
