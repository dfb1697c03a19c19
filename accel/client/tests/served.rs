//! Unmodified programs on Debian's loader, with the library as its one driver and a server that carries their calls out by PoCL.
//!
//! What they need is installed by the step `apt-packages` of `cargo xtask test` (ocl-icd-libopencl1, pocl-opencl-icd, clinfo).

use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use accel_server::{Backend, Server};
use accel_transport::{Settings, Transport, tls};

/// A server with a socket, and a directory in which a loader finds the library and nothing else.
struct Served {
    directory: tempfile::TempDir,
    server: Arc<Server>,
}

impl Served {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let library = beside("libbasalt_opencl.so");
        let vendor = format!("{}\n", library.display());
        std::fs::write(directory.path().join("basalt.icd"), vendor).unwrap();
        let settings = Settings {
            transports: vec![Transport::Bell, Transport::Stream, Transport::Synchronous],
            pairs: 32,
            records: 256,
            arena: 64 << 20,
            patience: Duration::from_secs(5),
            busy_poll: None,
        };
        let backend = Backend::opencl(Path::new("libOpenCL.so.1")).unwrap();
        let listener = Server::listen(&directory.path().join("socket")).unwrap();
        let server = Arc::new(Server::new(backend, settings));
        let local = Arc::clone(&server);
        // They go with the test.
        std::thread::spawn(move || local.serve(listener));
        Self { directory, server }
    }

    /// It listens for other machines as well; where.
    fn listen(&self, tls: Option<Arc<tls::ServerConfig>>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = Arc::clone(&self.server);
        std::thread::spawn(move || server.serve_remote(&listener, tls));
        port
    }

    /// A key and a certificate that is its own authority.
    fn identity(&self, name: &str) -> tls::Identity {
        let [certificate, key] = ["pem", "key"].map(|end| self.directory.path().join(format!("{name}.{end}")));
        let mut command = Command::new("openssl");
        command.args("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test".split(' '));
        command.args("-addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE".split(' '));
        let output = command.arg("-keyout").arg(&key).arg("-out").arg(&certificate).output();
        let output = output.expect("openssl cannot be run: install Debian's package openssl");
        assert!(output.status.success(), "{}", said(&output));
        tls::Identity { certificate, key }
    }

    /// A program that finds its server by these variables alone.
    fn run_with(&self, program: &Path, arguments: &[&str], variables: &[(&str, &OsStr)]) -> Output {
        let mut command = Command::new(program);
        command.args(arguments).env("OCL_ICD_VENDORS", self.directory.path());
        command.env("BASALT_ACCEL_DEBUG", "1").envs(variables.iter().copied());
        command.output().unwrap()
    }

    /// A program whose loader finds the library alone, and whose server is at this name of the directory.
    fn run(&self, program: &Path, arguments: &[&str], socket: &str) -> Output {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("OCL_ICD_VENDORS", self.directory.path())
            .env("BASALT_ACCEL_SOCKET", self.directory.path().join(socket));
        command.output().unwrap()
    }
}

/// What cargo has built with this test, by where it lies from there.
fn beside(path: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let found = own.parent().unwrap().join(path);
    assert!(
        found.exists(),
        "{} is not there; it is built with the tests",
        found.display()
    );
    found
}

fn saxpy() -> PathBuf {
    beside("../examples/saxpy")
}

fn said(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn a_program_computes_by_whoever_serves_it_and_has_no_platform_without() {
    let served = Served::new();
    let output = served.run(&saxpy(), &[], "socket");
    let text = said(&output);
    assert!(output.status.success() && text.contains("numbers are right"), "{text}");
    // So the loader had no other platform.
    let without = served.run(&saxpy(), &[], "nobody");
    assert!(!without.status.success(), "{}", said(&without));
}

#[test]
fn clinfo_lists_what_it_lists_where_the_device_is() {
    let served = Served::new();
    let forwarded = served.run(Path::new("clinfo"), &["-l"], "socket");
    let native = Command::new("clinfo").arg("-l").output().unwrap();
    assert!(forwarded.status.success() && native.status.success());
    assert!(said(&native).contains("Device #0"), "{}", said(&native));
    assert_eq!(said(&forwarded), said(&native));
}

#[test]
fn shared_virtual_memory_has_one_address_for_a_program_and_for_kernels() {
    let example = beside("../examples/svm");
    // The program is one that PoCL itself is right for.
    let native = Command::new(&example).output().unwrap();
    assert!(native.status.success(), "{}", said(&native));
    let served = Served::new();
    for (arguments, told) in [
        (&[][..], "copies are right"),
        (&["refusals"], "what is wrong is refused"),
    ] {
        let output = served.run(&example, arguments, "socket");
        let text = said(&output);
        assert!(output.status.success() && text.contains(told), "{text}");
    }
}

/// Both computes and asks; natively it says the same.
fn is_served(served: &Served, variables: &[(&str, &OsStr)]) {
    let output = served.run_with(&saxpy(), &[], variables);
    let text = said(&output);
    assert!(output.status.success() && text.contains("numbers are right"), "{text}");
    let output = served.run_with(Path::new("clinfo"), &["-l"], variables);
    assert!(
        output.status.success() && said(&output).contains("Device #0"),
        "{}",
        said(&output)
    );
}

#[test]
fn programs_compute_where_no_memory_is_shared() {
    let served = Served::new();
    let socket = served.directory.path().join("socket");
    for way in ["stream", "synchronous"] {
        let variables = [
            ("BASALT_ACCEL_SOCKET", socket.as_os_str()),
            ("BASALT_ACCEL_TRANSPORT", way.as_ref()),
        ];
        is_served(&served, &variables);
    }
    let address = format!("tcp://127.0.0.1:{}", served.listen(None));
    is_served(&served, &[("BASALT_ACCEL", address.as_ref())]);
}

#[test]
fn programs_compute_by_tls_and_strangers_have_no_platform() {
    let served = Served::new();
    let (server, client) = (served.identity("server"), served.identity("client"));
    let config = tls::server(&server, Some(&client.certificate)).unwrap();
    let address = format!("tls://127.0.0.1:{}", served.listen(Some(config)));
    let trusted = [
        ("BASALT_ACCEL", address.as_ref()),
        ("BASALT_ACCEL_TLS_CA", server.certificate.as_os_str()),
    ];
    let own = [
        ("BASALT_ACCEL_TLS_CERT", client.certificate.as_os_str()),
        ("BASALT_ACCEL_TLS_KEY", client.key.as_os_str()),
    ];
    is_served(&served, &[trusted, own].concat());
    for (variables, reason) in [
        (&trusted[..], "no accelerator at tls://"),
        (&trusted[..1], "BASALT_ACCEL_TLS_CA is not set"),
        (&[&trusted[..], &own[..1]].concat(), "set both"),
        (&[("BASALT_ACCEL", "http://a:1".as_ref())], "tls://HOST:PORT"),
    ] {
        let output = served.run_with(&saxpy(), &[], variables);
        let text = said(&output);
        assert!(!output.status.success() && text.contains(reason), "{text}");
    }
}
