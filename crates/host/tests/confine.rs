//! A process that has confined itself tries what it should not be able to do: this program starts itself, in a jail and
//! without one, and judges what comes back. Needs root.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use host::jail::{Isolation, Launch, Pool, argument, spawn};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, Signal};
use rustix::thread::CapabilitySet;

const INSIDE: &str = "--inside";

fn say(name: &str, value: impl std::fmt::Debug) {
    eprintln!("{name}={value:?}");
}

fn kind<T>(result: std::io::Result<T>) -> String {
    result.map_or_else(|error| format!("{:?}", error.raw_os_error()), |_| "ok".to_owned())
}

/// What the confined half does and sees.
fn inside(victim: i32) {
    let before = File::open("/etc/passwd").unwrap();
    let report = host::confine::enter(|| Ok(())).unwrap();
    say("prepared", report.prepared);
    say("landlock", report.landlock.is_some());
    say("open", kind(File::open("/etc/passwd")));
    // landlock has no say in this one.
    say("stat", kind(std::fs::metadata("/etc/passwd")));
    say("root", kind(File::open("/")));
    say("proc", kind(File::open("/proc/self/status")));
    say("create", kind(File::create("/x")));
    say("kvm", kind(File::options().read(true).write(true).open("/dev/kvm")));
    say("exec", kind(Command::new("/bin/true").status()));
    let mut byte = [0];
    say("inherited", kind((&before).read_exact(&mut byte)));
    say(
        "connect",
        kind(
            TcpStream::connect("127.0.0.1:1").map_err(|error| match error.raw_os_error() {
                // A loopback interface that is down, or landlock: never a refusal by a peer that was asked.
                Some(libc::ENETUNREACH | libc::EACCES) => error,
                _ => std::io::Error::other("it reached something"),
            }),
        ),
    );
    let mounted = rustix::mount::mount("x", "/", "tmpfs", MountFlags::empty(), None);
    say("mount", mounted == Err(Errno::PERM));
    say(
        "raw socket",
        rustix::net::socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, None).is_err(),
    );
    let victim = Pid::from_raw(victim).unwrap();
    say("kill", rustix::process::kill_process(victim, Signal::KILL).is_err());
    let sets = rustix::thread::capabilities(None).unwrap();
    say(
        "capabilities",
        (sets.effective | sets.permitted | sets.inheritable).is_empty(),
    );
    let bounded = (0..41).any(|n| {
        rustix::thread::capability_is_in_bounding_set(CapabilitySet::from_bits_retain(1 << n)).unwrap_or(false)
    });
    say("bounding", bounded);
    say("new privileges", !rustix::thread::no_new_privs().unwrap());
    say("dumpable", rustix::process::dumpable_behavior().unwrap());
    say(
        "core",
        rustix::process::getrlimit(rustix::process::Resource::Core).maximum,
    );
    say(
        "host name",
        rustix::system::uname().nodename().to_string_lossy().into_owned(),
    );
}

fn judge(output: &str, prepared: bool) {
    let said: BTreeMap<_, _> = output.lines().filter_map(|line| line.split_once('=')).collect();
    let expect = |name: &str, values: &[&str]| {
        let value = said
            .get(name)
            .unwrap_or_else(|| panic!("nothing was said of {name}:\n{output}"));
        assert!(values.contains(value), "{name} is {value}, not {values:?}:\n{output}");
    };
    // EACCES (13) is landlock's answer, ENOENT (2) the empty root's, EROFS (30) the read-only one's.
    let denied = ["\"Some(13)\"", "\"Some(2)\"", "\"Some(30)\""];
    for name in ["open", "proc", "create", "kvm", "exec"] {
        expect(name, &denied);
    }
    expect("stat", &["\"Some(2)\""]);
    if said["landlock"] == "true" {
        expect("root", &denied);
    }
    expect("connect", &["\"Some(101)\"", "\"Some(13)\""]);
    expect("inherited", &["\"ok\""]);
    expect("prepared", &[if prepared { "true" } else { "false" }]);
    for name in ["mount", "raw socket", "kill", "capabilities"] {
        expect(name, &["true"]);
    }
    for name in ["bounding", "new privileges"] {
        expect(name, &["false"]);
    }
    expect("dumpable", &["NotDumpable"]);
    expect("core", &["Some(0)"]);
    expect("host name", &["\"basalt\""]);
}

fn jailed(arguments: &[CString]) -> String {
    let program = File::open("/proc/self/exe").unwrap();
    let (mut output, log) = std::io::pipe().unwrap();
    let child = spawn(&Launch {
        program: program.as_fd(),
        arguments,
        environment: &[],
        descriptors: &[],
        log: log.as_fd(),
        cgroup: None,
        isolation: Isolation::Full(Pool::default().identity(9).unwrap()),
        open_files: None,
        locks_memory: false,
    })
    .unwrap();
    drop(log);
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().exit_status(), Some(0), "{text}");
    text
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if let [_, mode, victim] = words.as_slice()
        && mode == INSIDE
    {
        return inside(victim.parse().unwrap());
    }
    let mut victim = Command::new("sleep").arg("1000").spawn().unwrap();
    let id = victim.id().to_string();
    let arguments = ["confine", INSIDE, &id].map(|word| argument(word).unwrap());
    let in_a_jail = jailed(&arguments);
    let alone = Command::new("/proc/self/exe")
        .args([INSIDE, &id])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    victim.kill().unwrap();
    victim.wait().unwrap();
    judge(&in_a_jail, true);
    let text = String::from_utf8_lossy(&alone.stderr);
    assert!(alone.status.success(), "{text}");
    judge(&text, false);
    eprintln!("confine: both ways passed\n{in_a_jail}");
}
