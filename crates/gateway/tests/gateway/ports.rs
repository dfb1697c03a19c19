//! Requests to sandboxes' ports: the façade's, and those of servers, which here are servers of this host.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request as ServerRequest;
use axum::routing::{any, get};
use control::AuditLog;
use http::{HeaderMap, Request, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::support::{Bed, Got, SOON, until};

/// A server in a sandbox.
async fn server() -> u16 {
    let headers = |headers: HeaderMap, request: ServerRequest| async move {
        let all: serde_json::Map<String, Value> = headers
            .iter()
            .map(|(name, value)| (name.to_string(), json!(value.to_str().unwrap())))
            .collect();
        let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
        json!({"headers": all, "body": String::from_utf8_lossy(&body)}).to_string()
    };
    let upgrade = |mut request: ServerRequest| async move {
        let client = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut client = hyper_util::rt::TokioIo::new(client.await.unwrap());
            let mut word = [0; 4];
            while client.read_exact(&mut word).await.is_ok() {
                word.reverse();
                client.write_all(&word).await.unwrap();
            }
        });
        let head = [("connection", "upgrade"), ("upgrade", "echo")];
        (StatusCode::SWITCHING_PROTOCOLS, head)
    };
    let stream = || async {
        let parts = futures_util::stream::iter((0..100).map(|n| Ok::<_, Infallible>(format!("{n}\n"))));
        Body::from_stream(parts)
    };
    let app = Router::new()
        .route("/headers", any(headers))
        .route("/upgrade", get(upgrade))
        .route("/stream", get(stream));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    port
}

/// A port at which nothing listens.
async fn closed_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().port()
}

fn to_port(id: &str, port: u16, path: &str) -> Request<Body> {
    Request::builder()
        .uri(path)
        .header("host", "127.0.0.1:3000")
        .header("e2b-sandbox-id", id)
        .header("e2b-sandbox-port", port)
        .body(Body::empty())
        .unwrap()
}

async fn ask(bed: &Bed, request: Request<Body>) -> Got {
    bed.send(request).await
}

#[tokio::test]
async fn the_facade_is_asked_at_its_port() {
    let bed = Bed::new();
    let made = bed
        .post("/v2/sandboxes", json!({"templateID": "base", "envVars": {"A": "b"}}))
        .await
        .is(201);
    let id = made["sandboxID"].as_str().unwrap();
    for host in [None, Some(format!("49983-{id}.sb.example"))] {
        let mut request = to_port(id, 49983, "/files?path=/x");
        *request.method_mut() = http::Method::POST;
        *request.body_mut() = Body::from("content");
        if let Some(host) = host {
            request.headers_mut().clear();
            request.headers_mut().insert("host", host.parse().unwrap());
        }
        let told = ask(&bed, request).await.is(200);
        assert_eq!(
            (&told["id"], &told["path"], &told["body"]),
            (&json!(id), &json!("/files"), &json!("content"))
        );
        assert_eq!(told["token"], made["envdAccessToken"]);
        assert_eq!(
            told["env"],
            json!(2),
            "the sandbox's own variables come with the connection"
        );
    }
}

