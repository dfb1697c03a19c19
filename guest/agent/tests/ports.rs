//! A connection that becomes one to a TCP port: bytes and ends both ways, ports that are closed, clients that leave.

mod common;

use std::io::{Read, Write};
use std::net::{Ipv6Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use agent_api::message::{FsRequest, Reply, Request, kind};
use agent_api::{Duplex, Error, RequestFailureKind};
use common::connect;
use common::raw::{ask, raw, reply};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

/// A server for one connection.
fn serve<T: Send + 'static>(
    listener: TcpListener,
    work: impl FnOnce(TcpStream) -> T + Send + 'static,
) -> (u16, JoinHandle<T>) {
    let port = listener.local_addr().unwrap().port();
    let thread = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(LIMIT).unwrap();
        stream.set_write_timeout(LIMIT).unwrap();
        work(stream)
    });
    (port, thread)
}

fn local() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

fn dial(port: u16) -> UnixStream {
    let stream = connect().connect_port(port).unwrap();
    stream.set_read_timeout(LIMIT).unwrap();
    stream.set_write_timeout(LIMIT).unwrap();
    stream
}

fn pattern(length: usize, step: usize) -> Vec<u8> {
    (0..length)
        .map(|number| u8::try_from(number * step % 251).unwrap())
        .collect()
}

#[test]
fn an_echo_comes_back_and_the_end_is_passed_on() {
    let (port, server) = serve(local(), |mut stream| {
        let mut all = Vec::new();
        let mut space = [0; 1000];
        loop {
            let got = stream.read(&mut space).unwrap();
            if got == 0 {
                break;
            }
            all.extend_from_slice(&space[..got]);
            stream.write_all(&space[..got]).unwrap();
        }
        // Only after the client's end.
        stream.write_all(b"end").unwrap();
        all.len()
    });
    let mut stream = dial(port);
    let mut space = [0; 5];
    for _ in 0..3 {
        stream.write_all(b"hello").unwrap();
        stream.read_exact(&mut space).unwrap();
        assert_eq!(&space, b"hello");
    }
    stream.shutdown(Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert_eq!((rest.as_slice(), server.join().unwrap()), (&b"end"[..], 15));
}

#[test]
fn a_server_that_ends_first_can_still_be_written_to() {
    let (port, server) = serve(local(), |mut stream| {
        stream.write_all(b"hello").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        all
    });
    let mut stream = dial(port);
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"hello");
    let bytes = pattern(300_000, 3);
    stream.write_all(&bytes).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(server.join().unwrap() == bytes);
}

#[test]
fn much_goes_both_ways_at_once() {
    let (up, down) = (pattern(8 << 20, 1), pattern(8 << 20, 7));
    let sent = down.clone();
    let (port, server) = serve(local(), move |mut stream| {
        let mut again = stream.try_clone().unwrap();
        let writer = thread::spawn(move || {
            again.write_all(&sent).unwrap();
            again.shutdown(Shutdown::Write).unwrap();
        });
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        writer.join().unwrap();
        all
    });
    let mut stream = dial(port);
    let mut again = stream.try_clone().unwrap();
    let wanted = up.clone();
    let writer = thread::spawn(move || {
        again.write_all(&up).unwrap();
        again.shutdown(Shutdown::Write).unwrap();
    });
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    writer.join().unwrap();
    assert!(all == down);
    assert!(server.join().unwrap() == wanted);
}

#[test]
fn a_server_may_listen_by_ipv6_alone() {
    let (port, server) = serve(TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).unwrap(), |mut stream| {
        stream.write_all(b"six").unwrap();
    });
    let mut all = Vec::new();
    dial(port).read_to_end(&mut all).unwrap();
    assert_eq!(all, b"six");
    server.join().unwrap();
}

/// A port that nobody has: it was somebody's just now.
fn closed_port() -> u16 {
    local().local_addr().unwrap().port()
}

