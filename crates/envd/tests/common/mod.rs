//! What the tests share: a sandbox whose agent is the real one, in this process, and the requests of the SDKs without a network.
#![allow(dead_code, reason = "each test file uses its part")]

use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use agent::{Reaper, Server, ServerConfig};
use agent_api::{ExecRequest, OsText, PROTOCOL};
use axum::body::{Body, BodyDataStream};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, Bytes, BytesMut};
use envd::{Access, Connecting, Guest, GuestError, Memory, Opened, Sandbox};
use futures_util::StreamExt;
use http::{HeaderMap, Request, Response};
use http_body_util::BodyExt;
use serde_json::Value;

/// How long a test waits for something that must happen.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The one agent of this process, with root `/`.
fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| Server::new(ServerConfig::in_place(), Reaper::start().unwrap()))
}

/// An agent in this process, and what its commands begin with.
pub(crate) struct InProcess(pub(crate) ExecRequest);

impl Guest for InProcess {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let handshake = || {
                let (mut near, far) = UnixStream::pair()?;
                server().serve_in_thread(far);
                let version = wire::offer(&mut near, PROTOCOL, None).map_err(std::io::Error::other)?;
                near.set_nonblocking(true)?;
                Ok::<_, std::io::Error>((near, version))
            };
            let failed = |error: std::io::Error| GuestError::Other(error.to_string());
            let (stream, version) = tokio::task::spawn_blocking(handshake)
                .await
                .map_err(|error| GuestError::Other(error.to_string()))?
                .map_err(failed)?;
            Ok(Opened {
                stream: tokio::net::UnixStream::from_std(stream).map_err(failed)?,
                command: self.0.clone(),
                version,
            })
        })
    }
}

/// What the sandboxes' commands begin with.
pub(crate) fn command() -> ExecRequest {
    ExecRequest {
        env: vec![
            OsText::from(format!("PATH={}", std::env::var("PATH").unwrap())),
            "FROM=sandbox".into(),
        ],
        cwd: "/".into(),
        ..ExecRequest::default()
    }
}

/// A sandbox that everybody may ask.
pub(crate) fn sandbox() -> Arc<Sandbox> {
    Sandbox::new(
        "abc123",
        Arc::new(InProcess(command())),
        Access::default(),
        Memory::default().share(),
    )
}

/// A sandbox that those may ask who have the token `secret`.
pub(crate) fn guarded() -> Arc<Sandbox> {
    let access = Access {
        token: Some("secret".to_owned()),
    };
    Sandbox::new(
        "abc123",
        Arc::new(InProcess(command())),
        access,
        Memory::default().share(),
    )
}

/// A guest that does not run.
pub(crate) struct Gone;

impl Guest for Gone {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async { Err(GuestError::NotRunning) })
    }
}

/// A request with headers.
pub(crate) fn request(method: &str, uri: &str, headers: &[(&str, &str)], body: impl Into<Body>) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(body.into()).unwrap()
}

/// Status, headers and the whole body of an answer.
pub(crate) async fn whole(response: Response<Body>) -> (u16, HeaderMap, Bytes) {
    let (head, body) = response.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    (head.status.as_u16(), head.headers, bytes)
}

/// Asks by plain HTTP; status and body.
pub(crate) async fn http(
    sandbox: &Sandbox,
    method: &str,
    uri: &str,
    headers: &[(&str, &str)],
    body: impl Into<Body>,
) -> (u16, Bytes) {
    let response = sandbox.handle(request(method, uri, headers, body)).await;
    let (status, _, bytes) = whole(response).await;
    (status, bytes)
}

/// Asks by a unary call; status and message.
pub(crate) async fn call(sandbox: &Sandbox, method: &str, message: Value) -> (u16, Value) {
    call_with(sandbox, method, &[], message).await
}

/// The same with headers.
pub(crate) async fn call_with(
    sandbox: &Sandbox,
    method: &str,
    headers: &[(&str, &str)],
    message: Value,
) -> (u16, Value) {
    let headers = [
        &[("content-type", "application/json"), ("connect-protocol-version", "1")],
        headers,
    ]
    .concat();
    let (status, bytes) = http(sandbox, "POST", &format!("/{method}"), &headers, message.to_string()).await;
    (status, serde_json::from_slice(&bytes).unwrap())
}

