//! A process with the server's filters makes calls that it must not make: this program starts itself, once for each, and judges what
//! becomes of it. The same without filters shows that the answer is theirs.
#![allow(unsafe_code, reason = "system calls that no library makes")]

use std::arch::asm;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;

#[path = "../src/confine/filter.rs"]
mod filter;

use libc::c_long;

/// Calls that end the process, whatever their arguments are; here they have such that do nothing, should a filter let one through.
const FATAL: &[(&str, c_long)] = &[
    ("mount", libc::SYS_mount),
    ("umount2", libc::SYS_umount2),
    ("pivot_root", libc::SYS_pivot_root),
    ("chroot", libc::SYS_chroot),
    ("move_mount", libc::SYS_move_mount),
    ("open_tree", libc::SYS_open_tree),
    ("fsopen", libc::SYS_fsopen),
    ("fsconfig", libc::SYS_fsconfig),
    ("fsmount", libc::SYS_fsmount),
    ("fspick", libc::SYS_fspick),
    ("mount_setattr", libc::SYS_mount_setattr),
    ("unshare", libc::SYS_unshare),
    ("setns", libc::SYS_setns),
    ("ptrace", libc::SYS_ptrace),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("process_vm_writev", libc::SYS_process_vm_writev),
    ("process_madvise", libc::SYS_process_madvise),
    ("kcmp", libc::SYS_kcmp),
    ("pidfd_getfd", libc::SYS_pidfd_getfd),
    ("bpf", libc::SYS_bpf),
    ("perf_event_open", libc::SYS_perf_event_open),
    ("userfaultfd", libc::SYS_userfaultfd),
    ("io_uring_setup", libc::SYS_io_uring_setup),
    ("io_uring_enter", libc::SYS_io_uring_enter),
    ("io_uring_register", libc::SYS_io_uring_register),
    ("add_key", libc::SYS_add_key),
    ("request_key", libc::SYS_request_key),
    ("keyctl", libc::SYS_keyctl),
    ("open_by_handle_at", libc::SYS_open_by_handle_at),
    ("name_to_handle_at", libc::SYS_name_to_handle_at),
    ("init_module", libc::SYS_init_module),
    ("finit_module", libc::SYS_finit_module),
    ("delete_module", libc::SYS_delete_module),
    ("kexec_load", libc::SYS_kexec_load),
    ("kexec_file_load", libc::SYS_kexec_file_load),
    ("reboot", libc::SYS_reboot),
    ("settimeofday", libc::SYS_settimeofday),
    ("clock_settime", libc::SYS_clock_settime),
    ("clock_adjtime", libc::SYS_clock_adjtime),
    ("adjtimex", libc::SYS_adjtimex),
    ("sethostname", libc::SYS_sethostname),
    ("setdomainname", libc::SYS_setdomainname),
    ("swapon", libc::SYS_swapon),
    ("swapoff", libc::SYS_swapoff),
    ("acct", libc::SYS_acct),
    ("quotactl", libc::SYS_quotactl),
    ("syslog", libc::SYS_syslog),
    ("vhangup", libc::SYS_vhangup),
    ("iopl", libc::SYS_iopl),
    ("ioperm", libc::SYS_ioperm),
    ("modify_ldt", libc::SYS_modify_ldt),
    ("personality", libc::SYS_personality),
];

const NOWHERE: usize = usize::MAX;
const SIGCHLD: usize = libc::SIGCHLD.cast_unsigned() as usize;
const UNIX: usize = libc::AF_UNIX.cast_unsigned() as usize;
const SEQPACKET: usize = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC).cast_unsigned() as usize;

