//! Unmodified programs on Debian's loader, with the library as its one driver and a server that carries their calls out by PoCL.
//!
//! What they need is installed by the step `apt-packages` of `cargo xtask test` (ocl-icd-libopencl1, pocl-opencl-icd, clinfo).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use accel_server::{Backend, Server};
use accel_transport::{Settings, Transport};

/// A server with a socket, and a directory in which a loader finds the library and nothing else.
struct Served {
    directory: tempfile::TempDir,
}

impl Served {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let library = beside("libbasalt_opencl.so");
        let vendor = format!("{}\n", library.display());
        std::fs::write(directory.path().join("basalt.icd"), vendor).unwrap();
        let settings = Settings {
            transports: vec![Transport::Bell],
            pairs: 32,
            records: 256,
            arena: 64 << 20,
            patience: Duration::from_secs(5),
            busy_poll: None,
        };
        let backend = Backend::opencl(Path::new("libOpenCL.so.1")).unwrap();
        let listener = Server::listen(&directory.path().join("socket")).unwrap();
        // It goes with the test.
        std::thread::spawn(move || Arc::new(Server::new(backend, settings)).serve(listener));
        Self { directory }
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
