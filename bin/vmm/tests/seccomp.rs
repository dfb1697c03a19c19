//! Every kind of thread tries what it must not do, and the process dies of it: this program starts itself, confines itself
//! with the very filters of the product, and judges how it ended. Needs neither KVM nor root.

#[path = "../src/seccomp.rs"]
mod seccomp;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

use seccomp::{Mode, TABLE};
use virtio::DeviceWorker;

/// What each kind of thread must not do, and what it may: `nothing`, and to take away the handlers of the signals of which it dies.
const DEEDS: [&str; 11] = [
    "nothing",
    "die",
    "handle",
    "open",
    "socket",
    "connect",
    "exec",
    "fork",
    "terminal",
    "executable",
    "ptrace",
];

/// Requests to KVM that are for functions of the host's, by name and number (`seccomp/constants.toml`), and the kinds of threads that may
/// make them: building a machine is main's, and what a guest causes its vCPUs'.
const OF_FUNCTIONS: [(&str, usize, &[&str]); 5] = [
    ("KVM_SET_GSI_ROUTING", 0x4008_ae6a, &["vcpu", "main"]),
    ("KVM_IRQFD", 0x4020_ae76, &["vcpu", "main"]),
    ("KVM_SET_USER_MEMORY_REGION", 0x4020_ae46, &["vcpu", "main"]),
    ("KVM_CREATE_DEVICE", 0xc00c_aee0, &["main"]),
    ("KVM_SET_DEVICE_ATTR", 0x4018_aee1, &["main"]),
];

/// Requests to basalt.ko about frozen servers, in the same way: a vCPU's own thread makes them.
const OF_SERVERS: [(&str, usize, &[&str]); 2] = [
    ("BASALT_FREEZE", 0x4020_ba39, &["vcpu"]),
    ("BASALT_LINK", 0x4020_ba3a, &["vcpu"]),
];

/// Ways in which set_mempolicy(2) says from which nodes a thread's pages come, by name and number (linux/mempolicy.h), and the kinds of threads
/// that may.
const POLICIES: [(&str, usize, &[&str]); 2] = [("MPOL_PREFERRED", 1, &["dma-zero"]), ("MPOL_BIND", 2, &[])];

/// Not for vCPUs (`seccomp/constants.toml`).
const VFIO_IOMMU_UNMAP_DMA: usize = 0x3b72;

/// Asks the kernel directly: neither library nor compiler stands between.
#[allow(unsafe_code, reason = "forbidden calls are made as bare numbers")]
fn call(number: libc::c_long, arguments: [usize; 4]) {
    let [a, b, c, d] = arguments;
    // SAFETY: these calls are given null or a C string, or an anonymous mapping that nobody uses.
    unsafe { libc::syscall(number, a, b, c, d, usize::MAX, 0) };
}

/// Asks for a signal's handler, to which the filter is what it is to a new one.
fn handler(signal: libc::c_int) {
    let signal = usize::try_from(signal).unwrap();
    call(libc::SYS_rt_sigaction, [signal, 0, 0, 8]);
}

fn commit(deed: &str) {
    let path = c"/".as_ptr() as usize;
    match deed {
        "nothing" => (),
        // As musl's abort() does, and Rust's handler of faults; that of another signal is nobody's.
        "die" => [libc::SIGABRT, libc::SIGBUS, libc::SIGSEGV]
            .into_iter()
            .for_each(handler),
        "handle" => handler(libc::SIGTERM),
        "open" => call(libc::SYS_openat, [usize::MAX, path, 0, 0]),
        "socket" => call(libc::SYS_socket, [2, 1, 0, 0]),
        "connect" => call(libc::SYS_connect, [0, 0, 0, 0]),
        "exec" => call(libc::SYS_execve, [path, 0, 0, 0]),
        // CLONE_VFORK and no flag of a thread.
        "fork" => call(libc::SYS_clone, [0x4000, 0, 0, 0]),
        // TIOCSTI: an ioctl, but none of ours.
        "terminal" => call(libc::SYS_ioctl, [0, 0x5412, path, 0]),
        // PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS.
        "executable" => call(libc::SYS_mmap, [0, 4096, 5, 0x22]),
        "ptrace" => call(libc::SYS_ptrace, [0, 0, 0, 0]),
        "reset" => {
            let mut device: DeviceWorker<u32, ()> = DeviceWorker::Idle(0);
            let unmap = |unmapped: &mut u32| {
                call(libc::SYS_ioctl, [usize::MAX, VFIO_IOMMU_UNMAP_DMA, 0, 0]);
                *unmapped += 1;
            };
            device.work("iommu", unmap).unwrap();
            assert!(matches!(device, DeviceWorker::Idle(1)), "{device:?}");
        }
        other => {
            let number = |table: &[(&str, usize, &[&str])]| {
                let found = table.iter().find(|(name, ..)| *name == other);
                found.map(|(_, number, _)| *number)
            };
            match (number(&OF_FUNCTIONS).or(number(&OF_SERVERS)), number(&POLICIES)) {
                // Of no descriptor: it fails, where it is allowed.
                (Some(request), _) => call(libc::SYS_ioctl, [usize::MAX, request, 0, 0]),
                // Of no node: the thread has its default, or it fails.
                (None, Some(mode)) => call(libc::SYS_set_mempolicy, [mode, 0, 0, 0]),
                (None, None) => panic!("there is no deed {other}"),
            }
        }
    }
}

