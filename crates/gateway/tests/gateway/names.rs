//! The gateway as programs reach it by names: TLS over real connections, with its own authority and with files, and its name server.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine;
use gateway::{CERTIFICATE, CertificateSource, Dns, Domain, Facade, LimitsConfig, Listeners, Tls, Zone};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use sha2::Digest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::support::{Bed, SOON};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A gateway that is reached by names.
struct Named {
    bed: Bed,
    tls: Arc<Tls>,
    address: SocketAddr,
    plain: SocketAddr,
    directory: tempfile::TempDir,
    _stop: watch::Sender<bool>,
}

impl Named {
    async fn new() -> Self {
        Self::with(Bed::new()).await
    }

    async fn with(bed: Bed) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tls = Tls::open(&own(directory.path()), &domain("sb.example:8443")).unwrap();
        Self::serve(bed, tls, directory).await
    }

    async fn serve(bed: Bed, tls: Arc<Tls>, directory: tempfile::TempDir) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let loopback = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let plain = loopback.local_addr().unwrap();
        let listeners = Listeners {
            plain: loopback,
            tls: Some((listener, Arc::clone(&tls))),
        };
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(gateway::serve(Arc::clone(&bed.gateway), listeners, stopped));
        Self {
            bed,
            tls,
            address,
            plain,
            directory,
            _stop: stop,
        }
    }

    /// By TLS' port, from this address.
    async fn connect_from(&self, host: &str) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{host}:0").parse().unwrap()).unwrap();
        let connected = tokio::time::timeout(SOON, socket.connect(self.address)).await;
        connected.unwrap().unwrap()
    }

    fn authority(&self) -> PathBuf {
        self.directory.path().join("public").join(CERTIFICATE)
    }

    async fn connect(&self, name: &str) -> std::io::Result<TlsStream<TcpStream>> {
        connect(self.address, &self.authority(), name).await
    }

    /// Asks `https://NAME` something, as a client that trusts the authority and no other.
    async fn get(&self, name: &str, path: &str) -> (StatusCode, Value) {
        let stream = self.connect(name).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        let request = Request::get(path)
            .header("host", format!("{name}:8443"))
            .header("x-api-key", &self.bed.key)
            .body(Empty::<bytes::Bytes>::new())
            .unwrap();
        let answer = sender.send_request(request).await.unwrap();
        let status = answer.status();
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        let text = || Value::String(String::from_utf8_lossy(&bytes).into_owned());
        (status, serde_json::from_slice(&bytes).unwrap_or_else(|_| text()))
    }
}

/// Files are sent where the client's other requests go.
#[tokio::test]
async fn files_for_a_build_are_sent_by_tls_too() {
    let named = Named::new().await;
    let made = named
        .bed
        .post("/v3/templates", serde_json::json!({"name": "web"}))
        .await
        .is(202);
    let path = format!(
        "/templates/{}/files/{}",
        made["templateID"].as_str().unwrap(),
        "0".repeat(64)
    );
    let (status, told) = named.get("api.sb.example", &path).await;
    assert_eq!(status, StatusCode::CREATED, "{told}");
    let url = told["url"].as_str().unwrap();
    assert!(url.starts_with("https://api.sb.example:8443/uploads/one/"), "{url}");
}

fn domain(text: &str) -> Domain {
    text.parse().unwrap()
}

fn own(directory: &Path) -> CertificateSource {
    CertificateSource::Own {
        state: directory.to_owned(),
        public: directory.join("public"),
    }
}

async fn connect(address: SocketAddr, authority: &Path, name: &str) -> std::io::Result<TlsStream<TcpStream>> {
    shake(TcpStream::connect(address).await?, authority, name).await
}

