//! Cases of what is told about sandboxes and starts: `run --trace`, `daemon metrics`, spans for a collector.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::daemons::detached;
use crate::world::{World, text, wait_for};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

pub(crate) fn a_trace_accounts_for_every_millisecond() {
    let world = World::new("");
    let arguments = [
        "--json", "run", "--trace", "--rm", "--disk", "0", "tiny", "--", "echo", "out",
    ];
    let mut command = world.command(&arguments);
    let output = command.env("TRACEPARENT", PARENT).output().unwrap();
    assert_eq!(text(&output.stdout), "out\n", "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(report["trace"], TRACE);
    let phases = report["phases"].as_array().unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let sum: f64 = phases.iter().map(|phase| number(&phase["own_ms"])).sum();
    let total = number(&report["total_ms"]);
    assert!((sum - total).abs() < 0.001 && total > 0.0, "{sum} of {total}");
    assert!(number(&report["unexplained_ms"]) < total);
    let names: BTreeSet<(&str, &str)> = phases
        .iter()
        .map(|phase| (phase["service"].as_str().unwrap(), phase["name"].as_str().unwrap()))
        .collect();
    for name in [
        ("basalt", "daemon found"),
        ("basaltd", "create and start"),
        ("basaltd", "sockets and files"),
        ("basaltd", "VMM process"),
        ("basaltd", "clone into namespaces"),
        ("basalt-vmm", "first KVM_RUN"),
        ("basaltd", "guest prepared"),
        ("basalt", "command asked for"),
        ("basalt", "to the first output"),
    ] {
        assert!(names.contains(&name), "{name:?} is missing: {names:?}");
    }
    // For people, on standard error, behind what the command said there; the exit code is the command's.
    let output = world.run(&["--trace", "tiny", "--", "sh", "-c", "echo err >&2; exit 3"]);
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(3), ""));
    assert!(said.starts_with("err\nbasalt: where the "), "{said}");
    assert!(said.contains("explained by none"), "{said}");
    assert_eq!(
        text(&world.run(&["tiny", "--", "true"]).stderr),
        "",
        "nothing that nobody asked for"
    );
}

pub(crate) fn metrics_are_what_prometheus_reads() {
    let world = World::new("");
    let id = detached(&world, "web", "sleep 1000");
    assert_eq!(world.run(&["tiny", "--", "true"]).status.code(), Some(0));
    assert_ne!(world.run(&["--name", "web", "tiny"]).status.code(), Some(0));
    // A VMM on a busy machine may miss the short time that it has.
    let samples = wait_for("the metrics of all", || {
        let output = world.verb(&["daemon", "metrics"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let samples = parse(&text(&output.stdout));
        (samples.get("basalt_scrape_missing_sandboxes") == Some(&0.0)).then_some(samples)
    });
    let value = |name: &str| {
        samples
            .get(name)
            .copied()
            .unwrap_or_else(|| panic!("{name} is missing: {samples:#?}"))
    };
    assert_eq!(value("basalt_sandbox_starts_total"), 2.0);
    assert_eq!(value("basalt_sandbox_start_failures_total{reason=\"name-taken\"}"), 1.0);
    assert_eq!(value("basalt_sandboxes{state=\"running\"}"), 1.0);
    assert_eq!(value("basalt_sandbox_start_duration_seconds_count"), 2.0);
    assert_eq!(
        value("basalt_sandbox_start_phase_duration_seconds_count{phase=\"guest prepared\"}"),
        2.0
    );
    assert_eq!(
        value(&format!(
            "basalt_vmm_rng_bytes_total{{sandbox=\"{id}\",device=\"rng\"}}"
        )),
        7.0
    );
    assert!(value(&format!("basalt_sandbox_disk_bytes{{sandbox=\"{id}\"}}")) >= 0.0);
    assert!(value("process_resident_memory_bytes") > 0.0);
    assert!(
        !samples.keys().any(|name| name.contains("made_up")),
        "a name of the VMM's own"
    );
}

pub(crate) fn scrapers_that_ask_nothing_hold_nobody() {
    let world = World::new("");
    assert_eq!(world.verb(&["ps"]).status.code(), Some(0));
    let connect = || UnixStream::connect(world.path("state").join("metrics.sock")).unwrap();
    let (idle, begun) = wait_for("an endpoint without room", || {
        let begun = Instant::now();
        let idle: Vec<UnixStream> = (0..12).map(|_| connect()).collect();
        assert_eq!(world.verb(&["ps"]).status.code(), Some(0));
        let refused = world.verb(&["daemon", "metrics"]);
        if refused.status.code() == Some(0) {
            return None;
        }
        assert!(text(&refused.stderr).contains("ask again"), "{refused:?}");
        // Four of ours must be those that are served: an earlier round's may have been just now.
        let is_open = |stream: &&UnixStream| {
            stream.set_nonblocking(true).unwrap();
            (&**stream).read(&mut [0]).is_err()
        };
        (idle.iter().filter(is_open).count() == 4).then_some((idle, begun))
    });
    // Those who were let in have their time, which is short.
    wait_for("the metrics", || {
        (world.verb(&["daemon", "metrics"]).status.code() == Some(0)).then_some(())
    });
    assert!(begun.elapsed() > Duration::from_secs(2), "they were not served at all");
    drop(idle);
    // The daemon closes the others when it gets to them, and until then may have no room.
    let answer = wait_for("an answer", || {
        let mut stream = connect();
        let mut answer = String::new();
        let asked = stream.write_all(b"GET /secrets HTTP/1.1\r\n\r\n");
        let answered = asked.and_then(|()| stream.read_to_string(&mut answer));
        answered.is_ok().then_some(answer)
    });
    assert!(answer.starts_with("HTTP/1.1 404 Not Found\r\n"), "{answer}");
}

pub(crate) fn a_collector_gets_one_trace_of_all_programs() {
    let world = World::new("");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (sender, received) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if sender.send(take(stream)).is_err() {
                return;
            }
        }
    });
    let run = ["run", "--rm", "--disk", "0", "tiny", "--", "true"];
    let mut command = world.command(&run);
    let output = command
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)
        .env("TRACEPARENT", PARENT)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    // By the daemon that this command has started, and so has its environment: operations are sent after a second.
    let mut spans: BTreeMap<String, (String, String, Option<String>)> = BTreeMap::new();
    // Each program sends its own, and not all at once.
    wait_for("the spans of three programs, and all their parents", || {
        for document in received.try_iter() {
            for (service, span) in flatten(&document) {
                assert_eq!(span["traceId"], TRACE, "{span}");
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                let parent = span["parentSpanId"].as_str().map(str::to_owned);
                spans.insert(text(&span["spanId"]), (service, text(&span["name"]), parent));
            }
        }
        let services: BTreeSet<&str> = spans.values().map(|(service, ..)| service.as_str()).collect();
        let mut parents = spans.values().filter_map(|(_, _, parent)| parent.as_deref());
        let whole = parents.all(|parent| parent == "00f067aa0ba902b7" || spans.contains_key(parent));
        let created = spans.values().any(|(_, name, _)| name == "create and start");
        let all = ["basalt", "basalt-vmm", "basaltd"]
            .iter()
            .all(|service| services.contains(service));
        (all && created && whole).then_some(())
    });
    // Every span hangs on another one, up to the parent in the environment.
    for (service, name, parent) in spans.values() {
        let parent = parent
            .as_ref()
            .unwrap_or_else(|| panic!("{service}: {name} has no parent"));
        let known = parent == "00f067aa0ba902b7" || spans.contains_key(parent);
        assert!(known, "{service}: {name} hangs on {parent}, which nobody has sent");
    }
    let created = spans.values().find(|(_, name, _)| name == "create and start").unwrap();
    let asked = &spans[created.2.as_ref().unwrap()];
    assert_eq!((asked.0.as_str(), asked.1.as_str()), ("basalt", "daemon asked"));
}

