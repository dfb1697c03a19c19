//! The library as programs have it: linked with the names and versions of its functions, by all of its file's names, and called by a program
//! in C, against a server with the back end `null`, none, and one that ends.

mod support;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use accel_cuda_null::{Quota, State};
use accel_proto::cuda::AnyCall;
use accel_proto::{Arguments, Limits, Record, Writer};
use accel_server::{Backend, Server, TenantLimits};
use accel_transport::{ServerEnd, Settings, Transport, accept};
use accel_window::Window;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use support::Linked;
use wire::packet::PacketSocket;

/// What a window has: less than the program copies at a time.
const ARENA: u64 = 1 << 20;
const MOST: Duration = Duration::from_secs(20);

fn settings() -> Settings {
    Settings {
        transports: vec![Transport::Bell],
        pairs: 4,
        records: 256,
        arena: ARENA,
        patience: MOST,
        busy_poll: None,
    }
}

#[test]
fn a_program_finds_functions_by_their_versions_and_its_calls_cross() {
    let linked = Linked::new("tests/linked/main.c");
    let listener = Server::listen(&linked.socket()).unwrap();
    let limits = TenantLimits {
        memory: Some(64 << 20),
        ..TenantLimits::default()
    };
    let server = Arc::new(Server::with_limits(Backend::null(), settings(), &limits).unwrap());
    let serving = Arc::clone(&server);
    std::thread::spawn(move || serving.serve(&listener));
    let said = linked.program("works", &[]);
    assert!(said.contains("basalt-cuda: cudaGraphLaunch is not served"), "{said}");
    let begin = std::time::Instant::now();
    while !server.stats().clients.is_empty() && begin.elapsed() < MOST {
        std::thread::sleep(Duration::from_millis(5));
    }
    let stats = server.stats();
    assert_eq!(
        (stats.clients.len(), stats.memory.used),
        (0, 0),
        "what a client had is given back with its end"
    );
    assert!(stats.memory.most > 5 << 20);
    assert_eq!(stats.errors.get(&700), Some(&1), "{:?}", stats.errors);
}

#[test]
fn a_program_of_a_version_that_is_not_served_is_told_which_are() {
    let linked = Linked::new("tests/linked/main.c");
    let old = linked.compile("tests/linked/old.c", "old", &["libcudart.so.11.0"]);
    let output = Command::new(old)
        .env("LD_LIBRARY_PATH", linked.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*output.stdout), (Some(1), &b""[..]), "{said}");
    assert!(
        said.contains("Basalt serves those of CUDA 13 and 12 (libcudart.so.13,") && said.contains("-cudart shared"),
        "{said}"
    );
}

#[test]
fn without_a_server_there_is_no_device_and_it_is_said_why() {
    let linked = Linked::new("tests/linked/main.c");
    let said = linked.program("no-server", &[]);
    assert!(
        said.contains("no accelerator at") && said.contains("BASALT_ACCEL_SOCKET names the server"),
        "{said}"
    );
}

struct Unlimited;

impl Quota for Unlimited {
    fn charge(&mut self, _: u64) -> bool {
        true
    }

    fn give_back(&mut self, _: u64) {}
}

/// A server that answers so many records as `null` does, and tells how many came; it ends then, or with its client.
fn serve_some(socket: &Path, transport: Transport, most: usize) -> JoinHandle<usize> {
    let flags = SocketFlags::CLOEXEC;
    let listener: OwnedFd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    std::thread::spawn(move || {
        let socket = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
        let settings = Settings {
            transports: vec![transport],
            ..settings()
        };
        let mut connection = accept(PacketSocket::from_fd(socket), &settings).unwrap();
        let window = connection.window.take().unwrap();
        let mut end = connection.ends.remove(0);
        let mut state = State::new(1 << 30);
        for count in 0..most {
            let Ok(request) = end.receive(Some(MOST)) else {
                return count;
            };
            answer(&mut end, &window, &mut state, &request);
        }
        most
    })
}

fn answer(end: &mut ServerEnd, window: &Window, state: &mut State, request: &wire::ring::Record) {
    let record = Record::from_bytes(request.to_bytes());
    let limits = Limits { arena: ARENA };
    let Arguments::Inline(bytes) = record.arguments(limits).unwrap() else {
        panic!("none of them is that long")
    };
    let call = AnyCall::decode(record.op(), bytes, limits).unwrap();
    let waits = record.flags().unwrap().waits();
    let (reply, _) = state.carry_out(&call, waits, &mut Unlimited);
    let mut encoded = vec![0; 4096];
    let mut writer = Writer::new(&mut encoded);
    reply.write(&mut writer);
    let length = writer.finish().unwrap();
    let answer = Record::encoded_reply(record.op(), &encoded[..length], 0).unwrap_or_else(|_| {
        let mut place = None;
        call.spans(&mut |span| place = Some(span));
        let span = accel_proto::Span {
            length: length as u64,
            ..place.unwrap()
        };
        let region = window.slice(span.offset, span.length).unwrap();
        region.write(0, &encoded[..length]).unwrap();
        end.send_data(span.offset, span.length, MOST).unwrap();
        Record::encoded_reply_in(record.op(), span, 0)
    });
    let answer = wire::ring::Record::from_bytes(answer.as_bytes());
    end.finish(request, waits.then_some(&answer), MOST).unwrap();
    end.flush(MOST).unwrap();
}

#[test]
fn a_server_that_ends_is_an_error_of_every_later_call() {
    let linked = Linked::new("tests/linked/main.c");
    // What is told of the device, an allocation, and one question.
    let serving = serve_some(&linked.socket(), Transport::Bell, 3);
    linked.program("gone", &[]);
    assert_eq!(serving.join().unwrap(), 3);
}

#[test]
fn to_compare_with_each_call_crosses_and_is_waited_for() {
    let linked = Linked::new("tests/linked/main.c");
    let both = [
        ("BASALT_ACCEL_CUDA", "synchronous"),
        ("BASALT_ACCEL_TRANSPORT", "synchronous"),
    ];
    // What is told of the device; ten calls that are answered in the process, and three that cross by themselves.
    for (environment, count) in [(&both[1..], 1 + 3), (&both[..], 1 + 10 + 3)] {
        let serving = serve_some(&linked.socket(), Transport::Synchronous, usize::MAX);
        linked.program("local", environment);
        assert_eq!(serving.join().unwrap(), count);
        std::fs::remove_file(linked.socket()).unwrap();
    }
}