async fn shake(stream: TcpStream, authority: &Path, name: &str) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(authority).unwrap() {
        roots.add(certificate.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from(name.to_owned()).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

fn shown(stream: &TlsStream<TcpStream>) -> CertificateDer<'static> {
    stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned()
}

#[tokio::test]
async fn the_api_and_ports_are_reached_by_their_names() {
    let named = Named::new().await;
    let id = named.bed.make(Value::Null).await;
    let (status, told) = named.get("api.sb.example", &format!("/sandboxes/{id}")).await;
    assert_eq!((status, &told["domain"]), (StatusCode::OK, &json!("sb.example")));
    let (status, told) = named.get(&format!("49983-{id}.sb.example"), "/x").await;
    assert_eq!((status, &told["path"]), (StatusCode::OK, &json!("/x")));
    let inside = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = inside.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = inside.accept().await.unwrap();
        let mut head = [0; 5];
        stream.read_exact(&mut head).await.unwrap();
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n42")
            .await
            .unwrap();
    });
    assert_eq!(
        named.get(&format!("{port}-{id}.sb.example"), "/").await,
        (StatusCode::OK, json!(42))
    );
    let stream = named.connect("api.sb.example").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
}

#[tokio::test]
async fn other_names_and_other_authorities_are_not_taken() {
    let named = Named::new().await;
    for name in ["api.other.example", "a.b.sb.example", "example", "192.0.2.1"] {
        assert!(named.connect(name).await.is_err(), "{name}");
    }
    for name in ["sb.example", "127.0.0.1"] {
        named.connect(name).await.unwrap();
    }
    let other = Named::new().await;
    assert!(
        connect(named.address, &other.authority(), "api.sb.example")
            .await
            .is_err()
    );
}

/// Whoever is slow or speaks something else is in the way of no other address, and does not stay: these are more than there are handshakes
/// at once.
#[tokio::test]
async fn handshakes_are_nobody_elses_affair() {
    let named = Named::new().await;
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(named.connect_from("127.0.0.2").await);
    }
    let mut wrong = named.connect_from("127.0.0.2").await;
    wrong.write_all(b"GET /health HTTP/1.1\r\n\r\n").await.unwrap();
    let answered = tokio::time::timeout(Duration::from_secs(5), named.get("api.sb.example", "/health")).await;
    assert_eq!(answered.unwrap().0, StatusCode::OK);
    let mut rest = Vec::new();
    for stream in [&mut wrong, &mut silent[0]] {
        // Closed, whether in order or not.
        drop(tokio::time::timeout(SOON, stream.read_to_end(&mut rest)).await.unwrap());
    }
}

/// Who comes by TLS from one address takes neither all places there nor one of the loopback's.
#[tokio::test]
async fn strangers_take_no_place_of_others() {
    let named = Named::with(Bed::with(LimitsConfig {
        connections: 3,
        per_address: 2,
        ..LimitsConfig::default()
    }))
    .await;
    let held = [
        named.connect_from("127.0.0.1").await,
        named.connect_from("127.0.0.1").await,
    ];
    let mut third = named.connect_from("127.0.0.1").await;
    // Long before its handshake would be over.
    let closed = tokio::time::timeout(SOON / 4, third.read(&mut [0])).await;
    assert_eq!(closed.unwrap().unwrap(), 0);
    let other = named.connect_from("127.0.0.2").await;
    let other = shake(other, &named.authority(), "api.sb.example").await.unwrap();
    // All places of TLS are taken now.
    let mut plain = TcpStream::connect(named.plain).await.unwrap();
    plain
        .write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let mut line = [0; 12];
    let answered = tokio::time::timeout(SOON / 4, plain.read_exact(&mut line)).await;
    assert_eq!((answered.unwrap().unwrap(), &line), (12, b"HTTP/1.1 200"));
    drop((held, other));
}

