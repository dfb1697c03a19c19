//! Clients and servers of two machines, which are this one: by TCP, as it is and with TLS, with peers that are slow, wrong or strangers.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accel_transport::tls::{self, ClientConfig, Identity, ServerConfig};
use accel_transport::{
    Address, ClientConnection, Error, Meeting, Offer, Protocol, ServerConnection, Settings, Transport, connect_remote,
};
use wire::ring::Record;

const MOST: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_millis(400);
const ARENA: u64 = 1 << 20;

fn settings(patience: Duration) -> Settings {
    Settings {
        transports: Transport::ALL.to_vec(),
        pairs: 4,
        records: 8,
        arena: ARENA,
        patience,
        busy_poll: None,
    }
}

fn offer(transport: Transport, pairs: u32) -> Offer {
    Offer {
        transports: vec![transport],
        pairs,
        patience: MOST,
    }
}

/// A server, which puts back what records say: a word of the arena is made its opposite, and the record is answered.
struct Server {
    address: SocketAddr,
    /// What became of connections.
    news: std::sync::mpsc::Receiver<String>,
}

impl Server {
    fn start(tls: Option<Arc<ServerConfig>>) -> Self {
        Self::of(Meeting::new(&settings(MOST), tls))
    }

    /// One that gives nobody much time.
    fn impatient(tls: Option<Arc<ServerConfig>>) -> Self {
        Self::of(Meeting::new(&settings(PATIENCE), tls))
    }

    fn of(meeting: Meeting) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let meeting = Arc::new(meeting);
        let (tell, news) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let (meeting, tell) = (Arc::clone(&meeting), tell.clone());
                std::thread::spawn(move || {
                    let said = match meeting.greet(socket.unwrap()) {
                        Ok(Some(connection)) => serve(connection),
                        Ok(None) => return,
                        Err(error) => error.to_string(),
                    };
                    // Not every test listens.
                    _ = tell.send(said);
                });
            }
        });
        Self { address, news }
    }

    fn at(&self, scheme: &str) -> Address {
        format!("{scheme}://127.0.0.1:{}", self.address.port()).parse().unwrap()
    }

    fn said(&self) -> String {
        self.news.recv_timeout(MOST).unwrap()
    }
}

fn serve(mut connection: ServerConnection) -> String {
    let arena = connection.window.clone().unwrap();
    let ends = std::mem::take(&mut connection.ends);
    let threads: Vec<_> = ends
        .into_iter()
        .map(|mut end| {
            let arena = arena.clone();
            std::thread::spawn(move || {
                loop {
                    let request = match end.receive(None) {
                        Ok(request) => request,
                        Err(Error::PeerGone) => return "gone".to_owned(),
                        Err(error) => return error.to_string(),
                    };
                    let [answers, _, offset, length, ..] = *request.words();
                    let part = arena.slice(offset, length).unwrap();
                    let mut bytes = vec![0; usize::try_from(length).unwrap()];
                    part.read(0, &mut bytes).unwrap();
                    bytes.iter_mut().for_each(|byte| *byte = !*byte);
                    part.write(0, &bytes).unwrap();
                    end.finish(&request, (answers != 0).then_some(&request), MOST).unwrap();
                }
            })
        })
        .collect();
    let said: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    said.into_iter()
        .find(|said| said != "gone")
        .unwrap_or("gone".to_owned())
}

/// Each end sends bytes, has a record about them done, and has them back.
fn exchanges(connection: ClientConnection, length: u64) {
    let (arena, _) = connection.window.clone().unwrap();
    let count = connection.ends.len() as u64;
    assert_eq!(arena.geometry().arena(), ARENA);
    std::thread::scope(|scope| {
        for (index, mut end) in connection.ends.into_iter().enumerate() {
            let arena = arena.clone();
            scope.spawn(move || {
                let offset = index as u64 * (ARENA / count);
                let bytes: Vec<u8> = (0..length).map(|at| u8::try_from(at % 253).unwrap()).collect();
                let part = arena.slice(offset, length).unwrap();
                for round in 0..8_u64 {
                    part.write(0, &bytes).unwrap();
                    end.send_data(offset, length, MOST).unwrap();
                    let record = |answers| Record::from_words([answers, 0, offset, length, 0, 0, 0, 0]);
                    // Twice the opposite without answers is what it was.
                    end.send(&record(0), MOST).unwrap();
                    end.send(&record(0), MOST).unwrap();
                    let answer = end.call(&record(1), MOST).unwrap();
                    assert_eq!(answer.words()[2], offset, "round {round}");
                    end.want_data(offset, length);
                    end.take_data(offset, length, MOST).unwrap();
                    let mut back = vec![0; bytes.len()];
                    part.read(0, &mut back).unwrap();
                    assert!(
                        back.iter().zip(&bytes).all(|(back, byte)| *back == !*byte),
                        "round {round}"
                    );
                }
            });
        }
    });
}

