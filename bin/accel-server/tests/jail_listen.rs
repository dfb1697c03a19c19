//! The server for other machines in a jail: a program computes by it through its port, and nothing else of the network is left to it. Needs
//! unshare(1) as root, and what `cargo xtask test` installs for accelerators.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

const SERVER: &str = env!("CARGO_BIN_EXE_basalt-accel-server");

/// unshare(1) with the server in its namespaces.
struct Unshared {
    child: Child,
    log: BufReader<ChildStderr>,
}

impl Drop for Unshared {
    fn drop(&mut self) {
        // Not that one, whose end a server that has given up its rights does not hear of (prctl(2), PR_SET_PDEATHSIG). Where the server has
        // ended, it has too.
        if let Some(server) = self.server() {
            _ = kill_process(server, Signal::KILL);
        }
        self.child.wait().unwrap();
    }
}

impl Unshared {
    /// It and the port that it says that it listens on.
    fn start(namespaces: &[&str], flags: &[&str]) -> (Self, String) {
        let mut child = Command::new("unshare")
            .args(["--user", "--map-root-user", "--pid", "--fork"])
            .args(namespaces)
            .args([SERVER, "--listen=127.0.0.1:0"])
            .args(flags)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        let mut started = Self { child, log };
        let mut said = String::new();
        loop {
            let mut line = String::new();
            assert_ne!(started.log.read_line(&mut line).unwrap(), 0, "it has ended: {said}");
            if let Some((_, address)) = line.trim().split_once("listening on ") {
                let address = address.to_owned();
                return (started, address);
            }
            said.push_str(&line);
        }
    }

    fn server(&self) -> Option<Pid> {
        let parent = self.child.id();
        let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
        Pid::from_raw(children.trim().parse().ok()?)
    }

    /// A file of the server's in /proc.
    fn file(&self, name: &str) -> PathBuf {
        format!("/proc/{}/{name}", self.server().unwrap().as_raw_nonzero()).into()
    }

    fn is_in_this_network(&self) -> bool {
        fs::read_link(self.file("ns/net")).unwrap() == fs::read_link("/proc/self/ns/net").unwrap()
    }
}

/// A program that computes by who listens there; what it says.
fn compute(address: &str) -> String {
    let here = std::env::current_exe().unwrap();
    let here = here.parent().unwrap();
    let vendors = tempfile::tempdir().unwrap();
    let library = format!("{}\n", here.join("libbasalt_opencl.so").display());
    fs::write(vendors.path().join("basalt.icd"), library).unwrap();
    let output = Command::new(here.join("../examples/saxpy-of-server"))
        .env("OCL_ICD_VENDORS", vendors.path())
        .env("BASALT_ACCEL", format!("tcp://{address}"))
        .output()
        .unwrap();
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn who_listens_in_a_jail_computes_and_has_left_the_network() {
    let namespaces = ["--mount", "--ipc", "--uts"];
    let (server, address) = Unshared::start(&namespaces, &["--backend=opencl", "--jail"]);
    let said = compute(&address);
    assert!(said.contains("numbers are right"), "{said}");
    assert!(!server.is_in_this_network());
    let status = fs::read_to_string(server.file("status")).unwrap();
    assert!(
        status.contains("Seccomp:\t2") && status.contains("CapEff:\t0000000000000000"),
        "{status}"
    );
    let interfaces = fs::read_to_string(server.file("net/dev")).unwrap();
    let names: Vec<_> = interfaces.lines().filter_map(|line| line.split_once(':')).collect();
    assert!(names.iter().all(|(name, _)| name.trim() == "lo"), "{interfaces}");
}

/// That it has left is not unshare(1)'s doing.
#[test]
fn who_listens_without_a_jail_is_in_the_network() {
    let (server, _) = Unshared::start(&[], &["--backend=null"]);
    assert!(server.is_in_this_network());
}
