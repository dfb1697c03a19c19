//! A collector of the test's own: what it is sent, and what becomes of spans that it does not take.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use observe::Span;
use observe::span::{self, Operation};
use otlp::{Endpoint, Exporter};
use serde_json::Value;

/// More than anything here takes on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(90);

fn spans() -> Vec<Span> {
    let operation = Operation {
        service: "one",
        name: "whole",
        parent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().ok(),
        detailed: true,
        began_ns: None,
    };
    let ((), spans) = span::record(operation, || {
        let _part = span::span("part");
        span::attribute("key", "a \"value\"");
        span::past("two", "elsewhere", 1, 2);
        span::failed(&"on purpose");
    });
    spans
}

fn exporter(listener: &TcpListener) -> Exporter {
    let address = format!("http://{}", listener.local_addr().unwrap());
    let endpoint = Endpoint::from_variables(|name| (name == "OTEL_EXPORTER_OTLP_ENDPOINT").then(|| address.clone()));
    Exporter::start(endpoint.unwrap().unwrap(), "1.2.3").unwrap()
}

/// Reads one request, answers with `status`; head and body.
fn serve(mut stream: TcpStream, status: &str) -> (String, Value) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
            if body.len() == length.unwrap().parse::<usize>().unwrap() {
                stream
                    .write_all(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").as_bytes())
                    .unwrap();
                return (head.to_owned(), serde_json::from_str(body).unwrap());
            }
        }
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "the request ends early: {text}");
        bytes.extend_from_slice(&buffer[..count]);
    }
}

#[test]
fn a_collector_gets_what_the_protocol_says() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let exporter = exporter(&listener);
    let sent = spans();
    let server = std::thread::spawn(move || serve(listener.accept().unwrap().0, "200 OK"));
    exporter.export(sent.clone());
    assert!(exporter.flush(PATIENCE));
    let (head, body) = server.join().unwrap();
    assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("\r\nContent-Type: application/json"), "{head}");
    let resources = body["resourceSpans"].as_array().unwrap();
    assert_eq!(resources.len(), 2);
    let name = |resource: &Value| resource["resource"]["attributes"][0]["value"]["stringValue"].clone();
    assert_eq!((name(&resources[0]), name(&resources[1])), ("one".into(), "two".into()));
    let own = resources[0]["scopeSpans"][0]["spans"].as_array().unwrap();
    let (part, whole) = (&own[0], &own[1]);
    assert_eq!(whole["traceId"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(whole["parentSpanId"], "00f067aa0ba902b7");
    assert_eq!(part["parentSpanId"], whole["spanId"]);
    assert_eq!(part["status"]["code"], 2);
    assert_eq!(part["attributes"][0]["value"]["stringValue"], "a \"value\"");
    // Dates: of this year or later, and the end is not before the beginning.
    let time = |value: &Value| value.as_str().unwrap().parse::<u64>().unwrap();
    let (start, end) = (time(&whole["startTimeUnixNano"]), time(&whole["endTimeUnixNano"]));
    assert!(start > 1_700_000_000_000_000_000 && end - start == sent[2].end_ns - sent[2].start_ns);
    assert_eq!((exporter.exported(), exporter.dropped()), (3, 0));
}

#[test]
fn what_a_collector_refuses_is_dropped_and_counted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let exporter = exporter(&listener);
    let server = std::thread::spawn(move || drop(serve(listener.accept().unwrap().0, "503 Busy")));
    exporter.export(spans());
    assert!(exporter.flush(PATIENCE));
    server.join().unwrap();
    assert_eq!((exporter.exported(), exporter.dropped()), (0, 3));
}

#[test]
fn a_collector_that_never_answers_holds_nobody() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let exporter = exporter(&listener);
    let begun = Instant::now();
    // To wait for the collector would take minutes: three seconds for each 512 of 60 000 spans.
    for _ in 0..20_000 {
        exporter.export(spans());
    }
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    assert!(exporter.dropped() > 0, "a queue without an end");
    // Whoever flushes for longer than allowed waits three seconds every time, a busy machine does not.
    let given_up = (0..10).any(|_| {
        for _ in 0..300 {
            exporter.export(spans());
        }
        let begun = Instant::now();
        !exporter.flush(Duration::from_millis(200)) && begun.elapsed() < Duration::from_secs(2)
    });
    assert!(given_up);
}

#[test]
fn nobody_there_is_no_reason_to_wait_either() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let exporter = exporter(&listener);
    drop(listener);
    exporter.export(spans());
    assert!(exporter.flush(PATIENCE));
    assert_eq!((exporter.exported(), exporter.dropped()), (0, 3));
}
