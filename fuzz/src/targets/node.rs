//! What the daemon and the command line read that others have written: requests, records of snapshots and templates from
//! elsewhere, logs and consoles of guests, what scrapers ask, VMMs' counters, and the small texts in all of these.
//!
//! Knows the formats only as the crates' own types.

use std::fmt::Display;

use agent_api::OutputStream;
use node_api::message::Item;
use node_api::transfer::Kind;
use node_api::{Limits, NetworkMode, Packet, ProcessConfig, Request, Resources, SandboxConfig};
use serde_json::{Value, json};
use vmm_api::MetricSample;

use crate::run::{Target, outcome};

/// What an asker sends to the daemon's socket.
pub(crate) fn requests() -> Target {
    let request = |request: Value| {
        let packet = json!({ "request": { "version": node_api::VERSION, "request": request } });
        packet.to_string().into_bytes()
    };
    let config = serde_json::to_value(config()).unwrap_or_default();
    let recipe = json!({ "commands": ["true"], "ready": "true", "ready_ms": 1, "env": ["A=b"], "workdir": null,
        "user": null, "network": "auto" });
    let build = json!({ "names": ["web"], "replaces": null, "image": "python", "resources": config["resources"],
        "recipe": recipe, "force": false });
    Target {
        name: "node-requests",
        seeds: vec![
            request(json!({ "method": "info" })),
            request(json!({ "method": "run", "params": config })),
            request(json!({ "method": "build-template", "params": build })),
            request(json!({ "method": "kill", "params": { "sandbox": "web", "signal": 15 } })),
            request(json!({ "method": "load", "params": { "file": { "name": "memory.1" } } })),
        ],
        parse: request_of,
    }
}

fn request_of(input: &[u8]) -> u64 {
    match serde_json::from_slice(input) {
        Ok(Packet::Request { request, .. }) => match request {
            Request::Run(config) => verdict(config.validate()),
            Request::BuildTemplate(config) => verdict(config.validate()),
            other => outcome(format!("{other:?}").split(['(', ' ']).next().unwrap_or_default()),
        },
        Ok(Packet::Item(Item::Spans(spans))) => outcome(format!("{} spans", spans.len())),
        Ok(_) => outcome("another packet"),
        Err(error) => outcome(error),
    }
}

fn config() -> SandboxConfig {
    SandboxConfig {
        name: Some("web".into()),
        image: "python".into(),
        process: ProcessConfig {
            env: vec!["A=b".into()],
            ..ProcessConfig::default()
        },
        resources: Resources {
            cpus: 1,
            memory: base::ByteSize::mib(128),
            boot_memory: None,
            max_memory: None,
            held_memory: None,
            inflated: None,
            disk: None,
            cpu_model: None,
            class: node_api::Class::Standard,
            idle: node_api::Idle::Halt,
            memory_mode: node_api::MemoryMode::Translated,
            free_page_reporting: false,
            guest_iommu: false,
        },
        limits: Limits::default(),
        tmpfs: Vec::new(),
        network: NetworkMode::Auto,
        egress: base::Egress::nothing(),
        ports: vec!["8080:80".into()],
        volumes: Vec::new(),
        devices: Vec::new(),
        device_start: None,
        cdi_devices: Vec::new(),
        accelerator: None,
        time_limit: None,
        memory_ready: false,
        hostname: None,
        boot: false,
        template: None,
        paging: node_api::Paging::Mapped,
        remove: true,
        detach: false,
        labels: [("k".to_owned(), "v".to_owned())].into(),
        owner: None,
    }
}