/// Commits the deed on a thread of this kind, made the way the product makes it.
fn on_thread(kind: &str, deed: &'static str) {
    let stack = 256 << 10;
    let scoped = |name: &str| {
        std::thread::scope(|scope| {
            let thread = base::thread::spawn_scoped(scope, name, stack, || commit(deed)).unwrap();
            thread.join().unwrap();
        });
    };
    match kind {
        "main" => commit(deed),
        "loader" => scoped("loader"),
        "block-io" => {
            let inner = move || {
                std::thread::scope(|scope| {
                    base::thread::spawn_scoped(scope, "block-io", stack, || commit(deed))
                        .unwrap()
                        .join()
                        .unwrap();
                });
            };
            base::thread::spawn("block-q0", stack, inner).unwrap().join().unwrap();
        }
        _ => {
            let names = TABLE
                .iter()
                .find(|filter| filter.thread == kind)
                .map(|filter| filter.names);
            let name = format!("{}7", names.map_or(kind, |names| names[0]));
            base::thread::spawn(&name, stack, move || commit(deed))
                .unwrap()
                .join()
                .unwrap();
        }
    }
}

fn inside(mode: &str, kind: &str, deed: &str) {
    let requests = OF_FUNCTIONS.into_iter().chain(OF_SERVERS).chain(POLICIES);
    let requests = requests.map(|(name, ..)| name);
    let known = DEEDS.into_iter().chain(requests).chain(["reset"]);
    let deed = known.into_iter().find(|known| *known == deed).unwrap();
    rustix::thread::set_no_new_privs(true).unwrap();
    seccomp::enter(mode.parse::<Mode>().unwrap()).unwrap();
    on_thread(kind, deed);
    eprintln!("survived");
}

fn run(mode: &str, kind: &str, deed: &str) -> Output {
    let mut command = Command::new("/proc/self/exe");
    command.args([mode, kind, deed]).stdin(Stdio::null());
    command.output().unwrap()
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if let [_, mode, kind, deed] = words.as_slice() {
        return inside(mode, kind, deed);
    }
    for filter in TABLE {
        for deed in DEEDS {
            if (filter.thread, deed) == ("fs", "open") {
                // The one kind of thread that may: beneath its directory, which is landlock's affair.
                continue;
            }
            let output = run("kill", filter.thread, deed);
            let text = String::from_utf8_lossy(&output.stderr);
            if ["nothing", "die"].contains(&deed) {
                assert!(
                    output.status.success() && text.contains("survived"),
                    "{} {}: {text}",
                    filter.thread,
                    output.status
                );
            } else {
                let signal = output.status.signal();
                assert_eq!(
                    signal,
                    Some(libc::SIGSYS),
                    "{} {deed}: {} {text}",
                    filter.thread,
                    output.status
                );
            }
        }
    }
    requests();
    resets();
    // The other modes say what it was, or let it be.
    let trapped = run("trap", "vsock", "open");
    assert_eq!(trapped.status.code(), Some(128 + libc::SIGSYS));
    let said = format!("system call {},", libc::SYS_openat);
    assert!(String::from_utf8_lossy(&trapped.stderr).contains(&said), "{trapped:?}");
    assert!(run("log", "vsock", "open").status.success());
    // A thread that no file names is not started unfiltered.
    let unknown = run("kill", "unknown", "nothing");
    // It aborts; how glibc does that is forbidden to it.
    assert!(
        [Some(libc::SIGABRT), Some(libc::SIGSYS)].contains(&unknown.status.signal()),
        "{unknown:?}"
    );
    names();
    eprintln!(
        "seccomp: {} kinds of threads died of {} deeds each",
        TABLE.len(),
        DEEDS.len() - 2
    );
}

/// What is needed for functions of the host's, for servers, and of the nodes of its memory, only those threads may ask that have to.
fn requests() {
    for filter in TABLE {
        for (name, _, allowed) in OF_FUNCTIONS.into_iter().chain(OF_SERVERS).chain(POLICIES) {
            let output = run("kill", filter.thread, name);
            let expected = match allowed.contains(&filter.thread) {
                true => None,
                false => Some(libc::SIGSYS),
            };
            let text = String::from_utf8_lossy(&output.stderr);
            let (thread, status) = (filter.thread, output.status);
            assert_eq!(status.signal(), expected, "{thread} {name}: {status} {text}");
            assert_eq!(status.success(), expected.is_none(), "{thread} {name}: {status} {text}");
        }
    }
}

/// A vCPU whose guest resets a device has what is left of that done by a thread with the rights of the device's.
fn resets() {
    let output = run("kill", "vcpu", "reset");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("survived"),
        "{} {text}",
        output.status
    );
}

/// Names are found by prefix and number.
fn names() {
    let kind = |name: &str| seccomp::find(name).map(|filter| filter.thread);
    assert_eq!(kind("vcpu12"), Some("vcpu"));
    assert_eq!(kind("block-q0"), Some("block"));
    assert_eq!(kind("block-io"), Some("block-io"));
    assert_eq!(kind("vcpu-x"), None);
    assert_eq!(kind("block-queue"), None);
}
