//! Messages between processes: frames, the handshake, agent messages (a guest writes them) and VMM packets.
//!
//! Knows the formats only as the crates' own types.

use std::fmt::Debug;
use std::io::{self, Cursor, Read, Write};

use agent_api::message::{
    Entry, EntryKind, ExecFailure, ExecRequest, ExitStatus, FailureKind, FsRequest, Identity, Kept, KeptCommand,
    PROTOCOL, Reidentify, Reply, Request, RequestFailure, RequestFailureKind, Tty, WatchEvent, WatchEventKind, Which,
    WinSize,
};
use base::ByteSize;
use serde::Serialize;
use serde::de::DeserializeOwned;
use vmm_api::config::{FdRef, VmConfig};
use vmm_api::message::{Packet, Request as VmmRequest};
use wire::{FrameReader, Token};

use crate::run::{Target, outcome};

/// A stream of frames.
pub(crate) fn frames() -> Target {
    let mut two = Vec::new();
    for (kind, payload) in [(1, &b"{}"[..]), (2, b"data")] {
        two.extend(frame(kind, payload));
    }
    Target {
        name: "wire-frames",
        seeds: vec![frame(1, b""), two],
        parse: parse_frames,
    }
}

fn frame(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = wire::Header::encode(payload.len(), kind, 0)
        .map(|header| header.to_vec())
        .unwrap_or_default();
    bytes.extend(payload);
    bytes
}

fn parse_frames(input: &[u8]) -> u64 {
    let mut reader = FrameReader::new(Cursor::new(input));
    let mut count = 0;
    loop {
        match reader.read() {
            Ok(Some(frame)) => count += 1 + u64::from(frame.kind % 8),
            Ok(None) => return count,
            Err(error) => return outcome(error) ^ count,
        }
    }
}

/// Both sides of the handshake, with what the other one sends.
pub(crate) fn handshake() -> Target {
    let seeds = [None, Some(token())].map(|token| {
        let mut stream = Stream {
            input: Cursor::new(&[]),
            output: Vec::new(),
        };
        // Without an answer the offer fails after it was written; what was written is the seed.
        let _ = wire::offer(&mut stream, PROTOCOL, token.as_ref());
        stream.output
    });
    Target {
        name: "wire-handshake",
        seeds: seeds.into(),
        parse: parse_handshake,
    }
}

fn token() -> Token {
    Token::new([7; Token::LEN])
}

struct Stream<'a> {
    input: Cursor<&'a [u8]>,
    output: Vec<u8>,
}

