//! The filters of system calls: what is allowed, and what ends the server. Which is which, and why, stands in
//! `seccomp/*.toml`, which the build compiles. Knows no call. `tests/filter.rs` links this file.

use std::io;

/// What is allowed, of instructions of eight bytes.
const ALLOWED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/allowed.bpf"));
/// The same where there are files of devices.
const ALLOWED_WITH_DEVICES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/allowed-with-devices.bpf"));
/// Both where it listens to other machines: it connects to nothing.
const LISTENING: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/allowed-listening.bpf"));
const LISTENING_WITH_DEVICES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/allowed-with-devices-listening.bpf"));
/// What ends the process.
const FATAL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fatal.bpf"));

/// Filters the calls of all threads, and of what they execute, for good. Needs no_new_privs.
///
/// # Errors
/// The kernel has no filters.
pub(crate) fn enter(devices: bool, listens: bool) -> io::Result<()> {
    // The one that lets others pass comes first: the other does not allow seccomp(2).
    install(FATAL)?;
    install(match (devices, listens) {
        (false, false) => ALLOWED,
        (true, false) => ALLOWED_WITH_DEVICES,
        (false, true) => LISTENING,
        (true, true) => LISTENING_WITH_DEVICES,
    })
}

#[allow(unsafe_code, reason = "seccomp(2) takes a pointer to a program")]
fn install(program: &[u8]) -> io::Result<()> {
    let mut instructions: Vec<libc::sock_filter> = program
        .chunks_exact(8)
        .filter_map(|bytes| <[u8; 8]>::try_from(bytes).ok())
        .map(|[a, b, jt, jf, c, d, e, f]| libc::sock_filter {
            code: u16::from_ne_bytes([a, b]),
            jt,
            jf,
            k: u32::from_ne_bytes([c, d, e, f]),
        })
        .collect();
    let program = libc::sock_fprog {
        len: u16::try_from(instructions.len()).map_err(io::Error::other)?,
        filter: instructions.as_mut_ptr(),
    };
    let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
    // SAFETY: 1. the program and its instructions live through the call, and the kernel copies them; 2. the C library's
    // view of its threads does not depend on filters.
    match unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) } {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        thread => Err(io::Error::other(format!("the thread {thread} has filters of its own"))),
    }
}