/// One request's body, answered.
fn take(mut stream: std::net::TcpStream) -> Value {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let all = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = all.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
            if body.len() == length.unwrap().parse::<usize>().unwrap() {
                stream
                    .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                    .unwrap();
                return serde_json::from_str(body).unwrap();
            }
        }
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "a request ends early");
        bytes.extend_from_slice(&buffer[..count]);
    }
}

/// Each span of a request, with its service.
fn flatten(document: &Value) -> Vec<(String, Value)> {
    let resources = document["resourceSpans"].as_array().unwrap();
    let one = |resource: &Value| {
        let service = resource["resource"]["attributes"][0]["value"]["stringValue"]
            .as_str()
            .unwrap()
            .to_owned();
        let spans = resource["scopeSpans"][0]["spans"].as_array().unwrap().clone();
        spans
            .into_iter()
            .map(move |span| (service.clone(), span))
            .collect::<Vec<_>>()
    };
    resources.iter().flat_map(one).collect()
}

/// The samples of an exposition in Prometheus' text format 0.0.4, by name and labels; panics where it breaks a rule.
fn parse(exposition: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut families = BTreeSet::new();
    let (mut family, mut kind) = (String::new(), String::new());
    assert!(exposition.ends_with('\n'));
    for line in exposition.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(!help.is_empty() && families.insert(name.to_owned()), "{line}");
            family = name.to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, what) = rest.split_once(' ').unwrap();
            assert_eq!(name, family, "TYPE without HELP");
            assert!(["counter", "gauge", "histogram"].contains(&what), "{line}");
            assert_eq!(what == "counter", name.ends_with("_total"), "{line}");
            kind = what.to_owned();
        } else {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split('{').next().unwrap();
            let suffixes: &[&str] = if kind == "histogram" {
                &["_bucket", "_sum", "_count"]
            } else {
                &[""]
            };
            assert!(
                suffixes.iter().any(|suffix| name == format!("{family}{suffix}")),
                "{line} in {family}"
            );
            assert!(
                name.bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_'),
                "{line}"
            );
            let value: f64 = value.parse().unwrap();
            assert!(samples.insert(series.to_owned(), value).is_none(), "{series} twice");
        }
    }
    samples
}
