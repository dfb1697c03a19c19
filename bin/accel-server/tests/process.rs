//! The program: what it says when it cannot start, that clients are served, and that they notice its end.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use accel_arbiter::{Arbiter, Share};
use accel_proto::cuda::{CudaMalloc, CudaMemGetInfo};
use accel_proto::opencl::GetPlatformIDs;
use accel_proto::{Record, Span};
use accel_transport::{Error, Offer, Transport, connect};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::PacketSocket;

const MOST: Duration = Duration::from_secs(30);

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_basalt-accel-server"));
    command.stdin(Stdio::null());
    command
}

/// A connection to it, as soon as it listens.
fn reach(path: &Path) -> OwnedFd {
    let begin = Instant::now();
    loop {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()) {
            Ok(()) => return socket,
            Err(error) => assert!(begin.elapsed() < MOST, "nobody listens: {error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        // One that has ended already is no error here.
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

#[test]
fn what_cannot_be_is_said_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("a.sock");
    let missing = directory.path().join("none.so");
    let said = |arguments: &[&std::ffi::OsStr]| {
        let output = program().args(arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let words = [
        "--socket".as_ref(),
        socket.as_os_str(),
        "--backend".as_ref(),
        "opencl".as_ref(),
    ];
    let text = said(&[&words[..], &["--library".as_ref(), missing.as_os_str()]].concat());
    assert!(
        text.contains("none.so") && text.contains("ocl-icd-libopencl1"),
        "{text}"
    );
    // The C library is none of OpenCL.
    let text = said(&[&words[..], &["--library".as_ref(), "libc.so.6".as_ref()]].concat());
    assert!(text.contains("no clGetPlatformIDs"), "{text}");
    let nowhere = directory.path().join("none/a.sock");
    let text = said(&["--socket".as_ref(), nowhere.as_os_str(), "--backend=null".as_ref()]);
    assert!(text.contains("a directory that exists"), "{text}");
}

#[test]
fn clients_are_served_and_notice_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("a.sock");
    let start = || {
        let mut command = program();
        command
            .arg("--socket")
            .arg(&socket)
            .args(["--backend=null", "--arena=1m", "--transports=bell"]);
        Started(command.spawn().unwrap())
    };
    // The second one finds the socket of the first, which nobody listens on.
    for _ in 0..2 {
        let server = start();
        let offer = Offer {
            transports: vec![Transport::Bell],
            pairs: 1,
            patience: MOST,
        };
        let mut client = connect(PacketSocket::from_fd(reach(&socket)), &offer).unwrap();
        let mut end = client.ends.remove(0);
        let call = GetPlatformIDs {
            num_entries: 0,
            platforms: false,
            num_platforms: true,
            reply: Span { offset: 0, length: 0 },
        };
        let record = wire::ring::Record::from_bytes(Record::call(&call, 0, true).unwrap().as_bytes());
        let answer = end.call(&record, MOST).unwrap().to_bytes();
        // No error, and one platform.
        assert_eq!(answer[16..24], [0, 0, 0, 0, 1, 0, 0, 0]);
        // One server at a time.
        let second = program()
            .arg("--socket")
            .arg(&socket)
            .arg("--backend=null")
            .output()
            .unwrap();
        let text = String::from_utf8(second.stderr).unwrap();
        assert!(text.contains("where nobody else listens"), "{text}");
        let pid = rustix::process::Pid::from_child(&server.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let begin = Instant::now();
        let ended = end.call(&record, MOST);
        assert!(matches!(ended, Err(Error::PeerGone)), "{ended:?}");
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn the_back_end_reference_has_memory_of_cuda_within_its_limit() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("a.sock");
    let mut command = program();
    command.arg("--socket").arg(&socket);
    command.args(["--backend=reference", "--arena=1m", "--memory=3m", "--transports=bell"]);
    let _server = Started(command.spawn().unwrap());
    let offer = Offer {
        transports: vec![Transport::Bell],
        pairs: 1,
        patience: MOST,
    };
    let mut client = connect(PacketSocket::from_fd(reach(&socket)), &offer).unwrap();
    let mut end = client.ends.remove(0);
    let mut ask = |record: Record| {
        let record = wire::ring::Record::from_bytes(record.as_bytes());
        end.call(&record, MOST).unwrap().to_bytes()
    };
    for (dev_ptr, status) in [(1 << 32, 0), (2 << 32, 2)] {
        let call = CudaMalloc { dev_ptr, size: 2 << 20 };
        let answer = ask(Record::call(&call, 0, true).unwrap());
        assert_eq!(answer[16..20], [status, 0, 0, 0]);
    }
    let answer = ask(Record::call(&CudaMemGetInfo {}, 0, true).unwrap());
    let number = |at: usize| u64::from_le_bytes(answer[at..at + 8].try_into().unwrap());
    assert_eq!((answer[16], number(20), number(28)), (0, 1 << 20, 3 << 20));
}

#[test]
fn limits_and_statistics_are_a_processs_own() {
    let directory = tempfile::tempdir().unwrap();
    let [socket, control, share] = ["a.sock", "control", "share"].map(|name| directory.path().join(name));
    let mut command = program();
    command.arg("--socket").arg(&socket).arg("--control").arg(&control);
    command.arg("--arbiter").arg(&share);
    command.args(["--backend=null", "--arena=1m", "--memory=3m", "--transports=bell"]);
    let server = Started(command.spawn().unwrap());
    drop(reach(&socket));
    let ask = || {
        let mut line = String::new();
        let begin = Instant::now();
        let mut stream = loop {
            match UnixStream::connect(&control) {
                Ok(stream) => break stream,
                Err(error) => assert!(begin.elapsed() < MOST, "nobody tells: {error}"),
            }
        };
        stream.read_to_string(&mut line).unwrap();
        line
    };
    // Nobody divides its time yet, and it serves all the same.
    let line = ask();
    assert!(
        line.contains(r#""quota":3145728"#) && line.contains(r#""is_shared":false"#),
        "{line}"
    );
    let arbiter = Arbiter::start().unwrap();
    arbiter.admit("a", Share::default(), &share).unwrap();
    let begin = Instant::now();
    while !ask().contains(r#""is_shared":true"#) {
        assert!(begin.elapsed() < MOST, "it does not find its arbiter");
    }
    assert!(arbiter.report()["a"].is_connected);
    // Killed, it is gone from the arbiter at once.
    drop(server);
    let begin = Instant::now();
    while arbiter.report()["a"].is_connected {
        assert!(begin.elapsed() < MOST, "its end is not seen");
    }
}