#[tokio::test]
async fn a_server_gets_the_request_as_it_was() {
    let bed = Bed::new();
    let port = server().await;
    let made = bed.post("/v2/sandboxes", json!({"templateID": "base"})).await.is(201);
    let id = made["sandboxID"].as_str().unwrap();
    let mut request = to_port(id, port, "/headers?x=y");
    *request.method_mut() = http::Method::PUT;
    *request.body_mut() = Body::from("content");
    let headers = request.headers_mut();
    headers.insert("x-own", "1".parse().unwrap());
    headers.insert(
        "x-access-token",
        made["envdAccessToken"].as_str().unwrap().parse().unwrap(),
    );
    headers.append("x-access-token", "another".parse().unwrap());
    headers.insert("e2b-traffic-access-token", "secret".parse().unwrap());
    headers.insert("x-api-key", bed.key.parse().unwrap());
    headers.insert("authorization", format!("Bearer {}", bed.key).parse().unwrap());
    headers.insert("connection", "keep-alive, x-hop".parse().unwrap());
    headers.insert("x-hop", "1".parse().unwrap());
    let told = ask(&bed, request).await.is(200);
    assert_eq!(told["body"], json!("content"));
    let seen = &told["headers"];
    assert_eq!((&seen["x-own"], &seen["host"]), (&json!("1"), &json!("127.0.0.1:3000")));
    let secret = [
        "x-access-token",
        "e2b-traffic-access-token",
        "x-api-key",
        "authorization",
    ];
    for name in secret.iter().chain(&["x-hop", "connection"]).copied() {
        assert_eq!(seen.get(name), None, "{name} has gone into the sandbox");
    }
    // A token that is the server's own affair passes.
    let mut request = to_port(id, port, "/headers");
    for name in ["x-access-token", "x-api-key"] {
        request.headers_mut().insert(name, "own".parse().unwrap());
    }
    let told = ask(&bed, request).await.is(200);
    for name in ["x-access-token", "x-api-key"] {
        assert_eq!(told["headers"][name], json!("own"));
    }
    let streamed = ask(&bed, to_port(id, port, "/stream")).await;
    assert_eq!(streamed.status, 200);
    assert!(streamed.json.as_str().unwrap().ends_with("98\n99\n"));
    assert_eq!(ask(&bed, to_port(id, port, "/nothing")).await.status, 404);
}

#[tokio::test]
async fn what_cannot_be_reached_is_told_in_the_sdks_words() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    let port = closed_port().await;
    let told = ask(&bed, to_port(&id, port, "/")).await.is(502);
    assert_eq!(
        told,
        json!({"sandboxId": id, "message": "The sandbox is running but port is not open", "port": port, "code": 502})
    );
    let gone = |id: &str| json!({"sandboxId": id, "message": "The sandbox was not found", "code": 502});
    for id in ["0123456789ab", "nothing"] {
        for port in [port, 49983] {
            assert_eq!(ask(&bed, to_port(id, port, "/health")).await.is(502), gone(id));
        }
    }
    // A paused one is as good as gone, if traffic does not wake it.
    bed.post(&format!("/sandboxes/{id}/pause"), Value::Null).await.is(204);
    assert_eq!(ask(&bed, to_port(&id, 49983, "/health")).await.is(502), gone(&id));
    // What is no tenant's is not there.
    let other = bed.make(Value::Null).await;
    bed.node.change(&other, |one| one.config.owner = None);
    assert_eq!(ask(&bed, to_port(&other, 49983, "/health")).await.is(502), gone(&other));
}

#[tokio::test]
async fn a_server_that_speaks_something_else_is_a_bad_gateway() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.unwrap();
        client.write_all(b"220 mail.example ESMTP\r\n").await.unwrap();
        drop(client);
    });
    let told = ask(&bed, to_port(&id, port, "/")).await.is(502);
    assert!(
        told["message"].as_str().unwrap().contains("did not answer by HTTP"),
        "{told}"
    );
}

#[tokio::test]
async fn ports_that_are_not_public_want_a_token() {
    let bed = Bed::new();
    let port = server().await;
    let made = bed
        .post(
            "/v2/sandboxes",
            json!({"templateID": "base", "network": {"allowPublicTraffic": false}}),
        )
        .await
        .is(201);
    let id = made["sandboxID"].as_str().unwrap();
    ask(&bed, to_port(id, port, "/headers")).await.is(403);
    for (name, field, status) in [
        ("e2b-traffic-access-token", "envdAccessToken", 403),
        ("e2b-traffic-access-token", "trafficAccessToken", 200),
    ] {
        let mut request = to_port(id, port, "/headers");
        request
            .headers_mut()
            .insert(name, made[field].as_str().unwrap().parse().unwrap());
        ask(&bed, request).await.is(status);
    }
    ask(&bed, to_port(id, 49983, "/health")).await.is(200);
    // What browsers ask before they ask passes, and nothing that is only called so.
    for (origin, status) in [(true, 200), (false, 403)] {
        let mut request = to_port(id, port, "/headers");
        *request.method_mut() = http::Method::OPTIONS;
        if origin {
            for (name, value) in [
                ("origin", "https://a.example"),
                ("access-control-request-method", "GET"),
            ] {
                request.headers_mut().insert(name, value.parse().unwrap());
            }
        }
        assert_eq!(ask(&bed, request).await.status, status, "with an origin: {origin}");
    }
}

