//! What a guest may do that no agent does, and what an agent does when its machine fails: a script says its part.

mod common;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;

use agent_api::message::{Reply, Request, kind};
use agent_api::{
    Entry, EntryKind, ExecRequest, OutputStream, PROTOCOL, RequestFailure, RequestFailureKind, WatchEvent,
    WatchEventKind,
};
use axum::body::Body;
use common::{call, http, request, stream};
use envd::{Access, Connecting, Guest, Memory, Opened, Sandbox};
use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const BINARY: (&str, &str) = ("content-type", "application/octet-stream");

/// An agent's end of a connection.
struct Far(UnixStream);

impl Far {
    async fn frame(&mut self) -> Option<(u16, Vec<u8>)> {
        let mut head = [0; wire::HEADER_LEN];
        self.0.read_exact(&mut head).await.ok()?;
        let head = wire::Header::decode(head).unwrap();
        let mut payload = vec![0; head.length];
        self.0.read_exact(&mut payload).await.ok()?;
        Some((head.kind, payload))
    }

    async fn request(&mut self) -> Option<Request> {
        let (kind, payload) = self.frame().await?;
        assert_eq!(kind, kind::CONTROL);
        Some(serde_json::from_slice(&payload).unwrap())
    }

    async fn bytes(&mut self, kind: u16, bytes: &[u8]) {
        let head = wire::Header::encode(bytes.len(), kind, 0).unwrap();
        // Whoever hears enough may leave.
        drop(self.0.write_all(&head).await);
        drop(self.0.write_all(bytes).await);
    }

    async fn say(&mut self, reply: &Reply) {
        self.bytes(kind::CONTROL, &serde_json::to_vec(reply).unwrap()).await;
    }
}

/// What a guest says on a connection.
type Script = fn(Far) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// Plays a script on each connection.
struct Scripted(Script);

impl Guest for Scripted {
    fn connect(&self) -> Connecting<'_> {
        let (near, far) = UnixStream::pair().unwrap();
        tokio::spawn((self.0)(Far(far)));
        Box::pin(async {
            Ok(Opened {
                stream: near,
                command: ExecRequest::default(),
                version: PROTOCOL.version,
            })
        })
    }
}

fn sandbox(script: Script) -> Arc<Sandbox> {
    Sandbox::new(
        "abc123",
        Arc::new(Scripted(script)),
        Access::default(),
        Memory::default().share(),
    )
}

fn entry(path: &str, size: u64) -> Entry {
    Entry {
        path: path.into(),
        kind: EntryKind::File,
        mode: 0o100_644,
        size,
        owner: "root".to_owned(),
        group: "root".to_owned(),
        modified_ns: 0,
        target: None,
        target_kind: None,
        metadata: BTreeMap::new(),
    }
}

fn reading(bytes: u64) -> Reply {
    Reply::Reading {
        entry: Box::new(entry("/a", bytes)),
        bytes,
    }
}

fn failure(kind: RequestFailureKind) -> Reply {
    Reply::RequestFailed(RequestFailure {
        kind,
        message: "it says no".to_owned(),
    })
}

#[tokio::test]
async fn a_disk_that_is_full_is_told_in_the_midst_of_an_upload() {
    let sandbox = sandbox(|mut far| {
        Box::pin(async move {
            far.request().await;
            far.say(&Reply::Done).await;
            far.frame().await;
            far.say(&failure(RequestFailureKind::NoSpace)).await;
            while far.frame().await.is_some() {}
        })
    });
    let (status, body) = http(&sandbox, "POST", "/files?path=a", &[BINARY], "x".repeat(3_000_000)).await;
    assert_eq!(status, 507, "{body:?}");
    let pieces = (0..40).map(|_| Ok::<_, std::io::Error>(vec![0; 100_000]));
    let body = Body::from_stream(futures_util::stream::iter(pieces));
    let (status, answer) = http(&sandbox, "POST", "/files?path=a", &[BINARY], body).await;
    assert_eq!(status, 507, "{answer:?}");
}

#[tokio::test]
async fn a_file_that_becomes_shorter_is_no_whole_answer() {
    let scripts: [Script; 4] = [
        // It says why.
        |mut far| {
            Box::pin(async move {
                far.request().await;
                far.say(&reading(10)).await;
                far.bytes(kind::FILE, b"12345").await;
                far.bytes(kind::FILE, b"").await;
                far.say(&failure(RequestFailureKind::Other)).await;
            })
        },
        // It is gone.
        |mut far| {
            Box::pin(async move {
                far.request().await;
                far.say(&reading(10)).await;
                far.bytes(kind::FILE, b"12345").await;
            })
        },
        // It says more than it said that it would.
        |mut far| {
            Box::pin(async move {
                far.request().await;
                far.say(&reading(3)).await;
                far.bytes(kind::FILE, b"12345").await;
            })
        },
        // It says something else.
        |mut far| {
            Box::pin(async move {
                far.request().await;
                far.say(&reading(10)).await;
                far.bytes(kind::STDOUT, b"1234567890").await;
            })
        },
    ];
    for script in scripts {
        let answer = sandbox(script).handle(request("GET", "/files?path=a", &[], "")).await;
        assert_eq!(answer.status(), 200);
        assert!(answer.into_body().collect().await.is_err());
    }
}

