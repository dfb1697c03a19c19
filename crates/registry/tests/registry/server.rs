//! Debian's `docker-registry`, one process a test: without or with authentication, without or with TLS.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::kit::{PATIENCE, Place};

pub(crate) const USER: &str = "basalt";
pub(crate) const PASSWORD: &str = "s3cret-pass";
/// `htpasswd -nbB basalt s3cret-pass`.
const HTPASSWD: &str = "basalt:$2y$05$6L2FmMt18XPdIUMVA6QxCO2t/PH7lr8bW8kUV.iVjAp64MDRDyRqO\n";

/// A running registry; it ends when dropped.
pub(crate) struct Registry {
    child: Child,
    pub(crate) port: u16,
    directory: PathBuf,
}

/// What it asks of its clients.
#[derive(Default)]
pub(crate) struct Setup {
    /// The `auth` part of its configuration.
    pub(crate) auth: String,
    /// The `tls` part, below `http`.
    pub(crate) tls: String,
}

impl Registry {
    pub(crate) fn start(place: &Place) -> Self {
        Self::start_with(place, &Setup::default())
    }

    /// With names and passwords.
    pub(crate) fn with_passwords(place: &Place) -> Self {
        let file = place.path("htpasswd");
        fs::write(&file, HTPASSWD).unwrap();
        let auth = format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", file.display());
        Self::start_with(
            place,
            &Setup {
                auth,
                ..Setup::default()
            },
        )
    }

    pub(crate) fn start_with(place: &Place, setup: &Setup) -> Self {
        // A port that was free a moment ago may be somebody else's by now.
        for _ in 0..5 {
            if let Some(registry) = Self::try_start(place, setup) {
                return registry;
            }
        }
        panic!("docker-registry does not start; see the log above");
    }

    fn try_start(place: &Place, setup: &Setup) -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let directory = place.path(&format!("registry-{port}"));
        fs::create_dir(&directory).unwrap();
        let config = format!(
            "version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n    rootdirectory: {}\n\
             http:\n  addr: 0.0.0.0:{port}\n{}{}",
            directory.join("data").display(),
            setup.tls,
            setup.auth,
        );
        fs::write(directory.join("config.yml"), config).unwrap();
        let log = fs::File::create(directory.join("log")).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(directory.join("config.yml"))
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("docker-registry cannot be run: install Debian's package docker-registry");
        let mut registry = Self { child, port, directory };
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(registry);
            }
            if registry.child.try_wait().unwrap().is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        eprintln!("{}", registry.log());
        None
    }

    /// `127.0.0.1:PORT`.
    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap()
    }

    /// How many answers with one of `statuses` it has given to GET requests for this blob (64 digits). It notes them
    /// after it has given them: so many as are expected are waited for.
    pub(crate) fn gets(&self, digest: &str, statuses: &[&str], expected: usize) -> usize {
        let begun = Instant::now();
        loop {
            let count = self.noted(digest, statuses);
            if count >= expected || begun.elapsed() > PATIENCE {
                return count;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn noted(&self, digest: &str, statuses: &[&str]) -> usize {
        let log = self.log();
        let gets = log
            .lines()
            .filter(|line| line.contains("\"GET /v2/") && line.contains(&format!("blobs/sha256:{digest}")));
        gets.filter(|line| {
            statuses
                .iter()
                .any(|status| line.contains(&format!("HTTP/1.1\" {status} ")))
        })
        .count()
    }

    /// Where it keeps a blob.
    pub(crate) fn blob(&self, digest: &str) -> PathBuf {
        let blobs = Path::new("data/docker/registry/v2/blobs/sha256");
        self.directory.join(blobs).join(&digest[..2]).join(digest).join("data")
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("docker-registry is left running: {error}");
        }
        if thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

/// A key and a certificate for 127.0.0.1 that is its own authority, made by `openssl`.
pub(crate) fn certificate(place: &Place) -> (PathBuf, PathBuf) {
    let (key, certificate) = (place.path("key.pem"), place.path("certificate.pem"));
    let output = Command::new("openssl")
        .args("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test".split(' '))
        .args("-addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE".split(' '))
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .expect("openssl cannot be run: install Debian's package openssl");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (key, certificate)
}