/// What one call is: its name here, its number and arguments.
type Deed = (&'static str, c_long, [usize; 4]);

/// Calls that fail as if the kernel did not have them, with arguments by which they do nothing otherwise.
const REFUSED: &[Deed] = &[
    ("thread by clone3", libc::SYS_clone3, [0, 0, 0, 0]),
    ("internet socket", libc::SYS_socket, [2, 1, 0, 0]),
    ("packet socket", libc::SYS_socket, [17, 3, 0, 0]),
    ("netlink socket", libc::SYS_socket, [16, 3, 0, 0]),
    ("datagram socket", libc::SYS_socket, [UNIX, 2, 0, 0]),
    ("pair of datagram sockets", libc::SYS_socketpair, [UNIX, 2, 0, 0]),
    ("name of a socket", libc::SYS_bind, [NOWHERE, 0, 0, 0]),
    ("listening", libc::SYS_listen, [NOWHERE, 1, 0, 0]),
    // SO_PASSCRED, by which a socket gets a name.
    ("credentials", libc::SYS_setsockopt, [NOWHERE, 1, 16, 0]),
    // MSG_FASTOPEN, which connects.
    (
        "sending with a connection",
        libc::SYS_sendto,
        [NOWHERE, 0, 0, 0x2000_0000],
    ),
    (
        "a message with a connection",
        libc::SYS_sendmsg,
        [NOWHERE, 0, 0x2000_0000, 0],
    ),
    // TCP_CONGESTION.
    (
        "how a connection is controlled",
        libc::SYS_setsockopt,
        [NOWHERE, 6, 13, 0],
    ),
    // TIOCSTI.
    ("terminal", libc::SYS_ioctl, [NOWHERE, 0x5412, 0, 0]),
    // PR_SET_DUMPABLE.
    ("dumpable", libc::SYS_prctl, [4, 0, 0, 0]),
    // F_SETOWN: whom a signal goes to.
    ("signals of a file", libc::SYS_fcntl, [NOWHERE, 8, 0, 0]),
    ("limits of another", libc::SYS_prlimit64, [1 << 20, 0, 0, 0]),
    ("device node", libc::SYS_mknodat, [NOWHERE, 0, 0, 0]),
    ("another filter", libc::SYS_seccomp, [NOWHERE, 0, 0, 0]),
    ("user", libc::SYS_setresuid, [NOWHERE, NOWHERE, NOWHERE, 0]),
    ("signal", libc::SYS_kill, [1 << 22, 0, 0, 0]),
    ("link", libc::SYS_linkat, [NOWHERE, 0, NOWHERE, 0]),
];

/// Calls that are let through: those that a back end makes, with the like of which the others are told apart.
const ALLOWED: &[Deed] = &[
    ("nothing", libc::SYS_getpid, [0, 0, 0, 0]),
    ("process", libc::SYS_clone, [SIGCHLD, 0, 0, 0]),
    ("unix socket", libc::SYS_socket, [UNIX, SEQPACKET, 0, 0]),
    ("unix stream", libc::SYS_socket, [UNIX, 1, 0, 0]),
    // TCP_USER_TIMEOUT, SO_RCVTIMEO_NEW.
    ("a machine that is silent", libc::SYS_setsockopt, [NOWHERE, 6, 18, 0]),
    ("a client that is silent", libc::SYS_setsockopt, [NOWHERE, 1, 66, 0]),
    // TCGETS.
    ("is it a terminal", libc::SYS_ioctl, [NOWHERE, 0x5401, 0, 0]),
    ("descriptors", libc::SYS_fcntl, [1, 1, 0, 0]),
    ("own limits", libc::SYS_prlimit64, [0, 7, 0, 0]),
];

/// What is let through but where it listens to other machines.
const CONNECTS: Deed = ("connection", libc::SYS_connect, [NOWHERE, 0, 0, 0]);

/// A request that is none of the server's, where it has files of devices.
const REQUEST: Deed = ("request to a device", libc::SYS_ioctl, [NOWHERE, 0x4680, 0, 0]);

/// Namespaces that clone(2) makes; in linux/sched.h `CLONE_NEWNS` and so on.
const NAMESPACES: [usize; 7] = [
    0x2_0000,
    0x200_0000,
    0x400_0000,
    0x800_0000,
    0x1000_0000,
    0x2000_0000,
    0x4000_0000,
];

fn call(number: c_long, [a, b, c, d]: [usize; 4]) -> c_long {
    // SAFETY: 1. arguments are numbers, or pointers to nothing, which the kernel looks at before it uses them; 2. a child that is born
    // here goes on with a copy of all memory, and is one thread, as its parent is.
    let result = unsafe { libc::syscall(number, a, b, c, d) };
    match result {
        // A child has nothing to say.
        // SAFETY: takes a number and does not return.
        0 if number == libc::SYS_clone => unsafe { libc::_exit(0) },
        -1 => -c_long::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        result => result,
    }
}

/// What an old program would do: getpid(2) by the call gate of 32-bit programs.
fn old_call() {
    let mut _number = 20_i64;
    // SAFETY: the instruction changes rax and flags, and r8 to r11 on some kernels; all are declared.
    unsafe {
        asm!("int 0x80", inlateout("rax") _number, lateout("r8") _, lateout("r9") _, lateout("r10") _, lateout("r11") _);
    }
}

fn commit(deed: &str) -> c_long {
    if deed == "old call" {
        old_call();
        return 0;
    }
    if let Some(&(_, number)) = FATAL.iter().find(|(name, _)| *name == deed) {
        return call(number, [NOWHERE; 4]);
    }
    if let Some(flag) = deed.strip_prefix("namespace ") {
        return call(libc::SYS_clone, [flag.parse::<usize>().unwrap() | SIGCHLD, 0, 0, 0]);
    }
    let all = REFUSED.iter().chain(ALLOWED).chain([&REQUEST, &CONNECTS]);
    let (_, number, arguments) = all.into_iter().find(|(name, ..)| *name == deed).unwrap();
    call(*number, *arguments)
}

/// Says what a call returned, of a thread that was there before the filters, as if a library had made it.
fn inside(mode: &str, deed: &str) {
    let (deed, mode) = (deed.to_owned(), mode.to_owned());
    if deed == "process" || deed.starts_with("namespace") {
        // A child must have this thread's memory alone.
        filter_by(&mode);
        return say(commit(&deed));
    }
    let (go, wait) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        wait.recv().unwrap();
        say(commit(&deed));
    });
    filter_by(&mode);
    go.send(()).unwrap();
    thread.join().unwrap();
}

