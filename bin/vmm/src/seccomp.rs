//! System call filters: one for the whole process, and a narrower one that each thread puts on itself as its first act.
//!
//! What is allowed, and why, stands in `bin/vmm/seccomp/*.toml`; the build compiles that. A thread has its maker's
//! filters too, so those of a driver's devices are made by a thread that has only the process's (`base::thread`). Knows
//! threads by their names alone. `tests/seccomp.rs` links this file.

use std::io;
use std::sync::OnceLock;

/// A compiled filter.
#[derive(Debug)]
pub(crate) struct Filter {
    /// The kind of thread, as its file is called.
    #[allow(
        dead_code,
        reason = "for tests and for messages of either of the two programs that have this file"
    )]
    pub(crate) thread: &'static str,
    /// What names of such threads are before their number.
    pub(crate) names: &'static [&'static str],
    /// Instructions of eight bytes.
    pub(crate) program: &'static [u8],
}

include!(concat!(env!("OUT_DIR"), "/seccomp_table.rs"));

/// What becomes of a thread that makes a call that it must not make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The process dies at once, of SIGSYS; the kernel's audit log says which call it was.
    Kill,
    /// The process says which call it was, then dies: for finding out.
    Trap,
    /// The call is made, and the kernel's audit log says so: for finding out.
    Log,
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "kill" => Ok(Self::Kill),
            "trap" => Ok(Self::Trap),
            "log" => Ok(Self::Log),
            other => Err(format!("`{other}` is none of kill, trap, log")),
        }
    }
}

// linux/seccomp.h
const RET_KILL_PROCESS: u32 = 0x8000_0000;
const RET_TRAP: u32 = 0x0003_0000;
const RET_LOG: u32 = 0x7ffc_0000;

/// `BPF_RET | BPF_K` (linux/bpf_common.h).
const RETURN: u16 = 0x06;

static MODE: OnceLock<Mode> = OnceLock::new();

/// Filters the process, the calling thread as its `main`, and from now on each thread that is started.
///
/// # Errors
/// The kernel has no seccomp filters, or this was called before.
pub(crate) fn enter(mode: Mode) -> io::Result<()> {
    MODE.set(mode)
        .map_err(|_| io::Error::other("filters were installed before"))?;
    if mode == Mode::Trap {
        trap::install()?;
    }
    install(PROCESS, mode)?;
    base::thread::begin_with(first)?;
    install(find("main").map_or(&[][..], |filter| filter.program), mode)
}

/// The filter of a thread of this name.
pub(crate) fn find(name: &str) -> Option<&'static Filter> {
    let is_one = |prefix: &&str| {
        let number = name.strip_prefix(*prefix);
        number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    TABLE.iter().find(|filter| filter.names.iter().any(is_one))
}

/// What makes threads, and so must be able to do what any of them does: it keeps the process's filter alone.
const FACTORY: &str = "threads";

/// The same for threads that serve files. It was made before there were filters.
const PRIVILEGED_FACTORY: &str = base::thread::PRIVILEGED_FACTORY_NAME;

/// A thread that cannot be confined must not run, and nobody is there to be told: the process ends.
fn first(name: &str) {
    if name == FACTORY {
        return;
    }
    let mode = MODE.get().copied().unwrap_or(Mode::Kill);
    let installed = match find(name) {
        None if name == PRIVILEGED_FACTORY => install(PROCESS, mode),
        Some(filter) => install(filter.program, mode),
        None => Err(io::Error::other("no file in bin/vmm/seccomp names it")),
    };
    if let Err(error) = installed {
        log::error!("the thread `{name}` has no filter: {error}");
        std::process::abort();
    }
}

/// Puts a filter on the calling thread.
#[allow(unsafe_code, reason = "seccomp(2) takes a pointer to a program")]
fn install(program: &[u8], mode: Mode) -> io::Result<()> {
    let mut instructions: Vec<libc::sock_filter> = program
        .chunks_exact(8)
        .filter_map(|bytes| <[u8; 8]>::try_from(bytes).ok())
        .map(|bytes| instruction(bytes, mode))
        .collect();
    let length = u16::try_from(instructions.len()).map_err(|_| io::Error::other("a filter is too long"))?;
    let program = libc::sock_fprog {
        len: length,
        filter: instructions.as_mut_ptr(),
    };
    // SAFETY: 1. the program and its instructions live through the call, and the kernel copies them; 2. the C library's
    // view of this thread does not depend on its filters.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn instruction([a, b, jt, jf, c, d, e, f]: [u8; 8], mode: Mode) -> libc::sock_filter {
    let code = u16::from_ne_bytes([a, b]);
    let k = u32::from_ne_bytes([c, d, e, f]);
    let k = match mode {
        Mode::Trap if code == RETURN && k == RET_KILL_PROCESS => RET_TRAP,
        Mode::Log if code == RETURN && k == RET_KILL_PROCESS => RET_LOG,
        _ => k,
    };
    libc::sock_filter { code, jt, jf, k }
}

/// Says which call a thread died of.
#[allow(unsafe_code, reason = "a handler of a signal")]
mod trap {
    use std::io::{self, Write};

    /// Where `siginfo_t` of a SIGSYS has the call's number (sigaction(2)), in units of four bytes: after signal, error,
    /// code, padding and the address.
    const CALL: usize = 6;

    extern "C" fn report(_: libc::c_int, info: *const libc::siginfo_t, _: *const libc::c_void) {
        // SAFETY: the kernel gives a whole siginfo_t, which is larger and aligned to eight.
        let place = unsafe { info.cast::<i32>().add(CALL) };
        // SAFETY: any four bytes are a number.
        let call = unsafe { place.read() };
        // No lock and no allocation: the buffer is on the stack.
        let mut line = [0_u8; 96];
        let mut rest = &mut line[..];
        let written = writeln!(
            rest,
            "basalt-vmm: a thread made system call {call}, which its filter forbids"
        );
        let length = 96 - rest.len();
        if written.is_ok() {
            // SAFETY: the bytes live through the call. What cannot be told is lost.
            let _ = unsafe { libc::write(2, line.as_ptr().cast(), length) };
        }
        // SAFETY: takes a number and does not return.
        unsafe { libc::_exit(128 + libc::SIGSYS) };
    }

    pub(super) fn install() -> io::Result<()> {
        // SAFETY: a zeroed sigaction is a valid one: no flags, empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_flags = libc::SA_SIGINFO;
        action.sa_sigaction = report as extern "C" fn(_, _, _) as usize;
        // SAFETY: 1. `action` lives through the call; 2. the handler makes async-signal-safe calls only.
        match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