#[tokio::test]
async fn a_signed_address_is_all_that_a_file_takes() {
    let named = Named::with(Bed::with_envd(Arc::new(Facade::default()))).await;
    let id = named.bed.make(Value::Null).await;
    let (_, told) = named.get("api.sb.example", &format!("/sandboxes/{id}")).await;
    let token = told["envdAccessToken"].as_str().unwrap();
    let file = named.directory.path().join("file");
    std::fs::write(&file, "content").unwrap();
    let path = file.to_str().unwrap();
    let sign = |operation| {
        let text = format!("{path}:{operation}:root:{token}");
        let signature = base64::engine::general_purpose::STANDARD_NO_PAD.encode(sha2::Sha256::digest(text));
        let signature =
            percent_encoding::utf8_percent_encode(&signature, percent_encoding::NON_ALPHANUMERIC).to_string();
        format!("/files?path={path}&username=root&signature=v1_{signature}")
    };
    let host = format!("49983-{id}.sb.example");
    assert_eq!(
        named.get(&host, &sign("read")).await,
        (StatusCode::OK, json!("content"))
    );
    assert_eq!(named.get(&host, &sign("write")).await.0, StatusCode::UNAUTHORIZED);
    assert_eq!(
        named.get(&host, &format!("/files?path={path}")).await.0,
        StatusCode::UNAUTHORIZED
    );
    // The same address says nothing of another sandbox.
    let other = named.bed.make(Value::Null).await;
    let (status, _) = named.get(&format!("49983-{other}.sb.example"), &sign("read")).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_certificate_is_made_again_before_its_time_is_over() {
    let named = Named::new().await;
    let first = shown(&named.connect("api.sb.example").await.unwrap());
    named.tls.refresh(SystemTime::now() + DAY * 29);
    assert_eq!(shown(&named.connect("api.sb.example").await.unwrap()), first);
    // As good for clients of today: it begins a day before it was made, and nothing is as far as that apart here.
    named.tls.refresh(SystemTime::now() + DAY * 30);
    named.tls.refresh(SystemTime::now());
    let second = shown(&named.connect("api.sb.example").await.unwrap());
    assert_ne!(second, first);
}

#[tokio::test]
async fn an_authority_stays_and_is_of_one_domain() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let certificate = || std::fs::read_to_string(directory.path().join("public").join(CERTIFICATE)).unwrap();
    let open = |text| Tls::open(&own(directory.path()), &domain(text)).unwrap();
    open("sb.example");
    let first = certificate();
    assert_eq!(
        gateway::certificate_of(directory.path(), &domain("sb.example"))
            .unwrap()
            .as_deref(),
        Some(&*first)
    );
    open("sb.example:8443");
    assert_eq!(certificate(), first);
    open("other.example");
    assert_ne!(certificate(), first);
    // Programs that trust the first one find it again.
    open("sb.example");
    assert_eq!(certificate(), first);
    let file = directory.path().join("authority-other.example.json");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    std::fs::write(&file, "{}").unwrap();
    let Err(error) = Tls::open(&own(directory.path()), &domain("other.example")) else {
        panic!("a file without a key was taken")
    };
    assert!(error.to_string().contains("authority-other.example.json"), "{error}");
    // One of another domain would be of no use to anybody.
    std::fs::copy(directory.path().join("authority-sb.example.json"), &file).unwrap();
    assert!(Tls::open(&own(directory.path()), &domain("other.example")).is_err());
}

/// A certificate for all names below a domain that is its own authority, and its key.
fn files(directory: &Path, domain: &str) -> (PathBuf, PathBuf) {
    let made = rcgen::generate_simple_self_signed([format!("*.{domain}")]).unwrap();
    let paths = (directory.join("cert.pem"), directory.join("key.pem"));
    // As programs do that renew certificates.
    for (path, text) in [
        (&paths.0, made.cert.pem()),
        (&paths.1, made.signing_key.serialize_pem()),
    ] {
        let new = path.with_extension("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, path).unwrap();
    }
    paths
}

#[tokio::test]
async fn files_are_read_again_when_they_change_and_broken_ones_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (certificate, key) = files(directory.path(), "sb.example");
    let source = CertificateSource::Files {
        certificate: certificate.clone(),
        key: key.clone(),
    };
    let tls = Tls::open(&source, &domain("sb.example")).unwrap();
    let named = Named::serve(Bed::new(), tls, directory).await;
    let now = async || shown(&connect(named.address, &certificate, "api.sb.example").await.unwrap());
    let first = now().await;
    let kept = named.directory.path().join("first.pem");
    std::fs::copy(&certificate, &kept).unwrap();
    files(named.directory.path(), "sb.example");
    assert!(
        connect(named.address, &certificate, "api.sb.example").await.is_err(),
        "not read yet"
    );
    named.tls.refresh(SystemTime::now());
    let second = now().await;
    assert_ne!(second, first);
    let good = std::fs::read(&certificate).unwrap();
    let still = async || {
        shown(
            &connect(
                named.address,
                &named.directory.path().join("second.pem"),
                "api.sb.example",
            )
            .await
            .unwrap(),
        )
    };
    std::fs::write(named.directory.path().join("second.pem"), &good).unwrap();
    // Another one's key, no PEM, and nothing at all.
    for broken in [std::fs::read(&kept).unwrap(), b"-----BEGIN".to_vec(), Vec::new()] {
        std::fs::write(&certificate, broken).unwrap();
        named.tls.refresh(SystemTime::now());
        assert_eq!(still().await, second);
    }
    std::fs::remove_file(&certificate).unwrap();
    named.tls.refresh(SystemTime::now());
    assert_eq!(still().await, second);
    files(named.directory.path(), "sb.example");
    named.tls.reload();
    assert_ne!(now().await, second);
    std::fs::write(&key, "").unwrap();
    assert!(Tls::open(&source, &domain("sb.example")).is_err());
}

