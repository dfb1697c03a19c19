//! Peers on the wire: a proxy that breaks or stops connections, and a server that answers what a test says.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Forwards connections to a registry.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    pub(crate) rules: Arc<Rules>,
}

/// What it does with them.
#[derive(Default)]
pub(crate) struct Rules {
    /// Bytes that have come from the registry.
    pub(crate) received: AtomicU64,
    /// A connection ends, or stops, after so many bytes from the registry; 0: never.
    pub(crate) after: AtomicU64,
    /// So many connections are still to be ended.
    pub(crate) cuts: AtomicI64,
    /// So many connections are still to be ended after a mebibyte to the registry.
    pub(crate) upload_cuts: AtomicI64,
    /// They are not ended but stay silent.
    pub(crate) silent: bool,
    /// Between two reads of 16 KiB.
    pub(crate) delay: Duration,
}

impl Proxy {
    pub(crate) fn start(to: u16, rules: Rules) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let rules = Arc::new(rules);
        let theirs = Arc::clone(&rules);
        // It ends with the test's process.
        thread::spawn(move || {
            for near in listener.incoming() {
                let rules = Arc::clone(&theirs);
                let near = near.unwrap();
                thread::spawn(move || {
                    let Ok(far) = TcpStream::connect(("127.0.0.1", to)) else {
                        return;
                    };
                    let (near_read, far_write) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                    let uploads = Arc::clone(&rules);
                    thread::spawn(move || forward(near_read, far_write, &uploads));
                    answer(far, near, &rules);
                });
            }
        });
        Self { port, rules }
    }

    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, rules: &Rules) {
    let (mut buf, mut forwarded) = (vec![0; 16 << 10], 0);
    // Either end may break the connection at any time: that is the test.
    while let Ok(got @ 1..) = from.read(&mut buf) {
        forwarded += got;
        if to.write_all(&buf[..got]).is_err() {
            return;
        }
        if forwarded > 1 << 20 && rules.upload_cuts.fetch_sub(1, Ordering::SeqCst) > 0 {
            drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
            return;
        }
    }
    drop(to.shutdown(Shutdown::Write));
}

fn answer(mut from: TcpStream, mut to: TcpStream, rules: &Rules) {
    let (mut buf, mut forwarded) = (vec![0; 16 << 10], 0);
    while let Ok(got @ 1..) = from.read(&mut buf) {
        thread::sleep(rules.delay);
        rules.received.fetch_add(got as u64, Ordering::SeqCst);
        forwarded += got as u64;
        if to.write_all(&buf[..got]).is_err() {
            break;
        }
        let after = rules.after.load(Ordering::SeqCst);
        if after > 0 && forwarded > after && rules.cuts.fetch_sub(1, Ordering::SeqCst) > 0 {
            if rules.silent {
                thread::sleep(Duration::from_secs(600));
            }
            break;
        }
    }
    drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
}

/// A request, as far as the tests look at it.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    /// `GET /path?query`.
    pub(crate) line: String,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }
}

/// Status, headers, body.
pub(crate) type Answer = (u16, Vec<(String, String)>, Vec<u8>);

/// A server that answers by a function, one request a connection, and keeps what it was asked.
pub(crate) struct Fake {
    pub(crate) port: u16,
    pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
}

impl Fake {
    pub(crate) fn start(answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (theirs, answer) = (Arc::clone(&asked), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (asked, answer) = (Arc::clone(&theirs), Arc::clone(&answer));
                thread::spawn(move || serve(stream.unwrap(), &asked, &*answer));
            }
        });
        Self { port, asked }
    }

    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.asked
            .lock()
            .unwrap()
            .iter()
            .map(|asked| asked.line.clone())
            .collect()
    }
}

/// `None`: not HTTP, such as the first bytes of TLS, or nothing at all.
fn request(stream: &TcpStream) -> Option<Asked> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let line = line.trim_end().strip_suffix(" HTTP/1.1")?.to_owned();
    let mut headers = Vec::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let Some((name, value)) = header.trim_end().split_once(": ") else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let mut asked = Asked {
        line,
        headers,
        body: Vec::new(),
    };
    let len = asked
        .header("content-length")
        .and_then(|len| len.parse().ok())
        .unwrap_or(0);
    asked.body = vec![0; len];
    reader.read_exact(&mut asked.body).ok()?;
    Some(asked)
}

fn serve(mut stream: TcpStream, log: &Mutex<Vec<Asked>>, answer: &dyn Fn(&Asked) -> Answer) {
    let Some(asked) = request(&stream) else {
        drop(stream.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n"));
        return;
    };
    log.lock().unwrap().push(asked.clone());
    let (status, headers, body) = answer(&asked);
    let mut text = format!(
        "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    // Whoever asked may have gone.
    drop(
        stream
            .write_all(format!("{text}\r\n").as_bytes())
            .and_then(|()| stream.write_all(&body)),
    );
}
