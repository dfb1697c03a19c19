//! Where Prometheus reads: a unix socket in the state directory, and a TCP port of the loopback where asked for. Speaks as
//! much HTTP/1.1 as `GET /metrics` needs, one request a connection. Each connection has a deadline and there are few at
//! once, so a scraper that is slow or hostile holds up other scrapers at most.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use node_api::METRICS_SOCKET;
use observe::Repeated;
use observe::exposition::CONTENT_TYPE;

use crate::Error;
use crate::socket_file;
use crate::telemetry::metrics::MetricSources;
use crate::vmm::process::readable;

/// Connections at once.
const MAX_CONNECTIONS: usize = 4;

/// Of one connection, from its first byte to its last.
const LIMIT: Duration = Duration::from_secs(20);
/// Of its request.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// A longer request is none of Prometheus'.
const MAX_REQUEST: usize = 8 << 10;

/// Between two attempts to let somebody in.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Said as long as none can be let in.
static NOT_LET_IN: Repeated = Repeated::new(Duration::from_secs(10));

/// Said as long as somebody deletes its socket.
static DELETED: socket_file::Report = socket_file::Report::new();

/// What the metrics are of.
pub(crate) trait Observed: Send + Sync {
    /// Where they are looked up.
    fn sources(&self) -> MetricSources<'_>;
}

/// The endpoint; its socket goes with it.
#[derive(Debug)]
pub struct Endpoint {
    path: PathBuf,
    tcp: Option<SocketAddr>,
    /// Its socket's name stays away.
    ended: Arc<AtomicBool>,
}

/// A stream whose waiting can be bounded.
trait Bounded: Read + Write + Send + 'static {
    fn bound(&self, limit: Duration) -> io::Result<()>;
}

impl Bounded for TcpStream {
    fn bound(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

impl Bounded for UnixStream {
    fn bound(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))?;
        self.set_write_timeout(Some(limit))
    }
}

impl Endpoint {
    /// Listens on the state directory's socket, and on `tcp`. Fails if one of the two cannot be had, or if `tcp` can be reached from
    /// elsewhere.
    pub(crate) fn bind(observed: &Arc<dyn Observed>, tcp: Option<SocketAddr>) -> Result<Self, Error> {
        if let Some(address) = tcp.filter(|address| !address.ip().is_loopback()) {
            return Err(Error::Invalid(format!(
                "everyone who reaches {address} could read the metrics: give a port of 127.0.0.1 or [::1], and put a proxy with access control before it"
            )));
        }
        let path = observed.sources().paths.state().join(METRICS_SOCKET);
        let active = Arc::new(AtomicUsize::new(0));
        let listener = bind_unix(&path).map_err(Error::file("make a socket at", &path))?;
        let tcp = tcp
            .map(|address| {
                let listener = TcpListener::bind(address)?;
                Ok((listener.local_addr()?, listener))
            })
            .transpose()
            .map_err(|error: io::Error| {
                let asked = tcp.map_or_else(String::new, |address| address.to_string());
                Error::Invalid(format!(
                    "the metrics cannot be served at {asked} ({error}): give another port"
                ))
            })?;
        let ended = Arc::<AtomicBool>::default();
        let mut socket = Socket {
            listener,
            path: path.clone(),
            ended: Arc::clone(&ended),
        };
        serve(Arc::clone(observed), Arc::clone(&active), move || socket.accept())?;
        let tcp = match tcp {
            Some((address, listener)) => {
                serve(Arc::clone(observed), active, move || Ok(listener.accept()?.0))?;
                Some(address)
            }
            None => None,
        };
        Ok(Self { path, tcp, ended })
    }

    /// The TCP address, with the port that was found where 0 was asked for.
    pub fn tcp(&self) -> Option<SocketAddr> {
        self.tcp
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        if let Err(error) = fs::remove_file(&self.path) {
            log::info!("{} stays behind: {error}", self.path.display());
        }
    }
}

/// The state directory's socket, which is made again where somebody has deleted it.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
    ended: Arc<AtomicBool>,
}

impl Socket {
    fn accept(&mut self) -> io::Result<UnixStream> {
        while !readable(&self.listener, socket_file::LOOK) {
            if socket_file::is_missing(&self.path) && !self.ended.load(Ordering::SeqCst) {
                let again = bind_unix(&self.path);
                DELETED.say(&self.path, again.as_ref().map(drop));
                self.listener = again?;
            }
        }
        Ok(self.listener.accept()?.0)
    }
}

fn bind_unix(path: &std::path::Path) -> io::Result<UnixListener> {
    // The state directory's lock is ours, so whatever is there is stale.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => (),
    }
    let directory = node_api::client::directory(path)?;
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let family = rustix::net::AddressFamily::UNIX;
    let socket = rustix::net::socket_with(family, rustix::net::SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &node_api::client::address(path, &directory)?)?;
    // The names of sandboxes and images are in there.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, 16)?;
    Ok(UnixListener::from(socket))
}