#[tokio::test]
async fn a_list_without_end_is_not_taken() {
    let sandbox = sandbox(|mut far| {
        Box::pin(async move {
            far.request().await;
            let entries = vec![entry("/a", 1); 2000];
            let reply = serde_json::to_vec(&Reply::Entries { entries, more: true }).unwrap();
            let head = wire::Header::encode(reply.len(), kind::CONTROL, 0).unwrap();
            // For as long as somebody listens.
            while far.0.write_all(&head).await.is_ok() && far.0.write_all(&reply).await.is_ok() {}
        })
    });
    let (status, answer) = call(&sandbox, "filesystem.Filesystem/ListDir", json!({"path": "/"})).await;
    assert_eq!((status, &answer["code"]), (429, &json!("resource_exhausted")));
}

#[tokio::test]
async fn what_makes_no_sense_is_an_error_and_no_more() {
    let scripts: [(Script, &str); 5] = [
        (|far| Box::pin(async move { drop(far) }), "unavailable"),
        (
            |mut far| {
                Box::pin(async move {
                    far.request().await;
                    far.say(&Reply::Done).await;
                })
            },
            "internal",
        ),
        (
            |mut far| {
                Box::pin(async move {
                    far.request().await;
                    far.bytes(kind::CONTROL, b"[[[[").await;
                })
            },
            "internal",
        ),
        (
            |mut far| {
                Box::pin(async move {
                    far.request().await;
                    drop(far.0.write_all(&[0xff; 64]).await);
                })
            },
            "internal",
        ),
        (
            |mut far| {
                Box::pin(async move {
                    far.request().await;
                    let message = "no".to_owned();
                    far.say(&Reply::Refused { message }).await;
                })
            },
            "internal",
        ),
    ];
    for (script, code) in scripts {
        let sandbox = sandbox(script);
        for method in ["filesystem.Filesystem/Stat", "process.Process/List"] {
            let (_, answer) = call(&sandbox, method, json!({"path": "/"})).await;
            assert_eq!(answer["code"], code, "{method}: {answer}");
        }
    }
}

#[tokio::test]
async fn an_answer_breaks_off_where_the_machine_is_gone() {
    let sandbox = sandbox(|mut far| {
        Box::pin(async move {
            // Where the home is, and then the command.
            far.request().await;
            far.say(&Reply::Entry(Box::new(entry("/root", 0)))).await;
            assert!(matches!(far.request().await, Some(Request::Exec(_))));
            far.say(&Reply::Started { pid: 7 }).await;
            far.bytes(kind::STDOUT, b"hi").await;
            let stream = OutputStream::Stdout;
            far.say(&Reply::OutputClosed { stream }).await;
        })
    });
    let start = common::envelope(&json!({"process": {"cmd": "a"}}));
    let headers = [("content-type", "application/connect+json")];
    let answer = sandbox
        .handle(request("POST", "/process.Process/Start", &headers, start))
        .await;
    assert_eq!(answer.status(), 200);
    assert!(answer.into_body().collect().await.is_err());
}

#[tokio::test]
async fn a_watch_that_has_lost_something_says_so() {
    let script: Script = |mut far| {
        Box::pin(async move {
            far.request().await;
            far.say(&Reply::Done).await;
            let event = |name: &str, kind| WatchEvent {
                name: name.into(),
                kind,
            };
            let events = vec![event("a", WatchEventKind::Create), event(".", WatchEventKind::Lost)];
            far.say(&Reply::Watched(events)).await;
            far.frame().await;
        })
    };
    let mut events = stream(
        &sandbox(script),
        "filesystem.Filesystem/WatchDir",
        &[],
        json!({"path": "/"}),
    )
    .await;
    assert_eq!(events.message().await, json!({"start": {}}));
    assert_eq!(events.message().await["filesystem"]["name"], "a");
    assert_eq!(events.end().await["error"]["code"], "data_loss");

    let sandbox = sandbox(script);
    let id = common::ok(&sandbox, "filesystem.Filesystem/CreateWatcher", json!({"path": "/"})).await;
    let poll = async || call(&sandbox, "filesystem.Filesystem/GetWatcherEvents", id.clone()).await;
    let first = common::eventually("an event", async || {
        Some(poll().await).filter(|(_, answer)| *answer != json!({}))
    })
    .await;
    assert_eq!(first.1["events"][0]["name"], "a", "{first:?}");
    let failed = common::eventually("the failure", async || {
        Some(poll().await).filter(|(status, _)| *status != 200)
    })
    .await;
    assert_eq!(failed.1["code"], "data_loss");
    // Until somebody removes it.
    common::ok(&sandbox, "filesystem.Filesystem/RemoveWatcher", id.clone()).await;
}