/// `record.json` of a snapshot or a template that a stranger has made.
pub(crate) fn records() -> Target {
    let digest = "0".repeat(64);
    let programs = json!({ "vmm": digest, "kernel": digest, "initramfs": null });
    let resources = json!({ "cpus": 1, "memory": 1 << 27, "disk": null });
    let snapshot = json!({
        "snapshot": { "name": "web-1", "created_ns": 1, "sandbox": "0123456789ab", "sandbox_name": "web",
            "config": serde_json::to_value(config()).unwrap_or_default(), "digest": digest, "programs": programs },
        "command": { "argv": ["sh"], "env": ["A=b"], "cwd": "/", "user": null, "tty": null, "stdin": false },
        "networked": false, "share_slots": 2,
    });
    let template = json!({
        "template": { "id": digest, "names": ["web"], "created_ns": 1, "digest": digest, "resources": resources,
            "networked": false, "programs": programs,
            "recipe": { "commands": ["true"], "ready": null, "ready_ms": 1, "env": [], "workdir": null, "user": null,
                "network": "auto" },
            "host": { "kernel": "6.1", "vendor": "v", "processor": "p", "features": digest } },
        "shape": { "digest": digest, "resources": resources, "network": null, "command_line": "quiet" },
        "files": [null, null, null],
    });
    Target {
        name: "transfer-record",
        seeds: [snapshot, template]
            .map(|record| record.to_string().into_bytes())
            .into(),
        parse: |input| {
            let verdicts = [Kind::Snapshot, Kind::Template].map(|kind| {
                let told = node::untrusted::record(kind, input);
                told.map_or_else(|error| error.to_string(), |()| "right".to_owned())
            });
            // Words of the record stand in the messages.
            outcome(
                verdicts
                    .map(|text| text.split('`').next_back().unwrap_or_default().to_owned())
                    .concat(),
            )
        },
    }
}

