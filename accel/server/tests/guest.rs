//! A guest's clients, with this test as the VMM and the guest's agent.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use accel_server::{Backend, Guest, Server, Slot, Slots};
use accel_transport::{Settings, Transport};
use accel_window::{VERSIONS, Window};
use agent_api::accelerator::{Begin, FromGuest, FromHost, VERSION, receive, send};
use wire::ring::Region;
use wire::{FrameReader, FrameWriter};

const MOST: Duration = Duration::from_secs(30);
const SIZE: u64 = 8 << 20;
const HELLO: &str = r#"{"versions":[1,1],"transports":["same-cpu","bell"],"pairs":2}"#;

/// A guest whose server is in this process: connections as they come, without the VMM's greeting.
struct Node {
    window: File,
    streams: mpsc::Receiver<(Begin, FrameReader<UnixStream>)>,
    _directory: tempfile::TempDir,
}

fn node() -> Node {
    let directory = tempfile::tempdir().unwrap();
    let vsock = directory.path().join("vsock");
    let listener = UnixListener::bind(&vsock).unwrap();
    let (tell, streams) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_read_timeout(Some(MOST)).unwrap();
            let mut line = String::new();
            BufReader::with_capacity(1, &stream).read_line(&mut line).unwrap();
            assert_eq!(line, "CONNECT 1026\n");
            stream.write_all(b"OK 1073741824\n").unwrap();
            let mut reader = FrameReader::new(stream);
            let begin = receive(&mut reader).unwrap().unwrap();
            if tell.send((begin, reader)).is_err() {
                return;
            }
        }
    });
    let window = base::memfd::sized("window", SIZE).unwrap();
    let settings = Settings {
        transports: Transport::ALL.to_vec(),
        pairs: 4,
        records: 16,
        arena: 64 << 20,
        patience: MOST,
        busy_poll: None,
    };
    let server = Arc::new(Server::new(Backend::null(), settings));
    let slot = |name: &str, offset, length| Slot {
        name: name.to_owned(),
        offset,
        length,
    };
    let slots = vec![slot("slot-0", 4 << 20, 4 << 20), slot("slot-1", 1 << 20, 1 << 20)];
    let slots = Slots::new(window.try_clone().unwrap(), slots).unwrap();
    std::thread::spawn(move || Arc::new(Guest::new(server, slots, vsock)).serve());
    Node {
        window,
        streams,
        _directory: directory,
    }
}

impl Node {
    fn next(&self) -> (Begin, FrameReader<UnixStream>) {
        self.streams.recv_timeout(MOST).unwrap()
    }

    fn control(&self) -> (FrameReader<UnixStream>, FrameWriter<UnixStream>) {
        let (begin, reader) = self.next();
        assert_eq!(
            begin,
            Begin::Control {
                version: VERSION,
                resumed: Vec::new()
            }
        );
        let writer = FrameWriter::new(reader.get_ref().try_clone().unwrap());
        (reader, writer)
    }

    fn slot(&self, offset: u64, length: u64) -> Region {
        let region = accel_window::map(&self.window).unwrap();
        region.part(offset, length).unwrap()
    }
}

fn ask(writer: &FrameWriter<UnixStream>, client: u64, hello: &str, free: &[&str]) {
    let free = free.iter().map(|name| (*name).to_owned()).collect();
    let hello = hello.to_owned();
    send(writer, &FromGuest::Connect { client, hello, free }).unwrap();
}

#[test]
fn a_client_has_a_slot_and_streams_and_what_it_leaves_is_nobodys() {
    let node = node();
    let (mut reader, writer) = node.control();
    ask(&writer, 5, HELLO, &["slot-1", "slot-0"]);
    let mut pairs = Vec::new();
    let streams: Vec<_> = (0..2)
        .map(|_| {
            let (begin, stream) = node.next();
            match begin {
                Begin::Pair { client: 5, pair } => pairs.push(pair),
                other => panic!("{other:?}"),
            }
            stream
        })
        .collect();
    assert_eq!(pairs, [0, 1]);
    let accepted = receive(&mut reader).unwrap().unwrap();
    let FromHost::Accept {
        client: 5,
        file: Some(file),
        pairs: 2,
        welcome,
    } = accepted
    else {
        panic!("{accepted:?}");
    };
    // Nobody's thread can go to a virtual CPU.
    assert!(
        welcome.contains("\"bell\"") && welcome.contains("\"sockets\""),
        "{welcome}"
    );
    assert_eq!(file, "slot-0");
    let (window, _) = Window::open(node.slot(4 << 20, 4 << 20), VERSIONS).unwrap();
    assert!(!window.life().unwrap().is_over());
    assert!(window.geometry().length() <= 4 << 20 && window.geometry().arena() > 3 << 20);
    window.slice(0, 4).unwrap().write(0, b"mine").unwrap();

    // What is said about others is not about this one; its slot is nobody else's.
    send(&writer, &FromGuest::Gone { client: 77 }).unwrap();
    ask(
        &writer,
        6,
        r#"{"versions":[7,8],"transports":["bell"],"pairs":1}"#,
        &["slot-0"],
    );
    let refused: FromHost = receive(&mut reader).unwrap().unwrap();
    assert!(
        matches!(&refused, FromHost::Refuse { client: 6, welcome } if welcome.contains("versions 7 to 8")),
        "{refused:?}"
    );
    assert_eq!(receive(&mut reader).unwrap(), Some(FromHost::Over { client: 6 }));

    send(&writer, &FromGuest::Gone { client: 5 }).unwrap();
    assert_eq!(receive(&mut reader).unwrap(), Some(FromHost::Over { client: 5 }));
    assert!(window.life().unwrap().is_over());
    let mut left = [1; 4];
    window.slice(0, 4).unwrap().read(0, &mut left).unwrap();
    assert_eq!(left, [0; 4]);
    drop(streams);
}

#[test]
fn an_agent_that_hangs_up_is_dialled_again_and_its_clients_are_over() {
    let node = node();
    let (mut reader, writer) = node.control();
    ask(&writer, 1, HELLO, &["slot-1"]);
    let streams = [node.next(), node.next()];
    assert!(matches!(receive(&mut reader).unwrap(), Some(FromHost::Accept { .. })));
    let (window, _) = Window::open(node.slot(1 << 20, 1 << 20), VERSIONS).unwrap();
    drop((reader, writer));
    let (mut reader, writer) = node.control();
    // The slot of the client before may not be empty yet: it is waited for.
    ask(&writer, 1, HELLO, &["slot-1"]);
    let more = [node.next(), node.next()];
    let accepted = receive(&mut reader).unwrap();
    assert!(
        matches!(&accepted, Some(FromHost::Accept { file: Some(file), .. }) if file == "slot-1"),
        "{accepted:?}"
    );
    assert!(!window.life().unwrap().is_over(), "the next server's");
    // What cannot be read ends this connection, and another is made.
    writer.send(9, 0, b"?").unwrap();
    let (mut reader, writer) = node.control();
    ask(&writer, 2, "no json", &["slot-1"]);
    assert!(matches!(
        receive(&mut reader).unwrap(),
        Some(FromHost::Refuse { client: 2, .. })
    ));
    drop((streams, more));
}

#[test]
fn who_finds_no_slot_is_told_so() {
    let node = node();
    let (mut reader, writer) = node.control();
    ask(&writer, 1, HELLO, &[]);
    let refused: FromHost = receive(&mut reader).unwrap().unwrap();
    assert!(
        matches!(&refused, FromHost::Refuse { client: 1, welcome } if welcome.contains("all 2 parts") && welcome.contains("end a program")),
        "{refused:?}"
    );
}