/// While one request wakes it, the node shows it as starting.
#[tokio::test]
async fn a_sandbox_that_is_about_to_run_is_waited_for() {
    let bed = Arc::new(Bed::new());
    let port = server().await;
    let id = bed.make(Value::Null).await;
    bed.node.change(&id, |one| one.state = node_api::State::Starting);
    let asks = tokio::spawn({
        let (bed, id) = (Arc::clone(&bed), id.clone());
        async move { ask(&bed, to_port(&id, port, "/headers")).await.status }
    });
    // It has been looked at more than once by then.
    let looked = bed.node.asked("other");
    while bed.node.asked("other") < looked + 3 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert!(!asks.is_finished());
    bed.node.change(&id, |one| one.state = node_api::State::Running);
    assert_eq!(asks.await.unwrap(), 200);
}

#[tokio::test]
async fn traffic_wakes_a_sandbox_once() {
    let bed = Bed::new();
    let port = server().await;
    let asked = json!({"templateID": "base", "autoPause": true, "autoResume": {"enabled": true}, "timeout": 60});
    let made = bed.post("/v2/sandboxes", asked).await.is(201);
    let id = made["sandboxID"].as_str().unwrap();
    let pause = format!("/sandboxes/{id}/pause");
    bed.post(&pause, Value::Null).await.is(204);
    // Without the token nobody wakes it by the façade's port.
    assert_eq!(ask(&bed, to_port(id, 49983, "/health")).await.status, 502);
    assert_eq!(bed.state(id).await, "paused");
    let all = futures_util::future::join_all((0..20).map(|_| ask(&bed, to_port(id, port, "/headers")))).await;
    assert!(all.iter().all(|got| got.status == 200));
    assert_eq!((bed.node.asked("resume"), bed.left(id)), (1, 60));
    bed.post(&pause, Value::Null).await.is(204);
    let mut request = to_port(id, 49983, "/health");
    request.headers_mut().insert(
        "x-access-token",
        made["envdAccessToken"].as_str().unwrap().parse().unwrap(),
    );
    ask(&bed, request).await.is(200);
    assert_eq!(bed.state(id).await, "running");
}

/// The gateway at a port of this host; told to end by what comes with it.
async fn listen(
    bed: &Bed,
) -> (
    std::net::SocketAddr,
    watch::Sender<bool>,
    tokio::task::JoinHandle<std::io::Result<()>>,
) {
    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = plain.local_addr().unwrap();
    let (stop, stopped) = watch::channel(false);
    let listeners = gateway::Listeners::plain(plain);
    let serving = tokio::spawn(gateway::serve(Arc::clone(&bed.gateway), listeners, stopped));
    (address, stop, serving)
}

async fn head_of(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap().to_ascii_lowercase()
}