/// A question, as it travels.
fn question(name: &str, kind: u16, class: u16) -> Vec<u8> {
    let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend(kind.to_be_bytes());
    bytes.extend(class.to_be_bytes());
    bytes
}

const A: u16 = 1;
const SOA: u16 = 6;
const TXT: u16 = 16;
const AAAA: u16 = 28;
const ANY: u16 = 255;
const IN: u16 = 1;

fn zone(addresses: &[&str]) -> Zone {
    let addresses: Vec<IpAddr> = addresses.iter().map(|text| text.parse().unwrap()).collect();
    Zone::new(&domain("sb.example:8443"), addresses).unwrap()
}

/// Code, whether with authority, and how many answers and records of the authority there are.
fn head(answer: &[u8]) -> (u8, bool, u16, u16) {
    assert_eq!(answer[..2], [0x12, 0x34]);
    assert!(answer[2] & 0x80 != 0 && answer[2] & 2 == 0, "an answer, and whole");
    let count = |at: usize| u16::from_be_bytes([answer[at], answer[at + 1]]);
    (answer[3] & 15, answer[2] & 4 != 0, count(6), count(8))
}

#[test]
fn all_names_of_the_domain_lead_to_the_gateway() {
    let zone = zone(&["127.0.0.1", "::1"]);
    let ask = |name: &str, kind| zone.answer(&question(name, kind, IN)).unwrap();
    for name in [
        "sb.example",
        "api.sb.example",
        "3000-0123456789ab.SB.Example",
        "a.b.sb.example",
    ] {
        let answer = ask(name, A);
        assert_eq!(
            (head(&answer), &answer[answer.len() - 4..]),
            ((0, true, 1, 0), &[127, 0, 0, 1][..]),
            "{name}"
        );
        let answer = ask(name, AAAA);
        assert_eq!(
            (head(&answer), answer[answer.len() - 1]),
            ((0, true, 1, 0), 1),
            "{name}"
        );
        assert_eq!(head(&ask(name, ANY)), (0, true, 2, 0), "{name}");
        // There is the name, and nothing of that kind.
        assert_eq!(head(&ask(name, TXT)), (0, true, 0, 1), "{name}");
    }
    assert_eq!(head(&ask("sb.example", SOA)), (0, true, 1, 0));
    assert_eq!(head(&ask("api.sb.example", SOA)), (0, true, 0, 1));
    let four = self::zone(&["127.0.0.1"]);
    assert_eq!(
        head(&four.answer(&question("api.sb.example", AAAA, IN)).unwrap()),
        (0, true, 0, 1)
    );
    // The longest name that there can be fits without extensions.
    let long = [
        "a".repeat(60),
        "b".repeat(60),
        "c".repeat(60),
        "d".repeat(57),
        "sb.example".into(),
    ]
    .join(".");
    assert!(ask(&long, ANY).len() <= 512 && ask(&long, TXT).len() <= 512);
}

