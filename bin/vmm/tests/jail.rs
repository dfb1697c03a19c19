//! The VMM in its jail, before it has a guest: it answers, over a socket it inherited listening, and is confined. Needs root,
//! no KVM; what needs a guest is in the lab's cases.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;

use host::jail::{Child, Isolation, Launch, Pool, argument, spawn};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vmm_api::{VmState, VmmClient};
use wire::packet::PacketSocket;

fn socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn connect(path: &Path) -> VmmClient {
    let socket = socket();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    VmmClient::new(PacketSocket::from_fd(socket))
}

fn listener(path: &Path) -> OwnedFd {
    let listener = socket();
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    listener
}

/// Starts a VMM that serves `listener`; gives the process and where its log comes out.
fn start(listener: &OwnedFd, isolation: Isolation) -> (Child, std::io::PipeReader) {
    let program = File::open(env!("CARGO_BIN_EXE_basalt-vmm")).unwrap();
    let (output, log) = std::io::pipe().unwrap();
    let arguments = ["basalt-vmm", "--control-fd", "3", "--jail", "--log-level", "debug"];
    let child = spawn(&Launch {
        program: program.as_fd(),
        arguments: &arguments.map(|word| argument(word).unwrap()),
        environment: &[],
        descriptors: &[listener.as_fd()],
        log: log.as_fd(),
        cgroup: None,
        isolation,
        open_files: Some(2048),
        locks_memory: false,
    })
    .unwrap();
    (child, output)
}

fn status(pid: u32, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
        .unwrap();
    line.trim().to_owned()
}

fn serves_in_a_jail(isolation: Isolation) -> String {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let (child, mut log) = start(&listener(&path), isolation);
    let mut driver = connect(&path);
    assert_eq!(driver.info().unwrap().state, VmState::Empty);

    assert_eq!(status(child.pid, "Name"), "basalt-vmm");
    for key in ["CapEff", "CapPrm", "CapBnd"] {
        assert_eq!(u64::from_str_radix(&status(child.pid, key), 16), Ok(0), "{key}");
    }
    assert_eq!(status(child.pid, "Seccomp"), "2");
    assert!(
        status(child.pid, "Uid").split_whitespace().all(|uid| uid != "0"),
        "root outside"
    );
    assert_eq!(fs::read_dir(format!("/proc/{}/root", child.pid)).unwrap().count(), 0);
    // Standard streams, the listener, the driver, and two epolls at most.
    let count = fs::read_dir(format!("/proc/{}/fd", child.pid)).unwrap().count();
    assert!((5..=7).contains(&count), "{count} descriptors");

    driver.stop().unwrap();
    assert_eq!(child.wait().unwrap().exit_status(), Some(0));
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn it_serves_a_driver_in_the_jail_that_its_parent_made() {
    let text = serves_in_a_jail(Isolation::Full(Pool::default().identity(3).unwrap()));
    assert!(!text.contains("own making"), "{text}");
    assert!(text.contains("landlock"), "{text}");
}

#[test]
fn it_makes_a_lesser_jail_for_itself_and_says_so() {
    let text = serves_in_a_jail(Isolation::None);
    assert!(text.contains("own making"), "{text}");
}

#[test]
fn a_jailed_vmm_is_not_told_to_make_a_socket_in_a_file_system_it_will_not_have() {
    for (words, said) in [
        (&["--jail", "--control", "/tmp/x"][..], "--control-fd"),
        (&["--seccomp", "trap", "--control", "/tmp/x"][..], "give both"),
        (
            &["--jail", "--seccomp", "off", "--control-fd", "3"][..],
            "none of kill, trap, log",
        ),
        (&["--memory-fd", "1"][..], "is a standard stream"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_basalt-vmm"))
            .args(words)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(1) && text.contains(said),
            "{words:?}: {text}"
        );
    }
}

#[test]
fn descriptors_that_make_no_sense_together_are_refused() {
    for (words, said) in [
        ("--control-fd 3 --kvm-fd 3", "--kvm-fd 3 was given for something else"),
        ("--control-fd 3 --state-fd 4 --memory-fd 5", "give all of them"),
        ("--control-fd 3 --kvm-fd 4 --state-fd 5", "give all of them"),
        ("--control-fd 3 --kvm-fd 4 --memory-fd 5", "give all of them"),
    ] {
        let script = format!("exec \"$0\" {words} 3</dev/null 4</dev/null 5</dev/null");
        let output = Command::new("sh")
            .args(["-c", &script, env!("CARGO_BIN_EXE_basalt-vmm")])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(1) && text.contains(said),
            "{words}: {text}"
        );
    }
}
