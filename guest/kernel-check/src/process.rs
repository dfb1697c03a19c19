//! Checks of system calls, namespaces, security and BPF. Knows nothing of file systems and networks.

use crate::Check;
use crate::files::contains;
use crate::syscall::Arg::{In, Num, Out};
use crate::syscall::{address, address_mut, call};
use std::io;

pub(crate) const CHECKS: &[Check] = &[
    ("namespaces", namespaces),
    ("io_uring", || {
        call(libc::SYS_io_uring_setup, [Num(8), Out(&mut [0; 120])]).map(drop)
    }),
    ("aio", || call(libc::SYS_io_setup, [Num(8), Out(&mut [0; 8])]).map(drop)),
    ("epoll", || call(libc::SYS_epoll_create1, [Num(0)]).map(drop)),
    ("eventfd", || call(libc::SYS_eventfd2, [Num(0), Num(0)]).map(drop)),
    ("timerfd", || call(libc::SYS_timerfd_create, [Num(1), Num(0)]).map(drop)),
    ("inotify", || call(libc::SYS_inotify_init1, [Num(0)]).map(drop)),
    ("fanotify", || {
        call(
            libc::SYS_fanotify_init,
            [Num(u64::from(libc::FAN_CLASS_CONTENT)), Num(0)],
        )
        .map(drop)
    }),
    ("userfaultfd", || call(libc::SYS_userfaultfd, [Num(0)]).map(drop)),
    ("memfd", || {
        call(libc::SYS_memfd_create, [In(b"check\0"), Num(0)]).map(drop)
    }),
    ("pidfd", || {
        call(libc::SYS_pidfd_open, [Num(u64::from(std::process::id())), Num(0)]).map(drop)
    }),
    ("mq_open", || {
        call(libc::SYS_mq_open, [In(b"check\0"), Num(0o102), Num(0o600), Num(0)]).map(drop)
    }),
    ("shmget", || {
        call(libc::SYS_shmget, [Num(0), Num(4096), Num(0o600)]).map(drop)
    }),
    ("msgget", || call(libc::SYS_msgget, [Num(0), Num(0o600)]).map(drop)),
    ("semget", || {
        call(libc::SYS_semget, [Num(0), Num(1), Num(0o600)]).map(drop)
    }),
    ("membarrier", membarrier),
    ("ptrace", || call(libc::SYS_ptrace, [Num(0)]).map(drop)),
    ("process_vm_readv", process_vm_readv),
    ("kcmp", kcmp),
    ("perf_event_open", perf_event_open),
    ("seccomp filter", seccomp),
    ("Landlock", || {
        call(libc::SYS_landlock_create_ruleset, [Num(0), Num(0), Num(1)]).map(drop)
    }),
    ("session keyring", || call(libc::SYS_keyctl, [Num(1), Num(0)]).map(drop)),
    ("BPF map", bpf_map),
    ("BPF program: socket filter", || bpf_program(1, 0)),
    ("BPF program: traffic control", || bpf_program(3, 0)),
    ("BPF program: XDP", || bpf_program(6, 0)),
    ("BPF program: cgroup socket buffers", || bpf_program(8, 0)),
    ("BPF program: cgroup devices", || bpf_program(15, 0)),
    ("BPF just-in-time compiler", || {
        contains("/proc/sys/net/core/bpf_jit_enable", "1")
    }),
];

/// All at once, as a rootless container does it.
fn namespaces() -> io::Result<()> {
    let flags = [
        libc::CLONE_NEWUSER,
        libc::CLONE_NEWNS,
        libc::CLONE_NEWCGROUP,
        libc::CLONE_NEWUTS,
        libc::CLONE_NEWIPC,
        libc::CLONE_NEWPID,
        libc::CLONE_NEWNET,
        libc::CLONE_NEWTIME,
    ];
    let all = flags.into_iter().fold(0_u32, |all, flag| all | flag.cast_unsigned());
    call(libc::SYS_unshare, [Num(u64::from(all))]).map(drop)
}

fn membarrier() -> io::Result<()> {
    // MEMBARRIER_CMD_QUERY answers with the set of commands.
    match call(libc::SYS_membarrier, [Num(0), Num(0), Num(0)])? {
        0 => Err(io::Error::other("no command is supported")),
        _ => Ok(()),
    }
}

fn process_vm_readv() -> io::Result<()> {
    let (from, mut to) = (*b"eight by", [0_u8; 8]);
    let vector = |start: [u8; 8]| [start, 8_u64.to_ne_bytes()].concat();
    let (remote, local) = (vector(address(&from)), vector(address_mut(&mut to)));
    let own = u64::from(std::process::id());
    let read = call(
        libc::SYS_process_vm_readv,
        [Num(own), In(&local), Num(1), In(&remote), Num(1), Num(0)],
    )?;
    // The kernel wrote through the vector; the compiler must not assume the zeros.
    let seen = std::hint::black_box(to);
    if read == 8 && seen == from {
        Ok(())
    } else {
        Err(io::Error::other(format!("read {read} bytes: {seen:?}")))
    }
}

fn kcmp() -> io::Result<()> {
    let own = u64::from(std::process::id());
    // KCMP_FILE: standard output is standard output.
    match call(libc::SYS_kcmp, [Num(own), Num(own), Num(0), Num(1), Num(1)])? {
        0 => Ok(()),
        other => Err(io::Error::other(format!("a file differs from itself: {other}"))),
    }
}

fn perf_event_open() -> io::Result<()> {
    // perf_event_attr: type PERF_TYPE_SOFTWARE, size, config PERF_COUNT_SW_CPU_CLOCK (0).
    let mut attributes = [0_u8; 128];
    attributes[0] = 1;
    attributes[4] = 128;
    call(
        libc::SYS_perf_event_open,
        [In(&attributes), Num(0), Num(u64::MAX), Num(u64::MAX), Num(0)],
    )
    .map(drop)
}

fn seccomp() -> io::Result<()> {
    // SECCOMP_GET_ACTION_AVAIL of SECCOMP_RET_KILL_PROCESS and SECCOMP_RET_USER_NOTIF: only kernels with filters know it.
    for action in [0x8000_0000_u32, 0x7fc0_0000] {
        call(libc::SYS_seccomp, [Num(2), Num(0), In(&action.to_ne_bytes())])?;
    }
    Ok(())
}

fn bpf_map() -> io::Result<()> {
    // bpf_attr for BPF_MAP_CREATE: type BPF_MAP_TYPE_HASH, key 4, value 8, 16 entries.
    let attributes: Vec<u8> = [1_u32, 4, 8, 16].into_iter().flat_map(u32::to_ne_bytes).collect();
    call(libc::SYS_bpf, [Num(0), In(&attributes), Num(16)]).map(drop)
}

/// Loads "return `value`" as a program of type `kind`.
fn bpf_program(kind: u32, value: i32) -> io::Result<()> {
    let mut code = vec![0xb7, 0, 0, 0]; // r0 = immediate
    code.extend(value.to_ne_bytes());
    code.extend([0x95, 0, 0, 0, 0, 0, 0, 0]); // exit
    let license = b"GPL\0";
    let mut attributes = [kind.to_ne_bytes(), 2_u32.to_ne_bytes()].concat();
    attributes.extend(address(&code));
    attributes.extend(address(license));
    attributes.resize(48, 0);
    call(libc::SYS_bpf, [Num(5), In(&attributes), Num(48)]).map(drop)
}