#[test]
fn what_is_not_ours_is_refused() {
    let zone = zone(&["127.0.0.1"]);
    for name in ["example", "xsb.example", "www.debian.org", ""] {
        assert_eq!(head(&zone.answer(&question(name, A, IN)).unwrap()).0, 5, "{name}");
    }
    assert_eq!(head(&zone.answer(&question("sb.example", A, 3)).unwrap()).0, 5);
    let mut update = question("sb.example", SOA, IN);
    update[2] = 5 << 3;
    assert_eq!(head(&zone.answer(&update).unwrap()).0, 4);
    // Extensions of a version that is not known, and of the one that is.
    let extended = |version: u8| {
        let mut bytes = question("api.sb.example", A, IN);
        bytes[11] = 1;
        bytes.extend([0, 0, 41, 4, 208, 0, version, 0, 0, 0, 0]);
        zone.answer(&bytes).unwrap()
    };
    assert_eq!(head(&extended(0)), (0, true, 1, 0));
    let bad = extended(1);
    assert_eq!(
        (head(&bad).2, bad[bad.len() - 6]),
        (0, 1),
        "BADVERS is 16: 1 in the extension, 0 in the head"
    );
}

#[test]
fn what_is_no_question_is_refused_or_left() {
    let zone = zone(&["127.0.0.1"]);
    let good = question("api.sb.example", A, IN);
    for length in 0..good.len() {
        match zone.answer(&good[..length]) {
            None => assert!(length < 12, "{length}"),
            Some(answer) => assert_eq!(head(&answer), (1, false, 0, 0), "{length}"),
        }
    }
    let mut answer = good.clone();
    answer[2] |= 0x80;
    assert_eq!(zone.answer(&answer), None, "two servers never talk to each other");
    for count in [0, 2] {
        let mut several = good.clone();
        several[5] = count;
        assert_eq!(head(&zone.answer(&several).unwrap()).0, 1);
    }
    // A name that is a pointer to itself, and one to what is behind it.
    for to in [12, 40] {
        let mut looping = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, to, 0, 1, 0, 1];
        looping.extend([0; 40]);
        let code = head(&zone.answer(&looping).unwrap()).0;
        assert!(code == 1 || code == 5, "{code}");
    }
}

#[tokio::test]
async fn names_are_asked_for_over_udp_and_tcp() {
    let dns = Dns::bind("127.0.0.1:0".parse().unwrap(), zone(&["127.0.0.1"])).unwrap();
    let address = dns.address().unwrap();
    let (stop, stopped) = watch::channel(false);
    let serving = tokio::spawn(dns.serve(stopped));
    let good = question("api.sb.example", A, IN);
    let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut buffer = [0; 1500];
    // Nothing comes back to what is no question, and nothing ends by it.
    for bad in [&[][..], &[1; 11], &[0xff; 1400]] {
        udp.send_to(bad, address).await.unwrap();
    }
    udp.send_to(&good, address).await.unwrap();
    let (length, _) = tokio::time::timeout(SOON, udp.recv_from(&mut buffer))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(head(&buffer[..length]), (0, true, 1, 0));
    let mut tcp = TcpStream::connect(address).await.unwrap();
    let framed = [&u16::try_from(good.len()).unwrap().to_be_bytes()[..], &good].concat();
    // Two at once, and the third in pieces.
    tcp.write_all(&[&framed[..], &framed].concat()).await.unwrap();
    for part in [&framed[..1], &framed[1..20], &framed[20..]] {
        tcp.write_all(part).await.unwrap();
        tcp.flush().await.unwrap();
    }
    for _ in 0..3 {
        let length = usize::from(tcp.read_u16().await.unwrap());
        tcp.read_exact(&mut buffer[..length]).await.unwrap();
        assert_eq!(head(&buffer[..length]), (0, true, 1, 0));
    }
    for bad in [&[0xff; 2][..], &[0, 3, 1, 2, 3]] {
        let mut other = TcpStream::connect(address).await.unwrap();
        other.write_all(bad).await.unwrap();
        let mut rest = Vec::new();
        drop(
            tokio::time::timeout(Duration::from_secs(5), other.read_to_end(&mut rest))
                .await
                .unwrap(),
        );
        assert!(rest.is_empty());
    }
    stop.send(true).unwrap();
    tokio::time::timeout(SOON, serving).await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}