/// A way to a server on which everything takes this long, in each direction.
fn far_away(server: SocketAddr, delay: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let pass = move |mut from: TcpStream, mut to: TcpStream| {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(got @ 1..) = from.read(&mut bytes) {
            std::thread::sleep(delay);
            if to.write_all(&bytes[..got]).is_err() {
                break;
            }
        }
        _ = to.shutdown(std::net::Shutdown::Write);
    };
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let (near, far) = (near.unwrap(), TcpStream::connect(server).unwrap());
            let (back, forth) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || pass(near, far));
            std::thread::spawn(move || pass(forth, back));
        }
    });
    address
}

/// Keys and certificates, made by `openssl`.
struct Authority {
    directory: tempfile::TempDir,
}

impl Authority {
    fn new(name: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Self { directory };
        authority.openssl(&format!(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -keyout ca.key -out ca.pem"
        ));
        authority
    }

    fn openssl(&self, words: &str) {
        let mut command = Command::new("openssl");
        let output = command
            .args(words.split(' '))
            .current_dir(self.directory.path())
            .output();
        let output = output.expect("openssl cannot be run: install Debian's package openssl");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A certificate of its.
    fn identity(&self, name: &str) -> Identity {
        self.openssl(&format!(
            "req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
        ));
        std::fs::write(self.path("names"), "subjectAltName=IP:127.0.0.1\n").unwrap();
        self.openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out {name}.pem"
        ));
        Identity {
            certificate: self.path(&format!("{name}.pem")),
            key: self.path(&format!("{name}.key")),
        }
    }

    fn ca(&self) -> PathBuf {
        self.path("ca.pem")
    }
}

fn of_client(ca: &Path, identity: Option<&Identity>) -> Arc<ClientConfig> {
    tls::client(ca, identity).unwrap()
}

#[test]
fn records_and_bytes_travel_by_tcp() {
    let server = Server::start(None);
    for (transport, pairs) in [(Transport::Stream, 4), (Transport::Synchronous, 1)] {
        let connection = connect_remote(&server.at("tcp"), None, &offer(transport, pairs)).unwrap();
        assert_eq!(
            (connection.transport, connection.ends.len()),
            (transport, pairs as usize)
        );
        exchanges(connection, 200_000 / u64::from(pairs));
        assert_eq!(server.said(), "gone");
    }
    // What needs common memory is not there.
    let error = connect_remote(&server.at("tcp"), None, &offer(Transport::Spin, 1)).unwrap_err();
    assert!(
        matches!(&error, Error::Protocol(Protocol::Refused(reason)) if reason.contains("Spin")),
        "{error}"
    );
}

#[test]
fn records_and_bytes_travel_by_tls_between_those_who_know_each_other() {
    let authority = Authority::new("one");
    let config = tls::server(&authority.identity("server"), Some(&authority.ca())).unwrap();
    let server = Server::start(Some(config));
    let own = authority.identity("client");
    let config = of_client(&authority.ca(), Some(&own));
    let connection = connect_remote(&server.at("tls"), Some(&config), &offer(Transport::Stream, 3)).unwrap();
    exchanges(connection, 150_000);
    assert_eq!(server.said(), "gone");
}

#[test]
fn pairs_are_met_side_by_side_however_far_away_the_server_is() {
    let authority = Authority::new("one");
    let config = tls::server(&authority.identity("server"), None).unwrap();
    let settings = Settings {
        pairs: 16,
        ..settings(MOST)
    };
    let server = Server::of(Meeting::new(&settings, Some(config)));
    let address = far_away(server.address, Duration::from_millis(200));
    let address: Address = format!("tls://127.0.0.1:{}", address.port()).parse().unwrap();
    let offer = Offer {
        // Sixteen handshakes alone, one behind the other, would take more than six seconds.
        patience: Duration::from_secs(4),
        ..offer(Transport::Stream, 16)
    };
    let connection = connect_remote(&address, Some(&of_client(&authority.ca(), None)), &offer).unwrap();
    assert_eq!(connection.ends.len(), 16);
}

