//! What clients of E2B's SDKs send about a sandbox's processes and files, and what a guest's agent answers the gateway: Connect messages and
//! envelopes, forms, queries and ranges; frames that make no sense.
//!
//! Knows no gateway and no machine: the agent is bytes.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use agent_api::message::{Reply, kind};
use agent_api::{Entry, EntryKind, ExecRequest, ExitStatus, PROTOCOL};
use axum::body::{Body, to_bytes};
use envd::{Access, Connecting, Guest, GuestError, Memory, Opened, Sandbox};
use http::Request;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};

use crate::run::{Target, outcome};

/// The most of an answer that is read.
const MOST: usize = 4 << 20;

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
}

/// An agent that says these bytes on each connection, and nothing more; it takes what it is told as long as there is room.
struct Says {
    bytes: Vec<u8>,
    open: Mutex<Vec<StdUnixStream>>,
}

impl Guest for Says {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async {
            let opened = || -> std::io::Result<UnixStream> {
                let (near, mut far) = StdUnixStream::pair()?;
                // What does not fit into the socket is not said.
                far.set_nonblocking(true)?;
                drop(far.write(&self.bytes));
                far.shutdown(Shutdown::Write)?;
                self.open.lock().unwrap_or_else(PoisonError::into_inner).push(far);
                near.set_nonblocking(true)?;
                UnixStream::from_std(near)
            };
            Ok(Opened {
                stream: opened().map_err(|error| GuestError::Other(error.to_string()))?,
                command: ExecRequest::default(),
                version: PROTOCOL.version,
            })
        })
    }
}

/// Asks such a sandbox; what the answer is like.
fn ask(agent: &[u8], request: Request<Body>) -> u64 {
    let says = Says {
        bytes: agent.to_vec(),
        open: Mutex::default(),
    };
    let sandbox = Sandbox::new(
        "fuzzed".to_owned(),
        Arc::new(says),
        Access { token: None },
        Memory::default().share(),
    );
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let response = sandbox.handle(request).await;
            let status = response.status();
            match to_bytes(response.into_body(), MOST).await {
                Ok(body) => outcome(format!("{status} {}", String::from_utf8_lossy(&body))),
                Err(error) => outcome(format!("{status} broken off: {error}")),
            }
        })
    })
}

fn frames(replies: &[Reply]) -> Vec<u8> {
    let frame = |reply: &Reply| {
        let json = serde_json::to_vec(reply).unwrap_or_default();
        let head = wire::Header::encode(json.len(), kind::CONTROL, 0).unwrap_or_default();
        [&head[..], &json].concat()
    };
    replies.iter().flat_map(frame).collect()
}

fn entry() -> Reply {
    Reply::Entry(Box::new(Entry {
        path: "/home/user/a".into(),
        kind: EntryKind::File,
        mode: 0o100_644,
        size: 1,
        owner: "user".into(),
        group: "user".into(),
        modified_ns: 1,
        target: None,
        target_kind: None,
        metadata: [("k".to_owned(), "v".to_owned())].into(),
    }))
}