/// A call that must succeed.
pub(crate) async fn ok(sandbox: &Sandbox, method: &str, message: Value) -> Value {
    let (status, answer) = call(sandbox, method, message).await;
    assert_eq!(status, 200, "{method}: {answer}");
    answer
}

/// A call that must fail: the error's code and message.
pub(crate) async fn fails(sandbox: &Sandbox, method: &str, message: Value) -> (String, String) {
    let (status, answer) = call(sandbox, method, message).await;
    assert_ne!(status, 200, "{method}: {answer}");
    let text = |name: &str| answer[name].as_str().unwrap().to_owned();
    (text("code"), text("message"))
}

/// A message in its envelope.
pub(crate) fn envelope(message: &Value) -> Vec<u8> {
    let text = message.to_string();
    let mut bytes = vec![0];
    bytes.extend_from_slice(&u32::try_from(text.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// The messages of a stream.
pub(crate) struct Messages {
    body: BodyDataStream,
    buffer: BytesMut,
}

impl Messages {
    /// The next message and whether it is the end.
    pub(crate) async fn next(&mut self) -> (bool, Value) {
        tokio::time::timeout(LIMIT, self.wait()).await.expect("a message")
    }

    async fn wait(&mut self) -> (bool, Value) {
        loop {
            if let Some((&[flags, l0, l1, l2, l3], _)) = self.buffer.split_first_chunk::<5>() {
                let length = usize::try_from(u32::from_be_bytes([l0, l1, l2, l3])).unwrap();
                if self.buffer.len() >= 5 + length {
                    self.buffer.advance(5);
                    let message = serde_json::from_slice(&self.buffer.split_to(length)).unwrap();
                    return (flags == 2, message);
                }
            }
            let bytes = self.body.next().await.expect("an end that is told").unwrap();
            self.buffer.extend_from_slice(&bytes);
        }
    }

    /// The next message, which is not the end.
    pub(crate) async fn message(&mut self) -> Value {
        let (end, message) = self.next().await;
        assert!(!end, "{message}");
        message
    }

    /// The next message, which is the end.
    pub(crate) async fn end(&mut self) -> Value {
        let (end, message) = self.next().await;
        assert!(end, "{message}");
        assert!(self.body.next().await.is_none());
        message
    }
}

/// Asks by a call whose answer is a stream.
pub(crate) async fn stream(sandbox: &Sandbox, method: &str, headers: &[(&str, &str)], message: Value) -> Messages {
    let headers = [&[("content-type", "application/connect+json")], headers].concat();
    let request = request("POST", &format!("/{method}"), &headers, envelope(&message));
    let response = sandbox.handle(request).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "application/connect+json");
    Messages {
        body: response.into_body().into_data_stream(),
        buffer: BytesMut::new(),
    }
}

/// What a process wrote and how it ended.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    pub(crate) pid: u64,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) pty: String,
    pub(crate) end: Value,
}

/// The bytes of a message, as text.
pub(crate) fn decoded(value: &Value) -> String {
    String::from_utf8(STANDARD.decode(value.as_str().unwrap()).unwrap()).unwrap()
}

/// Text as a message has bytes.
pub(crate) fn coded(text: &str) -> String {
    STANDARD.encode(text)
}

impl Messages {
    /// The process's id, which comes first.
    pub(crate) async fn pid(&mut self) -> u64 {
        let message = self.message().await;
        message["event"]["start"]["pid"]
            .as_u64()
            .unwrap_or_else(|| panic!("{message}"))
    }

    /// All that a process writes, and its end.
    pub(crate) async fn ended(mut self) -> Ended {
        let mut all = Ended {
            pid: self.pid().await,
            ..Ended::default()
        };
        loop {
            let message = self.message().await;
            let event = &message["event"];
            if let Some(end) = event.get("end") {
                all.end = end.clone();
                assert_eq!(self.end().await, serde_json::json!({}));
                return all;
            }
            for (name, text) in [
                ("stdout", &mut all.stdout),
                ("stderr", &mut all.stderr),
                ("pty", &mut all.pty),
            ] {
                if let Some(value) = event["data"].get(name) {
                    text.push_str(&decoded(value));
                }
            }
        }
    }
}

/// Asks again until `done` says so.
pub(crate) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let end = tokio::time::Instant::now() + LIMIT;
    loop {
        if let Some(found) = ask().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < end, "{what} did not come to be");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