#[test]
fn strangers_get_nothing_and_trust_nobody() {
    let (authority, other) = (Authority::new("one"), Authority::new("other"));
    let config = tls::server(&authority.identity("server"), Some(&authority.ca())).unwrap();
    let server = Server::start(Some(config));
    let one = offer(Transport::Stream, 1);
    // A client that has no certificate, and one that somebody else has signed.
    let stranger = other.identity("client");
    for identity in [None, Some(&stranger)] {
        let config = of_client(&authority.ca(), identity);
        let refused = connect_remote(&server.at("tls"), Some(&config), &one);
        assert!(refused.is_err(), "{refused:?}");
        let said = server.said();
        assert!(said.contains("TLS") && said.to_lowercase().contains("cert"), "{said}");
    }
    // A server that somebody else vouches for, and one that has another name.
    let config = of_client(&other.ca(), None);
    let error = connect_remote(&server.at("tls"), Some(&config), &one)
        .unwrap_err()
        .to_string();
    assert!(error.contains("TLS") && error.contains("UnknownIssuer"), "{error}");
    let config = of_client(&authority.ca(), None);
    let named: Address = format!("tls://localhost:{}", server.address.port()).parse().unwrap();
    let error = connect_remote(&named, Some(&config), &one).unwrap_err().to_string();
    assert!(error.contains("certificate not valid for name"), "{error}");
    // Without certificates to trust there is no TLS, and without TLS no server.
    let error = connect_remote(&server.at("tls"), None, &one).unwrap_err().to_string();
    assert!(error.contains("certificates to trust"), "{error}");
    let refused = connect_remote(&server.at("tcp"), None, &one);
    assert!(refused.is_err(), "{refused:?}");
    // What is no name of a server is what this side was told.
    let unnamed: Address = format!("tls://127.1:{}", server.address.port()).parse().unwrap();
    let error = connect_remote(&unnamed, Some(&config), &one).unwrap_err().to_string();
    assert!(error.contains("127.1: ") && !error.contains("protocol"), "{error}");
}