fn filter_by(mode: &str) {
    rustix::thread::set_no_new_privs(true).unwrap();
    match mode {
        "free" => {}
        "devices" => filter::enter(true, false).unwrap(),
        "filtered" => filter::enter(false, false).unwrap(),
        "listening" => filter::enter(false, true).unwrap(),
        "listening with devices" => filter::enter(true, true).unwrap(),
        other => panic!("there is no mode {other}"),
    }
}

fn say(result: c_long) {
    eprintln!("returned {result}");
}

fn run(mode: &str, deed: &str) -> Output {
    let mut command = Command::new("/proc/self/exe");
    command.args([mode, deed]).stdin(Stdio::null()).output().unwrap()
}

/// What the call returned.
fn returned(mode: &str, deed: &str) -> c_long {
    let output = run(mode, deed);
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find_map(|line| line.strip_prefix("returned "));
    line.unwrap_or_else(|| panic!("{mode} {deed}: {} {text}", output.status))
        .parse()
        .unwrap()
}

fn ends(deed: &str) {
    let output = run("filtered", deed);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        output.status.signal(),
        Some(libc::SIGSYS),
        "{deed}: {} {text}",
        output.status
    );
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if let [_, mode, deed] = words.as_slice() {
        return inside(mode, deed);
    }
    let no_such_call = -c_long::from(libc::ENOSYS);
    for (name, _) in FATAL {
        ends(name);
    }
    for flag in NAMESPACES {
        ends(&format!("namespace {flag}"));
    }
    // Kernels without 32-bit programs have their own answer.
    let old = run("filtered", "old call").status.signal();
    assert!([Some(libc::SIGSYS), Some(libc::SIGSEGV)].contains(&old), "{old:?}");
    for (name, ..) in REFUSED {
        assert_eq!(returned("filtered", name), no_such_call, "{name}");
        assert_eq!(returned("devices", name) == no_such_call, *name != "terminal", "{name}");
        assert_ne!(
            returned("free", name),
            no_such_call,
            "{name}: this kernel does not have it"
        );
    }
    for (name, ..) in ALLOWED {
        let (result, free) = (returned("filtered", name), returned("free", name));
        assert_eq!(result.signum(), free.signum(), "{name}: {result} and {free}");
        assert_ne!(result, no_such_call, "{name}");
    }
    for (mode, is_refused) in [
        ("filtered", false),
        ("devices", false),
        ("listening", true),
        ("listening with devices", true),
    ] {
        assert_eq!(returned(mode, CONNECTS.0) == no_such_call, is_refused, "{mode}");
    }
    assert_eq!(returned("filtered", REQUEST.0), no_such_call);
    assert_eq!(returned("devices", REQUEST.0), -c_long::from(libc::EBADF));
    let ended = FATAL.len() + NAMESPACES.len() + 1;
    eprintln!(
        "filter: {ended} calls end the process, {} fail, {} pass",
        REFUSED.len(),
        ALLOWED.len()
    );
}
