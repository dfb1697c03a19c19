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
    Arc::new(Broker::new(window).within(MOST, MOST))
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
        Self::resumed(broker, &[])
    }

    /// One that goes on with clients.
    fn resumed(broker: &Arc<Broker>, resumed: &[u64]) -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(MOST)).unwrap();
        broker.take_host(far);
        let host = Self {
            broker: Arc::clone(broker),
            reader: FrameReader::new(near.try_clone().unwrap()),
            writer: FrameWriter::new(near),
        };
        let begin = Begin::Control {
            version: VERSION,
            resumed: resumed.to_vec(),
        };
        send(&host.writer, &begin).unwrap();
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

    /// Serves the client that asks.
    fn serve(&mut self, program: &PacketSocket, file: Option<&str>) -> u64 {
        let (number, _) = self.asked();
        self.accept(number, file, 0);
        assert_eq!(answer(program).unwrap().0, "welcome");
        number
    }

    /// It has dialled all streams of a client that goes on.
    fn go_on(&self, client: u64, pairs: u32) {
        self.say(&FromHost::Accept {
            client,
            file: None,
            pairs,
            welcome: String::new(),
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
    let served = |host: &mut Host| {
        let program = client(&broker);
        host.serve(&program, Some("slot-0"));
        program
    };
    let mut host = Host::new(&broker);
    let program = client(&broker);
    let number = host.serve(&program, None);
    host.say(&FromHost::Over { client: number });
    assert!(matches!(answer(&program), Err(PacketError::Closed)));
    assert_eq!(host.next(), Some(FromGuest::Gone { client: number }));

    // Whether the one before is still connected or not: the next one goes on with nobody.
    let program = served(&mut host);
    drop(host);
    let mut host = Host::new(&broker);
    assert!(matches!(answer(&program), Err(PacketError::Closed)));

    let program = served(&mut host);
    let mut next = Host::new(&broker);
    assert!(matches!(answer(&program), Err(PacketError::Closed)));
    assert_eq!(host.next(), None, "the server before is hung up");
    drop(served(&mut next));
}

#[test]
fn without_a_server_a_client_is_told_so_and_one_that_waits_is_served_by_the_next() {
    let window = window();
    let impatient = Arc::new(Broker::new(window.path()).within(Duration::from_millis(50), MOST));
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

/// Nothing comes for a program, and it is not hung up.
fn is_quiet(program: &PacketSocket) -> bool {
    let soon = Instant::now() + Duration::from_millis(30);
    matches!(program.wait_to_receive(soon), Err(PacketError::Late))
}

#[test]
fn clients_get_other_streams_from_each_server_that_goes_on_with_them() {
    let window = window();
    let broker = broker(window.path());
    let mut host = Host::new(&broker);
    let kept = client(&broker);
    let (number, _) = host.asked();
    let streams = [host.pair(number, 0), host.pair(number, 1)];
    host.accept(number, Some("slot-0"), 2);
    assert_eq!(answer(&kept).unwrap().1.len(), 3);
    let other = client(&broker);
    host.serve(&other, None);

    drop((host, streams));
    assert!(is_quiet(&kept) && is_quiet(&other), "they stay");
    for round in 0..3 {
        let mut host = Host::resumed(&broker, &[number, 99]);
        assert_eq!(host.next(), Some(FromGuest::Gone { client: 99 }));
        assert!(
            matches!(answer(&other), Err(PacketError::Closed)),
            "nobody goes on with it"
        );
        // It is cut again before it has all of them, with and without the server's word.
        let first = host.pair(number, 0);
        (0..round).for_each(|_| host.go_on(number, 2));
        assert!(is_quiet(&kept));
        drop((host, first));

        let host = Host::resumed(&broker, &[number]);
        let mut second = host.pair(number, 1);
        host.go_on(number, 2);
        assert!(is_quiet(&kept), "one of two is not enough");
        let mut first = host.pair(number, 0);
        let (said, fds) = answer(&kept).unwrap();
        assert_eq!((said.as_str(), fds.len()), ("+", 2));
        for (stream, fd, said) in [(&mut first, &fds[0], b"a"), (&mut second, &fds[1], b"b")] {
            stream.write_all(said).unwrap();
            let mut heard = [0];
            UnixStream::from(fd.try_clone().unwrap())
                .read_exact(&mut heard)
                .unwrap();
            assert_eq!(&heard, said);
        }
    }
    let mut host = Host::resumed(&broker, &[number]);
    drop(kept);
    assert_eq!(host.next(), Some(FromGuest::Gone { client: number }));
}

#[test]
fn a_client_that_is_not_resumed_in_time_is_hung_up() {
    const RESUME: Duration = Duration::from_millis(150);
    let window = window();
    let broker = Arc::new(Broker::new(window.path()).within(MOST, RESUME));
    let mut host = Host::new(&broker);
    let program = client(&broker);
    let number = host.serve(&program, None);
    let begun = Instant::now();
    drop(host);
    assert!(is_quiet(&program));
    let host = Host::resumed(&broker, &[number]);
    std::thread::sleep(RESUME * 2);
    assert!(is_quiet(&program), "that time is over");
    assert!(begun.elapsed() > RESUME);
    let begun = Instant::now();
    drop(host);
    assert!(matches!(answer(&program), Err(PacketError::Closed)));
    assert!(begun.elapsed() >= RESUME && begun.elapsed() < MOST);
    let mut host = Host::resumed(&broker, &[number]);
    assert_eq!(host.next(), Some(FromGuest::Gone { client: number }));
}

#[test]
fn a_client_whose_server_is_lost_before_its_answer_asks_the_next_one() {
    let window = window();
    let broker = broker(window.path());
    let mut host = Host::new(&broker);
    let program = client(&broker);
    let (number, free) = host.asked();
    let _early = host.pair(number, 0);
    drop(host);
    assert!(is_quiet(&program));
    // That one was about to serve it.
    let mut host = Host::resumed(&broker, &[number]);
    let mut said = [host.next().unwrap(), host.next().unwrap()];
    said.sort_by_key(|said| matches!(said, FromGuest::Connect { .. }));
    let [
        FromGuest::Gone { client },
        FromGuest::Connect {
            client: again,
            free: now,
            ..
        },
    ] = said
    else {
        panic!("{said:?}");
    };
    assert!(client == number && again != number && free == now);
    host.accept(again, Some("slot-1"), 1);
    assert!(
        is_quiet(&program),
        "what was dialled for the other number is not for this one"
    );
    let _stream = host.pair(again, 0);
    let (welcome, fds) = answer(&program).unwrap();
    assert_eq!((welcome.as_str(), fds.len()), ("welcome", 2));
    drop(program);
    assert_eq!(host.next(), Some(FromGuest::Gone { client: again }));
}

#[test]
fn a_client_that_waits_for_its_answer_is_served_by_the_last_of_many_servers() {
    let window = window();
    let broker = broker(window.path());
    let program = client(&broker);
    let mut host = Host::new(&broker);
    let mut numbers = vec![host.asked().0];
    for _ in 0..100 {
        // The one before is still connected, and both of its ends are seen at once.
        host = Host::new(&broker);
        numbers.push(host.asked().0);
    }
    assert!(numbers.is_sorted_by(|a, b| a < b));
    host.accept(*numbers.last().unwrap(), None, 0);
    assert_eq!(answer(&program).unwrap().0, "welcome");
}

#[test]
fn what_a_server_said_before_the_next_one_came_ends_nobody() {
    let window = window();
    let broker = broker(window.path());
    let mut host = Host::new(&broker);
    let program = client(&broker);
    let number = host.serve(&program, None);
    let before = broker.generation();
    let next = Host::resumed(&broker, &[number]);
    let end = Instant::now() + MOST;
    while broker.generation() == before {
        assert!(Instant::now() < end, "the next one does not begin");
        std::thread::yield_now();
    }
    // What was under way, and is read behind that.
    let (said, heard) = UnixStream::pair().unwrap();
    send(&FrameWriter::new(said), &FromHost::Over { client: number }).unwrap();
    broker.hear(heard, before).unwrap();
    next.go_on(number, 0);
    assert_eq!(answer(&program).unwrap().0, "+");
}

#[test]
fn all_names_of_cudas_libraries_are_one_file_and_can_be_there_already() {
    let directory = tempfile::tempdir().unwrap();
    let cuda = agent_api::CudaLibraries {
        file: "libbasalt_cuda.so".to_owned(),
        names: vec!["libcudart.so.13".to_owned(), "libcublas.so.13".to_owned()],
    };
    let links = directory.path().join("deep/cuda");
    for _ in 0..2 {
        super::link(&cuda, Path::new("/window"), &links).unwrap();
        for name in &cuda.names {
            let target = std::fs::read_link(links.join(name)).unwrap();
            assert_eq!(target, Path::new("/window/libbasalt_cuda.so"));
        }
    }
    let occupied = directory.path().join("file");
    File::create(&occupied).unwrap();
    let error = super::link(&cuda, Path::new("/window"), &occupied)
        .unwrap_err()
        .to_string();
    assert!(error.contains("file"), "{error}");
}