/// The bytes of a message.
fn message(json: &str) -> Vec<u8> {
    let mut bytes = u32::try_from(json.len()).unwrap().to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

const HELLO: &str = r#"{"client":{"versions":[1,1],"transports":["stream"],"pairs":2}}"#;

#[test]
fn who_is_slow_or_unsound_is_hung_up() {
    let server = Server::impatient(None);
    let connect = || TcpStream::connect(server.address).unwrap();
    for (bytes, reason) in [
        (vec![0xff; 64], "is the most"),
        (message("{"), "greeting packet is unsound"),
        (
            message(r#"{"client":{"versions":[7,9],"transports":["stream"],"pairs":2}}"#),
            "versions 7 to 9",
        ),
        (message(r#"{"pair":{"name":"00","number":0}}"#), "nobody waits"),
        (message(HELLO)[..20].to_vec(), "the greeting did not come within 400 ms"),
        (Vec::new(), "the greeting did not come within 400 ms"),
        (message(HELLO), "a client's pairs did not come within 400 ms"),
    ] {
        let begun = Instant::now();
        let mut socket = connect();
        socket.write_all(&bytes).unwrap();
        let said = server.said();
        assert!(said.contains(reason), "{said}");
        assert!(begun.elapsed() < MOST);
        // Whatever it still says, the connection ends.
        socket.set_read_timeout(Some(MOST)).unwrap();
        let mut rest = Vec::new();
        let ended = socket.read_to_end(&mut rest);
        assert!(ended.is_ok() || ended.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset));
    }
    // One that goes in the middle.
    let mut socket = connect();
    socket.write_all(&message(HELLO)[..7]).unwrap();
    drop(socket);
    assert!(server.said().contains("has ended"));
}

/// Between two bytes.
const PAUSE: Duration = Duration::from_millis(20);

/// Writes byte after byte, until the other side has hung up or all have gone.
fn trickle(socket: &mut TcpStream, bytes: &[u8]) {
    for byte in bytes {
        std::thread::sleep(PAUSE);
        if socket.write_all(&[*byte]).is_err() {
            return;
        }
    }
}

#[test]
fn by_tls_who_sends_a_byte_at_a_time_has_no_more_time_than_others() {
    let authority = Authority::new("one");
    let server = Server::impatient(Some(tls::server(&authority.identity("server"), None).unwrap()));
    let config = of_client(&authority.ca(), None);
    let begin = || {
        let name = "127.0.0.1".try_into().unwrap();
        let state = rustls::ClientConnection::new(Arc::clone(&config), name).unwrap();
        (state, TcpStream::connect(server.address).unwrap())
    };
    // In the handshake: some 200 bytes would take ten times as long as there is.
    let (mut state, mut socket) = begin();
    let mut bytes = Vec::new();
    state.write_tls(&mut bytes).unwrap();
    assert!(bytes.len() > 150);
    let begun = Instant::now();
    std::thread::spawn(move || trickle(&mut socket, &bytes));
    assert!(server.said().contains("the TLS handshake did not come within 400 ms"));
    assert!(begun.elapsed() < 4 * PATIENCE, "{:?}", begun.elapsed());
    // Behind it, in what is encrypted at a time. This server has time for a handshake.
    let config = tls::server(&authority.identity("server"), None).unwrap();
    let server = Server::of(Meeting::new(&settings(5 * PATIENCE), Some(config)));
    let (mut state, _) = begin();
    let mut socket = TcpStream::connect(server.address).unwrap();
    while state.is_handshaking() {
        state.complete_io(&mut socket).unwrap();
    }
    state.writer().write_all(&message(&format!("{HELLO:200}"))).unwrap();
    let mut bytes = Vec::new();
    while state.wants_write() {
        state.write_tls(&mut bytes).unwrap();
    }
    let (begun, all) = (Instant::now(), bytes.len());
    std::thread::spawn(move || trickle(&mut socket, &bytes));
    let said = server.said();
    assert!(said.contains("the greeting did not come within 2000 ms"), "{said}");
    let of_all = PAUSE * u32::try_from(all).unwrap();
    assert!(begun.elapsed() < of_all, "{:?} of {of_all:?}", begun.elapsed());
}

#[test]
fn a_pair_counts_once_and_its_bytes_stay_in_the_arena() {
    let server = Server::start(None);
    let greeted = || {
        let mut control = TcpStream::connect(server.address).unwrap();
        control.write_all(&message(HELLO)).unwrap();
        let mut length = [0; 4];
        control.read_exact(&mut length).unwrap();
        let mut json = vec![0; u32::from_le_bytes(length) as usize];
        control.read_exact(&mut json).unwrap();
        let json = String::from_utf8(json).unwrap();
        let name = json.split_once(r#""name":""#).unwrap().1;
        assert_eq!(name.find('"'), Some(32), "{json}");
        (control, name[..32].to_owned())
    };
    let pair = |name: &str, number: u32| {
        let mut socket = TcpStream::connect(server.address).unwrap();
        socket
            .write_all(&message(&format!(
                r#"{{"pair":{{"name":"{name}","number":{number}}}}}"#
            )))
            .unwrap();
        socket
    };
    let (_control, name) = greeted();
    let _pairs = [pair(&name, 1), pair(&name, 1)];
    assert!(server.said().contains("1 of 2"));
    let (_control, name) = greeted();
    let mut pairs = [pair(&name, 0), pair(&name, 1)];
    let frame = Record::from_words([1, 1 << 63, ARENA - 8, 9, 0, 0, 0, 0]);
    pairs[0].write_all(&frame.to_bytes()).unwrap();
    pairs[1].shutdown(std::net::Shutdown::Both).unwrap();
    let said = server.said();
    assert!(said.contains("broke the protocol"), "{said}");
}

#[test]
fn addresses_are_read_as_they_are_written() {
    for text in ["tcp://127.0.0.1:7070", "tls://gpu.example:1", "tls://[::1]:7070"] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    for text in [
        "",
        "127.0.0.1:7070",
        "udp://a:1",
        "tcp://a",
        "tcp://:1",
        "tls://a:0",
        "tls://a:65536",
    ] {
        let error = text.parse::<Address>().unwrap_err().to_string();
        assert!(error.contains("tls://HOST:PORT"), "{error}");
    }
}