/// Lets askers in, in a thread, and answers each in one of its own.
fn serve<S: Bounded>(
    observed: Arc<dyn Observed>,
    active: Arc<AtomicUsize>,
    mut accept: impl FnMut() -> io::Result<S> + Send + 'static,
) -> Result<(), Error> {
    crate::thread::spawn("metrics", move || {
        loop {
            let stream = match accept() {
                Ok(stream) => stream,
                Err(error) => {
                    NOT_LET_IN.say(|more| log::info!("metrics clients cannot be accepted: {error}{more}"));
                    std::thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            if active.fetch_add(1, Ordering::SeqCst) >= MAX_CONNECTIONS {
                active.fetch_sub(1, Ordering::SeqCst);
                observed.sources().metrics.refused.increment();
                continue;
            }
            let leave = Leave(Arc::clone(&active));
            let observed = Arc::clone(&observed);
            let work = move || {
                let _leave = leave;
                if let Err(error) = answer(&*observed, stream) {
                    log::debug!("a scraper was not served: {error}");
                }
            };
            if let Err(error) = crate::thread::spawn("scraper", work) {
                log::info!("a metrics client is refused: {error}");
            }
        }
    })
}

struct Leave(Arc<AtomicUsize>);

impl Drop for Leave {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn answer(observed: &dyn Observed, mut stream: impl Bounded) -> io::Result<()> {
    let begun = Instant::now();
    let request = read_request(&mut stream, begun + REQUEST_LIMIT)?;
    let (status, body) = match judge(&request) {
        Ok(()) => ("200 OK", observed.sources().exposition()),
        Err(status) => (status, format!("{status}: ask for GET /metrics\n")),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    write_all(&mut stream, head.as_bytes(), begun + LIMIT)?;
    write_all(&mut stream, body.as_bytes(), begun + LIMIT)
}

/// Reads up to the empty line.
fn read_request(stream: &mut impl Bounded, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        stream.bound(left(deadline)?)?;
        match stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => request.extend_from_slice(buffer.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
        if request.windows(4).any(|end| end == b"\r\n\r\n") || request.len() > MAX_REQUEST {
            return Ok(request);
        }
    }
}

/// Whether a request can be answered, or with which status not.
pub(crate) fn judge(request: &[u8]) -> Result<(), &'static str> {
    const BAD: &str = "400 Bad Request";
    if request.len() > MAX_REQUEST {
        return Err("431 Request Header Fields Too Large");
    }
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let line = std::str::from_utf8(line).map_err(|_| BAD)?;
    let words: Vec<&str> = line.split(' ').collect();
    let [method, target, version] = words.as_slice() else {
        return Err(BAD);
    };
    if !version.starts_with("HTTP/1.") {
        return Err("505 HTTP Version Not Supported");
    }
    if *method != "GET" {
        return Err("405 Method Not Allowed");
    }
    match target.split('?').next() {
        Some("/metrics") => Ok(()),
        _ => Err("404 Not Found"),
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

fn write_all(stream: &mut impl Bounded, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.bound(left(deadline)?)?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_question_is_answered() {
        let status = |line: &str| judge(format!("{line}\r\nHost: x\r\n\r\n").as_bytes());
        assert_eq!(status("GET /metrics HTTP/1.1"), Ok(()));
        assert_eq!(status("GET /metrics?x=y HTTP/1.0"), Ok(()));
        assert_eq!(status("GET / HTTP/1.1"), Err("404 Not Found"));
        assert_eq!(status("POST /metrics HTTP/1.1"), Err("405 Method Not Allowed"));
        assert_eq!(status("GET /metrics HTTP/2"), Err("505 HTTP Version Not Supported"));
        for bad in ["", "GET", "GET /metrics", "GET  /metrics HTTP/1.1", "\u{fffd}"] {
            assert_eq!(status(bad), Err("400 Bad Request"), "{bad}");
        }
        assert_eq!(
            judge(&[b'x'; MAX_REQUEST + 1]),
            Err("431 Request Header Fields Too Large")
        );
        assert_eq!(judge(&[0xff, b' ', b'\r']), Err("400 Bad Request"));
    }

    #[test]
    fn a_request_that_trickles_has_an_end() {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let trickle = std::thread::spawn(move || {
            while far.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let begun = Instant::now();
        let error = read_request(&mut near, begun + Duration::from_millis(200)).unwrap_err();
        assert!(
            matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock),
            "{error}"
        );
        assert!(begun.elapsed() < Duration::from_secs(90));
        drop(near);
        trickle.join().unwrap();
    }

    #[test]
    fn a_reader_that_takes_nothing_has_an_end() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let begun = Instant::now();
        let error = write_all(&mut near, &vec![0; 16 << 20], begun + Duration::from_millis(200)).unwrap_err();
        assert!(
            matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock),
            "{error}"
        );
        assert!(begun.elapsed() < Duration::from_secs(90));
        drop(far);
    }
}
