//! Debian's `docker-registry`, one process a test: without or with a password.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// `htpasswd -nbB basalt s3cret-pass`.
const HTPASSWD: &str = "basalt:$2y$05$6L2FmMt18XPdIUMVA6QxCO2t/PH7lr8bW8kUV.iVjAp64MDRDyRqO\n";
pub(crate) const CREDENTIALS: &str = "basalt:s3cret-pass";

/// A running registry; it ends when dropped.
pub(crate) struct Registry {
    child: Child,
    port: u16,
    directory: PathBuf,
}

impl Registry {
    pub(crate) fn start(place: &Path, password: bool) -> Self {
        // A port that was free a moment ago may be somebody else's by now.
        for _ in 0..5 {
            if let Some(registry) = Self::try_start(place, password) {
                return registry;
            }
        }
        panic!("docker-registry does not start; see the log above");
    }

    fn try_start(place: &Path, password: bool) -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let directory = place.join(format!("registry-{port}"));
        fs::create_dir(&directory).unwrap();
        let file = directory.join("htpasswd");
        fs::write(&file, HTPASSWD).unwrap();
        let auth = format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", file.display());
        let config = format!(
            "version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n    rootdirectory: {}\n\
             http:\n  addr: 127.0.0.1:{port}\n{}",
            directory.join("data").display(),
            if password { auth.as_str() } else { "" },
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
        while begun.elapsed() < Duration::from_secs(90) {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(registry);
            }
            if registry.child.try_wait().unwrap().is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("{}", registry.log());
        None
    }

    /// An image in it.
    pub(crate) fn image(&self, name: &str) -> String {
        format!("127.0.0.1:{}/{name}", self.port)
    }

    /// `127.0.0.1:PORT`.
    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.join("log")).unwrap()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("docker-registry is left running: {error}");
        }
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}