impl Read for Stream<'_> {
    fn read(&mut self, data: &mut [u8]) -> io::Result<usize> {
        self.input.read(data)
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.output.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn parse_handshake(input: &[u8]) -> u64 {
    let mut ends = String::new();
    for token in [None, Some(token())] {
        for accepts in [true, false] {
            let mut stream = Stream {
                input: Cursor::new(input),
                output: Vec::new(),
            };
            let ended = if accepts {
                wire::accept(&mut stream, PROTOCOL, token.as_ref())
            } else {
                wire::offer(&mut stream, PROTOCOL, token.as_ref())
            };
            ends.push_str(&ended.map_or_else(|error| error.to_string(), |version| format!("agreed on {version}")));
        }
    }
    outcome(ends)
}

/// What a host asks of an agent.
pub(crate) fn agent_requests() -> Target {
    let exec = ExecRequest {
        argv: vec!["sh".into(), vec![0xff].into()],
        env: vec!["A=b".into()],
        cwd: "/".into(),
        user: Some("1:2".into()),
        tty: Some(Tty {
            size: WinSize { rows: 24, cols: 80 },
            term: Some("xterm".into()),
        }),
        stdin: true,
        main: true,
        detached: false,
        kept: Some(Kept {
            tag: Some("t".into()),
            note: "n".into(),
            limit_ms: Some(60_000),
        }),
    };
    let stat = Request::Stat {
        path: "/x".into(),
        digest: true,
    };
    let reidentify = Reidentify {
        clock_ns: 1,
        entropy: vec![7; 4],
        identity: Some(Identity {
            hostname: "a".into(),
            machine_id: "b".into(),
        }),
        hook_ms: 1,
        thaw: true,
        pids_max: Some(2),
        restored: true,
        ..Reidentify::default()
    };
    let requests = [
        Request::Connect { port: 8000 },
        Request::Exec(exec),
        stat,
        Request::Reidentify(Box::new(reidentify)),
        Request::Freeze,
        Request::Settle,
        Request::ListKept,
        Request::Attach {
            command: Which::Pid(7),
            output: true,
        },
        Request::Attach {
            command: Which::Tag("t".into()),
            output: false,
        },
        Request::Detach,
    ];
    let seeds = requests.iter().chain(&about_files()).map(json).collect();
    Target {
        name: "agent-requests",
        seeds,
        parse: parse::<Request>,
    }
}

fn about_files() -> [Request; 6] {
    let fs = |request| Request::Fs {
        user: Some("user".into()),
        request,
    };
    let list = FsRequest::List {
        path: "~/a".into(),
        depth: 3,
    };
    let read = FsRequest::Read {
        path: vec![b'/', 0xff].into(),
        offset: 1,
        length: Some(2),
    };
    let write = FsRequest::Write {
        path: "b".into(),
        mode: Some(0o644),
        metadata: [("name".into(), "value".into())].into(),
    };
    let compose = FsRequest::Compose {
        sources: vec!["/a".into(), "/b".into()],
        path: "/c".into(),
    };
    let watch = FsRequest::Watch {
        path: "/a".into(),
        recursive: true,
    };
    let rename = FsRequest::Rename {
        from: "/a".into(),
        to: "/b".into(),
    };
    [list, read, write, compose, watch, rename].map(fs)
}

/// What a guest's agent answers: the guest is hostile.
pub(crate) fn agent_replies() -> Target {
    let failed = ExecFailure {
        kind: FailureKind::NotFound,
        message: "no".into(),
    };
    let kept = KeptCommand {
        pid: 7,
        kept: Kept {
            tag: Some("t".into()),
            note: "n".into(),
            limit_ms: Some(60_000),
        },
    };
    let not_found = RequestFailure {
        kind: RequestFailureKind::NotFound,
        message: "no".into(),
    };
    let replies = [
        Reply::Kept {
            commands: vec![kept],
            more: true,
        },
        Reply::RequestFailed(not_found),
        Reply::Failed(failed),
        Reply::Exited(ExitStatus::Signal(9)),
        Reply::StdinTaken { bytes: 5 },
        Reply::Reidentified { boot_id: "a".into() },
        Reply::RequestFailed(RequestFailure {
            kind: RequestFailureKind::NotFound,
            message: "no".into(),
        }),
        Reply::Entries {
            entries: vec![entry()],
            more: true,
        },
        Reply::Reading {
            entry: Box::new(entry()),
            bytes: 5,
        },
        Reply::Watched(vec![WatchEvent {
            name: "a".into(),
            kind: WatchEventKind::Create,
        }]),
    ];
    Target {
        name: "agent-replies",
        seeds: replies.iter().map(json).collect(),
        parse: parse::<Reply>,
    }
}

fn entry() -> Entry {
    Entry {
        path: "/a".into(),
        kind: EntryKind::Link,
        mode: 0o120_777,
        size: 1,
        owner: "user".into(),
        group: "1000".into(),
        modified_ns: -1,
        target: Some(vec![0xff].into()),
        target_kind: Some(EntryKind::File),
        metadata: [("name".into(), "value".into())].into(),
    }
}

/// Packets on a VMM's socket, and the configuration in them.
pub(crate) fn vmm_packets() -> Target {
    let config = VmConfig {
        acpi_hotplug: false,
        cpus: 2,
        memory: ByteSize::mib(128),
        cpu: vmm_api::CpuModel::V2,
        kernel: FdRef(0),
        initramfs: Some(FdRef(1)),
        cmdline: "console=hvc0".into(),
        kvm: None,
        reservation: None,
        memory_mode: vmm_api::MemoryMode::Identity,
        busy_poll_us: None,
        serial: Some(FdRef(2)),
        serial_keep: Some(1 << 20),
        devices: Vec::new(),
    };
    let request = |request| {
        json(&Packet::Request {
            id: 1,
            version: vmm_api::VERSION,
            request,
        })
    };
    let seeds = vec![
        request(VmmRequest::Create(Box::new(config))),
        request(VmmRequest::Start),
        request(VmmRequest::AddZeroedMemory(vec![FdRef(0), FdRef(63)])),
    ];
    Target {
        name: "vmm-packets",
        seeds,
        parse: parse_packet,
    }
}

fn parse_packet(input: &[u8]) -> u64 {
    match serde_json::from_slice(input) {
        Ok(Packet::Request {
            request: VmmRequest::Create(config),
            ..
        }) => config.validate().map_or_else(outcome, |()| outcome("valid")),
        Ok(packet) => outcome(format!("{packet:?}")),
        Err(error) => outcome(error),
    }
}

fn json(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).unwrap_or_default()
}

fn parse<T: DeserializeOwned + Debug>(input: &[u8]) -> u64 {
    match serde_json::from_slice::<T>(input) {
        Ok(message) => outcome(format!("{message:?}")),
        Err(error) => outcome(error),
    }
}
