//! Clients, the broker and a server that is the test, by unix sockets.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_api::accelerator::{Begin, FromGuest, FromHost, VERSION, receive, send};
use tempfile::TempDir;
use wire::packet::{PacketError, PacketSocket};
use wire::{FrameReader, FrameWriter};

use super::broker::Broker;

/// More than anything takes here.
const MOST: Duration = Duration::from_secs(30);

fn window() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, length) in [("slot-0", 8192), ("slot-1", 4096)] {
        File::create(directory.path().join(name))
            .unwrap()
            .set_len(length)
            .unwrap();
    }
    directory
}

fn broker(window: &Path) -> Arc<Broker> {
    Arc::new(Broker::new(window).within(MOST))
}

/// A program that has said hello.
fn client(broker: &Arc<Broker>) -> PacketSocket {
    let (near, far) = PacketSocket::pair().unwrap();
    broker.take_client(far);
    near.send(b"hello", &[]).unwrap();
    near
}

fn answer(client: &PacketSocket) -> Result<(String, Vec<OwnedFd>), PacketError> {
    client.wait_to_receive(Instant::now() + MOST)?;
    let (bytes, fds) = client.receive()?;
    Ok((String::from_utf8(bytes).unwrap(), fds))
}

struct Host {
    broker: Arc<Broker>,
    reader: FrameReader<UnixStream>,
    writer: FrameWriter<UnixStream>,
}

impl Host {
    fn new(broker: &Arc<Broker>) -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(MOST)).unwrap();
        broker.take_host(far);
        let host = Self {
            broker: Arc::clone(broker),
            reader: FrameReader::new(near.try_clone().unwrap()),
            writer: FrameWriter::new(near),
        };
        send(
            &host.writer,
            &Begin::Control {
                version: VERSION,
                resumed: Vec::new(),
            },
        )
        .unwrap();
        host
    }

    fn next(&mut self) -> Option<FromGuest> {
        receive(&mut self.reader).unwrap()
    }

    /// The client that asks, and the files that are free.
    fn asked(&mut self) -> (u64, Vec<String>) {
        match self.next() {
            Some(FromGuest::Connect { client, hello, free }) if hello == "hello" => (client, free),
            other => panic!("{other:?}"),
        }
    }

    fn pair(&self, client: u64, pair: u32) -> UnixStream {
        let (near, far) = UnixStream::pair().unwrap();
        self.broker.take_host(far);
        send(
            &FrameWriter::new(near.try_clone().unwrap()),
            &Begin::Pair { client, pair },
        )
        .unwrap();
        near
    }

    fn say(&self, said: &FromHost) {
        send(&self.writer, said).unwrap();
    }

    fn accept(&self, client: u64, file: Option<&str>, pairs: u32) {
        self.say(&FromHost::Accept {
            client,
            file: file.map(str::to_owned),
            pairs,
            welcome: "welcome".to_owned(),
        });
    }
}

#[test]
fn a_client_gets_its_file_and_its_streams_and_the_host_hears_of_its_end() {
    let window = window();
    let broker = broker(window.path());
    let mut host = Host::new(&broker);
    let program = client(&broker);
    let (number, free) = host.asked();
    assert_eq!(free, ["slot-0", "slot-1"]);
    // Streams come in whatever order, before the answer and after it.
    let mut second = host.pair(number, 1);
    host.accept(number, Some("slot-1"), 2);
    let mut first = host.pair(number, 0);
    let (welcome, mut fds) = answer(&program).unwrap();
    assert_eq!((welcome.as_str(), fds.len()), ("welcome", 3));
    let file = File::from(fds.remove(0));
    assert_eq!(file.metadata().unwrap().len(), 4096);
    for (stream, fd, said) in [(&mut first, fds.remove(0), b"a"), (&mut second, fds.remove(0), b"b")] {
        let mut own = UnixStream::from(fd);
        stream.write_all(said).unwrap();
        let mut heard = [0];
        own.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, said);
    }
    // The next one gets what the first has not, as long as that has its file.
    let next = client(&broker);
    let (other, free) = host.asked();
    assert_eq!(free, ["slot-0"]);
    host.say(&FromHost::Refuse {
        client: other,
        welcome: "no".to_owned(),
    });
    assert_eq!(answer(&next).unwrap().0, "no");
    assert_eq!(host.next(), Some(FromGuest::Gone { client: other }));
    drop(program);
    assert_eq!(host.next(), Some(FromGuest::Gone { client: number }));
    drop(file);
    let last = client(&broker);
    assert_eq!(host.asked().1, ["slot-0", "slot-1"]);
    drop(last);
}

#[test]
fn clients_are_hung_up_when_the_server_says_so_or_is_gone_or_replaced() {
    let window = window();
    let broker = broker(window.path());
    let served = |host: &mut Host, file: &str| {
        let program = client(&broker);
        let (number, _) = host.asked();
        host.accept(number, Some(file), 0);
        (answer(&program).unwrap(), program, number).1
    };
    let mut host = Host::new(&broker);
    let program = client(&broker);
    let (number, _) = host.asked();
    host.accept(number, None, 0);
    answer(&program).unwrap();
    host.say(&FromHost::Over { client: number });
    assert!(matches!(answer(&program), Err(PacketError::Closed)));
    assert_eq!(host.next(), Some(FromGuest::Gone { client: number }));

    let program = served(&mut host, "slot-0");
    drop(host);
    assert!(matches!(answer(&program), Err(PacketError::Closed)));

    let mut host = Host::new(&broker);
    let program = served(&mut host, "slot-0");
    let mut next = Host::new(&broker);
    assert!(matches!(answer(&program), Err(PacketError::Closed)));
    assert_eq!(host.next(), None, "the server before is hung up");
    drop(served(&mut next, "slot-0"));
}

#[test]
fn without_a_server_a_client_is_told_so_and_one_that_waits_is_served_by_the_next() {
    let window = window();
    let impatient = Arc::new(Broker::new(window.path()).within(Duration::from_millis(50)));
    let (told, fds) = answer(&client(&impatient)).unwrap();
    assert!(
        told.contains("refused") && told.contains("does not answer") && fds.is_empty(),
        "{told}"
    );

    let broker = broker(window.path());
    let program = client(&broker);
    std::thread::sleep(Duration::from_millis(20));
    let mut host = Host::new(&broker);
    let (number, _) = host.asked();
    host.accept(number, None, 0);
    assert_eq!(answer(&program).unwrap().0, "welcome");
    // A server that speaks what this agent does not.
    let (mut near, far) = UnixStream::pair().unwrap();
    broker.take_host(far);
    send(
        &FrameWriter::new(near.try_clone().unwrap()),
        &Begin::Control {
            version: VERSION + 1,
            resumed: Vec::new(),
        },
    )
    .unwrap();
    assert_eq!(near.read(&mut [0]).unwrap(), 0);
}