/// The part of a snapshot's state that the daemon looks at itself.
pub(crate) fn memory_lists() -> Target {
    let state = |version, payload: &[u8]| {
        let mut container = state::Container::new(state::Fingerprint::default());
        let saved = state::Saved {
            kind: "memory-file".to_owned(),
            version,
            payload: payload.to_vec(),
        };
        container.put_saved("memory", saved).expect("a section");
        container.to_bytes().expect("a state")
    };
    Target {
        name: "snapshot-memory-list",
        seeds: vec![state(1, b"{}"), state(2, br#"{"files":[{},{}]}"#)],
        parse: |input| {
            let named = node::untrusted::memory_files(input);
            outcome(named.map_or_else(|error| error, |count| "x".repeat(count.min(9))))
        },
    }
}

/// Lines of a sandbox's log, which its guest writes.
pub(crate) fn logs() -> Target {
    let mut log = Vec::new();
    agent_api::log::write_output(&mut log, 7, OutputStream::Stdout, b"one\ntwo");
    agent_api::log::write_exit(&mut log, 8, agent_api::ExitStatus::Code(3));
    Target {
        name: "sandbox-log",
        seeds: vec![log],
        parse: |input| {
            let records = input.split(|&byte| byte == b'\n').map(agent_api::log::read);
            let kind = |record: Option<agent_api::log::Record<'_>>| match record.map(|record| record.what) {
                None => '-',
                Some(agent_api::log::What::Output { ended, .. }) => {
                    if ended {
                        'o'
                    } else {
                        'p'
                    }
                }
                Some(agent_api::log::What::Exited(_)) => 'x',
            };
            outcome(records.map(kind).take(20).collect::<String>())
        },
    }
}

/// A console, or a VMM's log, whose end stands in errors.
pub(crate) fn consoles() -> Target {
    Target {
        name: "guest-console",
        seeds: vec![b"[  0.1] Kernel panic - not syncing\r\n\x1b[31mred\n\xff\n".to_vec()],
        parse: |input| {
            let lines = node::untrusted::shown_lines(input);
            let obeyed = |line: &String| line.chars().any(|letter| letter.is_control() && letter != '\t');
            assert!(!lines.iter().any(obeyed), "a terminal would obey {lines:?}");
            outcome("x".repeat(lines.len().min(20)))
        },
    }
}

/// What is asked of the metrics endpoint, by whoever reaches its port of the loopback.
pub(crate) fn scrapes() -> Target {
    Target {
        name: "metrics-request",
        seeds: vec![
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            b"POST /metrics?x HTTP/1.0\r\n\r\n".to_vec(),
            b"GET / HTTP/2\r\n\r\n".to_vec(),
        ],
        parse: |input| outcome(node::untrusted::scrape(input).err().unwrap_or("answered")),
    }
}

/// What a VMM says that it has counted.
pub(crate) fn counters() -> Target {
    let samples = json!([
        { "name": "vcpu_exits_total", "labels": [["vcpu", "0"], ["reason", "io"]], "value": 3 },
        { "name": "vcpu_exits_total", "labels": [["vcpu", "1"], ["reason", "io"]], "value": u64::MAX },
        { "name": "block_bytes_total", "labels": [["device", "a\"}\nx 1"], ["direction", "read"]], "value": 5 },
        { "name": "made_up_total", "labels": [], "value": 1 },
    ]);
    let many = (0..300)
        .map(|number| json!({ "name": "net_bytes_total", "labels": [["device", number.to_string()]], "value": 1 }));
    Target {
        name: "vmm-counters",
        seeds: vec![
            samples.to_string().into_bytes(),
            Value::from_iter(many).to_string().into_bytes(),
        ],
        parse: counted,
    }
}

fn counted(input: &[u8]) -> u64 {
    let samples = match serde_json::from_slice(input) {
        Ok(samples) => samples,
        // What was found stands behind it.
        Err(error) => return outcome(error.to_string().split(['"', '`']).next().unwrap_or_default()),
    };
    let series = node::untrusted::counters(samples);
    assert!(series.len() <= 256, "{} series", series.len());
    let odd = |text: &str| {
        text.len() > 32 || text.contains(|letter: char| !letter.is_ascii_alphanumeric() && !"-_".contains(letter))
    };
    for MetricSample { name, labels, .. } in &series {
        assert!(name.ends_with("_total") || name.ends_with("_bytes"), "{name}");
        assert!(!labels.iter().any(|(_, value)| odd(value)), "{name} {labels:?}");
    }
    let labels = series.iter().map(|sample| sample.labels.len()).sum::<usize>();
    outcome(format!(
        "{} {}",
        "x".repeat(series.len().min(20)),
        "x".repeat(labels.min(20))
    ))
}

/// Ports, volumes, rates, sizes and the like: in requests, in records and on command lines.
pub(crate) fn settings() -> Target {
    let texts = [
        "127.0.0.1:8080:80/tcp",
        "[::1]:53:53/udp",
        "cache:/var/cache:ro",
        "/srv:/data",
        "/run:size=1M",
        "1M/100",
        "512m",
        "0-3,7",
        "localhost/tools/python:3.11@sha256:00",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "bare",
        "10.0.0.0/8",
        "2001:db8::/32",
    ];
    Target {
        name: "settings",
        seeds: texts.map(|text| text.as_bytes().to_vec()).into(),
        parse: setting,
    }
}

fn setting(input: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(input);
    let text = text.as_ref();
    let verdicts = [
        text.parse::<network::PortMapping>().is_ok(),
        text.parse::<node_api::VolumeMount>().is_ok(),
        text.parse::<node_api::Tmpfs>().is_ok(),
        text.parse::<node_api::Rate>().is_ok(),
        text.parse::<base::ByteSize>().is_ok(),
        text.parse::<base::CpuSet>().is_ok(),
        range(text),
        text.parse::<image::Reference>().is_ok(),
        text.parse::<observe::TraceContext>().is_ok(),
        text.parse::<node_api::Class>().is_ok(),
        node_api::check_name(text).is_ok(),
    ];
    outcome(
        verdicts
            .map(|good| if good { 'y' } else { 'n' })
            .iter()
            .collect::<String>(),
    )
}

/// What is a range is written as it is read.
fn range(text: &str) -> bool {
    let read = text.parse::<base::Cidr>();
    if let Ok(range) = &read {
        assert_eq!(range.to_string().parse().as_ref(), Ok(range), "{text}");
    }
    read.is_ok()
}

fn verdict(result: Result<(), impl Display>) -> u64 {
    // What was asked for stands in the message.
    result.map_or_else(
        |error| outcome(error.to_string().split('`').next_back().unwrap_or_default()),
        |()| outcome("valid"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_right() {
        for seed in requests().seeds {
            assert!(
                serde_json::from_slice::<Packet>(&seed).is_ok(),
                "{}",
                String::from_utf8_lossy(&seed)
            );
        }
        let seeds = records().seeds;
        node::untrusted::record(Kind::Snapshot, &seeds[0]).unwrap();
        node::untrusted::record(Kind::Template, &seeds[1]).unwrap();
        assert_eq!(node::untrusted::memory_files(&memory_lists().seeds[1]), Ok(2));
        assert_eq!(node::untrusted::scrape(&scrapes().seeds[0]), Ok(()));
        let samples = serde_json::from_slice(&counters().seeds[0]).unwrap();
        assert_eq!(node::untrusted::counters(samples).len(), 2);
    }
}