#[tokio::test]
async fn a_changed_protocol_is_passed_as_bytes() {
    let bed = Bed::new();
    let port = server().await;
    let id = bed.make(Value::Null).await;
    let (address, stop, mut serving) = listen(&bed).await;
    let mut client = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "GET /upgrade HTTP/1.1\r\nHost: {port}-{id}.sb.example\r\nConnection: keep-alive, Upgrade\r\nUpgrade: echo\r\n\r\n"
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let answered = head_of(&mut client).await;
    assert!(
        answered.starts_with("http/1.1 101 ") && answered.contains("upgrade: echo"),
        "{answered}"
    );
    for (word, back) in [(b"abcd", b"dcba"), (b"1234", b"4321")] {
        client.write_all(word).await.unwrap();
        let mut got = [0; 4];
        client.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, back);
    }
    // It has its place until it ends, and a gateway that is to end waits for it as for others.
    stop.send(true).unwrap();
    let waits = tokio::time::timeout(Duration::from_millis(300), &mut serving).await;
    assert!(waits.is_err(), "it has ended: {waits:?}");
    drop(client);
    tokio::time::timeout(SOON, serving).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_gateway_that_is_to_end_answers_what_it_has_begun() {
    let bed = Bed::new();
    let id = bed.make(Value::Null).await;
    let inside = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = inside.local_addr().unwrap().port();
    let (address, stop, serving) = listen(&bed).await;
    let mut idle = TcpStream::connect(address).await.unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        .await
        .unwrap();
    assert!(head_of(&mut idle).await.starts_with("http/1.1 200"));
    let mut busy = TcpStream::connect(address).await.unwrap();
    let head = format!("GET / HTTP/1.1\r\nHost: a\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: {port}\r\n\r\n");
    busy.write_all(head.as_bytes()).await.unwrap();
    let (mut server, _) = inside.accept().await.unwrap();
    assert!(head_of(&mut server).await.starts_with("get / "));
    stop.send(true).unwrap();
    // One that is not being served is let go.
    let mut rest = Vec::new();
    tokio::time::timeout(SOON, idle.read_to_end(&mut rest))
        .await
        .unwrap()
        .unwrap();
    until("the listener's end", async || {
        TcpStream::connect(address).await.is_err()
    })
    .await;
    assert!(!serving.is_finished());
    server
        .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        .await
        .unwrap();
    assert!(head_of(&mut busy).await.starts_with("http/1.1 200"));
    drop(busy);
    tokio::time::timeout(SOON, serving).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn one_sandbox_takes_only_so_many_requests_at_once() {
    let bed = Bed::with(gateway::LimitsConfig {
        per_ports: 1,
        ..gateway::LimitsConfig::default()
    });
    let (id, other) = (bed.make(Value::Null).await, bed.make(Value::Null).await);
    let port = server().await;
    let first = bed.service.answer(to_port(&id, port, "/stream")).await;
    assert_eq!(first.status(), 200);
    let refused = ask(&bed, to_port(&id, port, "/stream")).await;
    assert_eq!(refused.header("retry-after"), Some("1"));
    refused.is(429);
    assert_eq!(ask(&bed, to_port(&other, port, "/stream")).await.status, 200);
    // Strangers at its ports keep nobody from its processes and files.
    assert_eq!(ask(&bed, to_port(&id, 49983, "/health")).await.status, 200);
    drop(first);
    assert_eq!(ask(&bed, to_port(&id, port, "/stream")).await.status, 200);
}

/// A client that asks for something and leaves has it all the same, also of a gateway that is told to end.
#[tokio::test]
async fn what_has_begun_is_done_before_the_gateway_ends() {
    let bed = Bed::new();
    let (address, stop, serving) = listen(&bed).await;
    let go_on = bed.node.hold("run");
    let mut client = TcpStream::connect(address).await.unwrap();
    let body = json!({"templateID": "base"}).to_string();
    let head = format!(
        "POST /v2/sandboxes HTTP/1.1\r\nHost: a\r\nX-API-Key: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        bed.key,
        body.len()
    );
    client.write_all(head.as_bytes()).await.unwrap();
    until("what was asked for", async || bed.node.asked("run") == 1).await;
    drop(client);
    stop.send(true).unwrap();
    // Nobody is accepted any more: only what has begun is waited for.
    until("the end of its listening", async || {
        TcpStream::connect(address).await.is_err()
    })
    .await;
    assert!(!serving.is_finished());
    go_on.send(()).unwrap();
    serving.await.unwrap().unwrap();
    assert_eq!(bed.store.audited(None, 9).unwrap().len(), 1);
}