/// `METHOD ADDRESS`, a line; `Content-Type`, a line; the body. The agent does whatever it is told.
pub(crate) fn requests() -> Target {
    let seed = |address: &str, media: &str, body: &[u8]| [format!("{address}\n{media}\n").as_bytes(), body].concat();
    let stream = |json: &[u8]| {
        let length = u32::try_from(json.len()).unwrap_or(0);
        [&[0], &length.to_be_bytes()[..], json].concat()
    };
    let form = b"--xx\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\none\r\n--xx--\r\n";
    let (json, connect) = ("application/json", "application/connect+json");
    let start = br#"{"process":{"cmd":"/bin/bash","args":["-l","-c","ls"],"envs":{"A":"b"},"cwd":"x"},"pty":{"size":{"cols":80,"rows":24}},"tag":"t"}"#;
    Target {
        name: "envd-requests",
        seeds: vec![
            seed("POST /process.Process/Start", connect, &stream(start)),
            seed(
                "POST /process.Process/SendInput",
                json,
                br#"{"process":{"pid":7},"input":{"stdin":"aGVsbG8="}}"#,
            ),
            seed(
                "POST /process.Process/StreamInput",
                connect,
                &stream(br#"{"start":{"process":{"tag":"t"}}}"#),
            ),
            seed(
                "POST /filesystem.Filesystem/ListDir",
                json,
                br#"{"path":"~","depth":2}"#,
            ),
            seed(
                "POST /filesystem.Filesystem/WatchDir",
                connect,
                &stream(br#"{"path":"/tmp","recursive":true}"#),
            ),
            seed("POST /files?path=a&username=user", "application/octet-stream", b"bytes"),
            seed("POST /files", "multipart/form-data; boundary=xx", form),
            seed(
                "POST /files/compose",
                json,
                br#"{"source_paths":["a","b"],"destination":"c"}"#,
            ),
            seed("GET /files?path=a&signature=v1_abc&signature_expiration=1", "", b""),
        ],
        parse: |input| {
            let mut parts = input.splitn(3, |byte| *byte == b'\n');
            let mut next = || parts.next().unwrap_or_default();
            let (first, media, body) = (next(), next(), next().to_vec());
            let first = String::from_utf8_lossy(first);
            let (method, address) = first.split_once(' ').unwrap_or_default();
            let request = Request::builder()
                .method(method)
                .uri(address)
                .header("content-type", media);
            match request.body(Body::from(body)) {
                Ok(request) => ask(&frames(&[Reply::Done, entry()]), request),
                Err(error) => outcome(error),
            }
        },
    }
}

/// What the agent says, to each of some requests.
pub(crate) fn agent() -> Target {
    let ended = [Reply::Started { pid: 7 }, Reply::Exited(ExitStatus::Code(3))];
    let entries = Reply::Entries {
        entries: Vec::new(),
        more: false,
    };
    let reading = match entry() {
        Reply::Entry(entry) => Reply::Reading { entry, bytes: 1 },
        other => other,
    };
    Target {
        name: "envd-agent",
        seeds: vec![
            frames(&ended),
            frames(&[entry(), Reply::Done]),
            frames(&[entries]),
            frames(&[reading, Reply::Done]),
            frames(&[Reply::Done, Reply::Watched(Vec::new())]),
            frames(&[Reply::Kept {
                commands: Vec::new(),
                more: false,
            }]),
        ],
        parse: |input| {
            let unary = [
                ("POST", "/process.Process/List", "application/json", "{}"),
                (
                    "POST",
                    "/filesystem.Filesystem/Stat",
                    "application/json",
                    r#"{"path":"a"}"#,
                ),
                (
                    "POST",
                    "/filesystem.Filesystem/ListDir",
                    "application/json",
                    r#"{"path":"a"}"#,
                ),
                ("GET", "/files?path=a", "", ""),
                ("POST", "/files?path=a", "application/octet-stream", "bytes"),
                ("GET", "/metrics", "", ""),
            ];
            let ends = unary.map(|(method, address, media, body)| {
                let request = Request::builder()
                    .method(method)
                    .uri(address)
                    .header("content-type", media);
                request.body(Body::from(body)).map_or(0, |request| ask(input, request))
            });
            let start = br#"{"process":{"cmd":"a"}}"#;
            let length = u32::try_from(start.len()).unwrap_or(0);
            let body = [&[0], &length.to_be_bytes()[..], start].concat();
            let request = Request::post("/process.Process/Start").header("content-type", "application/connect+json");
            let streamed = request.body(Body::from(body)).map_or(0, |request| ask(input, request));
            ends.into_iter().fold(streamed, |all, end| all.rotate_left(7) ^ end)
        },
    }
}