#[test]
fn a_closed_port_is_told_by_name_and_the_connection_stays_usable() {
    let port = closed_port();
    match connect().connect_port(port) {
        Err(Error::RequestFailed(failure)) => {
            assert_eq!(failure.kind, RequestFailureKind::NotFound);
            assert!(
                failure.message.contains(&format!("port {port} is not open")),
                "{failure}"
            );
        }
        other => panic!("{other:?}"),
    }
    let (mut reader, writer) = raw();
    for port in [port, 0] {
        ask(&writer, &Request::Connect { port });
        assert!(matches!(reply(&mut reader), Reply::RequestFailed(_)));
    }
    ask(&writer, &Request::Ping);
    assert_eq!(reply(&mut reader), Reply::Done);
}

#[test]
fn bytes_before_the_answer_are_never_taken_for_requests() {
    for port in [closed_port(), local().local_addr().unwrap().port()] {
        let (mut reader, writer) = raw();
        // In one go with the request.
        let (request, ping) = (Request::Connect { port }, Request::Ping);
        let mut bytes = Vec::new();
        for request in [&request, &ping] {
            let json = serde_json::to_vec(request).unwrap();
            bytes.extend(wire::Header::encode(json.len(), kind::CONTROL, 0).unwrap());
            bytes.extend(json);
        }
        writer.with(|mut stream| stream.write_all(&bytes)).unwrap();
        // No answer to either: the connection ends.
        assert!(matches!(reader.read(), Ok(None) | Err(_)));
    }
}

#[test]
fn the_first_bytes_after_the_answer_are_the_ports() {
    let (port, server) = serve(local(), |mut stream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        all
    });
    let (mut reader, writer) = raw();
    ask(&writer, &Request::Connect { port });
    assert_eq!(reply(&mut reader), Reply::Done);
    // It looks like a request, and is none any more.
    let json = serde_json::to_vec(&Request::Ping).unwrap();
    ask(&writer, &Request::Ping);
    reader.get_ref().close_writing();
    let mut rest = Vec::new();
    reader.get_mut().read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "nobody has answered");
    let got = server.join().unwrap();
    assert!(got.ends_with(&json) && got.len() == json.len() + 8);
}

#[test]
fn a_client_that_leaves_is_noticed_though_the_server_is_silent() {
    let (port, server) = serve(local(), |mut stream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        // It does not care for the end, and writes on until somebody says that nobody takes it.
        while stream.write_all(&[0; 1000]).is_ok() {}
        all
    });
    let mut stream = dial(port);
    stream.write_all(b"last words").unwrap();
    drop(stream);
    assert_eq!(server.join().unwrap(), b"last words");
}

#[test]
fn a_server_that_breaks_off_ends_the_connection() {
    let (port, server) = serve(local(), |mut stream| {
        let mut space = [0; 1];
        stream.read_exact(&mut space).unwrap();
        // With something unread this is a reset.
        drop(stream);
    });
    let mut stream = dial(port);
    // More than all buffers on the way hold: it ends only because nobody takes it any more.
    let bytes = vec![0; 64 << 20];
    let written = stream.write_all(&bytes);
    server.join().unwrap();
    let mut rest = Vec::new();
    let read = stream.read_to_end(&mut rest);
    assert!(
        rest.is_empty() && (written.is_err() || read.is_ok()),
        "{written:?} {read:?}"
    );
}

#[test]
fn what_a_port_did_not_take_is_never_taken_for_requests() {
    let (port, server) = serve(local(), |mut stream| {
        let mut space = [0; 1];
        stream.read_exact(&mut space).unwrap();
    });
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("made");
    let request = Request::Fs {
        user: None,
        request: FsRequest::MakeDir {
            path: made.as_os_str().into(),
        },
    };
    // Of a length that every buffer holds many times, so that it is whole wherever the port's bytes end.
    let mut json = serde_json::to_vec(&request).unwrap();
    json.resize(256 - wire::HEADER_LEN, b' ');
    let mut bytes = wire::Header::encode(json.len(), kind::CONTROL, 0).unwrap().to_vec();
    bytes.extend(json);
    let mut stream = dial(port);
    // Until the agent has left.
    while stream.write_all(&bytes).is_ok() {}
    server.join().unwrap();
    assert!(!made.exists(), "it was taken for a request");
}
